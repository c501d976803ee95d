"""Checkpoint study: the error of every tensor of a file in every format, as rows of a tidy table."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from mxsim.analysis.error import STRIP, ErrorSums
from mxsim.analysis.fp4_to_fp8 import BLOCKS_PER_GROUP, exponent_spread, is_lossless
from mxsim.analysis.tensor_files import StoredTensor, floating_point_problem, open_tensors
from mxsim.blocks import FP8_1X128, MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4, BlockFormat, BlockTensor, ScaleRule, quantize
from mxsim.blocks.layout import block_of, normalize_axis
from mxsim.formats.inputs import as_float, as_numpy

DEFAULT_FORMATS = (MXFP4, NVFP4, MXFP6_E2M3, MXFP8_E4M3, FP8_1X128)
CHUNK = 2**16  # elements worked on at a time: what stays in cache, and malloc need not ask the system for
_GROUP = MXFP4.block_size * BLOCKS_PER_GROUP
_MAX_THREADS = 8  # each takes some tens of megabytes
_RELEASE_EVERY = 2**23  # elements after which the pages of a mapped file are let go

Slices = tuple[slice, slice, slice]


@dataclass(frozen=True)
class StudyRow:
    """One tensor in one format under one scale rule; errors and shares as `ErrorSums` defines them.

    `scale_rule` is None where the format has none. The last six belong to MXFP4 and its groups of four neighbouring
    blocks (128 elements): `spread_counts[d]` of the `num_groups` have scale exponents that differ by d (zero blocks
    left out; largest and 99th percentile beside it), and `lossless_h0` and `lossless_h6` are the shares that
    FP4 -> FP8 keeps exactly at headroom 0 and 6. Elsewhere NaN and empty.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    scale_rule: str | None
    num_elements: int
    bits_per_element: float
    sqnr_db: float
    max_relative_error: float
    mean_relative_error: float
    saturated: float
    underflowed: float
    subnormal: float
    num_poisoned_blocks: int
    max_spread: float
    p99_spread: float
    lossless_h0: float
    lossless_h6: float
    num_groups: int
    spread_counts: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Skipped:
    """A tensor that was left out, or (format is not None) one format of it, and why."""

    tensor: str
    format: str | None
    reason: str


@dataclass(frozen=True)
class Study:
    """Rows tensor by tensor; `totals` has a row for each format and rule over all tensors, its tensor being ""."""

    rows: list[StudyRow]
    totals: list[StudyRow]
    skipped: list[Skipped]

    def records(self) -> list[dict[str, Any]]:
        """The rows as flat dictionaries, without spread_counts; pandas.DataFrame of them is a tidy table."""
        return [{name: getattr(row, name) for name in COLUMNS} for row in self.rows]


COLUMNS = tuple(column.name for column in fields(StudyRow) if column.name != "spread_counts")


def study_file(path: str | os.PathLike[str], *, tensors: Sequence[str] = (), **options: Any) -> Study:
    """`study_arrays` of the tensors in a .safetensors, .npy, .npz or .pt file, read piece by piece.

    Args:
        tensors: shell patterns; only tensors whose name fits one are studied. None given: all.
        options: as in `study_arrays`.

    Raises:
        TensorFileError: if the file cannot be read, or no tensor fits the patterns.
    """
    with open_tensors(path, tensors) as stored:
        return _study(stored, **options)


