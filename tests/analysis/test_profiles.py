"""Profiles of quantizers: by hand, against rationals, against ml_dtypes, and against torchao where it is installed."""

from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis.profile_catalog import PROFILES, profiles_of
from mxsim.analysis.profiles import Factor, NonFinitePolicy, Profile, Quotient, TieRule
from mxsim.blocks import FP8_1X128, FP8_128X1, MXFP4, MXFP8_E4M3, NVFP4, ScaleOrder, ScaleRule, quantize
from mxsim.formats import philox_bits
from tests.compare import assert_codes_equal, assert_floats_equal

by_profile = pytest.mark.parametrize("profile", PROFILES, ids=lambda p: f"{p.format}-{p.name}".replace(" ", "_"))
TIES = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
NAN, INF = np.nan, np.inf


def named(name: str, fmt=MXFP4) -> Profile:
    (profile,) = (p for p in profiles_of(fmt) if p.name == name)
    return profile


def answer(profile: Profile, values) -> tuple[list[int], float]:
    """(codes of these values, scale) of one block that ends in zeros."""
    block = np.zeros((1, profile.format.block_size), np.float32)
    block[0, : len(values)] = values
    codes, scales = profile.quantize(block)
    return codes[0, : len(values)].tolist(), scales[0, 0].item()


