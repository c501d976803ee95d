"""Hopper's FP8 GEMM three times: torch's `scaled_mm`, the CUDA emulation, and the NumPy model."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mxsim import kernels
from mxsim.blocks import (
    FP8_1X128,
    FP8_128X128,
    HOPPER,
    Accumulator,
    BlockTensor,
    PromotionOrder,
    fp8_gemm,
)
from mxsim.validate.gemm_cases import BLOCK, GemmLayout, Operands

_HOPPER_CAPABILITY = (9, 0)
_NUMPY_DTYPES = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FP32_NAN, _BF16_NAN = 0x7FFFFFFF, 0x7FFF
_ORDERS = {GemmLayout.ROWS: PromotionOrder.A_THEN_B, GemmLayout.TILES: PromotionOrder.SCALES_FIRST}


def bits_of(x: Tensor) -> Tensor:
    """As integers of the same size."""
    return x.contiguous().view(_INTEGERS[x.itemsize])


# ------------------------------------------------------------------------------------------------------------ hardware
class GemmRefused(Exception):
    """The library does not compute this shape, layout, output or pair of elements."""


def has_scaled_mm(device: torch.device) -> bool:
    """Whether torch has a block-scaled FP8 GEMM for the device: compute capability 9.0."""
    return (
        device.type == "cuda"
        and hasattr(torch.nn.functional, "scaled_mm")
        and torch.cuda.get_device_capability(device) == _HOPPER_CAPABILITY
    )


def scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """a @ b.T by `torch.nn.functional.scaled_mm`, the scales laid out as it wants them (NUMERICS 8).

    It takes m in multiples of 4 and n in multiples of 16. Scales without axes are tensor-wise, and use_fast_accum is
    for them; that is `torch._scaled_mm`.

    Raises:
        GemmRefused: with torch's words.
    """
    functional: Any = torch.nn.functional
    a_values, b_values = _float8(a), _float8(b).t()

    def call(function: Any, *arguments: Any, **keywords: Any) -> Tensor:
        try:
            result: Tensor = function(a_values, b_values, *arguments, **keywords)
        except (RuntimeError, ValueError) as error:
            raise GemmRefused(" ".join(str(error).split())[:200]) from error
        return result

    if a_scales.dim() == 0:
        torch_private: Any = torch
        return call(
            torch_private._scaled_mm,
            scale_a=a_scales,
            scale_b=b_scales,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    recipe = functional.ScalingType
    a_laid_out = _column_major(a_scales, a_scales.shape[0])

    def blockwise(scales: Tensor, b_recipe: Any) -> Tensor:
        arguments = (a_laid_out, recipe.BlockWise1x128, scales, b_recipe)
        return call(functional.scaled_mm, *arguments, output_dtype=out_dtype)

    if b_scales.shape[0] != b.shape[0]:
        blocks = b_scales.shape[1]
        return blockwise(_column_major(b_scales.t(), -(-blocks // 4) * 4), recipe.BlockWise128x128)
    by_row = _column_major(b_scales, b_scales.shape[0])
    try:
        return blockwise(by_row, recipe.BlockWise1x128)
    except GemmRefused:  # versions differ in which way round they want it
        return blockwise(by_row.t(), recipe.BlockWise1x128)


def _float8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes


def _column_major(x: Tensor, rows: int) -> Tensor:
    """x with strides (1, rows), ones below it."""
    out = torch.empty_strided((rows, x.shape[1]), (1, rows), dtype=x.dtype, device=x.device).fill_(1)
    out[: x.shape[0]] = x
    return out


# --------------------------------------------------------------------------------------------------------------- model
def emulated(
    operands: Operands, out_dtype: torch.dtype, *, accumulator: Accumulator = HOPPER, split_k: int = 1
) -> Tensor:
    """By `kernels.fp8_gemm_emulated`: the CUDA kernel or the host build.

    Parts of K that are not equal, of ceil(blocks / split_k) blocks as `fp8_gemm` has them, are computed one by one and
    added here: the kernel has equal ones only.
    """
    ordered = _ordered(accumulator, operands)
    a, a_scales, b, b_scales = operands.tensors

    def part(start: int, stop: int) -> Tensor:
        codes, scales = slice(start * BLOCK, stop * BLOCK), slice(start, stop)
        result: Tensor = kernels.fp8_gemm_emulated(
            a[:, codes], a_scales[:, scales], b[:, codes], b_scales[:, scales], accumulator=ordered
        )
        return result

    blocks = operands.shape[2] // BLOCK
    if blocks % split_k == 0:
        result: Tensor = kernels.fp8_gemm_emulated(
            *operands.tensors, accumulator=ordered, split_k=split_k, out_dtype=out_dtype
        )
        return result
    length = -(-blocks // split_k)
    total = part(0, length)
    for start in range(length, blocks, length):
        total = total + part(start, min(start + length, blocks))
    is_nan = total.isnan()
    if out_dtype is torch.bfloat16:
        return total.bfloat16().view(torch.int16).masked_fill_(is_nan, _BF16_NAN).view(torch.bfloat16)
    return total.view(torch.int32).masked_fill_(is_nan, _FP32_NAN).view(torch.float32)


def simulated(
    operands: Operands, out_dtype: torch.dtype, *, accumulator: Accumulator = HOPPER, split_k: int = 1
) -> Tensor:
    """By `mxsim.blocks.fp8_gemm`, the NumPy model; on the operands' device."""
    on_cpu = operands.cpu()
    a, a_scales, b, b_scales = (x.numpy() for x in (on_cpu.a, on_cpu.a_scales, on_cpu.b, on_cpu.b_scales))
    formats = FP8_1X128, FP8_1X128 if b_scales.shape[0] == b.shape[0] else FP8_128X128
    a_format, b_format = (replace(f, element=e) for f, e in zip(formats, operands.elements, strict=True))
    out = fp8_gemm(
        BlockTensor(a, a_scales, a_format),
        BlockTensor(b, b_scales, b_format),
        accumulator=_ordered(accumulator, operands),
        split_k=split_k,
        out=_NUMPY_DTYPES[out_dtype],
    )
    signed = out.view(np.int32 if out_dtype is torch.float32 else np.int16)
    return torch.from_numpy(signed).to(operands.a.device).view(out_dtype)


def _ordered(accumulator: Accumulator, operands: Operands) -> Accumulator:
    """With the order of the operands' layout, which sampled tiles do not show."""
    has_tiles = operands.b_scales.shape[0] != operands.b.shape[0]
    if accumulator.scale_order is not None or (operands.layout is GemmLayout.TILES) == has_tiles:
        return accumulator
    return replace(accumulator, scale_order=_ORDERS[operands.layout])


def model(operands: Operands, out_dtype: torch.dtype, *, accumulator: Accumulator = HOPPER, split_k: int = 1) -> Tensor:
    """What is compared with: the emulation kernel on a CUDA device, the NumPy model on the CPU."""
    function = emulated if operands.a.device.type == "cuda" else simulated
    return function(operands, out_dtype, accumulator=accumulator, split_k=split_k)


def emulation(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """`kernels.fp8_gemm_emulated` as a candidate."""
    accumulator = HOPPER
    if a_scales.dim() == 0:
        blocks = a.shape[1] // BLOCK
        a_scales, b_scales = a_scales.expand(a.shape[0], blocks), b_scales.expand(b.shape[0], blocks)
        accumulator = replace(HOPPER, promotion_interval=None) if use_fast_accum else HOPPER
    result: Tensor = kernels.fp8_gemm_emulated(a, a_scales, b, b_scales, accumulator=accumulator, out_dtype=out_dtype)
    return result
