"""Routing: who gets how many rows."""

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench.moe.workload import FULL, TINY, LayerShape, Routing, expert_ids, make_tokens, make_weights  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [FULL, TINY])
@pytest.mark.parametrize("routing", Routing)
def test_a_token_goes_to_different_experts_and_a_rerun_is_the_same(routing, shape):
    ids = expert_ids(routing, shape)
    assert ids.shape == (shape.tokens, shape.top_k)
    assert all(len(set(row)) == shape.top_k for row in ids.tolist())
    assert torch.equal(ids, expert_ids(routing, shape))


def _sizes(routing, shape):
    return torch.bincount(expert_ids(routing, shape).flatten(), minlength=shape.num_experts).tolist()


def test_balanced_gives_every_expert_as_many_rows():
    assert _sizes(Routing.BALANCED, FULL) == [1024] * 32
    assert _sizes(Routing.BALANCED, TINY) == [16] * 8


def test_skewed_leaves_no_expert_empty_and_gives_some_many_times_as_much():
    sizes = sorted(_sizes(Routing.SKEWED, FULL))
    assert sum(sizes) == FULL.rows
    assert sizes[0] > 0
    assert sizes[-1] > 8 * sizes[0]
    assert sizes[-1] <= FULL.tokens


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="4 rows are too few for 8 experts"):
        expert_ids(Routing.SKEWED, LayerShape(tokens=4, hidden=128, intermediate=128, num_experts=8, top_k=1))


def test_draws_have_the_weights_of_their_ranks():
    """One choice a token: the share of rank r is 1/r over the sum of all."""
    shape = LayerShape(tokens=20000, hidden=128, intermediate=128, num_experts=4, top_k=1)
    shares = sorted((n / shape.tokens for n in _sizes(Routing.SKEWED, shape)), reverse=True)
    for share, wanted in zip(shares, (12 / 25, 6 / 25, 4 / 25, 3 / 25), strict=True):
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / shape.tokens) ** 0.5


@pytest.mark.parametrize("shape, empty", [(FULL, 8), (TINY, 2)])
def test_a_quarter_of_the_experts_is_empty(shape, empty):
    assert sum(size == 0 for size in _sizes(Routing.EMPTY, shape)) == empty


def test_tokens_and_weights_have_the_shapes_of_the_layer():
    tokens = make_tokens(Routing.SKEWED, TINY, CPU)
    assert tokens.x_TH.shape == tokens.dy_TH.shape == (64, 256)
    assert tokens.groups.sizes == tuple(tokens.sizes_E.tolist()) == tuple(_sizes(Routing.SKEWED, TINY))
    per_token = torch.zeros(64).index_add(0, tokens.permutation.row_token_R, tokens.probs_R.detach())
    assert torch.allclose(per_token, torch.ones(64))
    w1, w2 = make_weights(TINY, CPU)
    assert (w1.shape, w2.shape) == ((8, 256, 256), (8, 256, 128))
    assert w1.abs().max() <= 1 / 16
    assert w2.abs().max() > 1 / 16
