"""The command as a whole: version, help, one-line errors, signals, a closed pipe."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mxsim
from mxsim.cli import app

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(mxsim.__file__).parents[1]), "COLUMNS": "80"}
COMMAND = [sys.executable, "-m", "mxsim.cli"]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, env=ENVIRONMENT, check=False)


def invoke(*args: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(args))


def test_version():
    assert invoke("--version").output == f"mxsim {mxsim.__version__}\n"


def test_without_a_command_there_is_help():
    result = invoke()
    assert result.exit_code == 0
    for command in ("inspect", "study"):
        assert command in result.output


@pytest.mark.parametrize("command", ["inspect", "study"])
def test_every_command_has_help_with_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: mxsim {command}" in result.output


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["--nope"],
        ["inspect"],
        ["inspect", "foo"],
        ["inspect", "1", "2"],
        ["inspect", "1", "--format"],
        ["inspect", "1", "--format", "E4M4"],
        ["inspect", "1", "--as", "banana"],
        ["inspect", "-5", "--as", "code"],
        ["inspect", "0x7e", "--format", "E2M1"],
        ["study"],
        ["study", "missing.npy"],
        ["study", "missing.npy", "--axis", "x"],
        ["study", "a", "b"],
        ["study", "missing\x1b[31m\n.npy"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_status_2(args):
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mxsim: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.removesuffix("\n").isprintable()


def test_the_script_does_as_the_app_does():
    result = run("inspect", "foo")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("mxsim: 'foo' is neither a number")
    assert run("--version").stdout == f"mxsim {mxsim.__version__}\n"


def test_an_error_of_our_own_is_not_hidden(monkeypatch):
    def fail(*args, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("mxsim.commands.inspect.inspect", fail)
    assert isinstance(invoke("inspect", "1").exception, ZeroDivisionError)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="no SIGPIPE here")
def test_a_closed_pipe_is_quiet():
    process = subprocess.Popen(
        [*COMMAND, "inspect", "0.1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        restore_signals=True,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == -signal.SIGPIPE
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "inspect", "1"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "mxsim: cannot write to standard output: No space left on device\n"


def test_an_output_that_cannot_say_everything_still_works():
    result = subprocess.run(
        [*COMMAND, "inspect", "0.1"],
        capture_output=True,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert result.returncode == 0
    assert b"E4M3" in result.stdout


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGINT, 130, "mxsim: interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupt_is_at_most_one_line_and_leaves_no_file(tmp_path, number, status, line):
    # A file that takes minutes: 16 GB of zeros, of which the disk holds none.
    path = tmp_path / "long.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**16, 2**16)})
        file.truncate(file.tell() + 2**34)
    process = subprocess.Popen(
        [*COMMAND, "study", str(path), "--csv", str(tmp_path / "out.csv"), "--plot", str(tmp_path / "pictures")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
        # A shell's background jobs ignore interrupts, and so would a Python that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.csv*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (status, "", line)
    assert [entry.name for entry in tmp_path.iterdir()] == ["long.npy"]
