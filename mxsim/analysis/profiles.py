"""Rule sets of quantizers: what decides their bytes, as data, and the bytes that follow.

Two quantizers of one format differ in few things: how a block's largest magnitude becomes a scale, in which order FP32
divides, where ties go, what stands for a block of zeros, and what a NaN does. A `Profile` states each of them;
`mxsim.analysis.profile_catalog` has those of public libraries.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from mxsim.blocks import BlockFormat, ScaleRule, scale_exponent
from mxsim.formats import E8M0, FP32, FloatFormat, decode
from mxsim.formats.inputs import as_numpy, check_subnormals

_FLT_MAX = np.finfo(np.float32).max
_NAN_BYTE, _LARGEST_BYTE, _BIAS = 0xFF, 0xFE, 127
_FLOAT_DTYPES = ("float16", "bfloat16", "float32")


class TieRule(Enum):
    """Where an element half-way between two codes goes; everything else goes to the nearest."""

    TO_EVEN = "ties to the even code"
    AWAY = "ties away from zero"
    TOWARD_ZERO = "ties toward zero"


class Quotient(Enum):
    """What the scale rule is applied to, max being the element format's largest value; FP32, ties to even."""

    EXACT = "amax itself, exactly"
    DIVIDE = "amax / max"
    MULTIPLY = "amax * (1 / max)"  # two roundings: of 1 / max, and of the product
    INVERT = "1 / (max / amax)"  # two roundings


class Factor(Enum):
    """How elements are scaled where the scale is no power of two; FP32, ties to even."""

    ONE_OVER_SCALE = "x * (1 / scale)"
    DIVIDE = "x / scale"
    MAX_OVER_AMAX = "x * (max / amax)"


class NonFinitePolicy(Enum):
    """What a NaN or an infinity in a block does."""

    POISON = "scale NaN; codes 0 beside an E8M0 scale, else NaN"
    PROPAGATE = "amax is NaN or infinite; beside a NaN every finite element is divided by infinity"
    PROPAGATE_BLOCK = "amax is NaN or infinite; beside a NaN every element is NaN"
    IGNORE_NAN = "a NaN stays with its element, an infinity saturates scale and element"
    UNSPECIFIED = "the source does not say: such blocks are left out of every comparison"


