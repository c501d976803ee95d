"""A sum of floats that does not depend on how the terms were grouped."""

import math

import numpy as np
from jaxtyping import Float64


class ExactSum:
    """The exact sum of everything added, held as a short list of float64 whose sum it is.

    `float()` of it is the sum rounded once, so any order and any grouping of the same terms gives the same bits. A term
    that is infinite or NaN, or a sum beyond float64, makes the result NaN.

    >>> total = ExactSum()
    >>> total.add(np.array([1e100, 1.0]))
    >>> total.add(np.array([-1e100]))
    >>> float(total)
    1.0
    """

    def __init__(self) -> None:
        self._parts: list[float] = []

    def add(self, terms: Float64[np.ndarray, "*shape"]) -> None:
        """Add every term."""
        remaining = [*self._parts, *terms.reshape(-1).tolist()]
        self._parts = []
        # fsum rounds correctly: each turn splits off the leading 53 bits of what is left, until nothing is.
        while (rounded := _fsum(remaining)) != 0:
            self._parts.append(rounded)
            if math.isnan(rounded):
                break
            remaining.append(-rounded)

    def merge(self, other: "ExactSum") -> None:
        """Add another sum."""
        self.add(np.array(other._parts))

    def __float__(self) -> float:
        return math.fsum(self._parts)


def _fsum(terms: list[float]) -> float:
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # beyond float64; inf - inf
        return math.nan
    return total if math.isfinite(total) else math.nan
