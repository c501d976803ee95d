"""One run: the copy first, then every case checked and timed, its rivals beside it, and the overhead of calls."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxsim.bench import peers
from mxsim.bench.cases import DEFAULT_SHAPES, OPS, QUICK_SHAPES, Case, Data, Shape, cases_at, flat
from mxsim.bench.check import problem_with, reference_for
from mxsim.bench.report import Comparison, Copy, Measurement, Overhead, Report
from mxsim.bench.rivals import Rival, transpose, unfused
from mxsim.bench.targets import OVERHEAD_US, elements_target, of_copy_target, ratio_target
from mxsim.bench.timing import Timing, cache_bytes, calls_on_copies, overhead_us, time_calls
from mxsim.provenance import provenance

Progress = Callable[[str, int, int], None]  # called before each step: what, how many are done, how many in all
_OVERHEAD_SHAPE, _OVERHEAD_EXPERTS = Shape(4, 128), Shape(4, 128, 2)


@dataclass(frozen=True)
class Effort:
    """How much of everything."""

    copy_bytes: int
    num_samples: int
    num_overhead_calls: int


_FULL, _QUICK = Effort(2**30, 9, 2000), Effort(2**28, 3, 300)


def run(
    device: str | torch.device = "cuda",
    ops: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    *,
    quick: bool = False,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check and time ops of `mxsim.kernels`.

    Args:
        device: "cuda", "cuda:1", "cpu".
        ops: none: all.
        shapes: none: `DEFAULT_SHAPES`, or `QUICK_SHAPES` with quick.
        quick: few samples, no other libraries.
        effort: in place of what `quick` chooses.
        progress: called before each step.

    Raises:
        ValueError: for an unknown op, or a device that is not there.
    """
    started = time.perf_counter()
    where, names = checked_device(device), _checked_ops(ops)
    effort = effort or (_QUICK if quick else _FULL)
    bench = _Bench(where, effort)
    shapes = list(dict.fromkeys(shapes)) or list(QUICK_SHAPES if quick else DEFAULT_SHAPES)
    plan = {shape: cases_at(shape, names) for shape in shapes}
    overheads = [case for shape in (_OVERHEAD_SHAPE, _OVERHEAD_EXPERTS) for case in cases_at(shape, names)]
    steps = Steps(progress, sum(map(len, plan.values())) + 2)
    steps.next("copy")
    report = Report(provenance(where), bench.copy(), bench.reference.value)
    rivals = [*unfused(), transpose()]
    first_dense = next((shape for shape in shapes if not shape.num_experts), None)
    libraries = [] if quick else _libraries(where, names, report)
    for shape, cases in plan.items():
        data = Data.random(shape, where)
        beside = [] if shape.num_experts else [*rivals, *(libraries if shape == first_dense else [])]
        for case in cases:
            steps.next(f"{case.name} {shape}")
            bench.measure(case, data, beside, report)
        del data
        bench.release()
    steps.next("Python time")
    for case in overheads:
        with recording(report.problems, f"Python time of {case.name}"):
            report.overheads.append(bench.overhead(case))
    report.seconds = time.perf_counter() - started
    return report


