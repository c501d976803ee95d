"""What is timed, and the bytes by count against the tensors themselves."""

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.bench.cases import (  # noqa: E402
    DEFAULT_SHAPES,
    OPS,
    Case,
    Data,
    Groups,
    Layout,
    Shape,
    cases_at,
    flat,
    num_bytes,
    parse_shape,
)

CPU = torch.device("cpu")
SHAPES = [Shape(128, 128), Shape(200, 256), Shape(129, 384), Shape(1, 128), Shape(300, 256, 5), Shape(7, 128, 32)]


def test_every_op_of_the_kernels_is_timed():
    emulation = {"fp8_gemm_emulated"}  # bound by arithmetic: a fraction of a copy says nothing of it
    assert set(OPS) == {name for name in kernels.__all__ if name[0].islower()} - emulation
    cases = [case for shape in DEFAULT_SHAPES for case in cases_at(shape, OPS)]
    assert {case.op for case in cases} == set(OPS)
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_by_count_are_those_of_inputs_and_results(shape):
    data = Data.random(shape, CPU)
    for case in cases_at(shape, OPS):
        options = case.options(CPU)
        tensors = [*case.inputs(data), *case.call(case.inputs(data), options), *flat(options.get("group_sizes", ()))]
        assert case.num_bytes == sum(t.nbytes for t in tensors), case.name


def test_bytes_of_a_known_shape():
    shape = Shape(32768, 7168)
    assert num_bytes(Layout.BF16, shape) == 469_762_048
    assert Case("bf16_to_fp4_row", shape).num_bytes == 32768 * 7168 * (2 + 17 / 32)
    assert Case("fp4_row_to_fp8_col", shape).num_bytes == 32768 * 7168 * (17 / 32 + 33 / 32)


@pytest.mark.parametrize("shape", [s for s in (*SHAPES, *DEFAULT_SHAPES) if s.num_experts], ids=str)
def test_group_sizes_sum_to_the_rows(shape):
    sizes = shape.group_sizes
    assert len(sizes) == shape.num_experts
    assert sum(sizes) == shape.rows
    assert min(sizes) >= 0


def test_the_split_is_uneven():
    sizes = Shape(32768, 7168, 32).group_sizes
    assert max(sizes) > 10 * min(sizes) > 0
    assert any(n % 4 for n in sizes)
    assert sizes != sorted(sizes)


def test_ops_without_group_sizes_are_not_timed_with_experts():
    dense, ragged = ({case.op for case in cases_at(shape, OPS)} for shape in (Shape(128, 128), Shape(128, 128, 2)))
    assert dense == {name for name, op in OPS.items() if op.groups is not Groups.ALWAYS}
    assert ragged == {name for name, op in OPS.items() if op.groups is not Groups.NEVER}


@pytest.mark.parametrize(
    "text, shape",
    [("4096x7168", Shape(4096, 7168)), ("1X128", Shape(1, 128)), (" 32768x7168/32 ", Shape(32768, 7168, 32))],
)
def test_shapes_are_read(text, shape):
    assert parse_shape(text) == shape
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text", ["", "4096", "4096x", "0x128", "-1x128", "128x100", "128x128/0", "128x128/", "axb", "1x128x3"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="bench: shape is "):
        parse_shape(text)


def test_data_is_the_same_at_every_call_and_its_scales_differ():
    shape = Shape(64, 256)
    data, again = Data.random(shape, CPU), Data.random(shape, CPU)
    (x,) = data.of(Layout.BF16)
    assert torch.equal(x, again.of(Layout.BF16)[0])
    assert torch.isfinite(x).all()
    _, scales = data.of(Layout.FP4_ROWS)
    assert scales.unique().numel() > 4


def test_the_first_rows_are_those_of_the_whole():
    data = Data.random(Shape(64, 256), CPU)
    for layout in (Layout.BF16, Layout.FP4_ROWS, Layout.FP8_ROWS):
        whole = data.of(layout)
        for part, tensor in zip(data.first(10).of(layout), whole, strict=True):
            assert part.shape == (10, tensor.shape[1])
            assert part.stride() == tensor.stride()
            assert part.data_ptr() == tensor.data_ptr()
