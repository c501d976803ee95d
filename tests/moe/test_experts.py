"""The expert MLP against the simulator: operands bit for bit, each GEMM within its bound, the whole in float64."""

import copy
import io
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim.blocks import MXFP4, ScaleRule, fp4_row_to_fp8_col, fp4_row_to_fp8_row, fp8_gemm, quantize  # noqa: E402
from mxsim.formats import Rounding, philox_bits  # noqa: E402
from mxsim.moe import (  # noqa: E402
    Activation,
    Conversion,
    Experts,
    Fp4Tokens,
    Gemm,
    Gradients,
    Recipe,
    record_gemms,
    swiglu,
    swiglu_backward,
)
from tests.moe import reference  # noqa: E402

HIDDEN, INTERMEDIATE = 256, 128
SIZES = (5, 0, 130, 1)
ONLY_SWIGLU = replace(Recipe.MXFP4, name="SwiGLU only", stored_fp4=frozenset({Activation.SWIGLU_INPUT}))
ONLY_INPUT = replace(
    Recipe.MXFP4,
    name="input only",
    stored_fp4=frozenset({Activation.EXPERT_INPUT}),
    scale_rule=ScaleRule.FLOOR,
    headroom=0,
)
THROUGH_BF16 = replace(Recipe.MXFP4, name="through BF16", conversion=Conversion.THROUGH_BF16)
FP4_GRADIENTS = replace(Recipe.MXFP4, name="FP4 gradients", gradients=Gradients.MXFP4, headroom=0)
ONLY_GRADIENTS = replace(
    Recipe.FP8, name="gradients only", gradients=Gradients.MXFP4, conversion=Conversion.THROUGH_BF16
)
FP8_RECIPES = [Recipe.FP8, Recipe.MXFP4, ONLY_SWIGLU, ONLY_INPUT, THROUGH_BF16, FP4_GRADIENTS, ONLY_GRADIENTS]
RECIPES = [Recipe.BF16, *FP8_RECIPES]


def by_name(recipe):
    return recipe.name


