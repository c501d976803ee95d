"""Exact rational arithmetic for low-precision formats: slow, plain, and independent of what it judges.

value(code) = (-1)**S * (1 + M / 2**mantissa_bits) * 2**(E - bias)    E > 0, or a format without subnormals
            = (-1)**S *      M / 2**mantissa_bits  * 2**(1 - bias)    E = 0
code(value) = the neighbour that the rounding picks among those values, found by searching them

Every number is a `fractions.Fraction`; nothing here is a float, a NumPy array or an import from the package.
Formats are rows of the specification's table, written out; roundings, overflows, rules and orders are the
names of the package's enums, as strings. Codes are Python integers, scales of FP8 blocks are integer exponents
(None: NaN), so that a test compares integers with integers.

    decode(0x7E, E4M3)                            Number(negative=False, kind='finite', magnitude=Fraction(448, 1))
    encode(number(464.0), E4M3)                   126
    neighbours(Fraction(11, 2), E2M1)             (6, 7): codes of 4 and 6
    quantize_block([1.0, -3.0], E2M1, "FLOOR")    ([4, 15], 126): 1 and -3 in units of 2**-1
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

TWO = Fraction(2)
ROUNDINGS = ("TIES_TO_EVEN", "TIES_TO_AWAY", "TOWARD_ZERO", "UP", "DOWN", "STOCHASTIC")
DETERMINISTIC_ROUNDINGS = ROUNDINGS[:5]
OVERFLOWS = ("SATURATE", "TO_NONFINITE")
SCALE_RULES = ("FLOOR", "RCEIL", "CEIL", "EVEN")


# ---------------------------------------------------------------------------------------------- formats and numbers
class Spec(NamedTuple):
    """One row of the table of formats."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "NONE"  # NONE | NAN_ALL_ONES | NAN_IS_NEGATIVE_ZERO | INF_AND_NAN
    signed: bool = True
    subnormals: bool = True  # False: exponent field 0 is one more binade, and there is no zero
    twos_complement: bool = False
    nan: int | None = None  # code of the positive NaN that `encode` writes

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def num_magnitudes(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)


E2M1 = Spec("E2M1", 2, 1, 1)
E2M3 = Spec("E2M3", 2, 3, 1)
E3M2 = Spec("E3M2", 3, 2, 3)
E4M3 = Spec("E4M3", 4, 3, 7, "NAN_ALL_ONES", nan=0x7F)
E5M2 = Spec("E5M2", 5, 2, 15, "INF_AND_NAN", nan=0x7F)
E8M0 = Spec("E8M0", 8, 0, 127, "NAN_ALL_ONES", signed=False, subnormals=False, nan=0xFF)
BF16 = Spec("BF16", 8, 7, 127, "INF_AND_NAN", nan=0x7FC0)
FP16 = Spec("FP16", 5, 10, 15, "INF_AND_NAN", nan=0x7E00)
FP32 = Spec("FP32", 8, 23, 127, "INF_AND_NAN", nan=0x7FC00000)
FP64 = Spec("FP64", 11, 52, 1023, "INF_AND_NAN", nan=0x7FF8000000000000)
INT8 = Spec("INT8", 1, 6, 1, twos_complement=True)  # code / 64: M / 64 below 1, 1 + M / 64 from 1 on
SPECS = {s.name: s for s in (E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, BF16, FP16, FP32, INT8)}

# What a user may define in one line; the first column is also ml_dtypes' name where it has the format.
USER_SPECS = {
    "float8_e3m4": Spec("E3M4", 3, 4, 3, "INF_AND_NAN", nan=0x78),
    "float8_e4m3": Spec("E4M3_IEEE", 4, 3, 7, "INF_AND_NAN", nan=0x7C),
    "float8_e4m3fnuz": Spec("E4M3FNUZ", 4, 3, 8, "NAN_IS_NEGATIVE_ZERO", nan=0x80),
    "float8_e5m2fnuz": Spec("E5M2FNUZ", 5, 2, 16, "NAN_IS_NEGATIVE_ZERO", nan=0x80),
    "float8_e4m3b11fnuz": Spec("E4M3B11FNUZ", 4, 3, 11, "NAN_IS_NEGATIVE_ZERO", nan=0x80),
    "E5M10": Spec("E5M10", 5, 10, 15, "INF_AND_NAN", nan=0x7E00),
    "E3M0": Spec("E3M0", 3, 0, 3),
    "E2M0": Spec("E2M0", 2, 0, 1),
    "E1M2": Spec("E1M2", 1, 2, 0),
    "E3M3_FN": Spec("E3M3_FN", 3, 3, 3, "NAN_ALL_ONES", nan=0x3F),
    "E5M3_UNSIGNED": Spec("E5M3_UNSIGNED", 5, 3, 15, "NAN_ALL_ONES", signed=False, nan=0xFF),
    "E3M2_NO_ZERO": Spec("E3M2_NO_ZERO", 3, 2, 3, subnormals=False),
    "E4M0_UNSIGNED": Spec("E4M0_UNSIGNED", 4, 0, 7, signed=False, subnormals=False),
}


