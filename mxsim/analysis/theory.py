"""Expected quantization error of blocks of independent elements, from their distribution alone: no sampling.

1. In a block of n independent elements, fix one, x. The other n - 1 stay within u with probability F(u)**(n-1), F the
   distribution function of |x|; so P(amax <= u, x in dx) = f(x) dx F(u)**(n-1) for |x| <= u.
2. A scale rule is a ladder: scale s_k where u_(k-1) < amax <= u_k. On that rung

       E[err**2; rung k] = F(u_k)**(n-1) J(u_k, s_k) - F(u_(k-1))**(n-1) J(u_(k-1), s_k)
       J(u, s) = integral of (x - q_s(x))**2 f(x) dx over |x| <= u

   which is the integral over the density of amax, n f_|x|(m) F(m)**(n-1), of the error of the element that is m and of
   the n - 1 others, truncated to |x| <= m, integrated by parts.
3. q_s is constant between the midpoints of s times the element's grid, so J is a sum of integrals of parabolas times f.

Nothing here calls `quantize` or `encode`: grid, midpoints and ladders are built from the formats' constants. scipy is
not needed either: a distribution is whatever has scipy.stats' methods.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Float64

from mxsim.blocks import BlockFormat, BlockTensor, ScaleRule, quantize
from mxsim.formats import E4M3, CodeForm, FloatFormat, philox_bits
from mxsim.formats.inputs import as_float, as_numpy

_BINADES = 40  # on either side of the standard deviation; what lies beyond is below 1e-11 of any moment used here
_NEVER = 1e-30  # a probability
_MAX_EXPONENT = 80  # of the standard deviation: all scales stay inside E8M0's range
_MAX_MAGNITUDE = 500  # of a measured element, as an exponent: its square is an ordinary float64 number
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


class Distribution(Protocol):
    """A frozen scipy.stats distribution, symmetric about 0."""

    def pdf(self, x: Any) -> Any: ...
    def cdf(self, x: Any) -> Any: ...
    def ppf(self, q: Any) -> Any: ...
    def moment(self, order: int) -> Any: ...


@dataclass(frozen=True)
class ExpectedError:
    """Means over the elements: signal = E[x**2], noise = E[err**2]; scaled: of x / s and err / s, s the block's scale.

    The scaled means weigh every block alike, however large its elements; they are finite for every distribution.
    Blocks whose scale is 0 (NVFP4) are left out of them.
    """

    signal: float
    noise: float
    scaled_signal: float
    scaled_noise: float

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / noise); infinite without noise."""
        return _db(self.signal, self.noise)

    @property
    def scaled_sqnr_db(self) -> float:
        """10 log10(scaled_signal / scaled_noise)."""
        return _db(self.scaled_signal, self.scaled_noise)


@dataclass(frozen=True)
class MeasuredError:
    """SQNR of a quantized tensor, as `ExpectedError` has it, each with its standard error over independent blocks."""

    num_blocks: int
    sqnr_db: float
    standard_error_db: float
    scaled_sqnr_db: float
    scaled_standard_error_db: float


