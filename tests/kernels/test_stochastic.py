"""Stochastic rounding of the kernels' CPU backends: random bits, scalars at their thresholds, blocks, torch.compile."""

import ctypes
import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.blocks import FP8_1X128, MXFP4, ScaleRule, fp4_row_to_fp8_row, quantize
from mxsim.formats import BF16, FP16, FP32, Rounding, decode, encode, philox_bits
from tests.compare import assert_codes_equal
from tests.kernels import cases
from tests.kernels.expected import assert_result, fp4_rows, fp8_rows, ragged_fp8_rows
from tests.kernels.test_rules import ELEMENTS, REACHED, SOURCES, around_boundaries, call, finite
from tests.oracle import philox4x32

STOCHASTIC = Rounding.STOCHASTIC
SEEDS = [0, 1, 2**32, 0x0123456789ABCDEF, 2**63, 2**64 - 1]
SIZES = [100, 0, 33, 127]
X = cases.floats(260, 256)


def draws(seed: int, x: torch.Tensor) -> dict:
    """Keywords of `quantize` for the op's seed."""
    return {"rounding": STOCHASTIC, "random_bits": philox_bits(seed, tuple(x.shape))}


# --------------------------------------------------------------------------------------------------------- random bits
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 4, 2**34 - 4, 2**34, 2**62])
def test_random_bits_are_philox_words(seed, first):
    got = np.empty(12, np.uint32)
    call("random_bits", got, ctypes.c_uint64(first), ctypes.c_uint64(seed))
    key = [seed & 0xFFFFFFFF, seed >> 32]
    quads = range(first // 4, first // 4 + 3)
    want = [word for q in quads for word in philox4x32([q & 0xFFFFFFFF, q >> 32, 0, 0], key)]
    assert got.tolist() == want


# ------------------------------------------------------------------------------------------------------------- scalars
def encode_stochastic(bits, exponent, random, source, element, *, quick):
    codes = np.empty(bits.shape, np.uint8)
    exponents = np.full(bits.shape, exponent, np.int32)
    numbers = (SOURCES.index(source), ELEMENTS.index(element), int(quick))
    return call("encode_stochastic", codes, bits.astype(np.uint32), exponents, random, *numbers)


def around_thresholds(values: np.ndarray, element, exponent: int) -> np.ndarray:
    """[3, n]: for each value the last draw that rounds it up and the next two, by bisection of the simulator's rule.

    A value that no draw moves gets the largest draws.
    """
    scaled = np.ldexp(values, -exponent)
    rounded_up = encode(scaled, element, rounding=STOCHASTIC, random_bits=np.zeros(values.shape, np.uint32))
    low, high = np.zeros(values.shape, np.int64), np.full(values.shape, 2**32, np.int64)
    for _ in range(32):
        middle = (low + high) // 2
        codes = encode(scaled, element, rounding=STOCHASTIC, random_bits=middle.astype(np.uint32))
        low, high = np.where(codes == rounded_up, middle, low), np.where(codes == rounded_up, high, middle)
    return np.clip(np.stack([high - 1, high, high + 1]), 0, 2**32 - 1).astype(np.uint32)


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("quick", [False, True], ids=["portable", "of the loops"])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_every_bf16_magnitude_at_its_threshold(element, quick):
    bits = finite(BF16)
    values = decode(bits, BF16).astype(np.float64)
    for exponent in (-127, -126, -122, -121, -120, 0, 120, 127):
        for random in around_thresholds(values, element, exponent):
            want = encode(np.ldexp(values, -exponent), element, rounding=STOCHASTIC, random_bits=random)
            got = encode_stochastic(bits, exponent, random, BF16, element, quick=quick)
            assert_codes_equal(got, want, bits, f"2**{exponent}")


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("quick", [False, True], ids=["portable", "of the loops"])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_every_bf16_value_over_every_scale(element, quick):
    bits = np.concatenate([finite(BF16), finite(BF16) | np.uint16(BF16.sign_mask)])
    values = decode(bits, BF16).astype(np.float64)
    for exponent in REACHED["BF16"]:
        random = philox_bits(exponent + 200, bits.size)
        random[::7] = 0  # what is tiny rounds up for no other
        want = encode(np.ldexp(values, -exponent), element, rounding=STOCHASTIC, random_bits=random)
        got = encode_stochastic(bits, exponent, random, BF16, element, quick=quick)
        assert_codes_equal(got, want, bits, f"2**{exponent}")


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("source", [FP16, FP32], ids=str)
def test_wider_floats_at_their_thresholds(source, element):
    for exponent in {"FP16": (-26, -24, -8, 0, 5), "FP32": (-127, -126, -100, -20, 0, 31, 127)}[source.name]:
        near = around_boundaries(source, element, exponent) if source is FP32 else finite(source)[::5]
        bits = np.concatenate([near, finite(source, 500), np.arange(1, 40, dtype=source.code_dtype)])
        values = decode(bits, source).astype(np.float64)
        for random in around_thresholds(values, element, exponent):
            want = encode(np.ldexp(values, -exponent), element, rounding=STOCHASTIC, random_bits=random)
            got = encode_stochastic(bits, exponent, random, source, element, quick=False)
            assert_codes_equal(got, want, bits, f"2**{exponent}")


def test_by_hand():
    """Halves: 2.5 lies midway between 2 (code 4) and 3 (5). Element i takes word i of the known answer for seed 0."""
    x = torch.full((1, 32), 2.5, dtype=torch.bfloat16)
    x[0, 4:] = 0
    x[0, 31] = 4
    codes = kernels.bf16_to_fp4_row(x, rounding=STOCHASTIC, seed=0).codes
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of which the first alone lies below 2**31
    assert [w < 2**31 for w in words] == [True, False, False, False]
    assert codes[0, :2].tolist() == [0x45, 0x44]


# -------------------------------------------------------------------------------------------------------------- blocks
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", list(ScaleRule))
def test_fp4_rows_are_the_simulators(backend, rule, seed):
    for x in (X, X.float() * 1.2345, (X.float() * 0.1).half()):
        got = kernels.bf16_to_fp4_row(x, scale_rule=rule, rounding=STOCHASTIC, seed=seed)
        assert_result(got, fp4_rows(quantize(x, MXFP4, scale_rule=rule, **draws(seed, x))), str(x.dtype))


@pytest.mark.parametrize("seed", SEEDS)
def test_fp8_rows_are_the_simulators(backend, seed):
    want = quantize(X, FP8_1X128, **draws(seed, X))
    assert_result(kernels.bf16_to_fp8_row(X, rounding=STOCHASTIC, seed=seed), fp8_rows(want))
    got = kernels.bf16_to_fp8_row(X, group_sizes=SIZES, row_multiple=8, rounding=STOCHASTIC, seed=seed)
    assert_result(got, ragged_fp8_rows(want.codes, want.scales, SIZES, 8))


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_the_fused_fp8_rows_hold_the_drawn_fp4_codes(backend, seed):
    fp4 = quantize(X, MXFP4, scale_rule=ScaleRule.EVEN, **draws(seed, X))
    fp8 = fp4_row_to_fp8_row(fp4, headroom=3)
    options = {"scale_rule": ScaleRule.EVEN, "headroom": 3, "rounding": STOCHASTIC, "seed": seed}
    got_fp4, got_fp8 = kernels.bf16_to_fp4_and_fp8_row(X, **options)
    assert_result(got_fp4, fp4_rows(fp4))
    assert_result(got_fp8, fp8_rows(fp8))
    got_fp4, got_fp8 = kernels.bf16_to_fp4_and_fp8_row(X, group_sizes=SIZES, **options)
    assert_result(got_fp4, fp4_rows(fp4))
    assert_result(got_fp8, ragged_fp8_rows(fp8.codes, fp8.scales, SIZES))


def test_every_scale_of_tiny_and_huge_blocks(backend):
    bits = np.random.default_rng(0).integers(0, 2**16, (600, 128)).astype(np.uint16)
    exponent = np.minimum(np.arange(600) // 2, 254)[:, None].astype(np.uint16)
    bits = (bits & 0x807F) | (np.maximum(exponent.astype(int) - (bits & 3), 0) << 7).astype(np.uint16)
    x = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    got = kernels.bf16_to_fp4_row(x, rounding=STOCHASTIC, seed=3)
    assert_result(got, fp4_rows(quantize(x, MXFP4, **draws(3, x))))
    got = kernels.bf16_to_fp8_row(x, rounding=STOCHASTIC, seed=3)
    assert_result(got, fp8_rows(quantize(x, FP8_1X128, **draws(3, x))))


def test_threads_draw_the_same(backend):
    x = cases.floats(999, 384)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = kernels.bf16_to_fp4_row(x, rounding=STOCHASTIC, seed=5)
        torch.set_num_threads(7)
        got = kernels.bf16_to_fp4_row(x, rounding=STOCHASTIC, seed=5)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(got.codes, want.codes)


@pytest.mark.parametrize("op", [kernels.bf16_to_fp4_row, kernels.bf16_to_fp8_row])
def test_leading_axes_draw_as_the_flattened_rows(op):
    x = cases.floats(60, 128)
    flat, batch = (op(y, rounding=STOCHASTIC, seed=9) for y in (x, x.view(3, 4, 5, 128)))
    assert torch.equal(flat.codes.view(torch.uint8), batch.codes.view(torch.uint8))


def test_seeds_differ_and_scales_do_not():
    first, second = (kernels.bf16_to_fp4_row(X, rounding=STOCHASTIC, seed=seed) for seed in (1, 2))
    assert torch.equal(first.scales, second.scales)
    assert (first.codes != second.codes).float().mean() > 0.2


def test_representable_values_do_not_move():
    exact = kernels.fp4_to_bf16(*kernels.bf16_to_fp4_row(torch.nan_to_num(X)))
    want = kernels.bf16_to_fp4_row(exact)
    got = kernels.bf16_to_fp4_row(exact, rounding=STOCHASTIC, seed=4)
    assert torch.equal(got.codes, want.codes)


# ------------------------------------------------------------------------------------------- keywords and compilation
EACH_OP = pytest.mark.parametrize(
    "op", [kernels.bf16_to_fp4_row, kernels.bf16_to_fp8_row, kernels.bf16_to_fp4_and_fp8_row]
)


@EACH_OP
@pytest.mark.parametrize(
    "keywords, error, message",
    [
        (
            {"rounding": STOCHASTIC},
            ValueError,
            "seed is None, but rounding is STOCHASTIC, needed an integer 0 to",
        ),
        ({"seed": 1}, ValueError, "seed is 1, but rounding is TIES_TO_EVEN, needed None"),
        ({"rounding": Rounding.UP}, ValueError, "rounding is UP, needed TIES_TO_EVEN or STOCHASTIC"),
        ({"rounding": Rounding.TOWARD_ZERO, "seed": 1}, ValueError, "rounding is TOWARD_ZERO, needed TIES_TO_EVEN or"),
        ({"rounding": "stochastic", "seed": 1}, TypeError, "rounding is 'stochastic', needed a Rounding"),
        ({"rounding": STOCHASTIC, "seed": -1}, ValueError, "seed is -1, needed an integer 0 to 2**64 - 1"),
        ({"rounding": STOCHASTIC, "seed": 2**64}, ValueError, f"seed is {2**64}, needed an integer 0 to 2**64 - 1"),
        ({"rounding": STOCHASTIC, "seed": 1.0}, TypeError, "seed is 1.0, needed an integer 0 to 2**64 - 1"),
        ({"rounding": STOCHASTIC, "seed": True}, TypeError, "seed is True, needed an integer 0 to 2**64 - 1"),
    ],
)
def test_refused(op, keywords, error, message):
    with pytest.raises(error, match=re.escape(f"{op.__name__}: {message}")):
        op(X, **keywords)


def test_a_numpy_seed_is_an_integer():
    got, want = (kernels.bf16_to_fp4_row(X, rounding=STOCHASTIC, seed=s) for s in (np.uint64(2**64 - 1), 2**64 - 1))
    assert torch.equal(got.codes, want.codes)


def test_a_compiled_function_takes_new_seeds_without_compiling_again():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def function(x, seed):
        fp4, fp8 = kernels.bf16_to_fp4_and_fp8_row(x * 2, rounding=STOCHASTIC, seed=seed)
        rows = kernels.bf16_to_fp8_row(x, group_sizes=SIZES, rounding=STOCHASTIC, seed=seed + 1)
        return fp4.codes, fp8.codes, rows.codes, kernels.bf16_to_fp4_row(x, rounding=STOCHASTIC, seed=seed).codes

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for seed in (3, 4, 5, 2**40, 2**63 - 2):
        for got, want in zip(compiled(X, seed), function(X, seed), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert len(compilations) <= 2  # the second for a seed that is not the first one's constant
