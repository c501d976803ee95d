"""Implementations with one fault each. Most let a correct op work and spoil what it gets or what it gives."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mxsim import kernels
from mxsim.blocks import MXFP4, ScaleRule, quantize
from mxsim.formats import E2M1, Rounding, encode, pack
from mxsim.kernels import Fp4Rows, Fp8Cols, Fp8Rows, Fp8Tiles


class Mutant(NamedTuple):
    """step: text that the report must hold among the steps of NUMERICS that are broken."""

    op: str
    step: str
    function: Callable[..., Any]


MUTANTS: dict[str, Mutant] = {}


def _mutant(op: str, step: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[function.__name__] = Mutant(op, step, function)
        return function

    return register


# -------------------------------------------------------------------------------------------------- BF16 to MXFP4 rows
def _quantized(x: Tensor, rounding: Rounding) -> Fp4Rows:
    t = quantize(x.reshape(-1, x.shape[-1]), MXFP4, rounding=rounding)
    return Fp4Rows(torch.from_numpy(t.packed()), torch.from_numpy(t.scales))


def _encoded(x: Tensor, exponents: np.ndarray) -> Fp4Rows:
    """With the given scale exponents."""
    values = x.reshape(-1, x.shape[-1]).double().numpy()
    codes = encode(np.ldexp(values, -np.repeat(exponents, 32, axis=-1).astype(np.int32)), E2M1)
    return Fp4Rows(torch.from_numpy(pack(codes, E2M1)), torch.from_numpy((exponents + 127).astype(np.uint8)))


def _nibbles(codes: Tensor) -> Tensor:
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)


def _bytes(nibbles: Tensor) -> Tensor:
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def truncates(x):
    return _quantized(x, Rounding.TOWARD_ZERO)


@_mutant("bf16_to_fp4_row", "3.5 rounding of ties")
def rounds_ties_away(x):
    return _quantized(x, Rounding.TIES_TO_AWAY)


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def ignores_the_seed(x, *, scale_rule=ScaleRule.FLOOR, rounding=Rounding.TIES_TO_EVEN, seed=None):
    return kernels.bf16_to_fp4_row(x, scale_rule=scale_rule)


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def drops_the_high_word_of_the_seed(x, *, scale_rule=ScaleRule.FLOOR, rounding=Rounding.TIES_TO_EVEN, seed=None):
    low = None if seed is None else seed % 2**32
    return kernels.bf16_to_fp4_row(x, scale_rule=scale_rule, rounding=rounding, seed=low)


@_mutant("bf16_to_fp8_row", "7.1 rounding")
def draws_for_padding_rows_too(x, *, group_sizes=None, row_multiple=4, rounding=Rounding.TIES_TO_EVEN, seed=None):
    """The draws of the padded row that an element goes to."""
    options = {"rounding": rounding, "seed": seed}
    result = kernels.bf16_to_fp8_row(x, group_sizes=group_sizes, row_multiple=row_multiple, **options)
    if rounding is Rounding.TIES_TO_EVEN or group_sizes is None:
        return result
    rows = x.reshape(-1, x.shape[-1])
    padded, first, target = torch.zeros(result.codes.shape, dtype=x.dtype), 0, 0
    for size, room in zip(list(group_sizes), result.padded_group_sizes.tolist(), strict=True):
        padded[target : target + int(size)] = rows[first : first + int(size)]
        first, target = first + int(size), target + room
    return result._replace(codes=kernels.bf16_to_fp8_row(padded, **options).codes)


@_mutant("bf16_to_fp4_row", "3.5")
def wraps_on_overflow(x):
    """7 and more round to 8, whose code is -0."""
    codes, scales = kernels.bf16_to_fp4_row(x)
    scale = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.int() - 127).repeat_interleave(32, -1)
    overflows = (x.reshape(-1, x.shape[-1]).double().abs() >= 7 * scale) & (scales != 255).repeat_interleave(32, -1)
    nibbles = _nibbles(codes)
    return Fp4Rows(_bytes(torch.where(overflows, nibbles + 1 & 0xF, nibbles)), scales)


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def clamps_before_rounding(x):
    """To the midpoint below 6, which ties to 4."""
    codes, scales = kernels.bf16_to_fp4_row(x)
    nibbles = _nibbles(codes)
    return Fp4Rows(_bytes(torch.where(nibbles & 7 == 7, nibbles - 1, nibbles)), scales)


@_mutant("bf16_to_fp4_row", "3.3 NaN or infinity")
def ignores_nan(x):
    return kernels.bf16_to_fp4_row(torch.where(x.isnan(), 0, x))


@_mutant("bf16_to_fp4_row", "3.3 NaN or infinity")
def saturates_infinity(x):
    limit = torch.finfo(x.dtype).max
    return kernels.bf16_to_fp4_row(torch.where(x.isinf(), x.sign() * limit, x))


@_mutant("bf16_to_fp4_row", "3.2 scale")
def scale_off_by_one_at_one_exponent(x):
    codes, scales = kernels.bf16_to_fp4_row(x)
    return Fp4Rows(codes, torch.where(scales == 0x90, 0x91, scales).to(torch.uint8))


@_mutant("bf16_to_fp4_row", "3.2 scale")
def rceil_adds_one_at_the_threshold(x, *, scale_rule=ScaleRule.FLOOR):
    result = kernels.bf16_to_fp4_row(x, scale_rule=scale_rule)
    if scale_rule is not ScaleRule.RCEIL or not x.numel():
        return result
    amax = x.reshape(-1, x.shape[-1] // 32, 32).abs().amax(-1).double().numpy()
    at_threshold = (np.frexp(amax)[0] == 0.75) & (result.scales.numpy() < 254)
    moved = _encoded(torch.nan_to_num(x, 0.0, 0.0, 0.0), result.scales.numpy().astype(np.int64) - 127 + at_threshold)
    rows = torch.from_numpy(np.repeat(at_threshold, 16, axis=-1))
    return Fp4Rows(
        torch.where(rows, moved.codes, result.codes),
        torch.where(torch.from_numpy(at_threshold), moved.scales, result.scales),
    )


@_mutant("bf16_to_fp4_row", "2.4 sign of zero")
def loses_the_sign_of_zero(x):
    codes, scales = kernels.bf16_to_fp4_row(x)
    nibbles = _nibbles(codes)
    return Fp4Rows(_bytes(torch.where(nibbles == 8, 0, nibbles)), scales)


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def flushes_subnormal_inputs(x):
    return kernels.bf16_to_fp4_row(torch.where(x.abs() < torch.finfo(x.dtype).tiny, x * 0, x))


@_mutant("bf16_to_fp4_row", "3.4 all-zero block")
def zero_blocks_have_scale_one(x):
    codes, scales = kernels.bf16_to_fp4_row(x)
    is_zero = (x.reshape(-1, x.shape[-1] // 32, 32) == 0).all(-1)
    return Fp4Rows(codes, torch.where(is_zero, 127, scales).to(torch.uint8))


@_mutant("bf16_to_fp4_row", "3.4 all-zero block")
def zero_blocks_have_scale_nan(x):
    """As an exponent of -128 that is cut to a byte; where the other value is NaN's, too, they only change places."""
    codes, scales = kernels.bf16_to_fp4_row(x)
    blocks = x.reshape(-1, x.shape[-1] // 32, 32)
    is_zero, is_nan = (blocks == 0).all(-1), ~blocks.isfinite().all(-1)
    scales = torch.where(is_zero, 255, torch.where(is_nan, 0, scales))
    return Fp4Rows(codes, scales.to(torch.uint8))


@_mutant("bf16_to_fp4_row", "elsewhere")
def swaps_the_nibbles(x):
    codes, scales = kernels.bf16_to_fp4_row(x)
    return Fp4Rows(codes >> 4 | codes << 4, scales)


@_mutant("bf16_to_fp4_row", "3.5 rounding")
def rounds_float32_twice(x):
    return kernels.bf16_to_fp4_row(x.to(torch.bfloat16))


@_mutant("bf16_to_fp4_row", "3.")
def reads_views_as_contiguous(x):
    strides = torch.empty(x.shape, device="meta").stride()
    return kernels.bf16_to_fp4_row(x.as_strided(x.shape, strides))


@_mutant("bf16_to_fp4_row", "3.")
def forgets_the_storage_offset(x):
    return kernels.bf16_to_fp4_row(x.as_strided(x.shape, x.stride(), 0))


# ------------------------------------------------------------------------------------------------- MXFP4 rows to FP8
@_mutant("fp4_row_to_fp8_row", "4.3 and 4.4 rounding")
def flushes_subnormal_results(codes, scales, **options):
    out = kernels.fp4_row_to_fp8_row(codes, scales, **options)
    bits = out.codes.view(torch.uint8)
    flushed = torch.where(bits & 0x78 == 0, bits & 0x80, bits)
    return out._replace(codes=flushed.view(torch.float8_e4m3fn))


@_mutant("fp4_row_to_fp8_row", "4.1 and 4.2 scale")
def ignores_headroom(codes, scales, *, headroom=6, **options):
    return kernels.fp4_row_to_fp8_row(codes, scales, **options)


@_mutant("fp4_row_to_fp8_row", "4.1 and 4.2 scale")
def nan_scales_count_as_the_largest(codes, scales, *, headroom=6):
    e8m0 = scales.view(torch.uint8)
    raised = torch.where(e8m0 == 255, 254, e8m0).to(torch.uint8)
    out = kernels.fp4_row_to_fp8_row(codes, raised, headroom=headroom)
    is_nan = (e8m0 == 255).reshape(-1, e8m0.shape[-1]).repeat_interleave(32, -1)
    bits = torch.where(is_nan, 0x7F, out.codes.view(torch.uint8)).to(torch.uint8)
    return Fp8Rows(bits.view(torch.float8_e4m3fn), out.scales)


@_mutant("fp4_row_to_fp8_row", "8 layout")
def scales_lie_row_by_row(codes, scales, *, headroom=6):
    out = kernels.fp4_row_to_fp8_row(codes, scales, headroom=headroom)
    return out._replace(scales=out.scales.contiguous())


@_mutant("fp4_row_to_fp8_row", "8 padding")
def padding_rows_have_scale_zero(codes, scales, *, group_sizes, **options):
    out = kernels.fp4_row_to_fp8_row(codes, scales, group_sizes=group_sizes, **options)
    blocks = out.codes.shape[1] // 128
    spoiled, start = out.scales.clone(), 0
    for size, padded in zip(list(group_sizes), out.padded_group_sizes.tolist(), strict=True):
        spoiled[start * blocks : (start + padded) * blocks].view(blocks, padded)[:, int(size) :] = 0
        start += padded
    return out._replace(scales=spoiled)


@_mutant("fp4_row_to_fp8_col", "5.2 padding")
def padding_is_garbage(codes, scales, *, headroom=6):
    out = kernels.fp4_row_to_fp8_col(codes, scales, headroom=headroom)
    bits = out.codes.view(torch.uint8).clone()
    bits[:, scales.reshape(-1, scales.shape[-1]).shape[0] :] = 0xAA
    return out._replace(codes=bits.view(torch.float8_e4m3fn))


@_mutant("fp4_row_to_fp8_col", "8 layout: the right FP8 codes, elsewhere")
def experts_are_swapped(codes, scales, *, group_sizes, headroom=6):
    """The first expert's codes come last."""
    out = kernels.fp4_row_to_fp8_col(codes, scales, group_sizes=group_sizes, headroom=headroom)
    sizes = out.padded_group_sizes.tolist()
    moved = torch.roll(out.codes.view(torch.uint8), -2 * codes.shape[-1] * (sizes[0] if sizes else 0))
    return out._replace(codes=moved.view(torch.float8_e4m3fn))


@_mutant("fp4_row_to_fp8_col", "8 layout: the right FP32 scales, elsewhere")
def scales_are_transposed(codes, scales, *, headroom=6):
    out = kernels.fp4_row_to_fp8_col(codes, scales, headroom=headroom)
    return out._replace(scales=out.scales.t().reshape(out.scales.shape))


@_mutant("fp4_row_to_fp8_col", "8 padded group sizes")
def padded_sizes_are_not_padded(codes, scales, *, group_sizes, headroom=6):
    out = kernels.fp4_row_to_fp8_col(codes, scales, group_sizes=group_sizes, headroom=headroom)
    return out._replace(padded_group_sizes=torch.as_tensor(group_sizes, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------------------- FP8 rows
@_mutant("fp8_row_to_fp8_col", "5.4 rounding")
def drops_the_implicit_bit(codes, scales, *, group_sizes=None):
    """What underflows loses the leading one of its significand."""
    out = kernels.fp8_row_to_fp8_col(codes, scales, group_sizes=group_sizes)
    bits = out.codes.view(torch.uint8).numpy()
    leading = np.array([0, 1, 2, 2, 4, 4, 4, 4] + [0] * 248, np.uint8)
    dropped = bits & ~np.where(bits & 0x78 == 0, leading[bits & 7], 0).astype(np.uint8)
    return Fp8Cols(torch.from_numpy(dropped).view(torch.float8_e4m3fn), *out[1:])


@_mutant("fp8_row_to_fp8_col", "5.4")
def masked_tokens_count(codes, scales):
    """Blocks of zeros take part in the largest exponent."""
    if not codes.numel():
        return kernels.fp8_row_to_fp8_col(codes, scales)
    bits = codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    is_zero = (bits & 0x7F).unflatten(-1, (-1, 128)).amax(-1).eq(0).repeat_interleave(128, -1)
    out = kernels.fp8_row_to_fp8_col(bits + is_zero.to(torch.uint8), scales.reshape(bits.shape[0], -1))
    result = out.codes.view(torch.uint8).clone()
    real = result[:, : bits.shape[0]]
    real[is_zero.t()] &= 0x80
    return Fp8Cols(result.view(torch.float8_e4m3fn), out.scales)


@_mutant("fp8_row_to_fp4_row", "6.4 NaN or infinity")
def nan_becomes_the_largest(codes, scales):
    bits = codes.view(torch.uint8)
    return kernels.fp8_row_to_fp4_row(torch.where(bits & 0x7F == 0x7F, bits - 1, bits), scales)


@_mutant("fp8_row_to_fp4_row", "6.2 scale")
def rule_is_always_floor(codes, scales, *, scale_rule=ScaleRule.FLOOR):
    return kernels.fp8_row_to_fp4_row(codes, scales)


@_mutant("fp8_row_to_ragged", "8 codes and scales are copied")
def nan_scales_are_canonical(codes, scales, **options):
    return kernels.fp8_row_to_ragged(codes, torch.where(scales.isnan(), torch.nan, scales), **options)


@_mutant("bf16_to_fp8_row", "7.1 all-zero block")
def zero_rows_have_the_smallest_scale(x):
    out = kernels.bf16_to_fp8_row(x)
    is_zero = (x.reshape(-1, x.shape[-1] // 128, 128) == 0).all(-1)
    out.scales[is_zero] = 2.0**-127
    return out


@_mutant("bf16_to_fp8_col", "7.2 NaN or infinity")
def nan_stays_local(x):
    """A NaN or an infinity is a NaN code, and its neighbours are encoded as if it were 0."""
    is_bad = ~x.isfinite()
    out = kernels.bf16_to_fp8_col(torch.where(is_bad, 0, x))
    bits = out.codes.view(torch.uint8).clone()
    rows = is_bad.reshape(-1, x.shape[-1])
    bits[:, : rows.shape[0]][rows.t()] = 0x7F
    return out._replace(codes=bits.view(torch.float8_e4m3fn))


@_mutant("bf16_to_fp8_tile", "8 layout")
def tile_scales_are_not_transposed(w, *, transpose=False):
    out = kernels.bf16_to_fp8_tile(w, transpose=transpose)
    return Fp8Tiles(out.codes, kernels.bf16_to_fp8_tile(w).scales)


@_mutant("bf16_to_fp4_and_fp8_row", "4.3 and 4.4 rounding")
def fp8_comes_from_bf16(x):
    fp4, fp8 = kernels.bf16_to_fp4_and_fp8_row(x)
    return fp4, Fp8Rows(kernels.bf16_to_fp8_row(x).codes, fp8.scales)


@_mutant("fp4_to_bf16", "3.9")
def nan_has_another_payload(codes, scales):
    out = kernels.fp4_to_bf16(codes, scales).view(torch.int16)
    return torch.where(out == 0x7FC0, 0x7FFF, out).to(torch.int16).view(torch.bfloat16)
