"""Rows of the experts and back: a permutation and its inverse, sums in one order and rounded once, their gradients."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.moe.permute import Permutation, permute, permute_rows, permute_weights, unpermute_sum  # noqa: E402

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _same_numbers_whichever_tests_run():
    GENERATOR.manual_seed(0)


def routing(num_tokens: int, num_choices: int, num_experts: int) -> torch.Tensor:
    """Distinct experts for each token."""
    return torch.rand(num_tokens, num_experts, generator=GENERATOR).argsort(dim=1)[:, :num_choices]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().view(torch.uint8)


def summed(y: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    """NumPy's float32: the rows of each token added in the order of its choices, then one rounding."""
    wide = y.double().numpy() if y.dtype == torch.float64 else y.float().numpy()
    total = wide[row_of[:, 0]].copy()
    for k in range(1, row_of.shape[1]):
        total = total + wide[row_of[:, k]]
    narrow = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}.get(y.dtype, total.dtype)
    rounded = total.astype(narrow)
    return torch.from_numpy(rounded.view(np.uint8)).view(y.dtype)


# ------------------------------------------------------------------------------------------------- the permutation
def test_rows_are_sorted_by_expert_then_by_token():
    p = Permutation.from_topk(torch.tensor([[2, 0], [0, 3], [2, 3]]), num_experts=5)
    assert p.group_sizes_E.tolist() == [2, 0, 2, 2, 0]
    assert p.row_token_R.tolist() == [0, 1, 0, 2, 1, 2]
    assert p.row_of_TK.tolist() == [[2, 0], [1, 4], [3, 5]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_tokens, num_choices, num_experts", [(97, 3, 8), (40, 8, 256), (5, 1, 1), (300, 2, 2)])
def test_a_permutation_is_a_stable_sort(num_tokens, num_choices, num_experts, dtype):
    ids = routing(num_tokens, num_choices, num_experts)
    p = Permutation.from_topk(ids.to(dtype), num_experts)
    pairs = sorted((int(ids[t, k]), t, k) for t in range(num_tokens) for k in range(num_choices))
    assert p.row_token_R.tolist() == [t for _, t, _ in pairs]
    assert [int(p.row_of_TK[t, k]) for _, t, k in pairs] == list(range(len(pairs)))
    assert p.group_sizes_E.tolist() == [sum(e == expert for e, _, _ in pairs) for expert in range(num_experts)]
    assert {x.dtype for x in p} == {torch.int64}


def test_one_expert_may_take_all():
    p = Permutation.from_topk(torch.full((6, 1), 3), num_experts=4)
    assert p.group_sizes_E.tolist() == [0, 0, 0, 6]
    assert p.row_token_R.tolist() == list(range(6))


def test_no_tokens_give_no_rows():
    p = Permutation.from_topk(torch.empty((0, 4), dtype=torch.int64), num_experts=3)
    assert (p.group_sizes_E.tolist(), p.row_token_R.shape, p.row_of_TK.shape) == ([0, 0, 0], (0,), (0, 4))
    x = torch.empty((0, 8), dtype=torch.bfloat16, requires_grad=True)
    out = unpermute_sum(permute(x, p), p)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 8)
    assert permute_weights(torch.empty((0, 4)), p).shape == (0,)


# ------------------------------------------------------------------------------------------------- rows and sums
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_row_is_its_tokens(dtype):
    ids = routing(31, 3, 7)
    p = Permutation.from_topk(ids, 7)
    x = torch.randn(31, 20, generator=GENERATOR).to(dtype)
    rows = permute(x, p)
    for t in range(31):
        for k in range(3):
            assert torch.equal(rows[p.row_of_TK[t, k]], x[t])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_choices", [1, 2, 8])
def test_sums_are_taken_in_order_and_rounded_once(dtype, num_choices):
    p = Permutation.from_topk(routing(50, num_choices, 16), 16)
    y = torch.randn(50 * num_choices, 33, generator=GENERATOR)
    y = (y * torch.exp2(torch.randint(-6, 6, y.shape, generator=GENERATOR))).to(dtype)
    assert torch.equal(bits(unpermute_sum(y, p)), bits(summed(y, p.row_of_TK)))


def test_the_order_is_that_of_the_choices():
    """1 is lost beside 2**24, unless -2**24 came first."""
    p = Permutation.from_topk(torch.tensor([[0, 1, 2], [2, 0, 1]]), 3)
    y = torch.empty(6, 1)
    y[p.row_of_TK[0], 0] = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    y[p.row_of_TK[1], 0] = torch.tensor([2.0**24, -(2.0**24), 1.0])
    assert unpermute_sum(y, p).tolist() == [[0.0], [1.0]]


