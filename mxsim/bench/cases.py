"""What is timed: every op of `mxsim.kernels` at a shape, and the bytes that it must move."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.formats import Rounding
from mxsim.kernels.layouts import DEFAULT_ROW_MULTIPLE, FP4_BLOCK, FP8_BLOCK, ceil_div, round_up


@dataclass(frozen=True)
class Shape:
    """A matrix of rows x columns; with num_experts its rows are split among so many, unevenly."""

    rows: int
    columns: int
    num_experts: int = 0

    def __str__(self) -> str:
        experts = f"/{self.num_experts}" if self.num_experts else ""
        return f"{self.rows}x{self.columns}{experts}"

    @property
    def num_elements(self) -> int:
        """rows * columns."""
        return self.rows * self.columns

    @property
    def group_sizes(self) -> list[int] | None:
        """Rows of each expert, in mixed order; the largest has up to 15 times those of the smallest.

        >>> Shape(1000, 128, 4).group_sizes
        [498, 271, 148, 83]
        """
        if not self.num_experts:
            return None
        weights = [2.0 ** (-(7 * e % 32) / 8) for e in range(self.num_experts)]
        sizes = [int(self.rows * w / sum(weights)) for w in weights]
        sizes[-1] += self.rows - sum(sizes)
        return sizes

    def first(self, rows: int) -> "Shape":
        """The same with at most so many rows."""
        return Shape(min(rows, self.rows), self.columns, self.num_experts)


def parse_shape(text: str) -> Shape:
    """RxK, or RxK/E with E experts.

    Raises:
        ValueError: for another text, or a K that is no multiple of 128.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:/([1-9]\d*))?", text.strip().lower())
    if match is None:
        raise ValueError(f"bench: shape is {text!r}, needed ROWSxCOLUMNS or ROWSxCOLUMNS/EXPERTS, such as 4096x7168/32")
    rows, columns, experts = (int(digits or 0) for digits in match.groups())
    if columns % FP8_BLOCK:
        raise ValueError(f"bench: shape is {text!r}, needed columns that are a multiple of {FP8_BLOCK}")
    return Shape(rows, columns, experts)


DEFAULT_SHAPES = (Shape(32768, 7168), Shape(24576, 2048), Shape(4096, 7168), Shape(32768, 7168, 32))
QUICK_SHAPES = (Shape(4096, 7168), Shape(4096, 7168, 32))


# ------------------------------------------------------------------------------------------------------------- layouts
class Layout(Enum):
    """How a matrix lies in memory (NUMERICS section 8)."""

    BF16 = "bfloat16"
    FP4_ROWS = "MXFP4 rows"
    FP8_ROWS = "FP8 rows"
    FP8_COLS = "FP8 columns"
    FP8_TILES = "FP8 tiles"


