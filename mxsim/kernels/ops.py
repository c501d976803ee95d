"""The production conversions: torch tensors in, torch tensors out, every bit the simulator's.

Each public function checks its keywords and calls one operator `mxsim::<name>`, its overload `.ragged` where group
sizes are given. The operators are registered with `torch.library`: CPU tensors run the host build, CUDA tensors the
kernels on the current stream, fake and meta tensors neither. So they work under torch.compile, under CUDA graph capture
and with autocast. They are not differentiable: their results never require a gradient.

Accepted everywhere: leading axes (flattened into rows), non-contiguous tensors (copied), any storage offset, no rows,
uint8 tensors or views of the same bytes as float4_e2m1fn_x2, float8_e8m0fnu and float8_e4m3fn. Refused, as in the
simulator: another dtype (TypeError), axes that are no multiple of the block, scales of another shape or device, group
sizes that are negative or do not sum to the rows (ValueError).

`group_sizes`, the rows of each expert in order, comes in one of two ways:
  - a list, or a tensor on the CPU: checked, and the results are allocated exactly. Under torch.compile a list of
    integers serves; a CPU tensor gives data-dependent shapes (needs torch._dynamo.config's
    capture_dynamic_output_shape_ops).
  - a tensor on the device: nothing waits for the device. Results have the size that suffices for any sizes, the offsets
    follow from `padded_group_sizes`, bytes past the last chunk are unspecified. Sizes are clamped in order to the rows
    that are left.
Stochastic rounding, where an op has the keyword: with rounding=STOCHASTIC a magnitude rounds up with the probability of
its position between its two neighbours, element i of the tensor (row by row, padding left out) by the random bits of
`mxsim.formats.philox_bits(seed, x.shape)`. The seed is an integer 0 to 2**64 - 1: the same seed gives the same codes on
every backend, and a captured CUDA graph repeats its seed at each replay. Take another one for every tensor and step: an
element has the same bits in all tensors that share a seed. Scales do not depend on it. Another rounding, and a seed
without STOCHASTIC, is a ValueError.

`check=True` reads the device back (not under graph capture) and raises the ValueErrors that CPU tensors always get.
"""

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from mxsim.blocks import HOPPER, Accumulator, ScaleRule
from mxsim.formats import Rounding
from mxsim.kernels import operators
from mxsim.kernels.arguments import (
    FP32_SCALES,
    accumulator_numbers,
    check_group_sizes,
    check_group_sizes_tensor,
    check_headroom,
    check_reading_back,
    check_row_multiple,
    check_tensor,
    first_not_a_power_of_two,
    raise_not_a_power_of_two,
    rule_number,
    split_group_sizes,
    stochastic_seeds,
)
from mxsim.kernels.layouts import DEFAULT_ROW_MULTIPLE, Fp4Rows, Fp8Cols, Fp8Rows, Fp8Tiles, RaggedFp8Rows

GroupSizes: TypeAlias = Sequence[int] | Tensor


def bf16_to_fp4_row(
    x: Tensor,
    *,
    scale_rule: ScaleRule | None = None,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    seed: int | None = None,
) -> Fp4Rows:
    """`quantize(x, MXFP4, scale_rule=scale_rule)`: E2M1(x / 2**X) along the last axis, X from each 32 elements' amax.

    One rounding, saturating; signs kept, of zero too. An all-zero block: scale code 0. A NaN or an infinity in a block:
    scale code 0xFF, codes 0.

    Args:
        x: bfloat16, float16 or float32 [..., K], K % 32 == 0.
        scale_rule: None is FLOOR.
        rounding: TIES_TO_EVEN or STOCHASTIC.
        seed: of STOCHASTIC.

    Source: NUMERICS 3 and 2.2; the paper's BF16ToFP4Row.
    """
    op = "bf16_to_fp4_row"
    check_tensor(op, "x", x)
    rule = rule_number(op, scale_rule)
    seeds = stochastic_seeds(op, rounding, seed)
    to_rows = operators.bf16_to_fp4_row_stochastic if seeds else operators.bf16_to_fp4_row
    return Fp4Rows(*to_rows(x, rule, *seeds))


