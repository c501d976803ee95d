"""The operators `mxsim::*`: an implementation that serves the CPU, CUDA and fake tensors alike, and its registration.

An implementation checks its arguments, allocates its results and has a backend fill them: `host` (or `simulated`) for
CPU tensors, `device` for CUDA tensors, nothing for fake and meta tensors. `ops` has the public functions.
"""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mxsim.kernels import host
from mxsim.kernels.arguments import (
    BF16,
    FLOATS,
    FP4_CODES,
    FP8_CODES,
    check_cuda_accumulator,
    check_equal_scales,
    check_exact_span,
    check_group_sizes,
    check_group_sizes_tensor,
    check_split_k,
    fp4_scales_of,
    fp8_scales_of,
    gemm_operands,
    matrices_of,
    raise_not_a_power_of_two,
    rows_of,
)
from mxsim.kernels.layouts import (
    FP4_BLOCK,
    FP8_BLOCK,
    ceil_div,
    empty_fp4_rows,
    empty_fp8_cols,
    empty_fp8_rows,
    empty_fp8_tiles,
    empty_ragged_fp8_cols,
    empty_ragged_fp8_rows,
    max_column_blocks,
    max_row_units,
)


class _Backend:
    """The functions of a module that is found when the first tensor comes."""

    def __init__(self, find: Callable[[], ModuleType]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._find(), name)
        setattr(self, name, function)
        return function


class _NoBackend:
    """Computes nothing: fake and meta tensors have no bytes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


_HOST = _Backend(host.backend)
_DEVICE = _Backend(lambda: importlib.import_module("mxsim.kernels.device"))
_NO_BACKEND = _NoBackend()
_LIBRARY = torch.library.Library("mxsim", "DEF")


def _operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register implementation(backend, *arguments) under the schema; the operator takes the implementation's place.

    An implementation checks its arguments, allocates its results and has the backend fill them.
    """

    def register(implementation: Callable[..., Any]) -> Any:
        name = schema[: schema.index("(")]

        def on(backend: Any) -> Callable[..., Any]:
            return lambda *arguments: implementation(backend, *arguments)

        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, on(_HOST), "CPU")
        _LIBRARY.impl(name, on(_DEVICE), "CUDA")
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"mxsim::{name}", on(_NO_BACKEND), lib=_LIBRARY)
        base, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.mxsim, base), overload or "default")

    return register


def _groups(
    op: str,
    backend: Any,
    group_sizes: Tensor | None,
    host_sizes: Sequence[int] | None,
    rows: tuple[str, Tensor],
    multiple: int,
    max_units: Callable[[int, int, int], int],
) -> tuple[Tensor | None, Tensor, int]:
    """(sizes on the device of the rows, room for the padded sizes, units of `multiple` padded rows to allocate)."""
    name, matrix = rows
    num_rows, device = matrix.shape[0], matrix.device
    if group_sizes is not None:
        check_group_sizes_tensor(op, group_sizes, matrix)
        if group_sizes.is_cpu and not isinstance(group_sizes, FakeTensor):
            host_sizes = group_sizes.tolist()
    sizes: Tensor | None
    if host_sizes is not None:
        check_group_sizes(op, host_sizes, num_rows, name)
        num_groups = len(host_sizes)
        num_units = sum(ceil_div(n, multiple) for n in host_sizes)
        sizes = None if backend is _NO_BACKEND else _on_device(host_sizes, device)
    else:
        assert group_sizes is not None
        num_groups = group_sizes.shape[0]
        if group_sizes.is_cpu:
            num_units = torch.library.get_ctx().new_dynamic_size()
        else:
            num_units = max_units(num_rows, num_groups, multiple)
        sizes = group_sizes if group_sizes.dtype is torch.int64 else group_sizes.to(torch.int64)
        sizes = sizes.contiguous()
    return sizes, torch.empty_strided((num_groups,), (1,), dtype=torch.int64, device=device), num_units


_CAPTURED: list[Tensor] = []  # read again at every replay of a captured graph


