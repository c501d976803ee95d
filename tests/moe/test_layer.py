"""The MoE layer and the dense linear layer: routing, one quantization a token, and life inside other machinery."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from mxsim import kernels  # noqa: E402
from mxsim.formats import Rounding  # noqa: E402
from mxsim.moe import (  # noqa: E402
    Activation,
    Gemm,
    Gradients,
    Linear,
    MoE,
    Recipe,
    Router,
    observe_activations,
    record_gemms,
    swiglu,
)
from tests.moe.test_experts import ONLY_SWIGLU, RECIPES, by_name, saved_by  # noqa: E402

FP8_RECIPES = RECIPES[1:]
H, F, E, K = 128, 128, 4, 2


def has_fp4(recipe, *activations):
    """Whether one of the activations, or a gradient, goes through MXFP4."""
    return recipe.gradients is Gradients.MXFP4 or any(recipe.keeps_fp4(a) for a in activations)


def layer_of(recipe, *, seed=0, dtype=torch.bfloat16, **options):
    torch.manual_seed(seed)
    return MoE(H, F, E, K, recipe=recipe, dtype=dtype, **options)


def tokens_of(num_tokens, seed=1, dtype=torch.bfloat16):
    x = torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return x.to(dtype).requires_grad_()


def run(layer, x):
    y = layer(x)
    names, parameters = zip(*((n, p) for n, p in layer.named_parameters()), strict=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    return dict(zip(("y", "x", *names), (y.detach(), *grads), strict=True))


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("router", Router)
@pytest.mark.parametrize("shared", [0, 2])
def test_the_layer_is_the_weighted_sum_of_its_experts(router, shared):
    """float64, token by token, expert by expert; and its gradient is the derivative."""
    layer = layer_of(Recipe.BF16, dtype=torch.float64, router=router, num_shared_experts=shared)
    x = tokens_of(5, dtype=torch.float64)
    routing = layer.router(x)

    def expert(w1, w2, v):
        gate, up = (w1 @ v).chunk(2)
        return w2 @ (gate * torch.sigmoid(gate) * up)

    for t in range(5):
        want = sum(
            weight * expert(layer.experts.w1[e], layer.experts.w2[e], x[t])
            for e, weight in zip(routing.topk_ids_TK[t], routing.topk_weights_TK[t], strict=True)
        )
        if shared:
            want = want + expert(layer.shared.w1[0], layer.shared.w2[0], x[t])
        torch.testing.assert_close(layer(x)[t], want)


def test_gradients_of_the_bf16_layer_are_derivatives():
    torch.manual_seed(0)
    layer = MoE(6, 4, 3, 2, num_shared_experts=1, recipe=Recipe.BF16, dtype=torch.float64)
    layer.router.double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    names = [n for n, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()))


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_fp8_layers_are_close_to_bf16(recipe):
    """FP8 operands carry 4 % of noise each, MXFP4 activations 11 %; the router's gradient sees several of them."""
    x = tokens_of(40)
    want = run(layer_of(Recipe.BF16, num_shared_experts=1), x)
    layer = layer_of(recipe, num_shared_experts=1)
    got = run(layer, x)
    limit = 0.35 if has_fp4(recipe, *Activation) else 0.12
    for name, value in want.items():
        error = (got[name].double() - value.double()).norm() / value.double().norm()
        assert error < limit, name


