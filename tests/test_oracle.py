"""The oracle judged by hand: the specification's own numbers, and a search that looks at every code."""

from fractions import Fraction

import pytest

from tests.oracle import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FP16,
    FP32,
    INT8,
    SCALE_RULES,
    SPECS,
    TWO,
    USER_SPECS,
    Number,
    decode,
    emax,
    encode,
    finite,
    fp4_blocks_to_fp8,
    fp8_block_to_fp4,
    fp8_row_to_fp8_col,
    magnitude,
    magnitudes,
    max_finite,
    min_normal,
    min_subnormal,
    nearest_code_by_brute_force,
    neighbours,
    number,
    philox4x32,
    quantize_block,
    quantize_fp8_block,
    quantize_nvfp4,
    scale_exponent,
)


def test_E2M1_is_the_published_table():
    assert [decode(c, E2M1).value for c in range(8)] == [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]
    assert decode(8, E2M1) == Number(True, "finite", Fraction(0))
    assert decode(15, E2M1).value == -6


@pytest.mark.parametrize(
    ("spec", "largest", "normal", "subnormal"),
    [
        (E2M1, 6, 1, Fraction(1, 2)),
        (E2M3, Fraction(15, 2), 1, Fraction(1, 8)),
        (E3M2, 28, Fraction(1, 4), Fraction(1, 16)),
        (E4M3, 448, TWO**-6, TWO**-9),
        (E5M2, 57344, TWO**-14, TWO**-16),
        (E8M0, TWO**127, TWO**-127, None),
        (INT8, Fraction(127, 64), 1, Fraction(1, 64)),
        (BF16, (2 - TWO**-7) * TWO**127, TWO**-126, TWO**-133),
        (FP16, 65504, TWO**-14, TWO**-24),
        (FP32, (2 - TWO**-23) * TWO**127, TWO**-126, TWO**-149),
    ],
    ids=lambda s: getattr(s, "name", ""),
)
def test_constants_are_those_of_the_specification(spec, largest, normal, subnormal):
    assert (max_finite(spec), min_normal(spec), min_subnormal(spec)) == (largest, normal, subnormal)


def test_emax_of_the_element_formats():
    assert [emax(s) for s in (E2M1, E2M3, E3M2, E4M3, E5M2, INT8)] == [2, 2, 4, 8, 15, 0]


def test_special_codes():
    assert [decode(c, E4M3).kind for c in (0x7E, 0x7F, 0xFF)] == ["finite", "nan", "nan"]
    assert [decode(c, E5M2).kind for c in (0x7B, 0x7C, 0x7D, 0xFC)] == ["finite", "inf", "nan", "inf"]
    assert [decode(c, E8M0).kind for c in (0xFE, 0xFF)] == ["finite", "nan"]
    assert decode(0x80, INT8).value == -2
    assert decode(0x80, USER_SPECS["float8_e4m3fnuz"]).kind == "nan"


def test_ties_of_E2M1():
    ties = [Fraction(v) for v in ("1/4", "3/4", "5/4", "7/4", "5/2", "7/2", "5")]
    assert [encode(t, E2M1) for t in ties] == [0, 2, 2, 4, 4, 6, 6]
    assert [encode(t, E2M1, "TIES_TO_AWAY") for t in ties] == [1, 2, 3, 4, 5, 6, 7]
    assert [encode(t, E2M1, "TOWARD_ZERO") for t in ties] == [0, 1, 2, 3, 4, 5, 6]
    assert [encode(-t, E2M1, "UP") for t in ties] == [8, 9, 10, 11, 12, 13, 14]
    assert [encode(-t, E2M1, "DOWN") for t in ties] == [9, 10, 11, 12, 13, 14, 15]