def make(recipe, *, sizes=SIZES, gemm=Gemm.AUTO, seed=0, device="cpu"):
    """(experts, x, probs, dy); rows of different scale, as tokens are."""
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(HIDDEN, INTERMEDIATE, len(sizes), recipe=recipe, gemm=gemm, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    rows = sum(sizes)
    scale = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    x = (torch.randn(rows, HIDDEN, generator=generator) * scale).bfloat16().requires_grad_()
    probs = torch.rand(rows, generator=generator).requires_grad_()
    dy = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    x, probs = (t.detach().to(device).requires_grad_() for t in (x, probs))
    return experts.to(device), x, probs, dy.to(device)


def run(experts, x, probs, dy, sizes=SIZES):
    y = experts(x, torch.tensor(sizes), probs)
    grads = torch.autograd.grad(y, [x, probs, experts.w1, experts.w2], dy)
    return dict(zip(("y", "dx", "dprobs", "dw1", "dw2"), (y, *grads), strict=True))


def parts(x, sizes=SIZES):
    return [reference.to_numpy(part) for part in x.detach().split(list(sizes))]


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_forward_and_gradients_are_the_float64_fake_quantization(recipe):
    check_against_float64(recipe, Gemm.AUTO, "cpu", 2e-3)


def check_against_float64(recipe, gemm, device, limit):
    """Everything in float64 but the roundings of the recipe; what may differ is the accumulation in the GEMMs.

    That can turn a BF16 rounding between two GEMMs and with it an FP4 rounding, so that single elements differ by a
    quantization step: the limit is on the norm, a tenth of the quantization error itself (about 2 % and more).
    """
    experts, x, probs, dy = make(recipe, gemm=gemm, device=device)
    got = run(experts, x, probs, dy)
    for e, (x_e, p_e, dy_e) in enumerate(zip(*(parts(t) for t in (x, probs, dy)), strict=True)):
        w1, w2 = (reference.to_numpy(w[e]) for w in (experts.w1, experts.w2))
        want = reference.expert_reference(x_e, p_e, w1, w2, dy_e, recipe)
        start, stop = sum(SIZES[:e]), sum(SIZES[: e + 1])
        for name, value in want.items():
            mine = got[name][e] if name.startswith("dw") else got[name][start:stop]
            difference = np.linalg.norm(reference.to_numpy(mine).astype(np.float64) - value)
            assert difference <= limit * np.linalg.norm(value), (name, e)


def operand_of(record, side):
    codes = record.a_codes if side == "a" else record.b_codes
    scales = record.a_scales if side == "a" else record.b_scales
    return reference.to_numpy(codes.view(torch.uint8)), reference.to_numpy(scales)


def assert_same_operand(record, side, want):
    codes, scales = operand_of(record, side)
    np.testing.assert_array_equal(codes, want.codes)
    np.testing.assert_array_equal(scales.view(np.uint32), want.scales.view(np.uint32))


@pytest.mark.parametrize("gemm", [Gemm.DEQUANTIZED, Gemm.HOPPER])
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_every_gemm_reads_the_simulators_bits_and_returns_its_sum(recipe, gemm):
    check_every_gemm(recipe, gemm, "cpu")


def check_every_gemm(recipe, gemm, device):
    """Operands are compared bit for bit with the simulator's quantization of the tensors before it.

    Outputs equal the NumPy model of Hopper's GEMM bit for bit. DEQUANTIZED: |out - exact| <= (K + 1) * 2**-24 *
    sum |a b| for FP32 additions in any order, and half an ulp of BF16 (2**-8 of the value).
    """
    experts, x, probs, dy = make(recipe, gemm=gemm, device=device)
    with record_gemms() as records:
        run(experts, x, probs, dy)
    used = [e for e, size in enumerate(SIZES) if size]
    order = ["h", "y", "da", "dw2", "dx", "dw1"]
    assert [r.expert for r in records] == used * len(order)
    table = {(name, r.expert): r for name, r in zip(np.repeat(order, len(used)), records, strict=True)}

    for e in used:
        start, stop = sum(SIZES[:e]), sum(SIZES[: e + 1])
        x_e, p_e, dy_e = x.detach()[start:stop], probs.detach()[start:stop], dy[start:stop]
        h, da = table["h", e].out, table["da", e].out
        a = swiglu(h, p_e)
        seen_h = torch.from_numpy(reference.stored_swiglu_input(reference.to_numpy(h), recipe).view(np.int16).copy())
        dh, _ = swiglu_backward(da, seen_h.view(torch.bfloat16).to(device), p_e)
        x_n, a_n, dy_n, dh_n = (reference.to_numpy(t) for t in (x_e, a, dy_e, dh))
        w1, w2 = (reference.to_numpy(w[e]) for w in (experts.w1, experts.w2))
        want = {
            "h": (reference.input_rows(x_n, Activation.EXPERT_INPUT, recipe), reference.weight(w1)),
            "y": (reference.input_rows(a_n, Activation.DOWN_INPUT, recipe), reference.weight(w2)),
            "da": (reference.gradient_rows(dy_n, recipe), reference.weight(np.ascontiguousarray(w2.T))),
            "dw2": (
                reference.gradient_columns(dy_n, recipe),
                reference.input_columns(a_n, Activation.DOWN_INPUT, recipe),
            ),
            "dx": (reference.gradient_rows(dh_n, recipe), reference.weight(np.ascontiguousarray(w1.T))),
            "dw1": (
                reference.gradient_columns(dh_n, recipe),
                reference.input_columns(x_n, Activation.EXPERT_INPUT, recipe),
            ),
        }
        for name, (left, right) in want.items():
            record = table[name, e]
            assert_same_operand(record, "a", left)
            assert_same_operand(record, "b", right)
            out = reference.to_numpy(record.out)
            if gemm is not Gemm.DEQUANTIZED:
                np.testing.assert_array_equal(out.view(np.uint16), fp8_gemm(left, right, out=out.dtype).view(np.uint16))
            else:
                exact_a, exact_b = reference.values(left), reference.values(right)
                exact, size = exact_a @ exact_b.T, abs(exact_a) @ abs(exact_b).T
                bound = (left.shape[1] + 1) * 2.0**-24 * size + 2.0**-8 * (1 + 2.0**-8) * abs(exact)
                assert (abs(out.astype(np.float64) - exact) <= bound).all()


def stochastic_fp4(values, recipe, seed):
    """The simulator's codes of a tensor, [rows, columns]."""
    values = reference.to_numpy(values)
    bits = philox_bits(seed, values.shape)
    return quantize(values, MXFP4, scale_rule=recipe.scale_rule, rounding=Rounding.STOCHASTIC, random_bits=bits)


def test_every_tensor_draws_random_bits_of_its_own():
    """Codes of x, h, a, dy and dh are the simulator's, by the seed that the forward drew and the four after it."""
    recipe = replace(FP4_GRADIENTS, rounding=Rounding.STOCHASTIC)
    experts, x, probs, dy = make(recipe, sizes=(SIZES[2],))
    torch.manual_seed(7)
    seed = int(torch.randint(2**62, (1,)))
    torch.manual_seed(7)
    with record_gemms() as records:
        run(experts, x, probs, dy, (SIZES[2],))
    h, y, da, dw2, dx, dw1 = records
    a = swiglu(h.out, probs.detach())
    # dh: what SwiGLU's backward gave, from the stored copy of h.
    kept_h = stochastic_fp4(h.out, recipe, seed + 1)
    h_bits = kept_h.dequantize(ml_dtypes.bfloat16).view(np.int16).copy()
    dh, _ = swiglu_backward(da.out, torch.from_numpy(h_bits).view(torch.bfloat16), probs.detach())
    for values, offset, by_rows, by_columns, side in (
        (x, 0, h, dw1, "b"),
        (a, 2, y, dw2, "b"),
        (dy, 3, da, dw2, "a"),
        (dh, 4, dx, dw1, "a"),
    ):
        fp4 = stochastic_fp4(values, recipe, seed + offset)
        assert_same_operand(by_rows, "a", fp4_row_to_fp8_row(fp4, headroom=recipe.headroom))
        assert_same_operand(by_columns, side, fp4_row_to_fp8_col(fp4, headroom=recipe.headroom))


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_wgrad_and_the_forward_pass_read_the_same_codes(recipe):
    """MXFP4: the values of the columns are those of the rows, bit for bit, as both come from the stored codes."""
    experts, x, probs, dy = make(recipe, gemm=Gemm.DEQUANTIZED)
    x.data = (x.data * 0 + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).bfloat16()
    with record_gemms() as records:
        run(experts, x, probs, dy)
    used = sum(size > 0 for size in SIZES)
    forward, backward = records[:used], records[-used:]
    same = True
    for f, b in zip(forward, backward, strict=True):
        rows = f.a_codes.float() * f.a_scales.repeat_interleave(128, dim=1)
        cols = b.b_codes.float() * b.b_scales.repeat_interleave(128, dim=1)
        same = same and torch.equal(rows, cols.t()[: len(rows)])
    # ONLY_INPUT has headroom 0: still exact at a spread of 2**8.
    assert same == recipe.keeps_fp4(Activation.EXPERT_INPUT)


def saved_by(function):
    """The distinct tensors that autograd keeps, largest first."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sorted(kept.values(), key=lambda t: -t.untyped_storage().nbytes())


R, H, F = 256, 1024, 512  # balanced: no padding


@pytest.mark.parametrize(
    "recipe, x_bytes, h_bytes, a_bytes",
    [
        (Recipe.BF16, 2, 2, 2),
        (Recipe.FP8, 1 + 4 / 128, 2, 1 + 4 / 128),
        (Recipe.MXFP4, 0.5 + 1 / 32, 0.5 + 1 / 32, 0.5 + 1 / 32),
        (ONLY_SWIGLU, 1 + 4 / 128, 0.5 + 1 / 32, 1 + 4 / 128),
        (ONLY_INPUT, 0.5 + 1 / 32, 2, 1 + 4 / 128),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else None,
)
@pytest.mark.parametrize("is_dispatched", [False, True])
def test_bytes_kept_for_the_backward_pass(recipe, x_bytes, h_bytes, a_bytes, is_dispatched):
    """Expert input, SwiGLU input, second GEMM's input, routing weights and group sizes: nothing else but weights."""
    if is_dispatched and not recipe.keeps_fp4(Activation.EXPERT_INPUT):
        pytest.skip("the recipe takes BF16 rows")
    experts = Experts(H, F, 2, recipe=recipe, gemm=Gemm.DEQUANTIZED, dtype=torch.bfloat16)
    operands = [experts.w1, experts.w2]
    if recipe is not Recipe.BF16:
        experts.prepare_weights()
        operands += [*experts.fp8_weights.get("w1", experts.w1), *experts.fp8_weights.get("w2", experts.w2)]
    x = torch.randn(R, H).bfloat16().requires_grad_()
    source = Fp4Tokens.quantize(x, recipe) if is_dispatched else x
    probs = torch.rand(R).requires_grad_()
    sizes = torch.tensor([R // 2, R // 2])
    _, kept = saved_by(lambda: experts(source, sizes, probs))
    weights = {w.untyped_storage().data_ptr() for w in operands}
    kept = [t for t in kept if t.untyped_storage().data_ptr() not in weights]
    num_bytes = sum(t.untyped_storage().nbytes() for t in kept)
    expected = R * (H * x_bytes + 2 * F * h_bytes + F * a_bytes)
    small = 4 * R + 2 * 8  # routing weights, group sizes; FP8 columns have their padded sizes beside them
    small += sum(2 * 8 for size in (x_bytes, a_bytes) if size == 1 + 4 / 128)
    assert num_bytes == expected + small


def test_kept_bytes_are_the_recipes_share():
    """0.266 of BF16's bytes and 0.40 of those of FP8 GEMM inputs beside a BF16 SwiGLU input, at DeepSeek-V3's sizes."""
    hidden, wide = 7168, 2048
    bf16 = 2 * (hidden + 3 * wide)
    fp8 = (hidden + wide) * (1 + 4 / 128) + 2 * wide * 2
    mxfp4 = (hidden + 3 * wide) * (0.5 + 1 / 32)
    assert round(mxfp4 / bf16, 3) == 0.266
    assert round(mxfp4 / fp8, 2) == 0.40


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 0, 7), (7, 0, 0), (128, 1, 127)])
def test_empty_experts_and_one_expert_with_everything(recipe, sizes):
    """Gradients of an expert without tokens are zero; outputs are those of the experts alone."""
    experts, x, probs, dy = make(recipe, sizes=sizes)
    got = run(experts, x, probs, dy, sizes)
    assert got["y"].shape == x.shape
    for e, size in enumerate(sizes):
        if size == 0:
            assert not got["dw1"][e].any()
            assert not got["dw2"][e].any()
            continue
        start, stop = sum(sizes[:e]), sum(sizes[: e + 1])
        alone = Experts(HIDDEN, INTERMEDIATE, 1, recipe=recipe, dtype=torch.bfloat16)
        with torch.no_grad():
            alone.w1.copy_(experts.w1[e : e + 1])
            alone.w2.copy_(experts.w2[e : e + 1])
        x_e, p_e = x.detach()[start:stop].requires_grad_(), probs.detach()[start:stop].requires_grad_()
        want = run(alone, x_e, p_e, dy[start:stop], (size,))
        assert torch.equal(got["y"][start:stop], want["y"])
        assert torch.equal(got["dx"][start:stop], want["dx"])
        assert torch.equal(got["dprobs"][start:stop], want["dprobs"])
        assert torch.equal(got["dw1"][e], want["dw1"][0])
        assert torch.equal(got["dw2"][e], want["dw2"][0])


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_rerun_gives_the_same_bits(recipe):
    first, second = (run(*make(recipe)) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_gradient_of_the_bf16_recipe_is_the_derivative():
    experts = Experts(8, 4, 3, recipe=Recipe.BF16, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([2, 0, 4])

    def function(x, probs, w1, w2):
        return torch.func.functional_call(experts, {"w1": w1, "w2": w2}, (x, sizes, probs))

    assert torch.autograd.gradcheck(function, (x, probs, experts.w1, experts.w2))


@pytest.mark.parametrize("frozen", ["w1", "w2", "x", "probs"])
@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(recipe, frozen):
    experts, x, probs, dy = make(recipe)
    want = run(experts, x, probs, dy)
    inputs = {"x": x, "probs": probs, "w1": experts.w1, "w2": experts.w2}
    inputs[frozen].requires_grad_(False)
    names = [name for name in inputs if name != frozen]
    y = experts(x, torch.tensor(SIZES), probs)
    for name, grad in zip(names, torch.autograd.grad(y, [inputs[n] for n in names], dy), strict=True):
        assert torch.equal(grad, want["d" + name]), name


def test_prepared_weights_are_used_until_the_weights_change(monkeypatch):
    from mxsim.moe import weights

    experts, x, probs, dy = make(Recipe.MXFP4)
    calls = []
    original = weights.quantize_weight
    monkeypatch.setattr(weights, "quantize_weight", lambda w: calls.append(w) or original(w))
    want = run(experts, x, probs, dy)
    assert len(calls) == 2
    experts.prepare_weights()
    got = run(experts, x, probs, dy)
    assert len(calls) == 4
    assert all(torch.equal(got[name], want[name]) for name in want)
    with torch.no_grad():
        experts.w1.add_(1)
    changed = run(experts, x, probs, dy)
    assert len(calls) == 5  # w2's copies still serve
    assert not torch.equal(changed["y"], want["y"])


def steps_of(optimizer, **options):
    def change(experts):
        for weight in experts.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer(experts.parameters(), lr=1.0, **options).step()

    return change


def compiled_step(experts):
    torch._dynamo.reset()
    for weight in experts.parameters():
        weight.grad = torch.ones_like(weight)
    torch.compile(torch.optim.SGD(experts.parameters(), lr=1.0).step, backend="aot_eager")()


def give_other_storage(experts):
    experts.w1.data = experts.w1.data + 1


def load_twice(experts):
    experts.load_state_dict({name: 2 * value for name, value in experts.state_dict().items()})


def assign_state(experts):
    experts.load_state_dict({name: 2 * value for name, value in experts.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        steps_of(torch.optim.SGD),
        steps_of(torch.optim.AdamW, fused=True),  # leaves version counters as they are
        steps_of(torch.optim.AdamW, foreach=True),
        compiled_step,
        give_other_storage,
        load_twice,
        assign_state,
    ],
    ids=["sgd", "fused adamw", "foreach adamw", "compiled sgd", "data", "load", "assign"],
)
def test_prepared_weights_are_never_older_than_the_weights(change):
    experts, x, probs, _ = make(Recipe.MXFP4)
    experts.prepare_weights()
    before = experts(x, torch.tensor(SIZES), probs)
    change(experts)
    after = experts(x, torch.tensor(SIZES), probs)
    experts.fp8_weights.clear()
    assert torch.equal(after, experts(x, torch.tensor(SIZES), probs))
    assert not torch.equal(after, before)


def reloaded(experts):
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, reloaded], ids=["deepcopy", "pickle"])
def test_a_copied_module_has_nothing_prepared(copy_of):
    """The version counters of its parameters begin anew, so that they may come to what the original's were."""
    experts, x, probs, _ = make(Recipe.MXFP4)
    experts.prepare_weights()
    want = experts(x, torch.tensor(SIZES), probs)
    copied = copy_of(experts)
    assert not copied.fp8_weights._made
    assert torch.equal(copied(x, torch.tensor(SIZES), probs), want)
    while copied.w1._version < experts.w1._version:
        with torch.no_grad():
            copied.w1.zero_()
    with torch.no_grad():
        copied.w1.zero_()
    assert not copied(x, torch.tensor(SIZES), probs).any()


