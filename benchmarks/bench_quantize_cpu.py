"""Speed and memory of the simulator's quantize, float32 -> MXFP4 on the CPU, beside torchao's eager `to_mx`.

    python benchmarks/bench_quantize_cpu.py [--elements 16777216] [--json FILE]

Both quantize the same N(0,1) matrix of 4096 columns under FLOOR; the codes and scales are compared before anything is
timed. Medians of 7 runs, alternating. The simulator runs in one thread, torchao in as many as torch likes.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from mxsim.blocks import MXFP4, BlockTensor, quantize

COLUMNS = 4096
RUNS = 7
ROOT = Path(__file__).parent.parent


def torchao_candidate(x: np.ndarray) -> Callable[[], Any] | None:
    """torchao's eager to_mx on the same values, or None where torchao is not installed."""
    try:
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return None
    tensor = torch.from_numpy(x)
    return lambda: to_mx(tensor, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)


def differing_bytes(ours: BlockTensor, theirs: Any) -> int:
    """Bytes of codes and scales that differ."""
    scales, codes = (t.view(dtype=__import__("torch").uint8).numpy() for t in theirs)
    return int((codes.reshape(ours.packed().shape) != ours.packed()).sum() + (scales != ours.scales).sum())


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def extra_bytes(run: Callable[[], Any]) -> int:
    """Peak of NumPy's allocations during one run, results included."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def provenance() -> dict[str, str]:
    """Machine, versions, date, and a hash of the sources measured."""
    sources = sorted([*(ROOT / "mxsim/formats").glob("*.py"), *(ROOT / "mxsim/blocks").glob("*.py")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    found = {
        "command": " ".join(["python", "benchmarks/bench_quantize_cpu.py", *sys.argv[1:]]),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": date.today().isoformat(),
        "sources_sha256": digest,
    }
    for name in ("torch", "torchao"):
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    return found


def cpu_name() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name"))
    except (OSError, subprocess.CalledProcessError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--json", type=Path, help="write the result here, too")
    arguments = parser.parse_args()

    x = np.random.default_rng(0).standard_normal((arguments.elements // COLUMNS, COLUMNS), dtype=np.float32)
    ours = lambda: quantize(x, MXFP4)  # noqa: E731
    candidates = {"mxsim.blocks.quantize": ours}
    theirs = torchao_candidate(x)
    result: dict[str, Any] = {"provenance": {}, "elements": x.size, "input_bytes": x.nbytes}
    if theirs is None:
        print("torchao is not installed: nothing to compare with")
    else:
        candidates["torchao to_mx, eager"] = theirs
        result["bytes_that_differ"] = differing_bytes(ours(), theirs())
        print(f"bytes that differ from torchao's: {result['bytes_that_differ']}")

    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(RUNS + 1):
        for name, run in candidates.items():
            times[name].append(milliseconds(run))
    result["ms"] = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first warms up
    result["extra_bytes_over_input"] = extra_bytes(ours) / x.nbytes
    result["provenance"] = provenance()
    for name, ms in result["ms"].items():
        print(f"{name:24s} {ms:8.1f} ms  {x.size / ms / 1e3:7.1f} M elements/s")
    print(f"mxsim's peak of extra memory: {result['extra_bytes_over_input']:.2f} of the input's bytes")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
