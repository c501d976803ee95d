"""The model: its parts by their formulas, its weights by their seed, and what its layers compute in."""

import math
from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim.moe import MoE, Recipe  # noqa: E402
from mxsim.train.config import TrainConfig  # noqa: E402
from mxsim.train.model import LanguageModel, RmsNorm, Rope  # noqa: E402
from mxsim.train.recipes import ABLATION, RECIPES  # noqa: E402
from tests.train.runs import small  # noqa: E402


def tokens_of(batch=2, length=16, seed=0):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_formula():
    norm = RmsNorm(8)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1, 9))
    x = torch.randn(3, 8).bfloat16()
    wide = x.double()
    want = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), want.bfloat16(), rtol=2.0**-7, atol=0)


def test_rope_turns_pairs_by_their_position():
    rope = Rope(4, 5)
    x = torch.randn(1, 1, 5, 4).bfloat16()
    y = rope(x).double()
    pairs = torch.complex(x[..., :2].double(), x[..., 2:].double())
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    want = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(y, torch.cat([want.real, want.imag], -1), rtol=2.0**-7, atol=2.0**-7)
    assert torch.equal(rope(x)[:, :, 0], x[:, :, 0])


def test_a_token_does_not_see_those_after_it():
    model = LanguageModel(small("bf16"))
    a = tokens_of()
    b = a.clone()
    b[:, 9:] = (b[:, 9:] + 1) % 256
    x, y = model(a), model(b)
    assert torch.equal(x[:, :9], y[:, :9])
    assert not torch.equal(x[:, 9:], y[:, 9:])


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token():
    model = LanguageModel(small("bf16"))
    tokens = tokens_of()
    logits = model(tokens[:, :-1]).detach().numpy().astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.mean([log_p[b, s, tokens[b, s + 1]] for b in range(2) for s in range(15)])
    assert model.loss(tokens).item() == pytest.approx(want, rel=1e-5)


def test_weights_follow_from_the_seed_in_every_recipe():
    want = LanguageModel(small("bf16")).state_dict()
    for recipe in ("fp8", "mxfp4"):
        state = LanguageModel(small(recipe)).state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], value) for name, value in want.items())
    other = LanguageModel(small("bf16", "seed=1")).state_dict()
    assert not torch.equal(other["embedding.weight"], want["embedding.weight"])


def test_the_variance_of_the_first_weights():
    model = LanguageModel(small("bf16"))
    for name, std in (
        ("embedding.weight", 1),
        ("head.weight", 128**-0.5),
        ("blocks.0.attention.qkv.weight", 128**-0.5),
        ("blocks.1.attention.out.weight", 128**-0.5 / 2),
        ("blocks.0.mlp.experts.w1", 128**-0.5),
        ("blocks.0.mlp.shared.w2", 128**-0.5 / 2),
    ):
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.03), name


def test_parameters_are_fp32_and_layers_compute_in_bf16():
    model = LanguageModel(small("mxfp4"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    assert model(tokens_of()).dtype == torch.float32
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    model.loss(tokens_of()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


def test_what_is_in_the_recipe():
    """The experts; with linears=recipe also attention and dense layers; head and routers never."""
    for linears, want in (("bf16", Recipe.BF16), ("recipe", Recipe.MXFP4)):
        model = LanguageModel(small("mxfp4", "num_dense_layers=1", f"linears={linears}", "dense_size=256"))
        dense, moe = (block.mlp for block in model.blocks)
        assert isinstance(moe, MoE)
        assert moe.recipe is moe.experts.recipe is moe.shared.recipe is Recipe.MXFP4
        assert dense.experts.recipe is dense.recipe is model.blocks[0].attention.qkv.recipe is want
        assert model.head.recipe is Recipe.BF16
        assert model.loss(tokens_of()).isfinite()


def test_a_tied_head_is_the_embedding():
    model = LanguageModel(small("bf16", "has_tied_head=true"))
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
    assert LanguageModel(small("bf16")).num_parameters() - model.num_parameters() == 256 * 128


def test_parameters_are_counted():
    config = small("bf16")
    model = LanguageModel(config)
    layer = 4 * 128 * 128 + 4 * 128 + 2 * 128  # attention, router, norms
    expert = 3 * 128 * 128
    rest = 2 * 256 * 128 + 128
    assert model.num_parameters() == 2 * (layer + 5 * expert) + rest
    assert model.num_active_parameters() == 2 * (layer + 3 * expert) + rest


def test_router_biases_move_against_the_load():
    model = LanguageModel(small("bf16"))
    model(tokens_of())
    load = model.update_router_biases()
    sizes = [moe.group_sizes_E for moe in model.moe_layers()]
    assert load.item() == pytest.approx(max(s.max().item() * 4 / s.sum().item() for s in sizes))
    for moe, s in zip(model.moe_layers(), sizes, strict=True):
        assert torch.equal(moe.router.bias.sign(), (s.float().mean() - s).sign())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
def test_compiled_layers_give_the_same():
    torch._dynamo.reset()
    tokens = tokens_of()
    want = LanguageModel(small("mxfp4"))(tokens)
    model = LanguageModel(small("mxfp4", "compile=true"))
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(model(tokens), want)
    assert all(moe.group_sizes_E is not None for moe in model.moe_layers())


def test_recipes_of_the_ablation_change_one_thing_each():
    """One field beside the name, but for gradients that are rounded stochastically; no two are the same."""
    assert len({recipe.key for recipe in RECIPES.values()}) == len(RECIPES)
    for name, recipe in ABLATION.items():
        changed = [f.name for f in fields(recipe) if getattr(recipe, f.name) != getattr(Recipe.MXFP4, f.name)]
        assert len(changed) - changed.count("name") - changed.count("key") == 1 + (name == "mxfp4-gradients-stochastic")
    assert all(recipe.name == name for name, recipe in ABLATION.items())
    assert {"mxfp4-floor", "mxfp4-headroom0", "mxfp4-through-bf16", "mxfp4-gradients"} <= ABLATION.keys()


@pytest.mark.parametrize("recipe", ABLATION)
def test_every_recipe_of_the_ablation_has_gradients(recipe):
    model = LanguageModel(small(recipe, "num_layers=1"))
    loss = model.loss(tokens_of())
    loss.backward()
    assert abs(loss.item() - math.log(256)) < 1
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_presets_are_configurations():
    from mxsim.train.config import PRESETS

    assert PRESETS["h200"].tokens_per_step * PRESETS["h200"].steps >= 100_000_000
    assert PRESETS["tiny"] == TrainConfig()
