"""The FP8 GEMM against exact rationals; one step by hand first."""

import re
import tracemalloc
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mxsim.blocks import (
    EXACT,
    FP8_1X128,
    FP8_128X128,
    FP32_SEQUENTIAL,
    HOPPER,
    MXFP8_E4M3,
    Accumulator,
    BlockTensor,
    PromotionOrder,
    fp8_gemm,
    quantize,
)
from mxsim.blocks.gemm import _fma
from mxsim.formats import E3M2, E4M3, E5M2, Overflow, Rounding, decode_table, encode
from tests.blocks import oracle_gemm as oracle
from tests.blocks.gemm_cases import ACCUMULATORS, E5M2_CASES, E5M2_PAIRS, EVERY_CASE, LONG_SPANS, RNE, Case, case
from tests.compare import assert_codes_equal

BY_NAME = pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
BY_PAIR = pytest.mark.parametrize("formats", E5M2_PAIRS, ids=lambda pair: "-".join(map(str, pair)))


def dot(a, b, accumulator=HOPPER, formats=(E4M3, E4M3), **keywords) -> float:
    """One dot product of two lists of values, scales 1."""
    operands = []
    for x, fmt in zip((a, b), formats, strict=True):
        codes = encode(np.array([x], np.float64), fmt, overflow=Overflow.TO_NONFINITE)
        scales = np.ones((1, -(-len(x) // 128)), np.float32)
        operands.append(BlockTensor(codes, scales, replace(FP8_1X128, element=fmt)))
    return float(fp8_gemm(*operands, accumulator=accumulator, **keywords)[0, 0])


def rule_of(accumulator: Accumulator, b: BlockTensor) -> oracle.Rule:
    default = PromotionOrder.SCALES_FIRST if b.format.is_tile else PromotionOrder.A_THEN_B
    return oracle.Rule(
        accumulator.products_per_step,
        accumulator.fraction_bits,
        accumulator.term_rounding and accumulator.term_rounding.name,
        accumulator.sum_rounding.name,
        accumulator.promotion_interval,
        (accumulator.scale_order or default).name,
    )


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint16)


def assert_as_oracle(a: BlockTensor, b: BlockTensor, accumulator=HOPPER, *, split_k=1, columns=None) -> None:
    columns = range(b.shape[0]) if columns is None else columns
    rule = rule_of(accumulator, b)
    rows_per_scale = b.format.block_shape[0]
    scales_a, scales_b = a.scales.view(np.uint32).tolist(), b.scales.view(np.uint32).tolist()
    codes_a, codes_b = a.codes.tolist(), b.codes.tolist()
    formats = oracle.ELEMENTS[a.format.element.name], oracle.ELEMENTS[b.format.element.name]
    want = [
        [
            oracle.dot(codes_a[m], codes_b[n], scales_a[m], scales_b[n // rows_per_scale], rule, split_k, formats)
            for n in columns
        ]
        for m in range(a.shape[0])
    ]
    got = fp8_gemm(a, b, accumulator=accumulator, split_k=split_k)[:, list(columns)]
    assert_codes_equal(got.view(np.uint32), np.array(want, np.uint32), label=f"{accumulator}, split_k {split_k}")


# ------------------------------------------------------------------------------------------------- one step, by hand
def test_a_term_below_2_to_the_E_minus_13_is_lost():
    assert dot([256, 2.0**-6], [1, 1]) == 256
    assert dot([256, 2.0**-5], [1, 1]) == 256 + 2.0**-5


def test_each_term_is_truncated_by_itself():
    assert dot([1] + [2.0**-7] * 8, [1] + [2.0**-7] * 8) == 1  # eight of 2**-14 beside q = 2**-13
    assert dot([1] + [2.0**-7] * 8, [1] + [2.0**-6] * 8) == 1 + 8 * 2.0**-13


def test_truncation_is_toward_zero():
    assert dot([256, -(2.0**-6)], [1, 1]) == 256
    assert dot([-256, 2.0**-6], [1, 1]) == -256
    assert dot([256, -1.5 * 2.0**-5], [1, 1]) == 256 - 2.0**-5


def test_a_subnormal_operand_counts_as_the_smallest_normal_one():
    # 2**-9 * 448 has the exponent -6 + 8 = 2, so that q = 2**-11, though it is below 1
    assert dot([2.0**-9, 2.0**-6], [448, 2.0**-6]) == 2.0**-9 * 448
    # the same product of normal numbers, 2**-6 * 56, has -6 + 5: q = 2**-14
    assert dot([2.0**-6, 2.0**-6], [56, 2.0**-6]) == 2.0**-9 * 448 + 2.0**-12


def test_the_sum_is_truncated_to_13_fraction_bits():
    first = [128, 128, 8, 7] + [0] * 28
    weights = [112, 15, 15, 1] + [0] * 28
    assert dot(first, weights) == 16383
    assert dot([*first, 1, 1], [*weights, 1, 1]) == 16384  # 16385 has 14 fraction bits


def test_the_accumulator_is_a_term_like_the_others():
    assert dot([2.0**-6, *[0] * 31, 256], [1] * 33) == 256  # 2**-6 from the first step
    assert dot([2.0**-6, *[0] * 31, 128], [1] * 33) == 128 + 2.0**-6


@pytest.mark.parametrize("a, b", [([1, 1], [1, -1]), ([-0.0], [1]), ([0], [-0.0]), ([-0.0], [0])])
def test_a_zero_result_is_positive(a, b):
    assert np.copysign(1, dot(a, b)) == 1


def test_blocks_start_from_zero_and_add_up_in_float32():
    assert dot([256, *[0] * 127, 2.0**-6], [1] * 129) == 256 + 2.0**-6
    assert dot([256, *[0] * 127, 2.0**-6], [1] * 129, Accumulator("never", promotion_interval=None)) == 256
    assert dot([256, *[0] * 31, 2.0**-6], [1] * 33, Accumulator("every 32", promotion_interval=32)) == 256 + 2.0**-6


def test_other_accumulators_by_hand():
    a, b = [256, *[2.0**-6] * 3], [1] * 4
    assert dot(a, b) == 256
    assert dot(a, b, EXACT) == dot(a, b, FP32_SEQUENTIAL) == 256 + 3 * 2.0**-6
    assert dot(a, b, Accumulator("nearest", term_rounding=RNE, sum_rounding=RNE)) == 256  # three ties, to 0
    assert dot(a, b, Accumulator("exact terms", term_rounding=None)) == 256 + 2.0**-5  # 1.5 q, truncated
    assert dot(a, b, Accumulator("exact terms", term_rounding=None, sum_rounding=RNE)) == 256 + 2.0**-4
    assert dot(a, b, Accumulator("14 bits", fraction_bits=14)) == 256 + 3 * 2.0**-6


def test_the_order_of_the_scales_matters():
    scale = np.float32(1 + 2.0**-23)
    for order, want in (
        (PromotionOrder.A_THEN_B, np.float64(np.float32(3 * np.float64(scale))) * scale),
        (PromotionOrder.SCALES_FIRST, 3 * np.float64(scale * scale)),
        (PromotionOrder.EXACT, 3 * np.float64(scale) * np.float64(scale)),
    ):
        t = [BlockTensor(encode([[x]], E4M3), np.full((1, 1), scale), FP8_1X128) for x in (3.0, 1.0)]
        assert fp8_gemm(*t, accumulator=Accumulator("", scale_order=order))[0, 0] == np.float32(want)


# ---------------------------------------------------------------------------------------------- against the rationals
@pytest.mark.parametrize("codes, scales", EVERY_CASE)
def test_Hopper_by_rows(codes, scales):
    assert_as_oracle(*case(codes, scales, 4, 5, 300, seed=1).operands())


@pytest.mark.parametrize("codes, scales", EVERY_CASE)
def test_Hopper_by_tiles(codes, scales):
    assert_as_oracle(*case(codes, scales, 3, 130, 256, seed=2).tiled(), columns=[0, 127, 128, 129])


@BY_NAME
@pytest.mark.parametrize(
    "codes, scales", [("wide", "float32 near 1"), ("cancelling", "2**-20..2**20"), ("random codes", "infinite and 0")]
)
def test_every_accumulator(accumulator, codes, scales):
    assert_as_oracle(*case(codes, scales, 3, 3, 256, seed=3).operands(), accumulator)


@pytest.mark.parametrize("accumulator", LONG_SPANS, ids=str)
@pytest.mark.parametrize("split_k", [1, 2])
def test_spans_of_several_blocks(accumulator, split_k):
    c = case("wide", "float32 near 1", 3, 3, 600, seed=4)
    same = Case(c.a, np.repeat(c.a_scales[:, :1], 5, 1), c.b, np.repeat(c.b_scales[:, :1], 5, 1))
    assert_as_oracle(*same.operands(), accumulator, split_k=split_k)


@pytest.mark.parametrize("split_k", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulator", [HOPPER, EXACT], ids=str)
def test_split_k(accumulator, split_k):
    assert_as_oracle(*case("normal", "float32 near 1", 3, 3, 600, seed=5).operands(), accumulator, split_k=split_k)


def test_a_split_adds_halves_in_float32():
    c = case("normal", "2**-20..2**20", 3, 4, 512)
    a, b = c.operands()
    halves = [
        fp8_gemm(*(BlockTensor(t.codes[:, k], t.scales[:, s], FP8_1X128) for t in (a, b)))
        for k, s in ((slice(0, 256), slice(0, 2)), (slice(256, 512), slice(2, 4)))
    ]
    assert np.array_equal(fp8_gemm(a, b, split_k=2), halves[0] + halves[1])


@pytest.mark.parametrize("columns", [0, 1, 31, 33, 127, 129])
def test_a_tail_acts_as_if_padded_with_zeros(columns):
    c = case("random codes", "float32 near 1", 3, 4, 256)
    num_blocks = -(-columns // 128)
    tail, padded = c.a[:, :columns], np.zeros((3, num_blocks * 128), np.uint8)
    padded[:, :columns] = tail
    b, scales = c.b[:, : num_blocks * 128], (c.a_scales[:, :num_blocks], c.b_scales[:, :num_blocks])
    got = fp8_gemm(BlockTensor(tail, scales[0], FP8_1X128), BlockTensor(b[:, :columns], scales[1], FP8_1X128))
    want = fp8_gemm(BlockTensor(padded, scales[0], FP8_1X128), BlockTensor(b, scales[1], FP8_1X128))
    assert_codes_equal(bits_of(got), bits_of(want))


def test_a_split_loses_the_sign_of_zero_and_a_whole_K_keeps_it():
    # -1 * 1 * 2**-200 underflows to -0 in every block; an H200 gives +0 where cuBLAS splits K.
    codes = np.zeros((1, 256), np.uint8)
    codes[0, [0, 128]] = 0xB8
    ones = np.where(codes != 0, 0x38, 0).astype(np.uint8)
    tiny = np.full((1, 2), 2.0**-100, np.float32)
    a, b = BlockTensor(codes, tiny, FP8_1X128), BlockTensor(ones, tiny, FP8_1X128)
    assert bits_of(fp8_gemm(a, b)).tolist() == [[0x80000000]]
    assert bits_of(fp8_gemm(a, b, split_k=2)).tolist() == [[0x00000000]]
    assert_as_oracle(a, b, split_k=2)


def test_bfloat16_rounds_the_float32_result():
    for codes, scales in EVERY_CASE:
        a, b = case(codes, scales, 16, 16, 256).operands()
        want = [oracle.to_bf16(int(x)) for x in bits_of(fp8_gemm(a, b)).reshape(-1)]
        got = fp8_gemm(a, b, out=ml_dtypes.bfloat16)
        assert got.dtype == ml_dtypes.bfloat16
        assert_codes_equal(bits_of(got), np.array(want, np.uint16).reshape(16, 16), label=f"{codes}, {scales}")


@BY_NAME
def test_tiles_of_the_output_do_not_show(accumulator):
    a, b = case("wide", "float32 near 1", 150, 160, 128).operands()
    whole = fp8_gemm(a, b, accumulator=accumulator)
    last = [BlockTensor(t.codes[-3:], t.scales[-3:], FP8_1X128) for t in (a, b)]
    assert_codes_equal(bits_of(whole[-3:, -3:]), bits_of(fp8_gemm(*last, accumulator=accumulator)))


# ------------------------------------------------------------------------------------------------------------- E5M2
def test_a_subnormal_of_E5M2_counts_as_2_to_the_minus_14():
    both = (E5M2, E4M3)
    # 2**-16 * 256 has the exponent -14 + 8 = -6, so that q = 2**-19, though it is 2**-8
    assert dot([2.0**-16, 2.0**-14], [256, 2.0**-6], formats=both) == 2.0**-8
    # the same product of normal numbers has -8: q = 2**-21
    assert dot([2.0**-14, 2.0**-14], [64, 2.0**-6], formats=both) == 2.0**-8 + 2.0**-20


def test_products_of_E5M2_reach_from_2_to_the_minus_32_to_2_to_the_32():
    both = (E5M2, E5M2)
    assert dot([57344, -57344, 2.0**-16], [57344, 57344, 2.0**-16], formats=both) == 0
    assert dot([57344, -57344, 2.0**-16], [57344, 57344, 2.0**-16], EXACT, both) == 2.0**-32
    assert dot([57344] * 4, [57344] * 4, formats=both) == 4 * 57344.0**2
    assert dot([2.0**-16] * 3, [2.0**-16] * 3, formats=both) == 3 * 2.0**-32


@pytest.mark.parametrize("accumulator", [HOPPER, EXACT, FP32_SEQUENTIAL], ids=str)
@pytest.mark.parametrize(
    "a, b, want",
    [
        ([np.inf, 1], [1, 1], np.inf),
        ([np.inf, 1], [-1, 1], -np.inf),
        ([np.inf, 57344], [2.0**-16, -57344], np.inf),
        ([-np.inf], [np.inf], -np.inf),
        ([np.inf, np.inf], [1, 2], np.inf),
        ([np.inf, np.inf], [1, -1], np.nan),
        ([np.inf] + [0] * 40 + [-np.inf], [1] * 42, np.nan),  # in two steps
        ([np.inf, 1], [0, 1], np.nan),
        ([np.inf, 1], [-0.0, 1], np.nan),
    ],
)
def test_infinities_are_IEEEs(a, b, want, accumulator):
    assert np.array_equal(dot(a, b, accumulator, (E5M2, E5M2)), want, equal_nan=True)
    assert np.array_equal(dot(b, a, accumulator, (E5M2, E5M2)), want, equal_nan=True)


@BY_PAIR
@pytest.mark.parametrize("codes, scales", E5M2_CASES)
def test_Hopper_with_E5M2(codes, scales, formats):
    assert_as_oracle(*case(codes, scales, 4, 4, 300, seed=21, formats=formats).operands())


@BY_PAIR
def test_Hopper_with_E5M2_by_tiles(formats):
    for codes in ("wide", "cancelling", "infinities"):
        tiled = case(codes, "float32 near 1", 2, 130, 256, seed=22, formats=formats).tiled()
        assert_as_oracle(*tiled, columns=[0, 127, 129])


@BY_NAME
@BY_PAIR
def test_every_accumulator_with_E5M2(accumulator, formats):
    for codes in ("wide", "cancelling", "infinities"):
        assert_as_oracle(*case(codes, "float32 near 1", 2, 2, 256, seed=23, formats=formats).operands(), accumulator)


@BY_PAIR
@pytest.mark.parametrize("accumulator", LONG_SPANS, ids=str)
def test_spans_of_several_blocks_with_E5M2(accumulator, formats):
    for codes in ("wide", "infinities"):
        c = case(codes, "float32 near 1", 2, 2, 600, seed=24, formats=formats)
        same = c._replace(a_scales=np.repeat(c.a_scales[:, :1], 5, 1), b_scales=np.repeat(c.b_scales[:, :1], 5, 1))
        assert_as_oracle(*same.operands(), accumulator, split_k=2)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), *E5M2_PAIRS], ids=lambda pair: "-".join(map(str, pair)))
def test_a_single_product_is_exact_for_every_pair_of_codes(formats):
    codes, ones = np.arange(256, dtype=np.uint8)[:, None], np.ones((256, 1), np.float32)
    a, b = (BlockTensor(codes, ones, replace(FP8_1X128, element=fmt)) for fmt in formats)
    with np.errstate(invalid="ignore"):
        want = np.multiply.outer(*(decode_table(fmt).astype(np.float64) for fmt in formats)) + 0.0
    is_nan = np.isnan(want)
    bits = np.where(is_nan, np.uint32(oracle.NAN_BITS), np.where(is_nan, 0, want).astype(np.float32).view(np.uint32))
    for accumulator in (HOPPER, EXACT, FP32_SEQUENTIAL):
        assert_codes_equal(bits_of(fp8_gemm(a, b, accumulator=accumulator)), bits, label=str(accumulator))


@pytest.mark.parametrize("bits", [1, 5])
def test_a_sum_that_vanishes_in_its_truncations_is_positive(bits):
    # Block 1 underflows to -0. In block 2 c = -2**-12 and the last product, subnormal by subnormal or by 448, are each
    # below one q: all terms truncate to -0, and d must still be +0, since -0 + -0 would stay -0.
    a = [-1.0] + [0] * 127 + [-(2.0**-6), -(2.0**-9)]
    b = [1.0] + [0] * 127 + [2.0**-6, 448 if bits == 1 else 2.0**-9]
    if bits == 5:
        a[128], b[128] = 0, 0
    tiny = np.float32([[2.0**-100, 1]])
    rows = [BlockTensor(encode(np.array([x]), E4M3), tiny, FP8_1X128) for x in (a, b)]
    accumulator = Accumulator("few bits", products_per_step=1, fraction_bits=bits)
    assert bits_of(fp8_gemm(*rows, accumulator=accumulator)).tolist() == [[0]]
    assert_as_oracle(*rows, accumulator)


# ------------------------------------------------------------------------------------------------- NaN and exactness
@BY_NAME
@pytest.mark.parametrize("where", ["a", "a_scales", "b", "b_scales"])
def test_NaN_makes_its_row_or_column_NaN(where, accumulator):
    c = case("normal", "1", 4, 5, 256)
    getattr(c, where)[2, 1] = 0xFF if where in "ab" else np.nan
    for out, nan in ((np.float32, 0x7FFFFFFF), (ml_dtypes.bfloat16, 0x7FFF)):
        bits = bits_of(fp8_gemm(*c.operands(), accumulator=accumulator, out=out))
        is_nan = bits == nan
        expected = np.zeros((4, 5), bool)
        expected[(2, slice(None)) if where[0] == "a" else (slice(None), 2)] = True
        assert np.array_equal(is_nan, expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "x, y, z, want",
    [
        # 2**-24 * (1 + 2**-30) lies just above the tie between 1 and 1 + 2**-23; float64 puts the sum on the tie
        (13325 * 2.0**-27, 80581 * 2.0**-27, 1, 1 + 2.0**-23),
        # 2**-24 * (1 - 2**-30) lies just below the tie between 1 + 2**-23 and 1 + 2**-22
        (2.0**-24 * (1 + 2.0**-15), 1 - 2.0**-15, 1 + 2.0**-23, 1 + 2.0**-23),
        # the same below the normal numbers: 1.5 * 2**-149 and a little more or less
        (2.0**-75 * (1 + 2.0**-15), 2.0**-75 * (1 - 2.0**-15), 2.0**-149, 2.0**-149),
        (13325 * 2.0**-90, 80581 * 2.0**-90, 2.0**-149 * 2, 2.0**-149 * 3),
    ],
)
def test_fma_rounds_once_where_float64_would_round_twice(x, y, z, want, sign):
    got = _fma(np.array([[sign * x]]), np.array([[y]]), np.array([[sign * z]], np.float32))
    assert got.dtype == np.float32
    assert got[0, 0] == sign * np.float32(want)


def test_fma_rounds_once():
    r = np.random.default_rng(6)
    patterns = r.integers(0, 2**32, (3, 4000)).astype(np.uint32)
    # near-cancellation, halfway cases, subnormal results and sums that just overflow
    patterns[0, :1500] = r.integers(100, 150, 1500) << 23 | r.integers(0, 2**23, 1500)
    patterns[1, :1500] = r.integers(100, 150, 1500) << 23 | r.integers(0, 2**23, 1500)
    with np.errstate(all="ignore"):
        product = (patterns[0].view(np.float32) * patterns[1].view(np.float32)).view(np.uint32)
    patterns[2, :500] = product[:500] ^ 0x80000000
    patterns[2, 500:1000] = product[500:1000] ^ r.integers(0, 4, 500)
    patterns[2, 1000:1500] = product[1000:1500] - (r.integers(22, 27, 500) << 23)
    patterns[:2, 1500:2000] = r.integers(50, 70, (2, 500)) << 23 | r.integers(0, 2**23, (2, 500))
    patterns[2, 1500:2000] = r.integers(0, 2**25, 500) | r.integers(0, 2, 500) << 31
    x, y, z = (p.view(np.float32) for p in patterns)
    with np.errstate(all="ignore"):
        got = _fma(x.astype(np.float64), y.astype(np.float64), z).view(np.uint32)
    got = np.where(np.isnan(got.view(np.float32)), oracle.NAN_BITS, got)
    want = [
        oracle.pack32(oracle.round32(oracle.add(oracle.multiply(*map(oracle.unpack32, (p, q))), oracle.unpack32(s))))
        for p, q, s in patterns.T.tolist()
    ]
    assert_codes_equal(got.astype(np.uint32), np.array(want, np.uint32), label="fma")


@pytest.mark.parametrize(
    "signs, scales, want",
    [
        ([1, 1, 1], [1, 2.0**-24, 2.0**-100], 1 + 2.0**-23),  # just above a tie
        ([1, 1, 1], [1, 2.0**-24, 0], 1),  # a tie
        ([1, 1, -1], [1, 2.0**-24, 2.0**-100], 1),
        ([1, -1, 1], [1, 1, 2.0**-120], 2.0**-120),
        ([1, -1, -1], [2.0**127, 2.0**127, 2.0**-149], -(2.0**-149)),
        ([1, -1, 1], [1, 1, 0], 0),
        ([1, 1, -1], [2.0**127, 2.0**127, 2.0**127], 2.0**127),  # no overflow on the way
        ([1, 1, 1], [2.0**127, 2.0**127, 0], np.inf),
    ],
)
def test_EXACT_rounds_the_real_number_once(signs, scales, want):
    codes = np.zeros((1, 384), np.uint8)
    codes[0, ::128] = 0x38
    a = BlockTensor(codes | np.repeat(np.array(signs) < 0, 128).astype(np.uint8) << 7, np.float32([scales]), FP8_1X128)
    got = fp8_gemm(a, BlockTensor(codes, np.ones((1, 3), np.float32), FP8_1X128), accumulator=EXACT)
    assert bits_of(got)[0, 0] == np.float32(want).view(np.uint32)


def test_EXACT_is_the_correctly_rounded_product_of_the_values():
    c = case("random codes", "any finite", 6, 6, 640, seed=7)
    a, b = c.operands()
    exact = [[list(map(Fraction, row)) for row in t.dequantize(np.float64).tolist()] for t in (a, b)]
    want = [
        [
            oracle.pack32(oracle.round32(oracle.exactly(sum((x * y for x, y in zip(p, q, strict=True)), Fraction(0)))))
            for q in exact[1]
        ]
        for p in exact[0]
    ]
    assert_codes_equal(bits_of(fp8_gemm(a, b, accumulator=EXACT)), np.array(want, np.uint32))


# ------------------------------------------------------------------------------------------------- shapes and memory
@pytest.mark.parametrize("m, n, k", [(0, 3, 128), (3, 0, 128), (0, 0, 0), (2, 3, 0)])
@pytest.mark.parametrize("accumulator", [HOPPER, EXACT], ids=str)
def test_empty(m, n, k, accumulator):
    a, b = case("normal", "1", m, n, k).operands()
    assert_codes_equal(bits_of(fp8_gemm(a, b, accumulator=accumulator)), np.zeros((m, n), np.uint32))


@pytest.mark.parametrize("accumulator", [HOPPER, EXACT, FP32_SEQUENTIAL], ids=str)
def test_temporaries_are_small(accumulator):
    a, b = case("normal", "float32 near 1", 500, 400, 128).operands()
    tracemalloc.start()
    try:
        fp8_gemm(a, b, accumulator=accumulator)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6


# ----------------------------------------------------------------------------------------------------------- refused
A = quantize(np.ones((2, 256)), FP8_1X128)
B = quantize(np.ones((3, 256)), FP8_128X128)


@pytest.mark.parametrize(
    "a, b, keywords, error, message",
    [
        (A.codes, B, {}, TypeError, "a is a ndarray, needed a BlockTensor"),
        (A, None, {}, TypeError, "b is a NoneType, needed a BlockTensor"),
        (B, B, {}, ValueError, "a is FP8_128X128 along axis -1, needed FP8_1X128 along axis -1, of E4M3 or E5M2"),
        (BlockTensor(0 * A.codes, A.scales, replace(FP8_1X128, name="FP8 of E3M2", element=E3M2)), B, {}, ValueError,
         "a is FP8 of E3M2 along axis -1, needed FP8_1X128 along"),
        (A, quantize(np.ones((3, 256)), MXFP8_E4M3), {}, ValueError,
         "b is MXFP8_E4M3 along axis -1, needed FP8_1X128 or FP8_128X128 along axis -1"),
        (quantize(np.ones((256, 2)), FP8_1X128, axis=0), B, {}, ValueError, "a is FP8_1X128 along axis -2, needed"),
        (quantize(np.ones(256), FP8_1X128), B, {}, ValueError, "a has 1 axes, needed 2"),
        (A, quantize(np.ones((1, 3, 256)), FP8_128X128), {}, ValueError, "b has 3 axes, needed 2"),
        (A, quantize(np.ones((3, 255)), FP8_1X128), {}, ValueError, "b has rows of 255 elements, needed 256, as in a"),
        (A, B, {"accumulator": 13}, TypeError, "accumulator is 13, needed an Accumulator"),
        (A, B, {"out": np.float64}, TypeError, "out is float64, needed float32 or bfloat16"),
        (A, B, {"out": "what"}, TypeError, "out is 'what', needed float32 or bfloat16"),
        *((A, B, {"split_k": s}, ValueError, f"split_k is {s!r}, needed 1 to 2, the blocks of K")
          for s in (0, 3, -1, 1.0, True, None)),
    ],
)  # fmt: skip
def test_refused(a, b, keywords, error, message):
    with pytest.raises(error, match=re.escape(f"fp8_gemm: {message}")):
        fp8_gemm(a, b, **keywords)


def test_scales_that_differ_within_a_span_are_refused():
    never = Accumulator("never", promotion_interval=None)
    c = case("normal", "1", 2, 3, 512)
    c.b_scales[1, 3] = 2
    message = re.escape("fp8_gemm: scales of b differ within a span of 512 elements, needed equal ones for never")
    with pytest.raises(ValueError, match=message):
        fp8_gemm(*c.operands(), accumulator=never)
    c.b_scales[1, 2] = 2
    fp8_gemm(*c.operands(), accumulator=never, split_k=2)
    fp8_gemm(*c.operands(), accumulator=Accumulator("every 256", promotion_interval=256))


def test_exact_terms_have_a_longest_span():
    codes = np.zeros((1, 2**17 + 128), np.uint8)
    t = BlockTensor(codes, np.ones((1, 2**10 + 1), np.float32), FP8_1X128)
    with pytest.raises(ValueError, match="a span has 131200 elements, needed at most 131072 for never"):
        fp8_gemm(t, t, accumulator=Accumulator("never", fraction_bits=None, promotion_interval=None))
    assert fp8_gemm(t, t, accumulator=EXACT) == 0


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"products_per_step": 0}, ValueError, "products_per_step is 0, needed a divisor of 128"),
        ({"products_per_step": 48}, ValueError, "products_per_step is 48, needed a divisor of 128"),
        ({"products_per_step": True}, ValueError, "products_per_step is True, needed"),
        ({"fraction_bits": 0}, ValueError, "fraction_bits is 0, needed 1 to 23 or None"),
        ({"fraction_bits": 24}, ValueError, "fraction_bits is 24, needed 1 to 23 or None"),
        ({"term_rounding": Rounding.UP}, ValueError, "term_rounding is <Rounding.UP"),
        ({"sum_rounding": None}, ValueError, "sum_rounding is None, needed TOWARD_ZERO or TIES_TO_EVEN"),
        ({"promotion_interval": 96}, ValueError, "promotion_interval is 96, needed a divisor or a multiple of 128"),
        ({"promotion_interval": 16}, ValueError, "promotion_interval is 16, needed a multiple of products_per_step"),
        ({"promotion_interval": 0}, ValueError, "promotion_interval is 0, needed"),
        ({"scale_order": "A_THEN_B"}, TypeError, "scale_order is 'A_THEN_B', needed a PromotionOrder or None"),
    ],
)
def test_an_accumulator_refuses(fields, error, message):
    with pytest.raises(error, match=re.escape(f"mine: {message}")):
        Accumulator("mine", **fields)


def test_an_accumulator_is_frozen():
    with pytest.raises(FrozenInstanceError):
        HOPPER.fraction_bits = 23
    assert Accumulator("Hopper", 32, 13, Rounding.TOWARD_ZERO, Rounding.TOWARD_ZERO, 128, None) == HOPPER
