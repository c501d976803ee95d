"""What each op must return, from the NumPy simulator; the layouts of NUMERICS section 8 are built here once more.

Nothing of mxsim.kernels is used. A layout is a rearrangement with padding, so the same function that lays out codes
also lays out the index of the input element behind each: that is how a wrong result finds its input again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from mxsim.blocks import (
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    BlockFormat,
    BlockTensor,
    ScaleRule,
    dequantize,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    quantize,
)
from mxsim.formats import E2M1, Rounding, philox_bits, unpack
from mxsim.validate.cases import Inputs

_FP4_BLOCK, _FP8_BLOCK = 32, 128
_DEFAULT_ROW_MULTIPLE = 4
PADDING = -1
_ONE_BITS = 0x3F800000  # 1.0, the scale of padding rows


class LeafKind(Enum):
    """What the bits of one result are."""

    FP4_CODES = "FP4 codes"  # two a byte
    FP8_CODES = "FP8 codes"
    E8M0_SCALES = "E8M0 scales"
    FP32_SCALES = "FP32 scales"
    BF16_VALUES = "BF16 values"
    SIZES = "group sizes"


class Layout(Enum):
    """Strides of a result, by its shape."""

    CONTIGUOUS = "contiguous"
    ROWS_4 = "(1, ceil4(rows))"  # scales of FP8 rows
    COLUMNS_4 = "rows ceil4(columns) apart"  # scales of tiles

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """In elements."""
        if self is Layout.ROWS_4:
            return 1, _round_up(shape[0], 4)
        row = _round_up(shape[-1], 4) if self is Layout.COLUMNS_4 else shape[-1] if shape else 1
        lengths = [1, row, *reversed(shape[1:-1])][: len(shape)]
        return tuple(int(n) for n in np.cumprod(lengths)[::-1])


@dataclass(frozen=True)
class Blocks:
    """Which input elements share a scale: columns in groups of `columns`, and rows with the same `first_row`."""

    first_row: np.ndarray
    columns: int
    num_columns: int

    def first_of(self, source: np.ndarray) -> np.ndarray:
        """Index of the first element of the block that holds each element; padding stays padding."""
        row, column = np.divmod(np.maximum(source, 0), self.num_columns)
        first = self.first_row[row] * self.num_columns + column // self.columns * self.columns
        return np.where(source < 0, PADDING, first)


@dataclass(frozen=True)
class Leaf:
    """One tensor that an op must return.

    bits: unsigned integers (group sizes int64), in the result's logical shape.
    layout: how the result lies in memory.
    source: makes the index (row * K + column) of the input element behind each entry; of an FP4 byte the low one's, of
        a scale the first of its block; PADDING where none is.
    scales: name of the leaf that holds the scales of these codes.
    step: the sections of NUMERICS that rule the entries.
    repeat_axis: the axis along which results of repeated inputs follow each other.
    """

    name: str
    kind: LeafKind
    bits: np.ndarray
    step: str
    source: Callable[[], np.ndarray] | None = None
    blocks: Blocks | None = None
    scales: str | None = None
    layout: Layout = Layout.CONTIGUOUS
    repeat_axis: int = 0

    @property
    def num_elements(self) -> int:
        """Codes, scales or values that are compared; a byte of FP4 holds two."""
        return int(self.bits.size) * (2 if self.kind is LeafKind.FP4_CODES else 1)


def expected(op: str, inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    """The leaves, in the order of the op's results.

    Scales of FP8 rows that are no powers of two act as NaN, and group sizes that do not fit are clamped, as on a CUDA
    device.
    """
    return _EXPECTED[op](inputs, dict(options))


# -------------------------------------------------------------------------------------------------------------- ops
def _bf16_to_fp4_row(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    return _fp4_rows(_quantized(inputs["x"], MXFP4, options), "3")


def _fp8_row_to_fp4_row(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    return _fp4_rows(fp8_row_to_fp4_row(_fp8_source(inputs), scale_rule=options.get("scale_rule")), "6")


def _fp4_row_to_fp8_row(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    t = fp4_row_to_fp8_row(_fp4_source(inputs), headroom=options.get("headroom", 6))
    return _fp8_rows(t, "4", options)


def _fp4_row_to_fp8_col(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    source = _fp4_source(inputs)
    sizes, rows = _sizes(options, source.shape[0])
    source = BlockTensor(source.codes[:rows], source.scales[:rows], MXFP4)
    chunks = fp4_row_to_fp8_col(source, headroom=options.get("headroom", 6), group_sizes=sizes)
    return _fp8_cols([(c.codes, c.scales) for c in chunks], sizes, source.shape[1], "5.1", options)


def _fp8_row_to_fp8_col(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    source = _fp8_source(inputs)
    sizes, rows = _sizes(options, source.shape[0])
    source = BlockTensor(source.codes[:rows], source.scales[:rows], FP8_1X128)
    chunks = fp8_row_to_fp8_col(source, group_sizes=sizes)
    return _fp8_cols([(c.codes, c.scales) for c in chunks], sizes, source.shape[1], "5.4", options)


def _fp8_row_to_ragged(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    return _fp8_rows(BlockTensor(inputs["codes"], inputs["scales"], FP8_1X128), "8", options)


def _bf16_to_fp8_row(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    return _fp8_rows(_quantized(inputs["x"], FP8_1X128, options), "7", options)


def _bf16_to_fp8_col(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    x = as_values(inputs["x"])
    sizes, _ = _sizes(options, x.shape[0])
    chunks = []
    for start, size in zip(_starts(sizes), sizes, strict=True):
        t = quantize(x[start : start + size], FP8_128X1)
        padded = np.zeros((x.shape[1], _round_up(size, _FP8_BLOCK)), np.uint8)
        padded[:, :size] = t.codes.T
        chunks.append((padded, t.scales.T))
    return _fp8_cols(chunks, sizes, x.shape[1], "7", options)


def _bf16_to_fp8_tile(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    w = inputs["w"]
    transpose = options.get("transpose", False)
    *batch, n, k = w.shape
    t = quantize(as_values(w), FP8_128X128)
    index = np.arange(w.size).reshape(w.shape)
    first_row = (np.arange(n) // _FP8_BLOCK * _FP8_BLOCK)[None, :] + np.arange(int(np.prod(batch)))[:, None] * n
    blocks = Blocks(first_row.reshape(-1), _FP8_BLOCK, k)

    def arranged(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.swapaxes(-1, -2)) if transpose else array

    return [
        Leaf("codes", LeafKind.FP8_CODES, arranged(t.codes), "7", lambda: arranged(index), blocks, "scales"),
        Leaf(
            "scales",
            LeafKind.FP32_SCALES,
            _bits(arranged(t.scales)),
            "7",
            lambda: arranged(index[..., ::_FP8_BLOCK, ::_FP8_BLOCK]),
            blocks,
            layout=Layout.COLUMNS_4,
        ),
    ]


def _bf16_to_fp4_and_fp8_row(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    fp4 = _quantized(inputs["x"], MXFP4, options)
    fp8 = fp4_row_to_fp8_row(fp4, headroom=options.get("headroom", 6))
    leaves = [("fp4", leaf) for leaf in _fp4_rows(fp4, "3")] + [("fp8", leaf) for leaf in _fp8_rows(fp8, "4", options)]
    return [
        replace(leaf, name=f"{part}.{leaf.name}", scales=f"{part}.{leaf.scales}" if leaf.scales else None)
        for part, leaf in leaves
    ]


def _fp4_to_bf16(inputs: Inputs, options: dict[str, Any]) -> list[Leaf]:
    import ml_dtypes

    source = _fp4_source(inputs)
    values = dequantize(source, ml_dtypes.bfloat16)
    index = np.arange(source.codes.size).reshape(source.shape)
    blocks = Blocks(np.arange(source.shape[0]), _FP4_BLOCK, source.shape[1])
    return [Leaf("values", LeafKind.BF16_VALUES, values.view(np.uint16), "3.9", lambda: index, blocks)]


_EXPECTED: dict[str, Callable[[Inputs, dict[str, Any]], list[Leaf]]] = {
    "bf16_to_fp4_row": _bf16_to_fp4_row,
    "bf16_to_fp4_and_fp8_row": _bf16_to_fp4_and_fp8_row,
    "bf16_to_fp8_row": _bf16_to_fp8_row,
    "bf16_to_fp8_col": _bf16_to_fp8_col,
    "bf16_to_fp8_tile": _bf16_to_fp8_tile,
    "fp4_row_to_fp8_row": _fp4_row_to_fp8_row,
    "fp4_row_to_fp8_col": _fp4_row_to_fp8_col,
    "fp4_to_bf16": _fp4_to_bf16,
    "fp8_row_to_fp4_row": _fp8_row_to_fp4_row,
    "fp8_row_to_fp8_col": _fp8_row_to_fp8_col,
    "fp8_row_to_ragged": _fp8_row_to_ragged,
}
OPS = tuple(_EXPECTED)
SCALE_RULES = tuple(ScaleRule)


# ----------------------------------------------------------------------------------------------------------- inputs
def as_values(x: np.ndarray) -> np.ndarray:
    """The numbers: uint16 holds bfloat16 bits."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def _quantized(x: np.ndarray, fmt: BlockFormat, options: dict[str, Any]) -> BlockTensor:
    rounding = options.get("rounding", Rounding.TIES_TO_EVEN)
    draws = philox_bits(options["seed"], x.shape) if rounding is Rounding.STOCHASTIC else None
    rule = options.get("scale_rule")
    return quantize(as_values(x), fmt, scale_rule=rule, rounding=rounding, random_bits=draws)


