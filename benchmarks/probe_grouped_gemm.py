"""Which grouped FP8 GEMM is fastest at a mixture of experts' shapes on an H200, and whether all have the same bits:

    python benchmarks/probe_grouped_gemm.py benchmarks/results/grouped_gemm_h200.json

First the bits of cuBLASLt, `scaled_mm` and every Triton configuration against the emulation, then TFLOP/s beside dense
GEMMs of the same run. host_us is what a call takes on the CPU while the GPU has nothing queued; call_us is the larger
of both times, what a call costs where nothing else hides it. Whatever does not compile is reported and left out.
About 100 s.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.kernels import Fp8Cols, Fp8Tiles, RaggedFp8Rows
from mxsim.moe import cublaslt, expert_gemms, triton_gemm
from mxsim.moe.grouped_gemm import grouped_gemm, grouped_wgrad
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import check_tiles
from mxsim.moe.triton_gemm import Config
from mxsim.provenance import provenance

HIDDEN, EXPERT = 7168, 2048
UP = 2 * EXPERT  # gate and up projection side by side
ROWS = 32768
DENSE_ROWS = 8192
REPEATS = 7
BF16 = torch.bfloat16

ROWS_CONFIGS = [
    Config(64, 128, 4, 3, True),
    Config(64, 128, 4, 4, True),
    Config(64, 128, 4, 5, True),
    Config(64, 256, 4, 3, True),
    Config(128, 128, 8, 4, True),
]
WGRAD_CONFIGS = [
    Config(64, 128, 4, 3),
    Config(64, 128, 4, 4),
    Config(64, 128, 4, 5),
    Config(64, 64, 4, 4),
    Config(64, 128, 4, 3, True),
    Config(64, 128, 4, 4, True),
]


class Shape(NamedTuple):
    """A GEMM of every expert: rows m_e x k by n x k, or for Wgrad m x n over m_e rows."""

    name: str
    m: int | None  # None: the rows of an expert
    n: int
    k: int | None


SHAPES = [
    Shape("Fprop up", None, UP, HIDDEN),
    Shape("Fprop down", None, HIDDEN, EXPERT),
    Shape("Dgrad up", None, HIDDEN, UP),
    Shape("Dgrad down", None, EXPERT, HIDDEN),
    Shape("Wgrad up", UP, HIDDEN, None),
    Shape("Wgrad down", HIDDEN, EXPERT, None),
]


def skewed(num_experts: int) -> list[int]:
    """ROWS rows, expert e in proportion to 1 / (e + 1), in no order; every eighth has none."""
    weights = [0.0 if e % 8 == 7 else 1 / (e * 5 % num_experts + 1) for e in range(num_experts)]
    sizes = [int(ROWS * w / sum(weights)) for w in weights]
    sizes[0] += ROWS - sum(sizes)
    return sizes


ROUTINGS = {
    "32 x 1024": [1024] * 32,
    "32 skewed": skewed(32),
    "64 x 512": [512] * 64,
    "256 x 128": [128] * 256,
    "256 skewed": skewed(256),
}


# -------------------------------------------------------------------------------------------------------------- timing
def gpu_us(call: Callable[[], Any], host_us: float) -> float:
    """Median time of a call on the GPU, the L2 cache overwritten before each; the launches of a call are queued up."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(int(2e3 * (3000 + 1.5 * host_us)))  # 2 cycles a ns: the host gets ahead
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_us(call: Callable[[], Any]) -> float:
    """Median time that a call keeps the host, the queue empty before it; of a third call or later."""
    call()
    call()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------------------ operands
def values(*shape: int) -> Tensor:
    """BF16 N(0, 1)."""
    return torch.randn(shape, dtype=BF16, device="cuda")


