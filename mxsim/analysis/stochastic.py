"""Stochastic rounding beside rounding to nearest: bias, variance, and what both do to a dot product.

A block's scale does not depend on how its elements are rounded. Of an element, y = |x| / scale, between its neighbours
low and high, with gap = high - low and frac = (y - low) / gap, the error in multiples of the scale has

                              mean                      variance
    stochastic                0                         frac * (1 - frac) * gap**2
    to nearest                low - y or high - y       0
    both, y > max_finite      max_finite - y            0

So stochastic rounding is unbiased except where the scale makes elements saturate, and its squared error, at most a gap
squared over 4, is over evenly spread frac twice that of rounding to nearest: gap**2 / 6 against gap**2 / 12, 3.01 dB.
A sum of K rounded products errs by K times the bias and by sqrt(K) times the deviation.

NOTE: data that come from Philox themselves (`accumulation.sample`) and are rounded by the bits of the same seed are no
longer independent of their rounding: a bias appears. Seeds here begin at FIRST_SEED.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64

from mxsim.blocks import MXFP4, BlockFormat, BlockTensor, ScaleRule, quantize
from mxsim.formats import Rounding, decode, encode, philox_bits
from mxsim.formats.inputs import as_float, as_numpy

ROUNDINGS = (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC)
FIRST_SEED = 2**32  # of the draws: beyond any that data are made from

_MAX_EXPONENT = 200  # products of four such magnitudes are ordinary float64 numbers
_SIGNIFICANT_DIGITS = 6  # what is left does not depend on the order in which float64 sums are taken


class Quantity(Enum):
    """What a row measures."""

    ELEMENT_BIAS = "mean error of an element"  # at y, in multiples of the scale
    ELEMENT_NOISE = "mean squared error of an element"  # at y, in squares of the scale
    SQNR_DB = "SQNR (dB)"  # sum x**2 / sum (q - x)**2
    BIAS = "relative bias"  # sum sign(x) * (mean q - x) / sum |x|; negative: toward zero
    UNSATURATED_BIAS = "relative bias, unsaturated"  # the same over the elements that do not saturate
    SATURATED = "share saturated"  # of the elements, |x| > max_finite * scale
    BIAS_RATIO = "squared mean error over its expectation"  # unsaturated elements: 1 if each one is unbiased
    VARIANCE_RATIO = "variance over frac * (1 - frac) * gap**2"
    DOT_ERROR = "error of a dot product"  # root mean square, over that of a product; at K


@dataclass(frozen=True)
class StochasticRow:
    """One measurement, `at` an element or a K; 0 for a whole tensor. The error is a standard error, 0 if exact."""

    data: str
    format: str
    scale_rule: str
    rounding: Rounding
    quantity: Quantity
    at: float
    value: float
    standard_error: float


# --------------------------------------------------------------------------------------------------------- the theory
@dataclass(frozen=True)
class ErrorMoments:
    """Of the error q - x of each element, exact: mean and variance over all random bits, and what they come from."""

    mean: Float64[np.ndarray, "*shape"]
    variance: Float64[np.ndarray, "*shape"]
    gap: Float64[np.ndarray, "*shape"]  # between the neighbours, scaled
    frac: Float64[np.ndarray, "*shape"]
    saturated: Bool[np.ndarray, "*shape"]

    @property
    def fourth_cumulant(self) -> Float64[np.ndarray, "*shape"]:
        """Of a choice between two values `gap` apart, the upper one with probability frac; 0 where none is made."""
        choice = self.frac * (1 - self.frac)
        return np.where(self.variance > 0, self.gap**4 * choice * (1 - 6 * choice), 0)


def error_moments(
    x: Float[np.ndarray, "*shape"],
    fmt: BlockFormat,
    *,
    rounding: Rounding,
    scale_rule: ScaleRule | None = None,
) -> ErrorMoments:
    """Mean and variance of `quantize(x, fmt, rounding=rounding)`'s error by the table above.

    Args:
        x: finite numbers, blocks along the last axis.
        fmt: a format whose scales are powers of two.
        rounding: TIES_TO_EVEN or STOCHASTIC.

    Raises:
        TypeError: if x is not an array of floating-point numbers, or fmt no BlockFormat.
        ValueError: for another rounding, a format of tiles or with other scales, or an x that is empty, not finite, or
            holds a non-zero magnitude outside 2**-200 to 2**200.

    >>> x = np.array([2.75, 4.0, 7.0, -2.25])  # scale 1; 2.75 lies between 2 and 3, 7 above 6
    >>> error_moments(x, MXFP4, rounding=Rounding.STOCHASTIC).mean
    array([ 0.,  0., -1.,  0.])
    >>> error_moments(x, MXFP4, rounding=Rounding.STOCHASTIC).variance
    array([0.1875, 0.    , 0.    , 0.1875])
    """
    array = _checked("x", x, fmt, "error_moments")
    if rounding not in ROUNDINGS:
        raise ValueError(f"error_moments: rounding is {rounding}, needed TIES_TO_EVEN or STOCHASTIC")
    nearest = quantize(array, fmt, axis=-1, scale_rule=scale_rule)
    scale = _scale_of_each(nearest)
    element = fmt.element
    y = np.abs(array) / scale
    low_codes = encode(y, element, rounding=Rounding.TOWARD_ZERO)
    low, high = (
        decode(codes, element).astype(np.float64)
        for codes in (low_codes, np.minimum(low_codes + np.uint8(1), element.max_code).astype(np.uint8))
    )
    saturated = y > element.max_finite
    gap = high - low
    frac = np.where(saturated | (gap == 0), 0, (y - low) / np.where(gap == 0, 1, gap))
    if rounding is Rounding.TIES_TO_EVEN:
        mean = nearest.dequantize(np.float64) - array
        variance = np.zeros(array.shape)
    else:
        mean = np.where(saturated, np.sign(array) * (element.max_finite - y) * scale, 0)
        variance = frac * (1 - frac) * (gap * scale) ** 2
    return ErrorMoments(mean, variance, gap * scale, frac, saturated)


# --------------------------------------------------------------------------------------------------------- elements
def element_errors(
    elements: Sequence[float],
    *,
    num_draws: int = 4096,
    seed: int = FIRST_SEED,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> Iterator[StochasticRow]:
    """Mean and mean squared error of single elements of MXFP4 blocks of scale 1 (FLOOR), measured.

    Args:
        elements: numbers of 0 to 8, without 8; a block holds one of them 31 times, and a 7.

    Raises:
        ValueError: for other elements, or no draws.

    >>> rows = list(element_errors([2.5], num_draws=992))
    >>> [(row.quantity.name, abs(row.value) <= 4 * row.standard_error) for row in rows if "BIAS" in row.quantity.name]
    [('ELEMENT_BIAS', True)]
    """
    y = np.asarray(elements, np.float64)
    if y.ndim != 1 or not y.size or not ((y >= 0) & (y < 8)).all():
        raise ValueError(f"element_errors: elements are {elements}, needed one or more numbers of 0 to 8, without 8")
    if num_draws < 2:
        raise ValueError(f"element_errors: num_draws is {num_draws}, needed 2 or more")
    num_blocks = -(-num_draws // 31)
    x = np.broadcast_to(y[:, None, None], (y.size, num_blocks, 32)).copy()
    x[..., 31] = 7  # FLOOR's scale is 1
    t = _quantize(x, MXFP4, rounding, ScaleRule.FLOOR, seed)
    errors = (t.dequantize(np.float64) - x)[..., :31].reshape(y.size, -1)
    for quantity, samples in ((Quantity.ELEMENT_BIAS, errors), (Quantity.ELEMENT_NOISE, errors**2)):
        for at, value, deviation in zip(y, samples.mean(axis=1), samples.std(axis=1, ddof=1), strict=True):
            error = deviation / np.sqrt(samples.shape[1])
            yield _row("one element", MXFP4, ScaleRule.FLOOR, rounding, quantity, at, value, error)


# ----------------------------------------------------------------------------------------------------- whole tensors
def tensor_errors(
    data: str,
    x: Float[np.ndarray, "*shape"],
    fmt: BlockFormat,
    *,
    scale_rule: ScaleRule | None = None,
    num_seeds: int = 64,
) -> Iterator[StochasticRow]:
    """SQNR, bias and variance of x by both roundings, the stochastic one measured over seeds FIRST_SEED, + 1, ...

    UNSATURATED_BIAS is left out where every non-zero element saturates; the two ratios where no element is drawn.

    Raises:
        TypeError, ValueError: as `error_moments`; for fewer than 2 seeds, or an x of zeros.
    """
    array = _checked("x", x, fmt, "tensor_errors")
    if num_seeds < 2:
        raise ValueError(f"tensor_errors: num_seeds is {num_seeds}, needed 2 or more")
    if not array.any():
        raise ValueError("tensor_errors: x holds nothing but zeros, whose errors are 0")
    signal = np.square(array).sum()

    def row(rounding: Rounding, quantity: Quantity, value: float, error: float = 0) -> StochasticRow:
        return _row(data, fmt, scale_rule or fmt.default_scale_rule, rounding, quantity, 0, value, error)

    nearest = error_moments(array, fmt, rounding=Rounding.TIES_TO_EVEN, scale_rule=scale_rule)
    yield row(Rounding.TIES_TO_EVEN, Quantity.SQNR_DB, _db(signal, np.square(nearest.mean).sum()))
    # The same elements saturate by both roundings. Where no other is left, nothing can be relative to it.
    unsaturated = [(Quantity.UNSATURATED_BIAS, ~nearest.saturated)] if array[~nearest.saturated].any() else []
    for quantity, kept in ((Quantity.BIAS, ...), *unsaturated):
        yield row(Rounding.TIES_TO_EVEN, quantity, _relative_bias(array, nearest.mean, kept))
    yield row(Rounding.TIES_TO_EVEN, Quantity.SATURATED, float(nearest.saturated.mean()))

    total, total_squares, noise = np.zeros(array.shape), np.zeros(array.shape), []
    for seed in range(FIRST_SEED, FIRST_SEED + num_seeds):
        error = _quantize(array, fmt, Rounding.STOCHASTIC, scale_rule, seed).dequantize(np.float64) - array
        total += error
        total_squares += np.square(error)
        noise.append(np.square(error).sum())
    mean = total / num_seeds
    variance = (total_squares - num_seeds * np.square(mean)) / (num_seeds - 1)
    theory = error_moments(array, fmt, rounding=Rounding.STOCHASTIC, scale_rule=scale_rule)
    drawn = Rounding.STOCHASTIC
    spread = np.std(noise, ddof=1) / np.sqrt(num_seeds) / np.mean(noise) if any(noise) else 0
    yield row(drawn, Quantity.SQNR_DB, _db(signal, np.mean(noise)), 10 / np.log(10) * spread)
    for quantity, kept in ((Quantity.BIAS, ...), *unsaturated):
        error = np.sqrt(theory.variance[kept].sum() / num_seeds) / np.abs(array[kept]).sum()
        yield row(drawn, quantity, _relative_bias(array, mean, kept), error)
    yield row(drawn, Quantity.SATURATED, float(theory.saturated.mean()))

    # Squares of sample means and sample variances of num_seeds choices: expectation and variance are known.
    expected = theory.variance.sum()
    if expected > 0:
        squared_means = num_seeds * np.square(mean)[~theory.saturated].sum()
        spread = 2 * theory.variance**2 + theory.fourth_cumulant / num_seeds
        yield row(drawn, Quantity.BIAS_RATIO, squared_means / expected, np.sqrt(spread.sum()) / expected)
        spread = theory.fourth_cumulant / num_seeds + 2 * theory.variance**2 / (num_seeds - 1)
        yield row(drawn, Quantity.VARIANCE_RATIO, variance.sum() / expected, np.sqrt(spread.sum()) / expected)


# ------------------------------------------------------------------------------------------------------ dot products
def dot_errors(
    data: str,
    a: Float[np.ndarray, "m k"],
    b: Float[np.ndarray, "m k"],
    fmt: BlockFormat = MXFP4,
    *,
    num_products: Sequence[int],
    scale_rule: ScaleRule | None = None,
    seed: int = FIRST_SEED,
) -> Iterator[StochasticRow]:
    """Error of the m dot products of a's rows, quantized, with b's, over their first K elements, by both roundings.

    Raises:
        TypeError, ValueError: as `error_moments`; if the shapes differ, a K is not in 1 to k, or all products are 0.
    """
    a, b = (_checked(name, x, fmt, "dot_errors") for name, x in (("a", a), ("b", b)))
    if a.ndim != 2 or a.shape != b.shape:
        raise ValueError(f"dot_errors: a and b have the shapes {a.shape} and {b.shape}, needed one of two axes")
    if not num_products or min(num_products) < 1 or max(num_products) > a.shape[1]:
        raise ValueError(f"dot_errors: num_products is {num_products}, needed numbers of 1 to {a.shape[1]}")
    if not (a * b).any():
        raise ValueError("dot_errors: every product of a and b is 0, needed one that is not: errors are relative to it")
    size = np.sqrt(np.square(a * b).mean())
    last = np.asarray(num_products) - 1
    for rounding in ROUNDINGS:
        error = _quantize(a, fmt, rounding, scale_rule, seed).dequantize(np.float64) - a
        squares = np.square(np.cumsum(error * b, axis=1)[:, last])  # (m, Ks)
        root = np.sqrt(squares.mean(axis=0))
        deviation = squares.std(axis=0, ddof=1) / np.sqrt(a.shape[0]) if a.shape[0] > 1 else np.zeros(last.size)
        for k, value, spread in zip(num_products, root, deviation, strict=True):
            standard_error = spread / (2 * value) if value else 0.0
            rule = scale_rule or fmt.default_scale_rule
            yield _row(data, fmt, rule, rounding, Quantity.DOT_ERROR, k, value / size, standard_error / size)


def growth_exponent(rows: Sequence[StochasticRow]) -> float:
    """p of the errors' growth as K**p: the slope of least squares in logarithms. 1: bias; 1/2: independent errors.

    Raises:
        ValueError: for fewer than two values of K, or an error of 0.

    >>> def of(k):
    ...     return StochasticRow("", "", "", Rounding.STOCHASTIC, Quantity.DOT_ERROR, k, 3 * k**0.5, 0)
    >>> round(growth_exponent([of(32), of(64), of(1024)]), 6)
    0.5
    """
    if len({row.at for row in rows}) < 2 or any(row.value <= 0 for row in rows):
        raise ValueError("growth_exponent: rows must hold positive errors at two values of K or more")
    k, value = (np.log([getattr(row, name) for row in rows]) for name in ("at", "value"))
    return float(np.polynomial.polynomial.polyfit(k, value, 1)[1])


# --------------------------------------------------------------------------------------------------------- internals
def _quantize(
    x: Float[np.ndarray, "*shape"], fmt: BlockFormat, rounding: Rounding, rule: ScaleRule | None, seed: int
) -> BlockTensor:
    bits = philox_bits(seed, x.shape) if rounding is Rounding.STOCHASTIC else None
    return quantize(x, fmt, axis=-1, scale_rule=rule, rounding=rounding, random_bits=bits)


def _checked(name: str, x: Any, fmt: BlockFormat, caller: str) -> Float64[np.ndarray, "*shape"]:
    if not isinstance(fmt, BlockFormat):
        raise TypeError(f"{caller}: fmt is {fmt!r}, needed a BlockFormat")
    if fmt.tensor_scaled or fmt.is_tile:
        raise ValueError(f"{caller}: fmt is {fmt}, needed one with a power-of-two scale for each run of elements")
    array = as_numpy(x, caller=caller, name=name)
    if array.dtype.kind in "iub":
        raise TypeError(f"{caller}: {name} has the dtype {array.dtype}, needed floating-point numbers")
    array = as_float(array, caller=caller, name=name).astype(np.float64)
    if array.ndim == 0 or not array.size:
        raise ValueError(f"{caller}: {name} has the shape {array.shape}, needed at least one element along an axis")
    if not np.isfinite(array).all():
        raise ValueError(f"{caller}: {name} holds a NaN or an infinity, needed finite numbers")
    magnitude = np.abs(array[array != 0])
    bad = magnitude[(magnitude < 2.0**-_MAX_EXPONENT) | (magnitude >= 2.0**_MAX_EXPONENT)]
    if bad.size:
        raise ValueError(
            f"{caller}: {name} holds the magnitude {bad[0]}, needed 0 or 2**-{_MAX_EXPONENT} to 2**{_MAX_EXPONENT}"
        )
    return array


def _scale_of_each(t: BlockTensor) -> Float64[np.ndarray, "*shape"]:
    """Every element's scale, blocks along the last axis."""
    scales = t.scale_values().astype(np.float64)
    return np.repeat(scales, t.format.block_size, axis=-1)[..., : t.shape[-1]]


def _relative_bias(x: np.ndarray, mean_error: np.ndarray, kept: Any) -> float:
    return float((np.sign(x) * mean_error)[kept].sum() / np.abs(x[kept]).sum())


def _db(signal: float, noise: float) -> float:
    return float(10 * np.log10(signal / noise)) if noise else float(np.inf)


def _row(
    data: str,
    fmt: BlockFormat,
    rule: ScaleRule | None,
    rounding: Rounding,
    quantity: Quantity,
    at: float,
    value: float,
    error: float,
) -> StochasticRow:
    name = rule.name if rule else "none"
    at, value, error = (float(f"{number:.{_SIGNIFICANT_DIGITS}g}") for number in (at, value, error))
    return StochasticRow(data, fmt.name, name, rounding, quantity, at, value, error)
