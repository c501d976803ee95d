"""Gradient errors against NumPy on gradients that the test computes itself; what must hold exactly; the script."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from mxsim.train import gradients  # noqa: E402
from mxsim.train.config import ConfigError  # noqa: E402
from mxsim.train.corpus import load_corpus  # noqa: E402
from mxsim.train.data import Windows  # noqa: E402
from mxsim.train.gradients import ANOTHER_BATCH, FP32, Choices, Group, gradient_errors  # noqa: E402
from mxsim.train.model import LanguageModel  # noqa: E402
from mxsim.train.recipes import RECIPES  # noqa: E402
from mxsim.train.run_folder import load_checkpoint  # noqa: E402
from tests.train.runs import run, small, words  # noqa: E402

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks/gradient_error.py"
CONFIG = small("bf16", "num_layers=3", "num_dense_layers=1", "dense_size=128", "sequence_length=16")
STOCHASTIC = "mxfp4-gradients-stochastic"


def tokens_of(batch=3, length=17, seed=0):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def state_of(config=CONFIG):
    """First weights, and router biases that matter."""
    state = LanguageModel(config).state_dict()
    generator = torch.Generator().manual_seed(1)
    for name, value in state.items():
        if name.endswith("router.bias"):
            value.copy_(0.05 * torch.randn(value.shape, generator=generator))
    return state


STATE = state_of()


class Fp32Model(LanguageModel):
    def embed(self, tokens):
        return F.embedding(tokens, self.embedding.weight)


def raw(recipe, tokens=None, *, seed=0, config=CONFIG, state=STATE):
    """(gradients in float64 by name, experts of every token by layer), by the loss of one batch."""
    model = (Fp32Model if recipe == FP32 else LanguageModel)(
        replace(config, recipe="bf16" if recipe == FP32 else recipe)
    )
    model.load_state_dict(state)
    chosen = {}
    for layer, block in enumerate(model.blocks):
        if hasattr(block.mlp, "router"):
            block.mlp.router.register_forward_hook(
                lambda module, inputs, routing, layer=layer: chosen.update({layer: routing.topk_ids_TK.tolist()})
            )
    torch.manual_seed(seed)
    model.loss(tokens_of() if tokens is None else tokens).backward()
    return {name: weight.grad.numpy().astype(np.float64) for name, weight in model.named_parameters()}, chosen


MEMBERS = {
    Group.ALL: "",
    Group.ROUTED_W1: ".mlp.experts.w1",
    Group.ROUTED_W2: ".mlp.experts.w2",
    Group.SHARED: ".mlp.shared.",
    Group.ROUTER: ".mlp.router.",
    Group.ATTENTION: ".attention.",
}


def vector(found, group, layer):
    """The gradient of a group as one vector; layer 0 of CONFIG is the dense one."""
    is_dense = "blocks.0.mlp."
    names = [name for name in found if layer is None or name.startswith(f"blocks.{layer}.")]
    match group:
        case Group.DENSE:
            names = [name for name in names if name.startswith(is_dense)]
        case Group.EMBEDDING:
            names = [name for name in names if name in ("embedding.weight", "head.weight")]
        case Group.NORMS:
            names = [name for name in names if "norm" in name]
        case Group.ALL:
            pass
        case _:
            names = [name for name in names if MEMBERS[group] in name and not name.startswith(is_dense)]
    return np.concatenate([found[name].ravel() for name in names])


def figures(g, r):
    return (
        np.linalg.norm(g - r) / np.linalg.norm(r),
        g @ r / (np.linalg.norm(g) * np.linalg.norm(r)),
        g @ r / (r @ r) - 1,
    )


def assert_figures(row, want, rel=1e-9):
    got = (row.relative_error, row.cosine, row.bias)
    assert got == pytest.approx(want, rel=rel, abs=1e-12), row


def share_of_others(got, want):
    """Of all choices, those that are not among the reference's for the token."""
    pairs = [(a, b) for layer in got for a, b in zip(got[layer], want[layer], strict=True)]
    return sum(len(set(a) - set(b)) for a, b in pairs) / sum(len(a) for a, _ in pairs)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