def weights(num_experts: int, n: int, k: int) -> Fp8Tiles:
    """Random FP8 weights, made matrix by matrix."""
    made = [kernels.bf16_to_fp8_tile(values(n, k)) for _ in range(min(num_experts, 4))]
    codes = torch.empty((num_experts, n, k), dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty((num_experts, *made[0].scales.shape), device="cuda")
    for expert in range(num_experts):
        codes[expert].view(torch.uint8).copy_(made[expert % len(made)].codes.view(torch.uint8))
        scales[expert] = made[expert % len(made)].scales
    return check_tiles("weights", Fp8Tiles(codes, scales), num_experts, k)


def label(config: Config) -> str:
    m, n, warps, stages, tma, registers = config
    return f"triton {m}x{n} w{warps} s{stages}{' tma' if tma else ''}{f' r{registers}' if registers else ''}"


def candidates(
    shape: Shape, a: RaggedFp8Rows | Fp8Cols, b: Fp8Tiles | Fp8Cols, groups: Groups
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, call) of every FP8 backend."""
    is_wgrad = shape.k is None
    ours = triton_gemm.wgrad if is_wgrad else triton_gemm.rows
    torchs = expert_gemms.scaled_mm_wgrad if is_wgrad else expert_gemms.scaled_mm_rows
    cublas = cublaslt.wgrad if is_wgrad else cublaslt.rows
    yield "cublaslt", partial(cublas, a, b, groups, BF16)  # type: ignore[arg-type]
    yield "scaled_mm", partial(torchs, a, b, groups, BF16)  # type: ignore[arg-type]
    for config in WGRAD_CONFIGS if is_wgrad else ROWS_CONFIGS:
        yield label(config), partial(ours, a, b, groups, BF16, config=config)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- correctness
def check(failed: dict[str, str]) -> list[dict[str, Any]]:
    """Differences from the emulation, in FP32 and BF16, at shapes that cuBLAS does not split; and what fails at all."""
    table = []
    sizes = [300, 0, 129, 1, 64, 1001, 7]
    groups = Groups(tuple(sizes), torch.device("cuda"))
    for shape in (Shape("rows", None, 1040, 1152), Shape("wgrad", 1056, 544, None)):
        is_wgrad = shape.k is None
        spread = torch.exp2(torch.randint(-6, 7, (sum(sizes), 1), device="cuda").float()).to(BF16)
        a_values, b_values = values(sum(sizes), shape.m or shape.k or 0) * spread, values(sum(sizes), shape.n)
        if is_wgrad:
            a = kernels.bf16_to_fp8_col(a_values, group_sizes=sizes)
            b = kernels.bf16_to_fp8_col(b_values, group_sizes=sizes)
        else:
            a = kernels.bf16_to_fp8_row(a_values, group_sizes=sizes)
            b = weights(len(sizes), shape.n, shape.k)
        emulated = expert_gemms.emulated_wgrad if is_wgrad else expert_gemms.emulated_rows
        for out_dtype, as_bits in ((torch.float32, torch.int32), (BF16, torch.int16)):
            want = emulated(a, b, groups, out_dtype).view(as_bits)
            for name, call in candidates(shape, a, b, groups):
                if f"{shape.name} {name}" in failed:
                    continue
                line: dict[str, Any] = {"gemm": shape.name, "backend": name, "out": str(out_dtype)[6:]}
                function, arguments = call.func, list(call.args)  # type: ignore[attr-defined]
                arguments[3] = out_dtype
                try:
                    got = function(*arguments, **call.keywords)  # type: ignore[attr-defined]
                    torch.cuda.synchronize()
                except Exception as error:  # a configuration may need more than the device has
                    failed[f"{shape.name} {name}"] = line["error"] = f"{type(error).__name__}: {str(error)[:160]}"
                else:
                    line |= {"outputs": want.numel(), "differ": int((got.view(as_bits) != want).sum())}
                table.append(line)
                print(" ".join(f"{key}={value}" for key, value in line.items()), flush=True)
    return table


# --------------------------------------------------------------------------------------------------------------- speed
def measured(line: dict[str, Any], flops: float, call: Callable[[], Any]) -> dict[str, Any]:
    """The line with times and TFLOP/s, printed."""
    try:
        host = host_us(call)
        gpu = gpu_us(call, host)
        line |= {"gpu_us": round(gpu, 1), "host_us": round(host, 1), "call_us": round(max(gpu, host), 1)}
        line["tflops"] = round(flops / gpu * 1e-6, 1)
    except Exception as error:  # out of memory, or of registers: the others go on
        line["error"] = f"{type(error).__name__}: {str(error)[:160]}"
    print(" | ".join(f"{value!s:>9}" for value in line.values()), flush=True)
    return line


def dense() -> Iterator[dict[str, Any]]:
    """One large GEMM: scaled_mm by tiles and by rows, BF16."""
    m, n, k = DENSE_ROWS, UP, HIDDEN
    flops = 2.0 * m * n * k
    x, w = values(m, k), values(n, k)
    one = Groups((m,), torch.device("cuda"))
    rows = kernels.bf16_to_fp8_row(x, group_sizes=[m])
    tiles = Fp8Tiles(*(t.unsqueeze(0) for t in kernels.bf16_to_fp8_tile(w)))
    cols = [kernels.bf16_to_fp8_col(t, group_sizes=[k]) for t in (x.t().contiguous(), w.t().contiguous())]
    over_k = Groups((k,), torch.device("cuda"))
    calls: dict[str, Callable[[], Any]] = {
        "cublaslt 1x128 by 128x128": partial(cublaslt.rows, rows, tiles, one, BF16),
        "cublaslt 1x128 by 1x128": partial(cublaslt.wgrad, *cols, over_k, BF16),
        "scaled_mm 1x128 by 128x128": partial(expert_gemms.scaled_mm_rows, rows, tiles, one, BF16),
        "scaled_mm 1x128 by 1x128": partial(expert_gemms.scaled_mm_wgrad, *cols, over_k, BF16),
        "bf16": partial(torch.mm, x, w.t()),
    }
    for name, call in calls.items():
        yield measured({"routing": "dense", "gemm": f"{m}x{n}x{k}", "backend": name}, flops, call)


def grouped(routing: str, sizes: list[int], failed: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Every shape by every backend."""
    groups = Groups(tuple(sizes), torch.device("cuda"))
    for shape in SHAPES:
        is_wgrad = shape.k is None
        flops = 2.0 * ROWS * shape.n * (shape.m or shape.k or 0)
        if is_wgrad:
            a_values, b_values = values(ROWS, shape.m or 0), values(ROWS, shape.n)
            a, b = (kernels.bf16_to_fp8_col(x, group_sizes=sizes) for x in (a_values, b_values))
        else:
            a_values = values(ROWS, shape.k or 0)
            a, b = kernels.bf16_to_fp8_row(a_values, group_sizes=sizes), weights(len(sizes), shape.n, shape.k or 0)
        kind = "wgrad" if is_wgrad else "rows"
        for name, call in candidates(shape, a, b, groups):
            if f"{kind} {name}" not in failed:
                yield measured({"routing": routing, "gemm": shape.name, "backend": name}, flops, call)
        del a, b
        if is_wgrad:
            bf16 = partial(grouped_wgrad, a_values, b_values, groups)
        else:
            bf16 = partial(grouped_gemm, a_values, values(len(sizes), shape.n, shape.k or 0), groups)
        yield measured({"routing": routing, "gemm": shape.name, "backend": "bf16 grouped_mm"}, flops, bf16)
        del bf16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--routing", choices=list(ROUTINGS), action="append", help="only these; default all")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("probe_grouped_gemm: torch sees no CUDA device")
    torch.manual_seed(0)
    failed: dict[str, str] = {}
    document: dict[str, Any] = {"provenance": provenance(torch.device("cuda")), "bits": check(failed), "speed": []}
    for lines in (dense(), *(grouped(r, ROUTINGS[r], failed) for r in arguments.routing or ROUTINGS)):
        for line in lines:
            document["speed"].append(line)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"\n{sum(line.get('differ', 0) for line in document['bits'])} outputs differ; could not run: {failed or 'none'}"
    )


if __name__ == "__main__":
    main()
