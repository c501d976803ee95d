"""How far a quantized tensor is from its source: as a whole, by binade, by position, by index and by block.

Every number is an integer count, a maximum, or an exact sum of the elements' terms, rounded once: however the tensor
is cut into pieces, the tables have the same bits. Memory depends on the pieces, not on the tensor.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from mxsim.analysis.element_error import element_errors
from mxsim.analysis.error_groups import TERMS, Groups, Terms
from mxsim.analysis.frames import frame
from mxsim.analysis.study import CHUNK, Slices, slices_of_pieces
from mxsim.analysis.tensor_files import floating_point_problem
from mxsim.blocks import BlockFormat, BlockTensor, ScaleRule, quantize
from mxsim.blocks.layout import as_matrices, block_of, normalize_axis, split_blocks
from mxsim.formats.inputs import as_float, as_numpy

_MAX_EXPONENT = 500  # squares and quotients of such magnitudes are ordinary float64 numbers
_NUM_BINADES = 2 * _MAX_EXPONENT + 1


def measure(
    x: Any,
    t: BlockTensor | BlockFormat,
    *,
    axis: int | None = None,
    scale_rule: ScaleRule | None = None,
    index_axis: int | None = None,
    chunk: int = CHUNK,
) -> "ErrorReport":
    """The error of t against x; t is x quantized, or the format to quantize it to, piece by piece.

    x may be a memory-mapped array (`np.load(path, mmap_mode="r")`): `chunk` elements are in memory at a time, and no
    result depends on it. A view of three or more axes that is not contiguous is copied as a whole first.

    Args:
        x: a floating-point array or torch CPU tensor of at least one axis. Non-zero magnitudes of 2**-500 to 2**500.
        axis, scale_rule: as in `quantize`, if t is a format.
        index_axis: the axis along which `ErrorReport.by_index` tells elements apart; None: none.

    Raises:
        TypeError: if x is not a floating-point array, or t neither a BlockTensor nor a BlockFormat.
        ValueError: if x is empty, has no finite block or no non-zero element, or a magnitude outside the range above;
            if t has another shape; if axis, scale_rule or index_axis does not fit; for a format with a scale for the
            whole tensor (NVFP4), which needs the quantized tensor.

    >>> from mxsim.blocks import MXFP4
    >>> report = measure(np.array([7.0, 0.2, 0.3, 0.0, 2.0]), MXFP4)  # becomes 6, 0, 0.5, 0, 2
    >>> report.num_elements, report.saturated, report.underflowed, report.subnormal
    (5, 0.2, 0.2, 0.2)
    >>> round(report.sqnr_db, 2), round(report.max_ulp_error, 9)  # 7 lies in a binade whose spacing is 2
    (16.92, 0.5)
    """
    source = _Source.checked(x, t, axis, scale_rule, chunk)
    index_axis = None if index_axis is None else _checked_index_axis(index_axis, source.shape)
    overall = Groups(1, (*TERMS, "result", "product"))
    binades = Groups(_NUM_BINADES, TERMS)
    positions = Groups(source.fmt.block_size, TERMS)
    indices = None if index_axis is None else Groups(source.shape[index_axis], TERMS)
    num_left_out = 0
    for piece, values, quantized in source.pieces():
        errors = element_errors(values, quantized)
        chosen = errors.compared
        num_left_out += chosen.size - int(np.count_nonzero(chosen))
        terms = Terms.of(errors)
        overall.add(np.zeros(len(terms), np.intp), terms)
        nonzero = terms.magnitude != 0
        binades.add(np.frexp(terms.magnitude[nonzero])[1] - 1 + _MAX_EXPONENT, terms.take(nonzero))
        positions.add(source.positions(values.shape)[chosen], terms)
        if indices is not None and index_axis is not None:
            indices.add(source.indices(piece, values.shape, index_axis)[chosen], terms)
    if not overall.num_elements[0]:
        raise ValueError("measure: x has a NaN or an infinity in every block, so no element can be compared")
    if not overall.num_nonzero[0]:
        raise ValueError("measure: x holds only zeros, needed a non-zero element: no error is relative to nothing")
    return ErrorReport(overall, binades, positions, indices, num_left_out, source)


class ErrorReport:
    """What `measure` found. The tables are pandas DataFrames; shares are of the elements compared.

    - `sqnr_db` = 10 log10(sum x**2 / sum (q - x)**2): infinite without error.
    - `mse` = sum (q - x)**2 / n; `relative_frobenius_error` = sqrt(sum (q - x)**2 / sum x**2).
    - `cosine_similarity` = sum x q / sqrt(sum x**2 * sum q**2); 0 if all became zero.
    - `mean_relative_error`, `max_relative_error`: over x != 0; the ulp errors over all: see `ElementErrors`.
    - `saturated`, `underflowed`, `subnormal`: shares as in `ErrorSums`; subnormal is NaN for INT8 (fixed point).
    - `num_left_out` elements lie in a block with a NaN or an infinity, and are in no other number.

    In a table a group without a non-zero x has NaN for what is relative to x.
    """

    def __init__(
        self,
        overall: "Groups",
        binades: "Groups",
        positions: "Groups",
        indices: "Groups | None",
        num_left_out: int,
        source: "_Source",
    ) -> None:
        self._overall, self._binades, self._positions, self._indices = overall, binades, positions, indices
        self._source = source
        self.num_left_out = num_left_out
        record = next(overall.records())[1]
        self.num_elements: int = record["num_elements"]
        self.sqnr_db: float = record["sqnr_db"]
        self.mse: float = record["mse"]
        self.mean_relative_error: float = record["mean_relative_error"]
        self.max_relative_error: float = record["max_relative_error"]
        self.mean_ulp_error: float = record["mean_ulp_error"]
        self.max_ulp_error: float = record["max_ulp_error"]
        self.saturated: float = record["saturated"]
        self.underflowed: float = record["underflowed"]
        self.subnormal: float = record["subnormal"]
        signal, noise, result, product = (
            float(overall.sums[name].floats()[0]) for name in ("signal", "noise", "result", "product")
        )
        self.relative_frobenius_error = math.sqrt(noise) / math.sqrt(signal)
        self.cosine_similarity = product / (math.sqrt(signal) * math.sqrt(result)) if result else 0.0

    def summary(self) -> Any:
        """One row: every property above."""
        names = [name for name in vars(self) if not name.startswith("_")]
        return frame([{name: getattr(self, name) for name in sorted(names, key=_SUMMARY_ORDER.index)}])

    def by_binade(self) -> Any:
        """A row for each binade that holds a magnitude: 2**binade <= |x| < 2**(binade + 1). Zeros have none."""
        return frame([{"binade": group - _MAX_EXPONENT, **record} for group, record in self._binades.records()])

    def by_position(self) -> Any:
        """A row for each position in the block, 0 to 31 in MXFP4; in a tile, row * 128 + column."""
        return frame([{"position": group, **record} for group, record in self._positions.records()])

    def by_index(self) -> Any:
        """A row for each index along `index_axis`.

        Raises:
            ValueError: if `measure` was given no index_axis.
        """
        if self._indices is None:
            raise ValueError("by_index: measure was called without index_axis")
        return frame([{"index": group, **record} for group, record in self._indices.records()])

    def by_block(self) -> Any:
        """A row for each block, in the order of the scales: reads x once more, and is as large as there are blocks.

        A block with a NaN or an infinity has num_elements 0 and NaN for the rest.
        """
        return frame(_block_columns(self._source))


_SUMMARY_ORDER = (
    *("num_elements", "num_left_out", "sqnr_db", "mse", "relative_frobenius_error", "cosine_similarity"),
    *("mean_relative_error", "max_relative_error", "mean_ulp_error", "max_ulp_error"),
    *("saturated", "underflowed", "subnormal"),
)


# ------------------------------------------------------------------------------------------------------------ sources
@dataclass(frozen=True)
class _Source:
    """x as (stack, rows, columns), cut into pieces of whole blocks, each with its quantized form."""

    matrices: np.ndarray
    shape: tuple[int, ...]
    fmt: BlockFormat
    axis: int
    t: BlockTensor | None
    scale_rule: ScaleRule | None
    chunk: int

    @classmethod
    def checked(cls, x: Any, t: Any, axis: int | None, scale_rule: ScaleRule | None, chunk: int) -> "_Source":
        array = as_numpy(x, caller="measure", name="x")
        problem = floating_point_problem(array.dtype)
        if problem is not None:
            raise TypeError(f"measure: x has dtype {array.dtype}, {problem}; needed a floating-point array")
        if array.size == 0:
            raise ValueError(f"measure: x has the shape {array.shape}, needed at least one element")
        if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
            raise ValueError(f"measure: chunk is {chunk!r}, needed a positive integer")
        if isinstance(t, BlockTensor):
            if t.shape != array.shape:
                raise ValueError(f"measure: t has the shape {t.shape}, needed {array.shape}, that of x")
            if axis is not None or scale_rule is not None:
                name = "axis" if axis is not None else "scale_rule"
                raise ValueError(f"measure: {name} is given, but t is quantized already")
            fmt, block_axis, quantized = t.format, t.axis, t
        elif isinstance(t, BlockFormat):
            if t.tensor_scaled:
                raise ValueError(f"measure: t is {t}, whose scale needs the whole tensor: give quantize(x, {t})")
            fmt, block_axis, quantized = t, normalize_axis(axis, array.ndim, t, "measure"), None
            quantize(np.zeros(1 if array.ndim == 1 else (1, 1), np.float32), fmt, scale_rule=scale_rule)  # checks it
        else:
            raise TypeError(f"measure: t is a {type(t).__name__}, needed a BlockTensor or a BlockFormat")
        matrices = as_matrices(array, fmt, block_axis)
        return cls(matrices, array.shape, fmt, block_axis, quantized, scale_rule, int(chunk))

    @property
    def block(self) -> tuple[int, int]:
        return block_of(self.fmt, self.axis)

    def pieces(self) -> Iterator[tuple[Slices, np.ndarray, BlockTensor]]:
        """(where, x as float64, x quantized), both of three axes."""
        piece_axis = -1 if self.axis == -1 else -2
        for piece in slices_of_pieces(self.matrices.shape, [self.block], self.chunk):
            with np.errstate(invalid="ignore"):  # signalling NaNs
                given = np.ascontiguousarray(as_float(self.matrices[piece], caller="measure", name="x"))
                values = given.astype(np.float64)
            _check_range(values)
            if self.t is None:
                yield piece, values, quantize(given, self.fmt, axis=piece_axis, scale_rule=self.scale_rule)
                continue
            codes, scales = (as_matrices(a, self.fmt, self.axis) for a in (self.t.codes, self.t.scales))
            part = BlockTensor(
                codes[piece], scales[self.blocks_of(piece)], self.fmt, piece_axis, tensor_scale=self.t.tensor_scale
            )
            yield piece, values, part

    def blocks_of(self, piece: Slices) -> Slices:
        """The blocks of a piece, which begins and ends where blocks do."""
        stack, rows, columns = piece
        block_rows, block_columns = self.block
        return (
            stack,
            slice(rows.start // block_rows, -(-rows.stop // block_rows)),
            slice(columns.start // block_columns, -(-columns.stop // block_columns)),
        )

    def positions(self, shape: Sequence[int]) -> Int[np.ndarray, "stack rows columns"]:
        """Position in its block, row-major, of each element of a piece."""
        block_rows, block_columns = self.block
        rows, columns = np.arange(shape[1]) % block_rows, np.arange(shape[2]) % block_columns
        return np.broadcast_to(rows[:, None] * block_columns + columns, shape)

    def indices(self, piece: Slices, shape: Sequence[int], axis: int) -> Int[np.ndarray, "stack rows columns"]:
        """Index along an axis of the tensor: the matrices are a reshape, so that flat indices are the tensor's."""
        _, rows, columns = self.matrices.shape
        i, r, c = (s.start + np.arange(n) for s, n in zip(piece, shape, strict=True))
        flat = (i[:, None, None] * rows + r[:, None]) * columns + c
        along: np.ndarray = flat // math.prod(self.shape[axis + 1 :]) % self.shape[axis]
        return along


