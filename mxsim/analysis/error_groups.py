"""Counts, exact sums and maxima of the error of elements, group by group."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mxsim.analysis.element_error import ElementErrors
from mxsim.analysis.group_sums import GroupSums

TERMS = ("signal", "noise", "relative", "ulps")


class Terms:
    """What is summed, counted and compared of each element; one-dimensional."""

    def __init__(self, magnitude: np.ndarray, summed: dict[str, np.ndarray], flags: dict[str, np.ndarray]) -> None:
        self.magnitude, self.summed, self.flags = magnitude, summed, flags

    def __len__(self) -> int:
        return len(self.magnitude)

    @classmethod
    def of(cls, errors: ElementErrors) -> "Terms":
        chosen = errors.compared
        x, q, error, relative, ulps = (
            a[chosen] for a in (errors.x, errors.q, errors.error, errors.relative, errors.ulps)
        )
        flags = {name: getattr(errors, name) for name in ("saturated", "underflowed", "subnormal")}
        return cls(
            np.abs(x),
            {
                "signal": x * x,
                "noise": error * error,
                "relative": relative,
                "ulps": ulps,
                "result": q * q,
                "product": x * q,
            },
            {name: flag[chosen] for name, flag in flags.items() if flag is not None},
        )

    def take(self, chosen: np.ndarray) -> "Terms":
        return Terms(
            self.magnitude[chosen],
            {name: terms[chosen] for name, terms in self.summed.items()},
            {name: flag[chosen] for name, flag in self.flags.items()},
        )


class Groups:
    """Counts, exact sums and maxima of groups of elements."""

    def __init__(self, num_groups: int, names: Sequence[str]) -> None:
        self.sums = {name: GroupSums(num_groups) for name in names}
        self.num_elements = np.zeros(num_groups, np.int64)
        self.num_nonzero = np.zeros(num_groups, np.int64)
        self.flags: dict[str, np.ndarray] = {}
        self.maxima = {name: np.zeros(num_groups) for name in ("relative", "ulps")}

    def add(self, groups: np.ndarray, terms: Terms) -> None:
        num_groups = self.num_elements.size
        self.num_elements += np.bincount(groups, minlength=num_groups)
        self.num_nonzero += np.bincount(groups[terms.magnitude != 0], minlength=num_groups)
        for name, flag in terms.flags.items():
            counts = self.flags.setdefault(name, np.zeros(num_groups, np.int64))
            counts += np.bincount(groups[flag], minlength=num_groups)
        for name, sums in self.sums.items():
            sums.add(terms.summed[name], groups)
        for name, maxima in self.maxima.items():
            np.maximum.at(maxima, groups, terms.summed[name])

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(group, its row) of every group with elements."""
        sums = {name: self.sums[name].floats() for name in TERMS}
        for group in np.flatnonzero(self.num_elements).tolist():
            count, num_nonzero = int(self.num_elements[group]), int(self.num_nonzero[group])
            signal, noise, relative, ulps = (float(sums[name][group]) for name in TERMS)
            yield (
                group,
                {
                    "num_elements": count,
                    "mse": noise / count,
                    "sqnr_db": _sqnr_db(signal, noise),
                    "mean_relative_error": relative / num_nonzero if num_nonzero else math.nan,
                    "max_relative_error": float(self.maxima["relative"][group]) if num_nonzero else math.nan,
                    "mean_ulp_error": ulps / count,
                    "max_ulp_error": float(self.maxima["ulps"][group]),
                    **{
                        name: int(self.flags[name][group]) / count if name in self.flags else math.nan
                        for name in ("saturated", "underflowed", "subnormal")
                    },
                },
            )


def _sqnr_db(signal: float, noise: float) -> float:
    if signal == 0:
        return math.nan
    return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf
