"""Grouped FP8 GEMMs as one GEMM an expert: torch's `scaled_mm`, the emulation of Hopper's, and exact operands in FP32.

Arguments are checked already; no matrix is empty. Every function fills an output of its caller:

    rows    out[start_e : start_e + m_e] = a_e @ b_e.T, a by rows of 128, b by tiles of 128 x 128
    wgrad   out[e] = a_e @ b_e.T over the rows of the expert, a and b columns turned into rows of 128; 0 without rows
"""

from typing import Any

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Tiles, RaggedFp8Rows, round_up
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import ROW_MULTIPLE, Operand, cols_of_expert, rows_of_expert

# torch.nn.functional.ScalingType, by its numbers.
_BY_ROWS, _BY_TILES = 4, 5
SCALED_MM_COLUMNS = 16  # scaled_mm takes n in multiples of it


# ----------------------------------------------------------------------------------------------------------- scaled_mm
def scaled_mm_rows(a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """By `scaled_mm`, in place: no copy, no padding of the result.

    scaled_mm takes rows in multiples of 4, so an expert's result has up to 3 rows too many. They fall on the first
    rows of the experts after it, who write theirs later; behind the last row there is room for 3 more.
    """
    num_groups, num_columns, _ = b.codes.shape
    out = torch.empty((groups.num_rows + ROW_MULTIPLE - 1, num_columns), dtype=out_dtype, device=a.codes.device)
    a = RaggedFp8Rows(aligned(a.codes), aligned(a.scales), a.padded_group_sizes)
    _, tiles_n, tiles_k = b.scales.shape
    row = round_up(tiles_k, 4)
    b_scales = b.scales.as_strided((num_groups, row, tiles_n), (tiles_n * row, 1, row)).unbind()
    b_codes = aligned(b.codes).transpose(1, 2).unbind()
    for span in groups.spans(ROW_MULTIPLE):
        a_e = rows_of_expert(a, span)
        out_e = out.narrow(0, span.start, span.padded_size)
        scaled_mm(a_e.codes, b_codes[span.expert], a_e.scales, b_scales[span.expert], _BY_TILES, out_e)
    return out.narrow(0, 0, groups.num_rows)


def scaled_mm_wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """By `scaled_mm`, each expert into its own matrix of the result."""
    out = empty_wgrad(a, b, groups, out_dtype)
    a, b = (Fp8Cols(aligned(x.codes), aligned(x.scales), x.padded_group_sizes) for x in (a, b))
    outs = out.unbind()
    for span in groups.spans(FP8_BLOCK):
        a_e, b_e = cols_of_expert(a, span), cols_of_expert(b, span)
        scaled_mm(a_e.codes, b_e.codes.t(), a_e.scales, b_e.scales, _BY_ROWS, outs[span.expert])
    return out


def scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, b_recipe: int, out: Tensor) -> None:
    """out = a @ b by torch, a by rows of 128.  What torch.nn.functional.scaled_mm calls, with an output."""
    function: Any = torch._scaled_mm_v2
    function(a, b, [a_scales], [_BY_ROWS], [], [b_scales], [b_recipe], [], None, out.dtype, out=out)


def aligned(x: Tensor) -> Tensor:
    """x, copied unless it begins at a multiple of 16 bytes. Every expert's part then does, too."""
    return x.clone() if x.data_ptr() % 16 else x


# ----------------------------------------------------------------------------------------------------------- emulation
def emulated_rows(a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """The bits of an H200, on CPU and CUDA tensors."""
    out = torch.empty((groups.num_rows, b.codes.shape[1]), dtype=out_dtype, device=a.codes.device)
    for span in groups.spans(ROW_MULTIPLE):
        a_e = rows_of_expert(a, span).rows(span.size)
        out[span.start : span.start + span.size] = kernels.fp8_gemm_emulated(
            *a_e, b.codes[span.expert], b.scales[span.expert], out_dtype=out_dtype
        )
    return out


def emulated_wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """The bits of an H200, on CPU and CUDA tensors."""
    out = empty_wgrad(a, b, groups, out_dtype)
    for span in groups.spans(FP8_BLOCK):
        out[span.expert] = kernels.fp8_gemm_emulated(
            *cols_of_expert(a, span), *cols_of_expert(b, span), out_dtype=out_dtype
        )
    return out


# --------------------------------------------------------------------------------------------------------- dequantized
def dequantized_rows(a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """FP32 products of the exact operands, autocast or not."""
    out = torch.empty((groups.num_rows, b.codes.shape[1]), dtype=out_dtype, device=a.codes.device)
    with torch.autocast(out.device.type, enabled=False):
        for span in groups.spans(ROW_MULTIPLE):
            a_e = dequantize(rows_of_expert(a, span).rows(span.size))
            scales = b.scales[span.expert].repeat_interleave(FP8_BLOCK, 0)[: b.codes.shape[1]]
            out[span.start : span.start + span.size] = a_e @ dequantize(Operand(b.codes[span.expert], scales)).t()
    return out


def dequantized_wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """FP32 products of the exact operands, autocast or not."""
    out = empty_wgrad(a, b, groups, out_dtype)
    with torch.autocast(out.device.type, enabled=False):
        for span in groups.spans(FP8_BLOCK):
            out[span.expert] = dequantize(cols_of_expert(a, span)) @ dequantize(cols_of_expert(b, span)).t()
    return out


def dequantize(x: Operand) -> Tensor:
    """float32 [rows, K]: code * scale, exact for scales that are powers of two, results in float32's range."""
    return (x.codes.float().unflatten(1, (-1, FP8_BLOCK)) * x.scales.unsqueeze(2)).flatten(1)


def empty_wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """[E, M, N], unwritten but for the experts without rows: 0."""
    shape = (groups.num_groups, a.scales.shape[1], b.scales.shape[1])
    out = torch.empty(shape, dtype=out_dtype, device=a.codes.device)
    if 0 in groups.sizes:
        for expert, size in enumerate(groups.sizes):
            if size == 0:
                out[expert] = 0
    return out
