"""The grouped GEMMs on the CPU: each backend against the NumPy model or float64, expert by expert, and refusals."""

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.kernels import Fp8Cols, Fp8Tiles, RaggedFp8Rows  # noqa: E402
from mxsim.moe import cublaslt, expert_gemms  # noqa: E402
from mxsim.moe.grouped_gemm import Gemm, grouped_gemm, grouped_wgrad, record_gemms  # noqa: E402
from mxsim.moe.groups import Groups  # noqa: E402
from mxsim.moe.ragged import check_tiles  # noqa: E402
from tests.compare import assert_codes_equal  # noqa: E402
from tests.moe.gemm_cases import (  # noqa: E402
    OUTPUTS,
    SIZES,
    bits,
    exact,
    expert_cols,
    expert_rows,
    expert_tiles,
    make,
    model,
)

# The package has a function of that name.
MODULE = importlib.import_module("mxsim.moe.grouped_gemm")
BY_SIZES = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
BY_OUTPUT = pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)


def expert_slice(sizes, expert):
    start = sum(sizes[:expert])
    return slice(start, start + sizes[expert])


def assert_rows_as_model(got, case, out_dtype):
    sizes = list(case.groups.sizes)
    assert got.dtype is out_dtype
    assert got.shape == (sum(sizes), case.w.shape[1])
    for expert, size in enumerate(sizes):
        if size:
            want = model(expert_rows(case.rows, sizes, expert), expert_tiles(case.tiles, expert), out_dtype)
            assert_codes_equal(bits(got[expert_slice(sizes, expert)]), want, label=f"expert {expert}")


def assert_wgrad_as_model(got, case, out_dtype):
    sizes = list(case.groups.sizes)
    assert got.dtype is out_dtype
    assert got.shape == (len(sizes), case.dy.shape[1], case.x.shape[1])
    for expert, size in enumerate(sizes):
        if size:
            want = model(expert_cols(case.dy_cols, sizes, expert), expert_cols(case.x_cols, sizes, expert), out_dtype)
        else:
            want = np.zeros(got.shape[1:], OUTPUTS[out_dtype]).view(f"u{got.itemsize}")
        assert_codes_equal(bits(got[expert]), want, label=f"expert {expert}")


# ----------------------------------------------------------------------------------------------------------- emulation
@BY_SIZES
@BY_OUTPUT
def test_hopper_rows_are_the_model_expert_by_expert(sizes, out_dtype):
    case = make(sizes)
    got = grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.HOPPER, out_dtype=out_dtype)
    assert_rows_as_model(got, case, out_dtype)


@BY_SIZES
@BY_OUTPUT
def test_hopper_wgrad_is_the_model_expert_by_expert(sizes, out_dtype):
    case = make(sizes, 32, 128)
    got = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=Gemm.HOPPER, out_dtype=out_dtype)
    assert_wgrad_as_model(got, case, out_dtype)


