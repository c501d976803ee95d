"""The smallest block whose bytes differ between two profiles, searched for among blocks of one or two numbers."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Int64, UInt32

from mxsim.analysis.profiles import Profile
from mxsim.blocks import BlockFormat
from mxsim.formats import decode

_BF16_INF, _BF16_NAN, _SIGN = 0x7F80, 0x7FC0, 0x8000
_FP32_INF = 0x7F800000


@dataclass(frozen=True)
class Bytes:
    """What one profile makes of one block: a code for each number (not packed), and the scale (byte or FP32)."""

    codes: tuple[int, ...]
    scale: int | float


@dataclass(frozen=True)
class Distinction:
    """A block that two profiles answer differently.

    `values` are its first numbers, the rest of the block is zeros; `first` and `second` have a code for each of
    `values`. No block of fewer BF16 numbers among those searched tells the two apart; of as many, this is the simplest.
    """

    profiles: tuple[Profile, Profile]
    values: tuple[float, ...]
    first: Bytes
    second: Bytes

    @property
    def block(self) -> Float32[np.ndarray, " block"]:
        """The whole block, to be quantized."""
        block = np.zeros(self.profiles[0].format.block_size, np.float32)
        block[: len(self.values)] = self.values
        return block


def tell_apart(first: Profile, second: Profile) -> Distinction | None:
    """The smallest block on which both profiles pronounce and differ; None if there is none among those searched.

    In this order: a zero of either sign; every BF16 number alone; an amax between 4 and 8 beside an element at, just
    below or just above a tie, and NaN or infinity beside 1; FP32 numbers next to the rules' thresholds. Of equally
    many numbers: finite ones first, then those between 2**-16 and 2**16, then those of fewer significant bits, then
    those nearest to 1.

    Raises:
        TypeError: if one is no Profile.
        ValueError: if the profiles are of different formats.

    >>> from mxsim.analysis.profile_catalog import profiles_of
    >>> from mxsim.blocks import MXFP4
    >>> profile = {p.name: p for p in profiles_of(MXFP4)}
    >>> d = tell_apart(profile["mxsim RCEIL"], profile["mxsim CEIL"])
    >>> d.values, d.first, d.second
    ((1.5,), Bytes(codes=(7,), scale=125), Bytes(codes=(5,), scale=126))
    """
    for name, profile in (("first", first), ("second", second)):
        if not isinstance(profile, Profile):
            raise TypeError(f"tell_apart: {name} is a {type(profile).__name__}, needed a Profile")
    if first.format != second.format:
        raise ValueError(f"tell_apart: the profiles are of {first.format} and {second.format}, needed one format")
    for stage in range(len(_STAGES)):
        rows = _rows(first.format, stage)
        (codes_a, scales_a), (codes_b, scales_b) = _answers(first, stage), _answers(second, stage)
        differs = (codes_a != codes_b).any(axis=1) | ~same_scales(scales_a, scales_b)[:, 0]
        differs &= (first.judges(rows) & second.judges(rows))[:, 0]
        if differs.any():
            return _verified(first, second, rows[int(np.argmax(differs))])
    return None


def same_scales(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which scales have the same bits, a NaN counting as the same as any other."""
    if a.dtype != np.float32:
        return np.equal(a, b)
    return (np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)) | (
        np.isnan(a) & np.isnan(b)
    )


def _verified(first: Profile, second: Profile, values: Float32[np.ndarray, " n"]) -> Distinction:
    """The distinction, from the whole block."""
    block = np.zeros((1, first.format.block_size), np.float32)
    block[0, : values.size] = values
    answers = []
    for profile in (first, second):
        codes, scales = profile.quantize(block)
        answers.append(Bytes(tuple(codes[0, : values.size].tolist()), scales[0, 0].item()))
    assert repr(answers[0]) != repr(answers[1])  # NaN equals no NaN
    return Distinction((first, second), tuple(values.tolist()), answers[0], answers[1])


@lru_cache(maxsize=256)
def _answers(profile: Profile, stage: int) -> tuple[np.ndarray, np.ndarray]:
    return profile.quantize(_rows(profile.format, stage))


