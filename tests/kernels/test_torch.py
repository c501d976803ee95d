"""The ops inside torch: fake and meta tensors, torch.compile, opcheck, autocast, inference mode, gradients."""

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mxsim import kernels
from mxsim.blocks import FP8_1X128, MXFP4, ScaleRule, quantize
from mxsim.kernels import operators
from tests.kernels.expected import assert_bits_equal, bits_of, fp4_rows, fp8_rows
from tests.kernels.test_layouts import EACH_OP, SIZES, tensors_of

pytestmark = pytest.mark.usefixtures("host_library")
# Without NaN, and FP8 inputs as bytes: opcheck compares values, with arithmetic that float8 lacks.
X = torch.randn(260, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
FP4 = tuple(torch.from_numpy(a) for a in fp4_rows(quantize(X, MXFP4))[:2])
FP8 = tuple(torch.from_numpy(a) for a in fp8_rows(quantize(X, FP8_1X128))[:2])
SIZES_TENSOR = torch.tensor(SIZES)
# operator -> arguments, once for each way to give group sizes
OPERATORS = [
    (torch.ops.mxsim.bf16_to_fp4_row.default, (X, 1)),
    (torch.ops.mxsim.bf16_to_fp4_row.default, (X.t()[:, :256].half(), 3)),
    (torch.ops.mxsim.bf16_to_fp4_row.stochastic, (X, 1, 7)),
    (torch.ops.mxsim.bf16_to_fp8_row.stochastic, (X, -1)),
    (torch.ops.mxsim.bf16_to_fp8_row.stochastic_ragged, (X, None, SIZES, 4, 7)),
    (torch.ops.mxsim.bf16_to_fp8_row.stochastic_ragged, (X, SIZES_TENSOR, None, 4, 7)),
    (torch.ops.mxsim.bf16_to_fp4_and_fp8_row.stochastic, (X, 0, 6, 7)),
    (torch.ops.mxsim.bf16_to_fp4_and_fp8_row.stochastic_ragged, (X, 0, 6, SIZES_TENSOR, None, 4, 7)),
    (torch.ops.mxsim.fp8_row_to_fp4_row.default, (*FP8, 0)),
    (torch.ops.mxsim.fp8_row_to_fp4_row.default, (FP8[0], FP8[1].contiguous(), 2)),
    (torch.ops.mxsim.fp4_row_to_fp8_row.default, (*FP4, 6)),
    (torch.ops.mxsim.fp4_row_to_fp8_row.ragged, (*FP4, 6, None, SIZES, 4)),
    (torch.ops.mxsim.fp4_row_to_fp8_row.ragged, (*FP4, 6, SIZES_TENSOR, None, 4)),
    (torch.ops.mxsim.fp4_row_to_fp8_col.default, (*FP4, 0)),
    (torch.ops.mxsim.fp4_row_to_fp8_col.ragged, (*FP4, 6, None, SIZES)),
    (torch.ops.mxsim.fp4_row_to_fp8_col.ragged, (*FP4, 6, SIZES_TENSOR, None)),
    (torch.ops.mxsim.fp8_row_to_fp8_col.default, FP8),
    (torch.ops.mxsim.fp8_row_to_fp8_col.ragged, (*FP8, None, SIZES)),
    (torch.ops.mxsim.fp8_row_to_fp8_col.ragged, (*FP8, SIZES_TENSOR, None)),
    (torch.ops.mxsim.fp8_row_to_ragged.default, (*FP8, None, SIZES, 8)),
    (torch.ops.mxsim.fp8_row_to_ragged.default, (*FP8, SIZES_TENSOR.int(), None, 8)),
    (torch.ops.mxsim.bf16_to_fp8_row.default, (X[:130],)),
    (torch.ops.mxsim.bf16_to_fp8_row.default, (X[:131],)),
    (torch.ops.mxsim.bf16_to_fp8_row.ragged, (X, None, SIZES, 4)),
    (torch.ops.mxsim.bf16_to_fp8_row.ragged, (X, SIZES_TENSOR, None, 4)),
    (torch.ops.mxsim.bf16_to_fp8_col.default, (X,)),
    (torch.ops.mxsim.bf16_to_fp8_col.ragged, (X, None, SIZES)),
    (torch.ops.mxsim.bf16_to_fp8_col.ragged, (X, SIZES_TENSOR, None)),
    (torch.ops.mxsim.bf16_to_fp8_tile.default, (X, False)),
    (torch.ops.mxsim.bf16_to_fp8_tile.default, (X.view(2, 130, 256), True)),
    (torch.ops.mxsim.bf16_to_fp4_and_fp8_row.default, (X, 0, 6)),
    (torch.ops.mxsim.bf16_to_fp4_and_fp8_row.ragged, (X, 0, 6, None, SIZES, 4)),
    (torch.ops.mxsim.bf16_to_fp4_and_fp8_row.ragged, (X, 0, 6, SIZES_TENSOR, None, 4)),
    (torch.ops.mxsim.fp4_to_bf16.default, FP4),
]
NAMES = [f"{operator.name()}-{i}" for i, (operator, _) in enumerate(OPERATORS)]


def described(result) -> list[tuple]:
    return [(t.dtype, t.shape, t.stride(), t.device.type) for t in tensors_of(result)]


def assert_same(got, want) -> None:
    assert described(got) == described(want)
    for a, b in zip(tensors_of(got), tensors_of(want), strict=True):
        assert_bits_equal(a, bits_of(b), "same")


@pytest.mark.parametrize("operator, arguments", OPERATORS, ids=NAMES)
def test_opcheck(operator, arguments):
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


# ------------------------------------------------------------------------------------------------------- fake and meta
@EACH_OP
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "meta"])
def test_fake_results_look_like_real_ones(op, inputs, device):
    want = [described_[:3] for described_ in described(op(*inputs))]
    with FakeTensorMode():
        result = op(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in inputs))
    assert [t[:3] for t in described(result)] == want
    assert all(isinstance(t, FakeTensor) for t in tensors_of(result))
    assert {str(t.device) for t in tensors_of(result)} == {device if device != "cuda" else "cuda:0"}