# --------------------------------------------------------------------------------------- scaled_mm, its calls emulated
@pytest.fixture
def scaled_mm(monkeypatch):
    """torch's scaled_mm in the loop, replaced by the emulation where its arguments are as torch wants them."""
    calls = []

    def emulated(a, b, a_scales, b_scales, b_recipe, out):
        (m, k), n = a.shape, b.shape[1]
        assert m % 4 == 0
        assert n % 16 == 0
        assert b.shape == (k, n)
        assert a.stride() == (k, 1)
        assert b.stride() == (1, k)
        assert out.shape == (m, n)
        assert out.stride() == (n, 1)
        assert a_scales.shape == (m, k // 128)
        assert a_scales.stride() == (1, m)
        for x in (a, b, a_scales, b_scales, out):
            assert x.data_ptr() % 16 == 0
        if b_recipe == torch.nn.functional.ScalingType.BlockWise128x128.value:
            rows, tiles_n = -(-(k // 128) // 4) * 4, -(-n // 128)
            assert b_scales.shape == (rows, tiles_n)
            assert b_scales.stride() == (1, rows)
            b_scales = b_scales[: k // 128].t()
        else:
            assert b_recipe == torch.nn.functional.ScalingType.BlockWise1x128.value
            assert b_scales.shape == (n, k // 128)
            assert b_scales.stride() == (1, n)
        calls.append(m)
        out.copy_(kernels.fp8_gemm_emulated(a, a_scales, b.t(), b_scales, out_dtype=out.dtype))

    monkeypatch.setattr(expert_gemms, "scaled_mm", emulated)
    return calls


@BY_SIZES
@BY_OUTPUT
@pytest.mark.parametrize("n, k", [(64, 384), (160, 512)])
def test_scaled_mm_rows_are_cut_and_put_together(scaled_mm, sizes, out_dtype, n, k):
    case = make(sizes, n, k)
    got = expert_gemms.scaled_mm_rows(case.rows, case.tiles, case.groups, out_dtype)
    assert_rows_as_model(got, case, out_dtype)
    assert scaled_mm == [-(-size // 4) * 4 for size in sizes if size]


@BY_SIZES
@BY_OUTPUT
def test_scaled_mm_wgrad_is_cut_and_put_together(scaled_mm, sizes, out_dtype):
    case = make(sizes, 32, 128)
    got = expert_gemms.scaled_mm_wgrad(case.dy_cols, case.x_cols, case.groups, out_dtype)
    assert_wgrad_as_model(got, case, out_dtype)
    assert len(scaled_mm) == sum(size > 0 for size in sizes)


def test_operands_that_begin_anywhere_are_aligned(scaled_mm):
    def shifted(x):
        buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
        buffer[1:] = x.contiguous().view(-1)
        return buffer[1:].view(x.shape)

    case = make([5, 3], 32, 384)
    rows = RaggedFp8Rows(shifted(case.rows.codes), shifted(case.rows.scales), case.rows.padded_group_sizes)
    wide = shifted(torch.nn.functional.pad(case.tiles.scales, (0, 1)))  # rows of 4 scales, where 3 count
    tiles = check_tiles("op", Fp8Tiles(shifted(case.tiles.codes), wide[..., :3]), 2, 384)
    assert rows.codes.data_ptr() % 16 == 1
    assert wide.data_ptr() % 16 == 4
    got = expert_gemms.scaled_mm_rows(rows, tiles, case.groups, torch.bfloat16)
    assert_rows_as_model(got, case, torch.bfloat16)


# --------------------------------------------------------------------------------------------------------- dequantized
def fp32_bound(depth, magnitudes, out_dtype):
    """Of an FP32 sum in any order, of exact products (8 bits), and of its rounding to the output.

    depth - 1 additions are off by a factor of (1 + 2**-24)**(depth - 1) at most; BF16 adds half an ulp, 2**-8 relative
    (2**-9 of a value's own binade, with room for the FP32 error).
    """
    gamma = depth * 2.0**-24 / (1 - depth * 2.0**-24)
    return magnitudes * (gamma + (2.0**-8 if out_dtype is torch.bfloat16 else 0))


@BY_SIZES
@BY_OUTPUT
def test_dequantized_rows_are_exact_but_for_fp32_sums(sizes, out_dtype):
    case = make(sizes)
    got = grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.DEQUANTIZED, out_dtype=out_dtype)
    assert got.dtype is out_dtype
    for expert in range(len(sizes)):
        want, magnitudes = exact(expert_rows(case.rows, sizes, expert), expert_tiles(case.tiles, expert))
        error = np.abs(got[expert_slice(sizes, expert)].double().numpy() - want)
        assert (error <= fp32_bound(case.x.shape[1], magnitudes, out_dtype)).all()


@BY_SIZES
@BY_OUTPUT
def test_dequantized_wgrad_is_exact_but_for_fp32_sums(sizes, out_dtype):
    case = make(sizes, 32, 128)
    got = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=Gemm.DEQUANTIZED, out_dtype=out_dtype)
    assert got.dtype is out_dtype
    for expert, size in enumerate(sizes):
        if size:
            a, b = (expert_cols(x, sizes, expert) for x in (case.dy_cols, case.x_cols))
            want, magnitudes = exact(a, b)
            error = np.abs(got[expert].double().numpy() - want)
            assert (error <= fp32_bound(a.codes.shape[1], magnitudes, out_dtype)).all()
        else:
            assert not got[expert].any()


def test_auto_on_a_cpu_is_dequantized():
    case = make([5, 0, 9])
    for gemm in (Gemm.DEQUANTIZED, "dequantized"):
        want = grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm)
        assert torch.equal(grouped_gemm(case.rows, case.tiles, case.groups), want)
    want = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=Gemm.DEQUANTIZED)
    assert torch.equal(grouped_wgrad(case.dy_cols, case.x_cols, case.groups), want)
    assert want.dtype is torch.bfloat16


# ------------------------------------------------------------------------------------------------- layouts of operands
@pytest.mark.parametrize("gemm", [Gemm.HOPPER, Gemm.DEQUANTIZED])
def test_views_bytes_and_buffers_for_any_sizes_give_the_same(gemm):
    sizes = [5, 0, 130, 1]
    case = make(sizes)
    rows, tiles, dy, x = case.rows, case.tiles, case.dy_cols, case.x_cols
    want = grouped_gemm(rows, tiles, case.groups, gemm=gemm)
    want_g = grouped_wgrad(dy, x, case.groups, gemm=gemm)

    strided = RaggedFp8Rows(rows.codes.t().contiguous().t(), rows.scales.repeat_interleave(2)[::2], None)
    as_bytes = RaggedFp8Rows(rows.codes.view(torch.uint8), rows.scales, None)
    unit = 4 * ((sum(sizes) + 3 * len(sizes) + 3) // 4)
    grown = RaggedFp8Rows(rows.codes.new_zeros(unit, 384), rows.scales.new_full((unit * 3,), torch.nan), None)
    grown.codes[: len(rows.codes)] = rows.codes
    grown.scales[: len(rows.scales)] = rows.scales
    packed = Fp8Tiles(tiles.codes.view(torch.uint8), tiles.scales.contiguous())  # rows of 3 scales, not of 4
    assert packed.scales.stride() != tiles.scales.stride()
    for a, b in ((strided, tiles), (as_bytes, packed), (grown, tiles)):
        assert torch.equal(grouped_gemm(a, b, case.groups, gemm=gemm), want)

    blocks = (sum(sizes) + 127 * len(sizes)) // 128
    big = Fp8Cols(dy.codes.new_zeros(blocks * 128 * 64), dy.scales.new_full((blocks, 64), torch.nan), None)
    big.codes[: len(dy.codes)] = dy.codes
    big.scales[: len(dy.scales)] = dy.scales
    by_columns = Fp8Cols(x.codes.view(torch.uint8), x.scales.t().contiguous().t(), None)
    assert torch.equal(grouped_wgrad(big, by_columns, case.groups, gemm=gemm), want_g)


def test_packed_scales_of_tiles_are_laid_out_for_scaled_mm(scaled_mm, monkeypatch):
    monkeypatch.setattr(MODULE, "_capability", lambda device: (9, 0))
    case = make([5, 2], 64, 384)
    packed = Fp8Tiles(case.tiles.codes, case.tiles.scales.contiguous())
    got = grouped_gemm(case.rows, packed, case.groups, gemm=Gemm.SCALED_MM, out_dtype=torch.float32)
    assert_rows_as_model(got, case, torch.float32)


@pytest.mark.parametrize("gemm", [Gemm.AUTO, Gemm.HOPPER])
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]], ids=str)
def test_no_rows(gemm, sizes):
    groups = Groups(tuple(sizes), torch.device("cpu"))
    x, dy = torch.zeros(0, 256, dtype=torch.bfloat16), torch.zeros(0, 64, dtype=torch.bfloat16)
    rows = kernels.bf16_to_fp8_row(x, group_sizes=sizes)
    tiles = kernels.bf16_to_fp8_tile(torch.ones(len(sizes), 64, 256, dtype=torch.bfloat16))
    assert grouped_gemm(rows, tiles, groups, gemm=gemm).shape == (0, 64)
    cols = [kernels.bf16_to_fp8_col(t, group_sizes=sizes) for t in (dy, x[:, :32])]
    got = grouped_wgrad(*cols, groups, gemm=gemm)
    assert got.shape == (len(sizes), 64, 32)
    assert not got.any()


# ---------------------------------------------------------------------------------------------------------------- AUTO
@pytest.mark.parametrize(
    "sizes, fits, cublas, triton, want",
    [
        ([512, 512], True, True, True, Gemm.CUBLASLT),
        ([0, 512, 0], True, True, True, Gemm.CUBLASLT),
        ([511, 512], True, True, True, Gemm.TRITON),
        ([1, 2], True, True, False, Gemm.CUBLASLT),
        ([1024, 1024], True, False, True, Gemm.TRITON),
        ([1024, 1024], True, False, False, Gemm.SCALED_MM),
        ([1024, 1024], False, True, True, Gemm.TRITON),
        ([1024, 1024], False, True, False, Gemm.DEQUANTIZED),
    ],
)
def test_auto_on_hopper(monkeypatch, sizes, fits, cublas, triton, want):
    monkeypatch.setattr(MODULE, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(MODULE, "_has_triton", lambda: triton)
    monkeypatch.setattr(cublaslt, "unavailable", lambda: None if cublas else "it is too old")
    groups = Groups(tuple(sizes), torch.device("cpu"))
    assert MODULE._choose("op", Gemm.AUTO, torch.device("cuda"), groups, fits_scaled_mm=fits) is want


def test_backends_that_cannot_are_refused(monkeypatch):
    case = make([5])
    for call in (
        lambda gemm: grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm),
        lambda gemm: grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=gemm),
    ):
        for gemm in (Gemm.CUBLASLT, Gemm.SCALED_MM):
            with pytest.raises(ValueError, match=rf"grouped_\w+: gemm is {gemm}, which needs .* 9\.0, not cpu"):
                call(gemm)
        with pytest.raises(ValueError, match=r"gemm is 'cublas', needed one of auto, cublaslt, scaled_mm, "):
            call("cublas")
    monkeypatch.setattr(MODULE, "_has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"gemm is triton, which is not installed"):
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.TRITON)
    monkeypatch.setattr(MODULE, "_has_triton", lambda: True)
    with pytest.raises(ValueError, match=r"gemm is triton, which needs a device of compute capability 8\.9"):
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.TRITON)
    monkeypatch.setattr(MODULE, "_capability", lambda device: (9, 0))
    odd = kernels.bf16_to_fp8_tile(case.w[:, :40])
    for gemm in (Gemm.CUBLASLT, Gemm.SCALED_MM):
        with pytest.raises(
            ValueError, match=rf"gemm is {gemm}, which takes results whose columns are a multiple of 16"
        ):
            grouped_gemm(case.rows, odd, case.groups, gemm=gemm)
    monkeypatch.setattr(cublaslt, "unavailable", lambda: "it is too old")
    with pytest.raises(ValueError, match=r"grouped_gemm: gemm is cublaslt, but it is too old"):
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.CUBLASLT)


