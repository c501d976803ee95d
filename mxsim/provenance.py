"""Where, when and from which sources a figure comes."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mxsim

_PACKAGE = Path(mxsim.__file__).parent
_KERNELS = _PACKAGE / "kernels"
_SUFFIXES = {".py", ".h", ".hpp", ".cpp", ".cuh", ".cu"}


def provenance(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions, date, command line and the hash of the kernels' sources."""
    return {
        "device": _device_name(device),
        **(_cuda(device) if device.type == "cuda" else {"threads": torch.get_num_threads()}),
        "torch": torch.__version__,
        "mxsim": mxsim.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "kernel_sources_sha256": sources_sha256(),
    }


def package_provenance(device: torch.device) -> dict[str, Any]:
    """`provenance` and the hash of all of mxsim's sources."""
    return {**provenance(device), "sources_sha256": sources_sha256(_PACKAGE)}


def layer_provenance(device: torch.device) -> dict[str, Any]:
    """`provenance`, Triton's version, None without it, and the hash of the sources of mxsim/moe."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {**provenance(device), "triton": triton, "moe_sources_sha256": sources_sha256(_PACKAGE / "moe")}


def sources_sha256(folder: Path = _KERNELS) -> str:
    """SHA-256 over the path and the content of every source file of a folder, in the order of their paths."""
    digest = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _SUFFIXES}
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _command() -> str:
    program = Path(sys.argv[0]).name
    return shlex.join(["mxsim" if program == "cli.py" else program, *sys.argv[1:]])


def _cuda(device: torch.device) -> dict[str, Any]:
    return {
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nvrtc": _nvrtc(),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
    }


@cache
def _driver() -> str:
    """The driver's version as nvidia-smi says it; without nvidia-smi the CUDA version that it serves."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()
        if lines:
            return lines[0]
    with contextlib.suppress(ImportError, RuntimeError):
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
        return f"for CUDA {version // 1000}.{version % 1000 // 10}"
    return "unknown"


def _nvrtc() -> str | None:
    with contextlib.suppress(ImportError, RuntimeError):
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        return f"{major}.{minor}"
    return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