def test_a_sum_of_negative_zeros_is_one():
    p = Permutation.from_topk(torch.tensor([[1, 0]]), 2)
    assert torch.signbit(unpermute_sum(torch.tensor([[-0.0], [-0.0]]), p)).all()


def test_float32_is_rounded_once_to_bfloat16():
    """1 + 2**-8 + 2**-8 is a bfloat16; rounding after each addition would give 1."""
    p = Permutation.from_topk(torch.tensor([[0, 1, 2]]), 3)
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert unpermute_sum(y, p).item() == 1 + 2.0**-7


def test_strides_do_not_matter():
    p = Permutation.from_topk(routing(12, 2, 5), 5)
    y = torch.randn(6, 24, generator=GENERATOR).t()
    assert torch.equal(unpermute_sum(y, p), unpermute_sum(y.contiguous(), p))
    x = torch.randn(6, 12, generator=GENERATOR).t()
    assert torch.equal(permute(x, p), permute(x.contiguous(), p))


def test_codes_and_scales_keep_their_bytes():
    p = Permutation.from_topk(routing(9, 4, 6), 6)
    fp4 = kernels.bf16_to_fp4_row(torch.randn(9, 64, generator=GENERATOR))
    for rows in (*fp4, fp4.codes.view(torch.float4_e2m1fn_x2), fp4.scales.view(torch.float8_e8m0fnu)):
        got = permute_rows(rows, p)
        assert got.dtype == rows.dtype
        assert torch.equal(got.view(torch.uint8), rows.view(torch.uint8)[p.row_token_R])
    fp8 = kernels.bf16_to_fp8_row(torch.randn(9, 256, generator=GENERATOR).bfloat16())
    for rows in fp8:
        assert torch.equal(bits(permute_rows(rows, p)), bits(rows.contiguous()[p.row_token_R]))


def test_a_rows_weight_is_its_choices():
    p = Permutation.from_topk(routing(9, 4, 6), 6)
    weights = torch.rand(9, 4, generator=GENERATOR)
    rows = permute_weights(weights, p)
    assert torch.equal(rows[p.row_of_TK], weights)


