"""SwiGLU against float64: within rounding forward, within rounding and cancellation backward; MXFP4 as dequantized."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim import blocks, kernels  # noqa: E402
from mxsim.kernels import Fp4Rows  # noqa: E402
from mxsim.moe.swiglu import swiglu, swiglu_backward  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [(7, 48), (5, 1104), (3, 16), (1, 2064)]


@pytest.fixture(autouse=True)
def _same_numbers_whichever_tests_run():
    GENERATOR.manual_seed(0)


def data(num_rows: int, num_columns: int, dtype=torch.bfloat16, device="cpu"):
    """(da, h, probs): gates into both tails, as far as exp is normal in float32; zeros of both signs."""
    h = torch.randn(num_rows, 2 * num_columns, generator=GENERATOR, dtype=torch.float64)
    h *= torch.exp2(torch.randint(-3, 6, (num_rows, 2 * num_columns), generator=GENERATOR))
    h = h.clamp(-80, 80)  # MXFP4 makes 64 of 80, 96 of 85
    h[:, ::7], h[:, 3::11] = 0.0, -0.0
    da = torch.randn(num_rows, num_columns, generator=GENERATOR, dtype=torch.float64)
    probs = torch.rand(num_rows, generator=GENERATOR, dtype=torch.float64)
    return (
        da.to(dtype).to(device),
        h.to(dtype).to(device),
        probs.to(torch.promote_types(dtype, torch.float32)).to(device),
    )


def exact(da: torch.Tensor, h: torch.Tensor, probs: torch.Tensor | None):
    """NumPy's float64: (a, dh, dprobs), and how large the terms are whose difference dh and dprobs may be."""
    grad, h = da.double().cpu().numpy(), h.double().cpu().numpy()
    p = np.ones(len(h)) if probs is None else probs.double().cpu().numpy()
    gate, up = np.split(h, 2, axis=1)
    s, t = 1 / (1 + np.exp(-gate)), 1 / (1 + np.exp(gate))
    a = gate * s * up * p[:, None]
    dgate = grad * p[:, None] * up * (s + gate * s * t)
    dup = grad * p[:, None] * gate * s
    terms = np.concatenate([np.abs(grad * p[:, None] * up) * (s + np.abs(gate) * s * t), np.abs(dup)], axis=1)
    parts = grad * gate * s * up
    return a, np.concatenate([dgate, dup], axis=1), parts.sum(1), terms, np.abs(parts).sum(1)


def ulp(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Spacing of the format's numbers around x; no less than that of the smallest normal."""
    info = torch.finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(x), info.tiny))
    return np.ldexp(info.eps, exponent - 1)


def assert_near(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype, ulps: float, terms: np.ndarray | float = 0.0):
    """|got - want| <= ulps of want + 2**-17 of terms.

    The first is the one rounding. The second is float32's: CUDA's exp(-80) has the error of the product 80 * log2(e).
    """
    error = np.abs(got.double().cpu().numpy() - want)
    bound = ulps * ulp(want, dtype) + terms * 2.0**-17
    assert (error <= bound).all(), f"{(error > bound).sum()} beyond, worst {np.nanmax(error / bound)} of the bound"


# float32 results hold the whole error: 2**-17 of the result at least.
ULPS = {torch.bfloat16: 0.51, torch.float16: 0.52, torch.float32: 2.0**7}


# ------------------------------------------------------------------------------------------------- forward
def test_a_worked_example():
    h = torch.tensor([[0.0, 1.0, -1.0, 2.0, 3.0, 4.0]])
    sigmoid_1 = 0.7310585786300049
    want = [0.0, 3.0 * sigmoid_1, -4.0 * (1 - sigmoid_1)]
    torch.testing.assert_close(swiglu(h), torch.tensor([want]))
    torch.testing.assert_close(swiglu(h, torch.tensor([0.5])), torch.tensor([want]) / 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ULPS)
@pytest.mark.parametrize("with_probs", [False, True])
def test_forward_is_float64_rounded_once(shape, dtype, with_probs):
    _, h, probs = data(*shape, dtype)
    probs = probs if with_probs else None
    a = swiglu(h, probs)
    assert a.dtype == dtype
    assert_near(a, exact(torch.ones(shape), h, probs)[0], dtype, ULPS[dtype])


