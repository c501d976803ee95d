"""What decides whether FP4 -> FP8 loses nothing: the exponents of neighbouring MXFP4 blocks (NUMERICS 4.5)."""

import numpy as np
from jaxtyping import Bool, Int

from mxsim.blocks import MXFP4, BlockTensor
from mxsim.blocks.layout import block_of
from mxsim.formats import E2M1, E4M3, E8M0, decode_table

BLOCKS_PER_GROUP = 4  # blocks of 32 that become one FP8 block of 128
_NAN_SCALE_CODE = E8M0.nan_code
_NOTHING_TO_LOSE = 1000  # more than any difference of exponents


def exponent_spread(t: BlockTensor) -> Int[np.ndarray, "*groups"]:
    """Largest minus smallest scale exponent in each group of four neighbouring blocks; -1 for a group without any.

    Blocks that hold only zeros, whose scale means nothing, and NaN scales are left out. The last group along the axis
    may have fewer than four blocks. Groups lie along the last axis of the result.

    Raises:
        ValueError: if t is not MXFP4.

    >>> from mxsim.blocks import quantize
    >>> exponent_spread(quantize([6.0] * 32 + [0.0] * 64 + [0.75] * 32, MXFP4))
    array([3])
    """
    exponents, is_nan = _exponents(t)
    ignored = is_nan | (_reduce_blocks(np.maximum, t.codes & E2M1.magnitude_mask, t) == 0)
    highest = _reduce_groups(np.maximum, np.where(ignored, -_NOTHING_TO_LOSE, exponents))
    lowest = _reduce_groups(np.minimum, np.where(ignored, _NOTHING_TO_LOSE, exponents))
    spread: np.ndarray = np.maximum(highest - lowest, -1)
    return spread


def is_lossless(t: BlockTensor, *, headroom: int) -> Bool[np.ndarray, "*groups"]:
    """Whether `fp4_row_to_fp8_row` with this headroom keeps every value of the group, group by group.

    1. An element v becomes v * 2**(headroom - d), d = E - E_i, E the group's largest exponent (NaN scales left out).
    2. v has at most two significant bits, so E4M3 holds that iff its lowest set bit is at least E4M3.min_subnormal:
       lowest_bit(v) + headroom - d >= -9. Overflow cannot occur for headroom <= 6.
    3. A block is judged by its smallest lowest_bit: -1 for 0.5 and 1.5, the d <= 8 + headroom of NUMERICS 4.5; more
       where a block holds only larger values.

    NaN blocks stay NaN: they lose nothing.

    Raises:
        ValueError: if t is not MXFP4, or headroom is outside 0..6.
    """
    if not 0 <= headroom <= 6:
        raise ValueError(f"is_lossless: headroom is {headroom}, needed 0 to 6")
    exponents, is_nan = _exponents(t)
    lowest_bit = _reduce_blocks(np.minimum, _LOWEST_BIT[t.codes], t)
    shared = _reduce_groups(np.maximum, np.where(is_nan, -_NOTHING_TO_LOSE, exponents))
    d = np.repeat(shared, BLOCKS_PER_GROUP, axis=-1)[..., : exponents.shape[-1]] - exponents
    exact = is_nan | (lowest_bit + headroom - d >= _E4M3_LOWEST_BIT)
    return _reduce_groups(np.logical_and, exact)


def _exponents(t: BlockTensor) -> tuple[Int[np.ndarray, "*blocks"], Bool[np.ndarray, "*blocks"]]:
    """Unbiased scale exponents and which scales are NaN, the blocks of the axis along the last axis."""
    if t.format != MXFP4:
        raise ValueError(f"t has format {t.format}, needed MXFP4")
    scales = np.moveaxis(t.scales, t.axis, -1)
    return scales.astype(np.int64) + E8M0.emin, scales == _NAN_SCALE_CODE


def _reduce_blocks(ufunc: np.ufunc, per_element: np.ndarray, t: BlockTensor) -> np.ndarray:
    starts = np.arange(0, t.shape[t.axis], max(block_of(t.format, t.axis)))
    return np.moveaxis(ufunc.reduceat(per_element, starts, axis=t.axis), t.axis, -1)


def _reduce_groups(ufunc: np.ufunc, per_block: np.ndarray) -> np.ndarray:
    return ufunc.reduceat(per_block, np.arange(0, per_block.shape[-1], BLOCKS_PER_GROUP), axis=-1)


def _lowest_bits(values: np.ndarray) -> np.ndarray:
    """Exponent of the lowest set bit of each value; _NOTHING_TO_LOSE for zero."""
    unit_exponent = E2M1.emin - E2M1.mantissa_bits
    units = np.ldexp(np.abs(values), -unit_exponent).astype(np.int64)
    _, exponents = np.frexp(units & -units)
    return np.where(units == 0, _NOTHING_TO_LOSE, exponents - 1 + unit_exponent)


_LOWEST_BIT = _lowest_bits(decode_table(E2M1)).astype(np.int16)
_E4M3_LOWEST_BIT = E4M3.emin - E4M3.mantissa_bits
