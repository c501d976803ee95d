"""`mxsim train`: a training run, and what came of it in a few lines or as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.progress import progress_bar
from mxsim.commands.words import counted

DIVERGED_STATUS = 1


@dataclass(frozen=True)
class Request:
    """What to train. None: the preset's, or with resume that of the run in the folder."""

    out: Path
    preset: str | None = None
    recipe: str | None = None
    steps: int | None = None
    seed: int | None = None
    fields: Sequence[str] = ()  # name=value
    corpus: Path | None = None
    device: str | None = None
    resume: bool = False


def train(request: Request, *, as_json: bool, console: Console, progress_console: Console) -> int:
    """Train, print what came of it, and return the exit status: 1 if the loss diverged, 128 + n after signal n.

    Raises:
        BadInput: if something in the request cannot be used.
    """
    try:
        from mxsim.train.config import ConfigError
        from mxsim.train.corpus import CorpusError, load_corpus
        from mxsim.train.loop import train as run
        from mxsim.train.run_folder import RunError
    except ImportError as error:
        raise BadInput(f"train needs torch ({error}); install mxsim[train] or torch") from error

    try:
        config = _config(request)
        corpus = load_corpus(request.corpus)
        with progress_bar(progress_console) as update:
            document = run(config, corpus, request.out, device=request.device, resume=request.resume, progress=update)
    except (ConfigError, CorpusError, RunError, ValueError) as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"cannot write into {request.out}: {error.strerror}") from error
    if as_json:
        console.file.write(json.dumps({"out": str(request.out), **document}, indent=2) + "\n")
    else:
        _print(console, request.out, document)
    if document["status"] == "interrupted":
        return 128 + int(document["signal"])
    return DIVERGED_STATUS if document["status"] == "diverged" else 0


def _config(request: Request) -> Any:
    """The configuration that the request means.

    Raises:
        BadInput: for unknown names, or no run to resume.
        ConfigError: for values that no run can have.
        RunError: for a run to resume that cannot be understood.
    """
    from mxsim.train.config import PRESETS
    from mxsim.train.recipes import RECIPES
    from mxsim.train.run_folder import read_config

    (base,) = choose("preset", [request.preset or "tiny"], PRESETS)
    if request.resume and request.preset is None:
        saved = read_config(request.out)
        if saved is None:
            raise BadInput(f"{request.out} holds no run to go on with; with --preset a new one starts there")
        base = saved
    recipe = None if request.recipe is None else choose("recipe", [request.recipe], {name: name for name in RECIPES})[0]
    given: dict[str, Any] = {"recipe": recipe, "steps": request.steps, "seed": request.seed}
    return replace(base, **{name: value for name, value in given.items() if value is not None}).with_fields(
        request.fields
    )


def _print(console: Console, out: Path, document: dict[str, Any]) -> None:
    from mxsim.train.run_folder import FILES

    def show(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    config, corpus = document["config"], document["corpus"]
    what = "Experts and other linears" if config["linears"] == "recipe" else "Experts"
    show(f"{what} in {document['recipe']}")
    steps, tokens = config["steps"], config["steps"] * config["batch_size"] * config["sequence_length"]
    show(
        f"{document['num_parameters']:,} parameters, {document['num_active_parameters']:,} of them active for a token; "
        f"{counted(steps, 'step')}, {tokens:,} tokens (bytes) of the text {corpus['name']}; seed {config['seed']}"
    )
    if document["status"] == "finished":
        num = document["final_steps"]
        show(
            f"{'Last step' if num == 1 else f'Mean of the last {num:,} steps'}: "
            f"training loss {_loss(document['final_train_loss'])}, "
            f"validation loss {_loss(document['final_validation_loss'])}"
        )
        if document["median_tokens_per_s"] is not None:
            speed, device = document["median_tokens_per_s"], document["provenance"]["device"]
            show(f"{speed:,.0f} tokens/s (median) on {device}; {document['seconds']:,.0f} s in all")
    elif document["status"] == "interrupted":
        show(f"Interrupted after step {document['steps_done']:,}; to go on: mxsim train --resume --out {out}")
    else:
        show(f"The loss was no number any more at step {document['steps_done']:,}")
    show(f"Written into {out}: {', '.join(name for name in FILES if (out / name).exists())}")


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} ({loss / math.log(2):.4f} bits a byte)"