def study_arrays(
    arrays: Mapping[str, Any],
    *,
    formats: Sequence[BlockFormat] = DEFAULT_FORMATS,
    scale_rules: Sequence[ScaleRule] | None = None,
    axis: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    chunk: int = CHUNK,
) -> Study:
    """Quantize every array to every format and measure the error. Those without real numbers are skipped.

    Args:
        scale_rules: tried on every format that has a rule; None: each format's own.
        axis: along which blocks run; None: each format's own. FP8_128X1 and FP8_128X128 keep theirs.
        progress: called with (elements done, elements to do), an element counting once for each format and rule.
        chunk: elements held at a time; no result depends on it.

    >>> study = study_arrays({"x": np.linspace(-1, 1, 64, dtype=np.float32)}, formats=[MXFP4])
    >>> round(study.rows[0].sqnr_db, 2), study.rows[0].max_spread
    (20.31, 0.0)
    """
    stored = []
    for name, array in arrays.items():
        x = as_numpy(array, caller="study_arrays", name=name)
        stored.append(StoredTensor(name, x.shape, str(x.dtype), floating_point_problem(x.dtype), lambda x=x: x))
    return _study(stored, formats=formats, scale_rules=scale_rules, axis=axis, progress=progress, chunk=chunk)


def _study(
    stored: Iterable[StoredTensor],
    *,
    formats: Sequence[BlockFormat] = DEFAULT_FORMATS,
    scale_rules: Sequence[ScaleRule] | None = None,
    axis: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    chunk: int = CHUNK,
) -> Study:
    skipped: list[Skipped] = []
    plans = []
    for tensor in stored:
        cases, left_out = _plan(tensor, formats, scale_rules, axis)
        skipped += left_out
        if cases:
            plans.append((tensor, cases))
    to_do = sum(tensor.size * len(cases) for tensor, cases in plans)
    done = 0

    def advance(elements: int) -> None:
        nonlocal done
        done += elements
        if progress is not None:
            progress(done, to_do)

    rows: list[StudyRow] = []
    totals: dict[tuple[BlockFormat, ScaleRule | None], _Measurement] = {}
    advance(0)
    for tensor, cases in plans:
        measurements = [_Measurement(case) for case in cases]
        _measure(tensor, measurements, chunk, advance)
        for measured in measurements:
            rows.append(measured.row(tensor.name, tensor.shape, tensor.dtype))
            key = (measured.case.fmt, measured.case.rule)
            totals.setdefault(key, _Measurement(measured.case)).merge(measured)
    return Study(rows, [total.row("", (), "") for total in totals.values()], skipped)


# -------------------------------------------------------------------------------------------------- what to measure
@dataclass(frozen=True)
class _Case:
    fmt: BlockFormat
    rule: ScaleRule | None
    axis: int  # negative, of the tensor

    @property
    def axis_in_matrices(self) -> int:
        """The axis once the tensor is seen as (stack, rows, columns): see `_as_matrices`."""
        return max(self.axis, -2)


def _plan(
    tensor: StoredTensor, formats: Sequence[BlockFormat], rules: Sequence[ScaleRule] | None, axis: int | None
) -> tuple[list[_Case], list[Skipped]]:
    problem = tensor.problem or (None if tensor.size else "no elements")
    if problem is not None:
        return [], [Skipped(tensor.name, None, f"{tensor.dtype}: {problem}" if tensor.problem else problem)]
    cases, skipped = [], []
    for fmt in dict.fromkeys(formats):
        has_fixed_axis = fmt.is_tile or fmt.default_axis != -1
        try:
            block_axis = normalize_axis(None if has_fixed_axis else axis, max(len(tensor.shape), 1), fmt, "study")
        except ValueError as error:
            skipped.append(Skipped(tensor.name, fmt.name, str(error).removeprefix("study: ")))
            continue
        own = fmt.default_scale_rule
        cases += [
            _Case(fmt, rule, block_axis) for rule in ([own] if own is None or not rules else dict.fromkeys(rules))
        ]
    return cases, skipped