# ------------------------------------------------------------------------------------------------------------ refusals
def test_wrong_fp8_operands_are_named():
    case = make([5, 130])
    rows, tiles, cols, groups = case.rows, case.tiles, case.dy_cols, case.groups

    def refuses(error, match, call):
        with pytest.raises(error, match=match):
            call()

    def gemm(a=rows, b=tiles, g=groups, **keywords):
        return lambda: grouped_gemm(a, b, g, **keywords)

    def wgrad(a=cols, b=case.x_cols, g=groups, **keywords):
        return lambda: grouped_wgrad(a, b, g, **keywords)

    dense = kernels.bf16_to_fp8_row(case.x)
    refuses(TypeError, r"grouped_gemm: a and b are Fp8Rows and Fp8Tiles, needed RaggedFp8Rows", gemm(dense))
    refuses(TypeError, r"a and b are RaggedFp8Rows and Tensor", gemm(b=case.w))
    refuses(TypeError, r"grouped_wgrad: a and b are RaggedFp8Rows and Fp8Cols, needed Fp8Cols", wgrad(rows))
    for call in (gemm, wgrad):
        refuses(TypeError, r"out_dtype is torch\.float16, needed bfloat16 or float32", call(out_dtype=torch.float16))
    other = kernels.bf16_to_fp8_row(case.x, group_sizes=[5, 130], row_multiple=128)
    refuses(ValueError, r"a\.codes has 384 rows, needed 140 \(or 144\): groups of 135 rows", gemm(other))
    fewer = Groups((5, 100), torch.device("cpu"))
    refuses(ValueError, r"a\.codes has 140 rows, needed 108", gemm(g=fewer))
    refuses(ValueError, r"b\.codes has 2 matrices, needed 3", gemm(g=Groups((5, 130, 0), torch.device("cpu"))))
    refuses(ValueError, r"a\.scales has shape \(419,\), needed \(420,\)", gemm(rows._replace(scales=rows.scales[1:])))
    refuses(TypeError, r"a\.scales has dtype torch\.float64", gemm(rows._replace(scales=rows.scales.double())))
    refuses(TypeError, r"a\.codes has dtype torch\.int8", gemm(rows._replace(codes=rows.codes.view(torch.int8))))
    refuses(ValueError, r"a\.codes has 1 axes, needed 2", gemm(rows._replace(codes=rows.codes.view(-1))))
    half = rows._replace(codes=rows.codes[:, :200])
    refuses(ValueError, r"last axis of a\.codes has 200 elements, which is not a multiple of 128", gemm(half))
    refuses(ValueError, r"b\.codes has 2 axes, needed 3", gemm(b=tiles._replace(codes=tiles.codes[0])))
    short = Fp8Tiles(tiles.codes[..., :256], tiles.scales[..., :2])
    refuses(ValueError, r"b\.codes has rows of 256 elements, needed 384, as in a", gemm(b=short))
    bare = tiles._replace(scales=tiles.scales[..., :2])
    refuses(ValueError, r"b\.scales has shape \(2, 1, 2\), needed \(2, 1, 3\)", gemm(b=bare))
    meta = Fp8Tiles(*(x.to("meta") for x in tiles))
    refuses(ValueError, r"b is on meta, needed cpu, where a is", gemm(b=meta))

    dense_cols = kernels.bf16_to_fp8_col(case.dy)
    refuses(ValueError, r"a\.codes has 2 axes, needed 1", wgrad(dense_cols))
    refuses(ValueError, r"b\.scales has 1 axes, needed 2", wgrad(b=cols._replace(scales=cols.scales.view(-1))))
    refuses(ValueError, r"a\.scales has 3 blocks of rows, needed 2", wgrad(g=Groups((5, 100), torch.device("cpu"))))
    cut = cols._replace(codes=cols.codes[1:])
    refuses(ValueError, r"a\.codes has 24575 elements, needed 24576 for scales of shape \(3, 64\)", wgrad(cut))


