"""Groups: sums, paddings and refusals."""

import pytest

torch = pytest.importorskip("torch")

from mxsim.moe.groups import Groups, Span  # noqa: E402

CPU = torch.device("cpu")


def test_an_example():
    groups = Groups((5, 0, 3), CPU)
    assert (groups.num_rows, groups.num_groups, groups.offsets) == (8, 3, (0, 5, 5))
    assert groups.padded(4) == (8, 0, 4)
    assert groups.padded_rows(4) == 12
    assert groups.spans(4) == [Span(0, 0, 5, 0, 8), Span(2, 5, 3, 8, 4)]
    assert groups.spans(128) == [Span(0, 0, 5, 0, 128), Span(2, 5, 3, 128, 128)]
    assert groups.ends.dtype is torch.int32
    assert groups.ends.tolist() == [5, 5, 8]


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0)], ids=str)
def test_nothing(sizes):
    groups = Groups(sizes, CPU)
    assert (groups.num_rows, groups.padded_rows(128), groups.spans(4)) == (0, 0, [])
    assert groups.offsets == groups.padded(4) == (0,) * len(sizes)
    assert groups.ends.tolist() == [0] * len(sizes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_from_tensor(dtype):
    groups = Groups.from_tensor(torch.tensor([2, 0, 7], dtype=dtype), 9)
    assert groups == Groups((2, 0, 7), CPU)
    assert all(type(n) is int for n in groups.sizes)


def test_ends_are_made_once_and_where_they_are_wanted():
    groups = Groups.from_tensor(torch.tensor([1, 2]), 3, device=torch.device("meta"))
    assert groups.ends.device.type == "meta"
    assert groups.ends is groups.ends


def test_numpy_integers_become_python_ones():
    import numpy as np

    assert all(type(n) is int for n in Groups(tuple(np.array([1, 2])), CPU).sizes)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match=r"sizes holds -1, needed sizes of 0 or more"):
        Groups((3, -1), CPU)
    with pytest.raises(TypeError, match=r"sizes is \(1\.5,\), needed integers"):
        Groups((1.5,), CPU)
    with pytest.raises(TypeError, match=r"sizes has dtype torch\.float32, needed integers"):
        Groups.from_tensor(torch.zeros(2), 0)
    with pytest.raises(TypeError, match=r"sizes is a list"):
        Groups.from_tensor([1, 2], 3)
    with pytest.raises(ValueError, match=r"sizes has 2 axes, needed 1"):
        Groups.from_tensor(torch.ones(1, 1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"sizes sum to 5, needed 6, the rows"):
        Groups.from_tensor(torch.tensor([2, 3]), 6)
    with pytest.raises(ValueError, match=r"sizes holds -1"):
        Groups.from_tensor(torch.tensor([7, -1]), 6)
