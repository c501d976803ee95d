"""Shapes, dtypes and strides of the results, and every form of input that is accepted (NUMERICS 8 and 10)."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.blocks import FP8_128X128, quantize
from mxsim.kernels.layouts import max_column_blocks, max_row_units
from tests.kernels import cases
from tests.kernels.expected import Want, assert_bits_equal, assert_result, bits_of

pytestmark = pytest.mark.usefixtures("host_library")
X = cases.floats(260, 256)
FP4, FP8 = cases.fp4_rows(260, 256), cases.fp8_rows(260, 256)
SIZES = [100, 0, 33, 127]
FP8_DTYPE = torch.float8_e4m3fn
# name -> the op on its first tensor or two
ON_BF16 = {
    "bf16_to_fp4_row": kernels.bf16_to_fp4_row,
    "bf16_to_fp8_row": kernels.bf16_to_fp8_row,
    "bf16_to_fp8_row ragged": lambda x: kernels.bf16_to_fp8_row(x, group_sizes=SIZES),
    "bf16_to_fp8_col": kernels.bf16_to_fp8_col,
    "bf16_to_fp8_col ragged": lambda x: kernels.bf16_to_fp8_col(x, group_sizes=SIZES),
    "bf16_to_fp4_and_fp8_row": kernels.bf16_to_fp4_and_fp8_row,
    "bf16_to_fp4_and_fp8_row ragged": lambda x: kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=SIZES),
}
ON_FP4 = {
    "fp4_row_to_fp8_row": kernels.fp4_row_to_fp8_row,
    "fp4_row_to_fp8_row ragged": lambda c, s: kernels.fp4_row_to_fp8_row(c, s, group_sizes=SIZES),
    "fp4_row_to_fp8_col": kernels.fp4_row_to_fp8_col,
    "fp4_row_to_fp8_col ragged": lambda c, s: kernels.fp4_row_to_fp8_col(c, s, group_sizes=SIZES),
    "fp4_to_bf16": kernels.fp4_to_bf16,
}
ON_FP8 = {
    "fp8_row_to_fp4_row": kernels.fp8_row_to_fp4_row,
    "fp8_row_to_fp8_col": kernels.fp8_row_to_fp8_col,
    "fp8_row_to_fp8_col ragged": lambda c, s: kernels.fp8_row_to_fp8_col(c, s, group_sizes=SIZES),
    "fp8_row_to_ragged": lambda c, s: kernels.fp8_row_to_ragged(c, s, group_sizes=SIZES),
}
OPS = [
    *((name, op, (X,)) for name, op in ON_BF16.items()),
    *((name, op, FP4) for name, op in ON_FP4.items()),
    *((name, op, FP8) for name, op in ON_FP8.items()),
]
DENSE = [case for case in OPS if not case[0].endswith("ragged")]


def each(cases_: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op, inputs", [case[1:] for case in cases_], ids=[case[0] for case in cases_])


EACH_OP, EACH_DENSE_OP = each(OPS), each(DENSE)


def tensors_of(result) -> list[torch.Tensor]:
    """The tensors of a result, in order, nested tuples flattened."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result if part is not None for t in tensors_of(part)]


def assert_same(got, want) -> None:
    got, want = tensors_of(got), tensors_of(want)
    assert [(t.dtype, t.shape, t.stride()) for t in got] == [(t.dtype, t.shape, t.stride()) for t in want]
    for a, b in zip(got, want, strict=True):
        assert_bits_equal(a, bits_of(b), "same")


# ------------------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 130])
def test_FP4_rows_are_two_contiguous_byte_matrices(num_rows):
    got = kernels.bf16_to_fp4_row(X[:num_rows])
    assert type(got) is kernels.Fp4Rows
    assert (got.codes.dtype, got.codes.shape) == (torch.uint8, (num_rows, 128))
    assert (got.scales.dtype, got.scales.shape) == (torch.uint8, (num_rows, 8))
    assert got.codes.is_contiguous()
    assert got.scales.is_contiguous()
    assert got.codes.view(torch.float4_e2m1fn_x2).shape == (num_rows, 128)
    assert got.scales.view(torch.float8_e8m0fnu).shape == (num_rows, 8)
    assert got.scales.view(torch.int32).shape == (num_rows, 2)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 129, 260])