def test_overflow_is_decided_after_rounding():
    assert [encode(x, E4M3, overflow="TO_NONFINITE") for x in (448, 464, 465, -465)] == [0x7E, 0x7E, 0x7F, 0xFF]
    assert [encode(x, E4M3, "TOWARD_ZERO", "TO_NONFINITE") for x in (479, 480, 10**9)] == [0x7E, 0x7E, 0x7E]
    assert [encode(x, E5M2, overflow="TO_NONFINITE") for x in (61439, 61440, -61440)] == [0x7B, 0x7C, 0xFC]
    assert encode(float("inf"), E5M2) == 0x7B
    assert encode(float("inf"), E5M2, "TOWARD_ZERO", "TO_NONFINITE") == 0x7C
    with pytest.raises(ValueError, match="neither"):
        encode(1, E2M1, overflow="TO_NONFINITE")


def test_E8M0_as_a_target():
    assert [encode(x, E8M0) for x in (1, 2, 3, 6, Fraction(3, 4), Fraction(3, 2))] == [127, 128, 128, 130, 126, 128]
    assert [encode(x, E8M0) for x in (0.0, -0.0, 2.0**-149, -1, float("inf"), float("nan"))] == [0, 0, 0, 255, 255, 255]
    assert [encode(TWO**128, E8M0, overflow=o) for o in ("SATURATE", "TO_NONFINITE")] == [0xFE, 0xFF]


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.bits <= 8], ids=lambda s: s.name)
def test_search_by_neighbours_is_the_search_of_every_code(spec):
    table = magnitudes(spec)
    for code, low in enumerate(table[:-1]):
        gap = table[code + 1] - low
        for x in (low, low + gap / 2, low + 2 * gap / 3):
            assert neighbours(x, spec) == (code, code + 1)
            assert encode(finite(x), spec) == nearest_code_by_brute_force(x, spec)


@pytest.mark.parametrize("spec", [*SPECS.values(), *USER_SPECS.values()], ids=lambda s: s.name)
def test_decode_then_encode_is_identity(spec):
    step = {8: 1, 16: 13, 32: 15_485_863}.get(spec.bits, 1)  # wide formats: a prime step
    for code in range(0, 1 << spec.bits, step):
        n = decode(code, spec)
        if n.kind == "finite" and not (spec.twos_complement and code == spec.sign_bit):
            assert encode(n, spec) == code


def test_stochastic_rounding_counts_its_draws():
    ups = [encode(Fraction(11, 4), E2M1, "STOCHASTIC", r=r, k=3) for r in range(8)]  # 2.75: 3/4 of the way from 2 to 3
    assert ups == [5] * 6 + [4] * 2
    assert [encode(7, E2M1, "STOCHASTIC", r=r, k=1) for r in range(2)] == [7, 7]
    assert [encode(464, E4M3, "STOCHASTIC", "TO_NONFINITE", r=r, k=1) for r in range(2)] == [0x7F, 0x7E]


def test_number_takes_signs_from_floats():
    assert number(-0.0) == Number(True, "finite", Fraction(0))
    assert number(float("-inf")) == Number(True, "inf", None)
    assert number(1e-45).magnitude == Fraction(1e-45)


def test_scale_rules_at_their_thresholds():
    at = {
        rule: [scale_exponent(Fraction(v), E2M1, rule) for v in ("4", "6", "13/2", "7", "15/2")] for rule in SCALE_RULES
    }
    assert at == {"FLOOR": [0, 0, 0, 0, 0], "RCEIL": [0, 0, 1, 1, 1], "CEIL": [0, 1, 1, 1, 1], "EVEN": [0, 0, 0, 1, 1]}
    flt_max = max_finite(FP32)
    assert [scale_exponent(flt_max, E2M1, r) + 127 for r in SCALE_RULES] == [252, 253, 253, 253]
    assert [scale_exponent(flt_max, INT8, r) for r in SCALE_RULES] == [127] * 4
    assert [scale_exponent(TWO**-149, E4M3, r) for r in SCALE_RULES] == [-127] * 4