def test_a_token_is_quantized_once_before_it_is_copied_to_its_experts(monkeypatch):
    seen = {"bf16_to_fp4_row": [], "bf16_to_fp4_and_fp8_row": []}

    def watch(name, original):
        monkeypatch.setattr(kernels, name, lambda x, **o: seen[name].append(tuple(x.shape)) or original(x, **o))

    for name in seen:
        watch(name, getattr(kernels, name))
    layer_of(Recipe.MXFP4, num_shared_experts=1)(tokens_of(10))
    assert seen["bf16_to_fp4_row"] == [
        (10, H),
        (10 * K, 2 * F),
        (10, 2 * F),
    ]  # tokens, h, shared h
    assert seen["bf16_to_fp4_and_fp8_row"] == [(10 * K, F), (10, F)]  # a


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_mxfp4_dispatch_has_the_bits_of_experts_that_quantize_for_themselves(recipe):
    """Quantization is row by row: it commutes with the permutation. Scales lie further apart than headroom 0 keeps."""
    from mxsim.moe import Permutation, permute, permute_weights, unpermute_sum

    layer, x = layer_of(recipe), tokens_of(30)
    x.data[:, 32:64] *= 2.0**-12
    routing = layer.router(x)
    permutation = Permutation.from_topk(routing.topk_ids_TK, E)
    probs = permute_weights(routing.topk_weights_TK, permutation)
    y = unpermute_sum(layer.experts(permute(x, permutation), permutation.group_sizes_E, probs), permutation)
    want = torch.autograd.grad(y, [x, layer.experts.w1, layer.experts.w2], torch.ones_like(y))
    z = layer(x)
    assert torch.equal(z, y)
    got = torch.autograd.grad(z, [x, layer.experts.w1, layer.experts.w2], torch.ones_like(y))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=by_name)
def test_an_observer_sees_what_a_recipe_may_keep(recipe):
    """The tokens once, then h and a of the routed experts, then of the shared ones; nothing after the block."""
    layer, x = layer_of(recipe, num_shared_experts=1), tokens_of(10)
    seen = []
    with observe_activations(lambda activation, t: seen.append((activation, t))):
        want = layer(x)
        with pytest.raises(RuntimeError, match="observer already"), observe_activations(print):
            pass
    assert torch.equal(layer(x), want)
    kinds = [Activation.EXPERT_INPUT, *[Activation.SWIGLU_INPUT, Activation.DOWN_INPUT] * 2]
    assert [activation for activation, _ in seen] == kinds
    assert [t.shape for _, t in seen] == [(10, H), (10 * K, 2 * F), (10 * K, F), (10, 2 * F), (10, F)]
    tokens, h, _, shared_h, shared_a = (t for _, t in seen)
    assert torch.equal(tokens, x)
    assert torch.equal(swiglu(shared_h), shared_a)
    if recipe is Recipe.BF16:
        torch.testing.assert_close(
            shared_h, (x.double() @ layer.shared.w1[0].double().t()).bfloat16(), rtol=2e-2, atol=1e-3
        )
    assert not any(t.requires_grad for _, t in seen)
    assert h.any()


def test_a_layer_keeps_how_many_tokens_each_expert_got():
    layer, x = layer_of(Recipe.BF16), tokens_of(10)
    assert not layer.group_sizes_E.any()
    assert "group_sizes_E" not in layer.state_dict()
    layer(x)
    ids = layer.router(x).topk_ids_TK
    assert layer.group_sizes_E.tolist() == [int((ids == e).sum()) for e in range(E)]
    layer.router.update_bias(layer.group_sizes_E)
    assert layer.router.bias.any()


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_zero_tokens_and_leading_axes(recipe):
    layer = layer_of(recipe, num_shared_experts=1)
    got = run(layer, tokens_of(0))
    assert got["y"].shape == (0, H)
    assert all(not value.any() for value in got.values())
    x = tokens_of(6)
    assert torch.equal(layer(x.view(2, 3, H)), layer(x).view(2, 3, H))


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_one_expert_that_takes_every_token(recipe):
    layer, x = layer_of(recipe), tokens_of(9)
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))
    got = run(layer, x)
    assert got["experts.w1"][0].any()
    assert not got["experts.w1"][2:].any()
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_reruns_and_checkpointing_give_the_same_bits(recipe):
    layer, x = layer_of(recipe, num_shared_experts=1), tokens_of(33)
    want = run(layer, x)
    assert_equal(run(layer, x), want)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    got = run(Checkpointed(), x)
    assert_equal({name.removeprefix("layer."): value for name, value in got.items()}, want)


STOCHASTIC = replace(Recipe.MXFP4, name="stochastic", rounding=Rounding.STOCHASTIC)


