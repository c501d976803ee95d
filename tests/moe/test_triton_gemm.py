"""The Triton kernels in triton's interpreter, on sums that are exact in any order, and the table of tiles.

In float32: the interpreter truncates to bfloat16, where the GPU rounds. Bits of the GPU: test_cuda_gemm.py.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from mxsim import kernels  # noqa: E402
from mxsim.kernels import Fp8Cols, RaggedFp8Rows  # noqa: E402
from mxsim.moe import triton_gemm  # noqa: E402
from mxsim.moe.groups import Groups  # noqa: E402
from mxsim.moe.triton_gemm import Config  # noqa: E402
from tests.compare import assert_codes_equal  # noqa: E402
from tests.moe.gemm_cases import bits, exact, expert_cols, expert_rows, expert_tiles  # noqa: E402

CPU = torch.device("cpu")
SIZES = [[5, 0, 70, 1, 3, 0], [0, 0, 33], [1], [64, 0, 129]]
BY_SIZES = pytest.mark.parametrize("sizes", SIZES, ids=str)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """-2 to 2, times a power of two for each row, each 128 rows and each 128 columns: sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=generator).float()
    x = x * (1 + torch.arange(shape[-2]) // 128 % 2)[:, None]
    for axis, step in ((-2, 1), (-1, 128)):
        count = -(-shape[axis] // step)
        factors = torch.exp2(torch.randint(0, 3, (count,), generator=generator)).repeat_interleave(step)[: shape[axis]]
        x = x * (factors[:, None] if axis == -2 else factors)
    return x.bfloat16()


def rounded(values: np.ndarray) -> np.ndarray:
    """Exact float64 as bits of float32, which the sums of this file are without rounding."""
    assert (values.astype(np.float32) == values).all()
    return bits((values + 0.0).astype(np.float32))


def unwritten(monkeypatch):
    """Results start as NaN, so that what a kernel leaves out shows."""
    monkeypatch.setattr(
        torch, "empty", lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype, device=device)
    )


@BY_SIZES
@pytest.mark.parametrize("config", [Config(32, 128, 4, 3), Config(64, 64, 4, 3, tma=True), Config(16, 256, 8, 3)])
@pytest.mark.usefixtures("interpreted")
def test_rows_are_exact_where_sums_are(monkeypatch, sizes, config):
    n, k = 208, 256
    rows = kernels.bf16_to_fp8_row(integers(sum(sizes), k, seed=1), group_sizes=sizes)
    tiles = kernels.bf16_to_fp8_tile(integers(len(sizes), n, k, seed=2))
    unwritten(monkeypatch)
    got = triton_gemm.rows(rows, tiles, Groups(tuple(sizes), CPU), torch.float32, config=config)
    assert got.dtype is torch.float32
    start = 0
    for expert, size in enumerate(sizes):
        want, _ = exact(expert_rows(rows, sizes, expert), expert_tiles(tiles, expert))
        assert_codes_equal(bits(got[start : start + size] + 0.0), rounded(want), label=f"expert {expert}")
        start += size


@BY_SIZES
@pytest.mark.parametrize("config", [Config(32, 128, 4, 3), Config(64, 64, 4, 3), Config(64, 128, 4, 3, tma=True)])
@pytest.mark.usefixtures("interpreted")
def test_wgrad_is_exact_where_sums_are(monkeypatch, sizes, config):
    a = kernels.bf16_to_fp8_col(integers(sum(sizes), 96, seed=3), group_sizes=sizes)
    b = kernels.bf16_to_fp8_col(integers(sum(sizes), 160, seed=4), group_sizes=sizes)
    unwritten(monkeypatch)
    got = triton_gemm.wgrad(a, b, Groups(tuple(sizes), CPU), torch.float32, config=config)
    assert got.shape == (len(sizes), 96, 160)
    assert got.dtype is torch.float32
    for expert, size in enumerate(sizes):
        want = np.zeros((96, 160))
        if size:
            want, _ = exact(expert_cols(a, sizes, expert), expert_cols(b, sizes, expert))
        assert_codes_equal(bits(got[expert] + 0.0), rounded(want), label=f"expert {expert}")


@pytest.mark.usefixtures("interpreted")
def test_operands_in_buffers_for_any_sizes():
    sizes, groups = [5, 0, 3], Groups((5, 0, 3), CPU)
    x, dy = integers(8, 256, seed=5), integers(8, 64, seed=6)
    rows = kernels.bf16_to_fp8_row(x, group_sizes=sizes)
    tiles = kernels.bf16_to_fp8_tile(integers(3, 64, 256, seed=7))
    a, b = (kernels.bf16_to_fp8_col(t, group_sizes=sizes) for t in (dy, x))
    big_rows = RaggedFp8Rows(torch.cat([rows.codes, rows.codes]), torch.cat([rows.scales, rows.scales]), None)
    big_a = Fp8Cols(torch.cat([a.codes, a.codes]), torch.cat([a.scales, a.scales]), None)
    out = torch.float32
    assert torch.equal(triton_gemm.rows(big_rows, tiles, groups, out), triton_gemm.rows(rows, tiles, groups, out))
    assert torch.equal(triton_gemm.wgrad(big_a, b, groups, out), triton_gemm.wgrad(a, b, groups, out))


def test_a_table_of_tiles():
    groups = Groups((130, 0, 3), CPU)
    assert np.array(triton_gemm.tiles_of(groups, 64)).reshape(-1, 8).tolist() == [
        [0, 0, 3, 0, 130, 0, 0, 132],
        [0, 0, 3, 0, 130, 0, 0, 132],
        [0, 0, 3, 0, 130, 0, 0, 132],
        [2, 3, 1, 0, 3, 130, 132, 4],
    ]
    assert triton_gemm.block_bounds(groups) == [0, 2, 2, 3]


@pytest.mark.parametrize("sizes", [[16 * 64 + 1], [5, 0, 40 * 64, 64]], ids=str)
def test_runs_of_tiles_cover_every_row_once(sizes):
    table = np.array(triton_gemm.tiles_of(Groups(tuple(sizes), CPU), 64)).reshape(-1, 8)
    assert table[:, 2].max() == 16
    columns = 3
    covered = set()
    for program in range(len(table) * columns):  # as _rows has it
        expert, first_tile, num_tiles, first_row, size, *_ = table[program // columns].tolist()
        in_run = program - first_tile * columns
        row, column = first_row + in_run % num_tiles * 64, in_run // num_tiles
        assert 0 <= row < size
        assert 0 <= column < columns
        covered.add((expert, row, column))
    tiles = [(e, row, c) for e, size in enumerate(sizes) for row in range(0, size, 64) for c in range(columns)]
    assert covered == set(tiles)
    assert len(table) * columns == len(tiles)
