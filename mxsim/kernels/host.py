"""The backend of `mxsim.kernels.ops` for CPU tensors: src/host_api.cpp through ctypes, on torch's number of threads.

The library is built when the first CPU tensor comes. Where it cannot be built (no compiler) or loaded, a RuntimeWarning
says so once, and the simulator computes the same bits slowly.

Arguments are checked and allocated by `ops`; all tensors are contiguous, except the scales of FP8 rows and tiles. A
function that refuses a scale returns its row-major index, else None.
"""

import ctypes
import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mxsim.kernels import build, simulated
from mxsim.kernels.arguments import GemmOperands


class _Pointer(ctypes.c_void_p):
    """A tensor's first element, or null."""

    @classmethod
    def from_param(cls, x: Tensor | None) -> Any:
        return None if x is None else ctypes.c_void_p(x.data_ptr())


_SOURCES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_Long, _Int = ctypes.c_int64, ctypes.c_int
_SHAPE = (_Long, _Long)
_STRIDED = (_Pointer, _Long, _Long)
_GROUPS = (_Pointer, _Long, _Long, _Pointer)  # sizes, their number, multiple, padded sizes
_COLUMN_GROUPS = (_Pointer, _Long, _Pointer)
_ROUNDING = (_Int, ctypes.c_uint64)  # whether it is stochastic, and its seed
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # argument types, without the last one: number of threads
    "to_fp4_row": (_Pointer, _Int, *_SHAPE, _Int, _Pointer, _Pointer, *_ROUNDING),
    "fp8_row_to_fp4_row": (_Pointer, *_STRIDED, *_SHAPE, _Int, _Pointer, _Pointer),
    "fp4_row_to_fp8_row": (_Pointer, _Pointer, *_SHAPE, _Int, _Pointer, *_STRIDED, *_GROUPS),
    "fp4_row_to_fp8_col": (_Pointer, _Pointer, *_SHAPE, _Int, _Pointer, _Pointer, *_COLUMN_GROUPS),
    "fp8_row_to_fp8_col": (_Pointer, *_STRIDED, *_SHAPE, _Pointer, _Pointer, *_COLUMN_GROUPS),
    "fp8_row_to_ragged": (_Pointer, *_STRIDED, *_SHAPE, _Pointer, _Pointer, *_GROUPS),
    "to_fp8_row": (_Pointer, *_SHAPE, _Pointer, *_STRIDED, *_GROUPS, *_ROUNDING),
    "to_fp8_col": (_Pointer, *_SHAPE, _Pointer, _Pointer, *_COLUMN_GROUPS),
    "to_fp8_tile": (_Pointer, _Long, *_SHAPE, _Int, _Pointer, *_STRIDED, _Long),
    "to_fp4_and_fp8_row": (
        *(_Pointer, *_SHAPE, _Int, _Int, _Pointer, _Pointer, _Pointer),
        *(*_STRIDED, *_GROUPS, *_ROUNDING),
    ),
    "fp4_to_bf16": (_Pointer, _Pointer, *_SHAPE, _Pointer),
    "fp8_gemm_emulated": (
        *(_Pointer, *_STRIDED, _Int),  # a, whether it is E5M2
        *(_Pointer, *_STRIDED, _Int, _Int),  # b, rows that share a scale, whether it is E5M2
        *(*_SHAPE, _Long, _Int, _Int, _Int, _Long, _Int, _Long, _Int, _Pointer),
    ),
}
_REFUSING = ("fp8_row_to_fp4_row", "fp8_row_to_fp8_col")


@lru_cache(maxsize=1)
def backend() -> ModuleType:
    """The module that computes on CPU tensors: this one, or `simulated` after a warning."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        warnings.warn(
            f"mxsim.kernels: CPU tensors run the simulator, with the same results but slowly: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return simulated
    import mxsim.kernels.host as this

    return this


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The host build, loaded.

    Raises:
        build.BuildError, OSError: if it cannot be built or loaded.
    """
    loaded = ctypes.CDLL(str(build.compile_host()))
    for name, arguments in FUNCTIONS.items():
        function = getattr(loaded, f"mxsim_{name}")
        function.argtypes = (*arguments, _Int)
        function.restype = _Long if name in _REFUSING else None
    return loaded


def _call(name: str, *arguments: Any) -> Any:
    return getattr(library(), f"mxsim_{name}")(*arguments, torch.get_num_threads())


