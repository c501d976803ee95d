"""The backend for CPU tensors where there is no C++ compiler: the functions of `host`, computed by the simulator."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxsim.blocks import (
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    Accumulator,
    BlockTensor,
    convert,
    fp8_gemm,
    quantize,
)
from mxsim.formats import E2M1, E4M3, E5M2, Rounding, philox_bits, unpack
from mxsim.kernels.arguments import GEMM_ROUNDINGS, PROMOTION_ORDERS, SCALE_RULES, GemmOperands
from mxsim.kernels.layouts import round_up


def to_fp4_row(x: Tensor, codes: Tensor, scales: Tensor, rule: int, seed: int | None = None) -> None:
    """MXFP4 rows of bfloat16, float16 or float32. A seed: stochastic rounding."""
    _store_fp4(quantize(x, MXFP4, scale_rule=SCALE_RULES[rule], **_rounding(x, seed)), codes, scales)


def fp8_row_to_fp4_row(codes: Tensor, scales: Tensor, out_codes: Tensor, out_scales: Tensor, rule: int) -> int | None:
    """MXFP4 rows of FP8 rows."""
    index = _first_refused(scales)
    if index is None:
        t = BlockTensor(_bytes(codes), scales.numpy(), FP8_1X128)
        _store_fp4(convert.fp8_row_to_fp4_row(t, scale_rule=SCALE_RULES[rule]), out_codes, out_scales)
    return index


def fp4_row_to_fp8_row(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
) -> None:
    """FP8 rows of MXFP4 rows, dense or ragged."""
    rows = convert.fp4_row_to_fp8_row(_fp4(codes, scales), headroom=headroom)
    _store_fp8_rows(rows.codes, rows.scales, out_codes, out_scales, group_sizes, padded_sizes, row_multiple)


def fp4_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
) -> None:
    """FP8 columns of MXFP4 rows, dense or ragged."""
    sizes = _sizes(group_sizes, codes.shape[0])
    columns = convert.fp4_row_to_fp8_col(_fp4(codes, scales), headroom=headroom, group_sizes=sizes)
    _store_fp8_cols([(c.codes, c.scales.T) for c in columns], out_codes, out_scales, sizes, padded_sizes)


def fp8_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
) -> int | None:
    """FP8 columns of FP8 rows, dense or ragged."""
    index = _first_refused(scales)
    if index is None:
        sizes = _sizes(group_sizes, codes.shape[0])
        columns = convert.fp8_row_to_fp8_col(BlockTensor(_bytes(codes), scales.numpy(), FP8_1X128), group_sizes=sizes)
        _store_fp8_cols([(c.codes, c.scales.T) for c in columns], out_codes, out_scales, sizes, padded_sizes)
    return index


def fp8_row_to_ragged(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor,
    padded_sizes: Tensor | None,
    row_multiple: int,
) -> None:
    """FP8 rows laid out expert by expert."""
    _store_fp8_rows(_bytes(codes), scales.numpy(), out_codes, out_scales, group_sizes, padded_sizes, row_multiple)


def to_fp8_row(
    x: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
    seed: int | None = None,
) -> None:
    """FP8 rows of bfloat16, dense or ragged. A seed: stochastic rounding."""
    rows = quantize(x, FP8_1X128, **_rounding(x, seed))
    _store_fp8_rows(rows.codes, rows.scales, out_codes, out_scales, group_sizes, padded_sizes, row_multiple)


def to_fp8_col(
    x: Tensor, out_codes: Tensor, out_scales: Tensor, group_sizes: Tensor | None, padded_sizes: Tensor | None
) -> None:
    """FP8 columns of bfloat16, dense or ragged."""
    sizes = _sizes(group_sizes, x.shape[0])
    columns = []
    for first, size in _spans(sizes):
        t = quantize(x[first : first + size], FP8_128X1)
        codes = np.zeros((x.shape[1], round_up(size, 128)), np.uint8)
        codes[:, :size] = t.codes.T
        columns.append((codes, t.scales))
    _store_fp8_cols(columns, out_codes, out_scales, sizes, padded_sizes)


def to_fp8_tile(w: Tensor, out_codes: Tensor, out_scales: Tensor, transpose: bool) -> None:
    """FP8 tiles of bfloat16 matrices [batch, N, K]; codes and scales are the transpose's with `transpose`."""
    t = quantize(w.transpose(1, 2) if transpose else w, FP8_128X128)
    _store(out_codes.view(t.shape), t.codes)
    _store(out_scales, t.scales)


def to_fp4_and_fp8_row(
    x: Tensor,
    fp4_codes: Tensor,
    fp4_scales: Tensor,
    fp8_codes: Tensor,
    fp8_scales: Tensor,
    rule: int,
    headroom: int,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
    seed: int | None = None,
) -> None:
    """MXFP4 rows of bfloat16 and the FP8 rows converted from them, the latter dense or ragged. A seed: stochastic."""
    to_fp4_row(x, fp4_codes, fp4_scales, rule, seed)
    fp4_row_to_fp8_row(fp4_codes, fp4_scales, fp8_codes, fp8_scales, headroom, group_sizes, padded_sizes, row_multiple)


