"""Training from the first step to the last: the same bits each time, also when it was interrupted in between."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mxsim.provenance import package_provenance
from mxsim.train import run_folder
from mxsim.train.config import TrainConfig
from mxsim.train.corpus import Corpus
from mxsim.train.data import Windows
from mxsim.train.diagnostics import diagnose
from mxsim.train.interruption import Interruption
from mxsim.train.model import LanguageModel
from mxsim.train.run_folder import LogRow, RunError, RunFolder

Progress = Callable[[int, int, str], object]  # steps done, steps, what to show

_FINAL_SHARE = 20  # the last 5 % of the steps are what runs are compared by


def train(
    config: TrainConfig,
    corpus: Corpus,
    folder: Path,
    *,
    device: str | torch.device | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train, or go on from a checkpoint, and write the files of `run_folder`.

    The run is a function of configuration, corpus, machine and versions: data order, initial weights and stochastic
    rounding follow from the seed. Torch is set to deterministic algorithms meanwhile. SIGINT and SIGTERM end it after
    the step, with a checkpoint. A loss that is no number ends it, too.

    Args:
        device: None is CUDA where there is a device.
        resume: go on from the folder's checkpoint; without one, start again.

    Returns:
        What run.json holds; "status" is finished, interrupted or diverged, "signal" the number of what interrupted it.

    Raises:
        RunError: if the folder holds a run and resume is False, or another run than this, or cannot be written.
        ConfigError: if the corpus is too short for the sequence length.
        ValueError: if the device is none.
    """
    started = time.perf_counter()
    device = choose_device(device)
    if run_folder.exists(folder) and not resume:
        raise RunError(f"{folder} holds a run already, needed --resume to go on, or another folder")
    windows = Windows(corpus, config)

    with deterministic(config), Interruption() as interruption:
        torch.manual_seed(config.seed)
        model = LanguageModel(config, device)
        optimizer = adamw(model, config)
        first, losses, seconds_before = 0, [], 0.0
        state = run_folder.load_checkpoint(folder, device, config, corpus.sha256) if resume else None
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random_state"].cpu())
            first, losses, seconds_before = state["step"], [*state["losses"]], state["seconds"]
        run = RunFolder(folder, first=None if state is None else first)
        document = _document(config, corpus, model, device, run_folder.read_run(folder) if first else None, first)
        run.write_run(document)

        def seconds() -> float:
            return seconds_before + time.perf_counter() - started

        def checkpoint(step: int) -> None:
            run.save(
                {
                    "config": asdict(config),
                    "corpus_sha256": corpus.sha256,
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random_state": torch.get_rng_state(),
                    "losses": torch.stack(losses) if losses else torch.empty(0),
                    "seconds": seconds(),
                }
            )

        status, step, shown = "finished", first, ""
        evaluated, logged = _eval_steps(config), _log_steps(config)
        timed_steps, timed_from = 0, time.perf_counter()
        with closing(run):
            for step in range(first + 1, config.steps + 1):
                # 1. One step of the optimizer.
                tokens = _to_device(windows.batch(step), device)
                loss = model.loss(tokens)
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                learning_rate = _learning_rate(step, config)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
                optimizer.zero_grad()
                max_load = model.update_router_biases()
                losses.append(loss.detach())
                timed_steps += 1

                # 2. What is measured and kept.
                if step in logged:
                    losses_of_row = torch.stack(losses).tolist()  # waits for the device
                    losses.clear()
                    tokens_per_s = timed_steps * config.tokens_per_step / (time.perf_counter() - timed_from)
                    row = LogRow(
                        step=step,
                        tokens=step * config.tokens_per_step,
                        train_loss=math.fsum(losses_of_row) / len(losses_of_row),
                        validation_loss=evaluate(model, windows, device) if step in evaluated else math.nan,
                        grad_norm=float(grad_norm),
                        learning_rate=learning_rate,
                        max_load=float(max_load),
                        tokens_per_s=tokens_per_s,
                        seconds=seconds(),
                    )
                    run.log(row)
                    shown = f"loss {row.train_loss:.3f}, {tokens_per_s:,.0f} tokens/s"
                is_diagnosed = config.diagnose_every and (step % config.diagnose_every == 0 or step == config.steps)
                if is_diagnosed:
                    sequences = -(-config.diagnose_tokens // config.sequence_length)
                    run.diagnose(step, diagnose(model, tokens[:sequences, :-1]))
                if progress is not None:
                    progress(step, config.steps, shown)
                if step in logged and not math.isfinite(row.train_loss):
                    status = "diverged"
                    break
                is_due = config.checkpoint_every and (step % config.checkpoint_every == 0 or step == config.steps)
                if is_due or interruption.signal is not None:
                    checkpoint(step)
                if interruption.signal is not None:
                    status = "finished" if step == config.steps else "interrupted"
                    break
                if step in logged or is_due or is_diagnosed:
                    timed_steps, timed_from = 0, time.perf_counter()

        document |= {"status": status, "steps_done": step, **_results(folder, config)}
        if status == "interrupted":
            document["signal"] = interruption.signal
        run.write_run(document)
    return document


@torch.no_grad()
def evaluate(model: LanguageModel, windows: Windows, device: torch.device) -> float:
    """Mean loss on the held-out windows. Leaves torch's random numbers as they were."""
    random_state = torch.get_rng_state()
    model.prepare_weights()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tokens in windows.held_out():
        total += model.loss(_to_device(tokens, device)).double() * len(tokens)
    torch.set_rng_state(random_state)
    return float(total) / windows.num_held_out


def choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, needed cpu or cuda") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, needed cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and there is no CUDA device")
    return chosen


