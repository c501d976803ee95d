"""Runs that take a second: two small layers, short windows of a text that is easy to learn."""

import signal
from pathlib import Path

import numpy as np

from mxsim.train.config import TrainConfig
from mxsim.train.corpus import Corpus
from mxsim.train.loop import train
from mxsim.train.run_folder import read_log

SMALL = [
    "sequence_length=32",
    "batch_size=4",
    "num_experts=4",
    "learning_rate=0.01",
    "warmup_steps=2",
    "eval_sequences=4",
    "log_every=2",
    "eval_every=0",
    "diagnose_every=4",
    "diagnose_tokens=32",
    "checkpoint_every=0",
]


def small(recipe: str = "mxfp4", *fields: str, steps: int = 12) -> TrainConfig:
    return TrainConfig(recipe=recipe, steps=steps).with_fields([*SMALL, *fields])


def words(num_bytes: int, seed: int = 0) -> np.ndarray:
    """Words in random order."""
    generator = np.random.default_rng(seed)
    vocabulary = ["the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog.\n"]
    text = "".join(generator.choice(vocabulary, num_bytes // 2))
    return np.frombuffer(text[:num_bytes].encode(), np.uint8).copy()


CORPUS = Corpus("words", words(20_000), words(2_000, seed=1), "0" * 64)


def run(config: TrainConfig, folder: Path, *, interrupt_at: int | None = None, corpus: Corpus = CORPUS, **options):
    """(run.json, rows of the log); interrupt_at: Ctrl-C during that step."""

    def progress(done, to_do, text):
        if done == interrupt_at:
            signal.raise_signal(signal.SIGINT)

    document = train(config, corpus, folder, device=options.pop("device", "cpu"), progress=progress, **options)
    return document, read_log(folder)