def fp8_row_to_fp4_row(
    codes: Tensor, scales: Tensor, *, scale_rule: ScaleRule | None = None, check: bool = False
) -> Fp4Rows:
    """`mxsim.blocks.fp8_row_to_fp4_row`: each block of 128 becomes four MXFP4 blocks, straight from its significands.

    NaN in 32 elements: scale code 0xFF, codes 0; a NaN scale: so for its four blocks. A scale that is neither a power
    of two nor NaN: ValueError on the CPU and with check=True, otherwise it acts as NaN.

    Args:
        codes: E4M3 [..., K], K % 128 == 0.
        scales: float32 [..., K/128], any strides.

    Source: NUMERICS 6.
    """
    op = "fp8_row_to_fp4_row"
    check_tensor(op, "codes", codes)
    check_tensor(op, "scales", scales)
    if check:
        _check_scales(op, scales)
    return Fp4Rows(*operators.fp8_row_to_fp4_row(codes, scales, rule_number(op, scale_rule)))


def fp4_row_to_fp8_row(
    codes: Tensor,
    scales: Tensor,
    *,
    headroom: int = 6,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> Fp8Rows | RaggedFp8Rows:
    """`mxsim.blocks.fp4_row_to_fp8_row`: four MXFP4 blocks become one of 128 with scale 2**(E - headroom).

    Element E4M3(v * 2**(headroom - d)), d = E - E_i, E the largest of the four exponents; exact where
    d <= 8 + headroom. A NaN scale is left out of E and gives 0x7F for its own 32 elements.

    Args:
        codes: packed E2M1 [..., K/2], K % 128 == 0.
        scales: E8M0 codes [..., K/32].
        group_sizes: rows of each expert; the result is then ragged, each expert padded to a multiple of row_multiple.

    Source: NUMERICS 4 and 8; the paper's FP4RowToFP8Row is headroom = 0.
    """
    op = "fp4_row_to_fp8_row"
    check_tensor(op, "codes", codes)
    check_tensor(op, "scales", scales)
    check_headroom(op, headroom)
    if group_sizes is None:
        return Fp8Rows(*operators.fp4_row_to_fp8_row(codes, scales, headroom))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return RaggedFp8Rows(*operators.fp4_row_to_fp8_row_ragged(codes, scales, headroom, sizes, host_sizes, row_multiple))


def fp4_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    *,
    headroom: int = 6,
    group_sizes: GroupSizes | None = None,
    check: bool = False,
) -> Fp8Cols:
    """`mxsim.blocks.fp4_row_to_fp8_col`: dequantize, transpose and requantize with at most one rounding.

    As `fp4_row_to_fp8_row`, a block being 128 rows of one column, of one expert. One call serves all experts and pads.

    Args:
        codes: packed E2M1 [..., K/2], K % 32 == 0.
        scales: E8M0 codes [..., K/32].

    Source: NUMERICS 5; the paper's FP4RowToFP8Col ("msplit" with group_sizes).
    """
    op = "fp4_row_to_fp8_col"
    check_tensor(op, "codes", codes)
    check_tensor(op, "scales", scales)
    check_headroom(op, headroom)
    if group_sizes is None:
        return Fp8Cols(*operators.fp4_row_to_fp8_col(codes, scales, headroom))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return Fp8Cols(*operators.fp4_row_to_fp8_col_ragged(codes, scales, headroom, sizes, host_sizes))


def fp8_row_to_fp8_col(
    codes: Tensor, scales: Tensor, *, group_sizes: GroupSizes | None = None, check: bool = False
) -> Fp8Cols:
    """`mxsim.blocks.fp8_row_to_fp8_col`: the scaling-aware transpose, E4M3(v * 2**(E_i - E)).

    E is the largest scale exponent over the 128 rows; blocks of zeros and NaN scales are left out (none left: scale 1).
    NaN stays NaN, a NaN scale gives 0x7F. A scale that is neither a power of two nor NaN: as in `fp8_row_to_fp4_row`.

    Args:
        codes: E4M3 [..., K], K % 128 == 0.
        scales: float32 [..., K/128], any strides.

    Source: NUMERICS 5.4.
    """
    op = "fp8_row_to_fp8_col"
    check_tensor(op, "codes", codes)
    check_tensor(op, "scales", scales)
    if check:
        _check_scales(op, scales)
    if group_sizes is None:
        return Fp8Cols(*operators.fp8_row_to_fp8_col(codes, scales))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return Fp8Cols(*operators.fp8_row_to_fp8_col_ragged(codes, scales, sizes, host_sizes))