class Number(NamedTuple):
    """A signed real, a signed zero, an infinity or a NaN."""

    negative: bool
    kind: str  # finite | inf | nan
    magnitude: Fraction | None  # of a finite number

    @property
    def value(self) -> Fraction:
        assert self.magnitude is not None, self
        return -self.magnitude if self.negative else self.magnitude


def finite(value: Fraction | int, *, negative: bool | None = None) -> Number:
    """A finite number; `negative` is the sign of a zero."""
    value = Fraction(value)
    return Number(value < 0 if negative is None else negative, "finite", abs(value))


def number(x) -> Number:
    """A float (Python's, NumPy's, ml_dtypes'), an integer or a Fraction, exactly."""
    if isinstance(x, Number):
        return x
    if isinstance(x, (int, Fraction)):
        return finite(x)
    x = float(x)  # exact: nothing wider than binary64 comes here
    text = repr(x)
    negative = text.startswith("-")
    if "inf" in text:
        return Number(negative, "inf", None)
    if "nan" in text:
        return Number(False, "nan", None)  # a float's repr hides a NaN's sign: give `decode(bits, FP32)` instead
    return Number(negative, "finite", abs(Fraction(x)))


# ---------------------------------------------------------------------------------------------------------- decoding
def magnitude(code: int, spec: Spec) -> Fraction:
    """Real value of a magnitude code (sign bit stripped), special codes read as if they were ordinary."""
    exponent, fraction = divmod(code, 1 << spec.mantissa_bits)
    if exponent == 0 and spec.subnormals:
        return fraction * power_of_two(1 - spec.bias - spec.mantissa_bits)
    return ((1 << spec.mantissa_bits) + fraction) * power_of_two(exponent - spec.bias - spec.mantissa_bits)


@cache
def power_of_two(exponent: int) -> Fraction:
    """2**exponent."""
    return TWO**exponent


def max_code(spec: Spec) -> int:
    """Code of the largest finite magnitude."""
    if spec.specials == "NAN_ALL_ONES":
        return spec.num_magnitudes - 2
    if spec.specials == "INF_AND_NAN":
        return spec.num_magnitudes - (1 << spec.mantissa_bits) - 1
    return spec.num_magnitudes - 1


def decode(code: int, spec: Spec) -> Number:
    """The number that a code stands for."""
    assert 0 <= code < 1 << spec.bits, (code, spec)
    if spec.twos_complement:
        signed = code - (1 << spec.bits) if code & spec.sign_bit else code
        return finite(Fraction(signed, 1 << spec.mantissa_bits))
    if spec.specials == "NAN_IS_NEGATIVE_ZERO" and code == spec.sign_bit:
        return Number(True, "nan", None)
    negative, code = bool(code & spec.sign_bit), code & ~spec.sign_bit
    if code > max_code(spec):
        is_inf = spec.specials == "INF_AND_NAN" and code == max_code(spec) + 1
        return Number(negative, "inf" if is_inf else "nan", None)
    return Number(negative, "finite", magnitude(code, spec))


class _LazyMagnitudes:
    """The finite magnitudes of a format too large to list, computed when they are looked at."""

    def __init__(self, spec: Spec):
        self.spec = spec

    def __len__(self) -> int:
        return max_code(self.spec) + 1

    def __getitem__(self, code: int) -> Fraction:
        return magnitude(code, self.spec)


