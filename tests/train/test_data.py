"""Windows: by seed and step alone, and the held-out ones never trained on."""

import numpy as np
import pytest

pytest.importorskip("torch")

from mxsim.train.config import ConfigError
from mxsim.train.corpus import Corpus
from mxsim.train.data import Windows
from tests.train.runs import small

TRAIN = np.arange(200, dtype=np.uint8)
VALIDATION = np.arange(200, 256, dtype=np.uint8)
CORPUS = Corpus("bytes", TRAIN, VALIDATION, "")


def windows(*fields, corpus=CORPUS):
    return Windows(corpus, small("bf16", "sequence_length=5", *fields))


def test_a_step_has_the_same_windows_each_time_and_no_others():
    a, b = windows(), windows()
    assert np.array_equal(a.batch(7), b.batch(7))
    assert not np.array_equal(a.batch(7), a.batch(8))
    assert not np.array_equal(a.batch(7), windows("seed=1").batch(7))


def test_windows_are_runs_of_the_training_part_anywhere():
    batch = np.concatenate([windows().batch(step) for step in range(600)])
    assert batch.shape == (2400, 6)
    assert (np.diff(batch.astype(int), axis=1) == 1).all()
    assert set(batch[:, 0]) == set(range(195))  # the last window ends with the text


def test_held_out_windows_are_spread_over_the_validation_part():
    w = windows("eval_sequences=3", "batch_size=2")
    parts = list(w.held_out())
    assert [len(part) for part in parts] == [2, 1]
    assert np.concatenate(parts)[:, 0].tolist() == [200, 215, 235]  # of 11 windows: 0, 3, 7
    assert w.num_held_out == 3


def test_no_more_windows_are_held_out_than_there_are():
    w = windows("eval_sequences=1000")
    assert np.concatenate(list(w.held_out()))[:, 0].tolist() == list(range(200, 251, 5))
    assert w.num_held_out == 11


@pytest.mark.parametrize("train, validation, name", [(5, 6, "training"), (6, 5, "validation")])
def test_a_text_shorter_than_a_window_is_refused(train, validation, name):
    corpus = Corpus("short", TRAIN[:train], VALIDATION[:validation], "")
    with pytest.raises(ConfigError, match=f"sequence_length is 5, needed at most 4, as the {name} part of the corpus"):
        windows(corpus=corpus)
    assert windows(corpus=Corpus("enough", TRAIN[:6], VALIDATION[:6], "")).batch(0).shape == (4, 6)