@EACH_OP
def test_meta_tensors(op, inputs):
    result = op(*(t.to("meta") for t in inputs))
    assert [t[:3] for t in described(result)] == [t[:3] for t in described(op(*inputs))]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sizes_on_the_device_get_room_for_any(dtype):
    with FakeTensorMode():
        sizes = torch.empty(4, dtype=dtype, device="cuda")
        x = torch.empty(260, 256, dtype=torch.bfloat16, device="cuda")
        rows = kernels.bf16_to_fp8_row(x, group_sizes=sizes)
        columns = kernels.bf16_to_fp8_col(x, group_sizes=sizes)
        padded = kernels.bf16_to_fp8_row(x, group_sizes=sizes, row_multiple=128)
    assert (rows.codes.shape, rows.scales.shape) == ((272, 256), (2 * 272,))  # 260 + 4 * 3
    assert padded.codes.shape == (768, 256)  # 260 + 4 * 127 = 768
    assert (columns.codes.shape, columns.scales.shape) == ((6 * 128 * 256,), (6, 256))
    assert {r.padded_group_sizes.dtype for r in (rows, columns, padded)} == {torch.int64}
    assert {str(r.padded_group_sizes.device) for r in (rows, columns, padded)} == {"cuda:0"}


def test_host_sizes_with_codes_on_the_device_allocate_exactly():
    with FakeTensorMode():
        x = torch.empty(260, 256, dtype=torch.bfloat16, device="cuda")
        assert kernels.bf16_to_fp8_row(x, group_sizes=SIZES).codes.shape == (264, 256)
        assert kernels.bf16_to_fp8_col(x, group_sizes=SIZES).scales.shape == (3, 256)


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        x = torch.empty(260, 256, dtype=torch.bfloat16, device="cuda")
        with pytest.raises(ValueError, match="group_sizes sum to 5, needed 260"):
            kernels.bf16_to_fp8_row(x, group_sizes=[5])
        with pytest.raises(ValueError, match="scales is on cpu, needed cuda:0"):
            kernels.fp4_to_bf16(torch.empty(2, 16, dtype=torch.uint8, device="cuda"), torch.empty(2, 1).byte())
        with pytest.raises(ValueError, match="group_sizes is on cuda:1, needed cuda:0 or cpu"):
            kernels.bf16_to_fp8_col(x, group_sizes=torch.empty(2, dtype=torch.int64, device="cuda:1"))


# ------------------------------------------------------------------------------------------------------- torch.compile
def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


@EACH_OP
def test_compiled_without_a_graph_break(op, inputs):
    assert_same(compiled(lambda *a: op(*a), backend="aot_eager")(*inputs), op(*inputs))


