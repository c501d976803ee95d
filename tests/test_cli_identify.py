"""`mxsim identify`: table, JSON, exit statuses, one line for what cannot be used."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from mxsim.blocks import FP8_1X128
from mxsim.cli import app
from tests.analysis.test_profiles import named

X = np.array([[7.0, 2.5, -0.25, 0.0] * 16], np.float32)


def run(*args: str | Path, columns: int = 120, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["identify", *map(str, args)])
    assert result.exit_code == status, result.output
    if status == 2:
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        return result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture
def stored(tmp_path) -> Path:
    codes, scales = named("DeepGEMM").quantize(X)
    path = tmp_path / "kernel.npz"
    np.savez(path, inputs=X, codes=codes[:, ::2] | codes[:, 1::2] << 4, scales=scales)
    return path


def test_the_profile_that_fits_comes_first_and_names_its_source(stored):
    lines = run(stored).splitlines()
    assert lines[1] == "MXFP4, 1 x 64: 1 of 15 profiles reproduces every byte"
    assert lines[2].split() == ["profile", "scales", "codes", "blocks", "first", "difference"]
    assert lines[3].split() == ["DeepGEMM", "=", "=", "2"]
    assert lines[4].split()[:2] == ["mxsim", "RCEIL"]
    assert "code [0, 0]: 0x05, by the profile 0x06; element 7" in lines[4]
    assert any(line.startswith("DeepGEMM: DeepGEMM deep_gemm/utils/math.py") for line in lines)


def test_of_several_that_fit_the_blocks_that_tell_them_apart_are_shown(tmp_path):
    x = np.full((1, 32), 6.0, np.float32)
    codes, scales = named("mxsim RCEIL").quantize(x)
    np.savez(tmp_path / "few.npz", inputs=x, codes=codes, scales=scales)
    text = run(tmp_path / "few.npz")
    assert "[1.75]  mxsim FLOOR: scale 0x7D, codes 7;  mxsim RCEIL: scale 0x7E, codes 6" in text
    assert "more pairs: see --json" in text
    document = json.loads(run(tmp_path / "few.npz", "--json"))
    assert {"values", "block"} & document["distinctions"][0].keys() == {"block"}
    assert len(document["groups"]) == len(document["fits"])


def test_nobody_fits_is_status_1(tmp_path):
    codes, scales = named("DeepGEMM").quantize(X)
    np.savez(tmp_path / "wrong.npz", inputs=X, codes=codes ^ 1, scales=scales)
    assert "none of 15 profiles reproduce every byte" in run(tmp_path / "wrong.npz", status=1)
    assert json.loads(run(tmp_path / "wrong.npz", "--json", status=1))["fits"] == []


def test_safetensors_of_other_names_and_bfloat16(tmp_path):
    x = np.tile(X, (2, 2)).astype(ml_dtypes.bfloat16)
    codes, scales = named("DeepGEMM", FP8_1X128).quantize(x)
    header, data = {}, b""
    for name, dtype, array in (("x", "BF16", x), ("q", "F8_E4M3", codes), ("s", "F32", scales)):
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path = _written(tmp_path / "kernel.safetensors", len(text).to_bytes(8, "little") + text + data)
    document = json.loads(run(path, "--inputs", "x", "--codes", "q", "--scales", "s", "--json"))
    assert document["format"] == "FP8_1X128"
    assert "DeepGEMM" in document["fits"]


def test_a_format_may_be_named(tmp_path):
    zeros = np.zeros_like(X)
    codes, scales = named("mxsim FLOOR").quantize(zeros)
    np.savez(tmp_path / "zeros.npz", inputs=zeros, codes=codes, scales=scales)
    assert json.loads(run(tmp_path / "zeros.npz", "--json"))["format"] == "MXFP4"
    assert json.loads(run(tmp_path / "zeros.npz", "--format", "mxfp8_e4m3", "--json"))["format"] == "MXFP8_E4M3"
    assert "unknown format 'MXFP5'; did you mean MXFP4?" in run(tmp_path / "zeros.npz", "--format", "MXFP5", status=2)


def test_a_narrow_terminal_gets_fewer_columns(stored):
    lines = run(stored, columns=60).splitlines()
    assert max(map(len, lines[:18])) <= 60
    assert lines[3].split()[:3] == ["DeepGEMM", "=", "="]


def test_what_cannot_be_used_is_one_line_and_status_2(tmp_path, stored):
    assert "no such file" in run(tmp_path / "missing.npz", status=2)
    assert "unknown kind of file '.txt'" in run(_written(tmp_path / "a.txt", b"x"), status=2)
    assert "is damaged" in run(_written(tmp_path / "a.npz", b"PK\x03\x04 nonsense"), status=2)
    assert "has no x, it has inputs, codes, scales" in run(stored, "--inputs", "x", status=2)
    with np.load(stored) as arrays:
        np.savez(tmp_path / "short.npz", **{**arrays, "scales": arrays["scales"][:, :1]})
        np.savez(tmp_path / "ints.npz", **{**arrays, "inputs": arrays["codes"]})
        np.savez(tmp_path / "nan.npz", **{**arrays, "inputs": arrays["inputs"] * np.nan})
        np.savez(tmp_path / "empty.npz", **{**arrays, "inputs": arrays["inputs"][:0]})
    assert "short.npz: inputs [1, 64], codes [1, 32] and scales [1, 1] uint8 fit none" in run(
        tmp_path / "short.npz", status=2
    )
    assert "ints.npz: inputs has dtype uint8" in run(tmp_path / "ints.npz", status=2)
    assert "holds no finite number" in run(tmp_path / "nan.npz", status=2)
    assert "inputs has shape (0, 64)" in run(tmp_path / "empty.npz", status=2)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_help_has_an_example():
    assert "Example: mxsim identify" in " ".join(run("--help").split())
