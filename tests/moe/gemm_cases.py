"""Operands of the grouped GEMMs, and what an expert's GEMM must give by the NumPy model and in float64."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from mxsim import kernels
from mxsim.blocks import FP8_1X128, FP8_128X128, BlockTensor, dequantize, fp8_gemm
from mxsim.kernels import Fp8Cols, Fp8Tiles, RaggedFp8Rows
from mxsim.moe.groups import Groups

OUTPUTS = {torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32}
SIZES = {
    "uneven": [5, 0, 130, 1, 3, 0, 12],
    "one has all": [0, 0, 37, 0],
    "one group": [9],
    "1001 rows": [400, 601],
    "ones": [1, 1, 1, 1, 1],
    "last is empty": [6, 2, 0],
}


@dataclass
class Case:
    """BF16 matrices and the ragged FP8 operands made of them."""

    groups: Groups
    x: torch.Tensor  # [R, K]
    dy: torch.Tensor  # [R, N]
    w: torch.Tensor  # [E, N, K]
    rows: RaggedFp8Rows
    tiles: Fp8Tiles
    dy_cols: Fp8Cols
    x_cols: Fp8Cols


def make(sizes: list[int], n: int = 64, k: int = 384, *, seed: int = 0, device: str = "cpu") -> Case:
    """Values of mixed magnitude: rows and columns differ by powers of two, so that no two scales agree by chance."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        for axis in (-1, -2):
            view = [1] * len(shape)
            view[axis] = shape[axis]
            x = x * torch.exp2(torch.randint(-4, 5, view, generator=generator))
        return x.bfloat16().to(device)

    total = sum(sizes)
    x, dy, w = values(total, k), values(total, n), values(len(sizes), n, k)
    return Case(
        Groups(tuple(sizes), torch.device(device)),
        x,
        dy,
        w,
        kernels.bf16_to_fp8_row(x, group_sizes=sizes),
        kernels.bf16_to_fp8_tile(w),
        kernels.bf16_to_fp8_col(dy, group_sizes=sizes),
        kernels.bf16_to_fp8_col(x, group_sizes=sizes),
    )


# ------------------------------------------------------------------- an expert's operands, by NUMERICS 5.3 and 8 alone
def array(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x).cpu().numpy()


def expert_rows(a: RaggedFp8Rows, sizes: list[int], expert: int) -> BlockTensor:
    padded = [-(-n // 4) * 4 for n in sizes]
    first, count = sum(padded[:expert]), padded[expert]
    blocks = a.codes.shape[1] // 128
    scales = array(a.scales)[first * blocks : (first + count) * blocks].reshape(blocks, count).T
    n = sizes[expert]
    return BlockTensor(array(a.codes)[first : first + n], np.ascontiguousarray(scales[:n]), FP8_1X128)


def expert_tiles(b: Fp8Tiles, expert: int) -> BlockTensor:
    return BlockTensor(array(b.codes)[expert], np.ascontiguousarray(array(b.scales)[expert]), FP8_128X128)


def expert_cols(a: Fp8Cols, sizes: list[int], expert: int) -> BlockTensor:
    padded = [-(-n // 128) * 128 for n in sizes]
    first, count = sum(padded[:expert]), padded[expert]
    columns = a.scales.shape[1]
    codes = array(a.codes)[columns * first : columns * (first + count)].reshape(columns, count)
    scales = array(a.scales)[first // 128 : (first + count) // 128]
    return BlockTensor(codes, np.ascontiguousarray(scales.T), FP8_1X128)


def model(a: BlockTensor, b: BlockTensor, out_dtype: torch.dtype) -> np.ndarray:
    """Hopper's GEMM by NumPy, as bits."""
    return bits(fp8_gemm(a, b, out=OUTPUTS[out_dtype]))


def bits(x: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.detach().contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32).cpu().numpy()
    return x.view(f"u{x.itemsize}")


def exact(a: BlockTensor, b: BlockTensor) -> tuple[np.ndarray, np.ndarray]:
    """(a @ b.T, |a| @ |b|.T) in float64, of the dequantized operands."""
    x, y = dequantize(a, dtype=np.float64), dequantize(b, dtype=np.float64)
    return x @ y.T, np.abs(x) @ np.abs(y).T
