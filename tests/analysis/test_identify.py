"""Whose rules made these bytes: the right profile, the place of a wrong byte, blocks that do tell apart."""

import json
from dataclasses import replace
from itertools import combinations

import ml_dtypes
import numpy as np
import pytest

from mxsim.analysis import PROFILES, Profile, identify, profiles_of, tell_apart
from mxsim.analysis.profiles import NonFinitePolicy, TieRule
from mxsim.blocks import FP8_1X128, MXFP4, MXFP6_E3M2, MXFP8_E4M3, ScaleRule, quantize
from mxsim.formats import philox_bits
from tests.analysis.test_profiles import by_profile, named

FORMATS = [MXFP4, MXFP8_E4M3, FP8_1X128]


def telling_inputs(fmt) -> np.ndarray:
    """float32 [rows, K]: the blocks that tell every two profiles of the format apart, and ordinary ones."""
    found = (tell_apart(a, b) for a, b in combinations(profiles_of(fmt), 2))
    bits = philox_bits(3, (16, fmt.block_size)) & np.uint32(0x83FF0000) | np.uint32(0x3C000000)
    return np.concatenate([np.array([d.block for d in found if d is not None]), bits.view(np.float32)])


def packed(codes: np.ndarray) -> np.ndarray:
    return codes[..., ::2] | codes[..., 1::2] << 4


# ---------------------------------------------------------------------------------------------------- the right profile
@by_profile
def test_a_profiles_own_bytes_are_identified_as_its_own(profile):
    x = telling_inputs(profile.format)
    result = identify(x, *profile.quantize(x))
    assert result.fits == [profile.name]
    assert result.groups == ((profile,),)
    assert result.distinctions == ()
    assert result.num_blocks == len(x)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ordinary_numbers_leave_several_and_the_blocks_shown_tell_them_apart(fmt):
    x = np.abs(telling_inputs(fmt)[-16:]) + 1
    right = profiles_of(fmt)[-1 if fmt == FP8_1X128 else 0]
    result = identify(x, *right.quantize(x))
    assert right.name in result.fits
    for distinction in result.distinctions:
        answers = [profile.quantize(distinction.block[None]) for profile in distinction.profiles]
        (first_codes, first_scale), (second_codes, second_scale) = ((c[0], scales[0, 0]) for c, scales in answers)
        assert (first_scale != second_scale) or (first_codes != second_codes).any()
        num_shown = len(distinction.values)
        assert distinction.first.codes == tuple(first_codes[:num_shown].tolist())
        assert distinction.second.scale == second_scale
        assert not distinction.block[num_shown:].any()
        # one more block of input, and the wrong one is out
        more = np.concatenate([x, distinction.block[None]])
        decided = identify(more, *distinction.profiles[0].quantize(more), profiles=distinction.profiles)
        assert distinction.profiles[0].name in decided.fits
        assert distinction.profiles[1].name not in decided.fits
    num_groups = len(result.groups)
    assert len(result.distinctions) == num_groups * (num_groups - 1) // 2
    assert sorted(p.name for group in result.groups for p in group) == sorted(result.fits)


def test_profiles_that_no_block_tells_apart_are_one_group():
    ours = named("mxsim RCEIL")
    twin = replace(ours, name="twin")
    silent_on_nan = replace(ours, name="silent on NaN", nonfinite=NonFinitePolicy.UNSPECIFIED)
    x = telling_inputs(MXFP4)
    result = identify(x, *ours.quantize(x), profiles=[ours, named("mxsim CEIL"), twin, silent_on_nan])
    assert result.groups == ((ours, twin, silent_on_nan),)
    assert tell_apart(ours, twin) is tell_apart(ours, silent_on_nan) is None
    torchao = named("torchao RCEIL")  # whose bytes of a NaN are its own
    assert tell_apart(torchao, replace(torchao, nonfinite=NonFinitePolicy.UNSPECIFIED)) is None
    assert tell_apart(torchao, replace(torchao, nonfinite=NonFinitePolicy.POISON)) is not None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_packed_and_unpacked_codes_and_views_of_bytes_are_one(dtype):
    x = (philox_bits(0, (4, 2, 64)).astype(np.float64) * 2.0**-32 - 0.5).astype(dtype)
    codes, scales = named("mxsim EVEN").quantize(x)
    whole = identify(x, codes, scales)
    assert "mxsim EVEN" in whole.fits
    assert identify(x, packed(codes), scales.view(ml_dtypes.float8_e8m0fnu)).fits == whole.fits
    assert identify(x, packed(codes).view(np.int8), scales).fits == whole.fits
    codes8, scales8 = named("mxsim EVEN", MXFP8_E4M3).quantize(x)
    assert identify(x, codes8.view(ml_dtypes.float8_e4m3fn), scales8).format == MXFP8_E4M3


