"""encode, decode, round_to: the exact rules of NUMERICS section 2, for any FloatFormat."""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, UInt

from mxsim.formats.float_format import CodeForm, FloatFormat, Specials
from mxsim.formats.inputs import as_float, as_numpy
from mxsim.formats.rounding import Overflow, Rounding

_TABLE_BITS = 16  # formats up to this wide are decoded by table
_CHUNK = 2**17  # elements encoded at a time, so that temporaries stay small


def encode(
    values: Any,
    fmt: FloatFormat,
    *,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    random_bits: UInt[np.ndarray, "*shape"] | None = None,
    num_random_bits: int = 32,
) -> UInt[np.ndarray, "*shape"]:
    """Codes of the values rounded to fmt: round the exact value first (subnormals included), then decide overflow.

    SATURATE gives +-max_finite, for infinities too; TO_NONFINITE gives infinity, or NaN where fmt has none. A rounding
    that points toward zero turns a finite overflow into max_finite in either mode. The sign of zero and of underflow
    is kept where fmt has a -0. NaN becomes fmt.nan_code and keeps its sign. In an unsigned format (E8M0) zero and
    underflow give the smallest value; negative values and infinities give NaN.

    STOCHASTIC rounds the magnitude up iff r < frac * 2**k, with frac the exact position between the two neighbours,
    k = num_random_bits (1 to 32) and r the low k bits of random_bits.

    Args:
        values: float16/32/64, ml_dtypes, integers up to 2**53, Python numbers, or a torch CPU tensor; any shape.
        random_bits: unsigned integers of the shape of values; required by STOCHASTIC, refused otherwise.

    Raises:
        TypeError: if values are not real numbers of at most 64 bits.
        ValueError: for a NaN or a negative value that fmt has no code for; for TO_NONFINITE on a format with neither
            NaN nor infinity; for random_bits missing, of another shape, or not wanted.

    Source: OCP OFP8 v1.0 section 5.2, OCP MX v1.0 section 5.3.
    Departs: E8M0 ties go to the even code (3.0 gives 128; torch and ml_dtypes give 129).

    >>> from mxsim.formats import E2M1
    >>> encode([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], E2M1)
    array([0, 2, 2, 4, 4, 6, 6], dtype=uint8)
    """
    _check_format(fmt, "encode")
    for name, choice, kind in (("rounding", rounding, Rounding), ("overflow", overflow, Overflow)):
        if not isinstance(choice, kind):
            raise TypeError(f"encode: {name} is {choice!r}, needed a {kind.__name__}")
    x = as_float(values, caller="encode", name="values")
    draws = _check_random_bits(x.shape, rounding, random_bits, num_random_bits)
    if overflow is Overflow.TO_NONFINITE and not fmt.has_nan:
        raise ValueError(f"encode: overflow is TO_NONFINITE, but {fmt} has neither NaN nor infinity")
    _check_encodable(x, fmt)

    codes: np.ndarray = np.empty(x.shape, fmt.code_dtype)
    flat_x, flat_codes = x.reshape(-1), codes.reshape(-1)
    flat_draws = None if draws is None else draws.reshape(-1)
    table = _encode_table(fmt, rounding, overflow) if _has_encode_table(x.dtype, fmt, rounding) else None
    for start in range(0, x.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        if table is not None:
            flat_codes[piece] = table[_round_to_odd_bf16(flat_x[piece])]
        else:
            chunk_draws = None if flat_draws is None else flat_draws[piece]
            flat_codes[piece] = _encode_exact(flat_x[piece], fmt, rounding, overflow, chunk_draws, num_random_bits)
    return codes


def decode(codes: UInt[np.ndarray, "*shape"], fmt: FloatFormat) -> Float[np.ndarray, "*shape"]:
    """The exact value of each code: float32, or float64 where float32 cannot hold every value of fmt.

    The sign of zero is kept, and so is the sign of NaN.

    Raises:
        TypeError: if codes are not integers.
        ValueError: if a code is negative or needs more than fmt.bits bits.

    >>> from mxsim.formats import E4M3
    >>> decode([0x01, 0x7E, 0xFF], E4M3)
    array([1.953125e-03, 4.480000e+02,          nan], dtype=float32)
    """
    _check_format(fmt, "decode")
    array = as_numpy(codes, caller="decode", name="codes")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"decode: codes has dtype {array.dtype}, needed integers")
    if array.size and (array.dtype.kind == "i" or 8 * array.dtype.itemsize > fmt.bits):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= fmt.num_codes:
            raise ValueError(
                f"decode: codes holds {low if low < 0 else high}, needed 0 to {fmt.num_codes - 1} for {fmt}"
            )
    if fmt.bits <= _TABLE_BITS:
        return decode_table(fmt)[array.astype(np.intp)]
    return _decode_by_fields(array.astype(np.uint64), fmt)


