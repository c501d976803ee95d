"""The production fast path: MXFP4 and FP8 conversions on torch tensors, CPU and CUDA, bit for bit the simulator's.

Needs torch. CPU tensors run a library that g++ builds on first use (the simulator where there is no compiler); CUDA
tensors run kernels compiled for the device on first use, which needs the packages of the extra `cuda`.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mxsim.kernels needs torch: install mxsim with its extra train, mxsim[train]", name="torch"
    ) from error

from mxsim.kernels.layouts import Fp4Rows, Fp8Cols, Fp8Rows, Fp8Tiles, RaggedFp8Rows
from mxsim.kernels.ops import (
    bf16_to_fp4_and_fp8_row,
    bf16_to_fp4_row,
    bf16_to_fp8_col,
    bf16_to_fp8_row,
    bf16_to_fp8_tile,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp4_to_bf16,
    fp8_gemm_emulated,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    fp8_row_to_ragged,
)

__all__ = [
    "Fp4Rows",
    "Fp8Cols",
    "Fp8Rows",
    "Fp8Tiles",
    "RaggedFp8Rows",
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