@pytest.mark.parametrize(
    "op",
    [
        lambda n: kernels.bf16_to_fp8_row(X[:n]),
        lambda n: kernels.fp4_row_to_fp8_row(FP4[0][:n], FP4[1][:n]),
        lambda n: kernels.bf16_to_fp4_and_fp8_row(X[:n])[1],
    ],
)
def test_FP8_rows_have_scales_down_the_columns(op, num_rows):
    got = op(num_rows)
    assert type(got) is kernels.Fp8Rows
    assert (got.codes.dtype, got.codes.shape, got.codes.stride()) == (FP8_DTYPE, (num_rows, 256), (256, 1))
    ceil4 = -(-num_rows // 4) * 4
    assert (got.scales.dtype, got.scales.shape, got.scales.stride()) == (torch.float32, (num_rows, 2), (1, ceil4))
    assert got.scales.untyped_storage().nbytes() == 4 * 2 * ceil4  # the last column is padded like the others
    assert type(kernels.fp8_row_to_fp4_row(*got)) is kernels.Fp4Rows  # one op's result is the next one's arguments


def test_ragged_FP8_rows_give_every_expert_its_matrix():
    dense = kernels.bf16_to_fp8_row(X)
    got = kernels.bf16_to_fp8_row(X, group_sizes=SIZES)
    assert (got.codes.shape, got.scales.shape) == ((264, 256), (264 * 2,))
    assert got.padded_group_sizes.tolist() == [100, 0, 36, 128]
    start = padded_start = 0
    for size, padded in zip(SIZES, got.padded_group_sizes.tolist(), strict=True):
        scales = got.scales[padded_start * 2 : (padded_start + padded) * 2].view(2, padded).t()
        assert padded == 0 or scales.stride() == (1, padded)
        assert_bits_equal(scales[:size], bits_of(dense.scales[start : start + size]), "scales")
        assert (scales[size:] == 1).all()
        codes = got.codes[padded_start : padded_start + padded].view(torch.uint8)
        assert_bits_equal(codes[:size], bits_of(dense.codes[start : start + size]), "codes")
        assert (codes[size:] == 0).all()
        start, padded_start = start + size, padded_start + padded


def test_ragged_FP8_columns_give_every_expert_its_matrix():
    got = kernels.bf16_to_fp8_col(X, group_sizes=SIZES)
    assert got.codes.shape == (256 * 384,)
    assert (got.scales.shape, got.scales.stride()) == ((3, 256), (256, 1))
    assert got.padded_group_sizes.tolist() == [128, 0, 128, 128]
    start = padded_start = 0
    for size, padded in zip(SIZES, got.padded_group_sizes.tolist(), strict=True):
        codes = got.codes[256 * padded_start : 256 * (padded_start + padded)].view(256, padded)
        dense = kernels.bf16_to_fp8_col(X[start : start + size])
        assert_bits_equal(codes, bits_of(dense.codes), "codes")
        assert_bits_equal(got.scales[padded_start // 128 :][: padded // 128], bits_of(dense.scales), "scales")
        start, padded_start = start + size, padded_start + padded


@pytest.mark.parametrize("n, k, stride", [(128, 512, 4), (300, 600, 8), (1, 1, 4), (256, 128, 4)])
def test_scales_of_tiles_are_what_scaled_mm_takes(n, k, stride):
    w = torch.ones(n, k, dtype=torch.bfloat16)
    got = kernels.bf16_to_fp8_tile(w)
    tiles_n, tiles_k = -(-n // 128), -(-k // 128)
    assert (got.scales.shape, got.scales.stride()) == ((tiles_n, tiles_k), (stride, 1))
    for_torch = got.scaled_mm_scales()
    assert (for_torch.shape, for_torch.stride()) == ((stride, tiles_n), (1, stride))
    assert for_torch.data_ptr() == got.scales.data_ptr()
    assert torch.equal(for_torch[:tiles_k], got.scales.t())
    assert (for_torch[tiles_k:] == 1).all()
    batch = kernels.bf16_to_fp8_tile(w.expand(2, 3, n, k))
    assert batch.codes.shape == (2, 3, n, k)
    assert batch.scales.stride() == (3 * tiles_n * stride, tiles_n * stride, stride, 1)
    assert torch.equal(kernels.Fp8Tiles(batch.codes[1, 2], batch.scales[1, 2]).scaled_mm_scales(), for_torch)


@pytest.mark.parametrize("multiple", [1, 4, 7, 128])
def test_bounds_suffice_for_any_sizes(multiple):
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(0, rng.integers(1, 300), rng.integers(0, 9))
        padded = int((-(-sizes // multiple)).sum())
        assert padded <= max_row_units(int(sizes.sum()), len(sizes), multiple)
        assert padded <= max_column_blocks(int(sizes.sum()), len(sizes), multiple)
    assert max_column_blocks(5 * 129, 5) == 10  # met with equality


# -------------------------------------------------------------------------------------------------------------- inputs
@EACH_OP
def test_leading_axes_are_flattened(op, inputs):
    assert_same(op(*(t.reshape(2, 5, 26, -1) for t in inputs)), op(*inputs))


@EACH_DENSE_OP
def test_one_axis_is_one_row(op, inputs):
    assert_same(op(*(t[3] for t in inputs)), op(*(t[3:4] for t in inputs)))


def spaced(t: torch.Tensor) -> torch.Tensor:
    """The same values with gaps in memory."""
    wide = torch.zeros(2 * t.shape[0], 3 * t.shape[1], dtype=t.dtype)
    wide[::2, ::3] = t
    return wide[::2, ::3]


@EACH_OP
@pytest.mark.parametrize(
    "view",
    [
        spaced,
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: spaced(t).reshape(2, 130, -1),
        lambda t: spaced(t.reshape(-1, 1))[:, 0].view(-1).reshape(260, -1),
    ],
    ids=["gaps", "transposed", "part of a row", "gaps and axes", "strided"],
)
def test_non_contiguous_inputs_give_the_same(op, inputs, view):
    viewed = [view(t) for t in inputs]
    assert all(torch.equal(bytes_of(v.reshape(t.shape)), bytes_of(t)) for v, t in zip(viewed, inputs, strict=True))
    assert_same(op(*viewed), op(*inputs))


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@EACH_OP
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_any_storage_offset_gives_the_same(op, inputs, offset):
    def moved(t: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(t.numel() + offset, dtype=t.dtype)
        view = buffer[offset:].view(t.shape)
        view.copy_(t)
        return view

    views = [moved(t) for t in inputs]
    assert all(v.storage_offset() == offset for v in views)
    assert_same(op(*views), op(*inputs))


@pytest.mark.parametrize("name", ON_FP4)
def test_float4_and_e8m0_views_give_the_same(name):
    codes, scales = FP4[0].view(torch.float4_e2m1fn_x2), FP4[1].view(torch.float8_e8m0fnu)
    assert_same(ON_FP4[name](codes, scales), ON_FP4[name](*FP4))
    assert_same(ON_FP4[name](codes.reshape(10, 26, -1), scales.reshape(10, 26, -1)), ON_FP4[name](*FP4))
    assert_same(ON_FP4[name](codes, FP4[1]), ON_FP4[name](*FP4))
    strided = spaced(FP4[0]).view(torch.float4_e2m1fn_x2), spaced(FP4[1]).view(torch.float8_e8m0fnu)
    assert_same(ON_FP4[name](*strided), ON_FP4[name](*FP4))


@pytest.mark.parametrize("name", ON_FP8)
def test_float8_views_give_the_same(name):
    codes, scales = FP8
    assert_same(ON_FP8[name](codes.view(FP8_DTYPE), scales), ON_FP8[name](codes, scales))
    assert_same(ON_FP8[name](spaced(codes).view(FP8_DTYPE), scales), ON_FP8[name](codes, scales))


@pytest.mark.parametrize("name", ON_FP8)
def test_scales_are_read_by_their_strides(name):
    codes, scales = FP8
    down_the_columns = torch.empty(2, 264).t()[:260].copy_(scales)
    assert down_the_columns.stride() == (1, 264)
    assert_same(ON_FP8[name](codes, down_the_columns), ON_FP8[name](codes, scales))
    one_for_all = torch.tensor(0.25).expand(260, 2)
    assert_same(ON_FP8[name](codes, one_for_all), ON_FP8[name](codes, one_for_all.contiguous()))


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        torch.tensor,
        lambda s: torch.tensor(s, dtype=torch.int32),
        lambda s: torch.tensor(s).repeat_interleave(2)[::2],
        np.array,
        lambda s: np.array(s, np.int32),
        lambda s: [np.int64(n) for n in s],
    ],
    ids=["tuple", "int64", "int32", "strided", "array", "int32 array", "numpy integers"],
)
def test_group_sizes_in_every_form(form):
    sizes = form(SIZES)
    assert_same(kernels.bf16_to_fp8_col(X, group_sizes=sizes), kernels.bf16_to_fp8_col(X, group_sizes=SIZES))
    assert_same(kernels.bf16_to_fp8_row(X, group_sizes=sizes), kernels.bf16_to_fp8_row(X, group_sizes=SIZES))


@EACH_DENSE_OP
@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256)], ids=str)
def test_no_rows_give_empty_results(op, inputs, shape):
    empty = [torch.empty((*shape[:-1], t.shape[1]), dtype=t.dtype) for t in inputs]
    assert all(t.numel() == 0 for t in tensors_of(op(*empty)))


def test_no_columns_give_empty_results():
    assert kernels.bf16_to_fp4_row(X[:, :0]).codes.shape == (260, 0)
    assert kernels.bf16_to_fp8_row(X[:, :0]).scales.shape == (260, 0)
    assert kernels.bf16_to_fp8_col(X[:, :0]).codes.shape == (0, 384)
    assert kernels.bf16_to_fp8_col(X[:, :0], group_sizes=SIZES).codes.shape == (0,)
    assert kernels.bf16_to_fp8_row(X[:, :0], group_sizes=SIZES).codes.shape == (264, 0)


@EACH_OP
def test_inputs_stay_as_they_are(op, inputs):
    before = [t.clone() for t in inputs]
    op(*inputs)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(before, inputs, strict=True))


# ------------------------------------------------------------------------------------------------------------- threads
@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(before)


def test_results_do_not_depend_on_the_number_of_threads(many_threads):
    x = cases.floats(1100, 1024, seed=3)  # 17 times the work that is worth a thread
    fp4, fp8 = cases.fp4_rows(1100, 1024, seed=4), cases.fp8_rows(1100, 1024, seed=5)
    sizes = [1, 700, 0, 200, 199]

    def everything() -> list[torch.Tensor]:
        return tensors_of(
            [
                kernels.bf16_to_fp4_row(x),
                kernels.bf16_to_fp8_row(x),
                kernels.bf16_to_fp8_row(x, group_sizes=sizes),
                kernels.bf16_to_fp8_col(x),
                kernels.bf16_to_fp8_col(x, group_sizes=sizes),
                kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=sizes),
                kernels.bf16_to_fp8_tile(x),
                kernels.bf16_to_fp8_tile(x, transpose=True),
                kernels.fp4_row_to_fp8_row(*fp4, group_sizes=sizes),
                kernels.fp4_row_to_fp8_col(*fp4, group_sizes=sizes),
                kernels.fp4_to_bf16(*fp4),
                kernels.fp8_row_to_fp4_row(*fp8),
                kernels.fp8_row_to_fp8_col(*fp8, group_sizes=sizes),
                kernels.fp8_row_to_ragged(*fp8, group_sizes=sizes),
            ]
        )

    by_seven = everything()
    torch.set_num_threads(1)
    for a, b in zip(by_seven, everything(), strict=True):
        assert_bits_equal(a, bits_of(b), "threads")


def test_calls_from_several_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    inputs = [cases.floats(200, 256, seed=s) for s in range(8)]
    alone = [kernels.bf16_to_fp8_col(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for got, want in zip(pool.map(kernels.bf16_to_fp8_col, inputs * 4), alone * 4, strict=True):
            assert_same(got, want)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    num_rows = 2**31 // 4096 + 130  # 2**31 elements and a bit: 4 GiB of input
    x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16)
    x[-3:] = cases.floats(3, 4096, seed=9)
    x[: 2**20 // 4096] = cases.floats(2**20 // 4096, 4096, seed=10)
    fp4, fp8 = kernels.bf16_to_fp4_and_fp8_row(x)
    part = kernels.bf16_to_fp4_and_fp8_row(x[-3:])
    assert_bits_equal(fp4.codes[-3:], bits_of(part[0].codes), "codes")
    assert_bits_equal(fp8.codes[-3:], bits_of(part[1].codes), "codes")
    del fp8
    columns = kernels.fp4_row_to_fp8_col(*fp4)
    first = num_rows // 128 * 128
    want = kernels.fp4_row_to_fp8_col(fp4.codes[first:], fp4.scales[first:])
    assert_bits_equal(columns.codes[:, first:], bits_of(want.codes), "columns")
    del columns
    tiles = kernels.bf16_to_fp8_tile(x)
    want = quantize(x[first:], FP8_128X128)
    assert_result(kernels.Fp8Tiles(tiles.codes[first:], tiles.scales[first // 128 :]), Want(want.codes, want.scales))
