"""One run: memory first, then for every routing the results checked, what is kept, the step timed, and its parts."""

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mxsim.bench.moe import figures
from mxsim.bench.moe.figures import Figure
from mxsim.bench.moe.fused_fp8 import Fused, Unavailable, fused_kernels, same_bits
from mxsim.bench.moe.layer import Layer, check_against_bf16, saved_activations
from mxsim.bench.moe.memory import measure_peak
from mxsim.bench.moe.parts import Part, Weights, dense_parts, parts_of_layer
from mxsim.bench.moe.report import MoeReport, PartTime, RoutingReport, Step
from mxsim.bench.moe.workload import FULL, TINY, LayerShape, Routing, Tokens, make_tokens, make_weights
from mxsim.bench.runner import Progress, Steps, checked_device, one_line, recording
from mxsim.bench.timing import Timing, cache_bytes, calls_on_copies, host_and_wall_us, time_in_turn
from mxsim.kernels.layouts import FP8_BLOCK
from mxsim.moe import Recipe, permute
from mxsim.provenance import layer_provenance

_RECIPES = (Recipe.BF16, Recipe.FP8, Recipe.MXFP4)
_MAX_WAIT_CYCLES = 400_000_000  # of the device for a step to be enqueued: about 0.2 s
_IN_PARTS = (Routing.BALANCED, Routing.SKEWED)


@dataclass(frozen=True)
class Effort:
    """How much of everything."""

    num_steps: int
    num_samples: int
    num_layers: int  # of the stack whose memory is measured


_ON_CUDA, _ON_CPU = Effort(15, 9, 4), Effort(2, 2, 2)