# ----------------------------------------------------------------------------------------------------------- by hand
@pytest.mark.parametrize(
    "ties, codes",
    [
        (TieRule.TO_EVEN, [7, 0, 2, 2, 4, 4, 6, 6]),
        (TieRule.AWAY, [7, 1, 2, 3, 4, 5, 6, 7]),
        (TieRule.TOWARD_ZERO, [7, 0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_tie_goes_where_the_rule_says(ties, codes):
    profile = replace(named("mxsim RCEIL"), ties=ties)
    assert answer(profile, TIES) == (codes, 127)
    assert answer(profile, np.negative(TIES)) == ([code | 8 for code in codes], 127)
    beside_a_tie = np.nextafter(np.float32(TIES), np.float32(0))[1:]
    nearest = [0, 1, 2, 3, 4, 5, 6]
    assert answer(profile, [6.0, *beside_a_tie])[0][1:] == nearest


@pytest.mark.parametrize(
    "name, fmt, scale",
    [
        ("mxsim FLOOR", MXFP4, 0),
        ("torchao RCEIL", MXFP4, 0),
        ("DeepGEMM", MXFP4, 112),  # 1e-4 / 6 = 1.67e-5, above 2**-16 = 1.53e-5: 2**-15
        ("DeepGEMM", MXFP8_E4M3, 105),  # 1e-4 / 448 = 2.23e-7, above 2**-23 = 1.19e-7: 2**-22
        ("DeepSeek-V4", MXFP4, 1),
        ("RCEIL, zero block 127", MXFP4, 127),
        ("Triton ROUND_UP", MXFP4, 0),
        ("mxsim power of two", FP8_1X128, 1.0),
        ("DeepGEMM power of two", FP8_1X128, 2.0**-22),
        ("DeepEP", FP8_1X128, float(np.float32(1e-4) * (np.float32(1) / np.float32(448)))),
    ],
)
def test_the_scale_of_a_block_of_zeros(name, fmt, scale):
    assert answer(named(name, fmt), [0.0, -0.0])[1] == scale


def test_deepgemm_gives_a_zero_no_sign_and_the_others_do():
    assert answer(named("DeepGEMM"), [6.0, -0.25, -0.0])[0] == [7, 0, 0]
    assert answer(named("DeepSeek-V4"), [6.0, -0.25, -0.0])[0] == [7, 8, 8]


def test_a_floor_under_amax_keeps_small_blocks_small():
    assert answer(named("DeepGEMM"), [1e-5]) == ([1], 112)  # 1e-5 * 2**15 = 0.33
    assert answer(named("mxsim RCEIL"), [1e-5]) == ([7], 108)  # 5.24 in units of 2**-19


def test_what_a_nan_does():
    e2m1 = [1.0, NAN, -2.0]
    assert answer(named("mxsim FLOOR"), e2m1) == ([0, 0, 0], 0xFF)
    assert answer(named("torchao FLOOR"), e2m1) == ([0, 3, 8], 0xFF)
    assert answer(named("torchao RCEIL"), e2m1) == ([3, 3, 3], 0xFF)
    assert answer(named("torchao FLOOR", MXFP8_E4M3), e2m1) == ([0, 0x7F, 0x80], 0xFF)
    assert answer(named("TransformerEngine MXFP8", MXFP8_E4M3), e2m1) == ([0x70, 0x7F, 0xF8], 120)
    codes, scale = answer(named("mxsim power of two", FP8_1X128), e2m1)
    assert codes == [0x7F] * 3
    assert np.isnan(scale)


def test_what_an_infinity_does():
    assert answer(named("mxsim RCEIL"), [1.0, -INF]) == ([0, 0], 0xFF)
    assert answer(named("torchao FLOOR"), [1.0, -INF]) == ([0, 0xF], 253)  # taken as 2**128
    assert answer(named("torchao RCEIL"), [-1.0, -INF]) == ([8, 0xF], 254)
    assert answer(named("TransformerEngine MXFP8", MXFP8_E4M3), [1.0, INF]) == ([0, 0x7E], 254)


def test_only_unspecified_blocks_are_not_judged():
    x = np.array([[1.0] * 32 + [NAN] + [0.0] * 31 + [INF] * 32], np.float32)
    assert named("DeepGEMM").judges(x).tolist() == [[True, False, False]]
    assert named("mxsim FLOOR").judges(x).tolist() == [[True, True, True]]


def test_the_orders_of_fp32_operations_differ():
    x = [1.5]
    limit, amax, one = np.float32(448), np.float32(1.5), np.float32(1)
    scales = {p.name: answer(p, x)[1] for p in profiles_of(FP8_1X128)}
    assert scales["DeepGEMM"] == amax / limit
    assert scales["DeepEP"] == amax * (one / limit) != amax / limit
    assert scales["TransformerEngine FP32"] == one / (limit / amax)
    # 1.9453125 of amax 5.1875 is 168 + 2**-17 in units of amax / 448, beside the tie between 160 and 176
    codes = {p.name: answer(p, [5.1875, 1.9453125])[0] for p in profiles_of(FP8_1X128)}
    assert (codes["DeepGEMM"], codes["DeepGEMM, first release"]) == ([126, 115], [126, 114])


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_dividing_and_multiplying_by_the_reciprocal_round_up_alike(largest):
    """All significands of a binade, so every normal quotient: amax / max, amax * fp32(1 / max), amax in integers."""
    limit = np.float32(largest)
    reciprocal = np.float32(1) / limit
    significand_of_max, exponent_of_max = np.frexp(largest)
    for start in range(0, 1 << 23, 1 << 20):
        amax = (np.arange(start, start + (1 << 20), dtype=np.uint32) + np.uint32(127 << 23)).view(np.float32)
        divided, multiplied = (((q.view(np.uint32) + 0x7FFFFF) >> 23) for q in (amax / limit, amax * reciprocal))
        exact = 127 + 1 - exponent_of_max + (amax / 2 > significand_of_max)
        assert np.array_equal(divided, multiplied)
        assert np.array_equal(divided, exact)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3], ids=str)
def test_so_do_they_where_the_quotient_is_subnormal(fmt):
    largest = np.float32(fmt.element.max_finite)
    middle = int((largest * np.float32(2.0**-127)).view(np.uint32))
    amax = np.concatenate([np.arange(1, 2**12), np.arange(middle - 2**12, middle + 2**12)]).astype(np.uint32)
    rule = replace(named("mxsim RCEIL", fmt), quotient=Quotient.DIVIDE)
    x = amax.view(np.float32)[:, None]
    scales = rule.quantize(x)[1]
    assert_codes_equal(replace(rule, quotient=Quotient.MULTIPLY).quantize(x)[1], scales, x)
    assert set(scales.ravel().tolist()) == {0, 1}


def test_a_subnormal_quotient_is_rounded_before_the_scale_is():
    """amax = 6 * 2**-127 + 2**-148: amax / 6 is 2**-127 in FP32, and fits byte 0; amax itself does not."""
    amax = float(6 * Fraction(1, 2**127) + Fraction(1, 2**148))
    rule = named("mxsim RCEIL")
    assert answer(rule, [amax])[1] == 1
    assert answer(replace(rule, quotient=Quotient.DIVIDE), [amax])[1] == 0


# --------------------------------------------------------------------------------------------------------- rationals
def fp32(x: Fraction) -> Fraction:
    """Rounded to binary32, ties to even; no overflow."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > x
    ulp = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / ulp) * ulp  # Python's round takes ties to even


def ceil_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length() - 1
    while Fraction(2) ** exponent < x:
        exponent += 1
    return exponent


def floor_log2(x: Fraction) -> int:
    exponent = ceil_log2(x)
    return exponent if Fraction(2) ** exponent == x else exponent - 1


def magnitudes(profile: Profile) -> list[Fraction]:
    mantissa_bits, bias, count = (1, 1, 8) if profile.format == MXFP4 else (3, 7, 127)
    values = []
    for code in range(count):
        exponent, fraction = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        significand = fraction + (2**mantissa_bits if exponent else 0)
        values.append(significand * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits))
    return values


def rational_answer(profile: Profile, values: list[float]) -> tuple[list[int], Fraction]:
    """(codes, scale byte or scale) of finite values, from the profile's fields, in rationals."""
    x = [Fraction(v) for v in values]
    table = magnitudes(profile)
    limit = table[-1]
    largest = max(abs(v) for v in x)
    amax = max(largest, Fraction(float(np.float32(profile.amax_floor))))
    q = {
        Quotient.EXACT: lambda: amax,
        Quotient.DIVIDE: lambda: fp32(amax / limit),
        Quotient.MULTIPLY: lambda: fp32(amax * fp32(1 / limit)),
        Quotient.INVERT: lambda: fp32(1 / fp32(limit / amax)) if amax else Fraction(1),
    }[profile.quotient]()
    if profile.scale_rule is None:
        scale = q
    else:
        scale = Fraction(rational_exponent(profile, q, limit, table))
    if largest == 0 and profile.zero_block is not None:
        scale = Fraction(profile.zero_block) - (127 if profile.format.scale.name == "E8M0" else 0)
    if profile.format.scale.name == "E8M0":
        byte = int(scale) + 127
        exponent = profile.byte0_exponent if byte == 0 else int(scale)
        scaled = [Fraction(0) if exponent is None else v / Fraction(2) ** exponent for v in x]
        stored = Fraction(byte)
    else:
        if profile.scale_rule is not None and not (largest == 0 and profile.zero_block is not None):
            scale = Fraction(2) ** int(scale)
        stored = scale
        scaled = [rational_factor(profile, v, scale, amax, limit) for v in x]
    codes = [nearest(abs(v), table, profile.ties) for v in scaled]
    sign = 8 if profile.format == MXFP4 else 0x80
    for i, v in enumerate(values):
        if np.signbit(v) and (codes[i] or profile.keeps_zero_sign):
            codes[i] |= sign
    return codes, stored


def rational_exponent(profile: Profile, q: Fraction, limit: Fraction, table: list[Fraction]) -> int:
    if q == 0:
        return -127
    rule = profile.scale_rule
    if profile.quotient is not Quotient.EXACT:
        exponent = ceil_log2(q) if rule is ScaleRule.RCEIL else floor_log2(q)
    else:
        emax = floor_log2(limit)
        if rule is ScaleRule.RCEIL:
            exponent = ceil_log2(q / limit)
        elif rule is ScaleRule.CEIL:
            exponent = ceil_log2(q) - emax
        else:
            mantissa_bits = 1 if len(table) == 8 else 3
            significand = q / Fraction(2) ** floor_log2(q)
            carry = rule is ScaleRule.EVEN and significand >= 2 - Fraction(1, 2 ** (mantissa_bits + 1))
            exponent = floor_log2(q) - emax + carry
    return max(min(exponent, 127), -127, profile.smallest_byte - 127)


def rational_factor(profile: Profile, v: Fraction, scale: Fraction, amax: Fraction, limit: Fraction) -> Fraction:
    sign = -1 if v < 0 else 1
    if profile.factor is Factor.DIVIDE:
        return sign * fp32(abs(v) / scale)
    if profile.factor is Factor.MAX_OVER_AMAX:
        return sign * fp32(abs(v) * fp32(limit / amax)) if amax else Fraction(0)
    return sign * fp32(abs(v) * fp32(1 / scale))


def nearest(v: Fraction, table: list[Fraction], ties: TieRule) -> int:
    def preference(code: int) -> int:
        return {TieRule.TO_EVEN: code & 1, TieRule.AWAY: -code, TieRule.TOWARD_ZERO: code}[ties]

    above = min(bisect_left(table, v), len(table) - 1)
    return min((max(above - 1, 0), above), key=lambda code: (abs(table[code] - v), preference(code)))


def blocks(num_blocks: int, seed: int) -> np.ndarray:
    """Blocks of four float32: few fraction bits, so ties; any bits of middle size; BF16; subnormals; zeros."""
    bits = philox_bits(seed, (num_blocks, 4)).astype(np.int64)
    exponent = philox_bits(seed + 1, (num_blocks, 1)).astype(np.int64) % 100 + 77 + bits % 6
    any_bits = (bits & 0x80000000) | exponent << 23 | bits & 0x7FFFFF
    kind = np.arange(num_blocks)[:, None] % 5
    few = any_bits & ~np.int64(0xFFFFF)  # three fraction bits: ties
    x = np.select([kind == 0, kind == 1, kind == 2], [any_bits, any_bits & 0xFFFF0000, few], few)
    x = np.where(kind == 3, bits & 0x80FFFFFF, x)  # subnormal, or next to it
    x[4::10] &= 0x80000000
    return x.astype(np.uint32).view(np.float32)


@by_profile
def test_every_profile_is_what_its_fields_say_in_rationals(profile):
    x = blocks(120, seed=PROFILES.index(profile) * 10)
    if profile.factor is Factor.DIVIDE:  # 0 / 0, and scales that underflow to 0
        x = x[np.abs(x).max(axis=1) > 1e-30]
    if profile.format == FP8_1X128:  # where FP32 reciprocals are finite
        x = np.where(np.abs(x) < 2.0**-110, np.float32(0), x)
        x = x[(np.abs(x).max(axis=1) > 0) | (profile.zero_block is not None) | (profile.amax_floor > 0)]
    codes, scales = profile.quantize(x)
    answers = [rational_answer(profile, row.tolist()) for row in x]
    assert_codes_equal(codes, np.array([codes for codes, _ in answers], np.uint8), x, profile.name)
    assert [Fraction(scale.item()) for scale in scales[:, 0]] == [scale for _, scale in answers]


# ------------------------------------------------------------------------------------------------ other implementations
def bf16_rows(seed: int) -> np.ndarray:
    """bfloat16 [256, 256]: any bits, and blocks within a few binades, tiny ones too."""
    bits = philox_bits(seed, (256, 256)).astype(np.int64)
    top = np.repeat(philox_bits(seed + 1, (256, 8)).astype(np.int64) % 254, 32, axis=1)
    near = np.maximum(top - bits % 7, 0) << 7 | bits >> 8 & 0x7F | bits & 0x8000
    return np.where(np.arange(256)[:, None] % 8 == 0, bits & 0xFFFF, near).astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3], ids=str)
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name)
def test_mxsims_own_profiles_are_its_simulator(fmt, rule):
    x = bf16_rows(1)
    t = quantize(x, fmt, scale_rule=rule)
    codes, scales = named(f"mxsim {rule.name}", fmt).quantize(x)
    assert_codes_equal(codes, t.codes)
    assert_codes_equal(scales, t.scales)