def is_power_of_two(scales: np.ndarray) -> np.ndarray:
    """Which float32 are positive powers of two, subnormals included."""
    fraction, _ = np.frexp(scales)
    return fraction == 0.5


def _fp4_source(inputs: Inputs) -> BlockTensor:
    codes = inputs["codes"]
    return BlockTensor(unpack(codes, E2M1, 2 * codes.shape[-1]), inputs["scales"], MXFP4)


def _fp8_source(inputs: Inputs) -> BlockTensor:
    scales = inputs["scales"]
    usable = np.where(is_power_of_two(scales), scales, np.float32(np.nan))
    return BlockTensor(inputs["codes"], usable, FP8_1X128)


def _sizes(options: dict[str, Any], num_rows: int) -> tuple[list[int], int]:
    """(rows of each group, clamped in order to the rows that are left; their sum)."""
    sizes, left = [], num_rows
    for size in options.get("group_sizes", [num_rows]):
        sizes.append(min(max(size, 0), left))
        left -= sizes[-1]
    return sizes, num_rows - left


# ---------------------------------------------------------------------------------------------------------- layouts
def _fp4_rows(t: BlockTensor, step: str) -> list[Leaf]:
    """codes [R, K/2] with element 2j in the low nibble, scales [R, K/32]."""
    rows, columns = t.shape
    index = np.arange(rows * columns).reshape(rows, columns)
    blocks = Blocks(np.arange(rows), _FP4_BLOCK, columns)
    return [
        Leaf("codes", LeafKind.FP4_CODES, t.packed(), step, lambda: index[:, ::2], blocks, "scales"),
        Leaf("scales", LeafKind.E8M0_SCALES, t.scales, step, lambda: index[:, ::_FP4_BLOCK], blocks),
    ]