def round_to(
    values: Any,
    fmt: FloatFormat,
    *,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    random_bits: UInt[np.ndarray, "*shape"] | None = None,
    num_random_bits: int = 32,
) -> Float[np.ndarray, "*shape"]:
    """The value of fmt that each value rounds to: decode(encode(values)); same arguments and errors as `encode`.

    >>> from mxsim.formats import E4M3
    >>> float(round_to(0.3, E4M3))
    0.3125
    """
    codes = encode(
        values, fmt, rounding=rounding, overflow=overflow, random_bits=random_bits, num_random_bits=num_random_bits
    )
    return decode(codes, fmt)


@lru_cache(maxsize=64)
def decode_table(fmt: FloatFormat) -> Float[np.ndarray, " num_codes"]:
    """Value of every code of a format of at most 16 bits, read-only."""
    table = _decode_by_fields(np.arange(fmt.num_codes, dtype=np.uint64), fmt)
    table.setflags(write=False)
    return table


def _decode_by_fields(codes: UInt[np.ndarray, "*shape"], fmt: FloatFormat) -> Float[np.ndarray, "*shape"]:
    if fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        signed = np.where(codes >= fmt.sign_mask, codes.astype(np.int64) - fmt.num_codes, codes.astype(np.int64))
        return np.ldexp(signed.astype(np.float64), fmt.emin - fmt.mantissa_bits).astype(fmt.value_dtype)

    magnitude = (codes & np.uint64(fmt.magnitude_mask)).astype(np.int64)
    negative = (codes & np.uint64(fmt.sign_mask)) != 0
    biased_exponent = magnitude >> fmt.mantissa_bits
    normal = (biased_exponent > 0) | (not fmt.has_subnormals)
    significand = (magnitude & (2**fmt.mantissa_bits - 1)) + (normal << np.int64(fmt.mantissa_bits))
    exponent = np.where(normal, biased_exponent - fmt._bias, fmt.emin)
    finite = magnitude <= fmt.max_code  # the top exponent of an IEEE format may lie beyond float64
    significand = np.where(finite, significand, 0).astype(np.float64)
    value = np.ldexp(significand, (exponent - fmt.mantissa_bits).astype(np.int32))
    value = np.where(finite, value, np.nan)
    if fmt.has_inf:
        value = np.where(magnitude == fmt.inf_code, np.inf, value)
    if fmt.specials is Specials.NAN_IS_NEGATIVE_ZERO:
        value = np.where(negative & (magnitude == 0), np.nan, value)
    return np.copysign(value, np.where(negative, -1.0, 1.0)).astype(fmt.value_dtype)


