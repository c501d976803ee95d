"""The portable header, built by g++, against the simulator: scalars, exhaustively."""

import ctypes
import itertools

import numpy as np
import pytest

pytest.importorskip("torch")

from mxsim.blocks import ScaleRule, scale_exponent
from mxsim.formats import BF16, E2M1, E4M3, FP16, FP32, decode, encode
from mxsim.formats.rescale import rescale
from mxsim.kernels import host
from tests.compare import assert_codes_equal

pytestmark = pytest.mark.usefixtures("host_library")
SOURCES = [BF16, FP16, FP32]
ELEMENTS = [E2M1, E4M3]
RULES = [ScaleRule.FLOOR, ScaleRule.RCEIL, ScaleRule.CEIL, ScaleRule.EVEN]
# Scale exponents outside give all zeros or all maxima.
REACHED = {"BF16": range(-127, 128), "FP16": range(-40, 30), "FP32": range(-127, 128)}


def call(name: str, result: np.ndarray, *arguments: np.ndarray | int) -> np.ndarray:
    """mxsim_rule_<name>(arrays of length n, n, integers, result)."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray)]
    integers = [a for a in arguments if not isinstance(a, np.ndarray)]
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
    function = getattr(host.library(), f"mxsim_rule_{name}")
    function.restype = None
    function(*pointers, ctypes.c_int64(result.size), *integers, result.ctypes.data_as(ctypes.c_void_p))
    return result


def encode_scaled(bits: np.ndarray, exponent: int, source, element) -> np.ndarray:
    bits = np.ascontiguousarray(bits, np.uint32)
    exponents = np.full(bits.shape, exponent, np.int32)
    codes = np.empty(bits.shape, np.uint8)
    return call("encode", codes, bits, exponents, SOURCES.index(source), ELEMENTS.index(element))


def finite(source, count: int | None = None) -> np.ndarray:
    """Every finite magnitude, or that many of them at random."""
    if count is None:
        return np.arange(source.max_code + 1, dtype=source.code_dtype)
    return np.random.default_rng(0).integers(0, source.max_code + 1, count).astype(source.code_dtype)


def around_boundaries(source, element, exponent: int) -> np.ndarray:
    """Magnitudes of source at each value and tie of element times 2**exponent, with three neighbours either side."""
    values = decode(np.arange(element.max_code + 1), element).astype(np.float64)
    points = np.ldexp(np.concatenate([values, (values[1:] + values[:-1]) / 2]), exponent)
    bits = encode(points, source).astype(np.int64)
    near = (bits[:, None] + np.arange(-3, 4)).ravel()
    return np.unique(near[(near >= 0) & (near <= source.max_code)]).astype(source.code_dtype)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("source", [BF16, FP16], ids=str)
def test_every_finite_value_over_every_scale(source, element):
    bits = finite(source)
    values = decode(bits, source).astype(np.float64)
    for exponent in REACHED[source.name]:
        want = encode(np.ldexp(values, -exponent), element)
        assert_codes_equal(encode_scaled(bits, exponent, source, element), want, bits, f"2**{exponent}")


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_binary32_around_every_boundary_over_every_scale(element):
    for exponent in REACHED["FP32"]:
        bits = np.concatenate([around_boundaries(FP32, element, exponent), finite(FP32, 2000)])
        want = encode(np.ldexp(decode(bits, FP32).astype(np.float64), -exponent), element)
        assert_codes_equal(encode_scaled(bits, exponent, FP32, element), want, bits, f"2**{exponent}")


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_the_sign_bit_is_kept(source, element):
    bits = finite(source, 4000)
    negative = bits | source.code_dtype.type(source.sign_mask)
    for exponent in (-127, -20, -3, 0, 4, 90):
        want = encode_scaled(bits, exponent, source, element) | element.sign_mask
        assert_codes_equal(encode_scaled(negative, exponent, source, element), want, negative)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_scale_exponents(source, element, rule):
    bits = (
        finite(source)
        if source is not FP32
        else np.concatenate([*(around_boundaries(FP32, E4M3, e) for e in range(-149, 121)), finite(FP32, 10_000)])
    )
    got = np.empty(bits.shape, np.int32)
    call(
        "scale_exponent",
        got,
        bits.astype(np.uint32),
        SOURCES.index(source),
        ELEMENTS.index(element),
        RULES.index(rule),
    )
    np.testing.assert_array_equal(got, scale_exponent(decode(bits, source), element, rule))


@pytest.mark.parametrize("source, target", list(itertools.product(ELEMENTS, ELEMENTS)), ids=str)
def test_every_code_over_every_shift(source, target):
    shifts, codes = np.meshgrid(np.arange(-300, 301, dtype=np.int32), np.arange(source.num_codes, dtype=np.uint8))
    shifts, codes = shifts.ravel(), codes.ravel()
    got = np.empty(codes.shape, np.uint8)
    call("rescale", got, codes, shifts, ELEMENTS.index(source), ELEMENTS.index(target))
    assert_codes_equal(got, rescale(codes, source, target, shifts), codes)
