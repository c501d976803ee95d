"""The cases of every op: all scalars against all scales, then blocks, shapes, groups and views.

Scalars are exhausted: a block's largest element pins its scale, and the block's other places run through every value
that leaves it the largest; one such set of blocks for each scale. Blocks, shapes and layouts are sampled. Seeds are
fixed, so a case's name says all about it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mxsim
from mxsim.blocks import ScaleRule, scale_exponent
from mxsim.formats import BF16, E2M1, E4M3, FP16, FloatFormat, Rounding, decode
from mxsim.validate.cases import Case, Inputs, SizesForm, View

Rng = np.random.Generator
Array = np.ndarray

_FP4_BLOCK, _FP8_BLOCK = 32, 128
_SIGN, _BF16_INF = 0x8000, 0x7F80
_NAN_SCALE = 0xFF
_MIN_FP8_SCALE, _MAX_FP8_SCALE = -149, 127  # every float32 power of two
_REAL_TENSORS = Path(mxsim.__file__).parent.parent / "paper_figures" / "data" / "minilm_slices.safetensors"
_RULES = tuple(ScaleRule)
_HEADROOMS = tuple(range(7))


class Size(Enum):
    """How much."""

    QUICK = "quick"  # a sixteenth of the scales, few shapes: seconds
    FULL = "full"


def cases_of(op: str, size: Size, device_type: str) -> list[Case]:
    """The cases of one op, exhaustive ones first."""
    return [
        *_SCALARS[op](size),
        *_block_cases(op, size),
        *_shape_cases(op, size),
        *_group_cases(op, size),
        *_view_cases(op, size),
        *_large_cases(op, size, device_type),
        *_stochastic_cases(op, size),
    ]


# ------------------------------------------------------------------------------- every BF16 value against every scale
def _bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _largest_of_each_scale(element: FloatFormat, rule: ScaleRule, source: FloatFormat) -> Array:
    """Magnitude bits of the largest finite amax of every scale exponent that the source can reach."""
    assert source.inf_code is not None
    magnitudes = np.arange(1, source.inf_code, dtype=np.uint16)
    exponents = scale_exponent(decode(magnitudes, source), element, rule)
    is_last = np.append(exponents[1:] != exponents[:-1], True)
    return magnitudes[is_last]


def _pinned_blocks(largest: int, others: Array, block: int, sign: int) -> Array:
    """Blocks [n, block]: `largest` once, at a place and with a sign that change, and `others` one after another.

    The last block is filled with others from the front again.
    """
    num_blocks = max(1, -(-others.size // (block - 1)))
    rows = np.arange(num_blocks)
    is_pin = np.zeros((num_blocks, block), bool)
    is_pin[rows, (rows * 37 + largest) % block] = True
    out = np.empty((num_blocks, block), others.dtype)
    out[~is_pin] = np.resize(others, num_blocks * (block - 1))
    out[is_pin] = np.where(rows % 2, largest | sign, largest)
    return out


def _every_value_at_every_scale(block: int, largest: Array) -> Array:
    """For each of the largest magnitudes, all values of at most its magnitude, both signs."""
    parts = []
    for magnitude in largest.tolist():
        below = np.arange(magnitude + 1, dtype=np.uint16)
        parts.append(_pinned_blocks(magnitude, np.concatenate([below, below | _SIGN]), block, _SIGN))
    return np.concatenate(parts)


def _every_amax(block: int, magnitudes: Array, rng: Rng, sign: int = _SIGN) -> Array:
    """A block for each amax, the other elements up to 12 binades below it."""
    largest = magnitudes.astype(np.int64)[:, None]
    span = (magnitudes[-1].astype(np.int64) + 1) * 12 // 255
    out = np.maximum(largest - rng.integers(0, span, (magnitudes.size, block)), 0)
    out[np.arange(magnitudes.size), rng.integers(0, block, magnitudes.size)] = magnitudes
    return (out | rng.integers(0, 2, out.shape) * sign).astype(np.uint16)


_PALETTES = [  # what a special block is made of
    [0x0000],
    [0x8000],
    [0x0000, 0x8000],
    [0x0001, 0x8001, 0x0000],  # smallest subnormals
    [0x007F, 0x8040, 0x0003],
    [0x0080, 0x807F, 0x0081],  # around the smallest normal
    [0x7F7F, 0xFF7F],  # largest finite
    [0x7F7F, 0x0001, 0x8000, 0x3F80],
    [0x7F00, 0x7EFF, 0x7F01],
    [0x3F80, 0xBF80, 0x0000],
    [0x40C0, 0x40C1, 0x40BF, 0x40E0, 0x40DF, 0x4080, 0x4081],  # 6, 7, 4 and neighbours
    [0x43E0, 0x43E1, 0x43DF, 0x43E8, 0x43F0],  # 448, 464, 480
]
_POISONS = [0x7F80, 0xFF80, 0x7F81, 0xFF81, 0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF]


def _special_blocks(num_blocks: int, block: int, rng: Rng) -> Array:
    """Blocks of few distinct values; every third holds one NaN or infinity."""
    which = np.arange(num_blocks) % len(_PALETTES)
    out = np.zeros((num_blocks, block), np.uint16)
    for i, palette in enumerate(_PALETTES):
        shape = (int((which == i).sum()), block)
        out[which == i] = np.array(palette, np.uint16)[rng.integers(0, len(palette), shape)]
    poisoned = np.flatnonzero(np.arange(num_blocks) // len(_PALETTES) % 3 == 1)
    out[poisoned, rng.integers(0, block, poisoned.size)] = np.resize(np.array(_POISONS, np.uint16), poisoned.size)
    return out


def _as_rows(blocks: Array, columns: int) -> Array:
    """[n, block] -> [rows, columns], blocks along the rows; the first blocks again where the last row is not full."""
    per_row = columns // blocks.shape[1]
    return np.resize(blocks, (-(-blocks.shape[0] // per_row), columns))


def _as_columns(blocks: Array, columns: int) -> Array:
    """[n, block] -> [block * m, columns], blocks down the columns."""
    count = -(-blocks.shape[0] // columns)
    grid = np.resize(blocks, (count, columns, blocks.shape[1]))
    return np.ascontiguousarray(grid.transpose(0, 2, 1)).reshape(count * blocks.shape[1], columns)


def _as_tiles(blocks: Array) -> Array:
    """[n, 16384] -> [n, 128, 128]."""
    return blocks.reshape(-1, _FP8_BLOCK, _FP8_BLOCK)


def _thinned(values: Array, size: Size, step: int = 16) -> Array:
    return values if size is Size.FULL else values[::step]


def _bf16_scalars(
    op: str,
    size: Size,
    *,
    element: FloatFormat,
    rule: ScaleRule,
    block: int,
    arrange: Callable[[Array], Array],
    options: dict[str, Any],
    name: str = "x",
    note: str = "",
) -> Iterator[Case]:
    """All values at all scales, every amax, special blocks."""

    def at_every_scale(rng: Rng) -> Inputs:
        largest = _thinned(_largest_of_each_scale(element, rule, BF16), size)
        return {name: arrange(_every_value_at_every_scale(block, largest))}

    def every_amax(rng: Rng) -> Inputs:
        step = 16 * (block // 4096) + 1
        magnitudes = _thinned(np.arange(_BF16_INF, dtype=np.uint16)[::step], size)
        return {name: arrange(_every_amax(block, magnitudes, rng))}

    def special(rng: Rng) -> Inputs:
        return {name: arrange(_special_blocks(36 * (2 if block > 4096 else 16), block, rng))}

    yield Case(op, f"every BF16 value at every scale{note}", at_every_scale, options)
    yield Case(op, f"every BF16 amax{note}", every_amax, options)
    yield Case(op, f"NaN, infinity, zeros, subnormals, FLT_MAX{note}", special, options)


def _scalars_bf16_to_fp4_row(size: Size) -> Iterator[Case]:
    op = "bf16_to_fp4_row"
    for rule in _RULES:
        options, note = {"scale_rule": rule}, f", {rule.name}"
        if rule is ScaleRule.FLOOR:
            options = {}
        yield from _bf16_scalars(
            op,
            size,
            element=E2M1,
            rule=rule,
            block=_FP4_BLOCK,
            arrange=partial(_as_rows, columns=1024),
            options=options,
            note=note,
        )
        yield Case(op, f"every FP16 value at every scale{note}", partial(_every_fp16, rule=rule, size=size), options)
        yield Case(op, f"FP32 ties and neighbours{note}", partial(_fp32_ties, rule=rule, size=size), options)
        yield Case(op, f"FP32 amax around the thresholds{note}", partial(_fp32_thresholds, size=size), options)
        yield Case(op, f"random FP32 bits{note}", partial(_fp32_bits, size=size), options)


def _every_fp16(rng: Rng, *, rule: ScaleRule, size: Size) -> Inputs:
    largest = _thinned(_largest_of_each_scale(E2M1, rule, FP16), size, 4)
    blocks = _every_value_at_every_scale(_FP4_BLOCK, largest)
    magnitudes = np.arange(1, 0x7C00, dtype=np.uint16)
    amax = _every_amax(_FP4_BLOCK, _thinned(magnitudes, size), rng)
    special = np.array([0, 0x8000, 1, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF], np.uint16)
    mixed = special[rng.integers(0, 5, (64, _FP4_BLOCK))]
    mixed[::2, 5] = special[rng.integers(5, special.size, 32)]
    mixed[:8] &= 0x8000
    return {"x": _as_rows(np.concatenate([blocks, amax, mixed]), 256).view(np.float16)}


def _float32_near(values: Array, steps: Sequence[int]) -> Array:
    """The nearest float32 of each positive value, and those so many steps away from it."""
    with np.errstate(over="ignore", under="ignore"):
        bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.clip(bits[..., None] + np.array(steps), 0, 0x7F7FFFFF).astype(np.uint32).reshape(-1)


def _fp32_ties(rng: Rng, *, rule: ScaleRule, size: Size) -> Inputs:
    """Every midpoint and value of E2M1 at every scale, and its neighbours in FP32."""
    marks = np.array([0.125, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8])
    tops = {ScaleRule.FLOOR: 8.0, ScaleRule.RCEIL: 6.0, ScaleRule.CEIL: 4.0, ScaleRule.EVEN: 7.0}
    blocks = []
    for exponent in range(-127, 128, 1 if size is Size.FULL else 16):
        scale = 2.0**exponent
        top = tops[rule] * scale
        largest = int(_float32_near(np.array([min(top, float(np.finfo(np.float32).max))]), [0])[0])
        if rule in (ScaleRule.FLOOR, ScaleRule.EVEN) and largest != 0x7F7FFFFF:
            largest -= 1
        near = _float32_near(marks * scale, [-2, -1, 0, 1, 2, 255, -255])
        near = near[near <= largest]
        blocks.append(_pinned_blocks(largest, np.concatenate([near, near | 0x80000000]), _FP4_BLOCK, 0x80000000))
    return {"x": _as_rows(np.concatenate(blocks), 128).view(np.float32)}


def _fp32_thresholds(rng: Rng, *, size: Size) -> Inputs:
    significands = np.array([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 2])
    exponents = np.arange(-149, 128, 1 if size is Size.FULL else 16)
    amax = _float32_near(np.ldexp(significands[None, :], exponents[:, None]), [-3, -2, -1, 0, 1, 2, 3])
    amax = np.concatenate([amax, 1 << np.arange(31, dtype=np.uint32), (2 << np.arange(31, dtype=np.uint32)) - 1])
    amax = amax[amax < 0x7F800000]
    out = np.maximum(amax.astype(np.int64)[:, None] - rng.integers(0, 12 << 23, (amax.size, _FP4_BLOCK)), 0)
    out[np.arange(amax.size), rng.integers(0, _FP4_BLOCK, amax.size)] = amax
    signed = out | rng.integers(0, 2, out.shape) << 31
    return {"x": _as_rows(signed.astype(np.uint32), 512).view(np.float32)}


def _fp32_bits(rng: Rng, *, size: Size) -> Inputs:
    shape = (4096 if size is Size.FULL else 64, 384)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return {"x": bits.view(np.float32)}


def _scalars_bf16_to_fp8_row(size: Size) -> Iterator[Case]:
    return _bf16_to_fp8_scalars("bf16_to_fp8_row", size, partial(_as_rows, columns=1024))


def _scalars_bf16_to_fp8_col(size: Size) -> Iterator[Case]:
    return _bf16_to_fp8_scalars("bf16_to_fp8_col", size, partial(_as_columns, columns=1024))


def _bf16_to_fp8_scalars(op: str, size: Size, arrange: Callable[[Array], Array]) -> Iterator[Case]:
    return _bf16_scalars(op, size, element=E4M3, rule=ScaleRule.RCEIL, block=_FP8_BLOCK, arrange=arrange, options={})


def _scalars_bf16_to_fp8_tile(size: Size) -> Iterator[Case]:
    for options, note in (({}, ""), ({"transpose": True}, ", transposed")):
        yield from _bf16_scalars(
            "bf16_to_fp8_tile",
            size,
            element=E4M3,
            rule=ScaleRule.RCEIL,
            block=_FP8_BLOCK**2,
            arrange=_as_tiles,
            options=options,
            name="w",
            note=note,
        )


def _scalars_bf16_to_fp4_and_fp8_row(size: Size) -> Iterator[Case]:
    op = "bf16_to_fp4_and_fp8_row"
    for rule in _RULES:
        yield from _bf16_scalars(
            op,
            size,
            element=E2M1,
            rule=rule,
            block=_FP4_BLOCK,
            arrange=partial(_as_rows, columns=1024),
            options={} if rule is ScaleRule.FLOOR else {"scale_rule": rule},
            note=f", {rule.name}",
        )

    def scale_gaps(rng: Rng) -> Inputs:
        """Four blocks with their amax at all distances of up to 40 binades, and wherever BF16 has any."""
        num_rows = 8192 if size is Size.FULL else 256
        top = rng.integers(0, 255, (num_rows, 1))
        gaps = np.where(np.arange(num_rows)[:, None] % 3 == 0, rng.integers(0, 255, (num_rows, 4)), 0)
        gaps = np.where(np.arange(num_rows)[:, None] % 3 == 1, rng.integers(0, 40, (num_rows, 4)), gaps)
        gaps = np.where(
            np.arange(num_rows)[:, None] % 3 == 2, np.arange(num_rows)[:, None] // 3 % 32 * [0, 1, 1, 1], gaps
        )
        exponent = np.maximum(top - gaps, 0)
        bits = (exponent << 7)[:, :, None] + rng.integers(0, 128, (num_rows, 4, _FP4_BLOCK))
        bits = np.maximum(bits - (rng.integers(0, 4, bits.shape) << 7), 0) | rng.integers(0, 2, bits.shape) * _SIGN
        return {"x": bits.astype(np.uint16).reshape(num_rows, 4 * _FP4_BLOCK)}

    for headroom in _HEADROOMS:
        options = {} if headroom == 6 else {"headroom": headroom}
        yield Case(op, f"gaps between the four scales, headroom {headroom}", scale_gaps, options)


# --------------------------------------------------------------------------------- every FP4 code against every scale
def _fp4_bytes(codes: Array) -> Array:
    """[rows, K] codes -> [rows, K/2] bytes."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def _pinned_scales(size_of_block: int, num_scales: int, top: Array) -> Array:
    """[n, size_of_block] scale indices: in each block one of top, at a place that changes, and indices below it."""
    parts = []
    for largest in top.tolist():
        below = np.arange(largest + 1)
        parts.append(_pinned_blocks(largest, below, size_of_block, 0))
    return np.concatenate(parts)