def _encode_exact(
    x: Float[np.ndarray, " n"],
    fmt: FloatFormat,
    rounding: Rounding,
    overflow: Overflow,
    draws: UInt[np.ndarray, " n"] | None = None,
    num_random_bits: int = 32,
) -> UInt[np.ndarray, " n"]:
    negative = np.signbit(x)
    is_nan, is_inf = np.isnan(x), np.isinf(x)
    finite = np.where(is_nan | is_inf, 0, np.abs(x)).astype(np.float64)

    magnitude = _round_magnitude(finite, negative, fmt, rounding, draws, num_random_bits)
    overflow_code = _overflow_code(fmt, overflow)
    toward_zero = _points_toward_zero(negative, rounding)
    magnitude = np.where(magnitude > fmt.max_code, np.where(toward_zero, fmt.max_code, overflow_code), magnitude)
    magnitude = np.where(is_inf, overflow_code, magnitude)
    if fmt.has_nan:
        assert fmt.nan_code is not None
        magnitude = np.where(is_nan if fmt.signed else is_nan | is_inf | (x < 0), fmt.nan_code, magnitude)

    sign_bit = np.uint64(fmt.sign_mask)
    codes: np.ndarray = magnitude.astype(np.uint64)
    if fmt.code_form is CodeForm.TWOS_COMPLEMENT:
        codes = np.where(negative, (-magnitude).astype(np.uint64) & np.uint64(fmt.num_codes - 1), codes)
    elif fmt.specials is Specials.NAN_IS_NEGATIVE_ZERO:
        codes = np.where(negative & (magnitude != 0), codes | sign_bit, codes)
    else:
        codes = np.where(negative, codes | sign_bit, codes)  # sign_bit is 0 in an unsigned format
    return codes.astype(fmt.code_dtype)


def _has_encode_table(dtype: np.dtype, fmt: FloatFormat, rounding: Rounding) -> bool:
    """Whether BF16, rounded to odd, tells apart all that fmt's neighbours and midpoints do: it needs one bit more."""
    narrow = fmt.mantissa_bits <= 5 and fmt.min_subnormal >= 2.0**-130 and fmt.emax <= 126
    return dtype == np.float32 and narrow and rounding is not Rounding.STOCHASTIC


@lru_cache(maxsize=64)
def _encode_table(fmt: FloatFormat, rounding: Rounding, overflow: Overflow) -> UInt[np.ndarray, " 65536"]:
    """Code of every BF16 value, by the exact rule; a NaN that fmt cannot hold (refused earlier) takes 0."""
    bf16 = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    if not fmt.has_nan:
        bf16 = np.where(np.isnan(bf16), np.float32(0), bf16)
    table = _encode_exact(bf16, fmt, rounding, overflow)
    table.setflags(write=False)
    return table


def _round_to_odd_bf16(x: Float[np.ndarray, " n"]) -> UInt[np.ndarray, " n"]:
    """BF16 bits of float32 values: truncated, and the last bit set if anything was cut off.

    A value between two neighbours, or between one and their midpoint, stays strictly between them, so that a second
    rounding to at most 5 mantissa bits gives what one rounding gives. NaN stays NaN, infinity infinity.
    """
    bits = x.view(np.uint32)
    odd: np.ndarray = (bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)
    return odd


