"""`mxsim study`: table, CSV, JSON, pictures; and that a failure leaves nothing behind."""

import csv
import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mxsim
from mxsim.analysis import study_file
from mxsim.analysis.study import COLUMNS
from mxsim.blocks import MXFP4, NVFP4, ScaleRule
from mxsim.cli import app

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = "format     SQNR dB max % mean % sat. % zero % subn. % spread h=0 % h=6 %"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A file with the kinds of tensor that a checkpoint has."""
    random = np.random.default_rng(0)
    tensors = {
        "encoder.attention.query.weight": random.standard_normal((64, 160)).astype(np.float32),
        "encoder.attention.query.bias": random.standard_normal(64).astype(np.float16),
        "norm.weight": np.ones(64, np.float32),
        "zeros": np.zeros((3, 40), np.float32),
        "temperature": np.float64(0.07),
        "position_ids": np.arange(64),
        "mask": np.ones(4, bool),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "in" / "model.npz"
    path.parent.mkdir()
    np.savez(path, **tensors)
    return path


def study(*args: str | Path, columns: int = 80, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["study", *map(str, args)])
    assert result.exit_code == status, result.output
    if status:
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        return result.stderr
    assert result.stderr == ""
    return result.stdout


# ------------------------------------------------------------------------------------------------------------- table
def test_the_table_has_a_section_for_each_tensor_and_one_for_all(checkpoint):
    lines = study(checkpoint).splitlines()
    assert lines[0] == HEADER
    headings = [line for before, line in pairwise(lines) if before == "" and "," in line]
    assert headings[:5] == [
        "encoder.attention.query.weight  64 x 160, float32",
        "encoder.attention.query.bias  64, float16",
        "norm.weight  64, float32",
        "zeros  3 x 40, float32",
        "temperature  scalar, float64",
    ]
    first = lines.index(headings[0])
    assert [line.split()[0] for line in lines[first + 1 : first + 6]] == [
        "MXFP4",
        "NVFP4",
        "MXFP6_E2M3",
        "MXFP8_E4M3",
        "FP8_1X128",
    ]
    assert "all 5 tensors" in lines
    assert "Skipped: position_ids (int64: not floating-point)" in lines
    assert "Skipped: mask (bool: not floating-point)" in lines
    assert "Skipped: empty (no elements)" in lines


def test_the_numbers_are_those_of_the_study(checkpoint):
    (row,) = study_file(checkpoint, formats=[MXFP4], tensors=["encoder.attention.query.weight"]).rows
    line = study(checkpoint, "--format", "mxfp4", "--tensor", "*query.weight").splitlines()[3]
    assert line.split() == [
        "MXFP4",
        f"{row.sqnr_db:.2f}",
        "100",
        *(f"{100 * x:.2f}" for x in (row.mean_relative_error, row.saturated, row.underflowed, row.subnormal)),
        f"{row.max_spread:.0f}",
        "100",
        "100",
    ]


def test_an_exact_tensor_and_zeros(checkpoint):
    lines = study(checkpoint, "--format", "MXFP4", "--tensor", "norm*", "--tensor", "zeros").splitlines()
    assert lines[3].split() == ["MXFP4", "exact", "0", "0", "0", "0", "0", "0", "100", "100"]
    assert lines[6].split() == ["MXFP4", "-", "-", "-", "0", "0", "0", "100", "100"]


@pytest.mark.parametrize("columns", [80, 140])
def test_every_line_of_the_table_fits_the_terminal(checkpoint, columns):
    x = np.random.default_rng(0).standard_normal((40, 64))
    x[0, 0] = np.nan
    np.save(checkpoint.parent / "nan.npy", x)
    rules = [word for rule in ScaleRule for word in ("--scale-rule", rule.name)]
    for args in ([checkpoint], [checkpoint, *rules], [checkpoint.parent / "nan.npy", *rules]):
        assert max(map(len, study(*args, columns=columns).splitlines())) <= columns


def test_poisoned_blocks_have_a_column_where_there_are_any(checkpoint):
    x = np.ones((2, 64))
    x[0, 0] = np.inf
    np.save(checkpoint.parent / "inf.npy", x)
    output = study(checkpoint.parent / "inf.npy", "--format", "MXFP4", columns=100)
    assert "NaN" in output.splitlines()[0].split()
    assert output.splitlines()[3].split()[:8] == ["MXFP4", "exact", "0", "0", "0", "0", "0", "1"]
    assert "NaN" not in study(checkpoint)


def test_rules_and_axis(checkpoint):
    output = study(checkpoint, "--scale-rule", "floor", "--scale-rule", "EVEN", "--format", "MXFP4", "--axis", "0")
    assert "MXFP4 FLOOR" in output
    assert "MXFP4 EVEN" in output
    expected = study_file(checkpoint, formats=[MXFP4], axis=0, scale_rules=[ScaleRule.EVEN]).totals[0].sqnr_db
    assert f"MXFP4 EVEN    {expected:.2f}" in output.split("all 5 tensors")[1]


def test_shares_that_nearly_are_all_or_nothing_do_not_say_so():
    from mxsim.commands.study import _percent

    shares = (0.0, 1e-9, 0.5, 0.9998, 1 - 1e-9, 1.0, 12.0, math.nan)
    assert [_percent(x) for x in shares] == ["0", "<0.01", "50.00", "99.98", ">99.99", "100", "1.2e+03", "-"]


def test_names_cannot_steer_the_terminal(tmp_path):
    np.savez(tmp_path / "x.npz", **{"a\x1b[31mb\nc [bold]": np.ones(3)})
    output = study(tmp_path / "x.npz")
    assert "a\\x1b[31mb\\nc [bold]  3, float64" in output


# ------------------------------------------------------------------------------------------------------ JSON and CSV
def test_json_has_every_row_and_is_valid(checkpoint):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(study(checkpoint, "--json"), parse_constant=refuse)
    expected = study_file(checkpoint)
    assert len(document["rows"]) == len(expected.rows)
    for got, row in zip(document["rows"], expected.rows, strict=True):
        assert got["tensor"] == row.tensor
        for name in (*COLUMNS[5:], "spread_counts"):
            value = getattr(row, name)
            if isinstance(value, float) and math.isnan(value):
                assert got[name] is None
            elif value == math.inf:
                assert got[name] == "inf"
            else:
                assert got[name] == (list(value) if isinstance(value, tuple) else value)
    assert [total["format"] for total in document["totals"]] == [total.format for total in expected.totals]
    assert {entry["tensor"] for entry in document["skipped"]} == {"position_ids", "mask", "empty"}


def test_csv_is_the_tidy_table(checkpoint, tmp_path):
    study(checkpoint, "--csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = study_file(checkpoint).rows
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == len(expected)
    for got, row in zip(rows, expected, strict=True):
        assert got["tensor"] == row.tensor
        assert got["shape"] == "x".join(map(str, row.shape))
        assert got["scale_rule"] == (row.scale_rule or "")
        assert got["sqnr_db"] == ("" if math.isnan(row.sqnr_db) else repr(row.sqnr_db))
        assert got["max_spread"] == ("" if math.isnan(row.max_spread) else repr(row.max_spread))


def test_csv_replaces_what_was_there(checkpoint, tmp_path):
    (tmp_path / "out.csv").write_text("old")
    study(checkpoint, "--csv", tmp_path / "out.csv", "--json")
    assert (tmp_path / "out.csv").read_text().startswith("tensor,")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.csv"]


# ----------------------------------------------------------------------------------------------------------- pictures
def test_pictures(checkpoint, tmp_path):
    pytest.importorskip("seaborn")
    study(checkpoint, "--plot", tmp_path / "plots", "--scale-rule", "FLOOR", "--scale-rule", "RCEIL")
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in pictures] == ["shares.png", "spread.png", "sqnr.png"]
    assert all(path.read_bytes().startswith(PNG_SIGNATURE) for path in pictures)


def test_pictures_of_many_tensors_without_mxfp4(tmp_path):
    pytest.importorskip("seaborn")
    random = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", **{f"t{i}": random.standard_normal(40) for i in range(50)}, zero=np.zeros(3))
    study(tmp_path / "x.npz", "--plot", tmp_path / "plots", "--format", "NVFP4")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["shares.png", "sqnr.png"]


def test_pictures_of_nothing_but_zeros(tmp_path):
    pytest.importorskip("seaborn")
    np.save(tmp_path / "x.npy", np.zeros((3, 40)))
    study(tmp_path / "x.npy", "--plot", tmp_path / "plots")


def test_without_matplotlib_plot_says_what_to_install(checkpoint, tmp_path, monkeypatch):
    for module in ("mxsim.commands.study_plots", "mxsim.plotting"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = study(checkpoint, "--plot", tmp_path / "plots", status=2)
    assert message == "mxsim: --plot needs matplotlib; install it: pip install 'mxsim[figures]'\n"
    assert not (tmp_path / "plots").exists()


def test_matplotlib_is_loaded_for_plot_only(checkpoint):
    program = (
        "import sys; from mxsim.cli import app\ntry: app(sys.argv[1:])\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "study", str(checkpoint)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(mxsim.__file__).parents[1])},
        check=True,
    )
    assert "all 5 tensors" in result.stdout
    assert {"matplotlib", "pandas", "torch", "scipy"} & set(result.stderr.split()) == set()


# ------------------------------------------------------------------------------------------------------------- errors
def test_bad_files_leave_nothing(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"garbage")
    before = sorted(tmp_path.rglob("*"))
    for name in ("x.npy", "missing.npy", "."):
        study(tmp_path / name, "--csv", tmp_path / "out.csv", "--plot", tmp_path / "plots", status=2)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "args, reason",
    [
        (["--csv", "{}/missing/out.csv"], "No such file or directory"),
        (["--csv", "{}"], "is a directory"),
        (["--csv", "{}/in/model.npz"], "is the file to study"),
        (["--plot", "{}/in/model.npz"], "is not a directory"),
        (["--plot", "{}/missing/plots"], "No such file or directory"),
        (["--format", "MXFP5"], "unknown format 'MXFP5'; did you mean MXFP4?"),
        (["--format", "E4M3"], "unknown format 'E4M3'"),
        (["--scale-rule", "FLOR"], "did you mean FLOOR?"),
        (["--tensor", "nothing*"], "none of its 8 tensors fits nothing*"),
        (
            ["--tensor", "mask", "--tensor", "empty"],
            "nothing to study; mask (bool: not floating-point); empty (no elements)",
        ),
        (["--axis", "7"], "axis is 7"),
        (["--axis", "x"], "--axis"),
        (["--csv", "{}/out.csv", "--plot", "{}/plots", "--axis", "9"], "axis is 9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_leave_nothing(checkpoint, tmp_path, args, reason):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert reason in study(checkpoint, *(arg.format(tmp_path) for arg in args), status=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_formats_that_a_tensor_has_too_few_axes_for_are_noted_once(checkpoint):
    output = study(checkpoint, "--format", "FP8_128X128", "--format", "FP8_128X1", columns=200)
    assert "FP8_128X128 of encoder.attention.query.bias, norm.weight, temperature (the tensor has 1 axes" in output


# ----------------------------------------------------------------------------------------------------------- progress
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal")
def test_the_progress_bar_is_for_terminals_and_on_stderr(checkpoint):
    import pty

    np.save(checkpoint.parent / "long.npy", np.ones((300, 500), np.float32))
    outputs = {}
    for options in ((), ("--json",)):
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "mxsim.cli", "study", str(checkpoint.parent / "long.npy"), *options],
            stdout=subprocess.PIPE,
            stderr=follower,
            env=os.environ | {"PYTHONPATH": str(Path(mxsim.__file__).parents[1]), "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(follower)
        shown = b""
        while chunk := _read(leader):
            shown += chunk
        outputs[options] = process.communicate()[0], shown
        os.close(leader)
        assert process.returncode == 0
    table, shown = outputs[()]
    assert b"studying" in shown
    assert b"studying" not in table
    assert b"\x1b" not in table
    assert outputs["--json",][1] == b""


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


def test_other_formats_need_no_rule(checkpoint):
    assert study_file(checkpoint, formats=[NVFP4], scale_rules=[ScaleRule.EVEN]).rows[0].scale_rule is None