def test_a_module_made_in_inference_mode_prepares_nothing():
    with torch.inference_mode():
        experts = Experts(128, 128, 1, dtype=torch.bfloat16)
        experts.prepare_weights()
        x = torch.ones(3, 128).bfloat16()
        assert experts(x, torch.tensor([3])).any()
        experts.w1.zero_()
        assert not experts(x, torch.tensor([3])).any()


@pytest.mark.parametrize("recipe", [Recipe.FP8, Recipe.MXFP4], ids=by_name)
def test_autocast_changes_no_bit(recipe):
    """Forward and backward; float32 gradients of weights tell products in BF16 from those in FP32."""
    experts, x, probs, dy = make(recipe)
    experts.float()
    want = run(experts, x, probs, dy)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(experts, x, probs, dy)
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_poisoned_row_is_seen_and_stays_alone(recipe, bad):
    experts, x, probs, dy = make(recipe)
    want = run(experts, x, probs, dy)
    poisoned = x.detach().clone()
    poisoned[7, 5] = bad
    got = run(experts, poisoned.requires_grad_(), probs, dy)
    others = torch.arange(len(x)) != 7
    for name in ("y", "dx", "dprobs"):
        assert not got[name][7].isfinite().all(), name
        assert torch.equal(got[name][others], want[name][others]), name
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name][[0, 1, 3]], want[name][[0, 1, 3]]), name  # row 7 is expert 2's
        assert not got[name][2].isfinite().all(), name


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_any_strides_give_the_same_bits(recipe):
    experts, x, probs, dy = make(recipe)
    want = run(experts, x, probs, dy)
    turned = x.detach().t().contiguous().t().requires_grad_()
    got = run(experts, turned, probs, dy.t().contiguous().t())
    assert all(torch.equal(got[name], value) for name, value in want.items())
    y = experts(x, torch.tensor(SIZES), probs)
    expanded, *_ = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(expanded, torch.autograd.grad(y, x, torch.ones_like(y))[0])


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_a_second_derivative_is_refused(recipe):
    experts, x, probs, _ = make(recipe)
    y = experts(x, torch.tensor(SIZES), probs)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="moe_experts_backward: has no derivative"):
        dx.float().sum().backward()


