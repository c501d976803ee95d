"""Each metric against its definition, element by element in exact rationals."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mxsim.analysis import ErrorSums
from mxsim.blocks import BLOCK_FORMATS, MXFP4, MXINT8, NVFP4, BlockFormat, ScaleRule, quantize
from mxsim.formats import decode

FORMATS = list(BLOCK_FORMATS.values())
SHAPE = (3, 150)  # tails in every format


def measured(x: np.ndarray, fmt: BlockFormat, **options) -> ErrorSums:
    sums = ErrorSums()
    sums.add(x, quantize(x, fmt, **options))
    return sums


def scale_of(t, row: int, column: int) -> Fraction:
    block_rows, block_columns = t.format.block_shape
    scale = t.scale_values()[row // block_rows, column // block_columns]
    return Fraction(float(scale)) * (1 if t.tensor_scale is None else Fraction(float(t.tensor_scale)))


def expected(x: np.ndarray, fmt: BlockFormat) -> dict[str, float]:
    """Every metric by its definition: one element at a time, in rationals, NaN blocks left out."""
    t = quantize(x, fmt)
    signal = noise = Fraction(0)
    relative, saturated, underflowed, subnormal, total = [], 0, 0, 0, 0
    for row, column in np.ndindex(x.shape):
        element = float(decode(t.codes[row, column], fmt.element))
        if math.isnan(t.scale_values()[row // fmt.block_shape[0], column // fmt.block_shape[1]]):
            continue
        total += 1
        value, scale = Fraction(float(x[row, column])), scale_of(t, row, column)
        error = Fraction(element) * scale - value
        signal += value**2
        noise += error**2
        if value:
            relative.append(abs(error / value))
            underflowed += element == 0
        saturated += scale != 0 and abs(value) > Fraction(fmt.element.max_finite) * scale * Fraction(1 + 2.0**-20)
        subnormal += 0 < abs(element) < fmt.element.min_normal
    return {
        "sqnr_db": 10 * math.log10(signal / noise),
        "max_relative_error": float(max(relative)),
        "mean_relative_error": float(sum(relative) / len(relative)),
        "saturated": saturated / total,
        "underflowed": underflowed / total,
        "subnormal": math.nan if fmt is MXINT8 else subnormal / total,
    }


def values(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.standard_normal(SHAPE) * np.exp(3 * random.standard_normal(SHAPE))
    x[random.random(SHAPE) < 0.05] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_metric_is_its_definition(fmt, seed):
    x = values(seed)
    sums = measured(x, fmt)
    assert sums.num_elements == x.size
    for name, value in expected(x, fmt).items():
        assert getattr(sums, name) == pytest.approx(value, rel=1e-12, nan_ok=True), name


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_poisoned_block_is_counted_and_left_out(fmt):
    x = values(2)
    x[1, 40], x[2, 149] = np.nan, -np.inf
    sums = measured(x, fmt)
    assert sums.num_poisoned_blocks == int(np.isnan(quantize(x, fmt).scale_values()).sum()) > 0
    assert sums.num_elements + sums.num_poisoned_elements == x.size
    if sums.num_elements:  # a 128x128 tile is gone as a whole
        for name, value in expected(x, fmt).items():
            assert getattr(sums, name) == pytest.approx(value, rel=1e-12, nan_ok=True), name
    else:
        assert math.isnan(sums.sqnr_db)
        assert math.isnan(sums.saturated)


def test_hand_computed_block():
    # Scale 1: 7 saturates to 6, 0.2 becomes 0, 0.3 the subnormal 0.5, 0 and 2 are exact.
    x = np.array([7.0, 0.2, 0.3, 0.0, 2.0])
    sums = measured(x, MXFP4)
    assert (sums.saturated, sums.underflowed, sums.subnormal) == (1 / 5, 1 / 5, 1 / 5)
    assert sums.max_relative_error == 1
    assert sums.mean_relative_error == pytest.approx((1 / 7 + 1 + 2 / 3 + 0) / 4)
    assert sums.sqnr_db == pytest.approx(10 * math.log10((49 + 0.04 + 0.09 + 4) / (1 + 0.04 + 0.04)))


def test_an_exact_tensor_has_infinite_sqnr():
    assert measured(np.array([1.0, -6.0, 0.5]), MXFP4).sqnr_db == math.inf


def test_zeros_and_nothing_have_no_sqnr():
    for x in (np.zeros(40), np.zeros(0)):
        sums = measured(x, MXFP4)
        assert math.isnan(sums.sqnr_db)
        assert math.isnan(sums.max_relative_error)
        assert math.isnan(sums.mean_relative_error)


def test_the_largest_element_of_an_nvfp4_tensor_is_not_called_saturated():
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal(16).astype(np.float32)
        assert measured(x, NVFP4).num_saturated == 0  # one block: its scale code is 448, exact but for FP32


def test_an_nvfp4_block_whose_scale_is_zero_underflows():
    x = np.zeros((2, 16), np.float32)
    x[0], x[1] = 1, 1e-6
    sums = measured(x, NVFP4)
    assert (sums.num_saturated, sums.num_underflowed) == (0, 16)


@pytest.mark.parametrize("rule", [ScaleRule.RCEIL, ScaleRule.CEIL])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f is not NVFP4], ids=str)
def test_rules_that_never_saturate_have_no_saturated_elements(fmt, rule):
    assert measured(values(3), fmt, scale_rule=rule).num_saturated == 0


def test_numbers_beyond_the_square_of_float64_give_no_sqnr_but_no_warning_either():
    assert math.isnan(measured(np.array([1e200, 1.0]), MXFP4).sqnr_db)


def test_merging_two_pieces_is_measuring_both():
    x = values(4)
    whole, first = measured(x, MXFP4), measured(x[:1], MXFP4)
    first.merge(measured(x[1:], MXFP4))
    for name in ("num_elements", "num_nonzero", "num_saturated", "num_underflowed", "num_subnormal", "sqnr_db"):
        assert getattr(first, name) == getattr(whole, name)
    assert first.mean_relative_error == whole.mean_relative_error
    assert first.max_relative_error == whole.max_relative_error
