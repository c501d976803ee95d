"""What each recipe does to the gradients of a trained model: same weights, same tokens, against FP32.

    mxsim train --preset h200 --recipe bf16 --set checkpoint_every=1600 --corpus FILE --out RUN
    python benchmarks/gradient_error.py --checkpoint RUN --corpus FILE --json OUT

The tokens are those of the training batch after the checkpoint's last step (more than a batch: of the steps after it),
and of as many steps after those for the row "another batch", the noise of the data. `mxsim.train.gradients` says what
the figures are.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mxsim.commands.bad_input import BadInput, choose
from mxsim.commands.output_files import OutputFiles
from mxsim.commands.progress import progress_bar
from mxsim.commands.tables import Column, print_table
from mxsim.provenance import package_provenance
from mxsim.train.corpus import load_corpus
from mxsim.train.data import Windows
from mxsim.train.gradients import FP32, Choices, GradientError, Group, gradient_errors, second_moments_of
from mxsim.train.loop import choose_device
from mxsim.train.recipes import RECIPES
from mxsim.train.run_folder import CHECKPOINT, load_checkpoint, read_config


def batches(windows: Windows, first_step: int, num_sequences: int, batch_size: int) -> tuple[np.ndarray, list[int]]:
    """So many sequences from the batches of a step and of those after it, and the steps."""
    steps = list(range(first_step, first_step + -(-num_sequences // batch_size)))
    return np.concatenate([windows.batch(step) for step in steps])[:num_sequences], steps


def measure(arguments: argparse.Namespace, progress_console: Console) -> dict[str, Any]:
    """The document to write.

    Raises:
        BadInput, ValueError: for arguments that cannot be used.
    """
    started = time.perf_counter()
    names = choose("recipe", arguments.recipes, {name: name for name in RECIPES})
    device = choose_device(arguments.device)
    config = read_config(arguments.checkpoint)
    if config is None:
        raise BadInput(f"{arguments.checkpoint} holds no run; mxsim train --out makes one")
    corpus = load_corpus(arguments.corpus)
    windows = Windows(corpus, config)
    state = load_checkpoint(arguments.checkpoint, device, config, corpus.sha256)
    if state is None:
        raise BadInput(
            f"{arguments.checkpoint} holds no {CHECKPOINT}; mxsim train writes one where checkpoint_every is not 0"
        )
    step, weights, second_moments = state["step"], state["model"], second_moments_of(config, state)
    del state  # the optimizer's is larger than the weights
    num_tokens = config.tokens_per_step if arguments.tokens is None else arguments.tokens
    if not 1 <= num_tokens <= corpus.train.size:
        raise BadInput(f"--tokens is {num_tokens}, needed 1 to {corpus.train.size}, the training text's")
    num_sequences = -(-num_tokens // config.sequence_length)
    tokens, steps = batches(windows, step + 1, num_sequences, config.batch_size)
    others, other_steps = batches(windows, steps[-1] + 1, num_sequences, config.batch_size)
    with progress_bar(progress_console) as update:
        rows = gradient_errors(
            config,
            weights,
            tokens,
            names,
            reference=arguments.reference,
            other_tokens_BS1=others,
            second_moments=second_moments,
            num_draws=arguments.draws,
            device=device,
            progress=update,
        )
    return {
        "provenance": package_provenance(device),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "config": asdict(config),
        "checkpoint_step": step,
        "reference": arguments.reference,
        "num_tokens": num_sequences * config.sequence_length,
        "steps": steps,
        "other_steps": other_steps,
        "num_draws": arguments.draws,
        "recipes": {name: str(RECIPES[name]) for name in names},
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }


def to_json(document: dict[str, Any]) -> str:
    """A line for each row; null for what is no number."""
    rows = ",\n".join(f"    {json.dumps(_cells(row), allow_nan=False)}" for row in document["rows"])
    head = json.dumps(document | {"rows": []}, indent=2, allow_nan=False)
    return head.removesuffix("[]\n}") + f"[\n{rows}\n  ]\n}}\n"


def _cells(row: GradientError) -> dict[str, Any]:
    cells = asdict(row).items()
    return {key: None if isinstance(cell, float) and not math.isfinite(cell) else cell for key, cell in cells}


def print_tables(console: Console, document: dict[str, Any]) -> None:
    """All parameters under both kinds of choices, then the relative error by group."""
    rows: Sequence[GradientError] = document["rows"]
    places = {(row.recipe, row.num_averaged, row.choices, row.group): row for row in rows if row.layer is None}
    names = list(dict.fromkeys((recipe, num_averaged) for recipe, num_averaged, *_ in places))

    lines = []
    for name in names:
        own = places[*name, Choices.OWN, Group.ALL]
        fixed = places.get((*name, Choices.REFERENCE, Group.ALL))
        lines.append(
            [
                *_label(*name),
                _percent(own.relative_error),
                _percent(own.preconditioned_error),
                f"{own.cosine:.5f}",
                _signed(own.bias),
                _percent(own.differing_choices),
                *(["", ""] if fixed is None else [_percent(fixed.relative_error), _signed(fixed.bias)]),
            ]
        )
    print_table(
        console,
        f"Gradient of all parameters against {document['reference']}, in %: {document['num_tokens']:,} tokens after "
        f"step {document['checkpoint_step']:,}",
        [*_LABELS, *(Column(name) for name in ("error", "AdamW's", "cosine", "bias", "other", "error*", "bias*"))],
        lines,
        note="error: |g - r| / |r|; AdamW's: of the steps that AdamW makes of g and r\n"
        "bias: <g, r> / |r|^2 - 1; of: draws that are averaged\n"
        "other: choices of experts that are not the reference's; *: with its choices",
    )
    groups = [group for group in Group if any(row.group is group for row in rows)]
    print_table(
        console,
        "Error by group of parameters, in %, with the recipe's own choices (w1, w2: of routed experts)",
        [
            *_LABELS,
            *(
                Column(group.value.removeprefix("routed "), is_optional=group in (Group.EMBEDDING, Group.NORMS))
                for group in groups
            ),
        ],
        [
            [*_label(*name), *(_percent(places[*name, Choices.OWN, group].relative_error) for group in groups)]
            for name in names
        ],
    )


_LABELS = (Column("recipe", "left"), Column("of"))


def _label(recipe: str, num_averaged: int) -> list[str]:
    return [recipe, "" if num_averaged == 1 else str(num_averaged)]


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.2f}"


def _signed(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:+.3f}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="of a run of mxsim train")
    parser.add_argument("--corpus", type=Path, help="what the run was trained on; default: the text in mxsim")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument("--tokens", type=int, help="rounded up to whole sequences; default: a batch of the run")
    parser.add_argument("--draws", type=int, default=8, help="of recipes that round stochastically (%(default)s)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="RECIPE", help="default: all")
    parser.add_argument("--reference", default=FP32, help="%(default)s, or a recipe")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is a device")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    console = Console()
    try:
        with OutputFiles() as outputs:
            target = None if arguments.json is None else outputs.reserve(arguments.json)
            document = measure(arguments, Console(stderr=True))
            if target is not None:
                target.write_text(to_json(document), encoding="utf-8")
    except (BadInput, ValueError) as error:
        print(f"gradient_error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gradient_error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print_tables(console, document)


if __name__ == "__main__":
    main()