# ------------------------------------------------------------------------------------------------------- plain tensors
def plain(sizes, dtype=torch.float64, n=6, k=5):
    generator = torch.Generator().manual_seed(1)

    def values(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return (
        values(sum(sizes), k),
        values(len(sizes), n, k),
        values(sum(sizes), n),
        Groups(tuple(sizes), torch.device("cpu")),
    )


@BY_SIZES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_plain_tensors_are_multiplied_expert_by_expert(sizes, dtype):
    x, w, dy, groups = plain(sizes, dtype)
    y, g = grouped_gemm(x, w, groups), grouped_wgrad(dy, x, groups)
    assert y.dtype is g.dtype is dtype
    unit = {torch.float64: 2.0**-52, torch.bfloat16: 2.0**-8}[dtype]
    for expert in range(len(sizes)):
        part = expert_slice(sizes, expert)
        for got, a, b in ((y[part], x[part], w[expert].t()), (g[expert], dy[part].t(), x[part])):
            want, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            assert (got.double() - want).abs().le(magnitudes * unit * 4).all()


def test_plain_tensors_of_any_strides_and_outputs():
    x, w, dy, groups = plain([3, 0, 4])
    want = grouped_gemm(x, w, groups)
    got = grouped_gemm(x.t().contiguous().t(), w.transpose(1, 2).contiguous().transpose(1, 2), groups)
    assert torch.allclose(got, want, rtol=1e-14, atol=1e-14)
    assert grouped_gemm(x, w, groups, out_dtype=torch.float32).dtype is torch.float32
    assert grouped_wgrad(dy, x, groups, out_dtype=torch.bfloat16).dtype is torch.bfloat16
    assert torch.equal(grouped_gemm(x, w, groups, gemm=Gemm.HOPPER), want)


@pytest.mark.parametrize("sizes", [[], [0, 0]], ids=str)
def test_plain_tensors_without_rows(sizes):
    x, w, dy, groups = plain(sizes)
    assert grouped_gemm(x, w, groups).shape == (0, 6)
    g = grouped_wgrad(dy, x, groups)
    assert g.shape == (len(sizes), 6, 5)
    assert not g.any()


class Linear(torch.autograd.Function):
    """y = x w^T by the two GEMMs alone."""

    @staticmethod
    def forward(ctx, x, w, groups):
        ctx.save_for_backward(x, w)
        ctx.groups = groups
        return grouped_gemm(x, w, groups)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return grouped_gemm(dy, w.transpose(1, 2), ctx.groups), grouped_wgrad(dy, x, ctx.groups), None


@pytest.mark.parametrize("sizes", [[3, 0, 4], [1], [0, 5]], ids=str)
def test_gradients_of_plain_tensors(sizes):
    x, w, _, groups = plain(sizes)
    x.requires_grad_()
    w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: Linear.apply(x, w, groups), (x, w))
    assert torch.autograd.gradcheck(lambda x, w: grouped_gemm(x, w, groups), (x, w))