def test_figures_are_those_of_numpy_on_raw_gradients(recipe):
    rows = gradient_errors(CONFIG, STATE, tokens_of(), [recipe], reference="bf16", device="cpu")
    want, want_chosen = raw("bf16")
    got, chosen = raw(recipe)
    own = {(row.group, row.layer): row for row in rows if row.choices is Choices.OWN}
    assert len(own) == 9 + 4 + 2 * 7  # all layers, the dense one, two with experts
    for (group, layer), row in own.items():
        assert_figures(row, figures(vector(got, group, layer), vector(want, group, layer)))
    assert own[Group.ALL, None].differing_choices == pytest.approx(share_of_others(chosen, want_chosen))
    assert own[Group.ALL, None].differing_choices > 0 or recipe == "fp8"
    for layer in (1, 2):
        of_layer = share_of_others({layer: chosen[layer]}, want_chosen)
        assert own[Group.ROUTER, layer].differing_choices == pytest.approx(of_layer)
    assert math.isnan(own[Group.DENSE, 0].differing_choices)
    assert {row.num_averaged for row in rows} == {1}


def test_every_parameter_is_in_one_group():
    """Squares of the groups sum to those of all, as |g - r|**2 = relative_error**2 |r|**2."""
    want, _ = raw("bf16")
    rows = gradient_errors(CONFIG, STATE, tokens_of(), ["mxfp4"], reference="bf16", device="cpu")
    squares = {
        (row.group, row.layer): row.relative_error**2 * np.sum(vector(want, row.group, row.layer) ** 2)
        for row in rows
        if row.choices is Choices.OWN
    }
    for layer in (None, 0, 1, 2):
        of_groups = [square for (group, at), square in squares.items() if at == layer and group is not Group.ALL]
        assert sum(of_groups) == pytest.approx(squares[Group.ALL, layer])


def test_a_tied_head_counts_once():
    config = replace(CONFIG, has_tied_head=True)
    state = state_of(config)
    rows = gradient_errors(config, state, tokens_of(), ["fp8"], reference="bf16", device="cpu")
    (row,) = [row for row in rows if row.group is Group.EMBEDDING and row.choices is Choices.OWN]
    name = "embedding.weight"
    got, want = (raw(recipe, config=config, state=state)[0][name].ravel() for recipe in ("fp8", "bf16"))
    assert_figures(row, figures(got, want))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_a_recipe_has_no_error_against_itself(recipe):
    rows = gradient_errors(CONFIG, STATE, tokens_of(), [recipe], reference=recipe, device="cpu")
    assert {row.choices for row in rows} == set(Choices)
    for row in rows:
        assert (row.relative_error, row.cosine, row.bias) == (0, 1, 0)
        assert row.differing_choices == 0 or row.layer == 0


def test_the_fp32_reference_computes_in_fp32():
    """Other attention kernels and sums than the test's FP32 model: equal but for FP32's rounding, far below BF16's."""
    rows = gradient_errors(CONFIG, STATE, tokens_of(), ["bf16"], device="cpu")
    want, want_chosen = raw(FP32)
    got, chosen = raw("bf16")
    for row in rows:
        if row.choices is Choices.OWN:
            assert_figures(
                row, figures(vector(got, row.group, row.layer), vector(want, row.group, row.layer)), rel=1e-3
            )
            assert 1e-3 < row.relative_error < 0.2
    assert rows[0].differing_choices == share_of_others(chosen, want_chosen)


def test_attention_of_the_reference_is_its_formula():
    """Fused kernels on CUDA multiply float32 in fewer bits."""
    model = gradients._Fp32Model(CONFIG)
    seen = []
    model.blocks[0].register_forward_hook(
        lambda *_: seen.append(
            (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())
        )
    )
    model(tokens_of()[:, :-1])
    assert seen == [(True, False)]


def test_the_gradient_of_fp32_is_that_of_the_loss():
    """Along itself the loss rises by |g|**2 a unit, by a central difference."""
    model = gradients._Fp32Model(CONFIG)
    model.load_state_dict(STATE)
    found = gradients._pass(model, tokens_of()).gradients
    squared = sum(float(g.double().square().sum()) for g in found.values())
    step, losses = 1e-3, []
    for sign in (1, -1):
        moved = Fp32Model(CONFIG)
        moved.load_state_dict(STATE)
        with torch.no_grad():
            for name, weight in moved.named_parameters():
                weight.add_(found[name], alpha=sign * step)
            losses.append(moved.loss(tokens_of()).double().item())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(squared, rel=1e-3)


