"""Numbers that others have measured too."""

import numpy as np
import pytest

from mxsim.blocks import MXFP4, MXFP8_E4M3, MXINT8, NVFP4, BlockTensor, ScaleRule, quantize

NUM_BLOCKS = 100_000


def sqnr_db(x: np.ndarray, t: BlockTensor) -> float:
    """Signal over quantization noise."""
    noise = t.dequantize(np.float64) - x
    return 10 * float(np.log10(np.square(x.astype(np.float64)).sum() / np.square(noise).sum()))


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((NUM_BLOCKS, 32), np.float32)


@pytest.mark.parametrize("rule, want_db", [("EVEN", 19.03), ("FLOOR", 18.79), ("RCEIL", 18.76), ("CEIL", 16.83)])
def test_SQNR_of_MXFP4_on_normal_data(normal, rule, want_db):
    assert abs(sqnr_db(normal, quantize(normal, MXFP4, scale_rule=ScaleRule[rule])) - want_db) < 0.02


def test_more_bits_and_smaller_blocks_are_better(normal):
    x = normal[:8000]
    db = {fmt.name: sqnr_db(x, quantize(x, fmt)) for fmt in (MXFP4, NVFP4, MXFP8_E4M3, MXINT8)}
    assert db["MXFP4"] + 1 < db["NVFP4"] < db["MXFP8_E4M3"] - 5
    assert db["MXFP8_E4M3"] < db["MXINT8"]