def run(
    device: str | torch.device = "cuda",
    *,
    shape: LayerShape | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> MoeReport:
    """Check and time the expert layer in BF16, FP8 and MXFP4.

    Args:
        device: "cuda", "cuda:1", "cpu".
        shape: None: `FULL` on a CUDA device, `TINY` on the CPU.
        effort: None: for minutes on a CUDA device, for seconds on the CPU.
        progress: called before each step.

    Raises:
        ValueError: for a device that is not there.
    """
    started = time.perf_counter()
    where = checked_device(device)
    on_cuda = where.type == "cuda"
    shape, effort = shape or (FULL if on_cuda else TINY), effort or (_ON_CUDA if on_cuda else _ON_CPU)
    report = MoeReport(layer_provenance(where), shape)
    stacks = (1, effort.num_layers)
    steps = Steps(progress, len(_RECIPES) * len(stacks) + 1 + len(Routing) * 2 + len(_IN_PARTS))
    for num_layers in stacks:
        for recipe in _RECIPES:
            steps.next(f"memory, {num_layers} layer{'s' if num_layers > 1 else ''}, {recipe.name}")
            with recording(report.problems, f"memory of {num_layers} layers in {recipe.name}"):
                peak = measure_peak(recipe, shape, num_layers, where)
                report.peaks += [peak] if peak else []
            _release(where)
    if on_cuda:
        report.notes.append("Group sizes lie on the host, as a dispatch leaves them: the layer waits for nothing.")
    else:
        report.notes.append("Peak memory is counted on CUDA devices alone.")
    steps.next("one-read FP8")
    fused = _fused(where, shape, report)

    bench = _Bench(where, shape, effort, report)
    for routing in Routing:
        steps.next(f"check, {routing.value}")
        tokens = make_tokens(routing, shape, where)
        found = RoutingReport(routing, tokens.groups.sizes)
        report.routings.append(found)
        with recording(report.problems, f"results, {routing.value}"):
            bench.check(tokens, found)
        steps.next(f"step, {routing.value}")
        with recording(report.problems, f"step, {routing.value}"):
            bench.time_steps(tokens, found)
        if routing in _IN_PARTS:
            steps.next(f"parts, {routing.value}")
            with recording(report.problems, f"parts, {routing.value}"):
                bench.time_parts(tokens, found, fused)
        del tokens
        _release(where)
    report.figures.sort(key=lambda figure: figure.target is None)
    report.seconds = time.perf_counter() - started
    return report


class _Bench:
    """One set of weights on one device, in every recipe."""

    def __init__(self, device: torch.device, shape: LayerShape, effort: Effort, report: MoeReport) -> None:
        self.device, self.shape, self.effort, self.report = device, shape, effort, report
        self._cache_bytes = cache_bytes(device)
        w1, w2 = make_weights(shape, device)
        self.layers = [Layer(recipe, shape, (w1, w2)) for recipe in _RECIPES]
        self.layers += [Layer(recipe, shape, (w1, w2), weights_inside=True) for recipe in _RECIPES[1:]]
        self.weights = Weights.of(w1, w2)
        self._usable = list(self.layers)

    def check(self, tokens: Tokens, found: RoutingReport) -> None:
        """Results near BF16's, or the layer is timed no more; then what each recipe keeps."""
        bf16 = self.layers[0].step(tokens)
        for layer in self.layers[1:]:
            check = check_against_bf16(layer, layer.step(tokens), bf16)
            found.checks.append(check)
            if check.problem:
                self.report.problems.append((f"{layer.name}, {found.routing.value}", check.problem))
                self._usable = [kept for kept in self._usable if kept is not layer]
        del bf16
        for layer in self.layers[: len(_RECIPES)]:
            found.saved[layer.recipe.name] = saved_activations(layer, tokens)
        self._add(figures.saved_figures(found.routing, found.saved_bytes()))

    def time_steps(self, tokens: Tokens, found: RoutingReport) -> None:
        """Every layer's forward + backward."""
        works = [[lambda layer=layer: layer.step(tokens)] for layer in self._usable]
        timings = time_in_turn(works, self.device, self.effort.num_steps, _MAX_WAIT_CYCLES)
        for layer, (step,), timing in zip(self._usable, works, timings, strict=True):
            host_and_wall: tuple[float, ...] = ()
            if self.device.type == "cuda":
                host_and_wall = host_and_wall_us(step, self.device, self.effort.num_steps // 2 + 1)
            found.steps.append(Step(layer.name, timing, *host_and_wall))
        if len(self._usable) == len(self.layers):
            self._add(figures.step_figures(found.routing, {s.name: s.timing for s in found.steps}))

    def time_parts(self, tokens: Tokens, found: RoutingReport, fused: dict[int, Fused]) -> None:
        """Parts, with the dense ones between them where the routing is balanced."""
        parts = parts_of_layer(self.shape, tokens, self.weights)
        dense = []
        if found.routing is Routing.BALANCED:
            dense = list(dense_parts(self.shape, tokens, self.weights, fused))
        times = self._time([*parts, *dense])
        found.parts, more = times[: len(parts)], times[len(parts) :]
        self.report.dense += more
        by_key: dict[str, Timing] = {p.key: p.timing for p in (*found.parts, *self.report.dense)}
        self._add(figures.grouped_figures(found.routing, by_key))
        if more:
            self._add(figures.dense_figures(by_key))
        flops = next(p.flops for p in self.report.dense if p.key == "dense.gemm.fp8")
        self._add(figures.gemm_figures(found.routing, parts, by_key, by_key, flops))

    @torch.no_grad()
    def _time(self, parts: Sequence[Part]) -> list[PartTime]:
        sizes = [part.num_bytes() for part in parts]
        works, in_cache = zip(
            *(calls_on_copies(p.run, p.inputs, size, self._cache_bytes) for p, size in zip(parts, sizes, strict=True)),
            strict=True,
        )
        timings = time_in_turn(works, self.device, self.effort.num_samples, _MAX_WAIT_CYCLES)
        return [
            PartTime(p.key, p.kind, tuple(r.name for r in p.recipes), p.name, timing, size, p.flops, is_in_cache)
            for p, timing, size, is_in_cache in zip(parts, timings, sizes, in_cache, strict=True)
        ]

    def _add(self, found: Iterable[Figure]) -> None:
        """Figures, with targets only where these are stated: on a CUDA device at the full shape."""
        has_targets = self.device.type == "cuda" and self.shape == FULL
        self.report.figures += (f if has_targets else replace(f, target=None) for f in found)


def _fused(device: torch.device, shape: LayerShape, report: MoeReport) -> dict[int, Fused]:
    """The one-read kernels, or none with a note of the reason."""
    reason = ""
    try:
        if shape.rows % FP8_BLOCK:
            raise Unavailable(f"{shape.rows} rows are no multiple of {FP8_BLOCK}")
        fused = fused_kernels(device)
        tokens = make_tokens(Routing.BALANCED, shape, device)
        x = permute(tokens.x_TH.detach(), tokens.permutation)
        if all(same_bits(kernel, x) for kernel in fused.values()):
            report.notes.append("One-read FP8: the fastest number of warps, the rows as one matrix, its bits compared.")
            return fused
        reason = "its bits differ from bf16_to_fp8_row's and bf16_to_fp8_col's"
    except Unavailable as error:
        reason = str(error)
    except Exception as error:  # whatever a compiler raises
        reason = one_line(error)
    report.notes.append(f"One-read FP8 is not beside it: {reason}.")
    return {}


def _release(device: torch.device) -> None:
    """Give the memory of one phase back before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