def _round_magnitude(
    x: Float[np.ndarray, "*shape"],
    negative: np.ndarray,
    fmt: FloatFormat,
    rounding: Rounding,
    draws: UInt[np.ndarray, "*shape"] | None,
    num_random_bits: int,
) -> Int64[np.ndarray, "*shape"]:
    """Magnitude code of x >= 0 in fmt continued upward without bound; max_code + 1 and more mean overflow.

    1. 2**exponent <= x < 2**(exponent + 1); the ulp there is 2**(max(exponent, emin) - mantissa_bits).
    2. Counted in ulps, x = lower + frac, exactly. The count is below 2**(mantissa_bits + 1) <= 2**53.
    3. code = lower + binade * 2**mantissa_bits: in a normal value the implicit bit is one of the ulps and turns binade
       index k into biased exponent k + 1, and a rounding carry moves into the exponent by itself. Without subnormals
       binade k has biased exponent k, so the implicit bit is taken off again.
    """
    fraction, exponent = np.frexp(x)
    exponent = np.where(x == 0, fmt.emin, exponent.astype(np.int64) - 1)
    binade = np.maximum(exponent - fmt.emin, 0)
    shift = exponent + 1 - (fmt.emin + binade) + fmt.mantissa_bits
    # All that lies under 2**-40 ulp rounds alike in every mode, and so clamped it cannot underflow to 0.
    ulps = np.ldexp(fraction, np.maximum(shift, -40).astype(np.int32))
    lower = np.floor(ulps)
    frac = ulps - lower
    code = lower.astype(np.int64) + (binade << fmt.mantissa_bits)
    if not fmt.has_subnormals:
        code -= 2**fmt.mantissa_bits

    if rounding is Rounding.TIES_TO_EVEN:
        round_up = (frac > 0.5) | ((frac == 0.5) & (code % 2 == 1))
    elif rounding is Rounding.TIES_TO_AWAY:
        round_up = frac >= 0.5
    elif rounding is Rounding.STOCHASTIC:
        assert draws is not None
        round_up = draws < np.ldexp(frac, num_random_bits)
    else:
        round_up = (frac > 0) & ~_points_toward_zero(negative, rounding)
    rounded: np.ndarray = np.maximum(
        code + round_up, 0
    )  # below the smallest value of a format without zero: that value
    return rounded


def _check_format(fmt: Any, caller: str) -> None:
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"{caller}: fmt is {fmt!r}, needed a FloatFormat")


def _points_toward_zero(negative: np.ndarray, rounding: Rounding) -> np.ndarray:
    if rounding is Rounding.UP:
        return negative
    if rounding is Rounding.DOWN:
        return ~negative
    return np.full(negative.shape, rounding is Rounding.TOWARD_ZERO)


def _overflow_code(fmt: FloatFormat, overflow: Overflow) -> int:
    if overflow is Overflow.SATURATE:
        return fmt.max_code
    code = fmt.inf_code if fmt.has_inf else fmt.nan_code
    assert code is not None
    return code


def _check_random_bits(
    shape: tuple[int, ...], rounding: Rounding, random_bits: Any, num_random_bits: int
) -> UInt[np.ndarray, "*shape"] | None:
    if rounding is not Rounding.STOCHASTIC:
        if random_bits is not None:
            raise ValueError(f"encode: random_bits is given, but rounding is {rounding.name}, which uses none")
        return None
    if random_bits is None:
        raise ValueError(
            "encode: rounding is STOCHASTIC, which needs random_bits; mxsim.formats.philox_bits makes them"
        )
    if type(num_random_bits) is bool or not isinstance(num_random_bits, (int, np.integer)):
        raise TypeError(f"encode: num_random_bits is {num_random_bits!r}, needed an integer")
    num_random_bits = int(num_random_bits)
    if not 1 <= num_random_bits <= 32:
        raise ValueError(f"encode: num_random_bits is {num_random_bits}, needed 1 to 32")
    bits = as_numpy(random_bits, caller="encode", name="random_bits")
    if bits.dtype.kind != "u" and not (bits.dtype.kind == "i" and bool((bits >= 0).all())):
        raise TypeError(f"encode: random_bits has dtype {bits.dtype}, needed unsigned integers")
    if bits.shape != shape:
        raise ValueError(f"encode: random_bits has shape {bits.shape}, needed {shape}, the shape of values")
    return bits.astype(np.uint64) & np.uint64(2**num_random_bits - 1)


def _check_encodable(x: Float[np.ndarray, "*shape"], fmt: FloatFormat) -> None:
    """Refuse what a format without NaN has no code for."""
    if fmt.has_nan:
        return
    refused = np.isnan(x) if fmt.signed else ~(np.isfinite(x) & (x >= 0))
    if refused.any():
        index = _first(refused)
        raise ValueError(f"encode: values has {x[index]} at index {index}, and {fmt} has no code for it")


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])
