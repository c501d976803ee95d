"""Run candidates over the cases and collect what came."""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mxsim.blocks import ScaleRule
from mxsim.formats import E5M2, Rounding
from mxsim.provenance import package_provenance
from mxsim.validate import peers
from mxsim.validate.cases import Case, Inputs, arguments, has_sizes_on_device
from mxsim.validate.compare import Comparison, compare
from mxsim.validate.gemm_cases import SCALED_MM, GemmCase, e5m2_cases, gemm_cases
from mxsim.validate.gemm_runner import GemmRunner, default_gemm
from mxsim.validate.generators import Size, cases_of
from mxsim.validate.reference import OPS, expected
from mxsim.validate.report import MAX_MISMATCHES_KEPT, SIMULATOR, CaseProblem, OpReport, Report
from mxsim.validate.scaled_mm import GemmRefused, bits_of, has_scaled_mm

Candidate = Callable[..., Any]
_KEPT_OF_CASE = 2  # mismatches of a step
_DEFAULTS = {  # of mxsim.kernels
    "scale_rule": ScaleRule.FLOOR,
    "headroom": 6,
    "row_multiple": 4,
    "transpose": False,
    "rounding": Rounding.TIES_TO_EVEN,
    "seed": None,
}
Progress = Callable[
    [Case | GemmCase, int, int], None
]  # called before each case: the case, how many are done, how many in all


