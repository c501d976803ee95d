"""The error of a chain of conversions as a sum of named parts, exact to the last bit.

A chain passes through states, each the whole tensor as real numbers:

    source               x
    underflow            0 where the ideal quantizer gives 0, x elsewhere
    grid rounding        the ideal quantizer's result
    scale rule           the element format without an upper end, under the power-of-two scale
    clipping             the quantized tensor
    second rounding ...  the result of each conversion after it, in the order of the source

A part is a state less the one before, so that the parts of an element add up to result - x. The ideal quantizer gives
each block the scale amax / max_finite, of any exponent, rounded up to 24 bits: nothing is clipped, and the largest
element is all but exact. So the parts mean:

    underflow        -x of the elements that vanish even there: the dead zone of the element format
    grid rounding    what rounding to the element format costs the others at the ideal scale
    scale rule       all that a power of two, within E8M0's range, changes about both: a finer or coarser grid, a
                     narrower or wider dead zone
    clipping         what the saturation of the largest elements adds
    second rounding  what re-encoding to FP8 adds; transpose, what turning FP8 rows into columns adds

The squared error is attributed along the same path: a part's share is the squared error after it less that before it,
sum (state - x)**2. It is negative where a step brings the tensor back toward x. A covariance <part, total> would add up
as well, but grid rounding and scale rule, two rounding errors on grids that do not match, hardly correlate with each
other: nearly all of grid rounding's cost would be booked on the scale rule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float64

from mxsim.analysis.chains import Chain, Part
from mxsim.analysis.frames import frame
from mxsim.analysis.group_sums import GroupSums, multiply
from mxsim.analysis.tensor_files import floating_point_problem
from mxsim.blocks import BlockTensor, quantize
from mxsim.blocks.layout import as_matrices, block_of, join_blocks, per_block, split_blocks
from mxsim.formats import CodeForm, FloatFormat, decode, encode, round_to
from mxsim.formats.inputs import as_float, as_numpy

_SCALE_BITS = 24
_EXPONENT_BITS = 10  # an element format with so many has no upper end that matters, whatever its bias
Array = Float64[np.ndarray, "*shape"]


@dataclass(frozen=True, eq=False)
class Decomposition:
    """total = result - x, element by element, and its parts: their float64 sum is total, bit for bit, in their order.

    quantized: the chain's last block tensor, None for a GEMM.
    """

    x: Array
    states: Mapping[Part, Array]
    quantized: BlockTensor | None = None

    @property
    def total(self) -> Array:
        """Result less x, exactly."""
        total: np.ndarray = self._last - self.x + 0.0  # no -0
        return total

    @property
    def parts(self) -> dict[Part, Array]:
        """Each state less the one before, exactly."""
        before = [self.x, *self.states.values()]
        return {part: state - b + 0.0 for (part, state), b in zip(self.states.items(), before, strict=False)}

    def squared_error(self) -> dict[Part, Fraction]:
        """What each part adds to sum (result - x)**2; the values add up to it exactly. A step back is negative."""
        so_far = [Fraction(0), *(sum_of_squares(state - self.x) for state in self.states.values())]
        return {part: after - before for part, before, after in zip(self.states, so_far, so_far[1:], strict=False)}

    def table(self) -> Any:
        """A pandas row for each part: elements touched, squared error added and its share, error over signal in dB.

        `share` is of the whole squared error, 0 where there is none. `relative_squared_error` is the squared error
        added over sum x**2, NaN if x is all zeros.
        """
        added = self.squared_error()
        whole, signal = sum(added.values(), Fraction(0)), sum_of_squares(self.x)
        return frame(
            {
                "part": [part.value for part in added],
                "num_elements": [int(np.count_nonzero(values)) for values in self.parts.values()],
                "squared_error": [float(value) for value in added.values()],
                "share": [float(value / whole) if whole else 0.0 for value in added.values()],
                "relative_squared_error": [float(value / signal) if signal else math.nan for value in added.values()],
            }
        )

    @property
    def _last(self) -> Array:
        return list(self.states.values())[-1]


def decompose(x: Any, chain: Chain) -> Decomposition:
    """The parts of the error that the chain makes of x.

    Args:
        x: rows [..., K] of numbers that float32 holds: bfloat16, float16, float32, or float64 of such values.

    Raises:
        TypeError: if x is no floating-point array, or chain no Chain.
        ValueError: if x is empty, holds a NaN, an infinity or a number that float32 does not hold; if the chain's
            format has scales that are no powers of two, or fixed-point elements; if a state is not finite, or differs
            from another by more bits than float64 has. Of the chains in `CHAINS` only the published transpose can do
            that, and BF16 overflow above 2**127.

    >>> from mxsim.blocks import MXFP4
    >>> d = decompose(np.float32([[7.0, 0.2, 1.1, 0.0]]), Chain("FP4", MXFP4))  # becomes 6, 0, 1, 0
    >>> [(part.value, values[0].round(3).tolist()) for part, values in d.parts.items()][:2]
    [('underflow', [0.0, -0.2, 0.0, 0.0]), ('grid rounding', [0.0, 0.0, 0.067, 0.0])]
    >>> [(part.value, values[0].round(3).tolist()) for part, values in d.parts.items()][2:]
    [('scale rule', [1.0, 0.0, -0.167, 0.0]), ('clipping', [-2.0, 0.0, 0.0, 0.0])]
    """
    if not isinstance(chain, Chain):
        raise TypeError(f"decompose: chain is a {type(chain).__name__}, needed a Chain")
    source, exact = _checked_source(x)
    element = chain.fmt.element
    if chain.fmt.tensor_scaled or element.code_form is not CodeForm.SIGN_MAGNITUDE or not element.has_subnormals:
        raise ValueError(
            f"decompose: chain begins with {chain.fmt}, needed power-of-two scales and floating-point elements"
        )
    t = quantize(source, chain.fmt, scale_rule=chain.scale_rule)
    states = _first_states(exact, t)
    for conversion in chain.conversions:
        t = conversion.convert(t)
        states[conversion.part] = _in_source_order(t, exact.shape)
    return telescope(exact, states, t)


def telescope(x: Array, states: Mapping[Part, Array], quantized: BlockTensor | None = None) -> Decomposition:
    """The decomposition along the states, of x's shape.

    Raises:
        ValueError: if a state is not finite, or float64 does not hold a difference of two neighbours or of one and x.
    """
    before = x
    for part, state in states.items():
        if not np.isfinite(state).all():
            raise ValueError(f"decompose: the state after {part.value} is not finite at {_first(~np.isfinite(state))}")
        for what, other in (("the state before", before), ("x", x)):
            inexact = _lost(state, other) != 0
            if inexact.any():
                raise ValueError(
                    f"decompose: float64 does not hold the difference of the state after {part.value} and {what} at "
                    f"{_first(inexact)}"
                )
        before = state
    return Decomposition(x, dict(states), quantized)


def sum_of_squares(x: Array) -> Fraction:
    """sum x**2, exactly."""
    total = GroupSums(1)
    for terms in multiply(x.reshape(-1), x.reshape(-1)):
        total.add(terms)
    return total.fractions()[0]


def ideal_scale(amax: Array, element: FloatFormat) -> Array:
    """The smallest scale of 24 bits, of any exponent, with amax <= max_finite * scale; 1 where amax = 0.

    amax has 24 bits. amax / max_finite is a number of 24 bits, or at least 2**-33 of itself away from one, so that the
    rounded float64 quotient is on the right side.
    """
    fraction, exponent = np.frexp(amax / element.max_finite)
    scale: np.ndarray = np.ldexp(np.ceil(np.ldexp(fraction, _SCALE_BITS)), exponent - _SCALE_BITS)
    return np.where(amax == 0, 1.0, scale)


# ------------------------------------------------------------------------------------------------------------- states
def _first_states(x: Array, t: BlockTensor) -> dict[Part, Array]:
    """The states up to the quantized tensor, of x's shape."""
    block, element = block_of(t.format, t.axis), t.format.element
    matrices = as_matrices(x, t.format, t.axis)
    blocks = split_blocks(matrices, block)
    ideal = per_block(ideal_scale(np.abs(blocks).max(axis=(2, 4)), element))
    # x / ideal is rounded to float64 first. It lies on a tie of the format exactly, or 2**-50 of itself away from it:
    # x and tie * ideal are integers of at most 30 bits in a common unit.
    rounded = decode(encode(blocks / ideal, element), element) * ideal
    scale = per_block(as_matrices(t.scale_values(), t.format, t.axis))
    endless = FloatFormat(f"{element.name} without end", _EXPONENT_BITS, element.mantissa_bits, bias=element.bias)
    unclipped = round_to(blocks / scale, endless) * scale
    by_blocks = {
        Part.UNDERFLOW: np.where(rounded == 0, np.copysign(0.0, blocks), blocks),
        Part.GRID: rounded,
        Part.SCALE_RULE: unclipped,
    }
    states = {part: join_blocks(state, *matrices.shape[1:]).reshape(x.shape) for part, state in by_blocks.items()}
    states[Part.CLIPPING] = t.dequantize(np.float64)
    return states


