"""Moving rows: what travels is every byte, whatever the dtypes, widths and places in memory."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from mxsim.moe import dispatch  # noqa: E402
from mxsim.moe.dispatch import Route  # noqa: E402


def integers(shape, dtype, seed=0):
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("num_columns", [1, 28, 448, 1792])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_the_interpreted_kernel_moves_rows(interpreted, dtype, num_columns, scatter):
    """Into and out of the columns of a wider matrix; nothing beside them is touched."""
    from mxsim.moe.triton_move_rows import move_rows

    source = integers((7, num_columns + 5), dtype)[:, 2 : 2 + num_columns]
    wide = integers((7, num_columns + 9), dtype, seed=1)
    index = torch.tensor([3, 0, 6, 1, 5, 2, 4]) if scatter else torch.tensor([3, 3, 0, 6, 1, 6, 2])
    want = wide.clone()
    if scatter:
        want[index, 4 : 4 + num_columns] = source
    else:
        want[:, 4 : 4 + num_columns] = source[index]
    move_rows(source, wide[:, 4 : 4 + num_columns], index, scatter=scatter)
    assert torch.equal(wide, want)


def test_no_rows_and_no_columns_are_moved(interpreted):
    from mxsim.moe.triton_move_rows import move_rows

    for shape in ((0, 5), (3, 0)):
        x = torch.zeros(shape, dtype=torch.int32)
        move_rows(x, x.clone(), torch.arange(shape[0]), scatter=False)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


PARTS = {
    "bytes beside floats": (partial(integers, (9, 20), torch.uint8), lambda: torch.rand(9, 3)),
    "an odd number of bytes": (partial(integers, (9, 5), torch.uint8),),
    "2 bytes an element, an odd number": (lambda: torch.rand(9, 7).bfloat16(),),
    "columns before rows": (lambda: torch.rand(6, 9).t(), lambda: torch.rand(9, 4).to(torch.float8_e4m3fn)),
    "not aligned": (lambda: torch.rand(9 * 8 + 1).bfloat16()[1:].view(9, 8),),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("num_chunks", [1, 2, 20])
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_rows_reach_their_experts_and_come_back(make, num_chunks):
    parts = [part() for part in make]
    ids = torch.tensor([[t % 4, (t + 1 + t // 4) % 4] for t in range(9)])
    route = Route.plan(ids, 4, num_chunks=num_chunks)
    assert route.sizes_L.tolist() == torch.bincount(ids.flatten()).tolist()
    assert route.rows_to_others() == 0
    tokens = [t for e in range(4) for t in range(9) if e in ids[t].tolist()]
    arrived = route.to_experts(lambda rows: [part[rows] for part in parts])
    for got, part in zip(arrived, parts, strict=True):
        assert got.dtype == part.dtype
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), part.contiguous().view(torch.uint8)[tokens])
    (first, *_) = arrived
    back = route.to_tokens(first)
    assert torch.equal(back.view(torch.uint8), parts[0].contiguous().view(torch.uint8)[route.permutation.row_token_R])
    numbers = torch.rand(18)
    assert torch.equal(route.weights_to_tokens(route.weights_to_experts(numbers)), numbers)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("num_chunks", [0, 1.5, True])
def test_number_of_chunks(num_chunks):
    with pytest.raises(ValueError, match="num_chunks is"):
        Route.plan(torch.zeros(2, 1, dtype=torch.int64), 4, num_chunks=num_chunks)


def test_a_process_outside_of_the_group(monkeypatch):
    monkeypatch.setattr(dispatch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dispatch.dist, "get_rank", lambda group: -1)
    with pytest.raises(RuntimeError, match="not in process_group"):
        dispatch.rank_and_size(None)
