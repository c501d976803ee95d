"""quantize: real numbers -> BlockTensor, by NUMERICS sections 3 and 7."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, UInt

from mxsim.blocks.block_format import BlockFormat
from mxsim.blocks.layout import (
    CHUNK,
    as_matrices,
    block_of,
    chunks,
    join_blocks,
    normalize_axis,
    per_block,
    split_blocks,
)
from mxsim.blocks.scale_rule import MIN_SCALE_EXPONENT, ScaleRule, scale_exponent
from mxsim.blocks.tensor import BlockTensor, scale_dtype
from mxsim.formats import E2M1, E4M3, E8M0, FP32, Rounding, decode, encode
from mxsim.formats.inputs import as_float, as_numpy

_FLT_MAX = np.finfo(np.float32).max
_TINY = np.finfo(np.float64).smallest_subnormal
_E4M3_NAN = 0x7F
_NAN_SCALE = {E8M0: 0xFF, E4M3: _E4M3_NAN, FP32: np.nan}
_NEAREST_OR_TOWARD_ZERO = (Rounding.TIES_TO_EVEN, Rounding.TIES_TO_AWAY, Rounding.TOWARD_ZERO)
_Scheme = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class NonFinite(Enum):
    """What a NaN or an infinity in the input does."""

    POISON = "poison"  # its whole block decodes to NaN
    RAISE = "raise"  # ValueError that names the first index


class ScaleOrder(Enum):
    """Order of the FP32 operations that make a scale which need not be a power of two (NUMERICS 3.7 and 7.3)."""

    PAPER = "paper"  # NVFP4: (amax / 6) * s_enc
    TE = "te"  # NVFP4: amax * (s_enc * (1 / 6)); FP8: q = x * (448 / amax), scale 1 / (448 / amax)
    DEEPGEMM = "deepgemm"  # FP8: scale amax / 448, q = x * (1 / scale)


def quantize(
    x: Any,
    fmt: BlockFormat,
    *,
    axis: int | None = None,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    nonfinite: NonFinite = NonFinite.POISON,
    scale_order: ScaleOrder | None = None,
    random_bits: UInt[np.ndarray, "*shape"] | None = None,
    num_random_bits: int = 32,
) -> BlockTensor:
    """Blocks of x along axis, each divided by its scale and encoded, saturating, with one rounding.

    Scale 2**X of a block, X by `scale_rule` (None: FLOOR for the MX formats, RCEIL for the FP8 blocks) from its amax,
    clamped to [-127, 127]. An all-zero block has scale 2**-127 (MX) or 1 (FP8), and its codes keep each zero's sign.
    A block with a NaN or an infinity has scale NaN, and codes 0 (MX, NVFP4; NVFP4's scale is 0x7F) or NaN (FP8).
    A last block shorter than the others is quantized as if padded with zeros.

    NVFP4 has no rule; in FP32, ties to even: s_enc = min(2688 / amax(x), FLT_MAX), 1 if amax(x) over the finite
    elements is 0; block scale = E4M3 of (amax / 6) * s_enc; element = E2M1 of x * min(1 / (block scale * (1 / s_enc)),
    FLT_MAX), all zero where the block scale is 0; tensor_scale = 1 / s_enc. A float64 x is rounded to FP32 first.

    `scale_order` TE or DEEPGEMM gives the FP8 blocks FP32 scales that are no powers of two; see `ScaleOrder`.

    Args:
        x: float16/32/64, ml_dtypes.bfloat16 and narrower, integers, or a torch CPU tensor; at least one axis.
        axis: along which blocks run; None is the format's own: -2 for FP8_128X1, else -1. Tiles cover the last two.
        random_bits: unsigned integers of x's shape for Rounding.STOCHASTIC; `mxsim.formats.philox_bits` makes them.

    Raises:
        TypeError: if x is not an array of real numbers of at most 64 bits; for a CUDA tensor (see mxsim.kernels); if
            fmt is no BlockFormat, or a choice no member of its enum.
        ValueError: if x has too few axes, axis does not fit, a rule or order is given that fmt does not have, or, with
            NonFinite.RAISE, x holds a NaN or an infinity (where x is rounded to FP32: also one that it becomes).

    Source: OCP MX v1.0 section 6.3; TransformerEngine's power-of-two rule for the FP8 blocks.
    Departs: zero and non-finite blocks as above; TransformerEngine keeps a NaN to its element, and does not force the
    codes of an NVFP4 block whose scale is 0.

    >>> from mxsim.blocks import MXFP4
    >>> t = quantize([[1.0, -2.5, 7.0, 0.3]], MXFP4)
    >>> t.codes.tolist(), t.scales.tolist(), t.dequantize().tolist()
    ([[2, 12, 7, 1]], [[127]], [[1.0, -2.0, 6.0, 0.5]])
    """
    _check_choices(fmt, scale_rule, rounding, nonfinite, scale_order)
    array = as_float(x, caller="quantize", name="x")
    axis = normalize_axis(axis, array.ndim, fmt, "quantize")
    rule = _checked_rule(fmt, scale_rule, scale_order)
    draws = None if random_bits is None else as_numpy(random_bits, caller="quantize", name="random_bits")
    if draws is not None and draws.shape != array.shape:
        raise ValueError(f"quantize: random_bits has shape {draws.shape}, needed {array.shape}, the shape of x")
    if array.size == 0:  # no block will have its choices checked
        encode(array, fmt.element, rounding=rounding, random_bits=draws, num_random_bits=num_random_bits)
    given = array
    if rule is None and array.dtype == np.float64:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            array = array.astype(np.float32)
    if nonfinite is NonFinite.RAISE:
        _raise_if_nonfinite(array, given)

    scheme: _Scheme
    tensor_scale = None
    if fmt.tensor_scaled:
        s_enc = _nvfp4_encode_scale(array)
        with np.errstate(under="ignore"):
            tensor_scale = np.float32(1) / s_enc
        scheme = partial(_nvfp4_scale, s_enc=s_enc, order=scale_order or ScaleOrder.PAPER)
    elif rule is None:
        assert scale_order is not None
        scheme = partial(_fp32_scale, order=scale_order, limit=np.float32(fmt.element.max_finite))
    else:
        # In float32 a product may underflow, which only the roundings that tell 0 from a tiny value would notice.
        exact_in_float32 = (
            array.dtype == np.float32
            and rounding in _NEAREST_OR_TOWARD_ZERO
            and fmt.element.min_subnormal >= 2 * float(np.finfo(np.float32).smallest_normal)
        )
        scheme = partial(_power_of_two_scale, fmt=fmt, rule=rule, dtype=np.float32 if exact_in_float32 else np.float64)

    codes: np.ndarray = np.empty(array.shape, np.uint8)
    scales: np.ndarray = np.empty(fmt.scales_shape(array.shape, axis), scale_dtype(fmt))
    block = block_of(fmt, axis)
    source, target, target_scales = (as_matrices(a, fmt, axis) for a in (array, codes, scales))
    source_draws = None if draws is None else as_matrices(draws, fmt, axis)
    for piece, blocks in chunks(source.shape, block):
        encode_elements = partial(
            encode,
            fmt=fmt.element,
            rounding=rounding,
            random_bits=None if source_draws is None else split_blocks(source_draws[piece], block),
            num_random_bits=num_random_bits,
        )
        chunk, target_scales[blocks] = _quantize_blocks(
            split_blocks(source[piece], block), fmt, scheme, encode_elements
        )
        target[piece] = join_blocks(chunk, *source[piece].shape[1:])
    return BlockTensor(codes, scales, fmt, axis, tensor_scale)


def _quantize_blocks(
    x: Float[np.ndarray, "stack block_rows rows block_columns columns"],
    fmt: BlockFormat,
    scheme: _Scheme,
    encode_elements: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of whole blocks: amax, scale, division by the scale, encoding."""
    amax = np.abs(x).max(axis=(2, 4))
    poisoned = ~np.isfinite(amax)  # a NaN wins every maximum
    scales, factor = scheme(np.where(poisoned, 0, amax).astype(amax.dtype))
    if poisoned.any():
        scales[poisoned] = _NAN_SCALE[fmt.scale]
        factor[poisoned] = 0
    if not factor.all():  # blocks without a usable scale hold +0
        x = np.where(per_block(factor == 0), x.dtype.type(0), x)
    with np.errstate(over="ignore", under="ignore"):
        scaled = x * per_block(factor)
        if scaled.dtype == np.float64:  # the smallest float64 over 2**127 is no float64: not 0, but tiny
            lost = (scaled == 0) & (x != 0)
            if lost.any():
                scaled = np.where(lost, np.copysign(_TINY, x), scaled)
        codes = encode_elements(scaled)
    if fmt.scale == FP32 and poisoned.any():
        codes = np.where(per_block(poisoned), np.uint8(fmt.element.nan_code or 0), codes)
    return codes, scales


# --------------------------------------------------------------- scales: amax of each block -> (stored scale, factor)
def _power_of_two_scale(
    amax: Float[np.ndarray, "*blocks"], *, fmt: BlockFormat, rule: ScaleRule, dtype: type[np.floating[Any]]
) -> tuple[np.ndarray, np.ndarray]:
    exponent = scale_exponent(amax, fmt.element, rule)
    if fmt.scale == FP32:
        exponent = np.where(amax == 0, 0, exponent)
        stored = np.ldexp(np.float32(1), exponent.astype(np.int32))
    else:
        stored = (exponent - MIN_SCALE_EXPONENT).astype(np.uint8)
    return stored, np.ldexp(dtype(1), -exponent.astype(np.int32))


def _fp32_scale(
    amax: Float[np.ndarray, "*blocks"], *, order: ScaleOrder, limit: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """NUMERICS 7.3, every operation FP32. amax = 0: scale 1. Reciprocals stop at FLT_MAX."""
    one = np.float32(1)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        if order is ScaleOrder.TE:
            factor = np.where(amax == 0, one, np.minimum(limit / amax, _FLT_MAX))
            return one / factor, factor
        scale = np.where(amax == 0, one, amax / limit)
        return scale, np.where(scale == 0, np.float32(0), np.minimum(one / scale, _FLT_MAX))


def _nvfp4_scale(
    amax: Float[np.ndarray, "*blocks"], *, s_enc: np.float32, order: ScaleOrder
) -> tuple[np.ndarray, np.ndarray]:
    """NUMERICS 3.7, every operation FP32."""
    one, six = np.float32(1), np.float32(E2M1.max_finite)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        quotient = (amax / six) * s_enc if order is ScaleOrder.PAPER else amax * (s_enc * (one / six))
        stored = encode(quotient, E4M3)
        scale = decode(stored, E4M3)
        factor = np.minimum(one / (scale * (one / s_enc)), _FLT_MAX)
    return stored, np.where(scale == 0, np.float32(0), factor)


def _nvfp4_encode_scale(x: Float[np.ndarray, "*shape"]) -> np.float32:
    """s_enc = min(2688 / amax, FLT_MAX), amax over the finite elements; 1 if that is 0."""
    amax = np.float32(0)
    flat = x.reshape(-1)
    for start in range(0, x.size, CHUNK):
        piece = np.abs(flat[start : start + CHUNK])
        amax = np.max(piece, initial=amax, where=np.isfinite(piece))
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(E4M3.max_finite * E2M1.max_finite) / amax, _FLT_MAX)


# -------------------------------------------------------------------------------------------------------- arguments
def _check_choices(fmt: Any, scale_rule: Any, rounding: Any, nonfinite: Any, scale_order: Any) -> None:
    if not isinstance(fmt, BlockFormat):
        raise TypeError(f"quantize: fmt is {fmt!r}, needed a BlockFormat")
    choices: list[tuple[str, Any, type, bool]] = [
        ("scale_rule", scale_rule, ScaleRule, True),
        ("rounding", rounding, Rounding, False),
        ("nonfinite", nonfinite, NonFinite, False),
        ("scale_order", scale_order, ScaleOrder, True),
    ]
    for name, value, kind, may_be_none in choices:
        if not (isinstance(value, kind) or (value is None and may_be_none)):
            needed = f"a {kind.__name__} or None" if may_be_none else f"a {kind.__name__}"
            raise TypeError(f"quantize: {name} is {value!r}, needed {needed}")


def _checked_rule(fmt: BlockFormat, rule: ScaleRule | None, order: ScaleOrder | None) -> ScaleRule | None:
    """The rule to apply, None where scales are no powers of two."""
    orders: tuple[ScaleOrder, ...] = ()
    if fmt.tensor_scaled:
        orders = (ScaleOrder.PAPER, ScaleOrder.TE)
    elif fmt.scale == FP32:
        orders = (ScaleOrder.TE, ScaleOrder.DEEPGEMM)
    if order is not None and order not in orders:
        needed = " or ".join(["None", *(o.name for o in orders)])
        raise ValueError(f"quantize: scale_order is {order.name}, needed {needed} for {fmt}")
    if rule is not None and (fmt.tensor_scaled or order is not None):
        raise ValueError(f"quantize: scale_rule is {rule.name}, but the scales of {fmt} are no powers of two here")
    if fmt.tensor_scaled or order is not None:
        return None
    if rule is None and fmt.default_scale_rule is None:
        raise ValueError(f"quantize: scale_rule is None, but {fmt} has no default rule; needed a ScaleRule")
    return rule or fmt.default_scale_rule


def _raise_if_nonfinite(x: Float[np.ndarray, "*shape"], given: Float[np.ndarray, "*shape"]) -> None:
    finite = np.isfinite(x)
    if not finite.all():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), x.shape))
        raise ValueError(f"quantize: x has {given[index]} at index {index}, needed finite values (nonfinite is RAISE)")