@cache
def magnitudes(spec: Spec) -> Sequence[Fraction]:
    """Finite magnitudes in order: index = magnitude code."""
    if spec.bits > 16:
        return _LazyMagnitudes(spec)
    table = [magnitude(c, spec) for c in range(max_code(spec) + 1)]
    assert all(a < b for a, b in pairwise(table)), f"{spec.name}: magnitudes must rise with the code"
    return table


@cache
def beyond_max(spec: Spec) -> Fraction:
    """The next magnitude of the grid if its top binade went on: 8 for E2M1, 480 for E4M3, 65536 for E5M2."""
    top_binade = max(floor_log2(max_finite(spec)), floor_log2(min_normal(spec)))  # where all are subnormal: theirs
    return max_finite(spec) + TWO ** (top_binade - spec.mantissa_bits)


def max_finite(spec: Spec) -> Fraction:
    return magnitude(max_code(spec), spec)


def min_normal(spec: Spec) -> Fraction:
    return TWO ** ((1 if spec.subnormals else 0) - spec.bias)


def min_subnormal(spec: Spec) -> Fraction | None:
    return magnitude(1, spec) if spec.subnormals and spec.mantissa_bits else None


def floor_log2(x: Fraction) -> int:
    """Largest e with 2**e <= x, by trying."""
    assert x > 0
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while power_of_two(e) > x:
        e -= 1
    while power_of_two(e + 1) <= x:
        e += 1
    return e


# ---------------------------------------------------------------------------------------------------------- encoding
def neighbours(x: Fraction, spec: Spec) -> tuple[int, int]:
    """Magnitude codes just below (or at) and just above x >= 0. Above the largest finite one the code max + 1 stands
    for `beyond_max`; below the smallest magnitude of a format without zero both are 0."""
    table = magnitudes(spec)
    if x < table[0]:
        return 0, 0
    below = bisect_right(table, x) - 1
    return below, below + 1


@lru_cache(maxsize=1 << 16)
def magnitude_or_beyond(code: int, spec: Spec) -> Fraction:
    """Real value of a magnitude code up to max + 1, where the top binade goes on."""
    return magnitude(code, spec) if code <= max_code(spec) else beyond_max(spec)


def position(x: Fraction, spec: Spec) -> Fraction:
    """Where x >= 0 lies between its neighbours, in [0, 1)."""
    below, above = neighbours(x, spec)
    low, high = magnitude_or_beyond(below, spec), magnitude_or_beyond(above, spec)
    return Fraction(0) if x <= low else (x - low) / (high - low)


def round_magnitude(
    x: Fraction, spec: Spec, rounding: str, *, negative: bool = False, r: int | None = None, k: int | None = None
) -> int:
    """Magnitude code of x >= 0 on the grid without an upper end; max_code + 1 means: beyond the largest finite one."""
    top = max_code(spec)
    toward_zero = rounding == "TOWARD_ZERO" or rounding == ("UP" if negative else "DOWN")
    if x >= beyond_max(spec):
        return top if toward_zero else top + 1
    below, above = neighbours(x, spec)
    if below == above:
        return below
    low, high = magnitude_or_beyond(below, spec), magnitude_or_beyond(above, spec)
    if x == low or toward_zero:
        return below
    if rounding in ("UP", "DOWN"):
        return above
    if rounding == "STOCHASTIC":
        assert r is not None
        assert k is not None
        assert 0 <= r < 1 << k
        return above if r * (high - low) < (x - low) * (1 << k) else below
    middle = (low + high) / 2
    if x != middle:
        return above if x > middle else below
    if rounding == "TIES_TO_AWAY":
        return above
    assert rounding == "TIES_TO_EVEN"
    return below if below % 2 == 0 else above


