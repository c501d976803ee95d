"""The layout that DeepEP's dispatch takes, by the checks that it makes of its arguments."""

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.kernels import Fp4Rows  # noqa: E402
from mxsim.moe.deepep import from_deepep, to_deepep  # noqa: E402


def deepep_takes(pair):
    """The checks of intranode_dispatch, and how it reads scales: by element, with the strides given."""
    x, scales = pair
    assert isinstance(pair, tuple)
    assert x.dim() == 2
    assert x.is_contiguous()
    assert x.element_size() == 1
    assert x.shape[1] * x.element_size() % 16 == 0
    assert scales.dtype in (torch.float32, torch.int32)
    assert scales.dim() == 2
    assert scales.shape[0] == x.shape[0]


def rows_of(num_rows, num_columns):
    x = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    return kernels.bf16_to_fp4_row(x)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("num_columns", [128, 384, 7168])
def test_rows_travel_as_deepep_takes_them(num_rows, num_columns):
    rows = rows_of(num_rows, num_columns)
    pair = to_deepep(rows)
    deepep_takes(pair)
    codes, scales = pair
    assert codes.shape == (num_rows, num_columns // 2)
    assert scales.shape == (num_rows, num_columns // 128)
    assert codes.data_ptr() == rows.codes.data_ptr()
    order = torch.arange(num_rows).flip(0)  # what a dispatch does: it copies rows
    got = from_deepep((codes[order], scales[order]))
    for mine, source in zip(got, rows, strict=True):
        assert mine.dtype is torch.uint8
        assert torch.equal(mine, source[order])


def test_an_int32_holds_the_four_scales_of_128_elements_the_first_lowest():
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    scales = torch.arange(1, 9, dtype=torch.uint8).view(1, 8)
    assert to_deepep(Fp4Rows(codes, scales))[1].tolist() == [[0x04030201, 0x08070605]]


def test_rows_that_are_not_contiguous_or_not_aligned_are_copied():
    rows = rows_of(6, 256)
    every_second = Fp4Rows(rows.codes[::2], rows.scales[::2])
    deepep_takes(to_deepep(every_second))
    assert torch.equal(from_deepep(to_deepep(every_second)).scales, rows.scales[::2])
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), rows.scales.flatten()])[1:].view(6, 8)
    assert torch.equal(to_deepep(Fp4Rows(rows.codes, shifted))[1], to_deepep(rows)[1])


def zeros(*shape, dtype=torch.uint8):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: to_deepep((zeros(2, 64, dtype=torch.int8), zeros(2, 4))), TypeError, "codes has dtype torch.int8"),
        (lambda: to_deepep((zeros(64), zeros(4))), ValueError, "codes has 1 axes"),
        (lambda: to_deepep((zeros(2, 48), zeros(2, 3))), ValueError, "96 elements a row, needed a multiple of 128"),
        (lambda: to_deepep((zeros(2, 64), zeros(2, 5))), ValueError, r"scales has shape \(2, 5\), needed \(2, 4\)"),
        (lambda: from_deepep((zeros(2, 64), zeros(2, 4))), TypeError, "needed uint8 and int32"),
        (lambda: from_deepep((zeros(2, 64), zeros(2, 2, dtype=torch.int32))), ValueError, r"scales \(2, 2\)"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
