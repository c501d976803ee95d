"""What a benchmark of the layer found: records, and the same as JSON values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mxsim.bench.moe.figures import Figure
from mxsim.bench.moe.layer import Check, Saved
from mxsim.bench.moe.memory import Peak
from mxsim.bench.moe.parts import Kind
from mxsim.bench.moe.workload import LayerShape, Routing
from mxsim.bench.report import timing_json
from mxsim.bench.targets import Verdict
from mxsim.bench.timing import Timing

_HOST_BOUND = 0.95  # share of the device's time that Python takes: it then waits for Python, or nearly


@dataclass(frozen=True)
class Step:
    """Forward + backward of a layer. timing: on the device, which never waits for Python.

    host_us: until Python has enqueued it all. wall_us: of one step after another, both waiting for each other. None on
    the CPU.
    """

    name: str
    timing: Timing
    host_us: float | None = None
    wall_us: float | None = None

    @property
    def is_host_bound(self) -> bool:
        """Whether Python takes about as long as the device, or longer."""
        return self.host_us is not None and self.host_us >= _HOST_BOUND * self.timing.us

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        json = {"recipe": self.name, **timing_json(self.timing)}
        if self.host_us is not None and self.wall_us is not None:
            json |= {"host_us": _rounded(self.host_us), "wall_us": _rounded(self.wall_us)}
            json["is_host_bound"] = self.is_host_bound
        return json


@dataclass(frozen=True)
class PartTime:
    """One part of the step, or what stands beside it; recipes: whose step it is part of."""

    key: str
    kind: Kind
    recipes: tuple[str, ...]
    name: str
    timing: Timing
    num_bytes: int
    flops: int
    is_in_cache: bool

    @property
    def tflop_per_s(self) -> float:
        """0 for what is no GEMM."""
        return self.flops / self.timing.us / 1e6

    @property
    def tb_per_s(self) -> float:
        """By count: inputs once, results once."""
        return self.num_bytes / self.timing.us / 1e6

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        rate = {"tflop_per_s": _rounded(self.tflop_per_s)} if self.flops else {"tb_per_s": _rounded(self.tb_per_s)}
        return {
            "key": self.key,
            "kind": self.kind.value,
            "recipes": list(self.recipes),
            "name": self.name,
            **timing_json(self.timing),
            "bytes": self.num_bytes,
            **rate,
            "is_in_cache": self.is_in_cache,
        }


@dataclass
class RoutingReport:
    """All of one routing. saved: what each recipe keeps."""

    routing: Routing
    sizes: tuple[int, ...]
    checks: list[Check] = field(default_factory=list)
    saved: dict[str, list[Saved]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    parts: list[PartTime] = field(default_factory=list)

    def saved_bytes(self) -> dict[str, int]:
        """By recipe."""
        return {recipe: sum(s.num_bytes for s in saved) for recipe, saved in self.saved.items()}

    def sums(self, recipe: str) -> dict[Kind, float]:
        """Microseconds of a recipe's parts by kind, FP8 weights left out."""
        sums: dict[Kind, float] = {}
        for part in self.parts:
            if part.kind.is_in_step and recipe in part.recipes:
                sums[part.kind] = sums.get(part.kind, 0.0) + part.timing.us
        return sums

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "routing": self.routing.value,
            "description": self.routing.description,
            "group_sizes": list(self.sizes),
            "checks": [
                {
                    "recipe": c.recipe,
                    "relative_errors": {name: _rounded(e) for name, e in c.errors.items()},
                    "at_most": c.max_error,
                }
                for c in self.checks
            ],
            "saved_bytes": self.saved_bytes(),
            "saved": {
                recipe: [{"dtype": s.dtype, "shape": list(s.shape), "bytes": s.num_bytes} for s in saved]
                for recipe, saved in self.saved.items()
            },
            "steps": [step.to_json() for step in self.steps],
            "parts": [part.to_json() for part in self.parts],
            "sums_us": {
                recipe: {kind.value: _rounded(us) for kind, us in self.sums(recipe).items()} for recipe in self.saved
            },
        }


@dataclass
class MoeReport:
    """All of one run.

    problems: (case, what is wrong), not timed.
    notes: what was left out, and why; what must be known to read the figures.
    """

    provenance: dict[str, Any]
    shape: LayerShape
    routings: list[RoutingReport] = field(default_factory=list)
    dense: list[PartTime] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything ran and gave near results."""
        return not self.problems

    def verdicts(self) -> Iterator[Verdict]:
        """Of every figure that has a target."""
        return (f.verdict for f in self.figures if f.verdict is not None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        shape = self.shape
        return {
            "ok": self.ok,
            "provenance": self.provenance,
            "seconds": round(self.seconds, 1),
            "shape": {
                "tokens": shape.tokens,
                "top_k": shape.top_k,
                "rows": shape.rows,
                "hidden": shape.hidden,
                "intermediate": shape.intermediate,
                "experts": shape.num_experts,
            },
            "figures": [figure.to_json() for figure in self.figures],
            "routings": [routing.to_json() for routing in self.routings],
            "dense": [part.to_json() for part in self.dense],
            "peaks": [peak.to_json() for peak in self.peaks],
            "problems": [{"case": case, "message": message} for case, message in self.problems],
            "notes": self.notes,
        }


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")