def _every_code(num_rows: int, columns: int) -> Array:
    """Each row holds every E2M1 code in every group of 16 columns, starting elsewhere in each row."""
    return (np.arange(columns)[None, :] + np.arange(num_rows)[:, None]) % E2M1.num_codes


def _fp4_rows_at_every_gap(rng: Rng, *, size: Size) -> Inputs:
    """Every pair of scale codes as (largest, another) of the four blocks, with every code; NaN scales beside them."""
    scales = _pinned_scales(4, 256, _thinned(np.arange(255), size))
    with_nan = rng.integers(0, 256, (2048 if size is Size.FULL else 128, 4))
    with_nan[rng.random(with_nan.shape) < 0.3] = _NAN_SCALE
    scales = np.concatenate([scales, with_nan, np.full((4, 4), _NAN_SCALE)])
    scales = _as_rows(scales, 8).astype(np.uint8)
    return {"codes": _fp4_bytes(_every_code(scales.shape[0], 8 * _FP4_BLOCK)), "scales": scales}


def _fp4_columns_at_every_gap(rng: Rng, *, size: Size) -> Inputs:
    """The same for 128 rows of one group of columns."""
    scales = _pinned_scales(_FP8_BLOCK, 256, _thinned(np.arange(255), size))
    with_nan = rng.integers(0, 256, (32, _FP8_BLOCK))
    with_nan[rng.random(with_nan.shape) < 0.3] = _NAN_SCALE
    scales = np.concatenate([scales, with_nan, np.full((1, _FP8_BLOCK), _NAN_SCALE)])
    scales = _as_columns(scales, 16).astype(np.uint8)
    return {"codes": _fp4_bytes(_every_code(scales.shape[0], 16 * _FP4_BLOCK)), "scales": scales}