def _on_device(sizes: Sequence[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(sizes, dtype=torch.int64)
    if device.type == "cpu":
        return tensor
    if torch.cuda.is_current_stream_capturing():
        tensor = tensor.pin_memory()
        _CAPTURED.append(tensor)
    return tensor.to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------------- operators
# A seed: stochastic rounding, by an overload of its own. 64 bits in two's complement.
def _bf16_to_fp4_row(backend: Any, x: Tensor, rule: int, seed: int | None = None) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp4_row", "x", x, FLOATS, 1, FP4_BLOCK)
    codes, scales = empty_fp4_rows(x.shape, x.device)
    backend.to_fp4_row(x, codes, scales, rule, seed)
    return codes, scales


bf16_to_fp4_row = _operator("bf16_to_fp4_row(Tensor x, int rule) -> (Tensor, Tensor)")(_bf16_to_fp4_row)
bf16_to_fp4_row_stochastic = _operator(
    "bf16_to_fp4_row.stochastic(Tensor x, int rule, SymInt seed) -> (Tensor, Tensor)"
)(_bf16_to_fp4_row)


@_operator("fp8_row_to_fp4_row(Tensor codes, Tensor scales, int rule) -> (Tensor, Tensor)")
def fp8_row_to_fp4_row(backend: Any, codes: Tensor, scales: Tensor, rule: int) -> tuple[Tensor, ...]:
    op = "fp8_row_to_fp4_row"
    x, x_scales = _fp8_rows(op, codes, scales)
    out = empty_fp4_rows(x.shape, x.device)
    _refuse(op, scales, backend.fp8_row_to_fp4_row(x, x_scales, *out, rule))
    return out


@_operator("fp4_row_to_fp8_row(Tensor codes, Tensor scales, int headroom) -> (Tensor, Tensor)")
def fp4_row_to_fp8_row(backend: Any, codes: Tensor, scales: Tensor, headroom: int) -> tuple[Tensor, ...]:
    x, x_scales = _fp4_rows("fp4_row_to_fp8_row", codes, scales, FP8_BLOCK)
    out = empty_fp8_rows((x.shape[0], 2 * x.shape[1]), x.device)
    backend.fp4_row_to_fp8_row(x, x_scales, *out, headroom, None, None, 1)
    return out


@_operator(
    "fp4_row_to_fp8_row.ragged(Tensor codes, Tensor scales, int headroom, Tensor? group_sizes, SymInt[]? host_sizes, "
    "SymInt row_multiple) -> (Tensor, Tensor, Tensor)"
)
def fp4_row_to_fp8_row_ragged(
    backend: Any,
    codes: Tensor,
    scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
    row_multiple: int,
) -> tuple[Tensor, ...]:
    op = "fp4_row_to_fp8_row"
    x, x_scales = _fp4_rows(op, codes, scales, FP8_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("codes", x), row_multiple, max_row_units)
    out = empty_ragged_fp8_rows(units * row_multiple, 2 * x.shape[1], x.device)
    backend.fp4_row_to_fp8_row(x, x_scales, *out, headroom, sizes, padded, row_multiple)
    return *out, padded


@_operator("fp4_row_to_fp8_col(Tensor codes, Tensor scales, int headroom) -> (Tensor, Tensor)")
def fp4_row_to_fp8_col(backend: Any, codes: Tensor, scales: Tensor, headroom: int) -> tuple[Tensor, ...]:
    x, x_scales = _fp4_rows("fp4_row_to_fp8_col", codes, scales, FP4_BLOCK)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), 2 * x.shape[1], x.device)
    backend.fp4_row_to_fp8_col(x, x_scales, *out, headroom, None, None)
    return out


@_operator(
    "fp4_row_to_fp8_col.ragged(Tensor codes, Tensor scales, int headroom, Tensor? group_sizes, SymInt[]? host_sizes) "
    "-> (Tensor, Tensor, Tensor)"
)
def fp4_row_to_fp8_col_ragged(
    backend: Any,
    codes: Tensor,
    scales: Tensor,
    headroom: int,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
) -> tuple[Tensor, ...]:
    op = "fp4_row_to_fp8_col"
    x, x_scales = _fp4_rows(op, codes, scales, FP4_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("codes", x), FP8_BLOCK, max_column_blocks)
    out = empty_ragged_fp8_cols(units, 2 * x.shape[1], x.device)
    backend.fp4_row_to_fp8_col(x, x_scales, *out, headroom, sizes, padded)
    return *out, padded


@_operator("fp8_row_to_fp8_col(Tensor codes, Tensor scales) -> (Tensor, Tensor)")
def fp8_row_to_fp8_col(backend: Any, codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    op = "fp8_row_to_fp8_col"
    x, x_scales = _fp8_rows(op, codes, scales)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), x.shape[1], x.device)
    _refuse(op, scales, backend.fp8_row_to_fp8_col(x, x_scales, *out, None, None))
    return out


@_operator(
    "fp8_row_to_fp8_col.ragged(Tensor codes, Tensor scales, Tensor? group_sizes, SymInt[]? host_sizes) "
    "-> (Tensor, Tensor, Tensor)"
)
def fp8_row_to_fp8_col_ragged(
    backend: Any, codes: Tensor, scales: Tensor, group_sizes: Tensor | None, host_sizes: list[int] | None
) -> tuple[Tensor, ...]:
    op = "fp8_row_to_fp8_col"
    x, x_scales = _fp8_rows(op, codes, scales)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("codes", x), FP8_BLOCK, max_column_blocks)
    out = empty_ragged_fp8_cols(units, x.shape[1], x.device)
    _refuse(op, scales, backend.fp8_row_to_fp8_col(x, x_scales, *out, sizes, padded))
    return *out, padded


