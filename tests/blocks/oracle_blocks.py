"""Where blocks lie, and what a whole tensor becomes: plain loops over the oracle's single blocks, any shape and axis.

A tensor of shape n with blocks of l along each axis has ceil(n / l) blocks along it; element i lies in block i // l.
Nothing here imports the package: formats go by name, and their layout is the specification's table, written out.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from tests import oracle
from tests.oracle import Number, Spec


class Layout(NamedTuple):
    """One row of the table of block formats."""

    element: Spec
    block: tuple[int, int]  # rows, columns
    scale: str  # E8M0 | E4M3 | FP32
    default_rule: str | None


LAYOUTS = {
    "MXFP4": Layout(oracle.E2M1, (1, 32), "E8M0", "FLOOR"),
    "MXFP6_E2M3": Layout(oracle.E2M3, (1, 32), "E8M0", "FLOOR"),
    "MXFP6_E3M2": Layout(oracle.E3M2, (1, 32), "E8M0", "FLOOR"),
    "MXFP8_E4M3": Layout(oracle.E4M3, (1, 32), "E8M0", "FLOOR"),
    "MXFP8_E5M2": Layout(oracle.E5M2, (1, 32), "E8M0", "FLOOR"),
    "MXINT8": Layout(oracle.INT8, (1, 32), "E8M0", "FLOOR"),
    "NVFP4": Layout(oracle.E2M1, (1, 16), "E4M3", None),
    "FP8_1X128": Layout(oracle.E4M3, (1, 128), "FP32", "RCEIL"),
    "FP8_128X1": Layout(oracle.E4M3, (128, 1), "FP32", "RCEIL"),
    "FP8_128X128": Layout(oracle.E4M3, (128, 128), "FP32", "RCEIL"),
}
MX = [name for name, layout in LAYOUTS.items() if layout.scale == "E8M0"]
FP8 = [name for name, layout in LAYOUTS.items() if layout.scale == "FP32"]


def axes_of(name: str, ndim: int) -> list[int]:
    """Every axis, negative, along which blocks of the format may run in a tensor of ndim axes."""
    rows, columns = LAYOUTS[name].block
    if rows > 1 and columns > 1:
        return [-1]
    return [-2] if rows > 1 else list(range(-ndim, 0))


def block_lengths(name: str, ndim: int, axis: int) -> tuple[int, ...]:
    """Elements of a block along each axis of the tensor."""
    rows, columns = LAYOUTS[name].block
    lengths = [1] * ndim
    if rows > 1 and columns > 1:
        lengths[-2:] = rows, columns
    else:
        lengths[axis] = rows * columns
    return tuple(lengths)


def num_blocks(shape: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Blocks along each axis: as many as it takes to cover it."""
    out = []
    for n, length in zip(shape, lengths, strict=True):
        count = 0
        while count * length < n:
            count += 1
        out.append(count)
    return tuple(out)


def each_block(shape: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """(index of the block, indices of its real elements in row-major order)."""
    for block in np.ndindex(*num_blocks(shape, lengths)):
        ranges = [
            range(b * length, min((b + 1) * length, n)) for b, length, n in zip(block, lengths, shape, strict=True)
        ]
        yield block, list(product(*ranges))


class Quantized(NamedTuple):
    """What the package's BlockTensor holds."""

    codes: np.ndarray  # uint8
    scales: np.ndarray  # uint8, or float32
    tensor_scale: np.float32 | None = None


def quantize_by_fractions(
    x: np.ndarray,
    name: str,
    *,
    axis: int = -1,
    rule: str | None = None,
    rounding: str = "TIES_TO_EVEN",
    order: str | None = None,
    random_words: np.ndarray | None = None,
    k: int = 32,
) -> Quantized:
    """Every block by the Fractions. random_words: one word an element of x; its low k bits count."""
    layout = LAYOUTS[name]
    lengths = block_lengths(name, x.ndim, axis)
    blocks = list(each_block(x.shape, lengths))
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros(num_blocks(x.shape, lengths), np.float32 if layout.scale == "FP32" else np.uint8)
    if layout.scale == "E4M3":
        whole = oracle.quantize_nvfp4([[x[i] for i in indices] for _, indices in blocks], order or "PAPER", rounding)
        for (block, indices), block_codes, scale in zip(blocks, whole.codes, whole.scales, strict=True):
            scales[block] = scale
            for i, code in zip(indices, block_codes, strict=True):
                codes[i] = code
        return Quantized(codes, scales, np.float32(float(whole.tensor_scale)))
    for block, indices in blocks:
        values = [x[i] for i in indices]
        draws = None if random_words is None else [int(random_words[i]) % 2**k for i in indices]
        block_codes: Sequence[int]
        if layout.scale == "E8M0":
            block_codes, scales[block] = oracle.quantize_block(
                values, layout.element, rule or "FLOOR", rounding, random=draws, k=k
            )
        elif rule is None and rounding == "TIES_TO_EVEN":
            block_codes, scale = oracle.quantize_fp8_block(values, order)
            scales[block] = np.nan if scale is None else float(scale)
        else:
            block_codes, scales[block] = _fp8_block(values, rule or "RCEIL", rounding, draws, k)
        for i, code in zip(indices, block_codes, strict=True):
            codes[i] = code
    return Quantized(codes, scales)


def _fp8_block(values: list, rule: str, rounding: str, draws: list[int] | None, k: int) -> tuple[list[int], float]:
    """An FP8 block under any rule and rounding: as an MX block, but zero has scale 1, and NaN poisons the codes."""
    numbers = [oracle.number(v) for v in values]
    if any(n.kind != "finite" for n in numbers):
        return [0x7F] * len(numbers), float("nan")
    amax = max(n.magnitude for n in numbers)
    x = oracle.scale_exponent(amax, oracle.E4M3, rule) if amax else 0
    scaled = [Number(n.negative, "finite", n.magnitude / oracle.TWO**x) for n in numbers]
    if draws is None:
        return [oracle.encode(n, oracle.E4M3, rounding) for n in scaled], 2.0**x
    return [oracle.encode(n, oracle.E4M3, rounding, r=r, k=k) for n, r in zip(scaled, draws, strict=True)], 2.0**x
