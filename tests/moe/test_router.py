"""Routing: a float64 and NumPy account of every choice, ties by index, gradients, and the balancing bias."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim.moe.router import Router, TopKRouter  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
E, H, K = 16, 24, 3
GROUPS = {"num_groups": 4, "top_groups": 2}


@pytest.fixture(autouse=True)
def _same_numbers_whichever_tests_run():
    GENERATOR.manual_seed(0)


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, H, generator=GENERATOR, dtype=torch.float64)


def router(**options) -> TopKRouter:
    torch.manual_seed(1)
    return TopKRouter(H, options.pop("num_experts", E), options.pop("top_k", K), **options)


def passing(scores_E) -> tuple[TopKRouter, torch.Tensor]:
    """A sigmoid router with one expert a column, and the one token that gives it these scores."""
    logits = torch.tensor([scores_E], dtype=torch.float64).logit()
    r = TopKRouter(len(scores_E), len(scores_E), 2)
    with torch.no_grad():
        r.weight.copy_(torch.eye(len(scores_E)))
    return r, logits.float()


def expected(r: TopKRouter, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) from loops over float64 scores."""
    logits = x.double().numpy() @ r.weight.detach().double().numpy().T
    if r.router is Router.SOFTMAX:
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    bias = np.zeros(r.num_experts) if r.bias is None else r.bias.double().numpy()
    all_ids, all_weights = [], []
    for row in scores:
        allowed = set(range(r.num_experts))
        if r.num_groups is not None:
            size = r.num_experts // r.num_groups
            groups = [range(g * size, (g + 1) * size) for g in range(r.num_groups)]
            value = [sum(sorted(row[e] + bias[e] for e in group)[-2:]) for group in groups]
            best = sorted(range(r.num_groups), key=lambda g: (-value[g], g))[: r.top_groups]
            allowed = {e for g in best for e in groups[g]}
        ids = sorted(allowed, key=lambda e: (-(row[e] + bias[e]), e))[: r.top_k]
        weights = row[ids] / row[ids].sum() if r.normalize else row[ids]
        all_ids.append(ids)
        all_weights.append(weights * r.scaling_factor)
    return np.array(all_ids), np.array(all_weights)