# ---------------------------------------------------------------------------------------------------------- expected
def expected_error(
    source: Distribution | Float[np.ndarray, "*shape"],
    fmt: BlockFormat,
    *,
    scale_rule: ScaleRule | None = None,
    tensor_amax: float | None = None,
) -> ExpectedError:
    """Expected error of blocks of fmt.block_size independent elements, quantized to nearest, saturating.

    Args:
        source: the elements' distribution: one of scipy.stats, symmetric about 0; or an array, from whose elements
            every element of a block is drawn (with replacement): what the tensor would give without its structure.
        scale_rule: None: the format's own.
        tensor_amax: NVFP4 only, whose scales depend on it: the tensor's largest magnitude. The result is that of the
            blocks that do not hold it, whose elements are independent within |x| < tensor_amax.

    Raises:
        TypeError: if fmt is no BlockFormat, scale_rule no ScaleRule, or source neither a distribution nor an array of
            floating-point numbers.
        ValueError: if source is empty, not finite, all zeros, not symmetric, or without a finite variance between
            2**-80 and 2**80; if fmt has fixed-point elements; if a scale rule or tensor_amax is given to a format
            without, or tensor_amax is missing or not positive.

    >>> from mxsim.blocks import MXFP4
    >>> x = np.array([-1.0, 1.0])  # in 32 draws amax is 1: scale 1/4, and 4 is a code
    >>> expected_error(x, MXFP4).noise
    0.0
    """
    rule = _checked_rule(fmt, scale_rule, "expected_error")
    if not fmt.tensor_scaled and tensor_amax is not None:
        raise ValueError(f"expected_error: tensor_amax is {tensor_amax}, but {fmt} has no tensor scale")
    if fmt.tensor_scaled and (tensor_amax is None or not 0 < tensor_amax < math.inf):
        raise ValueError(f"expected_error: tensor_amax is {tensor_amax}, needed a finite number above 0 for {fmt}")
    magnitudes = _magnitudes(source)
    grid = _grid(fmt.element)
    if tensor_amax is not None:
        limit = float(np.nextafter(tensor_amax, 0))
        rungs = _nvfp4_ladder(float(tensor_amax))
    else:
        assert rule is not None
        limit = math.inf
        rungs = _power_of_two_ladder(fmt.element, rule, magnitudes.exponent)
    within = magnitudes.mass(limit)
    if within == 0:
        raise ValueError(f"expected_error: tensor_amax is {tensor_amax}, below all of source")

    signal = noise = scaled_signal = scaled_noise = lower = below = 0.0
    for upper, scale in rungs:
        upper = min(upper, limit)
        here = (magnitudes.mass(upper) / within) ** (fmt.block_size - 1)
        if here > _NEVER:
            # The difference of step 2 without cancellation.
            rung = magnitudes.moments(lower, upper, grid * scale) * here
            if here > below:
                rung += magnitudes.moments(0, lower, grid * scale) * (here - below)
            signal += rung[0]
            noise += rung[1]
            if scale > 0:
                scaled_signal += rung[0] / scale**2
                scaled_noise += rung[1] / scale**2
        lower, below = upper, here
    return ExpectedError(*(float(moment / within) for moment in (signal, noise, scaled_signal, scaled_noise)))


def _power_of_two_ladder(element: FloatFormat, rule: ScaleRule, exponent: int) -> Iterator[tuple[float, float]]:
    """(largest amax, scale) in ascending order; a bound that belongs to the next rung is moved down by an ulp."""
    highest_binade = math.ldexp(1, element.emax)  # 4 of E2M1
    ulp = math.ldexp(highest_binade, -element.mantissa_bits)
    bound = {
        ScaleRule.FLOOR: np.nextafter(2 * highest_binade, 0),
        ScaleRule.EVEN: np.nextafter(2 * highest_binade - ulp / 2, 0),
        ScaleRule.RCEIL: element.max_finite,
        ScaleRule.CEIL: highest_binade,
    }[rule]
    for x in range(exponent - element.emax - _BINADES, exponent - element.emax + _BINADES):
        yield math.ldexp(bound, x), math.ldexp(1, x)


def _nvfp4_ladder(tensor_amax: float) -> Iterator[tuple[float, float]]:
    """Block scales are E4M3 to nearest of amax / 6 in units of tensor_amax / 2688; FP32's roundings are left out."""
    unit = tensor_amax / (448 * 6)
    scales = _grid(E4M3)
    for scale, midpoint in zip(scales, [*(scales[:-1] + scales[1:]) / 2, math.inf], strict=True):
        yield midpoint * 6 * unit, scale * unit


def _grid(element: FloatFormat) -> Float64[np.ndarray, " values"]:
    """0 and every positive finite value, ascending."""
    if element.code_form is not CodeForm.SIGN_MAGNITUDE:
        raise ValueError(f"expected_error: fmt has {element} elements, needed floating-point ones")
    unit, per_binade = element.min_subnormal, 1 << element.mantissa_bits
    values = [i * unit for i in range(per_binade)]
    for exponent in range(element.emin, element.emax + 1):
        values += [math.ldexp(per_binade + i, exponent - element.mantissa_bits) for i in range(per_binade)]
    grid: np.ndarray = np.array([value for value in values if value <= element.max_finite])
    return grid


