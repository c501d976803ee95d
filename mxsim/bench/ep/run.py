"""One run: processes are started, check the layer's bits, and time the dispatch and the layer together."""

import gc
import queue as queues
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mxsim.bench.ep.check import check
from mxsim.bench.ep.clock import time_in_turn, wall_us
from mxsim.bench.ep.dispatched import PARTS, encoder, parts_of_dispatch, whole_dispatch
from mxsim.bench.ep.report import Dispatched, EpReport, LayerStep
from mxsim.bench.ep.workload import FULL, ROUTING, TINY, EpShape, balanced_ids, random_rows
from mxsim.bench.runner import Progress, checked_device
from mxsim.moe import ExpertParallel, Recipe
from mxsim.moe.dispatch import Route, row_bytes
from mxsim.provenance import layer_provenance

_RECIPES = (Recipe.BF16, Recipe.FP8, Recipe.MXFP4)
_TIMEOUT = timedelta(seconds=120)
_SAMPLES = {"cuda": (15, 7), "cpu": (3, 2)}  # of a dispatch, of a layer's step


def run(
    device: str | torch.device = "cuda",
    *,
    num_ranks: int | None = None,
    shape: EpShape | None = None,
    progress: Progress | None = None,
) -> EpReport:
    """Check and time expert parallelism in BF16, FP8 and MXFP4, a process for each rank: NCCL on GPUs, gloo on the CPU.

    Args:
        device: "cuda": a GPU for each rank; or "cpu".
        num_ranks: None: as many as there are GPUs, two on the CPU.
        shape: None: `FULL` on GPUs, `TINY` on the CPU.
        progress: called before each step.

    Raises:
        ValueError: for a device that is not there, fewer than two ranks, more ranks than GPUs, or ranks that do not
            divide the experts.
        RuntimeError: if a process fails.
    """
    started = time.perf_counter()
    where = checked_device(device)
    available = torch.cuda.device_count() if where.type == "cuda" else None
    num_ranks = num_ranks or available or 2
    if num_ranks < 2:
        raise ValueError(f"bench ep: {num_ranks} rank, needed 2 or more" + (", a GPU for each" if available else ""))
    if available is not None and num_ranks > available:
        raise ValueError(f"bench ep: {num_ranks} ranks, but torch sees {available} CUDA devices")
    shape = shape or (FULL if where.type == "cuda" else TINY)
    if shape.num_experts % num_ranks:
        raise ValueError(f"bench ep: {num_ranks} ranks do not divide {shape.num_experts} experts")
    report = EpReport(_provenance(where, num_ranks), str(shape), num_ranks, where.type == "cuda" and shape == FULL)
    report.notes.append(ROUTING)
    with tempfile.TemporaryDirectory() as folder:
        steps = mp.get_context("spawn").Queue()
        context = mp.spawn(
            _rank, (num_ranks, where.type, shape, folder, _free_port(), steps), nprocs=num_ranks, join=False
        )
        total = 1 + 2 * len(shape.tokens)
        done = 0
        try:
            while not context.join(timeout=0.2):
                while progress and (text := _next(steps)) is not None:
                    progress(text, done, total)
                    done += 1
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RuntimeError(f"bench ep: {str(error).strip().splitlines()[-1]}") from error
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    report.plan_us, report.checks, report.dispatches, report.steps = found
    if not report.ok:
        report.notes.append("A recipe whose results are wrong is not timed.")
    if where.type != "cuda":
        report.notes.append("Peak memory is counted on CUDA devices alone.")
    report.seconds = time.perf_counter() - started
    return report


