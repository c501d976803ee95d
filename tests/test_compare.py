"""The comparison that every bit-exact test rests on: it sees what `==` and `allclose` do not."""

import numpy as np
import pytest

from tests.compare import assert_codes_equal, assert_floats_equal


def test_a_failure_names_count_place_input_and_both_codes():
    want = np.full((128, 32), 2, np.uint8)
    got = want.copy()
    got[17, 30], got[17, 31], got[99, 0] = 1, 3, 4
    x = np.full((128, 32), 0.75, np.float32)
    message = "E2M1 rowwise: 3 of 4096 codes differ; first at (17, 30): input 0x3F400000, got 0x01, want 0x02"
    for x_bits in (x, x.view(np.uint32)):
        with pytest.raises(AssertionError) as failure:
            assert_codes_equal(got, want, x_bits, "E2M1 rowwise")
        assert str(failure.value) == message
    assert_codes_equal(want, want.astype(np.int64), x, "dtypes of integers may differ")


def test_shapes_and_kinds_count():
    with pytest.raises(AssertionError, match=r"got shape \(1, 3\), want \(3,\)"):
        assert_codes_equal(np.zeros((1, 3), np.uint8), np.zeros(3, np.uint8))
    with pytest.raises(AssertionError, match="dtype float32"):
        assert_codes_equal(np.zeros(3, np.float32), np.zeros(3, np.uint8))
    with pytest.raises(AssertionError, match="dtype float64, want float32"):
        assert_floats_equal(np.zeros(3), np.zeros(3, np.float32))


def test_signs_of_zero_and_of_NaN_count_and_payloads_do_not():
    nan = np.array([0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    assert_floats_equal(nan, nan[::-1])
    assert_floats_equal(np.float32(1.5), np.float32(1.5))
    for got, want in ((0.0, -0.0), (np.nan, -np.nan), (np.inf, -np.inf), (1.0, np.nextafter(1.0, 2.0))):
        with pytest.raises(AssertionError, match="1 of 1 codes differ"):
            assert_floats_equal(np.array([got]), np.array([want]), np.array([7], np.uint8), "one")