@pytest.mark.parametrize("has_bf16", [False, True])
def test_bf16_products_on_a_cpu_are_fp32_sums_rounded_once(monkeypatch, has_bf16):
    """|y - exact| <= (K + 1) * 2**-24 * sum |a b|, and half an ulp of BF16; gradients too, whoever multiplies."""
    monkeypatch.setattr(MODULE, "_CPU_HAS_BF16", has_bf16)
    a, b, dy = (torch.randn(shape).bfloat16() for shape in ((2, 9, 64), (64, 48), (2, 9, 48)))
    a.requires_grad_()
    b.requires_grad_()
    y = MODULE.matmul(a, b)
    da, db = torch.autograd.grad(y, [a, b], dy)
    flat_a, flat_dy = a.detach().flatten(0, 1), dy.flatten(0, 1)
    for got, left, right in (
        (y.flatten(0, 1), flat_a, b.detach()),
        (da.flatten(0, 1), flat_dy, b.detach().t()),
        (db, flat_a.t(), flat_dy),
    ):
        assert got.dtype is torch.bfloat16
        exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
        bound = (left.shape[1] + 1) * 2.0**-24 * size
        assert (got.double() - exact).abs().le(bound + 2.0**-9 * (exact.abs() + bound) * 2).all()


def test_wrong_plain_tensors_are_named():
    x, w, dy, groups = plain([3, 4])
    for error, match, call in (
        (TypeError, r"grouped_gemm: a has dtype torch\.int64", lambda: grouped_gemm(x.long(), w, groups)),
        (TypeError, r"b has dtype torch\.float32, needed torch\.float64", lambda: grouped_gemm(x, w.float(), groups)),
        (ValueError, r"a has 1 axes, needed 2", lambda: grouped_gemm(x[0], w, groups)),
        (ValueError, r"b has 2 axes, needed 3", lambda: grouped_gemm(x, w[0], groups)),
        (ValueError, r"a has 6 rows, needed 7, the sum of the groups", lambda: grouped_gemm(x[1:], w, groups)),
        (ValueError, r"b has 1 matrices, needed 2", lambda: grouped_gemm(x, w[1:], groups)),
        (ValueError, r"b has rows of 4 elements, needed 5", lambda: grouped_gemm(x, w[..., 1:], groups)),
        (ValueError, r"b is on meta, needed cpu", lambda: grouped_gemm(x, w.to("meta"), groups)),
        (ValueError, r"grouped_wgrad: b has 6 rows, needed 7, as in a", lambda: grouped_wgrad(dy, x[1:], groups)),
    ):
        with pytest.raises(error, match=match):
            call()