# -------------------------------------------------------------------------------------------------------- measuring
class _Measurement:
    """Everything summed up for one row of the table."""

    def __init__(self, case: _Case) -> None:
        self.case = case
        self.error = ErrorSums()
        self.num_groups = 0
        self.num_lossless = {0: 0, 6: 0}
        self.spread_counts = np.zeros(256, np.int64)

    def add(self, x: Float[np.ndarray, "stack rows columns"], t: BlockTensor) -> None:
        self.error.add(x, t)
        if t.format == MXFP4:
            for headroom in self.num_lossless:
                kept = is_lossless(t, headroom=headroom)
                self.num_lossless[headroom] += int(np.count_nonzero(kept))
            self.num_groups += kept.size
            spread = exponent_spread(t).reshape(-1)
            self.spread_counts += np.bincount(spread[spread >= 0], minlength=256)

    def merge(self, other: "_Measurement") -> None:
        self.error.merge(other.error)
        self.num_groups += other.num_groups
        self.spread_counts += other.spread_counts
        for headroom, count in other.num_lossless.items():
            self.num_lossless[headroom] += count

    def row(self, name: str, shape: tuple[int, ...], dtype: str) -> StudyRow:
        error, fmt = self.error, self.case.fmt
        cumulated = np.cumsum(self.spread_counts)
        num_spreads = int(cumulated[-1])
        max_spread = int(np.flatnonzero(self.spread_counts)[-1]) if num_spreads else math.nan
        p99_spread = int(np.searchsorted(cumulated, math.ceil(0.99 * num_spreads))) if num_spreads else math.nan
        return StudyRow(
            tensor=name,
            shape=shape,
            dtype=dtype,
            format=fmt.name,
            scale_rule=self.case.rule.name if self.case.rule else None,
            num_elements=error.num_elements + error.num_poisoned_elements,
            bits_per_element=fmt.bits_per_element,
            sqnr_db=error.sqnr_db,
            max_relative_error=error.max_relative_error,
            mean_relative_error=error.mean_relative_error,
            saturated=error.saturated,
            underflowed=error.underflowed,
            subnormal=error.subnormal,
            num_poisoned_blocks=error.num_poisoned_blocks,
            max_spread=float(max_spread),
            p99_spread=float(p99_spread),
            lossless_h0=self.num_lossless[0] / self.num_groups if self.num_groups else math.nan,
            lossless_h6=self.num_lossless[6] / self.num_groups if self.num_groups else math.nan,
            num_groups=self.num_groups,
            spread_counts=tuple(self.spread_counts[: int(max_spread) + 1].tolist()) if num_spreads else (),
        )


def _measure(
    tensor: StoredTensor, measurements: Sequence[_Measurement], chunk: int, advance: Callable[[int], None]
) -> None:
    """One scan over the tensor for all cases that see it as the same stack of matrices; threads share the pieces."""
    array = tensor.load()
    array = array.reshape(1) if array.ndim == 0 else array
    by_layout: dict[int, list[_Measurement]] = {}
    for measured in measurements:
        by_layout.setdefault(max(min(measured.case.axis, -2), -array.ndim), []).append(measured)
    for row_axis, group in by_layout.items():
        matrices = _as_matrices(array, row_axis)
        cases = [m.case for m in group]
        blocks = [block_of(case.fmt, case.axis_in_matrices) for case in cases]
        needs_amax = any(case.fmt.tensor_scaled for case in cases)
        tensor_amax = _tensor_amax(tensor, matrices, blocks, chunk) if needs_amax else np.float32(0)
        measure_piece = partial(_measure_piece, cases=cases, tensor_amax=tensor_amax)
        for pieces in _map_in_threads(measure_piece, _pieces(tensor, matrices, blocks, chunk)):
            for measured, piece in zip(group, pieces, strict=True):
                measured.merge(piece)
                advance(piece.error.num_elements + piece.error.num_poisoned_elements)


def _measure_piece(
    x: Float[np.ndarray, "stack rows columns"], cases: Sequence[_Case], tensor_amax: np.float32
) -> list[_Measurement]:
    measurements = [_Measurement(case) for case in cases]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        exact = x.astype(np.float64, copy=False)  # once for all cases
        for measured in measurements:
            measured.add(exact, _quantize_piece(x, measured.case, tensor_amax))
    return measurements


