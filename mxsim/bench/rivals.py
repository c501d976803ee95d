"""What is timed beside an op: the same work in several steps, or done by other code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mxsim import kernels
from mxsim.bench.cases import Layout, Shape, num_bytes
from mxsim.kernels.layouts import FP8_BLOCK

_BF16_TRAFFIC = 2  # a tensor between two steps is written and read


@dataclass(frozen=True)
class Rival:
    """Something that does what an op does, or part of it, from the same input.

    count_bytes: as for the ops, everything between its steps included.
    row_multiple: what the rows must be a multiple of.
    same_bits: from its results to the tensors that equal the op's; None where they are others by design.
    """

    name: str
    op: str
    reads: Layout
    run: Callable[..., Any]
    count_bytes: Callable[[Shape], int]
    row_multiple: int = 1
    same_bits: Callable[[Any], tuple[Tensor, ...]] | None = None
    note: str = ""


def unfused() -> list[Rival]:
    """Through bfloat16 in memory, one step after another."""

    def row(codes: Tensor, scales: Tensor) -> Any:
        return kernels.bf16_to_fp8_row(kernels.fp4_to_bf16(codes, scales))

    def column(codes: Tensor, scales: Tensor) -> Any:
        return kernels.bf16_to_fp8_row(kernels.fp4_to_bf16(codes, scales).t().contiguous())

    def ends(shape: Shape) -> int:
        return num_bytes(Layout.FP4_ROWS, shape) + num_bytes(Layout.FP8_ROWS, shape)

    def between(shape: Shape) -> int:
        return _BF16_TRAFFIC * num_bytes(Layout.BF16, shape)

    return [
        Rival(
            "fp4_to_bf16, bf16_to_fp8_row",
            "fp4_row_to_fp8_row",
            Layout.FP4_ROWS,
            row,
            lambda shape: ends(shape) + between(shape),
        ),
        Rival(
            "fp4_to_bf16, t().contiguous(), bf16_to_fp8_row",
            "fp4_row_to_fp8_col",
            Layout.FP4_ROWS,
            column,
            lambda shape: ends(shape) + 2 * between(shape),
            row_multiple=FP8_BLOCK,  # they become the columns
        ),
    ]


def transpose() -> Rival:
    """torch's transpose of bfloat16: what a transposing kernel does besides rounding."""
    return Rival(
        "torch t().contiguous() of bfloat16",
        "bf16_to_fp8_col",
        Layout.BF16,
        lambda x: x.t().contiguous(),
        lambda shape: 2 * num_bytes(Layout.BF16, shape),
        note="no rounding",
    )