@contextmanager
def deterministic(config: TrainConfig) -> Iterator[None]:
    """Torch's deterministic algorithms, without filling every new tensor, which takes time and changes no result."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if config.compile:
        from torch._inductor import config as inductor

        inductor.deterministic = True  # no choice of kernels by their time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling


def adamw(model: LanguageModel, config: TrainConfig) -> torch.optim.Optimizer:
    """Norms do not decay."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def _learning_rate(step: int, config: TrainConfig) -> float:
    """Linear from 0 over the warm-up, then half a cosine from the peak to its final share at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    share = config.final_learning_rate + (1 - config.final_learning_rate) * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * share


def _num_final_steps(config: TrainConfig) -> int:
    return max(1, config.steps // _FINAL_SHARE)


def _eval_steps(config: TrainConfig) -> set[int]:
    regular = range(config.eval_every, config.steps + 1, config.eval_every) if config.eval_every else ()
    final = _num_final_steps(config)
    return {*regular, *(config.steps - final * i // config.final_evals for i in range(config.final_evals))}


def _log_steps(config: TrainConfig) -> set[int]:
    """Also where the last 5 % begin, so that no row belongs to them in part."""
    regular = range(config.log_every, config.steps + 1, config.log_every)
    return {*regular, *_eval_steps(config), config.steps - _num_final_steps(config), config.steps}


def _to_device(tokens: np.ndarray, device: torch.device) -> Tensor:
    on_host = torch.from_numpy(np.ascontiguousarray(tokens))
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True).long()


def _document(
    config: TrainConfig,
    corpus: Corpus,
    model: LanguageModel,
    device: torch.device,
    before: dict[str, Any] | None,
    first: int,
) -> dict[str, Any]:
    """run.json of a run that has begun; before: what it said when the run was interrupted."""
    resumed = [*before.get("resumed_at", []), first] if before is not None else []
    return {
        "status": "running",
        "config": asdict(config),
        "recipe": str(config.expert_recipe),
        "linears": str(config.linear_recipe),
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "train_bytes": corpus.train.size,
            "validation_bytes": corpus.validation.size,
        },
        "num_parameters": model.num_parameters(),
        "num_active_parameters": model.num_active_parameters(),
        "provenance": package_provenance(device),
        **({"resumed_at": resumed} if resumed else {}),
    }


def _results(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """Means over the last 5 % of the steps; None where there is none yet."""
    rows = run_folder.read_log(folder)
    last_step = config.steps - _num_final_steps(config)
    pairs = list(zip([0, *(row.step for row in rows)], rows, strict=False))
    final = [(row.step - before, row.train_loss) for before, row in pairs if before >= last_step]
    validation = [row.validation_loss for row in rows if row.step > last_step and not math.isnan(row.validation_loss)]
    speeds = sorted(row.tokens_per_s for row in rows)
    return {
        "final_steps": _num_final_steps(config),
        "final_train_loss": sum(n * loss for n, loss in final) / sum(n for n, _ in final) if final else None,
        "final_validation_loss": math.fsum(validation) / len(validation) if validation else None,
        "median_tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "seconds": rows[-1].seconds if rows else None,
    }