def check_tails(forward, device: str) -> None:
    """exp(-gate) overflows float32 from -89 on; the result does not vanish before -103."""
    gate = torch.linspace(-130, 130, 2081, dtype=torch.float64)
    h = torch.stack([gate, torch.full_like(gate, 2.0**20)], dim=1).float()
    a = forward(h.to(device), None)[:, 0].cpu().double().numpy()
    x = h[:, 0].double().numpy()
    want = x / (1 + np.exp(-x)) * 2.0**20
    normal = x > -87.0
    np.testing.assert_allclose(a[normal], want[normal], rtol=2.0**-17)
    np.testing.assert_allclose(a, want, rtol=2.0**-17, atol=2.0**-149 * 130 * 2.0**20)
    assert (a[(x > -102) & (x < -90)] < 0).all()


def test_the_tails():
    check_tails(swiglu, "cpu")


def test_infinities_and_nan():
    h = torch.tensor([[torch.inf, 1.0], [-torch.inf, 1.0], [torch.nan, 1.0], [1.0, torch.inf], [1.0, torch.nan]])
    a = swiglu(h.bfloat16())[:, 0].float()
    assert a[[0, 3]].tolist() == [torch.inf] * 2
    assert a[[1, 2, 4]].isnan().all()


# ------------------------------------------------------------------------------------------------- backward
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ULPS)
@pytest.mark.parametrize("with_probs", [False, True])
def test_backward_is_float64_rounded_once(shape, dtype, with_probs):
    da, h, probs = data(*shape, dtype)
    probs = probs if with_probs else None
    dh, dprobs = swiglu_backward(da, h, probs)
    _, want, want_dprobs, terms, sizes = exact(da, h, probs)
    assert dh.dtype == dtype
    assert_near(dh, want, dtype, ULPS[dtype], terms)
    if with_probs:
        assert dprobs.dtype == torch.float32
        assert_near(dprobs, want_dprobs, torch.float32, 1.0, sizes)
    else:
        assert dprobs is None


@pytest.mark.parametrize("with_probs", [False, True])
def test_gradients_in_float64(with_probs):
    _, h, probs = data(3, 5, torch.float64)
    h, probs = h.clamp(-6, 6).requires_grad_(), probs.requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (h, probs) if with_probs else (h,))


def test_autograd_calls_the_backward_pass():
    da, h, probs = data(6, 32)
    leaf_h, leaf_probs = h.clone().requires_grad_(), probs.clone().requires_grad_()
    swiglu(leaf_h, leaf_probs).backward(da)
    dh, dprobs = swiglu_backward(da, h, probs)
    assert torch.equal(leaf_h.grad, dh)
    assert torch.equal(leaf_probs.grad, dprobs)


def test_a_second_derivative_is_refused():
    h = torch.randn(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu(h).sum(), h, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_rows_act_as_their_dequantized_values(shape):
    da, h, probs = data(*shape)
    q = blocks.quantize(h.float().numpy(), blocks.MXFP4)
    values = torch.from_numpy(q.dequantize().astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
    fp4 = Fp4Rows(torch.from_numpy(q.packed()), torch.from_numpy(q.scales))
    for p in (probs, None):
        got, want = swiglu_backward(da, fp4, p), swiglu_backward(da, values, p)
        assert torch.equal(got[0].view(torch.int16), want[0].view(torch.int16))
        assert (got[1] is None and want[1] is None) or torch.equal(got[1], want[1])


def test_a_poisoned_block_gives_nan_where_it_is():
    da, h, probs = data(4, 48)
    h[2, 40] = torch.nan  # block 1 of the row: gates 32 to 47, up projections 0 to 15
    dh, dprobs = swiglu_backward(da, kernels.bf16_to_fp4_row(h), probs)
    poisoned = torch.zeros(4, 96, dtype=torch.bool)
    poisoned[2, 32:48] = poisoned[2, 80:96] = True  # both gradients of a NaN gate
    poisoned[2, 0:16] = True  # the gate's of a NaN up projection
    assert torch.equal(dh.isnan(), poisoned)
    assert dprobs.isnan().tolist() == [False, False, True, False]


# ------------------------------------------------------------------------------------------------- shapes, compile
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0)])
def test_nothing_gives_nothing(shape):
    rows, columns = shape
    h, da, probs = torch.empty(rows, 2 * columns), torch.empty(shape), torch.ones(rows)
    assert swiglu(h, probs).shape == shape
    for source in (h, kernels.bf16_to_fp4_row(h)):
        dh, dprobs = swiglu_backward(da, source, probs)
        assert (dh.shape, dprobs.tolist()) == (h.shape, [0.0] * rows)