@_operator(
    "fp8_row_to_ragged(Tensor codes, Tensor scales, Tensor? group_sizes, SymInt[]? host_sizes, SymInt row_multiple) "
    "-> (Tensor, Tensor, Tensor)"
)
def fp8_row_to_ragged(
    backend: Any,
    codes: Tensor,
    scales: Tensor,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
    row_multiple: int,
) -> tuple[Tensor, ...]:
    op = "fp8_row_to_ragged"
    x, x_scales = _fp8_rows(op, codes, scales)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("codes", x), row_multiple, max_row_units)
    out = empty_ragged_fp8_rows(units * row_multiple, x.shape[1], x.device)
    backend.fp8_row_to_ragged(x, x_scales, *out, sizes, padded, row_multiple)
    return *out, padded


def _bf16_to_fp8_row(backend: Any, x: Tensor, seed: int | None = None) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp8_row", "x", x, BF16, 1, FP8_BLOCK)
    out = empty_fp8_rows(x.shape, x.device)
    backend.to_fp8_row(x, *out, None, None, 1, seed)
    return out


def _bf16_to_fp8_row_ragged(
    backend: Any,
    x: Tensor,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
    row_multiple: int,
    seed: int | None = None,
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp8_row"
    x = rows_of(op, "x", x, BF16, 1, FP8_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), row_multiple, max_row_units)
    out = empty_ragged_fp8_rows(units * row_multiple, x.shape[1], x.device)
    backend.to_fp8_row(x, *out, sizes, padded, row_multiple, seed)
    return *out, padded


bf16_to_fp8_row = _operator("bf16_to_fp8_row(Tensor x) -> (Tensor, Tensor)")(_bf16_to_fp8_row)
bf16_to_fp8_row_stochastic = _operator("bf16_to_fp8_row.stochastic(Tensor x, SymInt seed) -> (Tensor, Tensor)")(
    _bf16_to_fp8_row
)
bf16_to_fp8_row_ragged = _operator(
    "bf16_to_fp8_row.ragged(Tensor x, Tensor? group_sizes, SymInt[]? host_sizes, SymInt row_multiple) "
    "-> (Tensor, Tensor, Tensor)"
)(_bf16_to_fp8_row_ragged)
bf16_to_fp8_row_stochastic_ragged = _operator(
    "bf16_to_fp8_row.stochastic_ragged(Tensor x, Tensor? group_sizes, SymInt[]? host_sizes, SymInt row_multiple, "
    "SymInt seed) -> (Tensor, Tensor, Tensor)"
)(_bf16_to_fp8_row_ragged)


@_operator("bf16_to_fp8_col(Tensor x) -> (Tensor, Tensor)")
def bf16_to_fp8_col(backend: Any, x: Tensor) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp8_col", "x", x, BF16, 1, FP4_BLOCK)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), x.shape[1], x.device)
    backend.to_fp8_col(x, *out, None, None)
    return out


@_operator("bf16_to_fp8_col.ragged(Tensor x, Tensor? group_sizes, SymInt[]? host_sizes) -> (Tensor, Tensor, Tensor)")
def bf16_to_fp8_col_ragged(
    backend: Any, x: Tensor, group_sizes: Tensor | None, host_sizes: list[int] | None
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp8_col"
    x = rows_of(op, "x", x, BF16, 1, FP4_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), FP8_BLOCK, max_column_blocks)
    out = empty_ragged_fp8_cols(units, x.shape[1], x.device)
    backend.to_fp8_col(x, *out, sizes, padded)
    return *out, padded


@_operator("bf16_to_fp8_tile(Tensor w, bool transpose) -> (Tensor, Tensor)")
def bf16_to_fp8_tile(backend: Any, w: Tensor, transpose: bool) -> tuple[Tensor, ...]:
    matrices, batch = matrices_of("bf16_to_fp8_tile", "w", w, BF16)
    num_matrices, n, k = matrices.shape
    rows, columns = (k, n) if transpose else (n, k)
    codes, scales = empty_fp8_tiles((*batch, rows, columns), w.device)
    backend.to_fp8_tile(matrices, codes, scales.view(num_matrices, *scales.shape[-2:]), transpose)
    return codes, scales


def _bf16_to_fp4_and_fp8_row(
    backend: Any, x: Tensor, rule: int, headroom: int, seed: int | None = None
) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp4_and_fp8_row", "x", x, BF16, 1, FP8_BLOCK)
    fp4, fp8 = empty_fp4_rows(x.shape, x.device), empty_fp8_rows(x.shape, x.device)
    backend.to_fp4_and_fp8_row(x, *fp4, *fp8, rule, headroom, None, None, 1, seed)
    return *fp4, *fp8


