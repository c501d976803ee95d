"""The figures of the layer, and what they are meant to reach on an H200 at the full shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxsim.bench.moe.parts import Kind, Part
from mxsim.bench.moe.workload import Routing
from mxsim.bench.targets import Target, Verdict
from mxsim.bench.timing import Timing

Times = Mapping[str, Timing]  # by the key of a part, or the name of a layer

_FP8_BYTES = 1 + 4 / 128  # of an element: code and share of a scale
ROW_BYTES, ONE_READ_BYTES = 2 + _FP8_BYTES, 2 + 2 * _FP8_BYTES  # BF16 read, FP8 written: once, twice
_SAVED_OF_BF16, _SAVED_OF_FP8 = Target(0.30, 0.266), Target(0.45, 0.40)
_GROUPED_TOTAL, _DENSE_TOTAL = Target(1.5, 1.7), Target(1.0, 1.1)
_STEP_BF16, _STEP_FP8 = Target(1.15, 1.35), Target(0.98, 1.05)
_GEMM_ROWS, _GEMM_WGRAD = Target(0.75, 0.95), Target(0.60, 0.75)


@dataclass(frozen=True)
class Figure:
    """A ratio. paper: what arXiv 2603.02731 reports for it on its hardware."""

    name: str
    routing: Routing | None
    value: float
    target: Target | None = None
    paper: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """How it stands to its target."""
        return None if self.target is None else self.target.verdict(self.value)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        target = self.target and {"bound": self.target.bound, "aim": self.target.aim}
        return {
            "name": self.name,
            "routing": None if self.routing is None else self.routing.value,
            "value": float(f"{self.value:.6g}"),
            **({"target": {**target, "verdict": self.verdict.name.lower()}} if target and self.verdict else {}),
            **({"paper": self.paper} if self.paper else {}),
        }


def saved_figures(routing: Routing, saved: Mapping[str, int]) -> Iterator[Figure]:
    """Bytes kept for the backward pass, by recipe."""
    has_target = routing is Routing.BALANCED
    for recipe, target in (("BF16", _SAVED_OF_BF16), ("FP8", _SAVED_OF_FP8)):
        value = saved["MXFP4"] / saved[recipe]
        yield Figure(f"activation bytes kept, MXFP4 / {recipe}", routing, value, target if has_target else None)


def step_figures(routing: Routing, times: Times) -> Iterator[Figure]:
    """Device time of forward + backward."""
    has_target = routing is not Routing.EMPTY
    for recipe, target in (("BF16", _STEP_BF16), ("FP8", _STEP_FP8)):
        value = times[recipe].us / times["MXFP4"].us
        yield Figure(f"forward + backward, {recipe} / MXFP4", routing, value, target if has_target else None)
    for recipe in ("BF16", "FP8, weights inside"):
        value = times[recipe].us / times["MXFP4, weights inside"].us
        yield Figure(f"forward + backward, {recipe} / MXFP4, weights inside", routing, value)


def grouped_figures(routing: Routing, times: Times) -> Iterator[Figure]:
    """Quantization and conversion of a grouped linear layer's input."""
    mxfp4 = _sum(times, "tokens.fp4", "x.fp4.rows", "x.fp4.cols")
    fp8 = _sum(times, "x.fp8.rows", "x.fp8.cols")
    what = "grouped-linear quantization + conversion"
    yield Figure(f"{what}, FP8 / MXFP4", routing, fp8 / mxfp4, _GROUPED_TOTAL, "1.43 to 1.53")
    permuted = (fp8 + _sum(times, "permute.bf16")) / (mxfp4 + _sum(times, "permute.fp4"))
    yield Figure(f"{what}, the permutation of x inside, FP8 / MXFP4", routing, permuted)
    # NOTE: one-read kernels have no ragged form here; their times are those of the same rows as one matrix.
    yield from _one_read_figures(what, routing, times, mxfp4)


def dense_figures(times: Times) -> Iterator[Figure]:
    """Quantization and conversion of a dense linear layer's input."""
    mxfp4, fp8 = _sum(times, "dense.fp4.rows", "dense.fp4.cols"), _sum(times, "dense.fp8.rows", "dense.fp8.cols")
    what = "dense-linear quantization + conversion"
    yield Figure(f"{what}, FP8 / MXFP4", None, fp8 / mxfp4, _DENSE_TOTAL, "0.33 to 0.36")
    yield from _one_read_figures(what, None, times, mxfp4)


def gemm_figures(routing: Routing, parts: list[Part], times: Times, dense: Times, dense_flops: int) -> Iterator[Figure]:
    """TFLOP/s of the grouped FP8 GEMMs beside one dense `scaled_mm` of as many rows; of BF16's beside a matmul.

    Wgrad multiplies 1x128 by 1x128, which is slower than 1x128 by 128x128 in a dense GEMM too: it is set against both,
    its target against its own kind.
    """
    has_target = routing is Routing.BALANCED
    rows, wgrad = (Kind.FPROP, Kind.DGRAD), (Kind.WGRAD,)
    for prefix, name, kinds, key, of, target in (
        ("fp8", "Fprop and Dgrad", rows, "gemm", "scaled_mm, 1x128 by 128x128", _GEMM_ROWS),
        ("fp8", "Wgrad", wgrad, "wgrad", "scaled_mm, 1x128 by 1x128", _GEMM_WGRAD),
        ("fp8", "Wgrad", wgrad, "gemm", "scaled_mm, 1x128 by 128x128", None),
        ("bf16", "Fprop and Dgrad", rows, "gemm", "matmul", None),
        ("bf16", "Wgrad", wgrad, "wgrad", "matmul", None),
    ):
        chosen = [p for p in parts if p.kind in kinds and p.key.startswith(prefix)]
        rate = sum(p.flops for p in chosen) / _sum(times, *(p.key for p in chosen))
        dense_rate = dense_flops / dense[f"dense.{key}.{prefix}"].us
        name = f"{prefix.upper()} grouped {name}, TFLOP/s of a dense {of}"
        yield Figure(name, routing, rate / dense_rate, target if has_target else None)


def _sum(times: Times, *keys: str) -> float:
    return sum(times[key].us for key in keys)


def _one_read_figures(what: str, routing: Routing | None, times: Times, mxfp4_us: float) -> Iterator[Figure]:
    """Against the fastest configuration of the one-read kernel; and against what it could be.

    At the bandwidth of `bf16_to_fp8_row` it would take that kernel's time, times what it writes besides.
    """
    fused = [t.us for key, t in times.items() if key.startswith("dense.fused.")]
    if fused:
        yield Figure(f"{what}, one-read FP8 / MXFP4", routing, min(fused) / mxfp4_us)
    ideal_us = times["dense.fp8.rows"].us * ONE_READ_BYTES / ROW_BYTES
    yield Figure(f"{what}, FP8 in one read at the row kernel's bandwidth / MXFP4", routing, ideal_us / mxfp4_us)