def encode(
    x,
    spec: Spec,
    rounding: str = "TIES_TO_EVEN",
    overflow: str = "SATURATE",
    *,
    r: int | None = None,
    k: int | None = None,
) -> int:
    """Code of a number. Raises ValueError where the format has no code for it or nothing non-finite to overflow to.

    STOCHASTIC takes one draw r out of [0, 2**k): the magnitude rounds up iff r < position * 2**k.
    """
    x = number(x)
    if overflow == "TO_NONFINITE" and spec.specials == "NONE":
        raise ValueError(f"{spec.name} has neither NaN nor infinity")
    if x.kind == "nan":
        return nan_code(spec, x.negative)
    if not spec.signed and (x.kind == "inf" or x.value < 0):
        return nan_code(spec, False)
    if x.kind == "inf":
        return _signed(max_code(spec), x.negative, spec) if overflow == "SATURATE" else nonfinite_code(spec, x.negative)
    code = round_magnitude(x.magnitude, spec, rounding, negative=x.negative, r=r, k=k)
    if code > max_code(spec):
        if overflow == "TO_NONFINITE":
            return nonfinite_code(spec, x.negative)
        code = max_code(spec)
    return _signed(code, x.negative, spec)


def _signed(code: int, negative: bool, spec: Spec) -> int:
    if not negative or not spec.signed:
        return code
    if spec.twos_complement:
        return -code % (1 << spec.bits)
    if code == 0 and spec.specials == "NAN_IS_NEGATIVE_ZERO":
        return 0
    return code | spec.sign_bit


def nan_code(spec: Spec, negative: bool) -> int:
    if spec.nan is None:
        raise ValueError(f"{spec.name} has no NaN")
    return spec.nan if spec.specials == "NAN_IS_NEGATIVE_ZERO" or not negative else spec.nan | spec.sign_bit


def nonfinite_code(spec: Spec, negative: bool) -> int:
    if spec.specials == "INF_AND_NAN":
        return _signed(max_code(spec) + 1, negative, spec)
    return nan_code(spec, negative)


def nearest_code_by_brute_force(x: Fraction, spec: Spec) -> int:
    """Closest finite magnitude, ties to the even code: looks at every one of them. x up to the largest finite."""
    return min(range(max_code(spec) + 1), key=lambda c: (abs(magnitude(c, spec) - x), c & 1))


def float32(x: Fraction) -> Fraction:
    """x rounded to binary32, to nearest even; beyond FLT_MAX stays FLT_MAX (every use here takes that minimum)."""
    return decode(encode(finite(x), FP32), FP32).value


# -------------------------------------------------------------------------------------------------- microscaling blocks
def emax(spec: Spec) -> int:
    """Exponent of the largest finite value: 2 for E2M1 and E2M3, 4 for E3M2, 8 for E4M3, 15 for E5M2, 0 for INT8."""
    return floor_log2(max_finite(spec))


def scale_exponent(amax: Fraction, spec: Spec, rule: str) -> int:
    """Exponent X of a block's power-of-two scale, clamped to [-127, 127]; amax = 0 gives -127."""
    if amax == 0:
        return -127
    e = floor_log2(amax)
    if rule == "FLOOR":
        x = e - emax(spec)
    elif rule == "RCEIL":
        x = e - emax(spec) - 2
        while amax > max_finite(spec) * power_of_two(x):
            x += 1
    elif rule == "CEIL":
        x = e - emax(spec) + (1 if amax > power_of_two(e) else 0)
    else:
        assert rule == "EVEN"
        # amax on a grid of mantissa_bits fraction bits in its own binade, ties to even
        units = amax / power_of_two(e - spec.mantissa_bits)
        rounded = round(units)
        x = floor_log2(Fraction(rounded) * power_of_two(e - spec.mantissa_bits)) - emax(spec)
    return max(-127, min(127, x))


def quantize_block(
    values: Iterable,
    spec: Spec,
    rule: str,
    rounding: str = "TIES_TO_EVEN",
    *,
    random: Sequence[int] | None = None,
    k: int = 32,
) -> tuple[list[int], int]:
    """Codes of one MX block and its E8M0 scale code. `random`: one integer below 2**k an element (STOCHASTIC)."""
    numbers = [number(v) for v in values]
    if any(n.kind != "finite" for n in numbers):
        return [0] * len(numbers), 0xFF
    x = scale_exponent(max((n.magnitude for n in numbers), default=Fraction(0)), spec, rule)
    draws = [None] * len(numbers) if random is None else random
    codes = [
        encode(
            Number(n.negative, "finite", n.magnitude / power_of_two(x)), spec, rounding, r=r, k=None if r is None else k
        )
        for n, r in zip(numbers, draws, strict=True)
    ]
    return codes, x + 127


