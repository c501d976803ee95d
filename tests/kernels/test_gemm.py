"""fp8_gemm_emulated on both CPU backends against the NumPy model, and the portable rule against both."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.blocks import EXACT, FP8_1X128, FP32_SEQUENTIAL, HOPPER, Accumulator, BlockTensor, fp8_gemm
from mxsim.formats import E4M3, E5M2
from mxsim.kernels import host
from mxsim.kernels.arguments import GEMM_ROUNDINGS
from tests.blocks.gemm_cases import ACCUMULATORS, E5M2_CASES, E5M2_PAIRS, EVERY_CASE, LONG_SPANS, case
from tests.compare import assert_codes_equal

BY_NAME = pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
BY_PAIR = pytest.mark.parametrize("formats", E5M2_PAIRS, ids=lambda pair: "-".join(map(str, pair)))
OUTPUTS = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16}


def tensors(a: BlockTensor, b: BlockTensor) -> list[torch.Tensor]:
    tensors = []
    for t in (a, b):
        codes = torch.from_numpy(t.codes)
        tensors += [codes.view(torch.float8_e5m2) if t.format.element == E5M2 else codes, torch.from_numpy(t.scales)]
    return tensors


def bits_of(x) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32).numpy()
    return x.view(f"u{x.itemsize}")


def assert_as_model(a: BlockTensor, b: BlockTensor, *, out_dtype=torch.float32, label="", **keywords) -> None:
    got = kernels.fp8_gemm_emulated(*tensors(a, b), out_dtype=out_dtype, **keywords)
    assert got.dtype is out_dtype
    want = fp8_gemm(a, b, out=OUTPUTS[out_dtype], **keywords)
    assert_codes_equal(bits_of(got), bits_of(want), label=f"{label} {keywords}")


# ------------------------------------------------------------------------------------------------------ both backends
@pytest.mark.parametrize("out_dtype", list(OUTPUTS), ids=str)
@pytest.mark.usefixtures("backend")
def test_every_case_by_rows_and_by_tiles(out_dtype):
    for codes, scales in EVERY_CASE:
        c = case(codes, scales, 9, 131, 256, seed=1)
        assert_as_model(*c.operands(), out_dtype=out_dtype, label=f"{codes}, {scales}")
        assert_as_model(*c.tiled(), out_dtype=out_dtype, label=f"{codes}, {scales}, tiles")


@BY_PAIR
@pytest.mark.usefixtures("backend")
def test_every_case_of_E5M2(formats):
    for codes, scales in E5M2_CASES:
        c = case(codes, scales, 9, 131, 256, seed=11, formats=formats)
        assert_as_model(*c.operands(), label=f"{codes}, {scales}")
        assert_as_model(*c.tiled(), out_dtype=torch.bfloat16, label=f"{codes}, {scales}, tiles")


@pytest.mark.usefixtures("backend")
def test_views_and_strides():
    c = case("normal", "float32 near 1", 6, 8, 384)
    a, a_scales, b, b_scales = tensors(*c.operands())
    want = bits_of(fp8_gemm(*c.operands()))
    float8 = torch.float8_e4m3fn
    for operands in (
        (a.view(float8), a_scales, b.view(float8), b_scales),
        (a.t().contiguous().t(), a_scales.t().contiguous().t(), b.t().contiguous().t(), b_scales.t().contiguous().t()),
        (a.view(2, 3, 384), a_scales.view(2, 3, 3), b, b_scales),
        (torch.cat([a, a])[::2][:3].repeat(1, 1), a_scales[[0, 2, 4]], b, b_scales),
    ):
        got = bits_of(kernels.fp8_gemm_emulated(*operands))
        assert_codes_equal(got, want if got.shape[0] == 6 else want[[0, 2, 4]])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("m, n, k", [(0, 3, 128), (3, 0, 128), (0, 0, 0), (2, 3, 0), (1, 1, 128)])
def test_small_shapes(m, n, k):
    for accumulator in (HOPPER, EXACT):
        assert_as_model(*case("normal", "float32 near 1", m, n, k).operands(), accumulator=accumulator)


@pytest.mark.usefixtures("backend")
def test_tiles_of_scaled_mm_are_a_transpose():
    c = case("normal", "float32 near 1", 4, 256, 384)
    a, b = c.tiled()
    stored = torch.zeros(4, 2)  # ceil4(K/128) by N/128
    stored[:3] = torch.from_numpy(b.scales).t()
    operands = tensors(a, b)
    got = kernels.fp8_gemm_emulated(*operands[:3], stored[:3].t())
    assert_codes_equal(bits_of(got), bits_of(fp8_gemm(a, b)))


# ------------------------------------------------------------------------------------------------------ the host build
@BY_NAME
@pytest.mark.usefixtures("host_library")
def test_every_accumulator(accumulator):
    for codes, scales in EVERY_CASE:
        c = case(codes, scales, 10, 70, 384, seed=2)
        for split_k in (1, 2):
            assert_as_model(*c.operands(), accumulator=accumulator, split_k=split_k, label=f"{codes}, {scales}")


@BY_NAME
@BY_PAIR
@pytest.mark.usefixtures("host_library")
def test_every_accumulator_with_E5M2(accumulator, formats):
    for codes in ("wide", "random codes", "subnormal", "cancelling", "largest beside smallest", "infinities"):
        c = case(codes, "float32 near 1", 10, 70, 256, seed=12, formats=formats)
        assert_as_model(*c.operands(), accumulator=accumulator, split_k=2, label=codes)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), *E5M2_PAIRS], ids=lambda pair: "-".join(map(str, pair)))
@pytest.mark.usefixtures("host_library")
def test_every_pair_of_codes(formats):
    # One product of each pair of codes: alone, and beside 1 * 1 and an accumulator of -3.
    one = [0x38 if fmt is E4M3 else 0x3C for fmt in formats]
    operands = []
    for codes_of_one, fmt in zip(one, formats, strict=True):
        codes = np.zeros((512, 128), np.uint8)
        codes[:, 32] = np.tile(np.arange(256), 2)
        codes[256:, [0, 1, 2, 40]] = codes_of_one
        operands.append((codes, fmt))
    operands[0][0][256:, :3] |= 0x80
    ones = np.ones((512, 1), np.float32)
    a, b = (BlockTensor(codes, ones, dataclasses.replace(FP8_1X128, element=fmt)) for codes, fmt in operands)
    for accumulator in (HOPPER, EXACT, FP32_SEQUENTIAL, Accumulator("22 bits", fraction_bits=22)):
        assert_as_model(a, b, accumulator=accumulator)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), *E5M2_PAIRS], ids=lambda pair: "-".join(map(str, pair)))
@pytest.mark.parametrize("accumulator", LONG_SPANS, ids=str)
@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.usefixtures("host_library")
def test_spans_of_several_blocks(accumulator, split_k, formats):
    for codes in ("wide", "positive", "cancelling", "+-largest", "infinities"):
        c = case(codes, "float32 near 1", 5, 6, 640, seed=3, formats=formats)
        same = c._replace(a_scales=np.repeat(c.a_scales[:, :1], 5, 1), b_scales=np.repeat(c.b_scales[:, :1], 5, 1))
        assert_as_model(*same.operands(), accumulator=accumulator, split_k=split_k, label=codes)


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E5M2)], ids=["E4M3", "E5M2"])
def test_every_pair_of_roundings_at_every_width(formats):
    c = case("wide", "2**-20..2**20", 8, 40, 256, seed=4, formats=formats)
    for bits in range(1, 24):
        for term, total in GEMM_ROUNDINGS:
            assert_as_model(*c.operands(), accumulator=Accumulator(f"{bits} {term} {total}", 32, bits, term, total))


@pytest.mark.parametrize("split_k", [1, 2, 3, 4, 7])
@pytest.mark.usefixtures("host_library")
def test_split_k(split_k):
    c = case("normal", "float32 near 1", 70, 65, 896, seed=5)
    assert_as_model(*c.operands(), split_k=split_k)
    assert_as_model(*c.operands(), split_k=split_k, accumulator=EXACT, out_dtype=torch.bfloat16)


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_does_not_show(num_threads):
    c = case("wide", "float32 near 1", 200, 150, 512, seed=6)
    want = bits_of(fp8_gemm(*c.operands()))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        got = kernels.fp8_gemm_emulated(*tensors(*c.operands()))
    finally:
        torch.set_num_threads(before)
    assert_codes_equal(bits_of(got), want)


@pytest.mark.usefixtures("host_library")
def test_NaN_in_codes_and_scales():
    for where in ("a", "a_scales", "b", "b_scales"):
        c = case("normal", "1", 4, 70, 256)
        getattr(c, where)[3, 1] = 0xFF if where in "ab" else -np.nan
        for out_dtype in OUTPUTS:
            assert_as_model(*c.operands(), out_dtype=out_dtype, label=where)
            assert_as_model(*c.operands(), out_dtype=out_dtype, label=where, accumulator=EXACT)


@pytest.mark.usefixtures("host_library")
def test_a_thread_that_flushes_subnormals_does_not_show():
    c = case("random codes", "results near 2**-149", 8, 8, 256)
    want = bits_of(fp8_gemm(*c.operands()))
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush subnormals")
    try:
        got = kernels.fp8_gemm_emulated(*tensors(*c.operands()))
    finally:
        torch.set_flush_denormal(False)
    assert_codes_equal(bits_of(got), want)


# ---------------------------------------------------------------------------------------------------- the plain rule
@pytest.mark.parametrize("fraction_bits", [-1, 1, 5, 12, 13, 14, 23])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), *E5M2_PAIRS], ids=lambda pair: "-".join(map(str, pair)))
def test_the_portable_rule_gives_the_same_accumulators(host_library, fraction_bits, formats):
    import ctypes

    rule = host_library.mxsim_rule_gemm
    rule.restype = None
    pairs, depth = 120, 128
    is_e5m2 = [ctypes.c_int(fmt is E5M2) for fmt in formats]
    for codes in ("wide", "random codes", "subnormal", "+-largest", "largest beside smallest", "cancelling", "sparse"):
        a, b = case(codes, "1", pairs, pairs, depth, seed=8, formats=formats).operands()
        for rounding, (term, total) in enumerate(GEMM_ROUNDINGS):
            for step in (1, 32, 128) if rounding < 2 else (8,):
                got = np.empty(pairs, np.uint32)
                arrays = [ctypes.c_void_p(x.ctypes.data) for x in (a.codes, b.codes, got)]
                sizes = ctypes.c_int64(pairs), ctypes.c_int64(depth)
                rule(*arrays[:2], *is_e5m2, *sizes, fraction_bits, step, rounding, arrays[2])
                bits = None if fraction_bits < 0 else fraction_bits
                accumulator = Accumulator("", step, bits, term, total)
                want = np.diagonal(bits_of(kernels.fp8_gemm_emulated(*tensors(a, b), accumulator=accumulator)))
                assert_codes_equal(got, want, label=f"{codes}, {accumulator!r}")


def test_every_function_of_the_host_has_its_arguments():
    assert len(host.FUNCTIONS["fp8_gemm_emulated"]) == 22


# ----------------------------------------------------------------------------------------------------- torch and errors
def test_torch_accepts_the_operator():
    c = case("normal", "1", 4, 8, 256)
    numbers = (13, 32, 0, 128, -1, 1, torch.float32)
    torch.library.opcheck(torch.ops.mxsim.fp8_gemm_emulated.default, (*tensors(*c.operands()), *numbers))
    fake = [x.to("meta") for x in tensors(*c.tiled())]
    out = kernels.fp8_gemm_emulated(*fake, out_dtype=torch.bfloat16)
    assert (out.shape, out.dtype, out.device.type) == ((4, 8), torch.bfloat16, "meta")


OPERANDS = tensors(*case("normal", "1", 6, 130, 256).operands())
NEVER = Accumulator("never", promotion_interval=None)


@pytest.mark.parametrize(
    "changes, keywords, error, message",
    [
        ({0: None}, {}, TypeError, "a_codes is a NoneType, needed a torch tensor"),
        ({0: OPERANDS[0].short()}, {}, TypeError,
         "a_codes has dtype torch.int16, needed uint8, float8_e4m3fn or float8_e5m2"),
        ({2: OPERANDS[2].view(torch.float8_e4m3fnuz)}, {}, TypeError,
         "b_codes has dtype torch.float8_e4m3fnuz, needed"),
        ({1: OPERANDS[1].double()}, {}, TypeError, "a_scales has dtype torch.float64, needed float32"),
        ({3: OPERANDS[3].double()}, {}, TypeError, "b_scales has dtype torch.float64, needed float32"),
        ({3: OPERANDS[3][:2].half()}, {}, TypeError, "b_scales has dtype torch.float16, needed float32"),
        ({0: OPERANDS[0][:, :100]}, {}, ValueError,
         "the last axis of a_codes has 100 elements, which is not a multiple of 128"),
        ({2: OPERANDS[2][:, :128]}, {}, ValueError, "b_codes has rows of 128 elements, needed 256, as in a_codes"),
        ({2: OPERANDS[2][None]}, {}, ValueError, "b_codes has 3 axes, needed 2"),
        ({1: OPERANDS[1][:5]}, {}, ValueError, "a_scales has shape (5, 2), needed (6, 2)"),
        ({3: OPERANDS[3][:3]}, {}, ValueError, "b_scales has shape (3, 2), needed (130, 2) or (2, 2)"),
        ({3: OPERANDS[3].t()}, {}, ValueError, "b_scales has shape (2, 130), needed (130, 2) or (2, 2)"),
        ({2: OPERANDS[2].to("meta")}, {}, ValueError, "b_codes is on meta, needed cpu, where a_codes is"),
        ({}, {"accumulator": "Hopper"}, TypeError, "accumulator is 'Hopper', needed an Accumulator"),
        ({}, {"out_dtype": torch.float16}, TypeError, "out_dtype is torch.float16, needed float32 or bfloat16"),
        ({}, {"split_k": 3}, ValueError, "split_k is 3, needed 1 to 2, the blocks of K"),
        ({}, {"split_k": 0}, ValueError, "split_k is 0, needed 1 to 2"),
        ({}, {"split_k": True}, ValueError, "split_k is True, needed an integer"),
        ({1: torch.arange(12.0).view(6, 2)}, {"accumulator": NEVER}, ValueError,
         "a_scales differ within a span of 256 elements, needed equal ones for a promotion_interval of None"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("host_library")
def test_refused(changes, keywords, error, message):
    operands = [changes.get(i, x) for i, x in enumerate(OPERANDS)]
    with pytest.raises(error, match=re.escape(message)) as raised:
        kernels.fp8_gemm_emulated(*operands, **keywords)
    assert str(raised.value).startswith("fp8_gemm_emulated: ")
