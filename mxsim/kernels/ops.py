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
`check=True` reads the device back (not under graph capture) and raises the ValueErrors that CPU tensors always get.
"""

import importlib
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mxsim.blocks import ScaleRule
from mxsim.kernels import host
from mxsim.kernels.arguments import (
    BF16,
    FLOATS,
    FP4_CODES,
    FP8_CODES,
    check_group_sizes,
    check_group_sizes_tensor,
    check_headroom,
    check_reading_back,
    check_row_multiple,
    check_tensor,
    first_not_a_power_of_two,
    fp4_scales_of,
    fp8_scales_of,
    matrices_of,
    raise_not_a_power_of_two,
    rows_of,
    rule_number,
    split_group_sizes,
)
from mxsim.kernels.layouts import (
    DEFAULT_ROW_MULTIPLE,
    FP4_BLOCK,
    FP8_BLOCK,
    Fp4Rows,
    Fp8Cols,
    Fp8Rows,
    Fp8Tiles,
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

GroupSizes: TypeAlias = Sequence[int] | Tensor


# ------------------------------------------------------------------------------------------------- public functions
def bf16_to_fp4_row(x: Tensor, *, scale_rule: ScaleRule | None = None) -> Fp4Rows:
    """`quantize(x, MXFP4, scale_rule=scale_rule)`: E2M1(x / 2**X) along the last axis, X from each 32 elements' amax.

    One rounding, ties to even, saturating; signs kept, of zero too. An all-zero block: scale code 0. A NaN or an
    infinity in a block: scale code 0xFF, codes 0.

    Args:
        x: bfloat16, float16 or float32 [..., K], K % 32 == 0.
        scale_rule: None is FLOOR.

    Source: NUMERICS 3; the paper's BF16ToFP4Row.
    """
    op = "bf16_to_fp4_row"
    check_tensor(op, "x", x)
    return Fp4Rows(*_bf16_to_fp4_row(x, rule_number(op, scale_rule)))


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
    return Fp4Rows(*_fp8_row_to_fp4_row(codes, scales, rule_number(op, scale_rule)))


def fp4_row_to_fp8_row(
    codes: Tensor,
    scales: Tensor,
    *,
    headroom: int = 6,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> Fp8Rows:
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
        return Fp8Rows(*_fp4_row_to_fp8_row(codes, scales, headroom))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return Fp8Rows(*_fp4_row_to_fp8_row_ragged(codes, scales, headroom, sizes, host_sizes, row_multiple))


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
        return Fp8Cols(*_fp4_row_to_fp8_col(codes, scales, headroom))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return Fp8Cols(*_fp4_row_to_fp8_col_ragged(codes, scales, headroom, sizes, host_sizes))


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
        return Fp8Cols(*_fp8_row_to_fp8_col(codes, scales))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "codes", codes)
    return Fp8Cols(*_fp8_row_to_fp8_col_ragged(codes, scales, sizes, host_sizes))


def fp8_row_to_ragged(
    codes: Tensor,
    scales: Tensor,
    *,
    group_sizes: GroupSizes,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> Fp8Rows:
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
    return Fp8Rows(*_fp8_row_to_ragged(codes, scales, sizes, host_sizes, row_multiple))


def bf16_to_fp8_row(
    x: Tensor,
    *,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> Fp8Rows:
    """`quantize(x, FP8_1X128)`: E4M3(x / s), s the smallest power of two with amax <= 448 * s (RCEIL).

    s >= 2**-127; amax = 0 gives s = 1. A NaN or an infinity in a block: scale NaN, codes 0x7F.

    Args:
        x: bfloat16 [..., K], K % 128 == 0.

    Source: NUMERICS 7.
    """
    op = "bf16_to_fp8_row"
    check_tensor(op, "x", x)
    if group_sizes is None:
        return Fp8Rows(*_bf16_to_fp8_row(x))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "x", x)
    return Fp8Rows(*_bf16_to_fp8_row_ragged(x, sizes, host_sizes, row_multiple))


def bf16_to_fp8_col(x: Tensor, *, group_sizes: GroupSizes | None = None, check: bool = False) -> Fp8Cols:
    """`quantize(x, FP8_128X1)`, transposed: as `bf16_to_fp8_row`, a block being 128 rows of one column, of one expert.

    Args:
        x: bfloat16 [..., K], K % 32 == 0.

    Source: NUMERICS 7; layout as in NUMERICS 5.3.
    """
    op = "bf16_to_fp8_col"
    check_tensor(op, "x", x)
    if group_sizes is None:
        return Fp8Cols(*_bf16_to_fp8_col(x))
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    if check:
        _check_sizes(op, sizes, "x", x)
    return Fp8Cols(*_bf16_to_fp8_col_ragged(x, sizes, host_sizes))


def bf16_to_fp8_tile(w: Tensor, *, transpose: bool = False) -> Fp8Tiles:
    """`quantize(w, FP8_128X128)`: as `bf16_to_fp8_row`, a block being a tile of 128 x 128. transpose: of w's transpose.

    Args:
        w: bfloat16 [..., N, K] of any size; tiles at the far edges may be smaller.

    Returns:
        codes [..., N, K] and scales [..., ceil(N/128), ceil(K/128)]; with transpose N and K change places.

    Source: NUMERICS 7 and 8.
    """
    check_tensor("bf16_to_fp8_tile", "w", w)
    return Fp8Tiles(*_bf16_to_fp8_tile(w, bool(transpose)))


def bf16_to_fp4_and_fp8_row(
    x: Tensor,
    *,
    scale_rule: ScaleRule | None = None,
    headroom: int = 6,
    group_sizes: GroupSizes | None = None,
    row_multiple: int = DEFAULT_ROW_MULTIPLE,
    check: bool = False,
) -> tuple[Fp4Rows, Fp8Rows]:
    """`bf16_to_fp4_row(x)`, and `fp4_row_to_fp8_row` of that: x is read once, the FP8 rows hold the FP4 values.

    With group_sizes the FP8 rows are ragged; the FP4 rows stay as x's.

    Args:
        x: bfloat16 [..., K], K % 128 == 0.
    """
    op = "bf16_to_fp4_and_fp8_row"
    check_tensor(op, "x", x)
    check_headroom(op, headroom)
    rule = rule_number(op, scale_rule)
    if group_sizes is None:
        fp4_codes, fp4_scales, *fp8 = _bf16_to_fp4_and_fp8_row(x, rule, headroom)
        return Fp4Rows(fp4_codes, fp4_scales), Fp8Rows(*fp8)
    sizes, host_sizes = split_group_sizes(op, group_sizes)
    check_row_multiple(op, row_multiple)
    if check:
        _check_sizes(op, sizes, "x", x)
    fp4_codes, fp4_scales, *fp8 = _bf16_to_fp4_and_fp8_row_ragged(x, rule, headroom, sizes, host_sizes, row_multiple)
    return Fp4Rows(fp4_codes, fp4_scales), Fp8Rows(*fp8)


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
    return _fp4_to_bf16(codes, scales)


def _check_scales(op: str, scales: Tensor) -> None:
    check_reading_back(op, scales)
    if scales.is_cuda and scales.dtype is torch.float32:  # the CPU checks anyway, and the op refuses other dtypes
        index = first_not_a_power_of_two(scales)
        if index is not None:
            raise_not_a_power_of_two(op, scales, index)


def _check_sizes(op: str, group_sizes: Tensor | None, rows_name: str, rows: Tensor) -> None:
    if group_sizes is not None and group_sizes.is_cuda:
        check_reading_back(op, group_sizes)
        check_group_sizes_tensor(op, group_sizes, rows)
        check_group_sizes(op, group_sizes.tolist(), prod(rows.shape[:-1]), rows_name)


# ------------------------------------------------------------------------------------------------- registration
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
@_operator("bf16_to_fp4_row(Tensor x, int rule) -> (Tensor, Tensor)")
def _bf16_to_fp4_row(backend: Any, x: Tensor, rule: int) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp4_row", "x", x, FLOATS, 1, FP4_BLOCK)
    codes, scales = empty_fp4_rows(x.shape, x.device)
    backend.to_fp4_row(x, codes, scales, rule)
    return codes, scales


@_operator("fp8_row_to_fp4_row(Tensor codes, Tensor scales, int rule) -> (Tensor, Tensor)")
def _fp8_row_to_fp4_row(backend: Any, codes: Tensor, scales: Tensor, rule: int) -> tuple[Tensor, ...]:
    op = "fp8_row_to_fp4_row"
    x, x_scales = _fp8_rows(op, codes, scales)
    out = empty_fp4_rows(x.shape, x.device)
    _refuse(op, scales, backend.fp8_row_to_fp4_row(x, x_scales, *out, rule))
    return out


@_operator("fp4_row_to_fp8_row(Tensor codes, Tensor scales, int headroom) -> (Tensor, Tensor)")
def _fp4_row_to_fp8_row(backend: Any, codes: Tensor, scales: Tensor, headroom: int) -> tuple[Tensor, ...]:
    x, x_scales = _fp4_rows("fp4_row_to_fp8_row", codes, scales, FP8_BLOCK)
    out = empty_fp8_rows((x.shape[0], 2 * x.shape[1]), x.device)
    backend.fp4_row_to_fp8_row(x, x_scales, *out, headroom, None, None, 1)
    return out


@_operator(
    "fp4_row_to_fp8_row.ragged(Tensor codes, Tensor scales, int headroom, Tensor? group_sizes, SymInt[]? host_sizes, "
    "SymInt row_multiple) -> (Tensor, Tensor, Tensor)"
)
def _fp4_row_to_fp8_row_ragged(
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
def _fp4_row_to_fp8_col(backend: Any, codes: Tensor, scales: Tensor, headroom: int) -> tuple[Tensor, ...]:
    x, x_scales = _fp4_rows("fp4_row_to_fp8_col", codes, scales, FP4_BLOCK)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), 2 * x.shape[1], x.device)
    backend.fp4_row_to_fp8_col(x, x_scales, *out, headroom, None, None)
    return out


@_operator(
    "fp4_row_to_fp8_col.ragged(Tensor codes, Tensor scales, int headroom, Tensor? group_sizes, SymInt[]? host_sizes) "
    "-> (Tensor, Tensor, Tensor)"
)
def _fp4_row_to_fp8_col_ragged(
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
def _fp8_row_to_fp8_col(backend: Any, codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    op = "fp8_row_to_fp8_col"
    x, x_scales = _fp8_rows(op, codes, scales)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), x.shape[1], x.device)
    _refuse(op, scales, backend.fp8_row_to_fp8_col(x, x_scales, *out, None, None))
    return out


@_operator(
    "fp8_row_to_fp8_col.ragged(Tensor codes, Tensor scales, Tensor? group_sizes, SymInt[]? host_sizes) "
    "-> (Tensor, Tensor, Tensor)"
)
def _fp8_row_to_fp8_col_ragged(
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
def _fp8_row_to_ragged(
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


@_operator("bf16_to_fp8_row(Tensor x) -> (Tensor, Tensor)")
def _bf16_to_fp8_row(backend: Any, x: Tensor) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp8_row", "x", x, BF16, 1, FP8_BLOCK)
    out = empty_fp8_rows(x.shape, x.device)
    backend.to_fp8_row(x, *out, None, None, 1)
    return out


@_operator(
    "bf16_to_fp8_row.ragged(Tensor x, Tensor? group_sizes, SymInt[]? host_sizes, SymInt row_multiple) "
    "-> (Tensor, Tensor, Tensor)"
)
def _bf16_to_fp8_row_ragged(
    backend: Any, x: Tensor, group_sizes: Tensor | None, host_sizes: list[int] | None, row_multiple: int
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp8_row"
    x = rows_of(op, "x", x, BF16, 1, FP8_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), row_multiple, max_row_units)
    out = empty_ragged_fp8_rows(units * row_multiple, x.shape[1], x.device)
    backend.to_fp8_row(x, *out, sizes, padded, row_multiple)
    return *out, padded


@_operator("bf16_to_fp8_col(Tensor x) -> (Tensor, Tensor)")
def _bf16_to_fp8_col(backend: Any, x: Tensor) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp8_col", "x", x, BF16, 1, FP4_BLOCK)
    out = empty_fp8_cols(ceil_div(x.shape[0], FP8_BLOCK), x.shape[1], x.device)
    backend.to_fp8_col(x, *out, None, None)
    return out


@_operator("bf16_to_fp8_col.ragged(Tensor x, Tensor? group_sizes, SymInt[]? host_sizes) -> (Tensor, Tensor, Tensor)")
def _bf16_to_fp8_col_ragged(
    backend: Any, x: Tensor, group_sizes: Tensor | None, host_sizes: list[int] | None
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp8_col"
    x = rows_of(op, "x", x, BF16, 1, FP4_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), FP8_BLOCK, max_column_blocks)
    out = empty_ragged_fp8_cols(units, x.shape[1], x.device)
    backend.to_fp8_col(x, *out, sizes, padded)
    return *out, padded


@_operator("bf16_to_fp8_tile(Tensor w, bool transpose) -> (Tensor, Tensor)")
def _bf16_to_fp8_tile(backend: Any, w: Tensor, transpose: bool) -> tuple[Tensor, ...]:
    matrices, batch = matrices_of("bf16_to_fp8_tile", "w", w, BF16)
    num_matrices, n, k = matrices.shape
    rows, columns = (k, n) if transpose else (n, k)
    codes, scales = empty_fp8_tiles((*batch, rows, columns), w.device)
    backend.to_fp8_tile(matrices, codes, scales.view(num_matrices, *scales.shape[-2:]), transpose)
    return codes, scales


@_operator("bf16_to_fp4_and_fp8_row(Tensor x, int rule, int headroom) -> (Tensor, Tensor, Tensor, Tensor)")
def _bf16_to_fp4_and_fp8_row(backend: Any, x: Tensor, rule: int, headroom: int) -> tuple[Tensor, ...]:
    x = rows_of("bf16_to_fp4_and_fp8_row", "x", x, BF16, 1, FP8_BLOCK)
    fp4, fp8 = empty_fp4_rows(x.shape, x.device), empty_fp8_rows(x.shape, x.device)
    backend.to_fp4_and_fp8_row(x, *fp4, *fp8, rule, headroom, None, None, 1)
    return *fp4, *fp8


@_operator(
    "bf16_to_fp4_and_fp8_row.ragged(Tensor x, int rule, int headroom, Tensor? group_sizes, SymInt[]? host_sizes, "
    "SymInt row_multiple) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _bf16_to_fp4_and_fp8_row_ragged(
    backend: Any,
    x: Tensor,
    rule: int,
    headroom: int,
    group_sizes: Tensor | None,
    host_sizes: list[int] | None,
    row_multiple: int,
) -> tuple[Tensor, ...]:
    op = "bf16_to_fp4_and_fp8_row"
    x = rows_of(op, "x", x, BF16, 1, FP8_BLOCK)
    sizes, padded, units = _groups(op, backend, group_sizes, host_sizes, ("x", x), row_multiple, max_row_units)
    fp4 = empty_fp4_rows(x.shape, x.device)
    fp8 = empty_ragged_fp8_rows(units * row_multiple, x.shape[1], x.device)
    backend.to_fp4_and_fp8_row(x, *fp4, *fp8, rule, headroom, sizes, padded, row_multiple)
    return *fp4, *fp8, padded


@_operator("fp4_to_bf16(Tensor codes, Tensor scales) -> Tensor")
def _fp4_to_bf16(backend: Any, codes: Tensor, scales: Tensor) -> Tensor:
    x, x_scales = _fp4_rows("fp4_to_bf16", codes, scales, FP4_BLOCK)
    out = torch.empty((x.shape[0], 2 * x.shape[1]), dtype=torch.bfloat16, device=x.device)
    backend.fp4_to_bf16(x, x_scales, out)
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


__all__ = [
    "bf16_to_fp4_and_fp8_row",
    "bf16_to_fp4_row",
    "bf16_to_fp8_col",
    "bf16_to_fp8_row",
    "bf16_to_fp8_tile",
    "fp4_row_to_fp8_col",
    "fp4_row_to_fp8_row",
    "fp4_to_bf16",
    "fp8_row_to_fp4_row",
    "fp8_row_to_fp8_col",
    "fp8_row_to_ragged",
]