@pytest.mark.parametrize("name, order", [("mxsim power of two", None), ("TransformerEngine FP32", ScaleOrder.TE)])
def test_the_fp8_profiles_are_the_simulators(name, order):
    x = bf16_rows(2)
    t = quantize(x, FP8_1X128, scale_order=order)
    codes, scales = named(name, FP8_1X128).quantize(x)
    assert_codes_equal(codes, t.codes)
    assert_floats_equal(scales, t.scales)


@pytest.mark.parametrize(
    "fmt, dtype", [(MXFP4, ml_dtypes.float4_e2m1fn), (MXFP8_E4M3, ml_dtypes.float8_e4m3fn)], ids=["MXFP4", "MXFP8"]
)
def test_nearest_with_ties_to_even_is_ml_dtypes_cast(fmt, dtype):
    bits = bf16_rows(3).view(np.uint16)
    finite = np.where(bits & 0x7F80 == 0x7F80, 0, bits).astype(np.uint32) << 16
    x = finite.view(np.float32).clip(-1, 1) * np.float32(fmt.element.max_finite)
    x[:, ::32] = fmt.element.max_finite  # scale 1
    codes, scales = named("mxsim RCEIL", fmt).quantize(x)
    assert set(scales.ravel().tolist()) == {127}
    assert_codes_equal(codes, x.astype(dtype).view(np.uint8), x)


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3], ids=str)
def test_the_torchao_profiles_are_torchao(fmt, rule):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    x = bf16_rows(4)
    x = np.where(np.isnan(x), x.dtype.type(np.nan), x)  # the code of a NaN in E2M1 depends on its payload
    source = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    element = torch.float4_e2m1fn_x2 if fmt == MXFP4 else torch.float8_e4m3fn
    scales, codes = (t.view(torch.uint8).numpy() for t in to_mx(source, element, 32, ScaleCalculationMode[rule.name]))
    if fmt == MXFP4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(x.shape)
    own_codes, own_scales = named(f"torchao {rule.name}", fmt).quantize(x)
    assert_codes_equal(own_scales, scales)
    assert_codes_equal(own_codes, codes, x.view(np.uint16))