def to_fp4_row(x: Tensor, codes: Tensor, scales: Tensor, rule: int, seed: int | None = None) -> None:
    """MXFP4 rows of bfloat16, float16 or float32. A seed: stochastic rounding."""
    _call("to_fp4_row", x, _SOURCES[x.dtype], *x.shape, rule, codes, scales, *_rounding(seed))


def fp8_row_to_fp4_row(codes: Tensor, scales: Tensor, out_codes: Tensor, out_scales: Tensor, rule: int) -> int | None:
    """MXFP4 rows of FP8 rows."""
    index = _call("fp8_row_to_fp4_row", codes, *_strided(scales), *codes.shape, rule, out_codes, out_scales)
    return None if index < 0 else index


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
    _call(
        "fp4_row_to_fp8_row",
        codes,
        scales,
        codes.shape[0],
        2 * codes.shape[1],
        headroom,
        out_codes,
        *_strided(out_scales),
        *_groups(group_sizes, padded_sizes, row_multiple),
    )


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
    _call(
        "fp4_row_to_fp8_col",
        codes,
        scales,
        codes.shape[0],
        2 * codes.shape[1],
        headroom,
        out_codes,
        out_scales,
        *_column_groups(group_sizes, padded_sizes),
    )


def fp8_row_to_fp8_col(
    codes: Tensor,
    scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
    group_sizes: Tensor | None,
    padded_sizes: Tensor | None,
) -> int | None:
    """FP8 columns of FP8 rows, dense or ragged."""
    index = _call(
        "fp8_row_to_fp8_col",
        codes,
        *_strided(scales),
        *codes.shape,
        out_codes,
        out_scales,
        *_column_groups(group_sizes, padded_sizes),
    )
    return None if index < 0 else index


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
    _call(
        "fp8_row_to_ragged",
        codes,
        *_strided(scales),
        *codes.shape,
        out_codes,
        out_scales,
        *_groups(group_sizes, padded_sizes, row_multiple),
    )


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
    groups = _groups(group_sizes, padded_sizes, row_multiple)
    _call("to_fp8_row", x, *x.shape, out_codes, *_strided(out_scales), *groups, *_rounding(seed))


def to_fp8_col(
    x: Tensor, out_codes: Tensor, out_scales: Tensor, group_sizes: Tensor | None, padded_sizes: Tensor | None
) -> None:
    """FP8 columns of bfloat16, dense or ragged."""
    _call("to_fp8_col", x, *x.shape, out_codes, out_scales, *_column_groups(group_sizes, padded_sizes))


def to_fp8_tile(w: Tensor, out_codes: Tensor, out_scales: Tensor, transpose: bool) -> None:
    """FP8 tiles of bfloat16 matrices [batch, N, K]; codes and scales are the transpose's with `transpose`."""
    _call("to_fp8_tile", w, *w.shape, transpose, out_codes, out_scales, *out_scales.stride())


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
    _call(
        "to_fp4_and_fp8_row",
        x,
        *x.shape,
        rule,
        headroom,
        fp4_codes,
        fp4_scales,
        fp8_codes,
        *_strided(fp8_scales),
        *_groups(group_sizes, padded_sizes, row_multiple),
        *_rounding(seed),
    )


def fp4_to_bf16(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """bfloat16 of MXFP4 rows."""
    _call("fp4_to_bf16", codes, scales, *out.shape, out)


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
    _call(
        "fp8_gemm_emulated",
        operands.a,
        *_strided(operands.a_scales),
        operands.a_is_e5m2,
        operands.b,
        *_strided(operands.b_scales),
        operands.rows_per_scale,
        operands.b_is_e5m2,
        *out.shape,
        operands.a.shape[1],
        fraction_bits,
        products_per_step,
        rounding,
        promotion_interval,
        scale_order,
        split_k,
        out.dtype is torch.bfloat16,
        out,
    )


def _strided(scales: Tensor) -> tuple[Tensor, int, int]:
    """Where scales lie, and the strides of a matrix; flat ones (the ragged form) need none."""
    return scales, *(scales.stride() if scales.dim() == 2 else (0, 0))


def _groups(sizes: Tensor | None, padded_sizes: Tensor | None, multiple: int) -> tuple[Any, ...]:
    return (None, 0, 1, None) if sizes is None else (sizes, sizes.shape[0], multiple, padded_sizes)


def _column_groups(sizes: Tensor | None, padded_sizes: Tensor | None) -> tuple[Any, ...]:
    return (None, 0, None) if sizes is None else (sizes, sizes.shape[0], padded_sizes)


def _rounding(seed: int | None) -> tuple[bool, int]:
    return seed is not None, seed or 0
