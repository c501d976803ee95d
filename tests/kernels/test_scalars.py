"""The host build's loops through the ops, against the simulator: every scalar under every scale it can meet."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.blocks import (
    FP8_1X128,
    FP8_128X1,
    FP8_128X128,
    MXFP4,
    BlockTensor,
    ScaleRule,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp4_row,
    fp8_row_to_fp8_col,
    quantize,
    scale_exponent,
)
from mxsim.formats import BF16, E2M1, E4M3, FP16, decode, pack
from tests.kernels.expected import (
    Want,
    assert_bits_equal,
    assert_result,
    fp4_rows,
    fp8_cols,
    fp8_rows,
    torch_bits,
)

pytestmark = pytest.mark.usefixtures("host_library")
TORCH = {"BF16": torch.bfloat16, "FP16": torch.float16}
RULES = pytest.mark.parametrize("rule", list(ScaleRule), ids=lambda r: r.name)


def blocks_of_every_scale(source, element, rule: ScaleRule, size: int) -> np.ndarray:
    """Bits [blocks, size]: for each scale exponent that source reaches, all finite magnitudes that fit.

    They are those up to the largest amax that gives the exponent; it stands at a moving place. Signs alternate.
    """
    magnitudes = np.arange(source.max_code + 1, dtype=source.code_dtype)
    exponents = scale_exponent(decode(magnitudes, source), element, rule)
    largest = np.flatnonzero(np.append(exponents[1:] != exponents[:-1], True))
    blocks = []
    for amax in largest:
        count = -(-(amax + 1) // (size - 1))
        others = np.resize(magnitudes[: amax + 1], count * (size - 1)).reshape(count, size - 1)
        places = np.arange(count) % size
        rows = np.empty((count, size), source.code_dtype)
        rows[np.arange(size) != places[:, None]] = others.ravel()
        rows[np.arange(count), places] = amax
        blocks.append(rows)
    bits = np.concatenate(blocks)
    negative = (np.arange(bits.size).reshape(bits.shape) * 7 % 5) < 2
    return bits | np.where(negative, source.sign_mask, 0).astype(source.code_dtype)


def as_rows(blocks: np.ndarray, per_row: int) -> np.ndarray:
    """Blocks side by side, the last row filled with zeros."""
    filled = np.zeros((-(-len(blocks) // per_row) * per_row, blocks.shape[1]), blocks.dtype)
    filled[: len(blocks)] = blocks
    return filled.reshape(-1, per_row * blocks.shape[1])


@RULES
@pytest.mark.parametrize("source", [BF16, FP16], ids=str)
def test_every_value_under_every_FP4_scale(source, rule):
    bits = as_rows(blocks_of_every_scale(source, E2M1, rule, 32), 8)
    x = torch_bits(bits, TORCH[source.name])
    assert_result(kernels.bf16_to_fp4_row(x, scale_rule=rule), fp4_rows(quantize(x, MXFP4, scale_rule=rule)))


def test_every_value_under_every_FP8_scale_in_rows():
    x = torch_bits(blocks_of_every_scale(BF16, E4M3, ScaleRule.RCEIL, 128), torch.bfloat16)
    assert_result(kernels.bf16_to_fp8_row(x), fp8_rows(quantize(x, FP8_1X128)))


def test_every_value_under_every_FP8_scale_in_columns():
    # A column for each block: (blocks, 128) -> (blocks / 128, 128, 128), the middle axis down the column.
    blocks = blocks_of_every_scale(BF16, E4M3, ScaleRule.RCEIL, 128)
    bits = as_rows(blocks, 128).reshape(-1, 128, 128).transpose(0, 2, 1).reshape(-1, 128)
    x = torch_bits(np.ascontiguousarray(bits), torch.bfloat16)
    want = quantize(x, FP8_128X1)
    assert_result(kernels.bf16_to_fp8_col(x), Want(want.codes.T, want.scales))


@pytest.mark.parametrize("transpose", [False, True])
def test_every_value_under_every_FP8_scale_in_tiles(transpose):
    blocks = blocks_of_every_scale(BF16, E4M3, ScaleRule.RCEIL, 128 * 128)
    x = torch_bits(blocks.reshape(-1, 128, 128), torch.bfloat16)
    want = quantize(x.transpose(1, 2) if transpose else x, FP8_128X128)
    assert_result(kernels.bf16_to_fp8_tile(x, transpose=transpose), Want(want.codes, want.scales))


# ------------------------------------------------------------------------------------------------------ code to code
def fp8_blocks_of_every_amax() -> np.ndarray:
    """Codes [blocks, 128]: for each amax code all codes up to it, of both signs; then NaN beside every code."""
    blocks = []
    for amax in (*range(0x7F), 0x7F):
        others = np.concatenate([np.arange(amax + 1), np.arange(amax + 1) | 0x80]).astype(np.uint8)
        count = -(-others.size // 31)
        rows = np.empty((count, 32), np.uint8)
        rows[:, 1:] = np.resize(others, count * 31).reshape(count, 31)
        rows[:, 0] = amax
        blocks.append(np.roll(rows, amax, axis=1))
    return as_rows(np.concatenate(blocks), 4)


@RULES
def test_every_FP8_code_under_every_scale_becomes_FP4(rule):
    codes = fp8_blocks_of_every_amax()
    # Where X is clamped every exponent matters; between, one is like the other.
    exponents = np.array([*range(-149, -100), -60, -1, 0, 1, 60, *range(100, 128)])
    scales = np.ldexp(np.float32(1), exponents).astype(np.float32)
    scales = np.append(scales, np.float32(np.nan))
    t = BlockTensor(np.tile(codes, (len(scales), 1)), np.repeat(scales, len(codes))[:, None], FP8_1X128)
    got = kernels.fp8_row_to_fp4_row(torch.from_numpy(t.codes), torch.from_numpy(t.scales), scale_rule=rule)
    assert_result(got, fp4_rows(fp8_row_to_fp4_row(t, scale_rule=rule)))


@pytest.mark.parametrize("headroom", range(7))
def test_every_FP4_code_under_every_pair_of_scales_in_rows(headroom):
    # A row for each pair, in all four places; all 16 codes in each block of 32.
    first, second = (a.ravel() for a in np.meshgrid(np.arange(256), np.arange(256)))
    swapped = (first + second) % 2 == 1
    four_of_two, one_of_four = np.stack([second, first, first, second], 1), np.stack([first] * 3 + [second], 1)
    scales = np.where(swapped[:, None], four_of_two, one_of_four)
    codes = np.tile(np.arange(16, dtype=np.uint8), (65536, 8))
    t = BlockTensor(codes, scales.astype(np.uint8), MXFP4)
    got = kernels.fp4_row_to_fp8_row(torch.from_numpy(t.packed()), torch.from_numpy(t.scales), headroom=headroom)
    assert_result(got, fp8_rows(fp4_row_to_fp8_row(t, headroom=headroom)))


@pytest.mark.parametrize("headroom", range(7))
def test_every_FP4_code_under_every_gap_in_columns(headroom):
    # For each largest scale two blocks of 128 rows, whose other rows lie 0 to 254 binades below, or are NaN.
    rows = []
    for largest in range(256):
        gaps = np.arange(254)
        for part in (gaps[:127], gaps[127:]):
            others = np.where(part <= largest, largest - part, 0xFF)
            rows.append(np.insert(others, largest % 127, largest))
    scales = np.concatenate(rows).astype(np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(scales), 2))
    t = BlockTensor(codes, scales, MXFP4)
    got = kernels.fp4_row_to_fp8_col(torch.from_numpy(t.packed()), torch.from_numpy(t.scales), headroom=headroom)
    assert_result(got, fp8_cols(fp4_row_to_fp8_col(t, headroom=headroom)))


def test_every_FP8_code_under_every_gap_in_columns():
    # Row 0 is the largest, the others lie 1 to 127 binades below it, or are NaN; 256 codes a row.
    exponents = []
    for largest in range(-149, 128):
        others = largest - 1 - np.arange(127)
        exponents.append(np.append(largest, np.where(others >= -149, others, 1000)))
    exponents = np.concatenate(exponents)
    scales = np.where(exponents == 1000, np.nan, np.ldexp(1.0, np.minimum(exponents, 127))).astype(np.float32)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    t = BlockTensor(codes, np.repeat(scales[:, None], 2, axis=1), FP8_1X128)
    got = kernels.fp8_row_to_fp8_col(torch.from_numpy(t.codes), torch.from_numpy(t.scales))
    assert_result(got, fp8_cols(fp8_row_to_fp8_col(t)))


def test_every_FP4_code_under_every_scale_becomes_BF16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    t = BlockTensor(codes, np.arange(256, dtype=np.uint8)[:, None], MXFP4)
    got = kernels.fp4_to_bf16(torch.from_numpy(pack(codes, E2M1)), torch.from_numpy(t.scales))
    assert got.dtype == torch.bfloat16
    assert_bits_equal(got, t.dequantize(ml_dtypes.bfloat16).view(np.uint16), "bfloat16")