def dequantize_block(codes: Iterable[int], spec: Spec, scale_code: int) -> list[Number]:
    """Exact values of one MX block."""
    if scale_code == 0xFF:
        return [Number(False, "nan", None) for _ in codes]
    return [_times_power_of_two(decode(c, spec), scale_code - 127) for c in codes]


def _times_power_of_two(n: Number, exponent: int) -> Number:
    return n if n.magnitude is None else Number(n.negative, n.kind, n.magnitude * power_of_two(exponent))


# -------------------------------------------------------------------------------------------------------------- NVFP4
class Nvfp4(NamedTuple):
    codes: list[list[int]]  # E2M1, one list a block
    scales: list[int]  # E4M3 codes, one a block
    tensor_scale: Fraction


def quantize_nvfp4(blocks: Sequence[Sequence], order: str = "PAPER", rounding: str = "TIES_TO_EVEN") -> Nvfp4:
    """A whole tensor, given as its blocks of 16. Every operation is rounded to binary32 as the specification says."""
    numbers = [[number(v) for v in block] for block in blocks]
    flt_max = max_finite(FP32)
    tensor_amax = max((n.magnitude for b in numbers for n in b if n.kind == "finite"), default=Fraction(0))
    s_enc = Fraction(1) if tensor_amax == 0 else min(float32(Fraction(2688) / tensor_amax), flt_max)
    inverse = float32(1 / s_enc)
    codes, scales = [], []
    for block in numbers:
        if any(n.kind != "finite" for n in block):
            codes.append([0] * len(block))
            scales.append(0x7F)
            continue
        amax = max((n.magnitude for n in block), default=Fraction(0))
        if order == "PAPER":
            scale = float32(float32(amax / 6) * s_enc)
        else:
            assert order == "TE"
            scale = float32(amax * float32(s_enc * float32(Fraction(1, 6))))
        scale_code = encode(finite(scale), E4M3)
        scales.append(scale_code)
        if scale_code == 0:
            codes.append([0] * len(block))
            continue
        step = float32(magnitude(scale_code, E4M3) * inverse)
        factor = flt_max if step == 0 else min(float32(1 / step), flt_max)
        codes.append(
            [encode(Number(n.negative, "finite", float32(n.magnitude * factor)), E2M1, rounding) for n in block]
        )
    return Nvfp4(codes, scales, inverse)


# --------------------------------------------------------------------------------------------- FP8 blocks (FP32 scales)
class Fp8Block(NamedTuple):
    codes: list[int]  # E4M3
    scale: Fraction | None  # None: NaN


def fp8_scale_exponent(amax: Fraction) -> int:
    """Smallest X with amax <= 448 * 2**X, clamped to [-127, 127]; amax = 0 gives 0."""
    return 0 if amax == 0 else scale_exponent(amax, E4M3, "RCEIL")


def quantize_fp8_block(values: Iterable, order: str | None = None) -> Fp8Block:
    """One block with its scale. order None: a power of two; TE: 1 / (448 / amax); DEEPGEMM: amax / 448."""
    numbers = [number(v) for v in values]
    if any(n.kind != "finite" for n in numbers):
        return Fp8Block([0x7F] * len(numbers), None)
    amax = max((n.magnitude for n in numbers), default=Fraction(0))
    if order is None or amax == 0:
        scale = TWO ** fp8_scale_exponent(amax)
        scaled = [n.magnitude / scale for n in numbers]
    elif order == "TE":
        factor = float32(448 / amax)
        scale = float32(1 / factor)
        scaled = [float32(n.magnitude * factor) for n in numbers]
    else:
        assert order == "DEEPGEMM"
        scale = float32(amax / 448)
        factor = float32(1 / scale) if scale else Fraction(0)  # amax / 448 may vanish: all +0 then
        scaled = [float32(n.magnitude * factor) for n in numbers]
        numbers = numbers if scale else [finite(0)] * len(numbers)
    return Fp8Block(
        [encode(Number(n.negative, "finite", q), E4M3) for n, q in zip(numbers, scaled, strict=True)], scale
    )


# --------------------------------------------------------------------------------------------------------- conversions
class Fp8Row(NamedTuple):
    codes: list[int]
    exponent: int | None  # of the power-of-two scale; None: NaN