def fp8_row_to_ragged(
    codes: Tensor,
    scales: Tensor,
    *,
    group_sizes: GroupSizes,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> RaggedFp8Rows:
    """The same FP8 rows in the ragged form: each expert padded to a multiple of row_multiple, its scales one chunk.

    No bit of a code or a scale changes.

    Args:
        codes: E4M3 [..., K], K % 128 == 0.
        scales: float32 [..., K/128], any strides and any values.

    Source: NUMERICS 8.
    """
    op = "fp8_row_to_ragged"
    check_tensor(op, "codes", codes)
    check_tensor(op, "scales", scales)
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return RaggedFp8Rows(*operators.fp8_row_to_ragged(codes, scales, sizes, host_sizes, row_multiple))


def bf16_to_fp8_row(
    x: Tensor,
    *,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    seed: int | None = None,
    check: bool = False,
) -> Fp8Rows | RaggedFp8Rows:
    """`quantize(x, FP8_1X128)`: E4M3(x / s), s the smallest power of two with amax <= 448 * s (RCEIL).

    s >= 2**-127; amax = 0 gives s = 1. A NaN or an infinity in a block: scale NaN, codes 0x7F.

    Args:
        x: bfloat16 [..., K], K % 128 == 0.
        rounding: TIES_TO_EVEN or STOCHASTIC.
        seed: of STOCHASTIC.

    Source: NUMERICS 7 and 2.2.
    """
    op = "bf16_to_fp8_row"
    check_tensor(op, "x", x)
    seeds = stochastic_seeds(op, rounding, seed)
    if group_sizes is None:
        to_rows = operators.bf16_to_fp8_row_stochastic if seeds else operators.bf16_to_fp8_row
        return Fp8Rows(*to_rows(x, *seeds))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "x", x)
    to_rows = operators.bf16_to_fp8_row_stochastic_ragged if seeds else operators.bf16_to_fp8_row_ragged
    return RaggedFp8Rows(*to_rows(x, sizes, host_sizes, row_multiple, *seeds))


def bf16_to_fp8_col(x: Tensor, *, group_sizes: GroupSizes | None = None, check: bool = False) -> Fp8Cols:
    """`quantize(x, FP8_128X1)`, transposed: as `bf16_to_fp8_row`, a block being 128 rows of one column, of one expert.

    Args:
        x: bfloat16 [..., K], K % 32 == 0.

    Source: NUMERICS 7; layout as in NUMERICS 5.3.
    """
    op = "bf16_to_fp8_col"
    check_tensor(op, "x", x)
    if group_sizes is None:
        return Fp8Cols(*operators.bf16_to_fp8_col(x))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "x", x)
    return Fp8Cols(*operators.bf16_to_fp8_col_ragged(x, sizes, host_sizes))


def bf16_to_fp8_tile(w: Tensor, *, transpose: bool = False) -> Fp8Tiles:
    """`quantize(w, FP8_128X128)`: as `bf16_to_fp8_row`, a block being a tile of 128 x 128. transpose: of w's transpose.

    Args:
        w: bfloat16 [..., N, K] of any size; tiles at the far edges may be smaller.

    Returns:
        codes [..., N, K] and scales [..., ceil(N/128), ceil(K/128)]; with transpose N and K change places.

    Source: NUMERICS 7 and 8.
    """
    check_tensor("bf16_to_fp8_tile", "w", w)
    return Fp8Tiles(*operators.bf16_to_fp8_tile(w, bool(transpose)))


def bf16_to_fp4_and_fp8_row(
    x: Tensor,
    *,
    scale_rule: ScaleRule | None = None,
    headroom: int = 6,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    seed: int | None = None,
    check: bool = False,
) -> tuple[Fp4Rows, Fp8Rows | RaggedFp8Rows]:
    """`bf16_to_fp4_row(x)`, and `fp4_row_to_fp8_row` of that: x is read once, the FP8 rows hold the FP4 values.

    With group_sizes the FP8 rows are ragged; the FP4 rows stay as x's. rounding and seed: of the FP4 codes.

    Args:
        x: bfloat16 [..., K], K % 128 == 0.
    """
    op = "bf16_to_fp4_and_fp8_row"
    check_tensor(op, "x", x)
    check_headroom(op, headroom)
    rule = rule_number(op, scale_rule)
    seeds = stochastic_seeds(op, rounding, seed)
    if group_sizes is None:
        to_both = operators.bf16_to_fp4_and_fp8_row_stochastic if seeds else operators.bf16_to_fp4_and_fp8_row
        fp4_codes, fp4_scales, *fp8 = to_both(x, rule, headroom, *seeds)
        return Fp4Rows(fp4_codes, fp4_scales), Fp8Rows(*fp8)
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "x", x)
    to_both = operators.bf16_to_fp4_and_fp8_row_stochastic_ragged if seeds else operators.bf16_to_fp4_and_fp8_row_ragged
    fp4_codes, fp4_scales, *fp8 = to_both(x, rule, headroom, sizes, host_sizes, row_multiple, *seeds)
    return Fp4Rows(fp4_codes, fp4_scales), RaggedFp8Rows(*fp8)


