"""Profiles of public quantizers. Each `source` says where its rules are published, read in November 2026."""

from dataclasses import replace

from mxsim.analysis.profiles import Factor, NonFinitePolicy, Profile, Quotient, TieRule
from mxsim.blocks import FP8_1X128, MXFP4, MXFP8_E4M3, BlockFormat, ScaleRule

_FLOOR, _RCEIL = ScaleRule.FLOOR, ScaleRule.RCEIL
_FP32_MIN_NORMAL_EXPONENT = -126
_QUIET_NAN_AS_E2M1 = 3  # what torchao's bit arithmetic makes of a quiet NaN
_E4M3_NAN = 0x7F

_TORCHAO = "torchao 0.18 prototype/mx_formats/mx_tensor.py, to_mx, eager: "
_DEEPGEMM = "DeepGEMM deep_gemm/utils/math.py (github.com/deepseek-ai/DeepGEMM): "
_TRITON = "triton_kernels numerics_details/mxfp_details/_downcast_to_mxfp.py (github.com/triton-lang/triton): "


def _mxsim(fmt: BlockFormat) -> list[Profile]:
    """The rules of docs/NUMERICS.md, section 3 or 7."""
    return [
        Profile(
            f"mxsim {rule.name}",
            f"docs/NUMERICS.md section 3: {rule.name}, ties to even, zero block 0, a NaN poisons its block",
            fmt,
            rule,
        )
        for rule in ScaleRule
    ]


def _torchao(fmt: BlockFormat) -> list[Profile]:
    nan_code = _E4M3_NAN if fmt is MXFP8_E4M3 else _QUIET_NAN_AS_E2M1
    profiles = [
        Profile(
            f"torchao {rule.name}",
            _TORCHAO + "elements are divided by at least 2**-126, whatever the byte; NaN and infinity propagate",
            fmt,
            rule,
            byte0_exponent=_FP32_MIN_NORMAL_EXPONENT,
            nonfinite=NonFinitePolicy.PROPAGATE,
            nan_code=nan_code,
        )
        for rule in (_FLOOR, ScaleRule.CEIL, ScaleRule.EVEN)
    ]
    rceil = Profile(
        "torchao RCEIL",
        _TORCHAO
        + "amax / max rounded up (through FP32 log2: off by one for some FP32 amax, not here); byte 0 scales by 1",
        fmt,
        _RCEIL,
        Quotient.DIVIDE,
        byte0_exponent=0,
        nonfinite=NonFinitePolicy.PROPAGATE_BLOCK,
        nan_code=nan_code,
    )
    return [*profiles, rceil]


def _round_up(fmt: BlockFormat) -> list[Profile]:
    """Scales that are amax / max rounded up to a power of two, in FP32."""
    deepgemm = Profile(
        "DeepGEMM",
        _DEEPGEMM + "per_token_cast_to_fp4 or _fp8 with use_ue8m0, gran_k 32: amax at least 1e-4, bytes at least 1",
        fmt,
        _RCEIL,
        Quotient.DIVIDE,
        amax_floor=1e-4,
        smallest_byte=1,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    )
    if fmt is MXFP4:  # its table search sends ties down and gives zeros no sign
        deepgemm = replace(deepgemm, ties=TieRule.TOWARD_ZERO, keeps_zero_sign=False)
    triton = Profile(
        "Triton ROUND_UP",
        _TRITON + "amax / max rounded up by integer addition, a zero scale gives zeros; not modelled: the last bits "
        "of FP32 inputs that it drops below 1",
        fmt,
        _RCEIL,
        Quotient.DIVIDE,
        smallest_byte=1,
        byte0_exponent=None,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    )
    round_down = replace(
        triton,
        name="Triton ROUND_DOWN",
        source=_TRITON + "floor(log2(amax / max)); later versions divide by 4 instead of 6, which is FLOOR",
        scale_rule=_FLOOR,
        smallest_byte=0,
    )
    zero_127 = Profile(
        "RCEIL, zero block 127",
        "a convention of several kernels, no particular library: a block of zeros takes scale 1",
        fmt,
        _RCEIL,
        zero_block=127,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    )
    return [deepgemm, triton, round_down, zero_127]


