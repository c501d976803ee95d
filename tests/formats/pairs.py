"""Each format of the package beside its row in the oracle."""

import numpy as np

from mxsim.formats import FORMATS, FloatFormat, Overflow, Rounding, Specials
from tests import oracle
from tests.oracle import Spec

# What a user writes in one line, beside the oracle's row of the same name.
USER_FORMATS = {
    "E3M4": FloatFormat("E3M4", 3, 4, specials=Specials.INF_AND_NAN),
    "E4M3_IEEE": FloatFormat("E4M3_IEEE", 4, 3, specials=Specials.INF_AND_NAN),
    "E4M3FNUZ": FloatFormat("E4M3FNUZ", 4, 3, bias=8, specials=Specials.NAN_IS_NEGATIVE_ZERO),
    "E5M2FNUZ": FloatFormat("E5M2FNUZ", 5, 2, bias=16, specials=Specials.NAN_IS_NEGATIVE_ZERO),
    "E4M3B11FNUZ": FloatFormat("E4M3B11FNUZ", 4, 3, bias=11, specials=Specials.NAN_IS_NEGATIVE_ZERO),
    "E5M10": FloatFormat("E5M10", 5, 10, specials=Specials.INF_AND_NAN),
    "E3M0": FloatFormat("E3M0", 3, 0),
    "E2M0": FloatFormat("E2M0", 2, 0),
    "E1M2": FloatFormat("E1M2", 1, 2),
    "E3M3_FN": FloatFormat("E3M3_FN", 3, 3, specials=Specials.NAN_ALL_ONES),
    "E5M3_UNSIGNED": FloatFormat("E5M3_UNSIGNED", 5, 3, specials=Specials.NAN_ALL_ONES, signed=False),
    "E3M2_NO_ZERO": FloatFormat("E3M2_NO_ZERO", 3, 2, has_subnormals=False),
    "E4M0_UNSIGNED": FloatFormat("E4M0_UNSIGNED", 4, 0, signed=False, has_subnormals=False),
}
CATALOG = [(fmt, oracle.SPECS[name]) for name, fmt in FORMATS.items()]
USER = [(USER_FORMATS[spec.name], spec) for spec in oracle.USER_SPECS.values()]
TABLED = [(fmt, spec) for fmt, spec in CATALOG + USER if spec.bits <= 16]  # every code can be visited
NARROW = [(fmt, spec) for fmt, spec in CATALOG + USER if spec.bits <= 8]  # every code can be visited in Fractions


def name_of(pair) -> str:
    """pytest id of a (format, spec) pair."""
    return pair[1].name if isinstance(pair, tuple) else str(pair)


def modes(spec: Spec, roundings=oracle.DETERMINISTIC_ROUNDINGS) -> list[tuple[Rounding, Overflow]]:
    """Every rounding with every overflow mode that the format has."""
    overflows = oracle.OVERFLOWS if spec.specials != "NONE" else oracle.OVERFLOWS[:1]
    return [(Rounding[r], Overflow[o]) for r in roundings for o in overflows]


def as_float64(n: oracle.Number) -> float:
    """A number of the oracle as a float: exact, signs of zero and of NaN kept."""
    magnitude = {"inf": np.inf, "nan": np.nan}.get(n.kind)
    if magnitude is None:
        assert n.magnitude is not None
        magnitude = float(n.magnitude)
        assert n.magnitude == oracle.Fraction(magnitude)
    return float(np.copysign(magnitude, -1.0 if n.negative else 1.0))