def test_stochastic_rounding_follows_torchs_seed():
    layer, x = layer_of(STOCHASTIC), tokens_of(20)
    torch.manual_seed(5)
    first = run(layer, x)
    other = run(layer, x)
    torch.manual_seed(5)
    assert_equal(run(layer, x), first)
    assert not torch.equal(first["y"], other["y"])

    torch.manual_seed(5)
    y = checkpoint(layer, x, use_reentrant=False)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], first["x"])


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4, ONLY_SWIGLU], ids=by_name)
def test_torch_compile_takes_the_layer_whole_and_keeps_every_bit(recipe):
    """fullgraph=True refuses any break. Tensors that are computed in torch itself may fuse: float64 for BF16."""
    layer, x = layer_of(recipe, num_shared_experts=1), tokens_of(21)
    want = run(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    names = [n for n, _ in layer.named_parameters()]
    grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    assert_equal(dict(zip(("y", "x", *names), (y.detach(), *grads), strict=True)), want)
    # Another number of tokens and other group sizes, by the same graph or a new one.
    x = tokens_of(13, seed=4)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.MXFP4, STOCHASTIC], ids=by_name)
def test_a_checkpointed_layer_in_a_compiled_model_keeps_every_bit(recipe):
    torch._dynamo.reset()
    layer, x = layer_of(recipe, num_shared_experts=1), tokens_of(21)

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=False)

    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        torch.manual_seed(3)
        y = function(x)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    compiled(tokens_of(13))
    assert layer.group_sizes_E.sum() == 13 * K


def test_torch_compile_takes_stochastic_rounding_whole():
    torch._dynamo.reset()
    layer, x = layer_of(STOCHASTIC, num_shared_experts=1), tokens_of(21)
    torch.manual_seed(3)
    want = run(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    y = compiled(x)
    assert torch.equal(y, want["y"])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], want["x"])
    assert not torch.equal(compiled(x), y)  # another seed at every call


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=by_name)
def test_fsdp2_on_one_process_keeps_every_bit(recipe, tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = tokens_of(21)
    want = run(layer_of(recipe), x)
    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = layer_of(recipe)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(layer.router, mesh=mesh)  # float32: FSDP2 wants one dtype a group
        fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        y = layer(x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
        y.backward(dy)
        assert torch.equal(y.detach(), want["y"])
        assert torch.equal(x.grad, want["x"])
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad.full_tensor(), want[name]), name

        layer.unshard()
        layer.prepare_weights()
        again = layer(x)
        assert torch.equal(again, y)
        assert recipe is Recipe.BF16 or len(layer.experts.fp8_weights._made) == 2
        again.backward(dy)
        optimizer.step()  # of the shards: the weights' own counters do not move
        after = layer(x)
        layer.experts.fp8_weights.clear()
        assert torch.equal(layer(x), after)
        assert not torch.equal(after, y)
    finally:
        destroy_process_group()


def test_a_layer_trained_in_one_recipe_loads_in_every_other():
    source = layer_of(Recipe.MXFP4, num_shared_experts=1)
    for recipe in RECIPES:
        target = layer_of(recipe, seed=3, num_shared_experts=1)
        assert target.state_dict().keys() == source.state_dict().keys()
        target.load_state_dict(source.state_dict())
        for name, value in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], value), name


def test_prepared_weights_give_the_same_bits():
    layer, x = layer_of(Recipe.MXFP4, num_shared_experts=1), tokens_of(12)
    want = run(layer, x)
    layer.prepare_weights()
    assert_equal(run(layer, x), want)


def test_hopper_gemms_differ_from_exact_ones_only_by_accumulation():
    x = tokens_of(50)
    exact = run(layer_of(Recipe.MXFP4, gemm="dequantized"), x)
    with record_gemms() as records:
        hopper = run(layer_of(Recipe.MXFP4, gemm="hopper"), x)
    assert len(records) >= 6
    assert all(torch.equal(r.out.view(torch.int16), r.emulated().view(torch.int16)) for r in records)
    error = (hopper["y"].double() - exact["y"].double()).norm() / exact["y"].double().norm()
    assert 0 < error < 2e-3


class TestErrors:
    def test_shape(self):
        with pytest.raises(ValueError, match=r"MoE: x has shape \(4, 64\), needed \[\.\.\., 128\]"):
            layer_of(Recipe.MXFP4)(torch.ones(4, 64).bfloat16())

    def test_dtype(self):
        with pytest.raises(TypeError, match="x has dtype"):
            layer_of(Recipe.MXFP4)(torch.ones(4, H))

    @pytest.mark.parametrize("shared", [-1, 1.5, True])
    def test_shared_experts(self, shared):
        with pytest.raises(ValueError, match="num_shared_experts is"):
            MoE(H, F, E, K, num_shared_experts=shared)

    def test_top_k(self):
        with pytest.raises(ValueError, match="top_k is 5, needed 1 to 4"):
            MoE(H, F, E, 5)

    def test_gemm(self):
        with pytest.raises(ValueError, match="bogus"):
            MoE(H, F, E, K, gemm="bogus")