def test_strides_do_not_matter():
    da, h, probs = data(6, 32)
    strided_da, strided_h = da.t().contiguous().t(), h.t().contiguous().t()
    strided_probs = torch.stack([probs, probs], 1)[:, 0]
    assert not any(x.is_contiguous() for x in (strided_da, strided_h, strided_probs))
    assert torch.equal(swiglu(strided_h, strided_probs), swiglu(h, probs))
    for a, b in zip(swiglu_backward(strided_da, strided_h, strided_probs), swiglu_backward(da, h, probs), strict=True):
        assert torch.equal(a, b)


def test_torch_compile_takes_it_whole():
    da, h, probs = data(6, 32)
    results = []
    for function in (swiglu, torch.compile(swiglu, backend="aot_eager", fullgraph=True)):
        inputs = h.clone().requires_grad_(), probs.clone().requires_grad_()
        out = function(*inputs)
        out.backward(da)
        results.append((out, *(i.grad for i in inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_the_operators_are_registered_right():
    da, h, probs = data(4, 16, torch.float32)
    fp4 = kernels.bf16_to_fp4_row(h)
    for p in (probs, None):
        torch.library.opcheck(torch.ops.mxsim.moe_swiglu.default, (h.requires_grad_(), p))
        torch.library.opcheck(torch.ops.mxsim.moe_swiglu_backward.default, (da, h.detach(), p))
        torch.library.opcheck(torch.ops.mxsim.moe_swiglu_backward.fp4, (da, *fp4, p))


# ------------------------------------------------------------------------------------------------- bad input
def zeros(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def fp4_of(*shape: int) -> Fp4Rows:
    return kernels.bf16_to_fp4_row(zeros(*shape))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: swiglu(zeros(2, 3)), ValueError, r"h has shape \(2, 3\), needed rows of an even"),
        (lambda: swiglu(zeros(4)), ValueError, r"h has shape \(4,\)"),
        (lambda: swiglu(zeros(2, 4, dtype=torch.int32)), TypeError, "h has dtype torch.int32"),
        (lambda: swiglu(zeros(2, 4), zeros(2)), TypeError, "probs has dtype torch.bfloat16, needed torch.float32"),
        (lambda: swiglu(zeros(2, 4), torch.zeros(3)), ValueError, r"probs has shape \(3,\), needed \(2,\)"),
        (lambda: swiglu_backward(zeros(4), zeros(2, 4)), ValueError, "da has 1 axes"),
        (lambda: swiglu_backward(zeros(2, 4), zeros(2, 4)), ValueError, r"h has shape \(2, 4\), needed \(2, 8\)"),
        (lambda: swiglu_backward(zeros(2, 4), torch.zeros(2, 8)), TypeError, "h has dtype torch.float32"),
        (lambda: swiglu_backward(zeros(2, 8), Fp4Rows(*fp4_of(2, 32))), ValueError, "da has 8 columns, needed a mult"),
        (lambda: swiglu_backward(zeros(3, 16), fp4_of(2, 32)), ValueError, r"codes has shape \(2, 16\)"),
        (lambda: swiglu_backward(zeros(2, 16), Fp4Rows(fp4_of(2, 32)[0], fp4_of(2, 64)[1])), ValueError, "scales has"),
        (lambda: swiglu_backward(zeros(2, 16), Fp4Rows(zeros(2, 16), fp4_of(2, 32)[1])), TypeError, "codes has dtype"),
        (lambda: swiglu_backward(zeros(2, 16), fp4_of(2, 32), torch.zeros(1)), ValueError, "probs has shape"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------------- Triton
def check_kernels(shape, dtype, device, ulps: float) -> None:
    """Both kernels against float64 by the CPU's bounds, and MXFP4 against its dequantized values."""
    from mxsim.moe import triton_swiglu

    da, h, probs = data(*shape, dtype, device)
    fp4 = kernels.bf16_to_fp4_row(h)
    values = kernels.fp4_to_bf16(*fp4).to(dtype)
    for p in (probs, None):
        assert_near(triton_swiglu.forward(h, p), exact(da, h, p)[0], dtype, ulps)
        for source, scales, seen in ((h, None, h), (fp4.codes, fp4.scales, values)):
            dh, dprobs = triton_swiglu.backward(da, source, scales, p)
            _, want, want_dprobs, terms, sizes = exact(da, seen, p)
            assert_near(dh, want, dtype, ulps, terms)
            assert dprobs.shape == (0 if p is None else shape[0],)
            if p is not None:
                assert_near(dprobs, want_dprobs, torch.float32, 1.0, sizes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, ulps", [(torch.float32, 2.0**7), (torch.bfloat16, 1.01)])  # interpreted: cut off
def test_the_interpreted_kernels(interpreted, shape, dtype, ulps):
    check_kernels(shape, dtype, "cpu", ulps)


def test_the_tails_interpreted(interpreted):
    from mxsim.moe import triton_swiglu

    check_tails(triton_swiglu.forward, "cpu")


def every_fp4_row() -> Fp4Rows:
    """Every code with every scale, of gate and up projection."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # 512 elements a row
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    return Fp4Rows(codes, scales)


def check_decoding(device: str) -> None:
    """dup = da * silu(gate), dgate = da * up * silu'(gate) show the decoded values: exact ones where the gate is 0."""
    from mxsim.moe import triton_swiglu

    fp4 = every_fp4_row()
    up = kernels.fp4_to_bf16(*fp4)[:, 256:].float()
    codes = fp4.codes.clone()
    codes[:, :128] = 0  # gates of 0: dgate = da * up / 2
    da = torch.full((256, 256), 2.0, device=device)
    dh, _ = triton_swiglu.backward(da, codes.to(device), fp4.scales.to(device), None)
    got = dh[:, :256].cpu()
    nan_rows = torch.arange(256) == 255
    assert got[nan_rows].isnan().all()
    got, want = got[~nan_rows], up[~nan_rows]
    finite = (want * 2).isfinite()
    assert torch.equal(got[finite].view(torch.int32), want[finite].view(torch.int32))
    assert (got.isinf() | finite).all()
    # The gate's own decoding: dup = da * gate * sigmoid(gate), against the same formula of dequantized gates.
    dh, _ = triton_swiglu.backward(da, fp4.codes.to(device), fp4.scales.to(device), None)
    dequantized, _ = triton_swiglu.backward(da, kernels.fp4_to_bf16(*fp4).float().to(device), None, None)
    torch.testing.assert_close(dh, dequantized, rtol=2.0**-20, atol=0.0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and infinities
def test_the_interpreted_kernel_decodes_every_code(interpreted):
    check_decoding("cpu")


@pytest.mark.gpu
def test_the_kernel_decodes_every_code():
    check_decoding("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2048)])
@pytest.mark.parametrize("dtype", ULPS)
def test_the_kernels(shape, dtype):
    check_kernels(shape, dtype, "cuda", ULPS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), *SHAPES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cuda_tensors_of_any_strides_give_the_cpus_results(shape, dtype):
    """bfloat16 within an ulp and 2**-17 of what cancels, float64 within 2**-45 of both; the same bits each time."""
    da, h, probs = data(*shape, dtype)
    cuda_da, cuda_h = (x.t().contiguous().t().cuda() for x in (da, h))
    cuda_probs = torch.stack([probs, probs], 1).cuda()[:, 0]
    fp4 = kernels.bf16_to_fp4_row(h.float())
    sources = [(h, cuda_h)]
    if dtype == torch.bfloat16:
        sources.append((fp4, Fp4Rows(*(x.cuda() for x in fp4))))
    rtol, of_terms = {torch.bfloat16: (2.0**-7, 2.0**-17), torch.float64: (2.0**-45, 2.0**-45)}[dtype]
    torch.testing.assert_close(swiglu(cuda_h, cuda_probs).cpu(), swiglu(h, probs), rtol=rtol, atol=2.0**-120)
    for source, cuda_source in sources:
        seen = kernels.fp4_to_bf16(*source) if isinstance(source, Fp4Rows) else source
        terms, sizes = exact(da, seen, probs)[3:]
        runs = [swiglu_backward(cuda_da, cuda_source, cuda_probs) for _ in range(2)]
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a, b)
        for got, want, scale in zip(runs[0], swiglu_backward(da, source, probs), (terms, sizes), strict=True):
            want = want.double().numpy()
            error = np.abs(got.cpu().double().numpy() - want)
            assert (error <= rtol * np.abs(want) + of_terms * scale + 2.0**-120).all()


@pytest.mark.gpu
def test_the_tails_on_cuda():
    check_tails(swiglu, "cuda")


@pytest.mark.gpu
def test_cuda_compiles_whole():
    da, h, probs = data(64, 256, device="cuda")
    h, probs = h.requires_grad_(), probs.requires_grad_()
    out = torch.compile(swiglu, backend="aot_eager", fullgraph=True)(h, probs)
    out.backward(da)
    dh, dprobs = swiglu_backward(da, h.detach(), probs.detach())
    assert torch.equal(out, swiglu(h, probs))
    assert torch.equal(h.grad, dh)
    assert torch.equal(probs.grad, dprobs)