def test_a_doubt_between_mxfp4_and_mxfp8_is_decided_by_the_caller():
    x = np.zeros((1, 32), np.float32)
    codes, scales = named("mxsim FLOOR").quantize(x)
    assert identify(x, codes, scales).format == MXFP4
    assert identify(x, codes, scales, fmt=MXFP8_E4M3).format == MXFP8_E4M3


# ---------------------------------------------------------------------------------------------------------- differences
def test_one_wrong_code_is_counted_and_placed():
    x = telling_inputs(MXFP4)
    codes, scales = named("DeepGEMM").quantize(x)
    codes[-2, 7] ^= 1
    result = identify(x, packed(codes), scales)
    assert result.fits == []
    best = result.comparisons[0]
    assert (best.profile.name, best.num_wrong_scales, best.num_wrong_codes) == ("DeepGEMM", 0, 1)
    assert best.first.what == "code"
    assert best.first.index == (len(x) - 2, 7)
    assert best.first.value == x[-2, 7]
    assert best.first.given == best.first.by_profile ^ 1


def test_one_wrong_scale_is_counted_and_placed():
    x = telling_inputs(FP8_1X128)
    codes, scales = named("DeepEP", FP8_1X128).quantize(x)
    scales[3, 0] = np.nextafter(scales[3, 0], np.float32(1))
    best = identify(x, codes, scales).comparisons[0]
    assert (best.profile.name, best.num_wrong_scales, best.num_wrong_codes) == ("DeepEP", 1, 0)
    assert best.first.what == "scale"
    assert best.first.index == (3, 0)
    assert best.first.value == np.abs(x[3]).max()
    assert best.first.given == scales[3, 0] != best.first.by_profile


def test_a_swapped_nibble_order_fits_nobody():
    x = telling_inputs(MXFP4)
    codes, scales = named("mxsim RCEIL").quantize(x)
    assert identify(x, codes[..., ::2] << 4 | codes[..., 1::2], scales).fits == []


def test_blocks_that_a_profile_does_not_speak_of_do_not_count():
    x = np.ones((2, 32), np.float32)
    x[1, 0] = np.nan
    codes, scales = named("mxsim FLOOR").quantize(x)
    scales[1], codes[1] = 17, 3  # nonsense, beside the NaN
    result = identify(x, codes, scales)
    blocks = {c.profile.name: c.num_blocks for c in result.comparisons}
    assert blocks["mxsim FLOOR"] == 2
    assert blocks["microxcaling nearest"] == 1
    assert "microxcaling nearest" in result.fits
    assert "mxsim FLOOR" not in result.fits


def test_a_profile_that_speaks_of_no_block_does_not_fit():
    x = np.ones((2, 32), np.float32)
    x[:, 5] = np.inf
    result = identify(x, *named("mxsim FLOOR").quantize(x))
    assert set(result.fits) == {f"mxsim {rule.name}" for rule in ScaleRule}
    assert {c.num_blocks for c in result.comparisons if c.profile.nonfinite is NonFinitePolicy.UNSPECIFIED} == {0}


def test_a_profile_of_ones_own_may_be_tried():
    mine = Profile("mine", "", MXFP4, ScaleRule.CEIL, ties=TieRule.AWAY)
    x = telling_inputs(MXFP4)
    assert identify(x, *mine.quantize(x), profiles=[*PROFILES, mine]).fits == ["mine"]


def test_json_holds_everything_and_is_strict():
    x = telling_inputs(MXFP8_E4M3)[-16:]
    x[0, 0] = np.inf
    result = identify(x, *named("torchao RCEIL", MXFP8_E4M3).quantize(x))
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["format"] == "MXFP8_E4M3"
    assert document["fits"] == result.fits
    assert len(document["profiles"]) == len(profiles_of(MXFP8_E4M3))
    assert all(len(d["block"]) == 32 and len(d["answers"]) == 2 for d in document["distinctions"])


# -------------------------------------------------------------------------------------------------------- telling apart
def test_every_two_profiles_can_be_told_apart():
    for fmt in FORMATS:
        for a, b in combinations(profiles_of(fmt), 2):
            assert tell_apart(a, b) is not None, (a.name, b.name)


@pytest.mark.parametrize(
    "first, second, fmt, values, answers",
    [
        ("mxsim FLOOR", "mxsim EVEN", MXFP4, (1.75,), (((7,), 125), ((6,), 126))),
        ("mxsim FLOOR", "microxcaling nearest", MXFP4, (1.25,), (((6,), 125), ((7,), 125))),  # 5 in units of 2**-2
        ("DeepGEMM", "mxsim RCEIL", MXFP4, (0.0,), (((0,), 112), ((0,), 0))),
        ("torchao FLOOR", "mxsim FLOOR", MXFP4, (2.0**-125,), (((4,), 0), ((6,), 0))),
        ("Triton ROUND_UP", "Triton ROUND_UP, ties away", MXFP4, (1.25,), (((6,), 125), ((7,), 125))),
        ("mxsim FLOOR", "mxsim EVEN", MXFP8_E4M3, (1.9375,), (((126,), 119), ((120,), 120))),
    ],
)
def test_the_smallest_blocks_are_those_found_by_hand(first, second, fmt, values, answers):
    distinction = tell_apart(named(first, fmt), named(second, fmt))
    assert distinction.values == values
    assert tuple((answer.codes, answer.scale) for answer in (distinction.first, distinction.second)) == answers