def run(
    ops: str | Sequence[str] = "all",
    device: str | torch.device = "cuda",
    candidate: Candidate | None = None,
    size: str = "full",
    *,
    cases: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare a candidate, bit by bit, with the simulator on every case of each op.

    Args:
        ops: "all", the name of one op of `mxsim.kernels`, or several names; scaled_mm, a block-scaled FP8 GEMM, is one
            of all on a Hopper GPU.
        device: where the candidate's tensors lie.
        candidate: a function of the op's signature that returns tensors in (nested) tuples; None: the ops of
            `mxsim.kernels` themselves, and as scaled_mm torch's on a GPU, whose split of K is probed. A scaled_mm takes
            (a, a_scales, b, b_scales, out_dtype), see `gemm_cases.Operands`; E5M2 and tensor-wise scales are compared
            of None only. The candidate serves every op named.
            Keywords at their defaults are not passed unless it has none; cases with a keyword that it does not take are
            skipped, and reported as such.
        size: "full", or "quick" for a small part of it.
        cases: only those with this text in their name.
        progress: called before each case.

    Raises:
        ValueError: for an unknown op or size, a device that is not there, or a text that no case's name holds.
    """
    names = _checked_ops(ops)
    plan = _Plan(_checked_device(device), _checked_size(size), is_ours=candidate is None, text=cases or "")
    if ops == "all" and candidate is None and has_scaled_mm(plan.device):
        names.append(SCALED_MM)
    functions = {name: candidate if candidate is not None else _kernel(name, plan.device) for name in names}
    name, note = (_name_of(candidate), "") if candidate is not None else _ours(names, plan.device)
    is_emulation = names == [SCALED_MM] and plan.device.type == "cuda"
    against = "mxsim's emulation, kernels.fp8_gemm_emulated" if is_emulation else SIMULATOR
    report = Report(name, _describe(plan.device), size, note, against, package_provenance(plan.device))
    return _run(functions, plan, report, progress)


def run_peer(
    name: str,
    ops: str | Sequence[str] = "all",
    device: str | torch.device = "cpu",
    size: str = "full",
    *,
    cases: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """`run` for what another library offers; see `mxsim.validate.peers`. Its differences are no failures.

    Raises:
        ValueError: as `run`; for an unknown peer, one that cannot be imported, or that has none of the ops.
    """
    names = _checked_ops(ops)
    plan = _Plan(_checked_device(device), _checked_size(size), is_ours=False, text=cases or "")
    peer = peers.load(name)
    functions = {op: function for op, function in peer.candidates.items() if op in names}
    if not functions:
        raise ValueError(f"validate: peer {name} has no {', '.join(names)}, it has {', '.join(peer.candidates)}")
    name, where = f"{peer.name} {peer.version}", _describe(plan.device)
    report = Report(name, where, size, peer.note, provenance=package_provenance(plan.device))
    return _run(functions, plan, report, progress)


def check(fn: Candidate, op: str, *, device: str | torch.device | None = None, size: str = "full") -> Report:
    """`run` for anybody's implementation of one op; device None is CUDA where there is a device, else the CPU.

    >>> from mxsim import kernels, validate
    >>> validate.check(kernels.fp4_to_bf16, op="fp4_to_bf16", device="cpu", size="quick").ok
    True
    """
    return run(op, device or default_device(), fn, size)


def default_device() -> str:
    """cuda where there is a device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class _Plan:
    device: torch.device
    size: Size
    is_ours: bool  # no candidate was named: also bad input (NUMERICS 10), and E5M2 operands of scaled_mm
    text: str

    def cases(self, op: str) -> list[Case] | list[GemmCase]:
        if op == SCALED_MM:
            cases = gemm_cases(self.size, self.device.type)
            cases += e5m2_cases(self.size, self.device.type) if self.is_ours else []
            return [case for case in cases if self.text in case.name]
        return [
            case
            for case in cases_of(op, self.size, self.device.type)
            if self.text in case.name and (self.is_ours or not case.bad_input)
        ]


def _run(functions: Mapping[str, Candidate], plan: _Plan, report: Report, progress: Progress | None) -> Report:
    started, done = time.perf_counter(), 0
    cases = {op: plan.cases(op) for op in functions}
    num_cases = sum(map(len, cases.values()))
    if not num_cases:
        raise ValueError(f"validate: no case of {', '.join(functions)} has {plan.text!r} in its name")
    for op, function in functions.items():
        if not cases[op]:
            continue
        op_report = OpReport(op)
        report.ops.append(op_report)
        gemm_runner = GemmRunner(function, plan.device)
        for case in cases[op]:
            if progress is not None:
                progress(case, done, num_cases)
            try:
                if isinstance(case, GemmCase):
                    _run_gemm_case(case, gemm_runner, plan.device, op_report)
                else:
                    _run_case(case, function, plan.device, op_report)
            except _DeviceLost as error:
                message = f"after it the device answers no more, the rest was not run: {_one_line(error)}"
                op_report.problems.append(CaseProblem(case.name, message))
                report.seconds = time.perf_counter() - started
                return report
            done += 1
        gemm_runner.add_notes(op_report)
    report.seconds = time.perf_counter() - started
    return report


def _run_case(case: Case, function: Candidate, device: torch.device, report: OpReport) -> None:
    problem, defaults = _signature_problem(function, case.options)
    if problem:
        report.skipped[problem] += 1
        return
    start = time.perf_counter()
    inputs = case.inputs()
    if not _fits(case, inputs, device):
        report.skipped["the device has too little free memory"] += 1
        return
    tensors, keywords = arguments(case, inputs, device)
    copies = [bits_of(x).clone() for x in tensors] if case.repeat == 1 else []
    refused = case.bad_input and device.type == "cpu"
    leaves = [] if refused else expected(case.op, inputs, dict(case.options))
    _synchronize(device)
    called = time.perf_counter()
    report.reference_seconds += called - start
    report.num_cases += 1
    results, error = None, None
    try:
        results = function(*tensors, **keywords, **defaults)
        _synchronize(device)
    except Exception as raised:
        error = raised
        _raise_if_device_is_lost(device, error)
    returned = time.perf_counter()
    report.seconds += returned - called

    if refused:
        if not isinstance(error, ValueError):
            came = "returned" if error is None else f"raised {type(error).__name__}: {error}"
            report.problems.append(CaseProblem(case.name, f"{came}, needed a ValueError (NUMERICS 10)"))
        return
    if error is not None:
        report.problems.append(CaseProblem(case.name, f"raised {type(error).__name__}: {_one_line(error)}"))
        return
    if any(not torch.equal(bits_of(x), copy) for x, copy in zip(tensors, copies, strict=False)):
        report.problems.append(CaseProblem(case.name, "the candidate wrote to its inputs"))
    prefix_only = device.type == "cuda" and has_sizes_on_device(case)
    _add(report, case, compare(case, inputs, leaves, results, device, prefix_only=prefix_only))
    report.reference_seconds += time.perf_counter() - returned


def _run_gemm_case(case: GemmCase, gemm_runner: GemmRunner, device: torch.device, report: OpReport) -> None:
    try:
        gemm_runner.run_case(case, report)
    except GemmRefused as error:
        _raise_if_device_is_lost(device, error)
        what = case.kind if E5M2 in case.elements else f"{case.shape}, {case.kind}"
        report.skipped[f"refused by the library, {what}: {error}"] += 1
    except Exception as error:
        _raise_if_device_is_lost(device, error)
        report.problems.append(CaseProblem(case.name, f"raised {type(error).__name__}: {_one_line(error)}"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _add(report: OpReport, case: Case, comparison: Comparison) -> None:
    report.num_elements += comparison.num_elements
    report.num_mismatches += comparison.num_mismatches
    report.by_step.update(comparison.by_step)
    report.cases_by_step.update(comparison.by_step.keys())
    report.problems.extend(CaseProblem(case.name, problem) for problem in comparison.problems)
    kept = Counter(m.step for m in report.mismatches)
    from_case: Counter[str] = Counter()
    for mismatch in comparison.first:
        if kept[mismatch.step] < MAX_MISMATCHES_KEPT and from_case[mismatch.step] < _KEPT_OF_CASE:
            report.mismatches.append(mismatch)
            kept[mismatch.step] += 1
            from_case[mismatch.step] += 1


class _DeviceLost(Exception):
    """A CUDA error after which nothing runs in this process any more."""


def _raise_if_device_is_lost(device: torch.device, error: Exception) -> None:
    try:
        _synchronize(device)
    except Exception:
        raise _DeviceLost(str(error)) from error


def _fits(case: Case, inputs: Inputs, device: torch.device) -> bool:
    """Whether a large case leaves room for results and temporaries."""
    if case.repeat == 1 or device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return case.repeat * sum(array.nbytes for array in inputs.values()) * 8 < free


def _signature_problem(function: Candidate, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(why the function cannot be called with these keywords, or nothing; defaults of others that it insists on)."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "", {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for keyword in options:
        if not takes_any and (
            keyword not in parameters or parameters[keyword].kind is inspect.Parameter.POSITIONAL_ONLY
        ):
            return f"the candidate has no {keyword}", {}
    needed = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    needed = [name for name in needed if name not in options]
    for keyword in needed:
        if keyword not in _DEFAULTS:
            return f"the candidate needs {keyword}", {}
    return "", {keyword: _DEFAULTS[keyword] for keyword in needed}


def _kernel(op: str, device: torch.device) -> Candidate:
    from mxsim import kernels

    if op == SCALED_MM:
        return default_gemm(device)
    function: Candidate = getattr(kernels, op)
    return function


def _ours(names: Sequence[str], device: torch.device) -> tuple[str, str]:
    """What runs where no candidate is named, and what does not, for want of a device or of a compiler."""
    if device.type == "cuda":
        if names == [SCALED_MM]:
            return f"torch {torch.__version__}'s scaled_mm", ""
        lacks_gemm = names == list(OPS) and not has_scaled_mm(device)
        return "mxsim.kernels (CUDA)", "Not run: torch's scaled_mm, which needs a Hopper GPU" if lacks_gemm else ""
    from mxsim.kernels import host

    why = "the device is cpu" if torch.cuda.is_available() else "torch sees no CUDA device"
    note = f"Not run: the CUDA kernels, as {why}"
    if host.backend() is host:
        return "mxsim.kernels (host build)", note
    return "mxsim.kernels (the simulator, without a host build)", f"The simulator was compared with itself. {note}"


def _name_of(candidate: Candidate) -> str:
    return f"{getattr(candidate, '__module__', '?')}:{getattr(candidate, '__qualname__', repr(candidate))}"


def _describe(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checked_ops(ops: str | Sequence[str]) -> list[str]:
    names = list(OPS) if ops == "all" else [ops] if isinstance(ops, str) else list(ops)
    for name in names:
        if name not in (*OPS, SCALED_MM):
            raise ValueError(f"validate: op is {name!r}, needed all or some of {', '.join((*OPS, SCALED_MM))}")
    if not names:
        raise ValueError("validate: ops is empty, needed at least one")
    return names


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"validate: device is {device!r}, needed cpu or cuda") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"validate: device is {device!r}, needed cpu or cuda")
    if where.type == "cuda" and (not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"validate: device is {device!r}, but torch sees no such CUDA device")
    return where


def _checked_size(size: str) -> Size:
    try:
        return Size(size)
    except ValueError:
        raise ValueError(f"validate: size is {size!r}, needed full or quick") from None
