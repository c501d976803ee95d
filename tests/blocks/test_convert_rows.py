"""FP4 -> FP8 and FP8 -> FP4 along rows: every code, every pair of scales, every headroom, every block maximum."""

from fractions import Fraction

import numpy as np
import pytest

from mxsim.blocks import (
    FP8_1X128,
    FP8_128X1,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    quantize,
)
from mxsim.formats import E4M3, encode
from tests import oracle
from tests.blocks.oracle_blocks import Quantized
from tests.blocks.oracle_convert import (
    NAN,
    fp4_to_fp8_by_bits,
    fp4_to_fp8_rows,
    fp8_to_fp4_rows,
    powers_of_two,
    shift_table,
)
from tests.blocks.pairs import RULES, assert_quantized_equal, assert_tensors_equal
from tests.compare import assert_codes_equal, assert_floats_equal
from tests.oracle import TWO

HEADROOMS = range(7)
EACH_HEADROOM = pytest.mark.parametrize("headroom", HEADROOMS)
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
ALL_CODES = np.arange(16, dtype=np.uint8)


def fp4(codes, scales) -> BlockTensor:
    return BlockTensor(np.asarray(codes, np.uint8), np.asarray(scales, np.uint8), MXFP4)


def fp8(codes, exponents) -> BlockTensor:
    return BlockTensor(np.asarray(codes, np.uint8), powers_of_two(exponents), FP8_1X128)


def exponents_of(scale_codes: np.ndarray) -> np.ndarray:
    return np.where(scale_codes == 0xFF, NAN, scale_codes.astype(int) - 127)


# ------------------------------------------------------------------------------------------------ FP4 -> FP8, by hand
def test_FP4_to_FP8_by_hand():
    codes = np.zeros((1, 128), np.uint8)
    codes[0, [0, 1, 32, 64, 96]] = 7, 8, 1, 1, 2
    t = fp4_row_to_fp8_row(fp4(codes, [[127, 113, 112, 0xFF]]))
    assert t.scales.tolist() == [[2.0**-6]]
    # 6 * 2**6 = 384; -0; 0.5 * 2**6 / 2**14 = 2**-9, the smallest subnormal; half of that ties to 0; NaN
    assert t.codes[0, [0, 1, 32, 64]].tolist() == [0x7C, 0x80, 1, 0]
    assert (t.codes[0, 96:] == 0x7F).all()
    assert (t.format, t.axis, t.shape) == (FP8_1X128, -1, (1, 128))


def test_equal_scales_without_headroom_change_no_value():
    t = fp4_row_to_fp8_row(fp4(np.tile(ALL_CODES, 8)[None], [[127] * 4]), headroom=0)
    want = [0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C, 0x80, 0xB0, 0xB8, 0xBC, 0xC0, 0xC4, 0xC8, 0xCC]
    assert t.codes.tolist() == [want * 8]
    assert t.scales.tolist() == [[1.0]]


def test_the_default_headroom_is_6_which_6_times_64_allows():
    t = fp4(np.tile(ALL_CODES, 2)[None], [[127]])
    assert_tensors_equal(fp4_row_to_fp8_row(t), fp4_row_to_fp8_row(t, headroom=6))
    assert fp4_row_to_fp8_row(t).dequantize().max() == 6
    assert 6 * 2**6 <= 448 < 6 * 2**7


