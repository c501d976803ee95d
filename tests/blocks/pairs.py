"""The package's names beside the oracle's, comparison of its tensors, and random ones to convert."""

import numpy as np

from mxsim.blocks import BLOCK_FORMATS, FP8_1X128, MXFP4, BlockFormat, BlockTensor, ScaleOrder, ScaleRule, quantize
from mxsim.formats import FORMATS, FloatFormat, Rounding
from tests import oracle
from tests.blocks.oracle_blocks import Quantized
from tests.blocks.oracle_convert import NAN, powers_of_two
from tests.compare import assert_codes_equal, assert_floats_equal

ELEMENTS: list[tuple[FloatFormat, oracle.Spec]] = [
    (FORMATS[name], oracle.SPECS[name]) for name in ("E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "INT8")
]
RULES = list(ScaleRule)


def assert_quantized_equal(got: BlockTensor, want: Quantized, x: np.ndarray | None = None, label: str = "") -> None:
    """Codes, scales and tensor scale agree in every bit, NaN scales included."""
    label = label or str(got.format)
    x_bits = None if x is None or x.dtype.kind not in "fV" else x
    if want.scales.dtype == np.float32:
        assert_floats_equal(got.scales, want.scales, label=f"{label} scales")
    else:
        assert got.scales.dtype == np.uint8
        assert_codes_equal(got.scales, want.scales, label=f"{label} scales")
    assert got.codes.dtype == np.uint8
    assert_codes_equal(got.codes, want.codes, x_bits, label=f"{label} codes")
    assert (got.tensor_scale is None) == (want.tensor_scale is None)
    if want.tensor_scale is not None:
        assert_floats_equal(np.float32(got.tensor_scale), np.float32(want.tensor_scale), label=f"{label} tensor scale")


def assert_tensors_equal(got: BlockTensor, want: BlockTensor, label: str = "") -> None:
    """Two block tensors agree in format, axis, source rows and every bit."""
    assert (got.format, got.axis, got.source_rows) == (want.format, want.axis, want.source_rows), label
    assert_quantized_equal(got, Quantized(want.codes, want.scales, want.tensor_scale), label=label)


def quantize_as_named(
    x,
    name: str,
    *,
    axis: int | None = None,
    rule: str | None = None,
    rounding: str = "TIES_TO_EVEN",
    order: str | None = None,
    random_words: np.ndarray | None = None,
    k: int = 32,
) -> BlockTensor:
    """`quantize` called with the oracle's names."""
    fmt: BlockFormat = BLOCK_FORMATS[name]
    return quantize(
        x,
        fmt,
        axis=axis,
        scale_rule=None if rule is None else ScaleRule[rule],
        rounding=Rounding[rounding],
        scale_order=None if order is None else ScaleOrder[order],
        random_bits=random_words,
        num_random_bits=k,
    )


def random_fp4(rows: int, columns: int, seed: int = 0, nan_share: float = 0.05) -> BlockTensor:
    """Scales within 25 binades of each other, or anywhere: conversions both exact and not."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(115, 140, (rows, -(-columns // 32)))
    scales = np.where(rng.random(scales.shape) < 0.02, rng.integers(0, 255, scales.shape), scales)
    scales = np.where(rng.random(scales.shape) < nan_share, 0xFF, scales)
    codes = rng.integers(0, 16, (rows, columns))
    return BlockTensor(codes.astype(np.uint8), scales.astype(np.uint8), MXFP4)


def random_fp8(rows: int, columns: int, seed: int = 0, nan_share: float = 0.05) -> BlockTensor:
    """The same in FP8, a third of the row blocks all zeros, NaN codes among the others."""
    rng = np.random.default_rng(seed)
    blocks = (rows, -(-columns // 128))
    exponents = rng.integers(-8, 10, blocks)
    exponents = np.where(rng.random(blocks) < 0.02, rng.integers(-149, 128, blocks), exponents)
    exponents = np.where(rng.random(blocks) < nan_share, NAN, exponents)
    codes = rng.integers(0, 256, (rows, columns))
    blank = (rng.random(blocks) < 0.33).repeat(128, axis=1)[:, :columns]
    return BlockTensor(np.where(blank, codes & 0x80, codes).astype(np.uint8), powers_of_two(exponents), FP8_1X128)
