"""Into how many parts cuBLAS splits K in the FP8 GEMMs of DeepSeek-V3's experts, on the GPU at hand:

    python benchmarks/probe_split_k.py benchmarks/results/split_k_h200.json

Fprop, Dgrad and Wgrad of one expert at several numbers of tokens, outputs in FP32 and BF16. A split is found by its
bits (`mxsim.validate.probe_split_k`); null, with the reason, where no split explains them or torch refuses the shape.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mxsim.provenance import provenance
from mxsim.validate import GemmLayout, probe_split_k
from mxsim.validate.scaled_mm import GemmRefused

HIDDEN, EXPERT = 7168, 2048
TOKENS = (128, 256, 512, 1024, 4096)


def gemms(tokens: int) -> Iterator[tuple[str, int, int, int, GemmLayout]]:
    """(name, m, n, k, layout): activations by weights, and for Wgrad activations by gradients."""
    up = 2 * EXPERT  # gate and up projection side by side
    yield "Fprop, gate and up", tokens, up, HIDDEN, GemmLayout.TILES
    yield "Fprop, down", tokens, HIDDEN, EXPERT, GemmLayout.TILES
    yield "Dgrad, gate and up", tokens, HIDDEN, up, GemmLayout.TILES
    yield "Dgrad, down", tokens, EXPERT, HIDDEN, GemmLayout.TILES
    yield "Wgrad, gate and up", up, HIDDEN, tokens, GemmLayout.ROWS
    yield "Wgrad, down", HIDDEN, EXPERT, tokens, GemmLayout.ROWS


def row(name: str, tokens: int, m: int, n: int, k: int, layout: GemmLayout, out_dtype: torch.dtype) -> dict[str, Any]:
    """One line of the table."""
    line: dict[str, Any] = {
        "gemm": name,
        "tokens": tokens,
        "m": m,
        "n": n,
        "k": k,
        "scales": layout.value,
        "out": str(out_dtype).removeprefix("torch."),
    }
    try:
        line["split_k"] = probe_split_k(m, n, k, layout=layout, device="cuda", out_dtype=out_dtype)
    except (GemmRefused, ValueError) as error:
        line["split_k"], line["reason"] = None, str(error)
    return line


def cublas_version() -> str | None:
    """Of the wheel that torch loads, where it is one."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--shape", metavar="MxNxK", action="append", default=[], help="also this shape, in both layouts"
    )
    arguments = parser.parse_args()
    shapes = [tuple(int(size) for size in text.split("x")) for text in arguments.shape]
    if not torch.cuda.is_available():
        sys.exit("probe_split_k: torch sees no CUDA device")
    plan = [(name, tokens, *gemm) for tokens in TOKENS for name, *gemm in gemms(tokens)]
    plan += [("asked for", m, m, n, k, layout) for m, n, k in shapes for layout in GemmLayout]
    table = []
    for gemm in plan:
        for out_dtype in (torch.float32, torch.bfloat16):
            table.append(row(*gemm, out_dtype))
            print(" ".join(str(value) for value in table[-1].values()), flush=True)
    document = {"provenance": provenance(torch.device("cuda")) | {"cublas": cublas_version()}, "gemms": table}
    arguments.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