def _fp8_rows(t: BlockTensor, step: str, options: dict[str, Any]) -> list[Leaf]:
    """Dense: scales [R, K/128] of strides (1, ceil4(R)). Ragged: each group padded, its scales a chunk of their own."""
    rows, columns = t.shape
    index = np.arange(rows * columns).reshape(rows, columns)
    blocks = Blocks(np.arange(rows), _FP8_BLOCK, columns)
    if "group_sizes" not in options:
        return [
            Leaf("codes", LeafKind.FP8_CODES, t.codes, step, lambda: index, blocks, "scales"),
            Leaf(
                "scales",
                LeafKind.FP32_SCALES,
                _bits(t.scales),
                step,
                lambda: index[:, ::_FP8_BLOCK],
                blocks,
                layout=Layout.ROWS_4,
            ),
        ]
    sizes, _ = _sizes(options, rows)
    multiple = options.get("row_multiple", _DEFAULT_ROW_MULTIPLE)

    def chunks(array: np.ndarray, fill: Any) -> list[np.ndarray]:
        padded = [np.full((_round_up(n, multiple), array.shape[1]), fill, array.dtype) for n in sizes]
        for chunk, start, size in zip(padded, _starts(sizes), sizes, strict=True):
            chunk[:size] = array[start : start + size]
        return padded

    def rows_of(array: np.ndarray, fill: Any) -> np.ndarray:
        return np.concatenate([array[:0], *chunks(array, fill)])

    def flat_of(array: np.ndarray, fill: Any) -> np.ndarray:
        return np.concatenate([array[:0].reshape(-1), *(c.T.reshape(-1) for c in chunks(array, fill))])

    return [
        Leaf("codes", LeafKind.FP8_CODES, rows_of(t.codes, 0), step, lambda: rows_of(index, PADDING), blocks, "scales"),
        Leaf(
            "scales",
            LeafKind.FP32_SCALES,
            flat_of(_bits(t.scales), _ONE_BITS),
            step,
            lambda: flat_of(index[:, ::_FP8_BLOCK], PADDING),
            blocks,
        ),
        _padded_sizes(sizes, multiple),
    ]


