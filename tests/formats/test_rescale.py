"""rescale: every code of one format times every power of two that matters, in another format, against the Fractions."""

import numpy as np
import pytest

from mxsim.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8, FloatFormat, rescale
from tests import oracle
from tests.compare import assert_codes_equal

SMALL = [(E2M1, oracle.E2M1), (E2M3, oracle.E2M3), (E3M2, oracle.E3M2), (E4M3, oracle.E4M3)]
SHIFTS = np.arange(-32, 33)  # beyond both ends: all underflows or all saturates


def expected(source: oracle.Spec, target: oracle.Spec) -> np.ndarray:
    """[shift, code]; NaN becomes the target's NaN of its sign, or +0."""
    out = np.zeros((SHIFTS.size, 1 << source.bits), np.uint8)
    for code in range(1 << source.bits):
        n = oracle.decode(code, source)
        for i, shift in enumerate(SHIFTS.tolist()):
            if n.kind == "nan":
                out[i, code] = 0 if target.nan is None else oracle.nan_code(target, n.negative)
            else:
                scaled = oracle.Number(n.negative, "finite", n.magnitude * oracle.power_of_two(shift))
                out[i, code] = oracle.encode(scaled, target)
    return out


def test_by_hand():
    # 0.5, 6 and -0, times 64
    assert rescale(np.array([1, 7, 8], np.uint8), E2M1, E4M3, 6).tolist() == [0x60, 0x7C, 0x80]
    # 1.875 * 2**-6 shifted down by 5 vanishes; by 2 it is 3.75 units of 2**-9, which rounds to 4
    assert rescale(np.array([0x0F, 0x0F, 0x8F], np.uint8), E4M3, E4M3, np.array([-5, -2, -5])).tolist() == [0, 4, 0x80]


@pytest.mark.parametrize("target", SMALL, ids=lambda p: p[1].name)
@pytest.mark.parametrize("source", SMALL, ids=lambda p: p[1].name)
def test_every_code_and_shift_between_every_pair_of_formats(source, target):
    (fmt, spec), (target_fmt, target_spec) = source, target
    codes = np.arange(fmt.num_codes, dtype=np.uint8)[None, :]
    shifts = SHIFTS[:, None]
    got = rescale(np.broadcast_to(codes, (SHIFTS.size, fmt.num_codes)), fmt, target_fmt, shifts)
    assert got.dtype == np.uint8
    assert_codes_equal(got, expected(spec, target_spec), np.broadcast_to(codes, got.shape), f"{fmt} to {target_fmt}")


@pytest.mark.parametrize("shift", [-10_000, -300, 300, 10_000])
def test_a_far_shift_underflows_or_saturates(shift):
    codes = np.arange(16, dtype=np.uint8)
    magnitude = np.where(codes & 7 == 0, 0, 0 if shift < 0 else E4M3.max_code)
    assert_codes_equal(rescale(codes, E2M1, E4M3, shift), magnitude | (codes & 8) << 4, codes)


def test_shift_zero_to_the_same_format_is_identity():
    for fmt, spec in SMALL:
        codes = np.arange(fmt.num_codes, dtype=np.uint8)
        assert_codes_equal(rescale(codes, fmt, fmt, 0), codes, codes, spec.name)


def test_a_shift_for_each_row_broadcasts():
    codes = np.random.default_rng(20).integers(0, 16, (3, 5), dtype=np.uint8)
    shifts = np.array([[0], [-3], [6]])
    rows = [rescale(codes[i], E2M1, E4M3, int(shifts[i, 0])) for i in range(3)]
    assert_codes_equal(rescale(codes, E2M1, E4M3, shifts), np.stack(rows))
    assert rescale(np.zeros((0, 4), np.uint8), E2M1, E4M3, 0).shape == (0, 4)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (INT8, E4M3),
        (E2M1, INT8),
        (E8M0, E4M3),
        (BF16, E4M3),
        (E5M2, E4M3),
        (E4M3, E5M2),
        (E2M1, FloatFormat("E3M0", 3, 0)),
    ],
    ids=str,
)
def test_a_format_that_it_cannot_serve_is_refused(source, target):
    with pytest.raises(ValueError, match="rescale"):
        rescale(np.zeros(1, np.uint8), source, target, 0)