# ------------------------------------------------------------------------------------------------------ distributions
class _Density:
    """|x| of a distribution: its mass within u, and moments about the nearest of some values."""

    def __init__(self, distribution: Distribution) -> None:
        variance = float(distribution.moment(2))
        if not (math.isfinite(variance) and variance > 0):
            raise ValueError(f"expected_error: source has the variance {variance}, needed a finite one above 0")
        sigma = math.sqrt(variance)
        points = sigma * np.array([0.3, 1, 3])
        if not np.allclose(distribution.cdf(-points), 1 - distribution.cdf(points), rtol=0, atol=1e-12):
            raise ValueError("expected_error: source is not symmetric about 0")
        self.distribution = distribution
        self.exponent = math.frexp(sigma)[1]

    def mass(self, u: float) -> float:
        return 2 * float(self.distribution.cdf(u)) - 1

    def moments(self, lower: float, upper: float, values: Float64[np.ndarray, " values"]) -> Float64[np.ndarray, " 2"]:
        """Integrals of x**2 and (|x| - the nearest of values)**2 over lower < |x| <= upper, by Gauss-Legendre.

        Pieces end at the midpoints of values and at powers of two: within a binade the density is smooth.
        """
        binades = np.ldexp(1.0, np.arange(self.exponent - _BINADES, self.exponent + _BINADES))
        midpoints = (values[:-1] + values[1:]) / 2
        upper = min(upper, float(binades[-1]))
        inside = np.concatenate([binades, midpoints])
        inside = inside[(inside > lower) & (inside < upper)]
        edges = np.unique([min(lower, upper), *inside, upper])
        half, centre = np.diff(edges) / 2, (edges[:-1] + edges[1:]) / 2
        nearest = values[np.searchsorted(midpoints, centre)]
        x = centre[:, None] + half[:, None] * _NODES
        weights = 2 * self.distribution.pdf(x) * _WEIGHTS * half[:, None]
        return np.array([(np.square(x - value) * weights).sum() for value in (0, nearest[:, None])])


class _Elements:
    """|x| of independent draws from an array's elements."""

    def __init__(self, x: Float[np.ndarray, "*shape"]) -> None:
        self.sorted = np.sort(np.abs(x), axis=None)
        if not self.sorted[-1] > 0:
            raise ValueError("expected_error: source holds only zeros")
        largest = float(self.sorted[-1])  # taken out: no square overflows or vanishes
        _, self.exponent = math.frexp(largest * math.sqrt(np.square(self.sorted / largest).mean()))

    def mass(self, u: float) -> float:
        return float(np.searchsorted(self.sorted, u, side="right")) / self.sorted.size

    def moments(self, lower: float, upper: float, values: Float64[np.ndarray, " values"]) -> Float64[np.ndarray, " 2"]:
        start, stop = np.searchsorted(self.sorted, [lower, upper], side="right")
        x = self.sorted[0 if lower == 0 else start : stop]
        nearest = values[np.searchsorted((values[:-1] + values[1:]) / 2, x)]
        return np.array([np.square(x).sum(), np.square(x - nearest).sum()]) / self.sorted.size


def _magnitudes(source: Any) -> _Density | _Elements:
    if all(hasattr(source, method) for method in ("pdf", "cdf", "moment")):
        magnitudes: _Density | _Elements = _Density(source)
    else:
        magnitudes = _Elements(_checked_array(source, "expected_error", "source"))
    if abs(magnitudes.exponent) > _MAX_EXPONENT:
        raise ValueError(
            f"expected_error: source has a standard deviation near 2**{magnitudes.exponent}, "
            f"needed 2**-{_MAX_EXPONENT} to 2**{_MAX_EXPONENT}"
        )
    return magnitudes