def test_the_noise_of_the_data_is_the_reference_on_other_tokens():
    others = tokens_of(batch=2, seed=7)
    rows = gradient_errors(CONFIG, STATE, tokens_of(), [], reference="bf16", other_tokens_BS1=others, device="cpu")
    assert {row.recipe for row in rows} == {ANOTHER_BATCH}
    got, want = raw("bf16", others)[0], raw("bf16")[0]
    for row in rows:
        assert_figures(row, figures(vector(got, row.group, row.layer), vector(want, row.group, row.layer)))
        assert math.isnan(row.differing_choices)


def test_draws_of_a_stochastic_recipe():
    """One draw: root mean square and means over draws. Their mean: its own error, never larger, and the same bias."""
    draws = 3
    rows = gradient_errors(CONFIG, STATE, tokens_of(), [STOCHASTIC], reference="bf16", num_draws=draws, device="cpu")
    want, want_chosen = raw("bf16")
    found = [raw(STOCHASTIC, seed=seed) for seed in range(draws)]
    mean = {name: np.mean([got[name] for got, _ in found], axis=0) for name in want}
    own = {(row.num_averaged, row.group, row.layer): row for row in rows if row.choices is Choices.OWN}
    for group, layer in {(group, layer) for _, group, layer in own}:
        r = vector(want, group, layer)
        each = np.array([figures(vector(got, group, layer), r) for got, _ in found])
        one, averaged = own[1, group, layer], own[draws, group, layer]
        assert_figures(one, (np.sqrt(np.mean(each[:, 0] ** 2)), *each[:, 1:].mean(0)))
        assert_figures(averaged, figures(vector(mean, group, layer), r))
        assert averaged.relative_error < one.relative_error
        assert averaged.bias == pytest.approx(one.bias, abs=1e-9)
        assert math.isnan(averaged.differing_choices)
    shares = [share_of_others(chosen, want_chosen) for _, chosen in found]
    assert own[1, Group.ALL, None].differing_choices == pytest.approx(np.mean(shares))


def test_averaging_draws_leaves_little_more_than_what_is_not_drawn():
    """With the reference's experts, MXFP4's unbiased part shrinks as 1 / sqrt(draws) towards the error of FP8."""
    rows = gradient_errors(CONFIG, STATE, tokens_of(), ["fp8", "mxfp4-stochastic"], num_draws=8, device="cpu")
    fp8, one, averaged = (
        row.relative_error
        for row in rows
        if row.choices is Choices.REFERENCE and row.group is row.group.ALL and row.layer is None
    )
    assert averaged**2 == pytest.approx(fp8**2 + (one**2 - fp8**2) / 8, rel=0.3)


def moments(seed=3):
    """Positive numbers of very different size, of the shape of every parameter; some zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in LanguageModel(CONFIG).named_parameters():
        v = (10 * torch.randn(weight.shape, generator=generator) - 20).exp()
        found[name] = torch.where(torch.rand(weight.shape, generator=generator) < 0.01, 0.0, v)
    return found


def steps(found, v, config=CONFIG):
    """AdamW's of clipped gradients, without momentum."""
    clipping = min(1, config.max_grad_norm / np.sqrt(sum((g**2).sum() for g in found.values())))
    clipped = {name: clipping * g for name, g in found.items()}
    return {
        name: g / (np.sqrt(config.beta2 * v[name].double().numpy() + (1 - config.beta2) * g**2) + 1e-8)
        for name, g in clipped.items()
    }


def test_preconditioned_errors_are_those_of_numpy():
    v = moments()
    rows = gradient_errors(CONFIG, STATE, tokens_of(), ["mxfp4"], reference="bf16", second_moments=v, device="cpu")
    norms = [np.sqrt(sum((g**2).sum() for g in raw(recipe)[0].values())) for recipe in ("bf16", "mxfp4")]
    assert min(norms) > CONFIG.max_grad_norm  # clipped
    want, got = (steps(raw(recipe)[0], v) for recipe in ("bf16", "mxfp4"))
    own = [row for row in rows if row.choices is Choices.OWN]
    for row in own:
        error, *_ = figures(vector(got, row.group, row.layer), vector(want, row.group, row.layer))
        assert row.preconditioned_error == pytest.approx(error, rel=1e-5)
    assert len({row.preconditioned_error for row in own} & {row.relative_error for row in own}) == 0
    without = gradient_errors(CONFIG, STATE, tokens_of(), ["mxfp4"], reference="bf16", device="cpu")
    assert all(math.isnan(row.preconditioned_error) for row in without)
    assert [row.relative_error for row in without] == [row.relative_error for row in rows]