@pytest.mark.parametrize(
    ("spec", "rceil", "even"),
    [
        (E2M1, "3/2", "7/4"),
        (E2M3, "15/8", "31/16"),
        (E3M2, "7/4", "15/8"),
        (E4M3, "7/4", "31/16"),
        (E5M2, "7/4", "15/8"),
    ],
    ids=lambda s: getattr(s, "name", ""),
)
def test_scale_rule_thresholds_are_those_of_the_table(spec, rceil, even):
    tiny = TWO**-40
    base = -emax(spec)
    assert [scale_exponent(Fraction(rceil) + d, spec, "RCEIL") - base for d in (-tiny, 0, tiny)] == [0, 0, 1]
    assert [scale_exponent(Fraction(even) + d, spec, "EVEN") - base for d in (-tiny, 0, tiny)] == [0, 1, 1]


def test_quantize_block_by_hand():
    assert quantize_block([1.0, -3.0], E2M1, "FLOOR") == ([4, 15], 126)
    assert quantize_block([0.0, -0.0], E2M1, "RCEIL") == ([0, 8], 0)
    assert quantize_block([1.0, float("inf")], E2M1, "EVEN") == ([0, 0], 0xFF)


def test_fp8_block_by_hand():
    assert quantize_fp8_block([448.0, 1.0]) == ([0x7E, 0x38], 1)
    assert quantize_fp8_block([449.0]) == ([0x76], 2)
    assert quantize_fp8_block([0.0]) == ([0], 1)
    assert quantize_fp8_block([float("nan"), 1.0]) == ([0x7F, 0x7F], None)


def test_nvfp4_by_hand():
    got = quantize_nvfp4([[6.0, -3.0, 0.5], [0.0, -0.0], [float("nan"), 1.0]])
    assert got.codes == [[7, 13, 1], [0, 0], [0, 0]]
    assert got.scales == [0x7E, 0, 0x7F]  # amax 6: s_enc = 448
    assert got.tensor_scale == magnitude(encode(Fraction(1, 448), FP32), FP32)


def test_fp4_to_fp8_by_hand():
    # 6 * 2**6 = 384 = 1.5 * 2**8; 0.5 * 2**6 / 2**14 = 2**-9, the smallest subnormal
    assert fp4_blocks_to_fp8([([7, 8], 127), ([1], 113), ([1], 112), ([2], 0xFF)]) == ([0x7C, 0x80, 1, 0, 0x7F], -6)
    assert fp4_blocks_to_fp8([([7], 0xFF)], 3) == ([0x7F], -130)


def test_fp8_transpose_rounds_the_whole_significand():
    # 1.875 * 2**-6 shifted by 5 vanishes, shifted by 2 gives 4 * 2**-9
    for shift, want in ((5, 0x00), (2, 0x04)):
        column = fp8_row_to_fp8_col([[0x0F], [0x38], [0x80]], [[0], [shift], [100]])
        assert column[0][0].codes[:3] == [want, 0x38, 0x80]
        assert column[0][0].exponent == shift
        assert column[0][0].codes[3:] == [0] * 125
    assert fp8_row_to_fp8_col([[0x00], [0x38]], [[3], [None]])[0][0] == ([0x00, 0x7F] + [0] * 126, 0)


def test_fp8_to_fp4_by_hand():
    blocks = fp8_block_to_fp4([0x7E] + [0] * 31 + [0x7F] + [0x38] * 31 + [0x80] * 32, -3, "FLOOR")
    assert blocks == [([7] + [0] * 31, 127 + 6 - 3), ([0] * 32, 0xFF), ([8] * 32, 0)]
    assert fp8_block_to_fp4([0x38] * 3, None, "FLOOR") == [([0] * 3, 0xFF)]


def test_philox_known_answers():
    ones = 0xFFFFFFFF
    assert philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter, key = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox4x32(counter, key) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
