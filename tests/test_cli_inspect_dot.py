"""`mxsim inspect --dot`: a dot product step by step."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from mxsim.blocks import FP8_1X128, fp8_gemm, quantize
from mxsim.cli import app


@pytest.fixture
def files(tmp_path):
    r = np.random.default_rng(1)
    a, b = r.normal(size=(3, 200)).astype(np.float32), r.normal(size=200).astype(np.float32)
    paths = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    for path, x in zip(paths, (a, b), strict=True):
        np.save(path, x)
    return paths, a, b


def inspect(*args: str, columns: int = 100) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", *args])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("row", [0, 2])
def test_the_walk_ends_in_the_result(files, row):
    paths, a, b = files
    document = json.loads(inspect("--dot", *paths, "--row", str(row), "--json"))
    want = fp8_gemm(*(quantize(x, FP8_1X128) for x in (a[row : row + 1], b[None])))[0, 0]
    assert float(document["result"]) == want == float(document["spans"][-1]["sum_after"])
    assert [step["start"] for span in document["spans"] for step in span["steps"]] == list(range(0, 200, 32))


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_nothing_is_cut_off_or_wider_than_the_terminal(files, columns):
    output = inspect("--dot", *files[0], columns=columns)
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= columns
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("block")] == ["block 0", "block 1"]
    assert "192-199" in output


def refuse(*args: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *args], standalone_mode=False)
    return f"{result.exit_code}: {result.stderr}"


def test_refused(files, tmp_path):
    a, b = files[0]
    np.save(tmp_path / "nan.npy", np.full(200, np.nan, np.float32))
    np.save(tmp_path / "short.npy", np.ones(100, np.float32))
    for args, message in (
        ((), "missing argument VALUE_OR_CODE"),
        (("1", "--dot", a, b), "--dot takes two files, and neither VALUE_OR_CODE"),
        (("--dot", a, str(tmp_path / "none.npy")), "none.npy: no such file"),
        (("--dot", a, b, "--row", "3"), "--row is 3, but"),
        (("--dot", a, b, "--column", "1"), "--column is 1, but"),
        (("--dot", a, str(tmp_path / "nan.npy")), "nan.npy: row 0 holds NaN or infinities"),
        (("--dot", a, str(tmp_path / "short.npy")), "needed as many"),
    ):
        assert message in refuse(*args), args