def _map_in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """The results in order, with few items in flight. NumPy lets other threads run while it works on an array."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    pending: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _as_matrices(array: np.ndarray, row_axis: int) -> np.ndarray:
    """(stack, rows, columns): the rows are row_axis (-2 or further left), the columns all axes to its right."""
    shape = array.shape
    if array.ndim == 1:
        return array.reshape(1, 1, -1)
    return array.reshape(math.prod(shape[:row_axis]), shape[row_axis], math.prod(shape[row_axis + 1 :]))


def _pieces(
    tensor: StoredTensor, matrices: np.ndarray, blocks: Sequence[tuple[int, int]], chunk: int
) -> Iterator[Float[np.ndarray, "stack rows columns"]]:
    """Pieces of about `chunk` elements as float32 or float64, cut where blocks, and groups of four of them, end."""
    unread = _RELEASE_EVERY
    for piece in slices_of_pieces(matrices.shape, blocks, chunk):
        with np.errstate(invalid="ignore"):
            x = np.ascontiguousarray(as_float(matrices[piece], caller="study", name=tensor.name))
        yield x
        unread -= x.size
        if unread <= 0:
            tensor.release()
            unread = _RELEASE_EVERY
    tensor.release()


def slices_of_pieces(shape: tuple[int, ...], blocks: Sequence[tuple[int, int]], chunk: int) -> Iterator[Slices]:
    """Slices of (stack, rows, columns) of about `chunk` elements, cut where blocks, and groups of four of them, end."""
    row_unit, column_unit = (
        math.lcm(*(math.lcm(length, _GROUP) if length > 1 else 1 for length in lengths))
        for lengths in zip(*blocks, strict=True)
    )
    stack, rows, columns = shape
    # What a piece takes in memory counts blocks as whole.
    height, width = (unit * -(-size // unit) for unit, size in ((row_unit, rows), (column_unit, columns)))
    strip = math.lcm(column_unit, STRIP)
    column_step = strip * max(1, chunk // (min(row_unit, height) * strip))
    row_step = row_unit * max(1, chunk // (min(column_step, width) * row_unit))
    stack_step = max(1, chunk // (min(column_step, width) * min(row_step, height)))
    for i in range(0, stack, stack_step):
        for r in range(0, rows, row_step):
            for c in range(0, columns, column_step):
                yield slice(i, i + stack_step), slice(r, r + row_step), slice(c, c + column_step)


def _tensor_amax(
    tensor: StoredTensor, matrices: np.ndarray, blocks: Sequence[tuple[int, int]], chunk: int
) -> np.float32:
    """Largest finite magnitude, each element rounded to FP32 first as NVFP4 has it."""
    amax = np.float32(0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for x in _pieces(tensor, matrices, blocks, chunk):
            magnitude = np.abs(x.astype(np.float32, copy=False))
            amax = np.max(magnitude, initial=amax, where=np.isfinite(magnitude))
    return amax


def _quantize_piece(x: Float[np.ndarray, "stack rows columns"], case: _Case, tensor_amax: np.float32) -> BlockTensor:
    axis = case.axis_in_matrices
    if not case.fmt.tensor_scaled:
        return quantize(x, case.fmt, axis=axis, scale_rule=case.rule)
    # One more block, which holds the tensor's amax, gives the piece the whole tensor's scale.
    stack, rows, columns = x.shape
    extra = np.zeros((stack, 1, columns) if axis == -1 else (stack, rows, 1), x.dtype)
    extra[0, 0, 0] = tensor_amax
    t = quantize(np.concatenate([x, extra], axis=-2 if axis == -1 else -1), case.fmt, axis=axis)
    own = np.s_[:, :-1] if axis == -1 else np.s_[:, :, :-1]
    return BlockTensor(t.codes[own], t.scales[own], case.fmt, axis, t.tensor_scale)
