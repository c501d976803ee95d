"""The CUDA kernels compile for every architecture they claim, and keep everything in registers; no GPU is needed."""

import io
import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC (extra cuda)")
build = pytest.importorskip("mxsim.kernels.build", reason="needs torch")

SOURCES = sorted(path.stem for path in (build.FOLDER / "src").glob("*.cu"))
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]


def resource_report(source: str, arch: str) -> str:
    """What ptxas says of registers, stack and spills."""
    from cuda.core import Program, ProgramOptions

    file = build.FOLDER / f"src/{source}.cu"
    log = io.StringIO()
    options = ProgramOptions(
        arch=arch, std="c++17", include_path=[str(build.FOLDER / "include")], name=file.name, ptxas_options=["-v"]
    )
    Program(file.read_text(), "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def kernels_of(source: str) -> int:
    text = (build.FOLDER / f"src/{source}.cu").read_text()
    plain = len(re.findall(r'^extern "C" __global__', text, flags=re.M))
    return plain + 2 * len(re.findall(r"^MXSIM_COLUMN_KERNELS\(", text, flags=re.M))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_spills_or_uses_local_memory(source: str, arch: str) -> None:
    report = resource_report(source, arch)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    entries = re.findall(r"Compiling entry function '(\w+)'", report)
    assert len(entries) == kernels_of(source) > 0
    assert len(frames) >= len(entries)
    assert set(frames) == {("0", "0", "0")}, report


def test_a_compiled_kernel_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXSIM_CACHE_DIR", str(tmp_path))
    first = build.compile_cuda("to_fp4_row", "sm_90a")
    monkeypatch.setattr(build, "_run_nvrtc", lambda *arguments: pytest.fail("compiled again"))
    assert build.compile_cuda("to_fp4_row", "sm_90a") == first


def test_a_truncated_cubin_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXSIM_CACHE_DIR", str(tmp_path))
    first = build.compile_cuda("to_fp4_row", "sm_90a")
    (file,) = tmp_path.glob("to_fp4_row-*.cubin")
    file.write_bytes(first[:100])
    assert build.compile_cuda("to_fp4_row", "sm_90a") == first


def test_an_error_in_a_kernel_is_a_build_error_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXSIM_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "broken.cu"
    broken.write_text("this is no kernel;")
    with pytest.raises(build.BuildError, match=r"(?s)broken\.cu for sm_90a.*error"):
        build._run_nvrtc(broken, "sm_90a", tmp_path / "broken.cubin")


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    build._nvrtc_version.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(build.BuildError, match=r"pip install 'mxsim\[cuda\]'"):
        build.compile_cuda("to_fp4_row", "sm_90a")
    build._nvrtc_version.cache_clear()
