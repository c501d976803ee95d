"""What a benchmark found: records, and the same as JSON values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mxsim.bench.cases import Case, Shape
from mxsim.bench.targets import Target, Verdict
from mxsim.bench.timing import Timing


@dataclass(frozen=True)
class Copy:
    """The ceiling: a copy of num_bytes, which reads and writes as many."""

    num_bytes: int
    timing: Timing

    @property
    def bytes_per_s(self) -> float:
        """Read and written."""
        return 2e6 * self.num_bytes / self.timing.us

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"bytes": 2 * self.num_bytes, **timing_json(self.timing), "tb_per_s": _rounded(self.bytes_per_s / 1e12)}


@dataclass(frozen=True)
class Measurement:
    """An op at a shape. of: what the target is about, "of_copy" or "elements_per_s".

    is_in_cache: inputs and results of all calls together fit into twice the last cache.
    """

    case: Case
    timing: Timing
    copy: Copy
    is_in_cache: bool = False
    target: Target | None = None
    of: str = "of_copy"

    @property
    def bytes_per_s(self) -> float:
        """By count: inputs once, results once."""
        return 1e6 * self.case.num_bytes / self.timing.us

    @property
    def of_copy(self) -> float:
        """Fraction of the copy's bandwidth."""
        return self.bytes_per_s / self.copy.bytes_per_s

    @property
    def elements_per_s(self) -> float:
        """Of the matrix."""
        return 1e6 * self.case.shape.num_elements / self.timing.us

    @property
    def verdict(self) -> Verdict | None:
        """How the figure stands to its target."""
        return None if self.target is None else self.target.verdict(getattr(self, self.of))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "op": self.case.op,
            "variant": self.case.variant,
            **_shape_json(self.case.shape),
            "bytes": self.case.num_bytes,
            **timing_json(self.timing),
            "tb_per_s": _rounded(self.bytes_per_s / 1e12),
            "of_copy": _rounded(self.of_copy),
            "elements_per_s": _rounded(self.elements_per_s),
            "is_in_cache": self.is_in_cache,
            **_target_json(self.target, self.verdict, self.of),
        }


@dataclass(frozen=True)
class Comparison:
    """A rival beside an op at the same shape."""

    rival: str
    rival_bytes: int
    rival_timing: Timing
    ours: Measurement
    target: Target | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """The rival's time over the op's."""
        return self.rival_timing.us / self.ours.timing.us

    @property
    def verdict(self) -> Verdict | None:
        """How the ratio stands to its target."""
        return None if self.target is None else self.target.verdict(self.ratio)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rival": self.rival,
            "op": self.ours.case.op,
            **_shape_json(self.ours.case.shape),
            "bytes": self.rival_bytes,
            **timing_json(self.rival_timing),
            "tb_per_s": _rounded(self.rival_bytes / self.rival_timing.us / 1e6),
            "op_us": _rounded(self.ours.timing.us),
            "ratio": _rounded(self.ratio),
            "note": self.note,
            **_target_json(self.target, self.verdict, "ratio"),
        }


@dataclass(frozen=True)
class Overhead:
    """Python's time of one call on a tiny matrix, and of allocating its results alone."""

    name: str
    us: float
    empty_us: float
    target: Target | None = None

    @property
    def verdict(self) -> Verdict | None:
        """How the time stands to its target."""
        return None if self.target is None else self.target.verdict(self.us)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "call": self.name,
            "us": _rounded(self.us),
            "empty_us": _rounded(self.empty_us),
            **_target_json(self.target, self.verdict, "us"),
        }


@dataclass
class Report:
    """All of one run.

    checked_against: what the results were compared with before anything was timed.
    problems: (case, what is wrong), not timed.
    notes: what was left out, and why.
    """

    provenance: dict[str, Any]
    copy: Copy
    checked_against: str
    measurements: list[Measurement] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every op gave the right bits."""
        return not self.problems

    def verdicts(self) -> Iterator[tuple[Verdict, str]]:
        """Each figure that has a target: (verdict, the figure in words)."""
        for m in self.measurements:
            if m.verdict and m.target:
                value, bound = getattr(m, m.of), m.target.bound
                what = (
                    f"{value:.3f} of the copy, at least {bound:.2f}"
                    if m.of == "of_copy"
                    else f"{value / 1e6:.0f} M elements/s, at least {bound / 1e6:.0f}"
                )
                yield m.verdict, f"{m.case.name} {m.case.shape}: {what}"
        for c in self.comparisons:
            if c.verdict and c.target:
                yield c.verdict, f"{c.ours.case.name} against {c.rival}: {c.ratio:.2f}x, at least {c.target.bound:.1f}x"
        for o in self.overheads:
            if o.verdict and o.target:
                yield o.verdict, f"Python time of {o.name}: {o.us:.1f} us, at most {o.target.bound:.0f}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ok": self.ok,
            "provenance": self.provenance,
            "seconds": round(self.seconds, 1),
            "checked_against": self.checked_against,
            "copy": self.copy.to_json(),
            "ops": [m.to_json() for m in self.measurements],
            "comparisons": [c.to_json() for c in self.comparisons],
            "overhead": [o.to_json() for o in self.overheads],
            "problems": [{"case": case, "message": message} for case, message in self.problems],
            "notes": self.notes,
        }


def _shape_json(shape: Shape) -> dict[str, Any]:
    return {"shape": str(shape), "rows": shape.rows, "columns": shape.columns, "experts": shape.num_experts}


def timing_json(timing: Timing) -> dict[str, Any]:
    return {
        "us": _rounded(timing.us),
        "min_us": _rounded(timing.min_us),
        "max_us": _rounded(timing.max_us),
        "method": timing.method.value,
        "samples": timing.num_samples,
        "calls_per_sample": timing.calls_per_sample,
        "is_queue_full": timing.is_queue_full,
    }


def _target_json(target: Target | None, verdict: Verdict | None, of: str) -> dict[str, Any]:
    if target is None or verdict is None:
        return {}
    return {"target": {"of": of, "bound": target.bound, "aim": target.aim, "verdict": verdict.name.lower()}}


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")