def _fp8_cols(
    chunks: Sequence[tuple[np.ndarray, np.ndarray]], sizes: list[int], columns: int, step: str, options: dict[str, Any]
) -> list[Leaf]:
    """From (codes [K, ceil128(m)], scales [K, ceil(m/128)]) of each group; scales are returned as [ceil(m/128), K]."""
    starts = _starts(sizes)
    rows = [start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]
    blocks = Blocks(_joined(r - (r - s) % _FP8_BLOCK for r, s in zip(rows, starts, strict=True)), 1, columns)
    is_ragged = "group_sizes" in options

    def source_of(start: int, size: int) -> np.ndarray:
        padded = np.full((columns, _round_up(size, _FP8_BLOCK)), PADDING)
        padded[:, :size] = (start + np.arange(size))[None, :] * columns + np.arange(columns)[:, None]
        return padded

    def code_source() -> np.ndarray:
        sources = [source_of(s, n) for s, n in zip(starts, sizes, strict=True)]
        return _joined(s.reshape(-1) for s in sources) if is_ragged else sources[0]

    def scale_source() -> np.ndarray:
        firsts = _joined(s + np.arange(0, n, _FP8_BLOCK) for s, n in zip(starts, sizes, strict=True))
        return firsts[:, None] * columns + np.arange(columns)

    codes = np.concatenate([np.zeros(0, np.uint8), *(c.reshape(-1) for c, _ in chunks)]) if is_ragged else chunks[0][0]
    scales = np.concatenate([np.zeros((0, columns), np.float32), *(s.T for _, s in chunks)])
    leaves = [
        Leaf("codes", LeafKind.FP8_CODES, codes, step, code_source, blocks, "scales", repeat_axis=int(not is_ragged)),
        Leaf("scales", LeafKind.FP32_SCALES, _bits(scales), step, scale_source, blocks),
    ]
    return [*leaves, _padded_sizes(sizes, _FP8_BLOCK)] if is_ragged else leaves


def _padded_sizes(sizes: list[int], multiple: int) -> Leaf:
    return Leaf("padded_group_sizes", LeafKind.SIZES, np.array([_round_up(n, multiple) for n in sizes], np.int64), "8")


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [int(s) for s in np.cumsum([0, *sizes])[:-1]]


def _bits(scales: Any) -> Any:
    return np.ascontiguousarray(scales).view(np.uint32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