# ---------------------------------------------------------------------------------------------------------- measured
def measured_error(
    x: Float[np.ndarray, "*shape"], fmt: BlockFormat, *, scale_rule: ScaleRule | None = None
) -> MeasuredError:
    """SQNR of x in fmt, and its standard error by batch means, a block being a batch.

    With S_i and N_i the sums of x**2 and err**2 over block i, the ratio r = sum S / sum N has the standard error
    std(S_i - r N_i) / (sqrt(blocks) mean(N)). That is meaningful where blocks are independent and E[err**4] is finite:
    for Student's t from nu = 5 on; below, use the scaled SQNR. NVFP4: blocks that hold the tensor's amax are left out.

    Raises:
        TypeError: if x holds no floating-point numbers, or fmt and scale_rule are of another type.
        ValueError: if x is not made of whole blocks along its last axis, has fewer than two, is not finite, is all
            zeros, or holds a non-zero magnitude outside 2**-500 to 2**500; what `quantize` refuses.
    """
    _checked_rule(fmt, scale_rule, "measured_error")
    x = _checked_array(x, "measured_error", "x")
    magnitude = np.abs(x[x != 0])
    bad = magnitude[(magnitude < 2.0**-_MAX_MAGNITUDE) | (magnitude >= 2.0**_MAX_MAGNITUDE)]
    if bad.size:
        raise ValueError(
            f"measured_error: x holds the magnitude {bad[0]}, needed 0 or 2**-{_MAX_MAGNITUDE} to 2**{_MAX_MAGNITUDE}"
        )
    size = fmt.block_size
    if fmt.is_tile or x.shape[-1] % size:
        raise ValueError(
            f"measured_error: x has the shape {x.shape} for {fmt}, needed whole blocks of {size} along the last axis"
        )
    t = quantize(x, fmt, axis=-1 if fmt.default_axis == -1 else None, scale_rule=scale_rule)
    return _measure(x, t)


def _measure(x: Float64[np.ndarray, "*shape"], t: BlockTensor) -> MeasuredError:
    blocks = x.reshape(-1, t.format.block_size)
    error = t.dequantize(np.float64).reshape(blocks.shape) - blocks
    scales = t.scale_values().reshape(-1) * float(t.tensor_scale if t.tensor_scale is not None else 1)
    if t.format.tensor_scaled:
        amax = np.abs(blocks).max(axis=-1)
        kept = amax < amax.max()
        blocks, error, scales = blocks[kept], error[kept], scales[kept]
    if len(blocks) < 2:
        raise ValueError(f"measured_error: x has {len(blocks)} blocks to measure, needed at least 2")
    signal, noise = np.square(blocks).sum(axis=-1), np.square(error).sum(axis=-1)
    usable = scales > 0
    squared = np.square(scales[usable])
    return MeasuredError(
        len(blocks), *_ratio_db(signal, noise), *_ratio_db(signal[usable] / squared, noise[usable] / squared)
    )


def _ratio_db(signal: Float64[np.ndarray, " blocks"], noise: Float64[np.ndarray, " blocks"]) -> tuple[float, float]:
    """(dB, standard error in dB) of sum(signal) / sum(noise)."""
    if not signal.any():
        raise ValueError("measured_error: x holds only zeros")
    if not noise.any():
        return math.inf, 0.0
    ratio = signal.sum() / noise.sum()
    deviation = np.std(signal - ratio * noise, ddof=1) / math.sqrt(signal.size) / noise.mean()
    return 10 * math.log10(ratio), 10 / math.log(10) * float(deviation / ratio)


# ------------------------------------------------------------------------------------------------- side by side
@dataclass(frozen=True)
class TheoryRow:
    """One format and rule on one set of data.

    quantity: "plain" SQNR, or "scaled", as `ExpectedError` defines them.
    standard_error_db: of measured_db.
    """

    data: str
    format: str
    scale_rule: str | None
    quantity: str
    num_blocks: int
    expected_db: float
    measured_db: float
    standard_error_db: float

    @property
    def num_standard_errors(self) -> float:
        """(measured - expected) / standard error."""
        return (self.measured_db - self.expected_db) / self.standard_error_db