def a_chain(x):
    fp4, rows = kernels.bf16_to_fp4_and_fp8_row(x * 2, scale_rule=ScaleRule.RCEIL, headroom=5)
    columns = kernels.fp4_row_to_fp8_col(fp4.codes, fp4.scales, group_sizes=[100, 0, x.shape[0] - 100])
    back = kernels.fp8_row_to_fp4_row(rows.codes, rows.scales)
    return kernels.fp4_to_bf16(*back) + 1, columns, rows


@pytest.mark.parametrize(
    "compiler",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],  # C++ of its own: half a minute
)
def test_a_compiled_chain_gives_the_same_bits(compiler):
    assert_same(compiled(a_chain, backend=compiler)(X), a_chain(X))


def test_inductor_keeps_strides_and_bits():
    def chain(x):
        rows = kernels.bf16_to_fp8_row(x)
        return kernels.fp8_row_to_fp8_col(*rows[:2]), rows

    assert_same(compiled(chain)(X[:130]), chain(X[:130]))


def test_compiled_with_dynamic_shapes():
    function = compiled(a_chain, dynamic=True, backend="aot_eager")
    for num_rows in (100, 129, 260):
        assert_same(function(X[:num_rows]), a_chain(X[:num_rows]))


def test_compiled_with_group_sizes_as_a_list_argument():
    def ragged(x, sizes):
        return kernels.bf16_to_fp8_col(x, group_sizes=sizes), kernels.bf16_to_fp8_row(x, group_sizes=sizes)

    function = compiled(ragged, backend="aot_eager")
    for sizes in ([260], [100, 160], [0, 60, 200], SIZES):
        assert_same(function(X, sizes), ragged(X, sizes))


def test_compiled_with_group_sizes_as_a_CPU_tensor():
    def ragged(x, sizes):
        return kernels.bf16_to_fp8_col(x, group_sizes=sizes), kernels.bf16_to_fp8_row(x, group_sizes=sizes)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = compiled(ragged, backend="aot_eager")
        for sizes in (SIZES_TENSOR, torch.tensor([0, 0, 1, 259])):
            assert_same(function(X, sizes), ragged(X, sizes))


# ------------------------------------------------------------------------------------------------- modes and gradients
@EACH_OP
def test_modes_change_nothing(op, inputs):
    want = op(*inputs)
    with torch.inference_mode():
        assert_same(op(*inputs), want)
    with torch.no_grad():
        assert_same(op(*inputs), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(op(*inputs), want)
    with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode():
        assert_same(op(*(t.clone() for t in inputs)), want)


@EACH_OP
def test_results_require_no_gradient(op, inputs):
    differentiable = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    result = op(*differentiable)
    assert not any(t.requires_grad for t in tensors_of(result))
    assert_same(result, op(*inputs))


def test_a_leaf_that_needs_a_gradient_gets_it_through_the_rest():
    x = X.float().nan_to_num(0, 0, 0).clamp(-1, 1).requires_grad_()
    kernels.bf16_to_fp4_row(x)
    (x * 3).sum().backward()
    assert (x.grad == 3).all()


# ------------------------------------------------------------------------------------------------- the backend's calls
class Recorder:
    """Stands for mxsim.kernels.device: notes what it is called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, arguments))


def test_a_backend_gets_matrices_and_its_sizes(monkeypatch):
    recorder = Recorder()
    for name in ("to_fp8_row", "to_fp8_col", "fp8_row_to_fp8_col", "to_fp8_tile"):
        monkeypatch.setitem(vars(operators._HOST), name, getattr(recorder, name))
    kernels.bf16_to_fp8_row(X.view(2, 130, 256), group_sizes=torch.tensor(SIZES, dtype=torch.int32), row_multiple=8)
    (name, (x, codes, scales, sizes, padded, multiple, seed)) = recorder.calls.pop()
    assert (name, x.shape, x.is_contiguous(), codes.shape, scales.shape) == (
        "to_fp8_row", (260, 256), True, (272, 256), (544,)
    )  # fmt: skip
    assert (sizes.dtype, sizes.tolist(), padded.shape, multiple, seed) == (torch.int64, SIZES, (4,), 8, None)
    kernels.bf16_to_fp8_col(X)
    assert recorder.calls.pop()[1][3:] == (None, None)
    kernels.fp8_row_to_fp8_col(FP8[0], FP8[1].t().contiguous().t())
    assert recorder.calls.pop()[1][1].stride() == (1, 260)
    kernels.bf16_to_fp8_tile(X.view(2, 1, 130, 256), transpose=True)
    assert recorder.calls.pop()[1][2].shape == (2, 2, 2)
