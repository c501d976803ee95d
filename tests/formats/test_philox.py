"""Philox4x32-10: published known answers, and which word belongs to which element."""

import numpy as np
import pytest

from mxsim.formats import philox4x32, philox_bits
from tests import oracle
from tests.compare import assert_codes_equal

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123's known-answer file: counter, key, output
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, output):
    got = philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert got.dtype == np.uint32
    assert got.tolist() == output


def test_counters_are_independent_of_each_other():
    rng = np.random.default_rng(8)
    counters = rng.integers(0, 2**32, (5, 7, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    got = philox4x32(counters, key)
    want = [[oracle.philox4x32(c, key.tolist()) for c in row] for row in counters.tolist()]
    assert_codes_equal(got, np.array(want))


def test_the_arguments_are_left_alone():
    counter, key = np.zeros((3, 4), np.uint32), np.ones(2, np.uint32)
    philox4x32(counter, key)
    assert not counter.any()
    assert key.tolist() == [1, 1]


def test_elements_take_the_words_of_their_counter_in_order():
    assert philox_bits(0, 4).tolist() == KNOWN_ANSWERS[0][2]
    assert philox_bits(0, 5)[4] == oracle.philox4x32([1, 0, 0, 0], [0, 0])[0]


@pytest.mark.parametrize("seed", [0, 1, ONES, 2**32, 0x0123456789ABCDEF, 2**64 - 1])
@pytest.mark.parametrize(
    "start", [0, 1, 2, 3, 4, 1_000_003, 2**32 - 3, 2**34 - 6, 2**34, 2**40 + 1, 2**63 - 5, 2**66 - 14]
)
def test_element_i_takes_word_i_mod_4_of_counter_i_div_4(seed, start):
    want = [oracle.random_word(i, seed) for i in range(start, start + 14)]
    assert_codes_equal(philox_bits(seed, 14, start=start), np.array(want), None, f"seed {seed} from {start}")


def test_the_counters_high_word_counts_from_2_to_the_34_elements():
    below, at = philox_bits(5, 2, start=2**34 - 1)
    assert below == oracle.philox4x32([ONES, 0, 0, 0], [5, 0])[3]
    assert at == oracle.philox4x32([0, 1, 0, 0], [5, 0])[0]


def test_the_seeds_words_are_the_key_low_first():
    assert philox_bits(0x299F31D0_A4093822, 1)[0] == oracle.philox4x32([0] * 4, [0xA4093822, 0x299F31D0])[0]


def test_pieces_join_to_the_whole():
    whole = philox_bits(9, 1000)
    for cut in (0, 1, 2, 3, 4, 5, 499, 998, 1000):
        pieces = np.concatenate([philox_bits(9, cut), philox_bits(9, 1000 - cut, start=cut)])
        assert_codes_equal(pieces, whole, None, f"cut at {cut}")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (4, 5), (3, 5, 7)])
def test_elements_are_numbered_row_by_row(shape):
    got = philox_bits(10, shape)
    assert got.dtype == np.uint32
    assert got.shape == shape
    assert_codes_equal(got.reshape(-1), philox_bits(10, got.size))


def test_a_number_is_a_shape():
    assert philox_bits(11, 6).shape == philox_bits(11, np.int64(6)).shape == (6,)


def test_bits_are_balanced_and_seeds_differ():
    bits = philox_bits(12, 100_000)
    ones = np.unpackbits(bits.view(np.uint8)).reshape(-1, 32).sum(axis=0, dtype=np.int64)
    assert np.all(abs(ones - 50_000) < 5 * np.sqrt(100_000) / 2)
    assert np.mean(bits == philox_bits(13, 100_000)) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1, "shape": 4}, "seed is -1"),
        ({"seed": 2**64, "shape": 4}, f"seed is {2**64}"),
        ({"seed": 0, "shape": 4, "start": -1}, "start is -1"),
        ({"seed": 0, "shape": 4, "start": 2**66 - 3}, "start is"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        philox_bits(**arguments)


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_a_negative_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape|negative"):
        philox_bits(0, shape)


@pytest.mark.parametrize("integer", [np.uint8, np.int32, np.uint64])
def test_numpy_integers_do_not_wrap_around(integer):
    assert_codes_equal(philox_bits(integer(7), 3, start=integer(127)), philox_bits(7, 3, start=127), np.arange(3))
    last = int(np.iinfo(integer).max)
    assert_codes_equal(philox_bits(0, 3, start=integer(last)), philox_bits(0, 3, start=last), np.arange(3))


@pytest.mark.parametrize("arguments", [{"seed": 1.5}, {"seed": 0, "start": 2.0}])
def test_a_seed_or_start_that_is_no_integer_is_refused(arguments):
    with pytest.raises(TypeError, match="integer"):
        philox_bits(shape=3, **arguments)
