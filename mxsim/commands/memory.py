"""`mxsim memory`: the memory estimate of a training run as tables, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.tables import Column, print_table
from mxsim.commands.words import counted
from mxsim.moe.memory import (
    ATTENTION,
    MODELS,
    Assumptions,
    Module,
    Run,
    Scope,
    StageMemory,
    Verdict,
    fastest_that_fits,
    judge,
    token_time,
)
from mxsim.moe.recipe import Recipe

_RECIPES = {recipe.name: recipe for recipe in (Recipe.BF16, Recipe.FP8, Recipe.MXFP4)}
_SCOPES: dict[str, Scope] = {
    **{module.value: frozenset({module}) for module in Module},
    "attention": ATTENTION,
    "all": frozenset(Module),
    "none": frozenset(),
}
_PARTS = {
    "activations": "activations kept",
    "working": "one layer's backward pass",
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "fp8_weights": "FP8 copies of weights",
}


@dataclass(frozen=True)
class Request:
    """The command's options, as they came."""

    model: str
    recipe: str
    recompute: Sequence[str]
    pipeline: int
    expert_parallel: int
    num_gpus: int
    sequence: int
    micro_batch: int
    gpu_gb: float


def memory(request: Request, *, as_json: bool, console: Console) -> None:
    """Estimate and print.

    Raises:
        BadInput: if an option cannot be used.
    """
    (model,) = choose("model", [request.model], MODELS)
    (recipe,) = choose("recipe", [request.recipe], _RECIPES)
    scope = frozenset[Module]().union(*choose("module", request.recompute, _SCOPES))
    try:
        assumptions = Assumptions(sequence=request.sequence, micro_batch=request.micro_batch, num_gpus=request.num_gpus)
        run = Run(model, recipe, scope, request.pipeline, request.expert_parallel, assumptions)
        verdict = judge(run, request.gpu_gb)
    except ValueError as error:
        raise BadInput(str(error)) from error
    fitting = {name: fastest_that_fits(replace(run, recipe=r), request.gpu_gb) for name, r in _RECIPES.items()}
    if as_json:
        console.file.write(json.dumps(_to_json(run, verdict, fitting), indent=2) + "\n")
    else:
        _print(console, run, verdict, fitting)


def _scope_text(scope: Scope) -> str:
    names = [module.value for module in Module if module in scope]
    return ", ".join(names) or "nothing"


def _to_json(run: Run, verdict: Verdict, fitting: dict[str, Run | None]) -> dict[str, Any]:
    def tensors(is_dense: bool) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor.name,
                "module": tensor.module.value if tensor.module else None,
                "stored": tensor.stored.name,
                "bytes": tensor.num_bytes,
                "is_kept": not tensor.dropped,
            }
            for tensor in run.layer(is_dense=is_dense)
        ]

    return {
        "model": run.model.name,
        "recipe": run.recipe.name,
        "recompute": [module.value for module in Module if module in run.scope],
        "pipeline": run.pipeline,
        "expert_parallel": run.expert_parallel,
        "gpu_gb": verdict.gpu_gb,
        "limit_bytes": verdict.limit,
        "fits": verdict.fits,
        "worst_stage": verdict.worst.stage,
        "worst_share": verdict.worst_share,
        "mean_share": verdict.mean_share,
        "tokens_per_gpu_per_s": token_time(run).tokens_per_s,
        "token_time": vars(token_time(run)),
        "stages": [vars(stage) | {"total": stage.total} for stage in verdict.stages],
        "moe_layer": tensors(False),
        "dense_layer": tensors(True),
        "fastest_that_fits": {
            name: None if found is None else [module.value for module in Module if module in found.scope]
            for name, found in fitting.items()
        },
        "assumptions": [
            {"name": name, "value": value, "source": source} for name, value, source in run.assumptions.describe()
        ],
    }