def test_draws_have_the_root_mean_square_of_their_preconditioned_errors():
    v = moments()
    rows = gradient_errors(
        CONFIG, STATE, tokens_of(), [STOCHASTIC], reference="bf16", second_moments=v, num_draws=2, device="cpu"
    )
    found = [raw("bf16")[0], raw(STOCHASTIC, seed=0)[0], raw(STOCHASTIC, seed=1)[0]]
    found.append({name: (g + found[2][name]) / 2 for name, g in found[1].items()})
    r, *draws, mean = (vector(steps(gradients_of, v), Group.ALL, None) for gradients_of in found)
    errors = [figures(g, r)[0] for g in draws]
    one, averaged = (
        row.preconditioned_error
        for row in rows
        if (row.choices, row.group, row.layer) == (Choices.OWN, Group.ALL, None)
    )
    assert one == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-5)
    assert averaged == pytest.approx(figures(mean, r)[0], rel=1e-5)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, max_grad_norm=1e6)])
def test_what_is_preconditioned_is_what_adamw_adds_to_its_weights(config):
    """torch's AdamW without momentum, with the clipping of a training step, after very many steps."""
    v, gradient = moments(), raw(FP32, config=config)[0]
    ours = gradients._AdamW.of(LanguageModel(config), v, config)
    clipping = ours.clipping({name: torch.from_numpy(g) for name, g in gradient.items()})
    weights = {name: torch.nn.Parameter(torch.zeros_like(x, dtype=torch.float64)) for name, x in v.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1.0, betas=(0.0, config.beta2), eps=1e-8)
    for name, weight in weights.items():
        weight.grad = torch.from_numpy(gradient[name].copy())
        moment = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": v[name].double()}
        optimizer.state[weight] = {"step": torch.tensor(1e5), **moment}
    torch.nn.utils.clip_grad_norm_(weights.values(), config.max_grad_norm)
    optimizer.step()
    for name, weight in weights.items():
        got = ours.step(name, torch.from_numpy(gradient[name]) * clipping)
        torch.testing.assert_close(got, -weight.detach(), rtol=1e-6, atol=1e-9)


def test_a_token_that_training_never_met_does_not_decide_the_preconditioned_error():
    """Its row of the embedding has v = 0, and a gradient of the other tokens alone."""
    v = {name: torch.full_like(x, 1e-4) for name, x in moments().items()}
    v["embedding.weight"][7] = 0
    tokens, others = (torch.where(tokens_of(seed=seed) == 7, 8, tokens_of(seed=seed)) for seed in (0, 1))
    others[0, 0] = 7
    rows = gradient_errors(
        CONFIG, STATE, tokens, ["bf16"], other_tokens_BS1=others, second_moments=v, num_draws=1, device="cpu"
    )
    (noise,) = (row for row in rows if (row.recipe, row.group, row.layer) == (ANOTHER_BATCH, Group.ALL, None))
    assert 0.5 < noise.preconditioned_error < 2


def test_gradients_are_made_where_the_caller_wants_none():
    with torch.no_grad():
        rows = gradient_errors(CONFIG, STATE, tokens_of(batch=1), ["bf16"], device="cpu")
        assert not torch.is_grad_enabled()
    assert 0 < rows[0].relative_error < 0.1


def test_second_moments_are_the_checkpoints(trained):
    """By the rule of AdamW's parameter groups: matrices first, in the model's order, then vectors."""
    folder, text, config = trained
    state = load_checkpoint(folder, torch.device("cpu"), config, load_corpus(text).sha256)
    names = [name for name, _ in LanguageModel(config).named_parameters()]
    found = gradients.second_moments_of(config, state)
    assert list(found) == names
    order = [n for n in names if state["model"][n].ndim > 1] + [n for n in names if state["model"][n].ndim <= 1]
    for number, name in enumerate(order):
        want = state["optimizer"]["state"][number]["exp_avg_sq"] / (1 - 0.95**4)
        assert torch.equal(found[name], want)
        assert want.any()