@dataclass(frozen=True)
class Profile:
    """A quantizer's rules. Blocks run along the last axis; amax = max(largest magnitude of the block, amax_floor).

    E8M0 scales: q by `quotient`, then `scale_rule` (RCEIL rounds q up to a power of two, FLOOR down; EXACT takes any
    rule), the byte at least `smallest_byte` where q > 0. Where the byte is 0, elements are divided by
    2**`byte0_exponent` whatever the byte says, or are all zero (None).
    FP32 scales: q itself, or rounded to a power of two where there is a `scale_rule`; elements by `factor`.

    Attributes:
        source: where the rules are published, and what of them is left out here.
        zero_block: scale byte, or FP32 scale, of a block of zeros; None: what the rules give for amax_floor.
        keeps_zero_sign: whether a code of magnitude 0 keeps the sign of its element.
        nan_code: the code that a NaN element gets where the block is not poisoned, without its sign.

    >>> from mxsim.blocks import MXFP4
    >>> ours = Profile("ours", "", MXFP4, ScaleRule.FLOOR)
    >>> codes, scales = ours.quantize(np.array([[7.0, 2.5, -0.0]], np.float32))
    >>> codes.tolist(), scales.tolist()
    ([[7, 4, 8]], [[127]])
    """

    name: str
    source: str
    format: BlockFormat
    scale_rule: ScaleRule | None
    quotient: Quotient = Quotient.EXACT
    factor: Factor = Factor.ONE_OVER_SCALE
    ties: TieRule = TieRule.TO_EVEN
    amax_floor: float = 0.0
    smallest_byte: int = 0
    zero_block: float | None = None
    byte0_exponent: int | None = -127
    keeps_zero_sign: bool = True
    nonfinite: NonFinitePolicy = NonFinitePolicy.POISON
    nan_code: int = 0

    def __post_init__(self) -> None:
        if self.format.scale not in (E8M0, FP32) or self.format.is_tile or self.format.default_axis != -1:
            raise ValueError(f"Profile: format is {self.format}, needed blocks along rows with E8M0 or FP32 scales")
        if self.format.scale == E8M0 and self.scale_rule is None:
            raise ValueError(f"Profile: scale_rule is None, needed a rule for the E8M0 scales of {self.format}")
        if self.quotient is Quotient.EXACT and self.scale_rule is None:
            raise ValueError("Profile: quotient is EXACT, but without a scale_rule the scale is a quotient")
        if self.quotient is not Quotient.EXACT and self.scale_rule in (ScaleRule.CEIL, ScaleRule.EVEN):
            raise ValueError(f"Profile: scale_rule is {self.scale_rule.name}, needed RCEIL or FLOOR for a quotient")

    def quantize(self, x: Any) -> tuple[UInt8[np.ndarray, "*shape"], np.ndarray]:
        """(codes, one a byte, of x's shape; scales [..., ceil(K / block)]: E8M0 codes or float32).

        A last block shorter than the others is padded with zeros.

        Args:
            x: float16, bfloat16 or float32 of at least one axis.

        Raises:
            TypeError: if x has another dtype.
            ValueError: if x has no axis.
        """
        values = float32_of(x, "quantize")
        blocks = self._blocks(values)
        nan = np.isnan(blocks)
        magnitude = np.abs(blocks)
        if self.nonfinite is NonFinitePolicy.IGNORE_NAN:
            magnitude = np.where(nan, np.float32(0), magnitude)
        largest = magnitude.max(axis=-1, initial=0)  # a NaN wins every maximum
        poisons = self.nonfinite in (NonFinitePolicy.POISON, NonFinitePolicy.UNSPECIFIED)
        poisoned = ~np.isfinite(largest) & poisons
        amax = np.maximum(np.where(poisoned, np.float32(0), largest), np.float32(self.amax_floor))
        is_zero = (largest == 0) & ~nan.any(axis=-1)

        with np.errstate(all="ignore"):
            if self.format.scale == E8M0:
                scales, scaled = self._e8m0(blocks, amax, is_zero)
            else:
                scales, scaled = self._fp32(blocks, amax, is_zero)
        codes = _nearest(scaled, self.format.element, self.ties)
        negative = np.signbit(blocks)
        if not self.keeps_zero_sign:
            negative &= codes != 0
        codes |= np.where(negative, np.uint8(self.format.element.sign_mask), np.uint8(0))
        codes = self._with_nans(codes, np.isnan(scaled), negative & nan, amax)
        if poisoned.any():
            is_e8m0 = self.format.scale == E8M0
            codes[poisoned] = 0 if is_e8m0 else self.format.element.nan_code
            scales[poisoned] = _NAN_BYTE if is_e8m0 else np.nan
        flat = codes.reshape(*values.shape[:-1], codes.shape[-2] * codes.shape[-1])
        return np.ascontiguousarray(flat[..., : values.shape[-1]]), scales

    def judges(self, x: Any) -> Bool[np.ndarray, "*blocks"]:
        """Which blocks of x the profile speaks of: all, but those with a NaN or an infinity under UNSPECIFIED."""
        blocks = self._blocks(float32_of(x, "judges"))
        is_finite: np.ndarray = np.isfinite(blocks).all(axis=-1)
        return is_finite | (self.nonfinite is not NonFinitePolicy.UNSPECIFIED)

    def _blocks(self, values: Float32[np.ndarray, "*batch k"]) -> Float32[np.ndarray, "*batch blocks block"]:
        *batch, size = values.shape
        width = min(self.format.block_size, max(size, 1))  # one short block needs no padding
        count = -(-size // width)
        if count * width != size:
            values = np.concatenate([values, np.zeros((*batch, count * width - size), np.float32)], axis=-1)
        return values.reshape(*batch, count, width)

    def _e8m0(self, blocks: np.ndarray, amax: np.ndarray, is_zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        byte = self._power_of_two(amax) + _BIAS
        if self.zero_block is not None:
            byte = np.where(is_zero, int(self.zero_block), byte)
        exponent = byte - _BIAS
        if self.byte0_exponent is not None:
            exponent = np.where(byte == 0, self.byte0_exponent, exponent)
        scaled = np.ldexp(blocks.astype(np.float64), -exponent[..., None].astype(np.int32))
        if self.byte0_exponent is None:
            scaled = np.where((byte == 0)[..., None], 0.0, scaled)
        return byte.astype(np.uint8), scaled

    def _fp32(self, blocks: np.ndarray, amax: np.ndarray, is_zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        limit, one = np.float32(self.format.element.max_finite), np.float32(1)
        if self.scale_rule is not None:
            scale = np.ldexp(one, self._power_of_two(amax).astype(np.int32))
        else:
            scale = self._quotient(amax)
        if self.zero_block is not None:
            scale = np.where(is_zero, np.float32(self.zero_block), scale)
        if self.factor is Factor.DIVIDE:
            return scale, blocks / scale[..., None]
        factor = one / scale if self.factor is Factor.ONE_OVER_SCALE else np.minimum(limit / amax, _FLT_MAX)
        return scale, blocks * factor[..., None]

    def _quotient(self, amax: Float32[np.ndarray, "*blocks"]) -> Float32[np.ndarray, "*blocks"]:
        limit, one = np.float32(self.format.element.max_finite), np.float32(1)
        if self.quotient is Quotient.MULTIPLY:
            return amax * (one / limit)
        if self.quotient is Quotient.INVERT:
            return one / np.minimum(limit / amax, _FLT_MAX)
        return amax / limit

    def _power_of_two(self, amax: Float32[np.ndarray, "*blocks"]) -> Int64[np.ndarray, "*blocks"]:
        """Exponent of the scale, [-127, 128]; a NaN amax gives 128, which is byte 0xFF."""
        assert self.scale_rule is not None
        element, is_finite = self.format.element, np.isfinite(amax)
        if self.quotient is Quotient.EXACT:
            exponent = scale_exponent(np.where(is_finite, amax, 0), element, self.scale_rule)
            at_infinity = 128 - element.emax  # an infinity taken as 2**128
            is_positive = amax > 0
        else:
            q = self._quotient(amax)
            fraction, exponent = np.frexp(np.where(np.isfinite(q), q, 0).astype(np.float64))
            goes_down = (fraction == 0.5) | (self.scale_rule is ScaleRule.FLOOR)  # 0.5 <= fraction < 1
            exponent = exponent.astype(np.int64) - goes_down
            exponent = np.where(q == 0, -_BIAS, np.clip(exponent, -_BIAS, _BIAS))
            at_infinity = _LARGEST_BYTE - _BIAS
            is_positive = q > 0
        exponent = np.where(is_positive, np.maximum(exponent, self.smallest_byte - _BIAS), exponent)
        exponent = np.where(np.isinf(amax), at_infinity, exponent)
        result: np.ndarray = np.where(np.isnan(amax), _NAN_BYTE - _BIAS, exponent)
        return result

    def _with_nans(
        self,
        codes: UInt8[np.ndarray, "*blocks block"],
        is_nan: Bool[np.ndarray, "*blocks block"],
        negative: Bool[np.ndarray, "*blocks block"],
        amax: Float32[np.ndarray, "*blocks"],
    ) -> UInt8[np.ndarray, "*blocks block"]:
        """Codes of NaN elements, and of their neighbours."""
        nan_code = np.uint8(self.nan_code)
        if self.nonfinite is NonFinitePolicy.PROPAGATE_BLOCK:
            return np.where(np.isnan(amax)[..., None], nan_code, np.where(is_nan, nan_code, codes))
        if self.nonfinite is NonFinitePolicy.PROPAGATE:
            sign = np.uint8(self.format.element.sign_mask)
            codes = np.where(np.isnan(amax)[..., None], codes & sign, codes)
            return np.where(is_nan, nan_code | np.where(negative, sign, np.uint8(0)), codes)
        return np.where(is_nan, nan_code, codes)


def float32_of(x: Any, caller: str, name: str = "x") -> Float32[np.ndarray, "*shape"]:
    """x as float32, exactly.

    Raises:
        TypeError: unless x holds float16, bfloat16 or float32.
        ValueError: if x has no axis.
    """
    check_subnormals(caller)
    array = as_numpy(x, caller=caller, name=name)
    if str(array.dtype.newbyteorder("=")) not in _FLOAT_DTYPES:
        raise TypeError(f"{caller}: {name} has dtype {array.dtype}, needed float16, bfloat16 or float32")
    if array.ndim == 0:
        raise ValueError(f"{caller}: {name} is a scalar, needed at least one axis")
    return array.astype(np.float32)


def _nearest(x: Float64[np.ndarray, "*shape"], element: FloatFormat, ties: TieRule) -> UInt8[np.ndarray, "*shape"]:
    """Magnitude codes of the nearest values, saturating; a NaN gives the largest."""
    values = decode(np.arange(element.max_code + 1, dtype=np.uint8), element).astype(np.float64)
    midpoints = (values[:-1] + values[1:]) / 2  # exact
    magnitude = np.abs(x)
    lower = np.searchsorted(midpoints, magnitude, side="left")
    if ties is TieRule.TOWARD_ZERO:
        return lower.astype(np.uint8)
    upper = np.searchsorted(midpoints, magnitude, side="right")
    if ties is TieRule.TO_EVEN:
        upper = np.where(lower % 2 == 0, lower, upper)
    return upper.astype(np.uint8)