# --------------------------------------------------------------------------------------------------------- arguments
def test_a_short_last_block_is_padded_with_zeros():
    x = blocks(8, 0).reshape(1, -1)[:, :21]
    for profile in (named("DeepGEMM"), named("torchao EVEN")):
        wide = np.zeros((1, 64), np.float32)
        wide[:, : x.shape[1]] = x
        codes, scales = profile.quantize(wide)
        assert_codes_equal(profile.quantize(wide[:, :40])[0], codes[:, :40])
        assert_codes_equal(profile.quantize(x)[0], codes[:, :21])
        assert_codes_equal(profile.quantize(x)[1], scales[:, :1])


@by_profile
def test_no_rows_give_no_codes(profile):
    codes, scales = profile.quantize(np.zeros((0, 256), np.float32))
    assert codes.shape == (0, 256)
    assert scales.shape == (0, 256 // profile.format.block_size)


@by_profile
def test_every_profile_names_its_source_and_itself_once(profile):
    assert profile.source
    assert [p.name for p in PROFILES if p.format == profile.format].count(profile.name) == 1


@pytest.mark.parametrize("x, message", [([1, 2], "dtype int64"), (np.ones(32), "dtype float64"), (["a"], "dtype <U1")])
def test_other_dtypes_are_refused(x, message):
    with pytest.raises(TypeError, match=f"x has {message}, needed float16, bfloat16 or float32"):
        named("DeepGEMM").quantize(x)


def test_a_scalar_is_refused():
    with pytest.raises(ValueError, match="x is a scalar"):
        named("DeepGEMM").quantize(np.float32(1))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": NVFP4}, "format is NVFP4"),
        ({"format": FP8_128X1}, "format is FP8_128X1"),
        ({"scale_rule": None}, "needed a rule"),
        ({"scale_rule": None, "format": FP8_1X128}, "quotient is EXACT"),
        ({"scale_rule": ScaleRule.EVEN, "quotient": Quotient.DIVIDE}, "scale_rule is EVEN"),
    ],
)
def test_a_profile_that_means_nothing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(named("mxsim FLOOR"), **changes)


def test_policies_are_all_in_use():
    assert {p.nonfinite for p in PROFILES} == set(NonFinitePolicy)
    assert {p.quotient for p in PROFILES} == set(Quotient)
    assert {p.factor for p in PROFILES} == set(Factor)
    assert {p.ties for p in PROFILES} == set(TieRule)