_MXFP4 = [
    *_mxsim(MXFP4),
    *_torchao(MXFP4),
    *_round_up(MXFP4),
    Profile(
        "Triton ROUND_UP, ties away",
        _TRITON + "before it rounded ties to even: one is added to the bit below the mantissa, as in some exporters",
        MXFP4,
        _RCEIL,
        Quotient.DIVIDE,
        ties=TieRule.AWAY,
        smallest_byte=1,
        byte0_exponent=None,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepSeek-V4",
        "DeepSeek-V4 inference/kernel.py, FP4 act_quant (as cited by vLLM's tests): amax at least 6 * 2**-126, "
        "amax * fp32(1 / 6) rounded up, ties to even",
        MXFP4,
        _RCEIL,
        Quotient.MULTIPLY,
        amax_floor=6 * 2.0**-126,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "microxcaling nearest",
        "microxcaling mx/mx_ops.py, _quantize_mx, round='nearest' (github.com/microsoft/microxcaling): FLOOR, ties "
        "away from zero; its scales are exponents, given here as E8M0 bytes",
        MXFP4,
        _FLOOR,
        ties=TieRule.AWAY,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
]

_MXFP8 = [
    *_mxsim(MXFP8_E4M3),
    *_torchao(MXFP8_E4M3),
    *_round_up(MXFP8_E4M3),
    Profile(
        "TransformerEngine MXFP8",
        "TransformerEngine common/util/ptx.cuh, float_to_e8m0 and exp2f_rcp (github.com/NVIDIA/TransformerEngine): "
        "amax * fp32(1 / 448) rounded up, NaN left out of amax; byte 0 scales by 1",
        MXFP8_E4M3,
        _RCEIL,
        Quotient.MULTIPLY,
        byte0_exponent=0,
        nonfinite=NonFinitePolicy.IGNORE_NAN,
        nan_code=_E4M3_NAN,
    ),
]

_FP8 = [
    Profile(
        "mxsim power of two",
        "docs/NUMERICS.md section 7: the smallest power of two, scale 1 for a block of zeros; as TransformerEngine's "
        "Float8BlockScaling with power-of-two scales, but for NaN and infinity",
        FP8_1X128,
        _RCEIL,
        zero_block=1.0,
    ),
    Profile(
        "TransformerEngine FP32",
        "TransformerEngine Float8BlockScaling with FP32 scales: x * (448 / amax), scale 1 / (448 / amax)",
        FP8_1X128,
        None,
        Quotient.INVERT,
        Factor.MAX_OVER_AMAX,
        zero_block=1.0,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepGEMM",
        _DEEPGEMM + "per_token_cast_to_fp8 without use_ue8m0: amax at least 1e-4, scale amax / 448, x * (1 / scale)",
        FP8_1X128,
        None,
        Quotient.DIVIDE,
        amax_floor=1e-4,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepGEMM power of two",
        _DEEPGEMM + "per_token_cast_to_fp8 with use_ue8m0: amax at least 1e-4, amax / 448 rounded up",
        FP8_1X128,
        _RCEIL,
        Quotient.DIVIDE,
        amax_floor=1e-4,
        smallest_byte=1,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepGEMM, first release",
        "DeepGEMM tests/test_core.py of February 2025: amax at least 1e-4, scale amax / 448, x * (448 / amax)",
        FP8_1X128,
        None,
        Quotient.DIVIDE,
        Factor.MAX_OVER_AMAX,
        amax_floor=1e-4,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepEP",
        "DeepEP csrc/kernels/utils.cuh, calculate_fp8_scales (github.com/deepseek-ai/DeepEP): amax at least 1e-4, "
        "scale amax * fp32(1 / 448), x * (448 / amax)",
        FP8_1X128,
        None,
        Quotient.MULTIPLY,
        Factor.MAX_OVER_AMAX,
        amax_floor=1e-4,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
    ),
    Profile(
        "DeepSeek-V3",
        "DeepSeek-V3 inference/kernel.py, act_quant (github.com/deepseek-ai/DeepSeek-V3): scale amax / 448, x / scale; "
        "a block of zeros is 0 / 0",
        FP8_1X128,
        None,
        Quotient.DIVIDE,
        Factor.DIVIDE,
        nonfinite=NonFinitePolicy.UNSPECIFIED,
        nan_code=_E4M3_NAN,
    ),
]

PROFILES: tuple[Profile, ...] = (*_MXFP4, *_MXFP8, *_FP8)


def profiles_of(fmt: BlockFormat) -> list[Profile]:
    """The profiles of one format; none of a format that no profile is of.

    Raises:
        TypeError: if fmt is no BlockFormat.

    >>> len(profiles_of(FP8_1X128))
    7
    """
    if not isinstance(fmt, BlockFormat):
        raise TypeError(f"profiles_of: fmt is {fmt!r}, needed a BlockFormat")
    return [profile for profile in PROFILES if profile.format == fmt]