# ------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_in_float64(check):
    p = Permutation.from_topk(routing(5, 3, 4), 4)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(15, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert check(lambda x: permute(x, p) ** 2, x)
    assert check(lambda y: unpermute_sum(y, p) ** 2, y)
    assert check(lambda weights: permute_weights(weights, p) ** 2, weights)


def test_a_tokens_gradient_is_the_sum_of_its_rows_rounded_once():
    p = Permutation.from_topk(routing(40, 8, 16), 16)
    x = torch.randn(40, 24, generator=GENERATOR).bfloat16().requires_grad_()
    grad = torch.randn(320, 24, generator=GENERATOR).bfloat16()
    permute(x, p).backward(grad)
    assert torch.equal(bits(x.grad), bits(summed(grad, p.row_of_TK)))


def test_a_rows_gradient_is_its_tokens():
    p = Permutation.from_topk(routing(10, 2, 4), 4)
    y = torch.randn(20, 24, generator=GENERATOR).bfloat16().requires_grad_()
    grad = torch.randn(10, 24, generator=GENERATOR).bfloat16()
    unpermute_sum(y, p).backward(grad)
    assert torch.equal(y.grad, grad[p.row_token_R])


# ------------------------------------------------------------------------------------------------- operators
def round_trip(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    p = Permutation.from_topk(ids, 6)
    return unpermute_sum(permute(x, p) * permute_weights(weights, p)[:, None], p)


def test_torch_compile_takes_them_whole():
    ids = routing(10, 3, 6)
    x = torch.randn(10, 8, generator=GENERATOR)
    weights = torch.rand(10, 3, generator=GENERATOR)
    results = []
    for function in (round_trip, torch.compile(round_trip, backend="aot_eager", fullgraph=True)):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = function(*inputs, ids)
        out.square().sum().backward()
        results.append((out, *(i.grad for i in inputs)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_the_operators_are_registered_right():
    ids = routing(6, 2, 4)
    p = Permutation.from_topk(ids, 4)
    x = torch.randn(6, 8, requires_grad=True)
    y = torch.randn(12, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.mxsim.moe_permutation.default, (ids, 4))
    torch.library.opcheck(torch.ops.mxsim.moe_permute.default, (x, p.row_token_R, p.row_of_TK))
    torch.library.opcheck(torch.ops.mxsim.moe_gather_sum.default, (y, p.row_of_TK, p.row_token_R))


# ------------------------------------------------------------------------------------------------- bad input
def three_rows() -> Permutation:
    return Permutation.from_topk(torch.tensor([[0], [1], [1]]), 2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Permutation.from_topk(torch.zeros(3, 1), 2), TypeError, "topk_ids has dtype torch.float32"),
        (lambda: Permutation.from_topk(torch.zeros(3, dtype=torch.int64), 2), ValueError, r"topk_ids has shape \(3,\)"),
        (lambda: Permutation.from_topk(torch.zeros((3, 0), dtype=torch.int64), 2), ValueError, r"shape \(3, 0\)"),
        (lambda: Permutation.from_topk(torch.tensor([[0], [2]]), 2), ValueError, "holds 2, needed experts 0 to 1"),
        (lambda: Permutation.from_topk(torch.tensor([[0], [-1]]), 2), ValueError, "holds -1"),
        (lambda: Permutation.from_topk(torch.tensor([[65537]]), 2), ValueError, "holds 65537"),
        (lambda: Permutation.from_topk(torch.tensor([[0]]), 0), ValueError, "num_experts is 0"),
        (lambda: Permutation.from_topk(torch.tensor([[0]]), 2**15), ValueError, "num_experts is 32768"),
        (lambda: permute(torch.zeros((3, 4), dtype=torch.int32), three_rows()), TypeError, "x has dtype torch.int32"),
        (lambda: permute(torch.zeros(2, 4), three_rows()), ValueError, r"x has shape \(2, 4\), needed 3 rows"),
        (lambda: permute(torch.zeros(3), three_rows()), ValueError, r"x has shape \(3,\)"),
        (lambda: permute(torch.zeros((3, 4), device="meta"), three_rows()), ValueError, "x is on meta"),
        (lambda: unpermute_sum(torch.zeros(4, 4), three_rows()), ValueError, r"y has shape \(4, 4\), needed 3 rows"),
        (lambda: permute_rows(torch.zeros(2, 4), three_rows()), ValueError, r"rows has shape \(2, 4\)"),
        (lambda: permute_weights(torch.zeros(3, 2), three_rows()), ValueError, r"weights has shape \(3, 2\)"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------------- Triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])  # interpreted bfloat16 is cut off
@pytest.mark.parametrize("num_choices, num_columns", [(1, 5), (3, 1030), (8, 64)])
def test_the_interpreted_kernel_gives_the_same_bits(interpreted, dtype, num_choices, num_columns):
    from mxsim.moe import triton_gather_sum

    p = Permutation.from_topk(routing(7, num_choices, 16), 16)
    y = torch.randn(7 * num_choices, num_columns, generator=GENERATOR).to(dtype)
    assert torch.equal(bits(triton_gather_sum.gather_sum(y, p.row_of_TK)), bits(unpermute_sum(y, p)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "num_tokens, num_choices, num_columns", [(0, 2, 8), (1, 1, 1), (130, 3, 1030), (64, 8, 7168), (33, 8, 129)]
)
def test_cuda_gives_the_cpus_bits(dtype, num_tokens, num_choices, num_columns):
    ids = routing(num_tokens, num_choices, 256)
    cpu, cuda = Permutation.from_topk(ids, 256), Permutation.from_topk(ids.cuda(), 256)
    for a, b in zip(cpu, cuda, strict=True):
        assert torch.equal(a, b.cpu())
    y = torch.randn(num_tokens * num_choices, num_columns, generator=GENERATOR)
    y = (y * torch.exp2(torch.randint(-6, 6, y.shape, generator=GENERATOR))).to(dtype)
    assert torch.equal(bits(unpermute_sum(y.cuda(), cuda)), bits(unpermute_sum(y, cpu)))
    x = y[:num_tokens]
    assert torch.equal(bits(permute(x.cuda(), cuda)), bits(permute(x, cpu)))
    strided = y.t().contiguous().t()
    assert torch.equal(bits(unpermute_sum(strided.cuda(), cuda)), bits(unpermute_sum(y, cpu)))
    weights = torch.rand(num_tokens, num_choices, generator=GENERATOR)
    assert torch.equal(permute_weights(weights.cuda(), cuda).cpu(), permute_weights(weights, cpu))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    ids = routing(64, 8, 32).cuda()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(64, 8, device="cuda", requires_grad=True)

    def step() -> None:
        p = Permutation.from_topk(ids, 32)
        rows = permute(x, p) * permute_weights(weights, p)[:, None].bfloat16()
        permute_rows(ids.to(torch.uint8), p)
        unpermute_sum(rows, p).backward(x.detach())

    step()  # compiles
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