def test_two_numbers_are_taken_only_where_no_single_bf16_number_tells():
    first, second = named("DeepGEMM", FP8_1X128), named("DeepGEMM, first release", FP8_1X128)
    assert len(tell_apart(first, second).values) == 2
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    alone = every[np.isfinite(every)][:, None]
    for a, b in zip(first.quantize(alone), second.quantize(alone), strict=True):
        assert np.array_equal(a, b)


def test_profiles_of_two_formats_are_not_compared():
    with pytest.raises(ValueError, match="of MXFP4 and MXFP8_E4M3, needed one format"):
        tell_apart(named("mxsim FLOOR"), named("mxsim FLOOR", MXFP8_E4M3))


# ------------------------------------------------------------------------------------------------------------ bad input
X = np.ones((2, 64), np.float32)
CODES, SCALES = np.zeros((2, 64), np.uint8), np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    "inputs, codes, scales, message",
    [
        (X, CODES[:, :31], SCALES, r"codes \[2, 31\] and scales \[2, 2\] uint8 fit none of MXFP4 \(codes \[2, 64\] or"),
        (X, CODES, SCALES[:, :1], r"scales \[2, 1\] uint8 fit none"),
        (X, CODES, SCALES.T[None], "fit none"),
        (
            X,
            CODES,
            SCALES.astype(np.float32),
            r"float32 fit none of .*FP8_1X128 \(codes \[2, 64\], scales \[2, 1\]",
        ),
        (X[:0], CODES, SCALES, r"inputs has shape \(0, 64\)"),
        (X, CODES[:0], SCALES, r"codes has shape \(0, 64\)"),
        (X, CODES, SCALES[:0], r"scales has shape \(0, 2\)"),
        (X * np.nan, CODES, SCALES, "inputs holds no finite number"),
        (np.float32(1), CODES, SCALES, "is a scalar"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(inputs, codes, scales, message):
    with pytest.raises(ValueError, match=message):
        identify(inputs, codes, scales)


def test_the_other_byte_order_is_read_as_the_same_numbers():
    x = np.linspace(-3, 3, 256, dtype=np.float32).reshape(2, 128)
    t = quantize(x, FP8_1X128)
    fits = identify(x, t.codes, t.scales).fits
    assert "mxsim power of two" in fits
    assert identify(x.astype(">f4"), t.codes, t.scales.astype(">f4")).fits == fits


@pytest.mark.parametrize(
    "inputs, codes, scales, message",
    [
        (CODES, CODES, SCALES, "inputs has dtype uint8, needed float16, bfloat16 or float32"),
        (X.astype(np.float64), CODES, SCALES, "inputs has dtype float64"),
        (X, X, SCALES, "codes has dtype float32, needed uint8"),
        (X, CODES.astype(np.int64), SCALES, "codes has dtype int64"),
        (X, CODES.astype(bool), SCALES, "codes has dtype bool"),
        (X, CODES, SCALES.astype(np.float64), "scales has dtype float64"),
    ],
)
def test_other_dtypes_are_refused(inputs, codes, scales, message):
    with pytest.raises(TypeError, match=message):
        identify(inputs, codes, scales)


def test_codes_too_large_for_the_format_are_refused():
    codes = CODES.copy()
    codes[1, 3] = 16
    with pytest.raises(ValueError, match=r"codes has 16 at index \(1, 3\), needed codes of E2M1 below 16"):
        identify(X, codes, SCALES, fmt=MXFP4)


def test_what_is_no_format_and_no_profile_is_refused_by_name():
    with pytest.raises(TypeError, match="identify: fmt is 'MXFP4', needed a BlockFormat"):
        identify(X, CODES, SCALES, fmt="MXFP4")
    with pytest.raises(TypeError, match="identify: profiles holds 'DeepGEMM', needed Profiles"):
        identify(X, CODES, SCALES, profiles=[PROFILES[0], "DeepGEMM"])
    with pytest.raises(TypeError, match="tell_apart: second is a str, needed a Profile"):
        tell_apart(PROFILES[0], "DeepGEMM")
    with pytest.raises(TypeError, match="profiles_of: fmt is 'MXFP4', needed a BlockFormat"):
        profiles_of("MXFP4")
    assert profiles_of(MXFP6_E3M2) == []


def test_a_format_without_profiles_is_refused():
    with pytest.raises(ValueError, match="no profile is of MXFP6_E3M2"):
        identify(X, CODES, SCALES, fmt=MXFP6_E3M2)
    with pytest.raises(ValueError, match="no profile is of any format"):
        identify(X, CODES, SCALES, profiles=[])