def _print(console: Console, run: Run, verdict: Verdict, fitting: dict[str, Run | None]) -> None:
    worst = verdict.worst
    console.print(
        f"{run.model.name}, {run.model.num_parameters / 1e9:.0f} B parameters, in {run.recipe.name} on "
        f"{counted(run.assumptions.num_gpus, 'GPU')}: {counted(run.pipeline, 'stage')}, "
        f"experts over {counted(run.expert_parallel, 'GPU')}",
        style="bold",
        soft_wrap=True,
    )
    console.print(f"Recomputed: {_scope_text(run.scope)}.", soft_wrap=True)
    says = "Fits" if verdict.fits else "Out of memory"
    nominal, reserve = verdict.gpu_gb, run.assumptions.reserve_gb
    console.print(
        f"{says}: {worst.total / 1e9:.1f} GB on the fullest stage, of {verdict.limit / 1e9:.1f} GB (1 GB = 1e9 bytes): "
        f"a GPU sold as {nominal:g} GB has {nominal * run.assumptions.capacity_share:.1f}, of which {reserve:g} are "
        f"reserved. About {token_time(run).tokens_per_s:.0f} tokens per GPU per second.",
        soft_wrap=True,
    )
    _print_parts(console, verdict)
    _print_tensors(console, run, worst)
    _print_fitting(console, run, verdict.gpu_gb, fitting)


def _print_parts(console: Console, verdict: Verdict) -> None:
    worst, stages = verdict.worst, verdict.stages

    def cells(name: str) -> list[str]:
        mean = sum(getattr(stage, name) for stage in stages) / len(stages)
        return [f"{getattr(worst, name) / 1e9:.2f}", f"{mean / 1e9:.2f}"]

    rows = [[label, *cells(name)] for name, label in _PARTS.items()]
    rows.append(["total", *cells("total")])
    of_all = f" of 0 to {len(stages) - 1}" if len(stages) > 1 else ""
    rows.append(
        [f"share of the nominal {verdict.gpu_gb:g} GB", f"{verdict.worst_share:.1%}", f"{verdict.mean_share:.1%}"]
    )
    print_table(
        console,
        "Memory of a GPU at its peak, GB",
        [Column("", "left"), Column(f"stage {worst.stage}, the fullest"), Column("mean of the stages")],
        rows,
        f"Stage {worst.stage}{of_all}: {worst.num_dense_layers} dense and "
        f"{counted(worst.num_moe_layers, 'MoE layer')}, {counted(worst.in_flight, 'micro-batch')} in flight.",
    )


_NUM_LARGEST = 10


def _print_tensors(console: Console, run: Run, worst: StageMemory) -> None:
    is_dense = worst.num_moe_layers == 0
    num_layers = worst.num_dense_layers if is_dense else worst.num_moe_layers
    tensors = sorted(run.layer(is_dense=is_dense), key=lambda tensor: -tensor.num_bytes)
    rows = [
        [
            tensor.name,
            tensor.stored.name,
            f"{tensor.num_bytes / 1e6:.1f}",
            "recomputed" if tensor.dropped else f"{tensor.num_bytes * num_layers * worst.in_flight / 1e9:.2f}",
        ]
        for tensor in tensors[:_NUM_LARGEST]
    ]
    print_table(
        console,
        f"Largest tensors of {'a dense' if is_dense else 'an MoE'} layer",
        [
            Column("", "left"),
            Column("stored in", "left"),
            Column("MB a micro-batch"),
            Column(f"GB on stage {worst.stage}"),
        ],
        rows,
    )


def _print_fitting(console: Console, run: Run, gpu_gb: float, fitting: dict[str, Run | None]) -> None:
    rows = []
    for name, found in fitting.items():
        if found is None:
            rows.append([name, "", "", "nothing fits"])
            continue
        rate, size = token_time(found).tokens_per_s, judge(found, gpu_gb).worst.total
        rows.append([name, f"{rate:.0f}", f"{size / 1e9:.1f}", _scope_text(found.scope)])
    print_table(
        console,
        "The least recomputation, in time, that fits",
        [Column("recipe", "left"), Column("tokens/s"), Column("GB"), Column("recomputed", "left")],
        rows,
        "An estimate; --json lists every assumption with its source.",
    )