def fp4_blocks_to_fp8(blocks: Sequence[tuple[Sequence[int], int]], headroom: int = 6) -> Fp8Row:
    """Up to four MXFP4 blocks, each (codes, E8M0 scale code), to one FP8 block under one scale 2**(E - headroom).

    Serves a column too: there a "block" is one element with the scale code of the row block that holds it.
    """
    exponents = [s - 127 for _, s in blocks if s != 0xFF]
    out_exponent = max(exponents, default=-127) - headroom
    codes = []
    for block, scale_code in blocks:
        for n in dequantize_block(block, E2M1, scale_code):
            codes.append(0x7F if n.kind == "nan" else encode(_times_power_of_two(n, -out_exponent), E4M3))
    return Fp8Row(codes, out_exponent)


def fp4_row_to_fp8_row(codes: Sequence[int], scales: Sequence[int], headroom: int = 6) -> list[Fp8Row]:
    """One row of any length: E2M1 codes, one scale code per 32 of them -> FP8 blocks of 128 (the last may be short)."""
    out = []
    for start in range(0, len(codes), 128):
        stop = min(start + 128, len(codes))
        blocks = [(codes[i : min(i + 32, stop)], scales[i // 32]) for i in range(start, stop, 32)]
        out.append(fp4_blocks_to_fp8(blocks, headroom))
    return out


def fp4_row_to_fp8_col(
    codes: Sequence[Sequence[int]], scales: Sequence[Sequence[int]], headroom: int = 6
) -> list[list[Fp8Row]]:
    """Rows of one expert -> result[k][j]: column k, rows 128 j to 128 j + 127, padded to 128 with code 0x00."""
    num_columns = len(codes[0]) if codes else 0
    out = []
    for k in range(num_columns):
        column = []
        for start in range(0, len(codes), 128):
            rows = range(start, min(start + 128, len(codes)))
            block = fp4_blocks_to_fp8([([codes[m][k]], scales[m][k // 32]) for m in rows], headroom)
            column.append(Fp8Row(block.codes + [0] * (128 - len(rows)), block.exponent))
        out.append(column)
    return out


def fp8_row_to_fp8_col(codes: Sequence[Sequence[int]], exponents: Sequence[Sequence[int | None]]) -> list[list[Fp8Row]]:
    """E4M3 rows with one power-of-two scale per 128 (exponent; None: NaN) -> columns, as `fp4_row_to_fp8_col`.

    Row blocks that are all zeros and NaN scales do not raise the column's exponent; none left: exponent 0.
    """
    num_columns = len(codes[0]) if codes else 0
    out = []
    for k in range(num_columns):
        column = []
        first = k // 128 * 128
        for start in range(0, len(codes), 128):
            rows = range(start, min(start + 128, len(codes)))
            counted = [
                exponents[m][k // 128]
                for m in rows
                if exponents[m][k // 128] is not None and any(c & 0x7F for c in codes[m][first : first + 128])
            ]
            top = max(counted, default=0)
            block = []
            for m in rows:
                n, e = decode(codes[m][k], E4M3), exponents[m][k // 128]
                block.append(0x7F if e is None else encode(_times_power_of_two(n, e - top), E4M3))
            column.append(Fp8Row(block + [0] * (128 - len(rows)), top))
        out.append(column)
    return out


def fp8_block_to_fp4(codes: Sequence[int], exponent: int | None, rule: str) -> list[tuple[list[int], int]]:
    """One FP8 block (up to 128 codes, power-of-two scale) -> its MXFP4 blocks, each (codes, E8M0 scale code)."""
    out = []
    for start in range(0, len(codes), 32):
        part = codes[start : start + 32]
        values = [
            Number(False, "nan", None) if exponent is None else _times_power_of_two(decode(c, E4M3), exponent)
            for c in part
        ]
        out.append(quantize_block(values, E2M1, rule))
    return out


# ------------------------------------------------------------------------------------------------------- random numbers
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 on Python integers: ten rounds of two 32 x 32 -> 64 bit products, the key bumped in between."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def random_word(index: int, seed: int) -> int:
    """The 32 random bits of element `index` of a tensor (row-major)."""
    counter = index // 4
    return philox4x32([counter % 2**32, counter >> 32, 0, 0], [seed % 2**32, seed >> 32])[index % 4]