def fp4_to_bf16(codes: Tensor, scales: Tensor) -> Tensor:
    """`BlockTensor.dequantize(bfloat16)` of MXFP4 rows: element * 2**X, exact; a NaN scale gives the quiet NaN.

    Magnitudes of 2**128 and more, which only scales 2**126 and 2**127 reach, become infinite.

    Args:
        codes: packed E2M1 [..., K/2], K % 32 == 0.
        scales: E8M0 codes [..., K/32].

    Returns:
        bfloat16 [rows, K].

    Source: NUMERICS 3.9.
    """
    check_tensor("fp4_to_bf16", "codes", codes)
    check_tensor("fp4_to_bf16", "scales", scales)
    return operators.fp4_to_bf16(codes, scales)


def fp8_gemm_emulated(
    a_codes: Tensor,
    a_scales: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    *,
    accumulator: Accumulator = HOPPER,
    split_k: int = 1,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`mxsim.blocks.fp8_gemm`: a @ b.T with the accumulator's arithmetic, every bit computed in ordinary instructions.

    HOPPER is what `torch.nn.functional.scaled_mm` returns on an H200. The dtype of codes says what they are; uint8 is
    E4M3. Scales may be any float32. Infinities of E5M2 add up as IEEE's do. NaN: 0x7FFFFFFF, in bfloat16 0x7FFF. With a
    promotion_interval above 128, scales that differ within a span are a ValueError on the CPU; on CUDA the last block's
    scale then serves the whole span. CUDA tensors take accumulators whose terms and sum round alike, up to 32 products
    a step: the others (EXACT, FP32_SEQUENTIAL) are a NotImplementedError there.

    Operands of scaled_mm map so: mat_a is a_codes, mat_b is b_codes.t(); scale_a is a_scales [M, K/128], there with
    strides (1, M); scale_b of BlockWise1x128 is b_scales [N, K/128], there with strides (1, N), and of BlockWise128x128
    it is the transpose, padded: b_scales = scale_b[: K // 128].t().

    Args:
        a_codes: E4M3 or E5M2 [..., K], K % 128 == 0; leading axes are flattened into M rows.
        a_scales: float32 [..., K/128], any strides.
        b_codes: E4M3 or E5M2 [N, K].
        b_scales: float32 [N, K/128] for rows of 128, or [ceil(N/128), K/128] for tiles; any strides. One row of b is
            taken for the former.
        split_k: 1 to K/128.
        out_dtype: float32 or bfloat16.

    Returns:
        [M, N].

    Source: NUMERICS 9.
    """
    op = "fp8_gemm_emulated"
    for name, x in (("a_codes", a_codes), ("a_scales", a_scales), ("b_codes", b_codes), ("b_scales", b_scales)):
        check_tensor(op, name, x)
    numbers = accumulator_numbers(op, accumulator)
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{op}: out_dtype is {out_dtype}, needed float32 or bfloat16")
    if type(split_k) is not int:
        raise ValueError(f"{op}: split_k is {split_k!r}, needed an integer of 1 or more")
    return operators.fp8_gemm_emulated(a_codes, a_scales, b_codes, b_scales, *numbers, split_k, out_dtype)


def _check_scales(op: str, scales: Tensor) -> None:
    check_reading_back(op, scales)
    if scales.is_cuda and scales.dtype in FP32_SCALES:  # the CPU checks anyway, and the op refuses other dtypes
        index = first_not_a_power_of_two(scales)
        if index is not None:
            raise_not_a_power_of_two(op, scales, index)


def _check_sizes(op: str, group_sizes: Tensor | None, rows_name: str, rows: Tensor) -> None:
    if group_sizes is not None and group_sizes.is_cuda:
        check_reading_back(op, group_sizes)
        check_group_sizes_tensor(op, group_sizes, rows)
        check_group_sizes(op, group_sizes.tolist(), prod(rows.shape[:-1]), rows_name)


__all__ = [
    "bf16_to_fp4_and_fp8_row",
    "bf16_to_fp4_row",
    "bf16_to_fp8_col",
    "bf16_to_fp8_row",
    "bf16_to_fp8_tile",
    "fp4_row_to_fp8_col",
    "fp4_row_to_fp8_row",
    "fp4_to_bf16",
    "fp8_gemm_emulated",
    "fp8_row_to_fp4_row",
    "fp8_row_to_fp8_col",
    "fp8_row_to_ragged",
]