def _in_source_order(t: BlockTensor, shape: tuple[int, ...]) -> Array:
    """The values of rows, or of columns without their padding, in the order of the source."""
    values = t.dequantize(np.float64)
    return values if t.source_rows is None else values[:, : t.source_rows].T.reshape(shape)


def _lost(a: Array, b: Array) -> Array:
    """What rounding a - b to float64 loses, exactly: Knuth's TwoSum of a and -b."""
    difference = a - b
    of_a = difference + b
    lost: np.ndarray = (a - of_a) + ((of_a - difference) - b)
    return lost


def _checked_source(x: Any) -> tuple[np.ndarray, Array]:
    """x as float32, and as float64."""
    array = as_numpy(x, caller="decompose", name="x")
    problem = floating_point_problem(array.dtype)
    if problem is not None:
        raise TypeError(f"decompose: x has dtype {array.dtype}, {problem}; needed a floating-point array")
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"decompose: x has the shape {array.shape}, needed at least one axis and one element")
    with np.errstate(invalid="ignore"):
        exact = as_float(array, caller="decompose", name="x").astype(np.float64)
    if not np.isfinite(exact).all():
        index = _first(~np.isfinite(exact))
        raise ValueError(f"decompose: x holds {exact[index]} at {index}, needed finite numbers")
    with np.errstate(over="ignore", under="ignore"):
        single = exact.astype(np.float32)
    if (single != exact).any():
        index = _first(single != exact)
        raise ValueError(f"decompose: x holds {exact[index]} at {index}, needed numbers that float32 holds")
    return single, exact


def _first(chosen: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(chosen)[0])