def compare_with_theory(
    data: str,
    source: Distribution | Float[np.ndarray, "*shape"],
    x: Float[np.ndarray, "*shape"],
    cases: Iterable[tuple[BlockFormat, ScaleRule | None]],
) -> Iterator[TheoryRow]:
    """Expected error of source and measured error of x, in each format and rule.

    The plain SQNR is left out where E[x**4] is infinite (Student's t, nu <= 4): the measured one then has no standard
    error, as its terms have no variance.

    Raises:
        TypeError, ValueError: as `expected_error` and `measured_error`.
    """
    is_plain_measurable = not hasattr(source, "moment") or math.isfinite(float(source.moment(4)))
    for fmt, rule in cases:
        measured = measured_error(x, fmt, scale_rule=rule)
        tensor_amax = float(np.abs(x).max()) if fmt.tensor_scaled else None
        expected = expected_error(source, fmt, scale_rule=rule, tensor_amax=tensor_amax)
        rule = rule or fmt.default_scale_rule
        key = data, fmt.name, None if rule is None else rule.name
        if is_plain_measurable:
            plain = expected.sqnr_db, measured.sqnr_db, measured.standard_error_db
            yield TheoryRow(*key, "plain", measured.num_blocks, *plain)
        scaled = expected.scaled_sqnr_db, measured.scaled_sqnr_db, measured.scaled_standard_error_db
        yield TheoryRow(*key, "scaled", measured.num_blocks, *scaled)


def independent_sample(
    source: Distribution | Float[np.ndarray, "*shape"], shape: tuple[int, ...], *, seed: int = 0
) -> Float64[np.ndarray, "*shape"]:
    """Independent draws from a distribution (quantiles of Philox's bits) or from an array's elements.

    Raises:
        TypeError, ValueError: for an array that `expected_error` refuses.
    """
    bits = philox_bits(seed, shape)
    if hasattr(source, "ppf"):
        draws: np.ndarray = np.asarray(source.ppf((bits + 0.5) * 2.0**-32), np.float64)
        return draws
    x = _checked_array(source, "independent_sample", "source").reshape(-1)
    return x[bits.astype(np.int64) % x.size]


# --------------------------------------------------------------------------------------------------------- arguments
def _checked_rule(fmt: Any, rule: Any, caller: str) -> ScaleRule | None:
    """The rule to apply; None where the format has none."""
    if not isinstance(fmt, BlockFormat):
        raise TypeError(f"{caller}: fmt is {fmt!r}, needed a BlockFormat")
    if not (rule is None or isinstance(rule, ScaleRule)):
        raise TypeError(f"{caller}: scale_rule is {rule!r}, needed a ScaleRule or None")
    if fmt.tensor_scaled and rule is not None:
        raise ValueError(f"{caller}: scale_rule is {rule.name}, but {fmt} has none")
    if not fmt.tensor_scaled and rule is None and fmt.default_scale_rule is None:
        raise ValueError(f"{caller}: scale_rule is None, but {fmt} has no default rule; needed a ScaleRule")
    return rule or fmt.default_scale_rule


def _checked_array(x: Any, caller: str, name: str) -> Float64[np.ndarray, "*shape"]:
    array = as_numpy(x, caller=caller, name=name)
    if array.dtype.kind in "iub":
        raise TypeError(f"{caller}: {name} has the dtype {array.dtype}, needed floating-point numbers")
    array = as_float(array, caller=caller, name=name).astype(np.float64)
    if array.ndim == 0 or array.size == 0:
        raise ValueError(f"{caller}: {name} has the shape {array.shape}, needed elements along at least one axis")
    num_bad = np.count_nonzero(~np.isfinite(array))
    if num_bad:
        raise ValueError(f"{caller}: {name} holds {num_bad} NaNs or infinities, needed finite numbers")
    return array


def _db(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise else math.inf
