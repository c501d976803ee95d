"""Which windows of the text a step trains on, and which ones are held out to measure with.

B windows of S + 1 tokens: S to read, and S to predict, each one later.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from mxsim.train.config import ConfigError, TrainConfig
from mxsim.train.corpus import Corpus


class Windows:
    """Windows of a corpus for a configuration.

    Raises:
        ConfigError: if a part of the corpus is shorter than a window.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        self._length = config.sequence_length + 1
        self._batch_size, self._seed = config.batch_size, config.seed
        for name, part in (("training", corpus.train), ("validation", corpus.validation)):
            if part.size < self._length:
                raise ConfigError(
                    f"sequence_length is {config.sequence_length}, needed at most {part.size - 1}, as the {name} part "
                    f"of the corpus {corpus.name} has {part.size} tokens"
                )
        self._train = np.lib.stride_tricks.sliding_window_view(corpus.train, self._length)
        starts = np.arange(0, corpus.validation.size - config.sequence_length, config.sequence_length)
        count = min(config.eval_sequences, len(starts))
        held_out = np.lib.stride_tricks.sliding_window_view(corpus.validation, self._length)
        self._held_out = held_out[starts[np.arange(count) * len(starts) // count]]

    def batch(self, step: int) -> UInt8[np.ndarray, "B S+1"]:
        """The windows of a step: anywhere in the training part, by the seed and the step alone."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        return self._train[generator.integers(len(self._train), size=self._batch_size)]

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def held_out(self) -> Iterator[UInt8[np.ndarray, "b S+1"]]:
        """The windows to validate with, the same every time, evenly over the validation part; at most B at once."""
        for start in range(0, len(self._held_out), self._batch_size):
            yield self._held_out[start : start + self._batch_size]