def test_choices_of_the_reference_decide_who_gets_the_tokens():
    model = LanguageModel(replace(CONFIG, recipe="mxfp4"))
    model.load_state_dict(STATE)
    chosen = {layer: torch.tensor([[3, 0]]).repeat(48, 1) for layer in (1, 2)}
    result = gradients._pass(model, tokens_of(), chosen)
    for layer, moe in zip((1, 2), model.moe_layers(), strict=True):
        assert moe.group_sizes_E.tolist() == [48, 0, 0, 48]
        assert torch.equal(result.choices[layer], chosen[layer])
        is_used = [bool(g.any()) for g in result.gradients[f"blocks.{layer}.mlp.experts.w1"]]
        assert is_used == [True, False, False, True]
    after = gradients._pass(model, tokens_of())  # the routers' own again
    assert not torch.equal(after.choices[1], chosen[1])


def test_fixed_choices_do_not_differ():
    rows = gradient_errors(CONFIG, STATE, tokens_of(), ["mxfp4"], device="cpu")
    fixed = [row for row in rows if row.choices is Choices.REFERENCE]
    assert {row.differing_choices for row in fixed if row.layer != 0} == {0}
    own = [row for row in rows if row.choices is Choices.OWN]
    assert [row.relative_error for row in own] != [row.relative_error for row in fixed]


def test_parts_of_a_batch_give_the_gradient_of_the_whole(monkeypatch):
    """Parts of 2, 2 and 1 sequences; choices in the order of the tokens, also where they are replayed."""
    model = gradients._Fp32Model(CONFIG)
    model.load_state_dict(STATE)
    tokens = tokens_of(batch=5)
    whole = gradients._pass(model, tokens)
    monkeypatch.setattr(gradients, "_TOKENS_AT_ONCE", 2 * 16 + 1)
    sizes = []
    loss = model.loss
    monkeypatch.setattr(model, "loss", lambda part: sizes.append(len(part)) or loss(part))
    for replayed in (None, whole.choices):
        parts = gradients._pass(model, tokens, replayed)
        for name, gradient in whole.gradients.items():
            torch.testing.assert_close(parts.gradients[name], gradient, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(parts.choices[layer], ids) for layer, ids in whole.choices.items())
    assert sizes == [2, 2, 1] * 2