class _Bench:
    """Measures on one device."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self._cache_bytes = cache_bytes(device)
        self.reference = reference_for(device)
        self._copy: Copy | None = None

    def copy(self) -> Copy:
        """The copy's bandwidth, which everything else is a fraction of."""
        source = torch.empty(self.effort.copy_bytes, dtype=torch.uint8, device=self.device)
        source.view(torch.int64).random_() if source.numel() % 8 == 0 else source.random_()
        target = torch.empty_like(source)
        timing = time_calls([lambda: target.copy_(source)], self.device, self.effort.num_samples)
        self._copy = Copy(source.numel(), timing)
        return self._copy

    def measure(self, case: Case, data: Data, rivals: Iterable[Rival], report: Report) -> None:
        """Time a case and what stands beside it, unless its results are wrong."""
        assert self._copy is not None
        with recording(report.problems, f"{case.name} {case.shape}"):
            problem = problem_with(case, data, self.device, self.reference)
            if problem:
                report.problems.append((f"{case.name} {case.shape}", f"wrong results, not timed: {problem}"))
                return
            options = case.options(self.device)
            timing, is_in_cache = self._time(
                lambda *inputs: case.call(inputs, options), case.inputs(data), case.num_bytes
            )
            ours = _measurement(case, timing, self._copy, is_in_cache, self.device)
            report.measurements.append(ours)
            if case.variant:
                return
            for rival in rivals:
                if rival.op == case.op and case.shape.rows % rival.row_multiple == 0:
                    try:
                        report.comparisons.append(self._compare(rival, ours, data))
                    except Exception as error:  # whatever another library or its compiler raises
                        report.notes.append(f"{rival.name} {case.shape} failed: {one_line(error)}")

    def _compare(self, rival: Rival, ours: Measurement, data: Data) -> Comparison:
        inputs, shape = data.of(rival.reads), ours.case.shape
        note = rival.note
        if rival.same_bits is not None:
            note = _agreement(rival.same_bits(rival.run(*inputs)), ours.case.call(inputs, {}))
        timing, _ = self._time(rival.run, inputs, rival.count_bytes(shape))
        target = ratio_target(ours.case.op, rival.name, shape) if self.device.type == "cuda" else None
        return Comparison(rival.name, rival.count_bytes(shape), timing, ours, target, note)

    def overhead(self, case: Case) -> Overhead:
        """Python's time of one call."""
        data = Data.random(case.shape, self.device)
        inputs, options = case.inputs(data), case.options(self.device)
        forms = [(t.shape, t.stride(), t.dtype) for t in case.call(inputs, options)]

        def empty() -> list[Tensor]:
            return [torch.empty_strided(size, stride, dtype=dtype, device=self.device) for size, stride, dtype in forms]

        function, calls = _bound(case, inputs, options), self.effort.num_overhead_calls
        name = f"{case.name}{', ragged' if case.shape.num_experts else ''}"
        target = OVERHEAD_US if self.device.type == "cuda" else None
        return Overhead(name, overhead_us(function, self.device, calls), overhead_us(empty, self.device, calls), target)

    def release(self) -> None:
        """Give the memory of one shape back before the next."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _time(self, run: Callable[..., Any], inputs: Sequence[Tensor], num_bytes: int) -> tuple[Timing, bool]:
        """(time, whether the memory that the calls take in turn is little more than the cache)."""
        calls, is_in_cache = calls_on_copies(run, inputs, num_bytes, self._cache_bytes)
        return time_calls(calls, self.device, self.effort.num_samples), is_in_cache


def _measurement(case: Case, timing: Timing, copy: Copy, is_in_cache: bool, device: torch.device) -> Measurement:
    if device.type == "cuda":
        return Measurement(case, timing, copy, is_in_cache, of_copy_target(case))
    target = elements_target(case, torch.get_num_threads())
    return Measurement(case, timing, copy, is_in_cache, target, "elements_per_s")


def _bound(case: Case, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Callable[[], Any]:
    """The op's call itself, with as little as possible around it."""
    from mxsim import kernels

    function = getattr(kernels, case.op)
    if options:
        return lambda: function(*inputs, **options)
    if len(inputs) == 1:
        (x,) = inputs
        return lambda: function(x)
    codes, scales = inputs
    return lambda: function(codes, scales)


def _agreement(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> str:
    """Whether a rival's results are the op's, byte by byte."""
    differing = 0
    for mine, other in zip(flat(ours), theirs, strict=True):
        a, b = (t.contiguous().view(torch.uint8).flatten() for t in (mine, other))
        if a.shape != b.shape:
            return "other shapes"
        differing += int((a != b).count_nonzero())
    return f"{differing} bytes differ" if differing else "the same bits"


def _libraries(device: torch.device, ops: Sequence[str], report: Report) -> list[Rival]:
    try:
        return peers.torchao(device)
    except ImportError as error:
        if {"bf16_to_fp4_row", "bf16_to_fp8_row"} & set(ops):
            report.notes.append(f"torchao is not beside them: {error} (pip install torchao)")
        return []


@contextmanager
def recording(problems: list[tuple[str, str]], case: str) -> Iterator[None]:
    """An op that raises is a problem of its own; the rest goes on."""
    try:
        yield
    except Exception as error:
        problems.append((case, f"raised {one_line(error)}"))


def one_line(error: Exception) -> str:
    """The error's type and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _checked_ops(ops: Sequence[str]) -> list[str]:
    for name in ops:
        if name not in OPS:
            raise ValueError(f"bench: op is {name!r}, needed some of {', '.join(OPS)}")
    return list(dict.fromkeys(ops)) or list(OPS)


def checked_device(device: str | torch.device) -> torch.device:
    """The device, with its number.

    Raises:
        ValueError: for one that is neither the CPU nor a CUDA device that is there.
    """
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"bench: device is {device!r}, needed cpu or cuda") from None
    if where.type == "cpu":
        return torch.device("cpu")
    if where.type != "cuda":
        raise ValueError(f"bench: device is {device!r}, needed cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError(f"bench: device is {device!r}, but torch sees no CUDA device")
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"bench: device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


class Steps:
    """Counts steps for the progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def next(self, text: str) -> None:
        """The next step begins."""
        if self._progress is not None:
            self._progress(text, self._done, self._total)
        self._done += 1
