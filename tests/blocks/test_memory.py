"""quantize and dequantize need little more memory than their results: temporaries do not grow with the tensor."""

import tracemalloc

import numpy as np
import pytest

from mxsim.blocks import BLOCK_FORMATS, FP8_128X128, MXFP4, NVFP4, BlockTensor, dequantize, quantize
from mxsim.formats import Rounding

TEMPORARIES = 16 * 2**20  # bytes, whatever the size of the tensor


def traced_peak(call) -> tuple[int, object]:
    """(most bytes allocated at a time while call runs, its result)."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def large() -> np.ndarray:
    """64 MiB of float32."""
    return np.random.default_rng(0).standard_normal((4096, 4096), np.float32)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_quantize_needs_its_result_and_a_constant(large, fmt, axis):
    peak, t = traced_peak(lambda: quantize(large, fmt, axis=axis))
    assert isinstance(t, BlockTensor)
    stored = t.codes.nbytes + t.scales.nbytes
    assert peak - stored < TEMPORARIES
    assert peak < 1.5 * large.nbytes


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_quantize_of_16_MiB_stays_below_one_and_a_half_times_the_input(large, fmt):
    x = large[:1024]
    peak, t = traced_peak(lambda: quantize(x, fmt))
    assert isinstance(t, BlockTensor)
    assert peak < 1.5 * x.nbytes
    assert peak - t.codes.nbytes - t.scales.nbytes < TEMPORARIES


@pytest.mark.parametrize("shape", [(2**22,), (1, 2**22), (2**17, 32), (2**15, 128), (32, 2**6, 2**11)], ids=str)
def test_the_shape_does_not_matter(large, shape):
    x = large[:1024].reshape(shape)
    for axis in [-1, 0] if shape[0] > 1 else [-1]:
        peak, t = traced_peak(lambda axis=axis: quantize(x, MXFP4, axis=axis))
        assert isinstance(t, BlockTensor)
        assert peak - t.codes.nbytes - t.scales.nbytes < TEMPORARIES


def test_other_roundings_need_no_more(large):
    x = large[:1024]
    for rounding in (Rounding.UP, Rounding.TIES_TO_AWAY):
        peak, _ = traced_peak(lambda rounding=rounding: quantize(x, MXFP4, rounding=rounding))
        assert peak < 1.5 * x.nbytes
    words = np.zeros(x.shape, np.uint8)
    peak, _ = traced_peak(
        lambda: quantize(x, MXFP4, rounding=Rounding.STOCHASTIC, random_bits=words, num_random_bits=8)
    )
    assert peak < 1.5 * x.nbytes


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4, FP8_128X128], ids=str)
def test_dequantize_needs_its_result_and_a_constant(large, fmt):
    t = quantize(large[:1024], fmt)
    for dtype in (np.float32, np.float64):
        peak, out = traced_peak(lambda dtype=dtype: dequantize(t, dtype))
        assert isinstance(out, np.ndarray)
        assert peak - out.nbytes < TEMPORARIES + 2 * 8 * t.scales.size
