"""Whose rules made these bytes: which profiles reproduce them, where the others first differ, what would tell more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxsim.analysis.profile_catalog import PROFILES
from mxsim.analysis.profiles import Profile, float32_of
from mxsim.analysis.telling_apart import Distinction, same_scales, tell_apart
from mxsim.blocks import MXFP4, MXFP8_E4M3, BlockFormat
from mxsim.formats import E2M1, E8M0, unpack
from mxsim.formats.inputs import as_numpy


@dataclass(frozen=True)
class Difference:
    """The first place where a profile gives other bytes: a scale if any scale differs, else a code.

    `index` is that of the scale or of the code (not packed); `value` the block's amax, or the element.
    """

    what: str  # "scale" or "code"
    index: tuple[int, ...]
    value: float
    given: int | float
    by_profile: int | float


@dataclass(frozen=True)
class Comparison:
    """One profile beside the bytes, over the blocks that it speaks of."""

    profile: Profile
    num_blocks: int
    num_wrong_scales: int
    num_wrong_codes: int
    first: Difference | None

    @property
    def fits(self) -> bool:
        """Whether it reproduces every byte of at least one block."""
        return self.first is None and self.num_blocks > 0


@dataclass(frozen=True)
class Identification:
    """What the bytes say.

    comparisons: one for each profile of the format, those that fit first, then by the number of differences.
    groups: the profiles that fit; those in one group differ on no block that was searched.
    distinctions: for each pair of groups, the smallest block on which their first members differ. Quantize it with the
        unknown code, and one of the two is ruled out.
    """

    format: BlockFormat
    shape: tuple[int, ...]
    num_blocks: int
    comparisons: tuple[Comparison, ...]
    groups: tuple[tuple[Profile, ...], ...]
    distinctions: tuple[Distinction, ...]

    @property
    def fits(self) -> list[str]:
        """Names of the profiles that reproduce every byte."""
        return [c.profile.name for c in self.comparisons if c.fits]

    def to_json(self) -> dict[str, Any]:
        """As JSON values; numbers that JSON lacks as strings."""
        return {
            "format": self.format.name,
            "shape": list(self.shape),
            "blocks": self.num_blocks,
            "fits": self.fits,
            "groups": [[profile.name for profile in group] for group in self.groups],
            "profiles": [_comparison_json(c) for c in self.comparisons],
            "distinctions": [_distinction_json(d) for d in self.distinctions],
        }


def identify(
    inputs: Any, codes: Any, scales: Any, *, profiles: Sequence[Profile] = PROFILES, fmt: BlockFormat | None = None
) -> Identification:
    """Compare the bytes that some quantizer made of `inputs` with those of every profile of the format.

    Args:
        inputs: float16, bfloat16 or float32 [..., K].
        codes: [..., K], one a byte; MXFP4 also packed, [..., K/2], element 2j in the low nibble. uint8 or a view of
            the same bytes (int8, float8_e4m3fn).
        scales: [..., ceil(K / block)]: E8M0 codes (uint8 or float8_e8m0fnu), or float32 for FP8_1X128.
        profiles: those to try; your own may be among them.
        fmt: the format; None: what the shapes and dtypes say. Only unpacked codes, all below 16, with 32 elements a
            scale leave a doubt, and are taken as MXFP4.

    Raises:
        TypeError: if a dtype is none of these, fmt is no BlockFormat, or profiles holds anything but a Profile.
        ValueError: if the shapes fit no format of the profiles, an array is empty, or inputs holds no finite number.

    >>> from mxsim.blocks import ScaleRule, quantize
    >>> x = np.array([[7.0, 1.0, 0.3, -2.5]], np.float32)
    >>> t = quantize(x, MXFP4, scale_rule=ScaleRule.RCEIL)
    >>> "mxsim RCEIL" in identify(x, t.packed(), t.scales).fits
    True
    """
    if not (fmt is None or isinstance(fmt, BlockFormat)):
        raise TypeError(f"identify: fmt is {fmt!r}, needed a BlockFormat or None")
    profiles = list(profiles)
    strange = next((p for p in profiles if not isinstance(p, Profile)), None)
    if strange is not None:
        raise TypeError(f"identify: profiles holds {strange!r}, needed Profiles")
    x = float32_of(inputs, "identify", "inputs")
    if x.size == 0:
        raise ValueError(f"identify: inputs has shape {x.shape}, needed at least one element")
    if not np.isfinite(x).any():
        raise ValueError("identify: inputs holds no finite number, which no rule can be told by")
    given_codes = _bytes_of(codes, "codes")
    given_scales = _scales_of(scales)
    fmt = _format_of(x.shape, given_codes, given_scales, profiles, fmt)
    given_codes = _unpacked(given_codes, x.shape, fmt)

    comparisons = [_compare(p, x, given_codes, given_scales) for p in profiles if p.format == fmt]
    comparisons.sort(key=lambda c: (not c.fits, c.num_wrong_scales + c.num_wrong_codes))  # stable: catalog order
    groups: list[list[Profile]] = []
    for comparison in comparisons:
        if comparison.fits:
            _join(groups, comparison.profile)
    pairs = ((a[0], b[0]) for i, a in enumerate(groups) for b in groups[i + 1 :])
    distinctions = [distinction for a, b in pairs if (distinction := tell_apart(a, b)) is not None]
    return Identification(
        fmt, x.shape, given_scales.size, tuple(comparisons), tuple(map(tuple, groups)), tuple(distinctions)
    )


def _join(groups: list[list[Profile]], profile: Profile) -> None:
    """Into the first group none of whose members can be told from it, else into one of its own."""
    for group in groups:
        if all(tell_apart(member, profile) is None for member in group):
            group.append(profile)
            return
    groups.append([profile])


def _compare(profile: Profile, x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> Comparison:
    block = profile.format.block_size
    own_codes, own_scales = profile.quantize(x)
    judged = profile.judges(x)
    wrong_scales = ~same_scales(scales, own_scales) & judged
    wrong_codes = (codes != own_codes) & np.repeat(judged, block, axis=-1)[..., : x.shape[-1]]
    first = None
    if wrong_scales.any():
        index = _first(wrong_scales)
        start = index[-1] * block
        amax = float(np.abs(x[*index[:-1], start : start + block]).max())
        first = Difference("scale", index, amax, scales[index].item(), own_scales[index].item())
    elif wrong_codes.any():
        index = _first(wrong_codes)
        first = Difference("code", index, float(x[index]), codes[index].item(), own_codes[index].item())
    counts = (int(np.count_nonzero(mask)) for mask in (judged, wrong_scales, wrong_codes))
    return Comparison(profile, *counts, first)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


# --------------------------------------------------------------------------------------------------------- arguments
def _bytes_of(codes: Any, name: str) -> np.ndarray:
    array = as_numpy(codes, caller="identify", name=name)
    if array.dtype.itemsize != 1 or array.dtype.kind == "b":
        raise TypeError(f"identify: {name} has dtype {array.dtype}, needed uint8 or another view of bytes")
    if array.size == 0:
        raise ValueError(f"identify: {name} has shape {array.shape}, needed at least one element")
    return np.ascontiguousarray(array).view(np.uint8)


def _scales_of(scales: Any) -> np.ndarray:
    array = as_numpy(scales, caller="identify", name="scales")
    if array.dtype.newbyteorder("=") == np.float32:
        array = array.astype(np.float32, copy=False)
    if array.dtype != np.float32 and array.dtype.itemsize != 1:
        raise TypeError(f"identify: scales has dtype {array.dtype}, needed uint8 (E8M0 codes) or float32")
    return np.ascontiguousarray(array) if array.dtype == np.float32 and array.size else _bytes_of(array, "scales")


def _format_of(
    shape: tuple[int, ...],
    codes: np.ndarray,
    scales: np.ndarray,
    profiles: Sequence[Profile],
    wanted: BlockFormat | None,
) -> BlockFormat:
    """The format that these arrays can be of."""
    *batch, size = shape
    known = list(dict.fromkeys(p.format for p in profiles if wanted in (None, p.format)))
    if not known:
        raise ValueError(f"identify: no profile is of {wanted or 'any format'}")
    fitting = []
    for fmt in known:
        right_codes = codes.shape == shape or (fmt.element == E2M1 and codes.shape == (*batch, size / 2))
        right_scales = scales.shape == (*batch, -(-size // fmt.block_size))
        right_dtype = (scales.dtype == np.uint8) == (fmt.scale == E8M0)
        if right_codes and right_scales and right_dtype:
            fitting.append(fmt)
    if len(fitting) > 1 and {MXFP4, MXFP8_E4M3} == set(fitting):
        fitting = [MXFP4 if int(codes.max()) < E2M1.num_codes else MXFP8_E4M3]
    if not fitting:
        raise ValueError(
            f"identify: inputs {list(shape)}, codes {list(codes.shape)} and scales {list(scales.shape)} {scales.dtype} "
            f"fit none of {'; '.join(_needed(fmt, shape) for fmt in known)}"
        )
    return fitting[0]


def _needed(fmt: BlockFormat, shape: tuple[int, ...]) -> str:
    *batch, size = shape
    packed = f" or {[*batch, size // 2]}" if fmt.element == E2M1 and size % 2 == 0 else ""
    dtype = "uint8" if fmt.scale == E8M0 else "float32"
    return f"{fmt} (codes {[*batch, size]}{packed}, scales {[*batch, -(-size // fmt.block_size)]} {dtype})"


def _unpacked(codes: np.ndarray, shape: tuple[int, ...], fmt: BlockFormat) -> np.ndarray:
    if codes.shape != shape:
        return unpack(codes, fmt.element)
    if int(codes.max()) >= fmt.element.num_codes:
        index = _first(codes >= fmt.element.num_codes)
        raise ValueError(
            f"identify: codes has {codes[index]} at index {index}, needed codes of {fmt.element} below "
            f"{fmt.element.num_codes}, one a byte"
        )
    return codes


# -------------------------------------------------------------------------------------------------------------- JSON
def _number(x: float) -> int | float | str:
    return x if np.isfinite(x) else str(x)


def _comparison_json(c: Comparison) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": c.profile.name,
        "source": c.profile.source,
        "fits": c.fits,
        "blocks": c.num_blocks,
        "wrong_scales": c.num_wrong_scales,
        "wrong_codes": c.num_wrong_codes,
        "first": None,
    }
    if c.first is not None:
        record["first"] = {
            "what": c.first.what,
            "index": list(c.first.index),
            "value": _number(c.first.value),
            "given": _number(c.first.given),
            "by_profile": _number(c.first.by_profile),
        }
    return record


def _distinction_json(d: Distinction) -> dict[str, Any]:
    return {
        "block": [_number(x) for x in d.block.tolist()],
        "answers": {
            profile.name: {"codes": list(answer.codes), "scale": _number(answer.scale)}
            for profile, answer in zip(d.profiles, (d.first, d.second), strict=True)
        },
    }
