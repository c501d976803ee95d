"""The grouped GEMMs on a GPU: every backend against Hopper's emulation on the same device, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from mxsim.moe.grouped_gemm import Gemm, grouped_gemm, grouped_wgrad, record_gemms  # noqa: E402
from mxsim.moe.groups import Groups  # noqa: E402
from tests.compare import assert_codes_equal  # noqa: E402
from tests.moe.gemm_cases import OUTPUTS, SIZES, bits, make  # noqa: E402

pytestmark = pytest.mark.gpu

CASES = {**SIZES, "many small": [0, 3, 128, 64, 1] * 12, "one has 2500": [2500, 0, 7]}
BY_SIZES = pytest.mark.parametrize("sizes", CASES.values(), ids=list(CASES))
BY_OUTPUT = pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
HOPPERS = [Gemm.CUBLASLT, Gemm.SCALED_MM, Gemm.TRITON]
# Few output tiles and a long K make cuBLAS split K (NUMERICS 9.5): not with these.
N, K = 1056, 640


@pytest.fixture(autouse=True, scope="module")
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")


@BY_SIZES
@BY_OUTPUT
@pytest.mark.parametrize("gemm", [*HOPPERS, Gemm.AUTO])
def test_rows_have_the_emulations_bits(sizes, out_dtype, gemm):
    case = make(sizes, N, K, device="cuda")
    got = grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm, out_dtype=out_dtype)
    want = grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.HOPPER, out_dtype=out_dtype)
    assert_codes_equal(bits(got), bits(want), label=gemm)


@BY_SIZES
@BY_OUTPUT
@pytest.mark.parametrize("gemm", [*HOPPERS, Gemm.AUTO])
def test_wgrad_has_the_emulations_bits(sizes, out_dtype, gemm):
    case = make(sizes, 288, K, device="cuda")
    got = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=gemm, out_dtype=out_dtype)
    want = grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=Gemm.HOPPER, out_dtype=out_dtype)
    assert_codes_equal(bits(got), bits(want), label=gemm)


@pytest.mark.parametrize("gemm", HOPPERS)
def test_NaN_is_Hoppers(gemm):
    case = make([70, 9], N, K, device="cuda")
    case.rows.codes.view(torch.uint8)[3, 5] = 0xFF
    case.tiles.scales[1, 2, 1] = torch.nan
    for out_dtype in OUTPUTS:
        got, want = (
            grouped_gemm(case.rows, case.tiles, case.groups, gemm=g, out_dtype=out_dtype) for g in (gemm, Gemm.HOPPER)
        )
        assert bool(want.isnan().any())
        assert_codes_equal(bits(got), bits(want), label=gemm)


@pytest.mark.parametrize("gemm", HOPPERS)
def test_bits_of_the_gpu_carried_to_a_cpu(gemm):
    case = make([40, 0, 21], 288, 256, device="cuda")
    with record_gemms() as records:
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm)
        grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=gemm, out_dtype=torch.float32)
    assert [r.kind for r in records] == ["rows", "rows", "wgrad", "wgrad"]
    for record in (r.to("cpu") for r in records):
        assert_codes_equal(bits(record.emulated()), bits(record.out), label=f"{record.kind} {record.expert}")


def test_dequantized_is_near():
    case = make([300, 5], N, K, device="cuda")
    got, want = (
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=g, out_dtype=torch.float32)
        for g in (Gemm.DEQUANTIZED, Gemm.HOPPER)
    )
    assert float((got - want).norm() / want.norm()) < 1e-3  # Hopper keeps 14 bits of a sum of 128


@BY_SIZES
def test_bfloat16_tensors_are_multiplied_expert_by_expert(sizes):
    case = make(sizes, 64, 128, device="cuda")
    pairs = (
        (grouped_gemm(case.x, case.w, case.groups), case.x.split(sizes), case.w.transpose(1, 2)),
        (grouped_gemm(case.dy, case.w.transpose(1, 2), case.groups), case.dy.split(sizes), case.w),
        (grouped_wgrad(case.dy, case.x, case.groups), [t.t() for t in case.dy.split(sizes)], case.x.split(sizes)),
    )
    for got, a, b in pairs:
        assert got.dtype is torch.bfloat16
        parts = got.split(sizes) if got.dim() == 2 else got
        for part, a_e, b_e in zip(parts, a, b, strict=True):
            want, magnitudes = a_e.double() @ b_e.double(), a_e.double().abs() @ b_e.double().abs()
            assert bool(((part.double() - want).abs() <= magnitudes * 2.0**-8).all())


def test_a_captured_graph_replays():
    case = make([130, 0, 5], N, K, device="cuda")
    for gemm in HOPPERS:
        want = grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = grouped_gemm(case.rows, case.tiles, case.groups, gemm=gemm)
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------------------- cuBLASLt
def assert_bits_of_cublaslt(case, out_dtype=torch.float32):
    got, want = (
        grouped_gemm(case.rows, case.tiles, case.groups, gemm=g, out_dtype=out_dtype)
        for g in (Gemm.CUBLASLT, Gemm.HOPPER)
    )
    assert_codes_equal(bits(got), bits(want), label=f"rows {case.groups.sizes}")
    got, want = (
        grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=g, out_dtype=out_dtype)
        for g in (Gemm.CUBLASLT, Gemm.HOPPER)
    )
    assert_codes_equal(bits(got), bits(want), label=f"wgrad {case.groups.sizes}")


@BY_OUTPUT
def test_cublaslt_takes_any_number_of_rows(out_dtype):
    """Many m by the algorithm of another: every size up to 160, and some larger ones."""
    assert_bits_of_cublaslt(make([*range(161), 1000, 1001, 1024, 2047], 288, 384, device="cuda"), out_dtype)


def test_cublaslt_does_not_split_k():
    """scaled_mm does at this shape (NUMERICS 9.5)."""
    for sizes in ([256], [64], [4]):
        case = make(sizes, 128, 7168, device="cuda")
        got, want = (
            grouped_gemm(case.rows, case.tiles, case.groups, gemm=g, out_dtype=torch.float32)
            for g in (Gemm.CUBLASLT, Gemm.HOPPER)
        )
        assert_codes_equal(bits(got), bits(want), label=f"{sizes} x 128 x 7168")
    case = make([7168], 128, 256, device="cuda")
    got, want = (
        grouped_wgrad(case.dy_cols, case.x_cols, case.groups, gemm=g, out_dtype=torch.float32)
        for g in (Gemm.CUBLASLT, Gemm.HOPPER)
    )
    assert_codes_equal(bits(got), bits(want), label="wgrad 128 x 256 x 7168")


def test_cublaslt_on_two_streams_and_threads():
    cases = [make([300, 0, 45], N, K, seed=seed, device="cuda") for seed in range(2)]
    wants = [grouped_gemm(c.rows, c.tiles, c.groups, gemm=Gemm.HOPPER) for c in cases]
    torch.cuda.synchronize()

    def run(case):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [grouped_gemm(case.rows, case.tiles, case.groups, gemm=Gemm.CUBLASLT) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return got

    with ThreadPoolExecutor(2) as pool:
        for got, want in zip(pool.map(run, cases), wants, strict=True):
            assert all(torch.equal(x, want) for x in got)


def test_cublaslt_on_the_device_of_its_operands():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    for device in ("cuda:1", "cuda:0"):
        case = make([130, 0, 5], N, K, device=device)
        got, want = (
            grouped_gemm(case.rows, case.tiles, case.groups, gemm=g, out_dtype=torch.float32)
            for g in (Gemm.CUBLASLT, Gemm.HOPPER)
        )
        assert got.device == torch.device(device)
        assert_codes_equal(bits(got), bits(want), label=device)


def test_ends_are_on_the_device_without_waiting():
    groups = Groups((3, 0, 4), torch.device("cuda"))
    assert groups.ends.is_cuda
    assert groups.ends.tolist() == [3, 3, 7]
