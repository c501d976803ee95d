"""Exact sums of float64 terms, one sum for each group; no order and no cut of the terms changes a bit."""

from fractions import Fraction

import numpy as np
from jaxtyping import Float64, Int

_LIMB_BITS = 26
_LIMBS_OF_A_TERM = 3  # 53 bits, wherever they start in the first
_MAX_TERMS = 2**36  # of a group: 2**36 * 2**26 < 2**63
_AT_ONCE = 2**20  # sums of that many limbs stay below 2**53, where bincount's float64 is exact


class GroupSums:
    """sums[g] = the exact sum of all terms added to group g.

    A term is cut into integers of 26 bits at fixed places, value = sum of limb * 2**(26 * place), and each place is
    summed in int64. A group holds up to 2**36 terms.

    >>> sums = GroupSums(2)
    >>> sums.add(np.array([1e100, 1.0, -1e100, 0.5]), np.array([0, 0, 0, 1]))
    >>> sums.floats()
    array([1. , 0.5])
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._places: dict[int, Int[np.ndarray, " groups"]] = {}
        self._num_terms = 0

    def add(self, terms: Float64[np.ndarray, " n"], groups: Int[np.ndarray, " n"] | None = None) -> None:
        """Add each term to its group; without groups, all to group 0.

        Raises:
            ValueError: if a term is infinite or NaN.
        """
        if not np.isfinite(terms).all():
            raise ValueError("GroupSums: terms holds an infinity or a NaN, needed finite numbers")
        groups = np.zeros(terms.shape, np.intp) if groups is None else groups
        for start in range(0, terms.size, _AT_ONCE):
            self._add_piece(terms[start : start + _AT_ONCE], groups[start : start + _AT_ONCE])

    def _add_piece(self, terms: np.ndarray, groups: np.ndarray) -> None:
        self._num_terms += terms.size
        assert self._num_terms <= _MAX_TERMS * max(self.num_groups, 1)
        _, exponent = np.frexp(terms)  # |term| < 2**exponent
        place = np.floor_divide(exponent - 1, _LIMB_BITS)
        rest = terms
        for _ in range(_LIMBS_OF_A_TERM):
            with np.errstate(under="ignore"):  # below 2**-1074 a term has no bits
                limb = np.trunc(np.ldexp(rest, -_LIMB_BITS * place))
                rest = rest - np.ldexp(limb, _LIMB_BITS * place)
            lowest, highest = (int(place.min()), int(place.max())) if place.size else (0, -1)
            num_places = highest - lowest + 1
            index = (place - lowest) * self.num_groups + groups
            sums = np.bincount(index, weights=limb, minlength=num_places * self.num_groups)
            for i, of_groups in enumerate(sums.astype(np.int64).reshape(num_places, self.num_groups)):
                self._accumulate(lowest + i, of_groups)
            place = place - 1

    def _accumulate(self, place: int, of_groups: np.ndarray) -> None:
        if place in self._places:
            self._places[place] += of_groups
        elif of_groups.any():
            self._places[place] = of_groups.copy()

    def merge(self, other: "GroupSums") -> None:
        """Add another's sums, of as many groups."""
        assert other.num_groups == self.num_groups
        self._num_terms += other._num_terms
        for place, of_groups in other._places.items():
            self._accumulate(place, of_groups)

    def fractions(self) -> list[Fraction]:
        """The exact sums."""
        if not self._places:
            return [Fraction(0)] * self.num_groups
        lowest = min(self._places)
        totals = [0] * self.num_groups
        for place, of_groups in self._places.items():
            for group in np.flatnonzero(of_groups).tolist():
                totals[group] += int(of_groups[group]) << (_LIMB_BITS * (place - lowest))
        unit = Fraction(2) ** (_LIMB_BITS * lowest)
        return [total * unit for total in totals]

    def floats(self) -> Float64[np.ndarray, " groups"]:
        """The sums, rounded once to float64.

        Raises:
            OverflowError: if a sum is beyond float64.
        """
        return np.array([float(total) for total in self.fractions()])


def multiply(
    x: Float64[np.ndarray, "*shape"], y: Float64[np.ndarray, "*shape"]
) -> tuple[Float64[np.ndarray, "*shape"], Float64[np.ndarray, "*shape"]]:
    """(high, low), whose sum is x * y exactly, high the product rounded: Dekker's.

    The magnitudes, and those of a product that is not 0, must lie between 2**-480 and 2**480.
    """
    high = x * y
    x_high, x_low = _halves(x)
    y_high, y_low = _halves(y)
    low = ((x_high * y_high - high) + x_high * y_low + x_low * y_high) + x_low * y_low
    return high, low


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x as the sum of two numbers of 26 bits."""
    shifted = x * (2.0**27 + 1)
    high = shifted - (shifted - x)
    return high, x - high
