"""Codes of one format -> codes of another, times a power of two: integers from end to end."""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from mxsim.formats.float_format import CodeForm, FloatFormat, Specials


def rescale(
    codes: UInt8[np.ndarray, "*shape"], source: FloatFormat, target: FloatFormat, shift: Int[np.ndarray, "*shape"] | int
) -> UInt8[np.ndarray, "*shape"]:
    """target's code of value(code) * 2**shift: one rounding, ties to even, saturating; shift broadcasts against codes.

    The sign is kept, of zero and of underflow too. NaN becomes target's NaN with its sign; where target has none it
    becomes +0, and the caller poisons the block.

    Raises:
        ValueError: unless both formats are signed sign-magnitude formats of at most 8 bits with subnormals and a -0.

    >>> from mxsim.formats import E2M1, E4M3
    >>> [hex(c) for c in rescale(np.array([1, 7, 8], np.uint8), E2M1, E4M3, 6)]    # 0.5, 6 and -0, times 64
    ['0x60', '0x7c', '0x80']
    """
    table, lowest = _table(source, target)
    row = np.clip(np.asarray(shift, np.int32) - lowest, 0, table.shape[0] - 1).astype(np.intp)
    rescaled: np.ndarray = table[row, codes]
    return rescaled


@lru_cache(maxsize=16)
def _table(source: FloatFormat, target: FloatFormat) -> tuple[UInt8[np.ndarray, "shifts num_codes"], int]:
    """(codes by shift - lowest and source code, lowest): below it all underflows, above the last row all saturates."""
    for fmt in (source, target):
        if not (fmt.has_negative_zero and fmt.bits <= 8 and fmt.code_form is CodeForm.SIGN_MAGNITUDE):
            raise ValueError(f"rescale: {fmt} needed to be a signed format of at most 8 bits with subnormals and a -0")
    if target.mantissa_bits == 0 or source.has_inf or target.has_inf:
        raise ValueError(f"rescale: {source} -> {target}, needed a mantissa bit and no infinities")
    lowest = (target.emin - target.mantissa_bits) - (source.emax + 1) - 1
    highest = (target.emax + 1) - (source.emin - source.mantissa_bits)
    codes = np.arange(source.num_codes)
    table = np.array([_rescale_once(codes, source, target, shift) for shift in range(lowest, highest + 1)], np.uint8)
    table.setflags(write=False)
    return table, lowest


def _rescale_once(codes: Int[np.ndarray, " n"], source: FloatFormat, target: FloatFormat, shift: int) -> Any:
    """Round significand * 2**exponent to target.

    1. Unpack: value * 2**shift = significand * 2**exponent; the implicit bit is materialised, subnormals have none.
    2. Find the binade above target.emin that it lies in (0 for all that is smaller) and count target's ulps there.
    3. code = ulps + binade * 2**mantissa_bits: the implicit bit is one of the ulps and turns binade index k into
       biased exponent k + 1; a rounding carry moves into the exponent by itself.
    """
    magnitude = codes & source.magnitude_mask
    biased_exponent = magnitude >> source.mantissa_bits
    fraction = magnitude & ((1 << source.mantissa_bits) - 1)
    significand = np.where(biased_exponent > 0, fraction | 1 << source.mantissa_bits, fraction)
    exponent = np.maximum(biased_exponent, 1) - source._bias - source.mantissa_bits + shift

    leading = np.array([max(int(s).bit_length() - 1, 0) for s in significand]) + exponent
    binade = np.maximum(leading - target.emin, 0)
    right = target.emin + binade - target.mantissa_bits - exponent  # exponent of an ulp, less that of the significand
    ulps = _shift_right_rne(significand << np.maximum(-right, 0), np.clip(right, 0, source.mantissa_bits + 3))
    result = np.where(significand == 0, 0, np.minimum(ulps + (binade << target.mantissa_bits), target.max_code))

    sign = np.where(codes & source.sign_mask, target.sign_mask, 0)
    if source.specials is Specials.NAN_ALL_ONES:
        is_nan = magnitude == source.magnitude_mask
        result = np.where(is_nan, target.nan_code or 0, result)
        sign = np.where(is_nan & (not target.has_nan), 0, sign)
    return result | sign


def _shift_right_rne(x: Any, shift: Any) -> Any:
    """round(x / 2**shift), ties to even."""
    kept_lsb = (x >> shift) & 1
    just_below_half = (1 << np.maximum(shift - 1, 0)) - 1
    return np.where(shift > 0, (x + just_below_half + kept_lsb) >> shift, x)