def num_bytes(layout: Layout, shape: Shape) -> int:
    """Bytes of a matrix with its scales. With experts the FP8 rows and columns are ragged, padding included."""
    rows, columns = shape.rows, shape.columns
    if layout is Layout.BF16:
        return 2 * rows * columns
    if layout is Layout.FP4_ROWS:
        return rows * (columns // 2 + columns // FP4_BLOCK)
    if layout is Layout.FP8_TILES:
        return rows * columns + 4 * ceil_div(rows, FP8_BLOCK) * ceil_div(columns, FP8_BLOCK)
    sizes = shape.group_sizes or [rows]
    if layout is Layout.FP8_ROWS:
        padded = sum(round_up(n, DEFAULT_ROW_MULTIPLE) for n in sizes) if shape.num_experts else rows
        return padded * (columns + 4 * columns // FP8_BLOCK)
    blocks = sum(ceil_div(n, FP8_BLOCK) for n in sizes)
    return blocks * columns * (FP8_BLOCK + 4)


class Data:
    """One random matrix in the forms that ops read, each made when it is first asked for.

    N(0, 1) times a power of two from 1/8 to 8 for each 32 columns of a row, so that neighbouring scales differ.
    """

    def __init__(self, x: Tensor) -> None:
        self._forms: dict[Layout, tuple[Tensor, ...]] = {Layout.BF16: (x,)}
        self._on_cpu: dict[Layout, tuple[Tensor, ...]] = {}

    @classmethod
    def random(cls, shape: Shape, device: torch.device, seed: int = 0) -> "Data":
        """The same numbers at every call on a device."""
        generator = torch.Generator(device).manual_seed(seed)
        blocks = (shape.rows, shape.columns // FP4_BLOCK)
        x = torch.randn(*blocks, FP4_BLOCK, dtype=torch.bfloat16, device=device, generator=generator)
        exponents = torch.randint(-3, 4, (*blocks, 1), device=device, generator=generator)
        x *= torch.exp2(exponents.to(torch.float32)).to(torch.bfloat16)
        return cls(x.view(shape.rows, shape.columns))

    def of(self, layout: Layout) -> tuple[Tensor, ...]:
        """The tensors that an op reading this layout takes."""
        if layout not in self._forms:
            (x,) = self._forms[Layout.BF16]
            make = {Layout.FP4_ROWS: kernels.bf16_to_fp4_row, Layout.FP8_ROWS: kernels.bf16_to_fp8_row}[layout]
            self._forms[layout] = tuple(make(x)[:2])
        return self._forms[layout]

    def on_cpu(self, layout: Layout) -> tuple[Tensor, ...]:
        """The same tensors on the CPU."""
        if layout not in self._on_cpu:
            self._on_cpu[layout] = tuple(t.cpu() for t in self.of(layout))
        return self._on_cpu[layout]

    def first(self, rows: int) -> "Data":
        """The first rows alone."""
        part = Data(self._forms[Layout.BF16][0][:rows])
        part._forms = {layout: tuple(t[:rows] for t in form) for layout, form in self._forms.items()}
        return part


# ----------------------------------------------------------------------------------------------------------------- ops
class Groups(Enum):
    """Whether an op takes group sizes."""

    NEVER = 0
    OPTIONAL = 1
    ALWAYS = 2


@dataclass(frozen=True)
class Op:
    """An op's input, its results, and its variants beside the plain call."""

    reads: Layout
    writes: tuple[Layout, ...]
    groups: Groups = Groups.NEVER
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


OPS: dict[str, Op] = {
    "bf16_to_fp4_row": Op(
        Layout.BF16, (Layout.FP4_ROWS,), variants={"stochastic": {"rounding": Rounding.STOCHASTIC, "seed": 1}}
    ),
    "bf16_to_fp8_row": Op(Layout.BF16, (Layout.FP8_ROWS,), Groups.OPTIONAL),
    "bf16_to_fp4_and_fp8_row": Op(Layout.BF16, (Layout.FP4_ROWS, Layout.FP8_ROWS), Groups.OPTIONAL),
    "bf16_to_fp8_col": Op(Layout.BF16, (Layout.FP8_COLS,), Groups.OPTIONAL),
    "bf16_to_fp8_tile": Op(Layout.BF16, (Layout.FP8_TILES,), variants={"transposed": {"transpose": True}}),
    "fp4_row_to_fp8_row": Op(Layout.FP4_ROWS, (Layout.FP8_ROWS,), Groups.OPTIONAL),
    "fp4_row_to_fp8_col": Op(Layout.FP4_ROWS, (Layout.FP8_COLS,), Groups.OPTIONAL),
    "fp4_to_bf16": Op(Layout.FP4_ROWS, (Layout.BF16,)),
    "fp8_row_to_fp4_row": Op(Layout.FP8_ROWS, (Layout.FP4_ROWS,)),
    "fp8_row_to_fp8_col": Op(Layout.FP8_ROWS, (Layout.FP8_COLS,), Groups.OPTIONAL),
    "fp8_row_to_ragged": Op(Layout.FP8_ROWS, (Layout.FP8_ROWS,), Groups.ALWAYS),
}


@dataclass(frozen=True)
class Case:
    """One op at one shape. With experts their sizes lie on the device of the inputs, as they do in training."""

    op: str
    shape: Shape
    variant: str = ""

    @property
    def name(self) -> str:
        """The op, and what is special about the call."""
        return f"{self.op} {self.variant}".rstrip()

    @property
    def num_bytes(self) -> int:
        """Each input read once, each result written once, padding included."""
        op, shape = OPS[self.op], self.shape
        dense = Shape(shape.rows, shape.columns)
        sizes = 16 * shape.num_experts  # int64, the given and the padded ones
        return num_bytes(op.reads, dense) + sum(num_bytes(layout, shape) for layout in op.writes) + sizes

    def inputs(self, data: Data) -> tuple[Tensor, ...]:
        """The tensors that the op takes."""
        return data.of(OPS[self.op].reads)

    def inputs_on_cpu(self, data: Data) -> tuple[Tensor, ...]:
        """The same on the CPU."""
        return data.on_cpu(OPS[self.op].reads)

    def options(self, device: torch.device) -> dict[str, Any]:
        """The keywords that the op takes."""
        variant = dict(OPS[self.op].variants.get(self.variant, {}))
        if self.shape.num_experts:
            variant["group_sizes"] = torch.tensor(self.shape.group_sizes, dtype=torch.int64, device=device)
        return variant

    def call(self, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The op's results, one after another."""
        return flat(getattr(kernels, self.op)(*inputs, **options))


def cases_at(shape: Shape, ops: Iterable[str]) -> list[Case]:
    """The cases of these ops at a shape: with experts those of ops that take group sizes."""
    unwanted = Groups.NEVER if shape.num_experts else Groups.ALWAYS
    return [
        Case(name, shape, variant)
        for name in ops
        if OPS[name].groups is not unwanted
        for variant in ("", *OPS[name].variants)
    ]


def flat(results: Any) -> tuple[Tensor, ...]:
    """The tensors in nested tuples, in order; None is none."""
    if isinstance(results, Tensor):
        return (results,)
    return tuple(tensor for part in results if part is not None for tensor in flat(part))