def _check_range(values: np.ndarray) -> None:
    magnitude = np.abs(values[np.isfinite(values) & (values != 0)])
    bad = magnitude[(magnitude < 2.0**-_MAX_EXPONENT) | (magnitude >= 2.0**_MAX_EXPONENT)]
    if bad.size:
        raise ValueError(
            f"measure: x holds the magnitude {bad[0]}, needed 0 or 2**-{_MAX_EXPONENT} to 2**{_MAX_EXPONENT}"
        )


def _checked_index_axis(axis: Any, shape: tuple[int, ...]) -> int:
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)) or not -len(shape) <= axis < len(shape):
        needed = f"an integer {-len(shape)} to {len(shape) - 1} for x of shape {shape}"
        raise ValueError(f"measure: index_axis is {axis!r}, needed {needed}")
    return int(axis) % len(shape)


# ------------------------------------------------------------------------------------------------------------- blocks
def _block_columns(source: _Source) -> dict[str, np.ndarray]:
    """A column of the table for each number, over all blocks in the order of the scales."""
    _, rows, columns = source.matrices.shape
    block_rows, block_columns = source.block
    shape = (source.matrices.shape[0], -(-rows // block_rows), -(-columns // block_columns))
    names = ("scale", "amax", "mse", "sqnr_db", "mean_relative_error", "max_relative_error", "max_ulp_error")
    table: dict[str, np.ndarray] = {"num_elements": np.zeros(shape, np.int64)}
    table |= {name: np.full(shape, np.nan) for name in (*names, "saturated", "underflowed", "subnormal")}
    for piece, values, t in source.pieces():
        errors = element_errors(values, t)
        where = source.blocks_of(piece)
        scales = t.scale_values() if t.tensor_scale is None else t.scale_values() * float(t.tensor_scale)
        by_block = {
            name: _block_rows(array, source.block) for name, array in errors._asdict().items() if array is not None
        }
        count = by_block["compared"].sum(axis=-1)
        num_nonzero = (by_block["x"] != 0).sum(axis=-1)
        # A row is contiguous and whole: NumPy adds it in one order, wherever the piece was cut.
        signal, noise = (np.square(by_block[name]).sum(axis=-1) for name in ("x", "error"))
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0: a block without elements, or without any but 0
            found = {
                "scale": scales.reshape(-1),
                "amax": np.where(count == 0, np.nan, np.abs(by_block["x"]).max(axis=-1)),
                "mse": noise / count,
                "sqnr_db": np.where(signal == 0, np.nan, 10 * (np.log10(signal) - np.log10(noise))),
                "mean_relative_error": by_block["relative"].sum(axis=-1) / num_nonzero,
                "max_relative_error": np.where(num_nonzero == 0, np.nan, by_block["relative"].max(axis=-1)),
                "max_ulp_error": np.where(count == 0, np.nan, by_block["ulps"].max(axis=-1)),
            }
            for name in ("saturated", "underflowed", "subnormal"):
                if name in by_block:
                    found[name] = by_block[name].sum(axis=-1) / count
        table["num_elements"][where] = count.reshape(scales.shape)
        for name, column in found.items():
            table[name][where] = column.reshape(scales.shape)
    return {"block": np.arange(math.prod(shape)), **{name: column.reshape(-1) for name, column in table.items()}}


def _block_rows(array: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """(blocks, elements of a block), contiguous, a short block filled with 0."""
    return np.ascontiguousarray(split_blocks(array, block).transpose(0, 1, 3, 2, 4)).reshape(-1, math.prod(block))