def _scalars_fp4_to_fp8(op: str, make: Callable[..., Inputs], size: Size) -> Iterator[Case]:
    for headroom in _HEADROOMS:
        options = {} if headroom == 6 else {"headroom": headroom}
        yield Case(op, f"every code at every pair of scales, headroom {headroom}", partial(make, size=size), options)


def _scalars_fp4_to_bf16(size: Size) -> Iterator[Case]:
    def every_code(rng: Rng) -> Inputs:
        scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
        return {"codes": _fp4_bytes(_every_code(64, 128)), "scales": scales}

    yield Case("fp4_to_bf16", "every code at every scale", every_code)


# -------------------------------------------------------------------------------- every E4M3 code against every scale
def _powers_of_two(exponents: Array) -> Array:
    return np.ldexp(np.float32(1), exponents.astype(np.int32))


def _fp8_scale_exponents(size: Size) -> Array:
    return _thinned(np.arange(_MIN_FP8_SCALE, _MAX_FP8_SCALE + 1), size)


def _scalars_fp8_row_to_fp4_row(size: Size) -> Iterator[Case]:
    op = "fp8_row_to_fp4_row"

    def every_code(rng: Rng) -> Inputs:
        """For each amax code all codes of at most its magnitude, in blocks of 32, at every scale."""
        blocks = []
        for largest in range(E4M3.max_code + 1):
            below = np.arange(largest + 1, dtype=np.uint8)
            blocks.append(_pinned_blocks(largest, np.concatenate([below, below | 0x80]), _FP4_BLOCK, 0x80))
        rows = _as_rows(np.concatenate(blocks), _FP8_BLOCK)
        exponents = _fp8_scale_exponents(size)
        scales = np.repeat(_powers_of_two(exponents), rows.shape[0])
        codes = np.tile(rows, (exponents.size, 1))
        count = -(-codes.shape[0] // 4)
        return {"codes": np.resize(codes, (count, 4 * _FP8_BLOCK)), "scales": np.resize(scales, (count, 4))}

    for rule in _RULES:
        options = {} if rule is ScaleRule.FLOOR else {"scale_rule": rule}
        yield Case(op, f"every code and amax at every scale, {rule.name}", every_code, options)
    yield Case(op, "scales that are no powers of two", partial(_fp8_bad_scales, size=size), bad_input=True)


def _scalars_fp8_row_to_fp8_col(size: Size) -> Iterator[Case]:
    op = "fp8_row_to_fp8_col"

    def every_code(rng: Rng) -> Inputs:
        """Every pair of scales as (largest, another) of 128 rows, with every code."""
        exponents = np.arange(_MIN_FP8_SCALE, _MAX_FP8_SCALE + 1)
        top = _thinned(np.arange(exponents.size), size)
        index = np.repeat(_pinned_scales(_FP8_BLOCK, exponents.size, top), 2, axis=0)  # for either half of the codes
        groups = 6
        scales = _powers_of_two(exponents[_as_columns(index, groups)])
        num_rows = scales.shape[0]
        column = np.arange(groups * _FP8_BLOCK)[None, :]
        shifted = (column + np.arange(num_rows)[:, None]) % _FP8_BLOCK
        codes = shifted + _FP8_BLOCK * (column // _FP8_BLOCK % 2)
        return {"codes": codes.astype(np.uint8), "scales": scales}

    yield Case(op, "every code at every pair of scales", every_code)
    yield Case(op, "scales that are no powers of two", partial(_fp8_bad_scales, size=size), bad_input=True)


def _fp8_bad_scales(rng: Rng, *, size: Size) -> Inputs:
    inputs = _wild_fp8(rng, 300, 384)
    bad = [0.0, -0.0, -1.0, -(2.0**-149), 3.0, np.inf, -np.inf, 1.0000001, 2.0**-126 * 1.5, 3 * 2.0**-149, np.nan]
    where = rng.random(inputs["scales"].shape) < 0.2
    inputs["scales"][where] = rng.choice(np.array(bad, np.float32), int(where.sum()))
    return inputs


def _no_scalars(size: Size) -> Iterator[Case]:
    yield from ()


_SCALARS: dict[str, Callable[[Size], Iterator[Case]]] = {
    "bf16_to_fp4_row": _scalars_bf16_to_fp4_row,
    "bf16_to_fp4_and_fp8_row": _scalars_bf16_to_fp4_and_fp8_row,
    "bf16_to_fp8_row": _scalars_bf16_to_fp8_row,
    "bf16_to_fp8_col": _scalars_bf16_to_fp8_col,
    "bf16_to_fp8_tile": _scalars_bf16_to_fp8_tile,
    "fp4_row_to_fp8_row": partial(_scalars_fp4_to_fp8, "fp4_row_to_fp8_row", _fp4_rows_at_every_gap),
    "fp4_row_to_fp8_col": partial(_scalars_fp4_to_fp8, "fp4_row_to_fp8_col", _fp4_columns_at_every_gap),
    "fp4_to_bf16": _scalars_fp4_to_bf16,
    "fp8_row_to_fp4_row": _scalars_fp8_row_to_fp4_row,
    "fp8_row_to_fp8_col": _scalars_fp8_row_to_fp8_col,
    "fp8_row_to_ragged": _no_scalars,
}


# ---------------------------------------------------------------------------------------------------- ordinary blocks
def _to_bf16(x: Array) -> Array:
    """bfloat16 bits, ties to even."""
    import ml_dtypes

    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def _wild_bf16(rng: Rng, *shape: int) -> Array:
    """Normal rows of very different sizes, outliers, blocks of zeros, and here and there a special value."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (*shape[:-1], 1)))
    x = np.where(rng.random(shape) < 0.01, x * 2.0**6, x)
    bits = _to_bf16(x)
    flat = bits.reshape(-1, min(_FP4_BLOCK, shape[-1]) if bits.size and shape[-1] % _FP4_BLOCK == 0 else 1)
    flat[rng.random(flat.shape[0]) < 0.05] &= _SIGN
    special = rng.random(bits.shape) < 2.0**-11
    bits[special] = rng.choice(
        np.array([*_POISONS, 0, 0x8000, 1, 0x8001, 0x7F7F, 0x0080], np.uint16), int(special.sum())
    )
    return bits


def _wild_fp4(rng: Rng, num_rows: int, columns: int) -> Inputs:
    """Random codes; scales that differ by few binades, by many, by all, with NaN among them."""
    shape = (num_rows, columns // _FP4_BLOCK)
    spread = rng.choice(np.array([1, 6, 20, 255]), (num_rows, 1))
    scales = rng.integers(0, 255, (1, shape[1])) + rng.integers(-255, 256, shape) % (2 * spread) - spread
    scales = np.clip(scales, 0, 254)
    scales[rng.random(shape) < 0.03] = _NAN_SCALE
    scales[rng.random(num_rows) < 0.03] = _NAN_SCALE
    codes = rng.integers(0, 256, (num_rows, columns // 2), dtype=np.uint8)
    codes[rng.random(num_rows) < 0.05] &= 0x88
    return {"codes": codes, "scales": scales.astype(np.uint8)}


def _wild_fp8(rng: Rng, num_rows: int, columns: int) -> Inputs:
    """Random codes, few NaN, some blocks of zeros; scales powers of two, subnormal ones and NaN among them."""
    shape = (num_rows, columns // _FP8_BLOCK)
    codes = rng.integers(0, 256, (num_rows, columns), dtype=np.uint8)
    codes[((codes & 0x7F) == 0x7F) & (rng.random(codes.shape) < 0.97)] &= 0xFE
    blocks = codes.reshape(-1, _FP8_BLOCK)
    blocks[rng.random(blocks.shape[0]) < 0.1] &= 0x80
    spread = rng.choice(np.array([1, 5, 12, 300]), (num_rows, 1))
    exponents = rng.integers(-40, 40, (1, shape[1])) + rng.integers(-300, 300, shape) % (2 * spread) - spread
    scales = _powers_of_two(np.clip(exponents, _MIN_FP8_SCALE, _MAX_FP8_SCALE))
    scales[rng.random(shape) < 0.03] = np.nan
    return {"codes": codes, "scales": scales}


def _any_fp8(rng: Rng, num_rows: int, columns: int) -> Inputs:
    """Any codes and any scales, every NaN and subnormal among them: for what only copies."""
    return {
        "codes": rng.integers(0, 256, (num_rows, columns), dtype=np.uint8),
        "scales": rng.integers(0, 2**32, (num_rows, columns // _FP8_BLOCK), dtype=np.uint32).view(np.float32),
    }


def _wild(op: str, rng: Rng, num_rows: int, columns: int) -> Inputs:
    """Inputs for any op but tiles."""
    if op.startswith("bf16"):
        return {"x": _wild_bf16(rng, num_rows, columns)}
    if op.startswith("fp4"):
        return _wild_fp4(rng, num_rows, columns)
    return (_any_fp8 if op == "fp8_row_to_ragged" else _wild_fp8)(rng, num_rows, columns)


def _block_cases(op: str, size: Size) -> Iterator[Case]:
    """Distributions, and real tensors where the file is there."""
    if not op.startswith("bf16"):
        if op != "fp8_row_to_ragged":
            rows = 1024 if size is Size.FULL else 128
            yield Case(op, "random codes and scales", lambda rng: _wild(op, rng, rows, 1024))
        return
    name, shape = ("w", (4, 384, 512)) if op == "bf16_to_fp8_tile" else ("x", (1536, 512))
    if size is Size.QUICK:
        shape = (*shape[:-2], 128, 512)
    distributions: dict[str, Callable[[Rng], Array]] = {
        "N(0, 1)": lambda rng: rng.standard_normal(shape),
        "Cauchy": lambda rng: rng.standard_cauchy(shape),
        "Student t, 3 degrees of freedom": lambda rng: rng.standard_t(3, shape),
        "normal with lognormal row scales": lambda rng: (
            rng.standard_normal(shape) * np.exp(4 * rng.standard_normal((*shape[:-1], 1)))
        ),
        "normal with outlier columns": lambda rng: (
            rng.standard_normal(shape) * np.where(np.arange(shape[-1]) % 97 == 0, 64.0, 1.0)
        ),
        "tiny": lambda rng: rng.standard_normal(shape) * 2.0**-126,
        "huge": lambda rng: np.clip(rng.standard_normal(shape), -2, 2) * 2.0**126,
    }
    options = {"transpose": True} if op == "bf16_to_fp8_tile" else {}
    for distribution, draw in distributions.items():
        yield Case(op, distribution, lambda rng, draw=draw: {name: _to_bf16(draw(rng))})
    yield Case(op, "wild", lambda rng: {name: _wild_bf16(rng, *shape)}, options)
    yield Case(op, "random BF16 bits", lambda rng: {name: rng.integers(0, 2**16, shape, dtype=np.uint16)})
    if size is Size.FULL and _REAL_TENSORS.is_file():
        yield from _real_cases(op, name)


def _real_cases(op: str, argument: str) -> Iterator[Case]:
    import torch
    from safetensors import safe_open

    columns = _FP4_BLOCK if op in ("bf16_to_fp4_row", "bf16_to_fp8_col") else 1 if argument == "w" else _FP8_BLOCK

    def load(rng: Rng, key: str) -> Inputs:
        with safe_open(_REAL_TENSORS, framework="pt") as file:
            return {argument: file.get_tensor(key).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)}

    with safe_open(_REAL_TENSORS, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    for key, shape in shapes.items():
        if len(shape) == 2 and shape[1] % columns == 0:
            yield Case(op, f"real tensor {key}", partial(load, key=key))


# ------------------------------------------------------------------------------------------------------------- shapes
_32_COLUMNS = ("bf16_to_fp4_row", "fp4_row_to_fp8_col", "bf16_to_fp8_col", "fp4_to_bf16")  # K % 32, the others K % 128
_RAGGED = (
    "fp4_row_to_fp8_row",
    "fp4_row_to_fp8_col",
    "fp8_row_to_fp8_col",
    "fp8_row_to_ragged",
    "bf16_to_fp8_row",
    "bf16_to_fp8_col",
    "bf16_to_fp4_and_fp8_row",
)


def _options_of(op: str, i: int) -> dict[str, Any]:
    """Keywords for the i-th case: each rule and headroom in turn."""
    options: dict[str, Any] = {}
    if op in ("bf16_to_fp4_row", "fp8_row_to_fp4_row", "bf16_to_fp4_and_fp8_row") and i % 4:
        options["scale_rule"] = _RULES[i % 4]
    if op in ("fp4_row_to_fp8_row", "fp4_row_to_fp8_col", "bf16_to_fp4_and_fp8_row") and i % 7 != 6:
        options["headroom"] = i % 7
    return options


def _shape_cases(op: str, size: Size) -> Iterator[Case]:
    if op == "fp8_row_to_ragged":
        return
    if op == "bf16_to_fp8_tile":
        yield from _tile_shapes(size)
        return
    rows = (
        [0, 1, 3, 127, 128, 129]
        if size is Size.QUICK
        else [0, 1, 2, 3, 4, 5, 31, 127, 128, 129, 255, 256, 257, 511, 1000]
    )
    columns = [128, 384] if size is Size.QUICK else [128, 256, 384, 1152]
    if op in _32_COLUMNS:
        columns = [32, *columns] if size is Size.QUICK else [32, 64, 96, 160, 224, 544, *columns]
    shapes = [(r, k) for r in rows for k in columns]
    shapes += [(5, 7168)] if size is Size.QUICK else [(1, 7168), (3, 7168), (129, 7168), (384, 7168), (130, 2048)]
    for i, (num_rows, num_columns) in enumerate(shapes):
        yield Case(
            op,
            f"{num_rows} x {num_columns}",
            lambda rng, r=num_rows, k=num_columns: _wild(op, rng, r, k),
            _options_of(op, i),
        )


def _tile_shapes(size: Size) -> Iterator[Case]:
    shapes: list[tuple[int, ...]] = [(1, 1), (128, 128), (129, 127), (2, 256, 384), (0, 128, 128), (3, 300, 520)]
    if size is Size.FULL:
        shapes += [
            (0, 5),
            (5, 0),
            (1, 7168),
            (7168, 1),
            (127, 385),
            (2, 3, 130, 140),
            (256, 7168),
            (5, 1, 1),
            (640, 640),
        ]
        shapes += [(n, k) for n in (3, 64, 127, 128, 129, 257) for k in (8, 100, 127, 128, 129, 516)]
    for shape in dict.fromkeys(shapes):
        for options in ({}, {"transpose": True}):
            name = f"{' x '.join(map(str, shape))}{', transposed' if options else ''}"
            yield Case("bf16_to_fp8_tile", name, lambda rng, s=shape: {"w": _wild_bf16(rng, *s)}, options)


# ------------------------------------------------------------------------------------------------------------- groups
def _group_lists(size: Size) -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    groups = {
        "no expert": [],
        "one empty expert": [0],
        "one expert of one row": [1],
        "small": [129, 0, 1, 127, 128, 3, 0],
        "one expert takes all": [0, 0, 300, 0],
    }
    if size is Size.FULL:
        groups |= {
            "empty experts only": [0, 0, 0],
            "experts of one row": [1] * 37,
            "whole blocks": [128, 256, 128],
            "empty experts first and last": [0, 0, 5, 0, 0, 260, 0],
            "one row short and one more": [127, 129, 255, 257],
            "many experts": [int(n) for n in rng.integers(0, 12, 400) * rng.integers(0, 2, 400)],
            "uneven experts": [int(n) for n in np.floor(np.exp(rng.normal(3.5, 1.3, 48)))],
        }
    return groups


def _group_cases(op: str, size: Size) -> Iterator[Case]:
    if op not in _RAGGED:
        return
    columns = [128, 384] if op not in _32_COLUMNS else [32, 160, 384]
    multiples = [1, 4, 8, 16, 128, 6] if op.endswith(("row", "ragged")) else [None]
    forms = list(SizesForm)
    i = 0
    for label, sizes in _group_lists(size).items():
        num_rows = sum(sizes)
        for form in forms:
            k, multiple = columns[i % len(columns)], multiples[(i + i // len(multiples)) % len(multiples)]
            options = _options_of(op, i) | {"group_sizes": sizes}
            if multiple not in (None, 4):
                options["row_multiple"] = multiple
            yield Case(
                op,
                f"{label}, {form.value}",
                lambda rng, r=num_rows, k=k: _wild(op, rng, r, k),
                options,
                sizes_form=form,
            )
            i += 1
    wide = 7168 if size is Size.FULL else 1152
    yield Case(
        op,
        f"uneven experts, K = {wide}",
        lambda rng: _wild(op, rng, 391, wide),
        {"group_sizes": [200, 0, 61, 130]},
        sizes_form=SizesForm.DEVICE_INT64,
    )
    misfits = {
        "too few": [10, 20],
        "too many": [100, 300, 50],
        "negative": [10, -3, 60, -(2**40), 130],
        "huge": [2**62] * 3,
    }
    for label, sizes in misfits.items():
        yield Case(
            op,
            f"sizes that do not sum to the rows: {label}",
            lambda rng: _wild(op, rng, 200, 128),
            {"group_sizes": sizes},
            sizes_form=SizesForm.DEVICE_INT64,
            bad_input=True,
        )


# -------------------------------------------------------------------------------------------------------------- views
def _view_cases(op: str, size: Size) -> Iterator[Case]:
    is_tile = op == "bf16_to_fp8_tile"
    for view in View:
        if view is View.CONTIGUOUS or (view is View.SMALL_FLOATS and op.startswith("bf16")):
            continue
        if is_tile and view is View.LEADING_AXES:
            continue
        shapes = [(130, 128), (256, 384)] if size is Size.FULL else [(130, 256)]
        for r, k in shapes:
            options: dict[str, Any] = {}
            if op == "fp8_row_to_ragged":
                if view is View.LEADING_AXES:
                    options["group_sizes"] = [r - 65, 0, 65]
                else:
                    options["group_sizes"] = [r - 1, 0, 1]
            make = (lambda rng, r=r, k=k: {"w": _wild_bf16(rng, 2, r, k)}) if is_tile else partial(_wild_of, op, r, k)
            yield Case(op, f"{r} x {k}, {view.value}", make, options, view)
    if op == "bf16_to_fp4_row":
        for view in (View.OFFSET, View.SLICED, View.TRANSPOSED):
            for dtype in (np.float16, np.float32):
                yield Case(
                    op,
                    f"{np.dtype(dtype)}, {view.value}",
                    lambda rng, dtype=dtype: {"x": rng.standard_normal((130, 96)).astype(dtype)},
                    view=view,
                )


def _wild_of(op: str, num_rows: int, columns: int, rng: Rng) -> Inputs:
    return _wild(op, rng, num_rows, columns)


# --------------------------------------------------------------------------------------------------------- stochastic
_STOCHASTIC_OPS = ("bf16_to_fp4_row", "bf16_to_fp8_row", "bf16_to_fp4_and_fp8_row")
_SEEDS = (0, 1, 2**32, 0x0123456789ABCDEF, 2**63, 2**64 - 1)


def _stochastic_cases(op: str, size: Size) -> Iterator[Case]:
    """Other cases of the op, with seeds; not the large ones, whose parts would draw alike."""
    if op not in _STOCHASTIC_OPS:
        return
    scalars = list(_SCALARS[op](size))
    blocks, shapes, groups, views = (
        list(make(op, size)) for make in (_block_cases, _shape_cases, _group_cases, _view_cases)
    )
    if size is Size.QUICK:
        blocks, shapes, groups = blocks[::4], shapes[::5], groups[::7]
    for i, case in enumerate([*scalars, *blocks, *shapes, *groups, *views]):
        if not case.bad_input:
            options = {**case.options, "rounding": Rounding.STOCHASTIC, "seed": _SEEDS[i % len(_SEEDS)]}
            yield replace(case, name=f"stochastic: {case.name}", options=options)


# -------------------------------------------------------------------------------------------------------------- large
def _large_cases(op: str, size: Size, device_type: str) -> Iterator[Case]:
    """One part many times over: fills the device; on CUDA also more than 2**31 elements."""
    if size is Size.QUICK:
        return
    repeats = [5, 128, 1200] if device_type == "cuda" else [5, 16]
    for repeat in repeats:
        name = f"256 x 7168, {repeat} times over"
        if op == "bf16_to_fp8_tile":
            yield Case(op, name, lambda rng: {"w": _wild_bf16(rng, 1, 256, 7168)}, {"transpose": True}, repeat=repeat)
            continue
        if op != "fp8_row_to_ragged":
            yield Case(op, name, partial(_wild_of, op, 256, 7168), repeat=repeat)
        if op in _RAGGED:
            options = {"group_sizes": [100, 0, 1, 155]}
            form = SizesForm.DEVICE_INT64
            yield Case(op, f"{name}, ragged", partial(_wild_of, op, 256, 7168), options, sizes_form=form, repeat=repeat)
