"""The layer on a CUDA device: the same operands, GEMMs with the bits of the emulation, the same results again."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mxsim.formats import Rounding  # noqa: E402
from mxsim.moe import Experts, Gemm, Linear, MoE, Recipe, record_gemms  # noqa: E402
from tests.moe.test_experts import FP8_RECIPES, RECIPES, by_name, check_against_float64, check_every_gemm  # noqa: E402

pytestmark = pytest.mark.gpu
BACKENDS = [Gemm.AUTO, Gemm.CUBLASLT, Gemm.SCALED_MM, Gemm.TRITON, Gemm.HOPPER, Gemm.DEQUANTIZED]


def bits(x):
    return x.detach().view(torch.int16)


@pytest.mark.parametrize("gemm", BACKENDS)
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_every_gemm_reads_the_simulators_bits_and_returns_hoppers(recipe, gemm):
    check_every_gemm(recipe, gemm, "cuda")


@pytest.mark.parametrize("gemm, limit", [(Gemm.DEQUANTIZED, 2e-3), (Gemm.AUTO, 0.03)])
@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_forward_and_gradients_are_the_float64_fake_quantization(recipe, gemm, limit):
    """Hopper's 13 fraction bits turn BF16 and FP8 roundings more often than FP32 does."""
    check_against_float64(recipe, gemm, "cuda", limit)


def layer_and_input(recipe, device="cuda", gemm=Gemm.AUTO):
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, num_shared_experts=1, recipe=recipe, gemm=gemm, dtype=torch.bfloat16)
    x = torch.randn(90, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    dy = torch.randn(90, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    return layer.to(device), x.to(device).requires_grad_(), dy.to(device)


def run(layer, x, dy):
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


@pytest.mark.parametrize("gemm", [Gemm.AUTO, Gemm.CUBLASLT, Gemm.SCALED_MM, Gemm.TRITON])
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_a_cpu_computes_the_bits_of_every_gemm_of_the_layer(recipe, gemm):
    """Fprop, Dgrad and Wgrad, on inputs carried over."""
    with record_gemms() as records:
        run(*layer_and_input(recipe, gemm=gemm))
    assert {r.kind for r in records} == {"rows", "wgrad"}
    for record in records:
        assert torch.equal(bits(record.to("cpu").emulated()), bits(record.out.cpu())), record.kind


@pytest.mark.parametrize("gemm", [Gemm.CUBLASLT, Gemm.SCALED_MM, Gemm.TRITON])
def test_gemms_at_deepseek_v3_sizes_have_the_bits_of_the_emulation(gemm):
    torch.manual_seed(0)
    experts = Experts(7168, 2048, 3, recipe=Recipe.MXFP4, gemm=gemm, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1037, 7168, device="cuda").bfloat16().requires_grad_()
    with record_gemms() as records:
        y = experts(x, torch.tensor([37, 0, 1000]), torch.rand(1037, device="cuda"))
        y.backward(torch.randn_like(y))
    assert len(records) == 12
    for record in records:
        rows = slice(0, 128)  # a corner: the emulation runs a thousandth of the GEMM's speed
        part = replace(record, a_codes=record.a_codes[rows], a_scales=record.a_scales[rows], out=record.out[rows])
        assert torch.equal(bits(part.emulated()), bits(part.out)), (record.kind, record.expert)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_rerun_gives_the_same_bits(recipe):
    first, second = (run(*layer_and_input(recipe)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_cuda_and_cpu_agree(recipe):
    """Up to accumulation, exp, and the roundings that these turn."""
    want = run(*layer_and_input(recipe, "cpu"))
    got = run(*layer_and_input(recipe, "cuda"))
    for a, b in zip(got, want, strict=True):
        assert (a.cpu().double() - b.double()).norm() <= 0.03 * b.double().norm()


@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_torch_compile_with_its_default_backend(recipe):
    torch._dynamo.reset()
    layer, x, dy = layer_and_input(recipe)
    want = run(layer, x, dy)
    y = torch.compile(layer, fullgraph=True)(x)
    got = [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.03 * b.double().norm()


def test_stochastic_codes_are_those_of_the_cpu():
    recipe = replace(Recipe.MXFP4, rounding=Rounding.STOCHASTIC)
    kept = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        linear = Linear(256, 128, recipe=recipe, dtype=torch.bfloat16).to(device)
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(device).requires_grad_()
        torch.manual_seed(3)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t):
            linear(x)
        kept.append([t.cpu() for t in saved if t.dtype == torch.uint8])
    assert len(kept[0]) == 2
    for a, b in zip(*kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_zero_tokens(recipe):
    layer, x, dy = layer_and_input(recipe)
    for value in run(layer, x.detach()[:0].requires_grad_(), dy[:0]):
        assert not value.any()