# ------------------------------------------------------------------------------------------------------------- records
def test_records_hold_every_gemm_of_an_expert():
    sizes = [5, 0, 3]
    case = make(sizes)
    with record_gemms() as records:
        y = grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.HOPPER)
        g = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=Gemm.HOPPER, out_dtype=torch.float32)
    grouped_gemm(case.rows, case.tiles, case.groups)
    assert [(r.kind, r.expert) for r in records] == [("rows", 0), ("rows", 2), ("wgrad", 0), ("wgrad", 2)]
    for record, out in zip(records, (y[:5], y[5:], g[0], g[2]), strict=True):
        assert_codes_equal(bits(record.out), bits(out), label=record.kind)
        assert_codes_equal(bits(record.to("cpu").emulated()), bits(out), label=record.kind)
    y.zero_()
    case.rows.codes.view(torch.uint8).zero_()
    assert records[0].out.any()
    assert records[0].emulated().any()


def test_records_show_what_another_backend_returned():
    case = make([300])
    with record_gemms() as records:
        got = grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.DEQUANTIZED, out_dtype=torch.float32)
    assert torch.equal(records[0].out, got)
    assert not torch.equal(records[0].emulated(), got)


def test_recording_does_not_nest_and_ends_with_an_error():
    with record_gemms(), pytest.raises(RuntimeError, match="is recording already"), record_gemms():
        pass
    with pytest.raises(KeyError), record_gemms():
        raise KeyError
    with record_gemms() as records:
        pass
    assert records == []