# --------------------------------------------------------------------------------------------------------- dense linear
@pytest.mark.parametrize("shape", [(7, 256), (2, 3, 256), (0, 256), (256,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_linear_is_an_expert_without_its_swiglu(recipe, bias, shape):
    """y, dx and dw are the exact products of the recipe's operands: within FP32 accumulation and BF16 rounding."""
    torch.manual_seed(0)
    linear = Linear(256, 128, bias, recipe=recipe, gemm=Gemm.DEQUANTIZED, dtype=torch.bfloat16)
    x = torch.randn(shape).bfloat16().requires_grad_()
    y = linear(x)
    assert y.shape == (*shape[:-1], 128)
    dy = torch.randn(y.shape).bfloat16()
    dx, dw = torch.autograd.grad(y, [x, linear.weight], dy)
    assert dx.shape == x.shape
    assert dw.shape == linear.weight.shape

    x2, dy2 = x.detach().reshape(-1, 256).double(), dy.reshape(-1, 128).double()
    w = linear.weight.detach().double()
    offset = 0 if linear.bias is None else linear.bias.detach().double()
    limit = 0.01 if recipe is Recipe.BF16 else 0.2 if has_fp4(recipe, Activation.LINEAR_INPUT) else 0.06
    for got, want in (
        (y.reshape(-1, 128), x2 @ w.t() + offset),
        (dx.reshape(-1, 256), dy2 @ w),
        (dw, dy2.t() @ x2),
    ):
        assert (got.double() - want).norm() <= limit * want.norm()


def test_records_are_copies():
    linear = Linear(256, 128, recipe=Recipe.MXFP4, dtype=torch.bfloat16)
    with torch.no_grad(), record_gemms() as records:
        y = linear(torch.ones(3, 256).bfloat16())
    want = y.clone()
    y.zero_()
    assert want.any()
    assert torch.equal(records[0].out, want)


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_linears_gemms_read_the_simulators_bits(recipe):
    from tests.moe import reference
    from tests.moe.test_experts import assert_same_operand

    torch.manual_seed(0)
    linear = Linear(256, 128, recipe=recipe, gemm=Gemm.HOPPER, dtype=torch.bfloat16)
    x = (torch.randn(130, 256) * torch.exp2(torch.randint(-4, 5, (130, 1)).float())).bfloat16().requires_grad_()
    with record_gemms() as records:
        y = linear(x)
        dy = torch.randn(y.shape).bfloat16()
        y.backward(dy)
    forward, dgrad, wgrad = records
    x_n, dy_n, w_n = (reference.to_numpy(t) for t in (x, dy, linear.weight))
    assert_same_operand(forward, "a", reference.input_rows(x_n, Activation.LINEAR_INPUT, recipe))
    assert_same_operand(forward, "b", reference.weight(w_n))
    assert_same_operand(dgrad, "a", reference.gradient_rows(dy_n, recipe))
    assert_same_operand(dgrad, "b", reference.weight(w_n.T.copy()))
    assert_same_operand(wgrad, "a", reference.gradient_columns(dy_n, recipe))
    assert_same_operand(wgrad, "b", reference.input_columns(x_n, Activation.LINEAR_INPUT, recipe))
    assert all(torch.equal(r.out.view(torch.int16), r.emulated().view(torch.int16)) for r in records)


def test_linears_input_and_gradient_draw_random_bits_of_their_own():
    """By the seed that the forward drew and the one after it."""
    from mxsim.blocks import fp4_row_to_fp8_col, fp4_row_to_fp8_row
    from tests.moe.test_experts import assert_same_operand, stochastic_fp4

    recipe = replace(STOCHASTIC, gradients=Gradients.MXFP4, headroom=0)
    linear = Linear(256, 128, recipe=recipe, gemm=Gemm.HOPPER, dtype=torch.bfloat16)
    x, dy = torch.randn(130, 256).bfloat16().requires_grad_(), torch.randn(130, 128).bfloat16()
    torch.manual_seed(7)
    seed = int(torch.randint(2**62, (1,)))
    torch.manual_seed(7)
    with record_gemms() as records:
        linear(x).backward(dy)
    forward, dgrad, wgrad = records
    for values, offset, by_rows, side in ((x, 0, forward, "b"), (dy, 1, dgrad, "a")):
        fp4 = stochastic_fp4(values, recipe, seed + offset)
        assert_same_operand(by_rows, "a", fp4_row_to_fp8_row(fp4, headroom=0))
        assert_same_operand(wgrad, side, fp4_row_to_fp8_col(fp4, headroom=0))


def test_a_layers_tokens_draw_their_own_random_bits():
    """The tokens of an MoE by the first seed that the forward draws, its experts by the next."""
    from mxsim.moe import Fp4Tokens
    from tests.moe.test_experts import stochastic_fp4

    layer, x = layer_of(STOCHASTIC, num_shared_experts=1), tokens_of(20)
    torch.manual_seed(7)
    seed = torch.randint(2**62, (1,))
    codes = Fp4Tokens.quantize(x, STOCHASTIC, seed).codes
    want = stochastic_fp4(x, STOCHASTIC, int(seed)).codes
    assert torch.equal(codes, torch.from_numpy(want[:, ::2] | want[:, 1::2] << 4))
    torch.manual_seed(7)
    _, kept = saved_by(lambda: layer(x))
    assert any(t.shape == codes.shape and torch.equal(t, codes) for t in kept if t.dtype == torch.uint8)


@pytest.mark.parametrize(
    "recipe, bytes_of_an_element",
    [(Recipe.BF16, 2), (Recipe.FP8, 1 + 4 / 128), (Recipe.MXFP4, 0.5 + 1 / 32)],
    ids=lambda value: getattr(value, "name", None),
)
def test_bytes_that_linear_keeps(recipe, bytes_of_an_element):
    linear = Linear(512, 128, recipe=recipe, dtype=torch.bfloat16)
    linear.prepare_weights()
    x = torch.randn(256, 512).bfloat16().requires_grad_()
    weights = {t.untyped_storage().data_ptr() for t in linear.fp8_weights.get("weight", linear.weight)}
    weights.add(linear.weight.untyped_storage().data_ptr())
    _, kept = saved_by(lambda: linear(x))
    num_bytes = sum(t.untyped_storage().nbytes() for t in kept if t.untyped_storage().data_ptr() not in weights)
    assert num_bytes == 256 * 512 * bytes_of_an_element + (8 if recipe is Recipe.FP8 else 0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, STOCHASTIC], ids=by_name)
def test_a_checkpointed_linear_keeps_every_bit(recipe, use_reentrant):
    torch.manual_seed(0)
    linear = Linear(256, 128, True, recipe=recipe, dtype=torch.bfloat16)
    results = []
    for is_checkpointed in (False, True):
        x = torch.randn(10, 256, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        linear.zero_grad()
        torch.manual_seed(3)
        y = checkpoint(linear, x, use_reentrant=use_reentrant) if is_checkpointed else linear(x)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad.clone() for p in linear.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_linear_under_torch_compile(recipe):
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = Linear(256, 128, True, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(10, 256).bfloat16().requires_grad_()
    want = linear(x)
    want_grads = torch.autograd.grad(want, [x, *linear.parameters()], torch.ones_like(want))
    got = torch.compile(linear, fullgraph=True, backend="aot_eager")(x)
    grads = torch.autograd.grad(got, [x, *linear.parameters()], torch.ones_like(got))
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize("recipe", FP8_RECIPES[:2], ids=by_name)
def test_linear_refuses_weights_whose_gradient_no_gemm_returns(recipe):
    with pytest.raises(TypeError, match=r"Linear: weight has dtype torch\.float16, and the recipe"):
        Linear(256, 128, recipe=recipe).half()(torch.ones(2, 256).bfloat16())


def test_linear_loads_nn_linears_state():
    source = torch.nn.Linear(256, 128)
    target = Linear(256, 128, True, recipe=Recipe.MXFP4)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)