def _rank(rank: int, num_ranks: int, kind: str, shape: EpShape, folder: str, port: int, steps: Any) -> None:
    """One process; the first leaves what all found."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
    )
    tell = steps.put if rank == 0 else (lambda text: None)
    tell("check")
    checks = [check(recipe, num_chunks, device) for recipe in _RECIPES for num_chunks in shape.num_chunks]
    plan_us: dict[int, float] = {}
    dispatches: list[Dispatched] = []
    layer_steps: list[LayerStep] = []
    recipes = [recipe for recipe in _RECIPES if not any(c.problem for c in checks if c.recipe == recipe.name)]
    if recipes:
        for tokens in shape.tokens:
            tell(f"dispatch, {tokens} tokens")
            with torch.no_grad():
                dispatches += _dispatches(shape, recipes, tokens, rank, device)
            ids = balanced_ids(shape, tokens, rank, device)
            plan_us[tokens], *_ = wall_us(lambda ids=ids: Route.plan(ids, shape.num_experts), device, 7)
            _release(device)
        torch.manual_seed(0)
        layer = ExpertParallel(
            shape.hidden,
            shape.intermediate,
            shape.num_experts,
            shape.top_k,
            num_shared_experts=shape.num_shared,
            device=device,
            dtype=torch.bfloat16,
        )
        for tokens in shape.tokens:
            tell(f"layer, {tokens} tokens")
            x, dy = (random_rows(tokens, shape.hidden, rank, device, seed) for seed in (0, 1))
            layer_steps += [_step(layer, recipe, x.requires_grad_(), dy, device) for recipe in recipes]
            del x, dy
            _release(device)
    if rank == 0:
        torch.save((plan_us, checks, dispatches, layer_steps), Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _dispatches(
    shape: EpShape, recipes: Sequence[Recipe], tokens: int, rank: int, device: torch.device
) -> Iterator[Dispatched]:
    x = random_rows(tokens, shape.hidden, rank, device)
    ids = balanced_ids(shape, tokens, rank, device)
    routes = {c: Route.plan(ids, shape.num_experts, num_chunks=c) for c in shape.num_chunks}
    cases = [(recipe, num_chunks) for recipe in recipes for num_chunks in shape.num_chunks]
    works = [
        parts_of_dispatch(x, routes[c], recipe) if c == 1 else whole_dispatch(x, routes[c], recipe)
        for recipe, c in cases
    ]
    times = time_in_turn(works, device, _SAMPLES[device.type][0])
    for (recipe, num_chunks), taken in zip(cases, times, strict=True):
        size = row_bytes(encoder(x, recipe)(slice(0, 1)))
        yield Dispatched(
            tokens,
            recipe.name,
            num_chunks,
            size,
            size * _most(routes[num_chunks].rows_to_others()),
            taken.us,
            taken.min_us,
            taken.max_us,
            taken.num_samples,
            taken.is_queue_full,
            dict(zip(PARTS, taken.parts, strict=True)) if num_chunks == 1 else {},
        )


def _step(layer: ExpertParallel, recipe: Recipe, x: Tensor, dy: Tensor, device: torch.device) -> LayerStep:
    """In a recipe that the layer is turned to; its FP8 weights are made before."""
    for part in (layer, layer.experts, layer.shared):
        if part is not None:
            part.recipe = recipe
    for experts in (layer.experts, layer.shared):
        if experts is not None:
            experts.fp8_weights.clear()
    layer.prepare_weights()
    parameters = list(layer.parameters())

    def step() -> None:
        torch.autograd.grad(layer(x), [x, *parameters], dy)

    step()
    kept = peak = in_all = 0
    if device.type == "cuda":
        _release(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = layer(x)
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(y, [x, *parameters], dy)
        del y
        in_all = torch.cuda.max_memory_allocated()
        peak = in_all - before
    num_samples = _SAMPLES[device.type][1]
    us = wall_us(step, device, num_samples)
    return LayerStep(len(x), recipe.name, *us, num_samples, _most(kept), _most(peak), _most(in_all))


def _most(n: int) -> int:
    """Of any rank."""
    everybodys: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everybodys, n)
    return max(everybodys)


def _next(steps: Any) -> str | None:
    try:
        text: str = steps.get_nowait()
        return text
    except queues.Empty:
        return None


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _provenance(device: torch.device, num_ranks: int) -> dict[str, Any]:
    found = layer_provenance(device)
    found["device"] = f"{num_ranks} x {found['device']}" if device.type == "cuda" else found["device"]
    backend = "gloo"
    if device.type == "cuda":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return {**found, "backend": backend}


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
