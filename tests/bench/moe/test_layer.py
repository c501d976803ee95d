"""What the layer keeps, to the byte, and how wrong results are noticed."""

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench.moe.layer import Layer, check_against_bf16, relative_error, saved_activations  # noqa: E402
from mxsim.bench.moe.workload import TINY, LayerShape, Routing, make_tokens, make_weights  # noqa: E402
from mxsim.moe import MoE, Recipe  # noqa: E402
from mxsim.moe import Routing as Choice  # noqa: E402
from mxsim.moe import weights as weights_of_moe  # noqa: E402

CPU = torch.device("cpu")
R, H, F, E = TINY.rows, TINY.hidden, TINY.intermediate, TINY.num_experts


@pytest.fixture(scope="module")
def tokens():
    return make_tokens(Routing.BALANCED, TINY, CPU)


@pytest.fixture(scope="module")
def weights():
    return make_weights(TINY, CPU)


@pytest.mark.parametrize(
    "recipe, num_bytes",
    [
        (Recipe.BF16, R * 2 * (H + 2 * F + F)),
        # 16 rows an expert are padded to columns of 128, each with a float32 scale; the SwiGLU input stays BF16
        (Recipe.FP8, E * (128 + 4) * (H + F) + R * 2 * 2 * F),
        (Recipe.MXFP4, R * (H + 2 * F + F) * 17 // 32),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_bytes_kept_are_those_of_three_activations(recipe, num_bytes, tokens, weights):
    saved = saved_activations(Layer(recipe, TINY, weights), tokens)
    assert sum(s.num_bytes for s in saved) == num_bytes


def test_a_storage_counts_once_and_indices_do_not(tokens, weights):
    saved = saved_activations(Layer(Recipe.BF16, TINY, weights), tokens)
    assert [(s.dtype, s.shape) for s in saved] == [
        ("bfloat16", (R, H)),
        ("bfloat16", (R, 2 * F)),
        ("bfloat16", (R, F)),
    ]


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=lambda r: r.name)
def test_it_computes_what_the_moe_layer_computes(recipe, tokens, weights):
    """With the router's choice given to it."""
    model = MoE(H, F, E, TINY.top_k, recipe=recipe, dtype=torch.bfloat16)
    model.experts.w1, model.experts.w2 = weights
    row_of = tokens.permutation.row_of_TK
    row_expert = torch.arange(E).repeat_interleave(tokens.sizes_E)

    class Given(torch.nn.Module):
        def forward(self, x):
            return Choice(row_expert[row_of], tokens.probs_R[row_of], None)

    model.router = Given()
    y = Layer(recipe, TINY, weights).forward(tokens.x_TH, tokens)
    assert torch.equal(model(tokens.x_TH), y)


def test_weights_inside_are_made_at_every_step(tokens, weights, monkeypatch):
    made = []
    right = weights_of_moe.quantize_weight
    monkeypatch.setattr(weights_of_moe, "quantize_weight", lambda w: made.append(w) or right(w))
    outside = Layer(Recipe.FP8, TINY, weights)
    inside = Layer(Recipe.FP8, TINY, weights, weights_inside=True)
    assert len(made) == 2
    outside.step(tokens)
    assert len(made) == 2
    inside.step(tokens)
    inside.step(tokens)
    assert len(made) == 6
    assert (outside.name, inside.name) == ("FP8", "FP8, weights inside")


def test_relative_error_by_hand():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    matrices = torch.ones(2, 3, 4)
    assert relative_error(2 * matrices, matrices) == 1.0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3.0])
def test_a_wrong_element_that_matters_is_a_problem(wrong, tokens, weights):
    layer = Layer(Recipe.MXFP4, TINY, weights)
    bf16 = [torch.ones(4) for _ in range(5)]
    assert check_against_bf16(layer, bf16, bf16).problem == ""
    results = [*bf16[:3], torch.tensor([1.0, 1.0, wrong, 1.0]), bf16[4]]
    assert "dw1" in check_against_bf16(layer, results, bf16).problem


def test_the_bound_holds_for_a_wider_layer_too():
    shape = LayerShape(tokens=32, hidden=1024, intermediate=512, num_experts=4, top_k=2)
    tokens, weights = make_tokens(Routing.EMPTY, shape, CPU), make_weights(shape, CPU)
    bf16 = Layer(Recipe.BF16, shape, weights).step(tokens)
    for recipe in (Recipe.FP8, Recipe.MXFP4):
        layer = Layer(recipe, shape, weights)
        check = check_against_bf16(layer, layer.step(tokens), bf16)
        assert check.problem == ""
        assert max(check.errors.values()) > 0.3 * check.max_error  # and it is no empty bound
    assert list(check.errors) == ["y", "dx", "dprobs", "dw1", "dw2"]