@lru_cache(maxsize=32)
def _rows(fmt: BlockFormat, stage: int) -> Float32[np.ndarray, "rows n"]:
    """The blocks of one stage, simplest first, without their zeros at the end."""
    bits = _STAGES[stage](fmt)
    values = bits.view(np.float32)
    keys = np.array([_complexity(column) for column in bits.T]).sum(axis=0)  # [5, rows]
    ordered: np.ndarray = values[np.lexsort(keys[::-1])]
    ordered.setflags(write=False)
    return ordered


def _complexity(bits: UInt32[np.ndarray, " n"]) -> Int64[np.ndarray, "5 n"]:
    """Not finite; of unusual size; significant bits; distance of the exponent from 0; negative."""
    magnitude = (bits & np.uint32(0x7FFFFFFF)).astype(np.int64)
    is_finite = magnitude < _FP32_INF
    fraction, exponent = np.frexp(np.where(is_finite, bits.view(np.float32), 0).astype(np.float64))
    significand = np.abs(np.ldexp(fraction, 24)).astype(np.int64)
    lowest = significand & -significand
    num_bits = 24 - np.frexp(lowest.astype(np.float64))[1] + 1
    size = np.abs(exponent - 1)
    return np.array([~is_finite, size > 16, np.where(significand, num_bits, 0), size, bits >> 31], np.int64)


def _bf16(bits: np.ndarray) -> UInt32[np.ndarray, "..."]:
    return bits.astype(np.uint32) << np.uint32(16)


def _zeros(fmt: BlockFormat) -> UInt32[np.ndarray, "rows 1"]:
    return _bf16(np.array([[0], [_SIGN]]))


def _one_bf16(fmt: BlockFormat) -> UInt32[np.ndarray, "rows 1"]:
    magnitudes = np.array([*range(1, _BF16_INF + 1), _BF16_NAN])
    return _bf16(np.concatenate([magnitudes, magnitudes | _SIGN])[:, None])


def _two_bf16(fmt: BlockFormat) -> UInt32[np.ndarray, "rows 2"]:
    """An amax in [4, 8) beside ties of scales around its own; NaN and infinity beside 1 and -1."""
    element = fmt.element
    amax = 0x4080 + np.arange(128)
    values = decode(np.arange(element.max_code + 1, dtype=np.uint8), element).astype(np.float64)
    ties = ((values[:-1] + values[1:]) / 2)[:, None] * 2.0 ** (2 - element.emax + np.arange(-1, 2))
    at_tie = (np.unique(ties[ties < 8]).astype(np.float32).view(np.uint32) >> 16).astype(np.int64)
    others = np.unique(at_tie[:, None] + [-1, 0, 1])
    others = np.concatenate([others, others | _SIGN])
    pairs = np.stack(np.broadcast_arrays(amax[:, None], others), axis=-1).reshape(-1, 2)
    pairs = pairs[(pairs[:, 1] & ~_SIGN) <= pairs[:, 0]]
    specials = [[special, one] for special in (_BF16_INF, _BF16_NAN, 0xFFC0) for one in (0x3F80, 0xBF80)]
    return _bf16(np.concatenate([pairs, specials]))


def _one_fp32(fmt: BlockFormat) -> UInt32[np.ndarray, "rows 1"]:
    """Numbers up to 8 FP32 steps from the rules' thresholds in every binade, and from quotients that are subnormal."""
    largest = fmt.element.max_finite
    marks = np.ldexp(np.array([1, 1.25, 1.5, 1.75, 1.875, 1.9375]), np.arange(-149, 128)[:, None]).reshape(-1)
    marks = np.concatenate([marks, np.ldexp(largest, np.arange(-149, -119)), np.ldexp(largest * 1.5, [-128, -127])])
    steps = marks.astype(np.float32).view(np.uint32).astype(np.int64)[:, None] + np.arange(-8, 9)
    near = np.unique(np.clip(steps, 1, _FP32_INF - 1)).astype(np.uint32)
    return np.concatenate([near, near | np.uint32(0x80000000)])[:, None]


_STAGES = (_zeros, _one_bf16, _two_bf16, _one_fp32)
