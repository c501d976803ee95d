"""What a benchmark of expert parallelism found: records, figures, and the same as JSON values."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mxsim.bench.ep.check import Check
from mxsim.bench.moe.figures import Figure
from mxsim.bench.targets import Target, Verdict

_BYTES_BF16, _BYTES_FP8 = Target(3.7, 3.7), Target(1.9, 1.9)
_DISPATCH_BF16, _DISPATCH_FP8 = Target(2.0, 2.8), Target(1.3, 1.7)
_STEP_BF16 = Target(1.2, 1.5)
_TARGET_TOKENS = 32768  # at which the dispatch's targets are stated


@dataclass(frozen=True)
class Dispatched:
    """The forward dispatch of a recipe, tokens of each rank; times of the slowest rank.

    bytes_to_others: by count, what a rank sends to the other ranks, rows alone; the most of any rank.
    parts: microseconds by name; empty in chunks.
    """

    tokens: int
    recipe: str
    num_chunks: int
    row_bytes: int
    bytes_to_others: int
    us: float
    min_us: float
    max_us: float
    num_samples: int
    is_queue_full: bool
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerStep:
    """Forward + backward of the whole layer, and the memory of the rank that needs most; bytes are 0 on the CPU.

    us: wall clock, the wait for the counts inside. kept_bytes: what is held between forward and backward.
    peak_bytes: the most above what weights, their FP8 copies and the input take. peak_in_all: with them.
    """

    tokens: int
    recipe: str
    us: float
    min_us: float
    max_us: float
    num_samples: int
    kept_bytes: int
    peak_bytes: int
    peak_in_all: int


@dataclass
class EpReport:
    """All of one run. plan_us: by tokens, counts exchanged and waited for, once a forward pass in every recipe."""

    provenance: dict[str, Any]
    shape: str
    num_ranks: int
    has_targets: bool
    plan_us: dict[int, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    dispatches: list[Dispatched] = field(default_factory=list)
    steps: list[LayerStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[tuple[str, str]]:
        """(case, what is wrong)."""
        return [(f"{c.recipe}, {c.num_chunks} chunks", c.problem) for c in self.checks if c.problem]

    @property
    def ok(self) -> bool:
        """Whether every bit compared was right."""
        return not self.problems

    @property
    def figures(self) -> list[Figure]:
        """Ratios, those with a target first."""
        figures = [*self._bytes(), *self._dispatch(), *self._step()]
        if not self.has_targets:
            figures = [replace(figure, target=None) for figure in figures]
        return sorted(figures, key=lambda figure: figure.target is None)

    def verdicts(self) -> list[Verdict]:
        """Of the figures that have a target."""
        return [figure.verdict for figure in self.figures if figure.verdict]

    def _at(self, tokens: int, num_chunks: int | None = 1) -> dict[str, Dispatched]:
        """By recipe; num_chunks None: the fastest."""
        found: dict[str, Dispatched] = {}
        for d in self.dispatches:
            if d.tokens == tokens and num_chunks in (None, d.num_chunks):
                found[d.recipe] = min(found.get(d.recipe, d), d, key=lambda d: d.us)
        return found

    def _bytes(self) -> Iterator[Figure]:
        found = self._at(max((d.tokens for d in self.dispatches), default=0))
        for recipe, target in (("BF16", _BYTES_BF16), ("FP8", _BYTES_FP8)):
            if {recipe, "MXFP4"} <= found.keys() and found["MXFP4"].bytes_to_others:
                value = found[recipe].bytes_to_others / found["MXFP4"].bytes_to_others
                yield Figure(f"bytes on the wire, {recipe} / MXFP4", None, value, target)

    def _dispatch(self) -> Iterator[Figure]:
        for tokens in dict.fromkeys(d.tokens for d in self.dispatches):
            for num_chunks, how in ((1, ""), (None, ", each in its best number of chunks")):
                found = self._at(tokens, num_chunks)
                for recipe, target in (("BF16", _DISPATCH_BF16), ("FP8", _DISPATCH_FP8)):
                    if {recipe, "MXFP4"} <= found.keys():
                        name = f"dispatch with quantize and convert, {tokens} tokens{how}, {recipe} / MXFP4"
                        has_target = tokens == _TARGET_TOKENS and num_chunks == 1
                        value = found[recipe].us / found["MXFP4"].us
                        yield Figure(name, None, value, target if has_target else None)

    def _step(self) -> Iterator[Figure]:
        for tokens in dict.fromkeys(s.tokens for s in self.steps):
            found = {s.recipe: s for s in self.steps if s.tokens == tokens}
            for recipe, target in (("BF16", _STEP_BF16), ("FP8", None)):
                if {recipe, "MXFP4"} <= found.keys():
                    ours = found["MXFP4"]
                    yield Figure(
                        f"layer forward + backward, {tokens} tokens, {recipe} / MXFP4",
                        None,
                        found[recipe].us / ours.us,
                        target if tokens == _TARGET_TOKENS else None,
                    )
                    if ours.peak_bytes:
                        value = ours.peak_bytes / found[recipe].peak_bytes
                        yield Figure(
                            f"layer's peak memory above weights, {tokens} tokens, MXFP4 / {recipe}", None, value
                        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ok": self.ok,
            "provenance": self.provenance,
            "seconds": round(self.seconds, 1),
            "shape": self.shape,
            "ranks": self.num_ranks,
            "plan_us": {str(tokens): _rounded(us) for tokens, us in self.plan_us.items()},
            "checks": [asdict(c) for c in self.checks],
            "dispatch": [_json(d) for d in self.dispatches],
            "layer": [_json(s) for s in self.steps],
            "figures": [f.to_json() for f in self.figures],
            "problems": [{"case": case, "message": message} for case, message in self.problems],
            "notes": self.notes,
        }


def _json(record: Dispatched | LayerStep) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in asdict(record).items()}


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return float(f"{x:.6g}") if isinstance(x, float) else x
