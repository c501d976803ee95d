"""The cache of compiled kernels and the search for a compiler: concurrent processes, damage, read-only folders."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from mxsim import kernels
from mxsim.kernels import build, host, operators, simulated
from tests.kernels.expected import assert_bits_equal, bits_of

GPP = shutil.which("g++")
needs_gpp = pytest.mark.skipif(GPP is None, reason="no g++")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A cache, a home and a temporary folder of the test's own."""
    for name in ("cache", "home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("MXSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    cached_functions = build._host_compiler, build._process_folder
    for function in cached_functions:
        function.cache_clear()
    yield tmp_path
    for function in cached_functions:
        function.cache_clear()


class Maker:
    """make(path) that writes its content and counts."""

    def __init__(self, content: bytes = b"artefact"):
        self.content, self.calls = content, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.content)


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


# ------------------------------------------------------------------------------------------------------------ the cache
def test_the_same_parts_are_made_once(places):
    make = Maker()
    path = build.cached("thing", ".bin", [b"a", b"b"], make)
    assert path.parent == places / "cache"
    assert path.read_bytes() == b"artefact"
    assert build.cached("thing", ".bin", [b"a", b"b"], make) == path
    assert make.calls == 1
    assert files_in(places / "cache") == [path.name]


def test_other_parts_are_another_artefact():
    make = Maker()
    parts = [[b"a", b"b"], [b"ab", b""], [b"", b"ab"], [b"ab"], [b"a", b"c"], [b"b", b"a"]]
    assert len({build.cached("thing", ".bin", p, make) for p in parts}) == len(parts)
    assert build.cached("other", ".bin", parts[0], make).name.startswith("other-")
    assert make.calls == len(parts) + 1


@pytest.mark.parametrize("damaged", [b"", b"artefac", b"artefact ", b"something else"])
def test_a_truncated_or_foreign_file_is_made_again(places, damaged):
    make = Maker()
    path = build.cached("thing", ".bin", [b"a"], make)
    path.write_bytes(damaged)
    assert build.cached("thing", ".bin", [b"a"], make) == path
    assert path.read_bytes() == b"artefact"
    assert make.calls == 2
    assert files_in(places / "cache") == [path.name]


def test_a_damaged_file_beside_a_whole_one_is_removed(places):
    make = Maker()
    path = build.cached("thing", ".bin", [b"a"], make)
    key = path.name.rsplit("-", 1)[0]
    (places / "cache" / f"{key}-{'0' * 64}.bin").write_bytes(b"artefact")
    assert build.cached("thing", ".bin", [b"a"], make) == path
    assert files_in(places / "cache") == [path.name]
    assert make.calls == 1


def test_a_folder_in_the_place_of_a_file_does_no_harm(places):
    make = Maker()
    path = build.cached("thing", ".bin", [b"a"], make)
    key = path.name.rsplit("-", 1)[0]
    (places / "cache" / f"{key}-{'0' * 64}.bin").mkdir()
    assert build.cached("thing", ".bin", [b"a"], make) == path