def test_a_rerun_gives_the_same_and_leaves_no_trace():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = gradient_errors(CONFIG, STATE, tokens_of(), [STOCHASTIC], num_draws=2, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(321)
    arrays = tokens_of().numpy().astype(np.uint8)
    arrays.flags.writeable = False
    second = gradient_errors(replace(CONFIG, recipe="fp8"), STATE, arrays, [STOCHASTIC], num_draws=2, device="cpu")
    assert repr(first) == repr(second)  # NaN is no equal of itself


def test_progress_counts_passes():
    seen = []
    gradient_errors(
        CONFIG,
        STATE,
        tokens_of(batch=1),
        ["bf16", "mxfp4-stochastic"],
        other_tokens_BS1=tokens_of(batch=1, seed=1),
        num_draws=2,
        device="cpu",
        progress=lambda *step: seen.append(step),
    )
    names = [FP32, ANOTHER_BATCH, *["bf16"] * 2, *["mxfp4-stochastic"] * 4]
    assert seen == [(i + 1, 8, name) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"recipes": ["mxfp5"]}, ConfigError, "recipe is 'mxfp5'"),
        ({"reference": "fp64"}, ValueError, "reference is 'fp64', needed one of fp32, bf16"),
        ({"reference": "mxfp4-stochastic"}, ValueError, "reference is 'mxfp4-stochastic'"),
        ({"recipes": "mxfp4"}, TypeError, "recipes is the string 'mxfp4'"),
        ({"num_draws": 0}, ValueError, "num_draws is 0"),
        ({"num_draws": 1.5}, ValueError, "num_draws is 1.5, needed an integer"),
        ({"num_draws": True}, ValueError, "num_draws is True"),
        ({"device": "tpu"}, ValueError, "device is 'tpu'"),
        ({"tokens_BS1": [[1, 2]]}, TypeError, "tokens_BS1 is a list"),
        ({"tokens_BS1": torch.zeros(2, 17)}, TypeError, "tokens_BS1 has dtype float32, needed integers"),
        ({"tokens_BS1": np.zeros((2, 17), bool)}, TypeError, "tokens_BS1 has dtype bool"),
        ({"tokens_BS1": tokens_of(2, 18)}, ValueError, r"tokens_BS1 has shape \(2, 18\), .* 2 to 17 tokens"),
        ({"tokens_BS1": tokens_of(2, 1)}, ValueError, r"tokens_BS1 has shape \(2, 1\)"),
        ({"tokens_BS1": tokens_of(0)}, ValueError, r"tokens_BS1 has shape \(0, 17\)"),
        ({"tokens_BS1": tokens_of()[0]}, ValueError, r"tokens_BS1 has shape \(17,\)"),
        ({"other_tokens_BS1": tokens_of() // 256 + 256}, ValueError, "other_tokens_BS1 has tokens from 256 to 256"),
        ({"other_tokens_BS1": tokens_of() // 256 - 1}, ValueError, "other_tokens_BS1 has tokens from -1 to"),
        ({"second_moments": {}}, ValueError, "second_moments has nothing for embedding.weight"),
        ({"second_moments": moments() | {"norm.weight": torch.ones(3)}}, ValueError, r"norm.weight has shape \(3,\)"),
        ({"second_moments": moments() | {"norm.weight": -STATE["norm.weight"]}}, ValueError, "holds negative or inf"),
        ({"second_moments": moments() | {"norm.weight": math.nan * STATE["norm.weight"]}}, ValueError, "or NaN"),
        ({"second_moments": moments() | {"norm.weight": torch.full((128,), math.inf)}}, ValueError, "or infinite"),
        ({"second_moments": moments() | {"norm.weight": np.ones(128)}}, TypeError, "norm.weight is no tensor"),
        (
            {"second_moments": moments() | {"norm.weight": torch.ones(128).long()}},
            TypeError,
            "norm.weight is no tensor",
        ),
        ({"state": {}}, ValueError, "state is not of this configuration"),
        ({"state": STATE | {"norm.weight": STATE["norm.weight"] * math.nan}}, ValueError, "fp32 is not finite"),
    ],
)
def test_bad_input_is_named(change, kind, says):
    given = {"config": CONFIG, "state": STATE, "tokens_BS1": tokens_of(), "recipes": ["bf16"], "device": "cpu"}
    with pytest.raises(kind, match=says) as raised:
        gradient_errors(**given | change)
    assert "\n" not in str(raised.value)


@pytest.mark.gpu
def test_cuda_repeats_its_bits_and_has_the_cpus_reference():
    given = {"recipes": ["bf16", "fp8", STOCHASTIC], "other_tokens_BS1": tokens_of(seed=1), "num_draws": 2}
    first, second = (gradient_errors(CONFIG, STATE, tokens_of(), device="cuda", **given) for _ in range(2))
    assert repr(first) == repr(second)
    on_cpu = gradient_errors(CONFIG, STATE, tokens_of(), device="cpu", **given)
    for got, want in zip(first, on_cpu, strict=True):
        assert (got.recipe, got.choices, got.group, got.layer) == (want.recipe, want.choices, want.group, want.layer)
        if got.recipe == ANOTHER_BATCH:  # FP32 alone
            figures_of = [(row.relative_error, row.cosine, row.bias) for row in (got, want)]
            assert figures_of[0] == pytest.approx(figures_of[1], abs=1e-3)
        elif got.group is Group.ALL:
            assert got.relative_error == pytest.approx(want.relative_error, rel=0.5)


# ---------------------------------------------------------------------------------------------------------- the script
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of a run with a checkpoint, its text, its configuration)."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_bytes(words(70_000).tobytes())
    config = small("bf16", "checkpoint_every=4", steps=4)
    run(config, folder / "run", corpus=load_corpus(folder / "text.txt"))
    return folder / "run", folder / "text.txt", config


def arguments(trained, *more):
    return ["--checkpoint", str(trained[0]), "--corpus", str(trained[1]), "--device", "cpu", *map(str, more)]


def test_the_script_measures_a_checkpoint_on_the_batches_after_it(trained, tmp_path):
    """Six sequences of batches of four: steps 5 and 6, and 7 and 8 for the noise."""
    folder, text, config = trained
    out = tmp_path / "out.json"
    recipes = ["bf16", "mxfp4-stochastic"]
    given = arguments(trained, "--json", out, "--tokens", 161, "--draws", 2, "--recipes", *recipes)
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as here: other sums otherwise
    done = subprocess.run([sys.executable, SCRIPT, *given], capture_output=True, text=True, check=True, env=one_thread)
    assert "Gradient of all parameters against fp32" in done.stdout
    assert done.stderr == ""
    document = json.loads(out.read_text())
    corpus = load_corpus(text)
    windows = Windows(corpus, config)
    tokens, others = (np.concatenate([windows.batch(s) for s in steps])[:6] for steps in ((5, 6), (7, 8)))
    state = load_checkpoint(folder, torch.device("cpu"), config, corpus.sha256)
    want = gradient_errors(
        config,
        state["model"],
        tokens,
        recipes,
        other_tokens_BS1=others,
        second_moments=gradients.second_moments_of(config, state),
        num_draws=2,
        device="cpu",
    )
    cells = [{key: None if value != value else value for key, value in vars(row).items()} for row in want]
    assert document["rows"] == cells
    assert (document["steps"], document["other_steps"], document["checkpoint_step"]) == ([5, 6], [7, 8], 4)
    assert (document["num_tokens"], document["num_draws"], document["reference"]) == (192, 2, FP32)
    assert document["corpus"]["sha256"] == corpus.sha256
    assert document["config"]["recipe"] == "bf16"
    assert len(document["provenance"]["sources_sha256"]) == 64
    for row in want:
        if row.group is Group.ALL and row.layer is None and row.choices is Choices.OWN:
            (line,) = [
                line
                for line in done.stdout.partition("by group")[0].splitlines()
                if line.startswith(row.recipe) and f" {100 * row.relative_error:.2f} " in line
            ]
            assert f"{row.cosine:.5f}" in line
            assert f" {100 * row.preconditioned_error:.2f} " in line


def script():
    spec = importlib.util.spec_from_file_location("gradient_error", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fails(capsys, monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["gradient_error.py", *given])
    with pytest.raises(SystemExit) as ended:
        script().main()
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("gradient_error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--recipes", "mxfp5"], "unknown recipe 'mxfp5'; did you mean mxfp4?"),
        (["--reference", "fp64"], "reference is 'fp64'"),
        (["--tokens", "0"], "--tokens is 0, needed 1 to 53616"),
        (["--tokens", "99999999999999"], "--tokens is 99999999999999, needed 1 to 53616"),
        (["--draws", "0"], "num_draws is 0"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--corpus", "missing.txt"], "cannot read the corpus missing.txt"),
        (["--checkpoint", "nowhere"], "nowhere holds no run"),
        (["--json", "nowhere/out.json"], "nowhere/out.json: No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(trained, more, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    assert says in fails(capsys, monkeypatch, arguments(trained, "--json", out, *more))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_one_line_and_no_file(trained, capsys, monkeypatch, tmp_path):
    module, out = script(), tmp_path / "out.json"
    monkeypatch.setattr(module, "gradient_errors", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", ["gradient_error.py", *arguments(trained, "--json", out)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "gradient_error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_measured_is_one_line(trained, capsys, monkeypatch, tmp_path):
    folder, text, _ = trained
    config = small("bf16", "num_layers=1", steps=2)
    run(config, tmp_path / "run", corpus=load_corpus(text))
    given = ["--corpus", str(text), "--device", "cpu", "--checkpoint", str(tmp_path / "run")]
    assert "holds no checkpoint.pt" in fails(capsys, monkeypatch, given)
    document = json.loads((tmp_path / "run/run.json").read_text())
    document["config"]["colour"] = "red"
    (tmp_path / "run/run.json").write_text(json.dumps(document))
    assert "another version of mxsim" in fails(capsys, monkeypatch, given)
    other = ["--checkpoint", str(folder), "--device", "cpu"]  # the default text is another
    assert "another text" in fails(capsys, monkeypatch, other)


def test_all_recipes_are_the_default():
    assert script().parser().get_default("recipes") == list(RECIPES)