OPTIONS = [
    {"router": Router.SOFTMAX},
    {"router": Router.SOFTMAX, "normalize": False, "scaling_factor": 2.0},
    {"router": Router.SIGMOID},
    {"router": Router.SIGMOID, "normalize": False},
    {"router": Router.SIGMOID, "scaling_factor": 2.5, **GROUPS},
    {"router": Router.SIGMOID, "num_groups": 16, "top_groups": 3},
    {"router": Router.SIGMOID, "top_k": 16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_choices_and_weights_are_those_of_float64(options, dtype):
    r = router(**options)
    if r.bias is not None:
        r.bias.copy_(torch.randn(E, generator=GENERATOR) / 4)
    x = tokens().to(dtype)
    got = r(x)
    ids, weights = expected(r, x)
    assert got.topk_ids_TK.tolist() == ids.tolist()
    assert got.topk_weights_TK.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(got.topk_weights_TK.detach().numpy(), weights, rtol=2e-5)


def test_a_worked_example():
    r, x = passing([0.5, 0.25, 0.75, 0.125])
    got = r(x)
    assert got.topk_ids_TK.tolist() == [[2, 0]]
    torch.testing.assert_close(got.topk_weights_TK, torch.tensor([[0.6, 0.4]]))
    torch.testing.assert_close(got.scores_TE, torch.tensor([[0.5, 0.25, 0.75, 0.125]]))


def test_the_bias_moves_the_choice_and_leaves_the_weights():
    r, x = passing([0.5, 0.25, 0.75, 0.125])
    r.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    got = r(x)
    assert got.topk_ids_TK.tolist() == [[3, 2]]
    torch.testing.assert_close(got.topk_weights_TK, torch.tensor([[0.125, 0.75]]) / 0.875)


def test_groups_are_ranked_by_their_two_best():
    """Group 0 has the best expert, group 1 the best two."""
    r, x = passing([0.9, 0.1, 0.1, 0.6, 0.5, 0.1])
    r.num_groups, r.top_groups = 2, 1
    for bias in (0.0, -5.0):
        r.bias.fill_(bias)
        assert r(x).topk_ids_TK.tolist() == [[3, 4]]


@pytest.mark.parametrize("options", [{"router": Router.SOFTMAX}, {}, GROUPS, {"num_experts": 256}], ids=str)
def test_ties_go_to_the_lower_index(options):
    r = router(**options)
    torch.nn.init.zeros_(r.weight)
    assert r(tokens(3)).topk_ids_TK.tolist() == [[0, 1, 2]] * 3


def test_scores_that_are_all_zero_give_weights_of_zero():
    r, _ = passing([0.5, 0.5, 0.5])
    got = r(torch.full((1, 3), -200.0))
    assert (got.topk_ids_TK.tolist(), got.topk_weights_TK.tolist()) == ([[0, 1]], [[0.0, 0.0]])


@pytest.mark.parametrize("options", [{"router": Router.SOFTMAX}, {}, GROUPS], ids=str)
def test_a_nan_stays_visible(options):
    r = router(**options)
    x = tokens(3)
    x[1, 5] = torch.nan
    got = r(x)
    assert got.topk_weights_TK.isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]
    assert got.topk_ids_TK[1].tolist() == [0, 1, 2]
    with torch.no_grad():
        r.weight[9] = torch.nan
    got = r(tokens(4))
    assert got.topk_weights_TK.isnan().all()
    if r.router is Router.SIGMOID:
        assert got.topk_ids_TK[:, 0].tolist() == [9] * 4


def test_no_tokens():
    got = router(**GROUPS)(torch.empty(0, H))
    assert [x.shape for x in got] == [(0, K), (0, K), (0, E)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_flow_through_the_weights(options):
    r = router(dtype=torch.float64, **options)
    x = tokens(4).requires_grad_()

    def weights(x, weight):
        return torch.func.functional_call(r, {"weight": weight}, (x,)).topk_weights_TK

    assert torch.autograd.gradcheck(weights, (x, r.weight), fast_mode=True)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_what_is_kept_of_the_tokens_is_the_tokens(weight_dtype, is_autocast):
    """No float32 copy; and the gradients have the bits of the plain expression, autocast or not."""
    r, x = router(), tokens().bfloat16().requires_grad_()
    r.weight.data = r.weight.data.to(weight_dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        routing = r(x)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)
    assert all(t.data_ptr() == x.data_ptr() for t in kept if t.shape == x.shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        got = torch.autograd.grad(routing.scores_TE.square().sum(), (x, r.weight))
    scores_TE = (x.float() @ r.weight.float().t()).sigmoid()
    assert torch.equal(routing.scores_TE, scores_TE)
    for mine, want in zip(got, torch.autograd.grad(scores_TE.square().sum(), (x, r.weight)), strict=True):
        assert torch.equal(mine, want)


def test_float32_inside_autocast():
    r = router()
    x = tokens().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = r(x)
    for a, b in zip(inside, r(x), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- balancing
def test_the_bias_takes_one_step_against_the_load():
    r = router(num_experts=4, bias_update_speed=0.25)
    r.update_bias(torch.tensor([10, 4, 4, 0]))  # mean 4.5
    r.update_bias(torch.tensor([5, 5, 5, 5]))
    assert r.bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    r.update_bias(torch.tensor([2**40 + 1, 2**40, 2**40, 2**40 - 1]))  # equal in float32
    assert r.bias.tolist() == [-0.5, 0.25, 0.25, 0.5]
    r.update_bias(torch.zeros(4, dtype=torch.int64))
    assert r.bias.tolist() == [-0.5, 0.25, 0.25, 0.5]


def test_updates_balance_a_skewed_load():
    r = router(bias_update_speed=0.005)
    with torch.no_grad():
        r.weight[:4] += 0.05
    x = tokens(512).float() + 1.0

    def load() -> torch.Tensor:
        return torch.bincount(r(x).topk_ids_TK.flatten(), minlength=E)

    before = load()
    for _ in range(100):
        r.update_bias(load())
    assert before.max() > 3 * before.float().mean()
    assert load().max() < 1.3 * before.float().mean()


def test_the_bias_is_saved_and_stays_float32():
    r = router()
    r.update_bias(torch.arange(E))
    assert set(r.state_dict()) == {"weight", "bias"}
    other = router()
    other.load_state_dict(r.state_dict())
    assert torch.equal(other.bias, r.bias)
    assert r.bias.any()
    assert torch.equal(other.bfloat16().bias, r.bias)
    assert other.weight.dtype == torch.bfloat16
    assert other.bias.dtype == torch.float32
    assert set(router(router=Router.SOFTMAX).state_dict()) == {"weight"}


def test_a_router_made_without_memory():
    r = router(device="meta").to_empty(device="cpu")
    r.reset_parameters()
    assert r(tokens(2)).topk_ids_TK.shape == (2, K)
    assert r.bias.tolist() == [0.0] * E


def test_torch_compile_takes_it_whole():
    r = router(**GROUPS)
    x = tokens().float()
    for a, b in zip(r(x), torch.compile(r, backend="aot_eager", fullgraph=True)(x), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"router": "sigmoid"}, TypeError, "router is 'sigmoid'"),
        ({"top_k": 0}, ValueError, "top_k is 0, needed 1 to 16"),
        ({"top_k": 17}, ValueError, "top_k is 17"),
        ({"num_groups": 4}, ValueError, "top_groups None, needed both"),
        ({"num_groups": 5, "top_groups": 2}, ValueError, "num_groups is 5, needed a divisor of 16"),
        ({"num_groups": 4, "top_groups": 5}, ValueError, "top_groups is 5, needed 1 to 4"),
        ({"num_groups": 8, "top_groups": 1}, ValueError, "top_groups is 1, needed groups with 3 experts"),
        ({"router": Router.SOFTMAX, **GROUPS}, ValueError, "needed Router.SIGMOID or no groups"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        router(**options)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: router()(torch.zeros(2, H + 1)), ValueError, r"x has shape \(2, 25\), needed rows of 24"),
        (lambda: router()(torch.zeros(H)), ValueError, r"x has shape \(24,\)"),
        (lambda: router()(torch.zeros((2, H), dtype=torch.int64)), TypeError, "x has dtype torch.int64"),
        (lambda: router().update_bias(torch.zeros(E)), TypeError, "counts has dtype torch.float32"),
        (lambda: router().update_bias(torch.zeros(3, dtype=torch.int64)), ValueError, r"counts has shape \(3,\)"),
        (lambda: router(router=Router.SOFTMAX).update_bias(torch.arange(E)), ValueError, "needed Router.SIGMOID"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ties_on_cuda_go_to_the_lower_index(options):
    """Scores of few values tie often; the CPU chooses the same experts of the same scores."""
    r = router(**{"num_experts": 256} | options)
    x = torch.randint(-1, 2, (200, H), generator=GENERATOR).float()
    with torch.no_grad():
        r.weight.copy_(torch.randint(-1, 2, r.weight.shape, generator=GENERATOR) / 4)
    cpu = r(x)
    r.cuda()
    cuda = r(x.cuda())
    assert torch.equal(r._choose(cpu.scores_TE.cuda()).cpu(), cpu.topk_ids_TK)
    torch.testing.assert_close(cuda.scores_TE.cpu(), cpu.scores_TE)
