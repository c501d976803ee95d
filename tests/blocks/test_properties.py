"""What holds for every tensor: idempotence, symmetry, equivariance, independence of blocks, monotony, round trips."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mxsim.blocks import (
    BLOCK_FORMATS,
    FP8_1X128,
    MXFP4,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    quantize,
)
from mxsim.formats import decode
from tests import oracle
from tests.blocks.oracle_blocks import LAYOUTS, MX
from tests.compare import assert_codes_equal, assert_floats_equal

POWER_OF_TWO = [*MX, "FP8_1X128"]
FLT_MAX = float(np.finfo(np.float32).max)
EACH = pytest.mark.parametrize("name", POWER_OF_TWO)
few = settings(max_examples=40)


def finite_floats(largest: float = FLT_MAX):
    return st.one_of(
        st.floats(-largest, largest, width=32),
        st.floats(-8, 8, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 6.0, 7.0, -448.0, largest, -largest]),
    )


def tensors(size: int, *, blocks: int = 3, largest: float = FLT_MAX):
    """float32 [blocks * size - tail], in which few values repeat often: hypothesis shrinks them well."""
    return st.tuples(
        st.lists(finite_floats(largest), min_size=1, max_size=12), st.integers(0, 2**32 - 1), st.integers(0, size - 1)
    ).map(lambda drawn: _spread(*drawn, blocks * size))


def _spread(values: list[float], seed: int, tail: int, count: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).choice(np.array(values, np.float32), count - tail)
    chosen[: len(values)] = values[: len(chosen)]
    return chosen


def size_of(name: str) -> int:
    return LAYOUTS[name].block[1]


rules = st.sampled_from(list(ScaleRule))


@EACH
@few
@given(data=st.data(), rule=rules)
def test_quantizing_what_was_quantized_changes_no_value(name, data, rule):
    x = data.draw(tensors(size_of(name)))
    fmt = BLOCK_FORMATS[name]
    once = quantize(x, fmt, scale_rule=rule).dequantize(np.float64)
    assert_floats_equal(quantize(once, fmt, scale_rule=rule).dequantize(np.float64), once)


@EACH
@few
@given(data=st.data(), rule=rules)
def test_the_opposite_has_opposite_codes_and_the_same_scales(name, data, rule):
    x = data.draw(tensors(size_of(name)))
    plus, minus = (quantize(v, BLOCK_FORMATS[name], scale_rule=rule) for v in (x, -x))
    assert_floats_equal(minus.scale_values(), plus.scale_values())
    opposite = (-plus.codes.astype(int)) % 256 if name == "MXINT8" else plus.codes ^ LAYOUTS[name].element.sign_bit
    assert_codes_equal(minus.codes, opposite)


@EACH
@few
@given(data=st.data(), rule=rules, power=st.integers(-200, 200))
def test_a_power_of_two_moves_the_scales_and_no_code(name, data, rule, power):
    x = data.draw(tensors(size_of(name))).astype(np.float64)
    plain = quantize(x, BLOCK_FORMATS[name], scale_rule=rule)
    exponents = np.log2(plain.scale_values())  # exact: powers of two in float64
    zero = np.add.reduceat(np.abs(x), np.arange(0, len(x), size_of(name))) == 0
    moved = exponents + power * ~zero
    assume((zero | (abs(moved) < 127) & (abs(exponents) < 127)).all())
    got = quantize(np.ldexp(x, power), BLOCK_FORMATS[name], scale_rule=rule)
    assert_codes_equal(got.codes, plain.codes)
    assert_floats_equal(got.scale_values(), np.exp2(moved))


@few
@given(x=tensors(16, largest=2.0**40), power=st.integers(-60, 60))
def test_a_power_of_two_moves_the_tensor_scale_of_NVFP4_and_no_code(x, power):
    assume(np.abs(x).max() > 2.0**-40)
    nonzero = np.abs(x[x != 0])
    assume(nonzero.min(initial=1) > 2.0**-60)
    plain, moved = quantize(x, BLOCK_FORMATS["NVFP4"]), quantize(np.ldexp(x, power), BLOCK_FORMATS["NVFP4"])
    assert_codes_equal(moved.codes, plain.codes)
    assert_codes_equal(moved.scales, plain.scales)
    assert moved.tensor_scale == np.ldexp(plain.tensor_scale, power)


@pytest.mark.parametrize("name", [*POWER_OF_TWO, "NVFP4"])
@few
@given(data=st.data(), order=st.permutations(range(5)))
def test_permuting_blocks_permutes_codes_and_scales(name, data, order):
    size = LAYOUTS[name].block[1]
    x = data.draw(tensors(size, blocks=6))[: 5 * size].reshape(5, size)
    fmt = BLOCK_FORMATS[name]
    plain, moved = quantize(x.ravel(), fmt), quantize(x[list(order)].ravel(), fmt)
    assert_codes_equal(moved.codes.reshape(5, size), plain.codes.reshape(5, size)[list(order)])
    assert_floats_equal(moved.scale_values(), plain.scale_values()[list(order)])


@pytest.mark.parametrize("name", [*POWER_OF_TWO, "NVFP4"])
@few
@given(data=st.data())
def test_a_larger_element_of_a_block_never_gets_a_smaller_code(name, data):
    size = LAYOUTS[name].block[1]
    x = np.sort(data.draw(tensors(size, blocks=1)))
    values = decode(quantize(x, BLOCK_FORMATS[name]).codes, BLOCK_FORMATS[name].element)
    assert (np.diff(values) >= 0).all()


@EACH
@few
@given(data=st.data())
def test_RCEIL_errs_by_half_an_ulp_of_the_largest_binade_at_most(name, data):
    x = data.draw(tensors(size_of(name), largest=2.0**100)).astype(np.float64)
    t = quantize(x, BLOCK_FORMATS[name], scale_rule=ScaleRule.RCEIL)
    spec = LAYOUTS[name].element
    half_ulp = float(oracle.TWO ** (oracle.emax(spec) - spec.mantissa_bits - 1))
    allowed = half_ulp * t.scale_values().repeat(size_of(name))[: len(x)]
    assert (np.abs(t.dequantize(np.float64) - x) <= allowed).all()


@EACH
@few
@given(data=st.data(), rule=rules)
def test_an_element_alone_decides_its_code_once_the_scale_is_known(name, data, rule):
    """Any element of a block may be replaced by a smaller one without a change to the others."""
    size = size_of(name)
    x = data.draw(tensors(size, blocks=1))
    fmt = BLOCK_FORMATS[name]
    plain = quantize(x, fmt, scale_rule=rule)
    largest = int(np.argmax(np.abs(x)))
    i = data.draw(st.integers(0, len(x) - 1).filter(lambda i: i != largest or len(x) == 1))
    assume(i != largest)
    changed = x.copy()
    changed[i] = data.draw(st.sampled_from([0.0, -0.0, x[i] / 2, -x[i]]))
    got = quantize(changed, fmt, scale_rule=rule)
    keep = np.arange(len(x)) != i
    assert_codes_equal(got.codes[keep], plain.codes[keep])
    assert_floats_equal(got.scale_values(), plain.scale_values())


def fp4_rows(spread: int):
    """[rows, 128] of any codes, the four scales of a row at most `spread` binades apart."""
    return st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 254 - spread), st.integers(1, 6)).map(
        lambda drawn: _fp4(*drawn, spread)
    )


def _fp4(seed: int, base: int, rows: int, spread: int) -> BlockTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, 128)).astype(np.uint8)
    return BlockTensor(codes, (base + rng.integers(0, spread + 1, (rows, 4))).astype(np.uint8), MXFP4)


@pytest.mark.parametrize("headroom", range(7))
@few
@given(data=st.data())
def test_FP4_to_FP8_to_FP4_is_lossless_within_8_plus_headroom_binades(headroom, data):
    source = data.draw(fp4_rows(8 + headroom))
    values = source.dequantize(np.float64)
    there = fp4_row_to_fp8_row(source, headroom=headroom)
    assert_floats_equal(there.dequantize(np.float64), values)
    assert_floats_equal(fp8_row_to_fp4_row(there).dequantize(np.float64), values)


@few
@given(x=tensors(128, largest=2.0**60), rule=rules)
def test_FP8_to_FP4_directly_is_quantizing_the_decoded_values(x, rule):
    fp8 = quantize(x, FP8_1X128)
    direct, through = (
        fp8_row_to_fp4_row(fp8, scale_rule=rule),
        quantize(fp8.dequantize(np.float64), MXFP4, scale_rule=rule),
    )
    assert_codes_equal(direct.codes, through.codes)
    assert_codes_equal(direct.scales, through.scales)


@few
@given(source=fp4_rows(14), seed=st.integers(0, 2**32 - 1))
def test_columns_of_a_group_do_not_depend_on_how_the_rows_before_it_are_split(source, seed):
    rows = source.shape[0]
    cut = int(np.random.default_rng(seed).integers(0, rows + 1))
    last = fp4_row_to_fp8_col(source, group_sizes=[*([1] * cut), rows - cut])[-1]
    alone = fp4_row_to_fp8_col(BlockTensor(source.codes[cut:], source.scales[cut:], MXFP4))
    assert_codes_equal(last.codes, alone.codes)
    assert_floats_equal(last.scales, alone.scales)