# ------------------------------------------------------------------------------------------ FP4 -> FP8, exhaustively
@EACH_HEADROOM
def test_every_code_under_every_pair_of_scales(headroom):
    a, b = (s.ravel() for s in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
    scales = np.stack([a, b, b, a], axis=1).astype(np.uint8)  # (65536, 4)
    codes = np.broadcast_to(np.tile(ALL_CODES, 8), (65536, 128))
    got = fp4_row_to_fp8_row(fp4(codes, scales), headroom=headroom)

    exponent = scales.astype(int) - 127
    is_nan = scales == 0xFF
    shared = np.where(is_nan, -127, exponent).max(axis=1, keepdims=True)
    table = shift_table(oracle.E2M1, oracle.E4M3, headroom - 254, headroom)  # row: headroom - d + 254 - headroom
    row = np.where(is_nan, 0, 254 - (shared - np.where(is_nan, shared, exponent)))
    want = np.tile(table, 2)[row]  # (65536, 4, 32)
    want[is_nan] = 0x7F
    assert_codes_equal(got.codes, want.reshape(65536, 128), np.repeat(scales, 32, axis=1), f"headroom {headroom}")
    assert_floats_equal(got.scales, powers_of_two(shared - headroom))


def test_the_scale_is_the_exact_power_of_two_down_to_2_to_the_minus_133():
    for code in range(255):
        t = fp4_row_to_fp8_row(fp4([[1]], [[code]]))
        assert Fraction(float(t.scales[0, 0])) == TWO ** (code - 127 - 6)
    assert fp4_row_to_fp8_row(fp4([[1]], [[0]])).scales.view(np.uint32).tolist() == [[1 << 16]]  # 2**-133
    assert fp4_row_to_fp8_row(fp4([[1]], [[0xFF]])).scales.tolist() == [[2.0**-133]]


@EACH_HEADROOM
def test_the_bit_form_is_the_rounding_of_the_exact_value(headroom):
    table = shift_table(oracle.E2M1, oracle.E4M3, headroom - 254, headroom)
    by_bits = [[fp4_to_fp8_by_bits(code, headroom, d) for code in range(16)] for d in range(254, -1, -1)]
    assert_codes_equal(table, np.array(by_bits), label="bit form")
    scales = np.zeros((255, 4), np.uint8)
    scales[:, 0], scales[:, 1] = 254, np.arange(255)  # d = 254 .. 0 in the second block
    got = fp4_row_to_fp8_row(fp4(np.tile(ALL_CODES, (255, 8)), scales), headroom=headroom)
    assert_codes_equal(got.codes[:, 32:48], np.array(by_bits), label="package")


@EACH_HEADROOM
def test_lossless_theorem_exact_iff_d_is_at_most_8_plus_headroom_normal_iff_at_most_5_plus_headroom(headroom):
    scales = np.zeros((255, 4), np.uint8)
    scales[:, 0], scales[:, 1] = 254, np.arange(255)[::-1]  # d = 0 .. 254
    source = fp4(np.tile(ALL_CODES, (255, 8)), scales)
    result = fp4_row_to_fp8_row(source, headroom=headroom)
    block = slice(32, 64)
    exact = (source.dequantize(np.float64) == result.dequantize(np.float64))[:, block].all(axis=1)
    magnitude = result.codes[:, block] & 0x7F
    normal = ((magnitude == 0) | (magnitude >= 8)).all(axis=1) & exact
    d = np.arange(255)
    assert (exact == (d <= 8 + headroom)).all()
    assert (normal == (d <= 5 + headroom)).all()


def test_the_same_theorem_in_fractions():
    magnitudes = [oracle.magnitude(c, oracle.E2M1) for c in range(1, 8)]
    representable = {oracle.magnitude(c, oracle.E4M3) for c in range(0x7F)}
    smallest_normal = oracle.min_normal(oracle.E4M3)
    for headroom in HEADROOMS:
        for d in range(255):
            moved = [m * TWO ** (headroom - d) for m in magnitudes]
            assert all(m in representable for m in moved) == (d <= 8 + headroom)
            assert (min(moved) >= smallest_normal) == (d <= 5 + headroom)


@EACH_HEADROOM
def test_FP4_to_FP8_of_random_rows_of_any_length(headroom):
    rng = np.random.default_rng(headroom)
    for columns in (1, 31, 32, 33, 64, 96, 127, 128, 129, 160, 300):
        codes = rng.integers(0, 16, (20, columns)).astype(np.uint8)
        scales = (rng.integers(0, 256) + rng.integers(-12, 12, (20, -(-columns // 32)))).clip(0, 254).astype(np.uint8)
        scales[rng.random(scales.shape) < 0.2] = 0xFF
        got = fp4_row_to_fp8_row(fp4(codes, scales), headroom=headroom)
        want, exponents = fp4_to_fp8_rows(codes, exponents_of(scales), headroom)
        assert_quantized_equal(got, Quantized(want, powers_of_two(exponents)))


def test_the_table_of_rows_is_the_oracle():
    rng = np.random.default_rng(10)
    codes = rng.integers(0, 16, (6, 150)).astype(np.uint8)
    scales = rng.integers(110, 135, (6, 5)).astype(np.uint8)
    scales[0, 1], scales[1, :4], scales[2, 4] = 0xFF, 0xFF, 0xFF
    for headroom in (0, 3, 6):
        got, exponents = fp4_to_fp8_rows(codes, exponents_of(scales), headroom)
        for r in range(6):
            want = oracle.fp4_row_to_fp8_row(codes[r].tolist(), scales[r].tolist(), headroom)
            assert got[r].tolist() == [c for block in want for c in block.codes]
            assert exponents[r].tolist() == [block.exponent for block in want]


@EACH_HEADROOM
def test_FP4_to_FP8_directly_is_through_exact_values(headroom):
    rng = np.random.default_rng(20 + headroom)
    codes = rng.integers(0, 16, (500, 256)).astype(np.uint8)
    scales = rng.integers(100, 130, (500, 8)).astype(np.uint8)
    source = fp4(codes, scales)
    got = fp4_row_to_fp8_row(source, headroom=headroom)
    by_element = got.scale_values().repeat(128, axis=1)
    assert_codes_equal(got.codes, encode(source.dequantize(np.float64) / by_element, E4M3))


def test_a_NaN_scale_stays_in_its_own_block():
    codes = np.tile(ALL_CODES, (5, 8))
    scales = np.array([[0xFF, 127, 127, 127], [127, 0xFF, 0xFF, 127], [0xFF] * 4, [200, 0xFF, 0, 0xFF], [127] * 4])
    got = fp4_row_to_fp8_row(fp4(codes, scales))
    for r, row in enumerate(scales):
        good = [s for s in row if s != 0xFF]
        assert got.scales[r, 0] == 2.0 ** (max(good, default=0) - 127 - 6)
        for b, s in enumerate(row):
            assert (got.codes[r, 32 * b : 32 * b + 32] == 0x7F).all() == (s == 0xFF)
    assert np.isnan(got.dequantize()).sum() == 32 * (scales == 0xFF).sum()


def test_leading_axes_and_vectors_are_rows():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (2, 3, 160)).astype(np.uint8)
    scales = rng.integers(120, 130, (2, 3, 5)).astype(np.uint8)
    whole = fp4_row_to_fp8_row(fp4(codes, scales))
    assert (whole.codes.shape, whole.scales.shape) == ((2, 3, 160), (2, 3, 2))
    assert_tensors_equal(fp8_row_to_fp4_row(whole), fp8_row_to_fp4_row(fp4_row_to_fp8_row(fp4(codes, scales))))
    for i in range(2):
        for j in range(3):
            alone = fp4_row_to_fp8_row(fp4(codes[i, j], scales[i, j]))
            assert (alone.codes == whole.codes[i, j]).all()
            assert (alone.scales == whole.scales[i, j]).all()
            back = fp8_row_to_fp4_row(alone)
            assert (back.codes == fp8_row_to_fp4_row(whole).codes[i, j]).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0), (2, 0, 128), (0,)], ids=str)
def test_nothing_converts_to_nothing(shape):
    source = quantize(np.zeros(shape, np.float32), MXFP4)
    there = fp4_row_to_fp8_row(source)
    assert there.shape == shape
    assert there.scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert_tensors_equal(fp8_row_to_fp4_row(there), source)


def test_large_rows_leave_no_seams():
    rng = np.random.default_rng(2)
    for shape in ((3, 2**17 + 40), (2**13 + 1, 160)):
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        scales = rng.integers(115, 140, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
        scales[rng.random(scales.shape) < 0.01] = 0xFF
        got = fp4_row_to_fp8_row(fp4(codes, scales))
        want, exponents = fp4_to_fp8_rows(codes, exponents_of(scales), 6)
        assert_quantized_equal(got, Quantized(want, powers_of_two(exponents)))


def test_strides_of_the_source_do_not_matter():
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 16, (40, 256)).astype(np.uint8), rng.integers(110, 130, (40, 8)).astype(np.uint8)
    plain = fp4(codes, scales)
    apart = BlockTensor(np.asfortranarray(codes), np.repeat(scales, 2, axis=1)[:, ::2], MXFP4)
    there, there_too = fp4_row_to_fp8_row(plain), fp4_row_to_fp8_row(apart)
    assert_tensors_equal(there_too, there)
    strided = BlockTensor(np.asfortranarray(there.codes), np.asfortranarray(there.scales), FP8_1X128)
    assert_tensors_equal(fp8_row_to_fp4_row(strided), fp8_row_to_fp4_row(there))
    assert_tensors_equal(fp4_row_to_fp8_col(apart), fp4_row_to_fp8_col(plain))
    assert_tensors_equal(fp8_row_to_fp8_col(strided), fp8_row_to_fp8_col(there))


# ------------------------------------------------------------------------------------------------ FP8 -> FP4, by hand
def test_FP8_to_FP4_by_hand():
    codes = [0x7E, *[0] * 31, 0x7F, *[0x38] * 31, *[0x80] * 32, 0x38, 0x30, 0xB4, 0x2C, *[0] * 28]
    got = fp8_row_to_fp4_row(fp8([codes], [[-3]]))
    assert got.scales.tolist() == [[127 + 6 - 3, 0xFF, 0, 127 - 2 - 3]]
    assert got.codes[0, [0, 32, 64, 96, 97, 98, 99]].tolist() == [7, 0, 8, 6, 4, 13, 3]  # 1 0.5 -0.75 0.375, times 4
    assert (got.codes[0, 32:64] == 0).all()
    assert (got.format, got.axis) == (MXFP4, -1)


# ------------------------------------------------------------------------------------------ FP8 -> FP4, exhaustively
def every_code_below_every_maximum() -> np.ndarray:
    """Blocks of 32: for each E4M3 magnitude as the largest, NaN too, every code of both signs that is not larger."""
    blocks = []
    for largest in range(0x80):
        smaller = np.concatenate([np.arange(largest + 1), 0x80 + np.arange(largest + 1)]).astype(np.uint8)
        padded = np.resize(smaller, -(-len(smaller) // 31) * 31).reshape(-1, 31)
        for i, row in enumerate(padded):
            blocks.append(np.insert(row, (7 * largest + i) % 32, largest | (i % 2) << 7))
    blocks += [np.resize(np.uint8(0x80), 32)] * (-len(blocks) % 4)
    return np.array(blocks, np.uint8).reshape(-1, 128)


# the clamps of X at both ends, FP32 subnormal scales, and the middle
EXPONENTS = [*range(-149, -110), -60, -1, 0, 1, 60, *range(112, 128)]


@EACH_RULE
def test_every_code_under_every_block_maximum(rule):
    one = every_code_below_every_maximum()
    codes = np.tile(one, (len(EXPONENTS), 1))
    exponents = np.repeat(EXPONENTS, len(one))[:, None]
    source = fp8(codes, exponents)
    got = fp8_row_to_fp4_row(source, scale_rule=rule)
    want = fp8_to_fp4_rows(codes, exponents, rule.name)
    assert_quantized_equal(got, Quantized(*want), codes, f"{rule.name}")
    # ... which is what quantizing the exact values gives
    assert_tensors_equal(quantize(source.dequantize(np.float64), MXFP4, scale_rule=rule), got)


@EACH_RULE
def test_every_pair_of_a_maximum_and_a_code(rule):
    """16,256 blocks of one maximum and one code, at the ends of the range of X and in the middle."""
    largest, code = (a.ravel() for a in np.meshgrid(np.arange(1, 0x7F), np.arange(256)))
    keep = (code & 0x7F) <= largest
    codes = np.zeros((keep.sum(), 128), np.uint8)
    codes[:, 33], codes[:, 60] = largest[keep], code[keep]
    for exponent in (-149, -128, 0, 127):
        exponents = np.full((len(codes), 1), exponent)
        got = fp8_row_to_fp4_row(fp8(codes, exponents), scale_rule=rule)
        blocks = slice(32, 64)
        want_codes, want_scales = fp8_to_fp4_rows(codes[:, blocks], exponents, rule.name)
        assert_codes_equal(got.scales[:, 1:2], want_scales)
        assert_codes_equal(got.codes[:, blocks], want_codes)
        assert (got.scales[:, [0, 2, 3]] == 0).all()


@EACH_RULE
def test_the_table_of_FP8_to_FP4_is_the_oracle(rule):
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (8, 150)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 3
    codes[0, 5], codes[1, 149] = 0x7F, 0xFF
    exponents = np.array([[0, -133], [5, -7], [-149, 127], [NAN, 3], [2, NAN], [-120, 120], [1, 1], [126, -126]])
    got_codes, got_scales = fp8_to_fp4_rows(codes, exponents, rule.name)
    for r in range(8):
        for b in range(2):
            exponent = None if exponents[r, b] == NAN else int(exponents[r, b])
            want = oracle.fp8_block_to_fp4(codes[r, 128 * b : 128 * b + 128].tolist(), exponent, rule.name)
            assert got_codes[r, 128 * b : 128 * b + 128].tolist() == [c for block, _ in want for c in block]
            assert got_scales[r, 4 * b : 4 * b + 4].tolist() == [s for _, s in want]


@EACH_RULE
def test_FP8_to_FP4_of_random_rows_of_any_length(rule):
    rng = np.random.default_rng(5)
    for columns in (1, 31, 32, 33, 100, 127, 128, 129, 160, 161, 300):
        codes = rng.integers(0, 256, (20, columns)).astype(np.uint8)
        codes[rng.random(codes.shape) < 0.9] &= 0xDF  # fewer NaNs
        exponents = rng.integers(-149, 128, (20, -(-columns // 128)))
        exponents[rng.random(exponents.shape) < 0.1] = NAN
        source = fp8(codes, exponents)
        got = fp8_row_to_fp4_row(source, scale_rule=rule)
        assert_quantized_equal(got, Quantized(*fp8_to_fp4_rows(codes, exponents, rule.name)))
        assert_tensors_equal(quantize(source.dequantize(np.float64), MXFP4, scale_rule=rule), got)


def test_the_default_rule_is_FLOOR():
    source = quantize(np.random.default_rng(6).standard_normal((20, 256)), FP8_1X128)
    assert_tensors_equal(fp8_row_to_fp4_row(source), fp8_row_to_fp4_row(source, scale_rule=ScaleRule.FLOOR))


def test_a_NaN_scale_poisons_four_blocks_and_a_NaN_code_one():
    codes = np.full((2, 256), 0x38, np.uint8)
    codes[1, 40] = 0xFF
    got = fp8_row_to_fp4_row(fp8(codes, [[0, NAN], [0, 0]]))
    assert (got.scales == 0xFF).tolist() == [[False] * 4 + [True] * 4, [False, True] + [False] * 6]
    assert (got.codes[np.repeat(got.scales == 0xFF, 32, axis=1)] == 0).all()
    assert np.isnan(got.dequantize()).sum() == 128 + 32


def test_every_kind_of_NaN_scale_is_one():
    bits = np.array([[0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFF800001]], np.uint32)
    source = BlockTensor(np.full((1, 640), 0x38, np.uint8), bits.view(np.float32), FP8_1X128)
    assert (fp8_row_to_fp4_row(source).scales == 0xFF).all()
    assert (fp8_row_to_fp8_col(source).codes[:, 0] == 0x7F).all()


# --------------------------------------------------------------------------------------------------------- round trip
@EACH_HEADROOM
def test_FP4_to_FP8_and_back_has_the_same_values_wherever_it_was_exact(headroom):
    """Blocks whose largest magnitude is each of the seven, beside a block of every other scale."""
    signed = [np.concatenate([ALL_CODES[: m + 1], 8 + ALL_CODES[: m + 1]]) for m in range(8)]
    contents = np.array([np.resize(np.append(s, s[-1]), 32) for s in signed], np.uint8)  # (8, 32), largest 0..7
    contents[:, 0] = np.arange(8)
    for top in (0, 1, 13, 127, 240, 254):
        scales = np.zeros((256, 8, 4), np.uint8)
        scales[..., 0], scales[..., 1], scales[..., 2] = top, np.arange(256)[:, None], np.arange(256)[:, None]
        codes = np.zeros((256, 8, 4, 32), np.uint8)
        codes[:, :, 0], codes[:, :, 1], codes[:, :, 2] = contents[7], contents, contents[::-1]
        source = fp4(codes.reshape(-1, 128), scales.reshape(-1, 4))
        middle = fp4_row_to_fp8_row(source, headroom=headroom)
        back = fp8_row_to_fp4_row(middle)

        def by_block(t):
            return t.dequantize(np.float64).reshape(-1, 4, 32)

        same = (by_block(source) == by_block(middle)) | (np.isnan(by_block(source)) & np.isnan(by_block(middle)))
        exact = same.all(axis=2)
        assert_floats_equal(by_block(back)[exact], by_block(source)[exact])

        # The scale comes back too where the largest magnitude is 4 or 6; else it is renormalised, down to -127.
        largest = (source.codes.reshape(-1, 4, 32) & 7).max(axis=2)
        leading = np.array([0, 3, 2, 2, 1, 1, 0, 0])[largest]  # binades below 4
        want = np.where(source.scales == 0xFF, 0xFF, np.maximum(source.scales.astype(int) - leading, 0))
        want = np.where((largest == 0) & (source.scales != 0xFF), 0, want)
        assert (back.scales[exact] == want[exact]).all()
        assert exact.any()


# ------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("convert", [fp4_row_to_fp8_row, fp4_row_to_fp8_col])
@pytest.mark.parametrize("headroom", [7, -1, 1.5, True, "6", None, 2**40, 6.0], ids=repr)
def test_a_headroom_that_is_no_integer_from_0_to_6_is_refused(convert, headroom):
    with pytest.raises(ValueError, match=f"{convert.__name__}: headroom is {headroom!r}, needed an integer 0 to 6"):
        convert(quantize(np.ones((2, 32)), MXFP4), headroom=headroom)


def test_a_headroom_may_be_a_NumPy_integer():
    t = quantize(np.ones((2, 32)), MXFP4)
    assert_tensors_equal(fp4_row_to_fp8_row(t, headroom=np.int64(3)), fp4_row_to_fp8_row(t, headroom=3))


@pytest.mark.parametrize("convert", [fp4_row_to_fp8_row, fp4_row_to_fp8_col, fp8_row_to_fp4_row, fp8_row_to_fp8_col])
def test_another_source_is_refused(convert):
    needed = "MXFP4" if convert in (fp4_row_to_fp8_row, fp4_row_to_fp8_col) else "FP8_1X128"
    x = np.ones((128, 128))
    others = [
        quantize(x, MXFP4, axis=0),
        quantize(x, FP8_1X128, axis=0),
        quantize(x, NVFP4),
        quantize(x, MXFP8_E4M3),
        quantize(x, FP8_128X1),
        quantize(x, FP8_1X128 if needed == "MXFP4" else MXFP4),
    ]
    for t in others:
        message = f"{convert.__name__}: t is {t.format} along axis {t.axis}, needed {needed} along axis -1"
        with pytest.raises(ValueError, match=message):
            convert(t)
    with pytest.raises(TypeError, match=f"{convert.__name__}: t is a ndarray, needed a BlockTensor"):
        convert(x)


@pytest.mark.parametrize("convert", [fp8_row_to_fp4_row, fp8_row_to_fp8_col])
@pytest.mark.parametrize("bad", [0.3, 3.0, 0.0, -0.0, -1.0, np.inf, -np.inf, 2.0**-149 * 3, 1 + 2**-23, -(2.0**-149)])
def test_a_scale_that_is_no_power_of_two_is_named(convert, bad):
    scales = np.ones((4, 3), np.float32)
    scales[1, 2], scales[2, 0] = np.nan, bad
    scales[3, 1] = 7
    with pytest.raises(
        ValueError, match=rf"{convert.__name__}: scale .* at index \(2, 0\) is neither a positive power"
    ):
        convert(BlockTensor(np.zeros((4, 384), np.uint8), scales, FP8_1X128))


def test_every_power_of_two_is_one():
    exponents = np.arange(-149, 128)[:, None]
    t = fp8(np.full((277, 1), 0x38, np.uint8), exponents)
    assert (
        fp8_row_to_fp4_row(t).dequantize(np.float64) == np.exp2(exponents.clip(-128) * 1.0) * (exponents > -129)
    ).all()


def test_a_rule_that_is_no_ScaleRule_is_refused():
    with pytest.raises(TypeError, match="fp8_row_to_fp4_row: scale_rule is 'rceil', needed a ScaleRule or None"):
        fp8_row_to_fp4_row(quantize(np.ones((1, 128)), FP8_1X128), scale_rule="rceil")