def fp4_to_bf16(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """bfloat16 of MXFP4 rows."""
    import ml_dtypes

    values = _fp4(codes, scales).dequantize(ml_dtypes.bfloat16)
    _store(out.view(torch.int16), values.view(np.int16))


def fp8_gemm_emulated(
    operands: GemmOperands,
    out: Tensor,
    fraction_bits: int,
    products_per_step: int,
    rounding: int,
    promotion_interval: int,
    scale_order: int,
    split_k: int,
) -> None:
    """out = a @ b.T by an accumulator of these numbers, as `arguments.accumulator_numbers` has them."""
    term_rounding, sum_rounding = GEMM_ROUNDINGS[rounding]
    accumulator = Accumulator(
        "asked for",
        products_per_step=products_per_step,
        fraction_bits=None if fraction_bits < 0 else fraction_bits,
        term_rounding=term_rounding,
        sum_rounding=sum_rounding,
        promotion_interval=promotion_interval or None,
        scale_order=PROMOTION_ORDERS[scale_order],
    )
    a_format = replace(FP8_1X128, element=E5M2 if operands.a_is_e5m2 else E4M3)
    b_format = replace(FP8_128X128 if operands.is_tiled else FP8_1X128, element=E5M2 if operands.b_is_e5m2 else E4M3)
    values = fp8_gemm(
        BlockTensor(_bytes(operands.a), operands.a_scales.numpy(), a_format),
        BlockTensor(_bytes(operands.b), operands.b_scales.numpy(), b_format),
        accumulator=accumulator,
        split_k=split_k,
    )
    bits = values.view(np.int32)
    if out.dtype is torch.bfloat16:
        _store(out.view(torch.int16), _bf16_bits(bits))
    else:
        _store(out.view(torch.int32), bits)


# --------------------------------------------------------------------------------------------------- tensors and arrays
def _rounding(x: Tensor, seed: int | None) -> dict[str, Any]:
    """Keywords of `quantize`; a seed of 2**63 and more comes as the negative number with its bits."""
    if seed is None:
        return {}
    return {"rounding": Rounding.STOCHASTIC, "random_bits": philox_bits(seed % 2**64, tuple(x.shape))}


def _bytes(codes: Tensor) -> np.ndarray:
    array: np.ndarray = codes.view(torch.uint8).numpy()
    return array


def _fp4(codes: Tensor, scales: Tensor) -> BlockTensor:
    return BlockTensor(unpack(_bytes(codes), E2M1), _bytes(scales), MXFP4)


def _bf16_bits(bits: np.ndarray) -> np.ndarray:
    """binary32 bits rounded to bfloat16, ties to even; NaN is 0x7FFF."""
    wide = bits.view(np.uint32).astype(np.int64)
    rounded = np.where(wide == 0x7FFFFFFF, 0x7FFF, (wide + 0x7FFF + (wide >> 16 & 1)) >> 16)
    return rounded.astype(np.uint16).view(np.int16)


def _store(target: Tensor, array: np.ndarray) -> None:
    """Copy into a tensor of any strides."""
    view = target.view(torch.uint8) if target.dtype is torch.float8_e4m3fn else target
    view.numpy()[...] = array


def _store_fp4(t: BlockTensor, codes: Tensor, scales: Tensor) -> None:
    _store(codes, t.packed())
    _store(scales, t.scales)


def _first_refused(scales: Tensor) -> int | None:
    """Row-major index of the first scale that is neither a power of two nor NaN."""
    values = scales.numpy().astype(np.float64)
    mantissa, _ = np.frexp(np.where(np.isfinite(values), values, 0))
    refused = np.flatnonzero(~(np.isnan(values) | (mantissa == 0.5)))
    return int(refused[0]) if refused.size else None


# --------------------------------------------------------------------------------------------------------------- groups
def _sizes(group_sizes: Tensor | None, num_rows: int) -> list[int]:
    return [num_rows] if group_sizes is None else group_sizes.tolist()


def _spans(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each group."""
    first = 0
    for size in sizes:
        yield first, size
        first += size


def _set_padded(padded_sizes: Tensor | None, sizes: list[int], multiple: int) -> None:
    if padded_sizes is not None:
        padded_sizes.copy_(torch.tensor([round_up(n, multiple) for n in sizes], dtype=torch.int64))


def _store_fp8_rows(
    codes: np.ndarray,
    scales: np.ndarray,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
    row_multiple: int,
) -> None:
    if group_sizes is None:
        _store(out_codes, codes)
        _store(out_scales, scales)
        return
    sizes = group_sizes.tolist()
    padded_codes, chunks = [], []
    for first, size in _spans(sizes):
        padding = round_up(size, row_multiple) - size
        padded_codes.append(np.pad(codes[first : first + size], ((0, padding), (0, 0))))
        chunk = np.pad(scales[first : first + size], ((0, padding), (0, 0)), constant_values=1)
        chunks.append(chunk.T.reshape(-1))
    if sizes:
        _store(out_codes, np.concatenate(padded_codes))
        _store(out_scales, np.concatenate(chunks))
    _set_padded(padded_sizes, sizes, row_multiple)


def _store_fp8_cols(
    columns: list[tuple[np.ndarray, np.ndarray]],
    out_codes: Tensor,
    out_scales: Tensor,
    sizes: list[int],
    padded_sizes: Tensor | None,
) -> None:
    if columns:
        _store(out_codes.view(-1), np.concatenate([codes.reshape(-1) for codes, _ in columns]))
        _store(out_scales, np.concatenate([scales for _, scales in columns]))
    _set_padded(padded_sizes, sizes, 128)