def test_fp32_weights_have_fp32_gradients():
    experts, x, probs, dy = make(Recipe.MXFP4)
    wide = Experts(HIDDEN, INTERMEDIATE, len(SIZES), recipe=Recipe.MXFP4, dtype=torch.float32)
    wide.load_state_dict(experts.state_dict())
    narrow, full = run(experts, x, probs, dy), run(wide, x, probs, dy)
    assert torch.equal(narrow["y"], full["y"])
    assert full["dw1"].dtype == torch.float32
    assert torch.equal(full["dw1"].bfloat16(), narrow["dw1"])


def test_a_state_dict_of_one_recipe_loads_in_every_other():
    source = Experts(HIDDEN, INTERMEDIATE, 3, recipe=Recipe.MXFP4)
    for recipe in RECIPES:
        target = Experts(HIDDEN, INTERMEDIATE, 3, recipe=recipe)
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.w1, source.w1)


class TestErrors:
    @pytest.mark.parametrize("sizes", [{"hidden_size": 192}, {"intermediate_size": 64}])
    def test_sizes_that_the_blocks_do_not_divide(self, sizes):
        options = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 2} | sizes
        name, size = next(iter(sizes.items()))
        with pytest.raises(ValueError, match=f"Experts: {name} is {size}, which is not a multiple of 128"):
            Experts(**options)
        Experts(**options, recipe=Recipe.BF16)

    @pytest.mark.parametrize("size", [0, -1, 2.0, True])
    def test_sizes_that_are_no_positive_integers(self, size):
        with pytest.raises(ValueError, match="Experts: num_experts is"):
            Experts(256, 128, size)

    def test_recipe_by_name(self):
        with pytest.raises(TypeError, match="needed a Recipe"):
            Experts(256, 128, 2, recipe="mxfp4")

    def test_dtype(self):
        experts = Experts(256, 128, 2)
        with pytest.raises(TypeError, match=r"x has dtype torch\.float32, and the recipe MXFP4 needed bfloat16"):
            experts(torch.ones(4, 256), torch.tensor([2, 2]))
        with pytest.raises(TypeError, match="floating-point"):
            Experts(256, 128, 2, recipe=Recipe.BF16)(torch.ones(4, 256, dtype=torch.int64), torch.tensor([2, 2]))

    def test_shape(self):
        with pytest.raises(ValueError, match=r"x has shape \(4, 128\), needed \[rows, 256\]"):
            Experts(256, 128, 2)(torch.ones(4, 128).bfloat16(), torch.tensor([2, 2]))

    @pytest.mark.parametrize("sizes", [[2, 3], [-1, 5], [4]])
    def test_group_sizes(self, sizes):
        with pytest.raises(ValueError, match=r"size|group|matrices"):
            Experts(256, 128, 2)(torch.ones(4, 256).bfloat16(), torch.tensor(sizes))

    def test_fp4_tokens_in_a_recipe_that_computes_in_bf16(self):
        x = Fp4Tokens.quantize(torch.ones(4, 256).bfloat16(), Recipe.MXFP4)
        with pytest.raises(TypeError, match="x is in MXFP4"):
            Experts(256, 128, 2, recipe=Recipe.BF16)(x, torch.tensor([2, 2]))
        with pytest.raises(TypeError, match="x is in MXFP4, and the recipe FP8 takes a tensor"):
            Experts(256, 128, 2, recipe=Recipe.FP8)(x, torch.tensor([2, 2]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_weights_whose_gradient_no_gemm_returns(self, dtype):
        message = rf"Experts: w1 has dtype {dtype}, and the recipe MXFP4 needed bfloat16 or float32"
        with pytest.raises(TypeError, match=message):
            Experts(256, 128, 2).to(dtype)(torch.ones(4, 256).bfloat16(), torch.tensor([2, 2]))
        Experts(256, 128, 2, recipe=Recipe.BF16).to(dtype)(torch.ones(4, 256).bfloat16(), torch.tensor([2, 2]))

    def test_group_sizes_that_are_no_tensor(self):
        with pytest.raises(TypeError, match="group_sizes is a list, needed a torch tensor"):
            Experts(256, 128, 2)(torch.ones(4, 256).bfloat16(), [2, 2])