def test_what_fails_leaves_nothing(places):
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise build.BuildError("no")

    with pytest.raises(build.BuildError, match="no"):
        build.cached("thing", ".bin", [b"a"], make)
    assert files_in(places / "cache") == []


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Python code in a process of its own, in which `build` is the module, loaded without torch."""
    prelude = f"import importlib.util, os, sys, time\nfrom pathlib import Path\nFILE = {build.__file__!r}\n" + (
        "spec = importlib.util.spec_from_file_location('build', FILE)\n"
        "build = importlib.util.module_from_spec(spec); spec.loader.exec_module(build)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + code], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_what_a_killed_process_leaves_goes_with_the_next_build(places):
    killed = run(
        "def make(path):\n    path.write_bytes(b'half'); os.kill(os.getpid(), 9)\n"
        "build.cached('thing', '.bin', [b'a'], make)"
    )
    assert killed.returncode == -signal.SIGKILL
    assert [name.endswith(".tmp") for name in files_in(places / "cache")] == [True]
    path = build.cached("thing", ".bin", [b"a"], Maker())
    assert files_in(places / "cache") == [path.name]


def test_processes_that_want_the_same_wait_for_one(places):
    code = (
        "def make(path):\n"
        "    with open('made.log', 'a') as log: log.write('made\\n')\n"
        "    time.sleep(0.3); path.write_bytes(b'artefact' * 1000)\n"
        "os.chdir(os.environ['TMPDIR'])\n"
        "print(build.cached('thing', '.bin', [b'a'], make))"
    )
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: run(code), range(6)))
    assert [d.returncode for d in done] == [0] * 6, done[0].stderr
    assert len({d.stdout for d in done}) == 1
    assert Path(done[0].stdout.strip()).read_bytes() == b"artefact" * 1000
    assert (places / "tmp" / "made.log").read_text() == "made\n"


def test_without_locks_two_processes_may_make_the_same(places, monkeypatch):
    monkeypatch.setattr(build, "fcntl", None)
    (places / "cache" / ".thing-other.tmp").write_bytes(b"another process is at work")
    path = build.cached("thing", ".bin", [b"a"], Maker())
    assert files_in(places / "cache") == [".thing-other.tmp", path.name]


# ---------------------------------------------------------------------------------------------------------- the folders
def test_the_home_and_the_cache_home(places, monkeypatch):
    monkeypatch.delenv("MXSIM_CACHE_DIR")
    assert build.cached("thing", ".bin", [b"a"], Maker()).parent == places / "home/.cache/mxsim"
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    assert build.cached("thing", ".bin", [b"a"], Maker()).parent == places / "xdg/mxsim"


def not_writable(places: Path) -> str:
    """A folder that even root cannot make."""
    (places / "file").write_bytes(b"")
    return str(places / "file" / "cache")


def test_a_read_only_home_gives_way_to_a_temporary_folder():
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        home, temporary = Path(name) / "home", Path(name) / "tmp"
        home.mkdir()
        temporary.mkdir()
        Path(name).chmod(0o755)
        home.chmod(0o555)
        temporary.chmod(0o777)
        done = run(
            f"if os.getuid() == 0: os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})\n"
            "del os.environ['MXSIM_CACHE_DIR']\n"
            "print(build.cached('thing', '.bin', [b'a'], lambda path: path.write_bytes(b'artefact')))",
            HOME=str(home),
            TMPDIR=str(temporary),
        )
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.strip())
        assert path.parent == temporary / f"mxsim-{os.getuid() or nobody}"
        assert path.read_bytes() == b"artefact"
        assert list(home.iterdir()) == []
        home.chmod(0o755)


def test_a_folder_that_cannot_be_made_gives_way_to_a_temporary_one(places, monkeypatch):
    monkeypatch.setenv("MXSIM_CACHE_DIR", not_writable(places))
    make = Maker()
    path = build.cached("thing", ".bin", [b"a"], make)
    assert path.parent == places / "tmp" / f"mxsim-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert build.cached("thing", ".bin", [b"a"], make) == path
    assert make.calls == 1


def test_a_read_only_folder_that_holds_the_artefact_serves(places, monkeypatch):
    path = build.cached("thing", ".bin", [b"a"], Maker())
    monkeypatch.setattr(build, "_build", None)
    assert build.cached("thing", ".bin", [b"a"], Maker()) == path


def test_a_temporary_folder_that_others_can_write_is_not_trusted(places, monkeypatch):
    monkeypatch.setenv("MXSIM_CACHE_DIR", not_writable(places))
    shared = places / "tmp" / f"mxsim-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    path = build.cached("thing", ".bin", [b"a"], Maker())
    assert path.parent != shared
    assert path.parent.parent == places / "tmp"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    shared.rmdir()
    shared.symlink_to(places / "home")
    assert build.cached("thing", ".bin", [b"a"], Maker()).parent == path.parent


def test_no_folder_at_all_is_an_error(places, monkeypatch):
    monkeypatch.setenv("MXSIM_CACHE_DIR", not_writable(places))
    monkeypatch.setattr(build, "_is_private", lambda folder: False)
    monkeypatch.setattr(build, "_process_folder", lambda: places / "file")
    with pytest.raises(OSError, match="no folder for compiled kernels can be written"):
        build.cached("thing", ".bin", [b"a"], Maker())


# --------------------------------------------------------------------------------------------------------- the compiler
def compiler(places: Path, script: str, name: str = "compiler") -> str:
    """A shell script that plays a compiler; $target is the file after -o."""
    path = places / name
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {places}/calls\ntarget=; last=\n'
        f'for a in "$@"; do [ "$last" = -o ] && target=$a; last=$a; done\n{script}\n'
    )
    path.chmod(0o755)
    return str(path)


PLAYED = 'if [ "$1" = --version ]; then echo {version}; else echo library > $target; fi'


def test_flags_sources_compiler_and_machine_are_in_the_key(places, monkeypatch):
    monkeypatch.setenv("CXX", compiler(places, PLAYED.format(version="1.0")))
    first = build.compile_host()
    assert build.compile_host() == first
    calls = (places / "calls").read_text().splitlines()
    assert len(calls) == 2  # --version and one compilation
    assert {"-O3", "-std=c++17", "-march=native", "-fPIC", "-shared", "-pthread"} <= set(calls[1].split())
    assert "fast-math" not in calls[1]

    monkeypatch.setattr(build, "_machine", lambda: "another machine")
    second = build.compile_host()
    monkeypatch.setattr(build, "_HOST_FLAGS", (*build._HOST_FLAGS, "-g"))
    third = build.compile_host()
    monkeypatch.setenv("CXX", compiler(places, PLAYED.format(version="2.0")))
    build._host_compiler.cache_clear()
    fourth = build.compile_host()
    monkeypatch.setattr(build, "_contents", lambda files: [f.name.encode() for f in files])
    fifth = build.compile_host()
    assert len({first, second, third, fourth, fifth}) == 5


def test_every_header_is_in_the_key(places, monkeypatch):
    monkeypatch.setenv("CXX", compiler(places, PLAYED.format(version="1.0")))
    seen = []
    contents = build._contents
    monkeypatch.setattr(build, "_contents", lambda files: seen.extend(files) or contents(files))
    build.compile_host()
    include, src = build.FOLDER / "include/mxsim", build.FOLDER / "src"
    assert set(seen) == {*include.glob("*.h"), *(src / "host").glob("*.hpp"), src / "host_api.cpp"}


def test_the_compiler_may_have_arguments(places, monkeypatch):
    monkeypatch.setenv("CXX", compiler(places, PLAYED.replace("$1", "$2").format(version="1.0")) + " -m64")
    build.compile_host()
    assert all(line.startswith("-m64 ") for line in (places / "calls").read_text().splitlines())


def test_a_compiler_without_a_native_target_serves(places, monkeypatch):
    refuse = 'case "$*" in *-march=native*) echo "unknown target" >&2; exit 1;; esac\n'
    monkeypatch.setenv("CXX", compiler(places, refuse + PLAYED.format(version="1.0")))
    assert build.compile_host().read_text() == "library\n"


def test_a_compiler_that_fails_is_quoted(places, monkeypatch):
    fails = 'if [ "$1" = --version ]; then echo 1.0; else echo "disk is full" >&2; exit 3; fi'
    monkeypatch.setenv("CXX", compiler(places, fails))
    with pytest.raises(build.BuildError, match="failed with exit status 3:\ndisk is full"):
        build.compile_host()
    assert files_in(places / "cache") == []


def test_no_compiler_says_what_to_install(places, monkeypatch):
    monkeypatch.setenv("CXX", str(places / "nowhere"))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found \(looked for .*nowhere\); install g"):
        build.compile_host()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(places))
    build._host_compiler.cache_clear()
    with pytest.raises(build.BuildError, match=r"looked for g\+\+ or c\+\+ or clang\+\+"):
        build.compile_host()


@needs_gpp
def test_concurrent_processes_build_one_library_and_load_it(places):
    logged = compiler(places, f'exec {GPP} "$@"')
    code = "import ctypes\npath = build.compile_host(); ctypes.CDLL(str(path)).mxsim_to_fp4_row; print(path)"
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: run(code, CXX=logged), range(4)))
    assert [d.returncode for d in done] == [0] * 4, done[0].stderr
    assert len({d.stdout for d in done}) == 1
    calls = (places / "calls").read_text().splitlines()
    assert len([c for c in calls if c != "--version"]) == 1
    assert files_in(places / "cache") == [Path(done[0].stdout.strip()).name]


# ------------------------------------------------------------------------------------------------ what the ops do
def look_anew() -> None:
    """The ops find their CPU backend with the next tensor."""
    for name in host.FUNCTIONS:
        vars(operators._HOST).pop(name, None)
    for function in (host.backend, host.library, build._host_compiler):
        function.cache_clear()


@pytest.fixture
def fresh_backend(places):
    look_anew()
    yield
    look_anew()


@pytest.mark.usefixtures("fresh_backend")
def test_without_a_compiler_one_warning_and_the_same_bits(places, monkeypatch):
    x = torch.randn(130, 256).bfloat16()

    def results() -> list[torch.Tensor]:
        fp4, fp8 = kernels.bf16_to_fp4_and_fp8_row(x)
        columns = kernels.fp4_row_to_fp8_col(*fp4, group_sizes=[100, 30])
        return [*fp4, *fp8[:2], *columns, *kernels.bf16_to_fp8_tile(x), kernels.fp4_to_bf16(*fp4)]

    monkeypatch.setenv("CXX", str(places / "nowhere"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slow, again = results(), results()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "CPU tensors run the simulator" in str(caught[0].message)
    assert "install g++" in str(caught[0].message)
    assert operators._HOST.to_fp4_row is simulated.to_fp4_row
    for a, b in zip(slow, again, strict=True):
        assert_bits_equal(a, bits_of(b), "bits")

    if GPP is None:
        return
    monkeypatch.undo()  # back to the compiler, and to the cache that holds the library
    look_anew()
    for a, b in zip(slow, results(), strict=True):
        assert_bits_equal(a, bits_of(b), "bits")
    assert operators._HOST.to_fp4_row is host.to_fp4_row


@pytest.mark.usefixtures("fresh_backend")
def test_a_library_that_does_not_load_is_no_disaster(places, monkeypatch):
    monkeypatch.setenv("CXX", compiler(places, PLAYED.format(version="1.0")))
    with pytest.warns(RuntimeWarning, match="CPU tensors run the simulator"):
        kernels.bf16_to_fp4_row(torch.ones(1, 32, dtype=torch.bfloat16))


def test_every_function_of_the_library_has_its_stand_in():
    source = (build.FOLDER / "src/host_api.cpp").read_text()
    for name in host.FUNCTIONS:
        assert f" mxsim_{name}(" in source
        assert callable(getattr(host, name))
        assert callable(getattr(simulated, name))