def _bf16_to_fp4_and_fp8_row_ragged(
    backend: Any,
    x: Tensor,
    rule: int,
    headroom: int,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
    row_multiple: int,
    seed: int | None = None,
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp4_and_fp8_row"
    x = rows_of(op, "x", x, BF16, 1, FP8_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), row_multiple, max_row_units)
    fp4 = empty_fp4_rows(x.shape, x.device)
    fp8 = empty_ragged_fp8_rows(units * row_multiple, x.shape[1], x.device)
    backend.to_fp4_and_fp8_row(x, *fp4, *fp8, rule, headroom, sizes, padded, row_multiple, seed)
    return *fp4, *fp8, padded


bf16_to_fp4_and_fp8_row = _operator(
    "bf16_to_fp4_and_fp8_row(Tensor x, int rule, int headroom) -> (Tensor, Tensor, Tensor, Tensor)"
)(_bf16_to_fp4_and_fp8_row)
bf16_to_fp4_and_fp8_row_stochastic = _operator(
    "bf16_to_fp4_and_fp8_row.stochastic(Tensor x, int rule, int headroom, SymInt seed) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)(_bf16_to_fp4_and_fp8_row)
bf16_to_fp4_and_fp8_row_ragged = _operator(
    "bf16_to_fp4_and_fp8_row.ragged(Tensor x, int rule, int headroom, Tensor? group_sizes, SymInt[]? host_sizes, "
    "SymInt row_multiple) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)(_bf16_to_fp4_and_fp8_row_ragged)
bf16_to_fp4_and_fp8_row_stochastic_ragged = _operator(
    "bf16_to_fp4_and_fp8_row.stochastic_ragged(Tensor x, int rule, int headroom, Tensor? group_sizes, "
    "SymInt[]? host_sizes, SymInt row_multiple, SymInt seed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)(_bf16_to_fp4_and_fp8_row_ragged)


@_operator("fp4_to_bf16(Tensor codes, Tensor scales) -> Tensor")
def fp4_to_bf16(backend: Any, codes: Tensor, scales: Tensor) -> Tensor:
    x, x_scales = _fp4_rows("fp4_to_bf16", codes, scales, FP4_BLOCK)
    out = torch.empty((x.shape[0], 2 * x.shape[1]), dtype=torch.bfloat16, device=x.device)
    backend.fp4_to_bf16(x, x_scales, out)
    return out


@_operator(
    "fp8_gemm_emulated(Tensor a_codes, Tensor a_scales, Tensor b_codes, Tensor b_scales, int fraction_bits, "
    "int products_per_step, int rounding, int promotion_interval, int scale_order, int split_k, ScalarType out_dtype) "
    "-> Tensor"
)
def fp8_gemm_emulated(
    backend: Any,
    a_codes: Tensor,
    a_scales: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    fraction_bits: int,
    products_per_step: int,
    rounding: int,
    promotion_interval: int,
    scale_order: int,
    split_k: int,
    out_dtype: torch.dtype,
) -> Tensor:
    op = "fp8_gemm_emulated"
    operands = gemm_operands(op, a_codes, a_scales, b_codes, b_scales)
    (rows, depth), columns = operands.a.shape, operands.b.shape[0]
    check_split_k(op, split_k, depth // FP8_BLOCK)
    check_exact_span(op, depth, fraction_bits, rounding, promotion_interval)
    if scale_order < 0:
        scale_order = int(operands.is_tiled)  # Hopper's
    if backend is _DEVICE:
        check_cuda_accumulator(op, fraction_bits, products_per_step, rounding, scale_order)
    if backend is _HOST:
        for name, scales in (("a_scales", operands.a_scales), ("b_scales", operands.b_scales)):
            check_equal_scales(op, name, scales, promotion_interval, split_k)
    out = torch.empty((rows, columns), dtype=out_dtype, device=operands.a.device)
    numbers = (fraction_bits, products_per_step, rounding, promotion_interval, scale_order, split_k)
    backend.fp8_gemm_emulated(operands, out, *numbers)
    return out


def _fp4_rows(op: str, codes: Tensor, scales: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) as contiguous matrices."""
    return rows_of(op, "codes", codes, FP4_CODES, 2, block), fp4_scales_of(op, scales, codes)


def _fp8_rows(op: str, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) as matrices, the codes contiguous."""
    return rows_of(op, "codes", codes, FP8_CODES, 1, FP8_BLOCK), fp8_scales_of(op, scales, codes)


def _refuse(op: str, scales: Tensor, index: int | None) -> None:
    """The host's answer: row-major index of the first scale that it refuses, or None."""
    if index is not None:
        raise_not_a_power_of_two(op, scales, index)
