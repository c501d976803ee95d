"""Which arithmetic an FP8 GEMM with E5M2 operands has, found by its bits on the GPU at hand:

    python benchmarks/probe_e5m2.py

torch takes E5M2 with tensor-wise scales, in one operand. For each pair of elements, use_fast_accum on and off, and
several K, every hypothesis about the accumulator is computed here in float64, apart from the package, and compared with
torch's float32 outputs; those that give all of them are printed, or else the best. Then what torch makes of infinities
and NaN, and what it refuses. `--device cpu` probes the package's own emulation instead.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxsim.formats import E4M3, E5M2, FloatFormat
from mxsim.validate import scaled_mm as hopper
from mxsim.validate.gemm_cases import CODES, Draw
from mxsim.validate.scaled_mm import GemmRefused

ROWS_OF_KIND = 12
DEPTHS = (128, 256, 512, 1024)
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_NO_EXPONENT = -1000
_SHOWN = 6


@dataclass(frozen=True)
class Hypothesis:
    """As NUMERICS 9 has it; e4m3_below, e5m2_below: by how much e(x) may go below that of the smallest normal number.

    strided: a step takes every so many-th element of 128, not consecutive ones.
    """

    fraction_bits: int = 13
    interval: int | None = 128
    e4m3_below: int = 0
    e5m2_below: int = 0
    step: int = 32
    strided: bool = False

    def __str__(self) -> str:
        order = "strided" if self.strided else "consecutive"
        clamps = f"e(E4M3) >= {E4M3.emin - self.e4m3_below}, e(E5M2) >= {E5M2.emin - self.e5m2_below}"
        promotion = "never promoted" if self.interval is None else f"promoted every {self.interval}"
        return f"{self.fraction_bits} bits, {clamps}, {self.step} {order} products a step, {promotion}"


def hypotheses(pair: tuple[FloatFormat, FloatFormat], depth: int) -> Iterator[Hypothesis]:
    """All that can differ for this pair and K."""
    e4m3_below = (0, 1, 3) if E4M3 in pair else (0,)  # 3: none is clamped, 2**-9 being the smallest
    e5m2_below = (0, 1, 2) if E5M2 in pair else (0,)
    intervals = (128, None) if depth > 128 else (128,)
    orders = ((32, False), (16, False), (64, False), (32, True))
    for bits, interval, low4, low5, order in itertools.product((12, 13, 14), intervals, e4m3_below, e5m2_below, orders):
        yield Hypothesis(bits, interval, low4, low5, *order)
    base = Hypothesis()
    yield from (replace(base, fraction_bits=bits, interval=interval) for bits in (22, 23) for interval in intervals)
    yield from (replace(base, interval=interval) for interval in (32, 64, 256, 512) if interval < depth)


# ------------------------------------------------------------------------------------------------------- the arithmetic
def power_of_two(exponent: Tensor) -> Tensor:
    """float64, exact."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def floor_log2(x: Tensor) -> Tensor:
    """Of normal float64; far below all others for 0."""
    exponent = (x.view(torch.int64) >> 52 & 0x7FF) - 1023
    return torch.where(x == 0, _NO_EXPONENT, exponent)


def accumulate(a: Tensor, b: Tensor, pair: tuple[FloatFormat, FloatFormat], h: Hypothesis) -> Tensor:
    """float32 [m, n] of values a [m, k] and b [n, k]."""
    below = {E4M3: h.e4m3_below, E5M2: h.e5m2_below}
    exponents = []
    for x, fmt in zip((a, b), pair, strict=True):
        clamped = floor_log2(x).clamp(min=fmt.emin - below[fmt])
        exponents.append(torch.where(x == 0, _NO_EXPONENT, clamped).int())
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    c = total.double()
    depth = a.shape[1]
    order = torch.arange(depth, device=a.device)
    if h.strided:
        order = order.view(-1, h.step, 128 // h.step).transpose(1, 2).reshape(-1)
    for start in range(0, depth, h.step):
        k = order[start : start + h.step]
        products = a[:, None, k] * b[None, :, k]
        largest = (exponents[0][:, None, k] + exponents[1][None, :, k]).amax(dim=2)
        largest = torch.maximum(largest, floor_log2(c)).clamp(min=-200)
        inverse_q = power_of_two(h.fraction_bits - largest)
        t = (products * inverse_q[..., None]).trunc_().sum(dim=2) + (c * inverse_q).trunc()
        kept = t.view(torch.int64) & -(1 << (52 - h.fraction_bits))
        c = kept.view(torch.float64) * power_of_two(largest - h.fraction_bits)
        done = start + h.step
        if done == depth or (h.interval is not None and done % h.interval == 0):
            total = total + c.float()
            c = torch.zeros_like(c)
    return total


# ------------------------------------------------------------------------------------------------------------ the probe
def operands(pair: tuple[FloatFormat, FloatFormat], depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8 codes of every kind of data, so many rows each."""
    a, b = [], []
    for kind, make in CODES.items():
        rows = ROWS_OF_KIND + (-ROWS_OF_KIND * len(CODES) % 16 if not a else 0)  # all in all a multiple of 16
        codes = make(Draw(f"{kind} {depth}", device), rows, rows, depth, pair)
        a.append(codes[0])
        b.append(codes[1])
    return torch.cat(a), torch.cat(b)


def multiply(
    a: Tensor, b: Tensor, pair: tuple[FloatFormat, FloatFormat], out_dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """By torch on a GPU, by the package's host build on the CPU."""
    gemm = hopper.scaled_mm if a.device.type == "cuda" else hopper.emulation
    one = torch.ones((), device=a.device)
    typed = (x.view(torch.float8_e5m2) if fmt == E5M2 else x for x, fmt in zip((a, b), pair, strict=True))
    a, b = typed
    return gemm(a, one, b, one, out_dtype, use_fast_accum=fast)


def probe(pair: tuple[FloatFormat, FloatFormat], depth: int, *, fast: bool, device: torch.device) -> None:
    """Print what fits one configuration."""
    a, b = operands(pair, depth, device)
    print(f"\n{pair[0]} by {pair[1]}, use_fast_accum={fast}, K = {depth}", flush=True)
    try:
        got = multiply(a, b, pair, torch.float32, fast=fast)
        as_bf16 = multiply(a, b, pair, torch.bfloat16, fast=fast)
    except GemmRefused as error:
        print(f"  refused: {error}")
        return
    print(f"  bfloat16 output is float32's, rounded: {torch.equal(hopper.bits_of(as_bf16), bf16_bits(got))}")
    a_values, b_values = (x.view(DTYPES[fmt]).double() for x, fmt in zip((a, b), pair, strict=True))
    differs = {h: got != accumulate(a_values, b_values, pair, h) for h in hypotheses(pair, depth)}
    counts = {h: int(x.sum()) for h, x in differs.items()}
    best = sorted(counts, key=lambda h: counts[h])
    fitting = [h for h in best if counts[h] == 0]
    for h in fitting or best[:_SHOWN]:
        print(f"  {got.numel() - counts[h]:,} of {got.numel():,}: {h}")
    if not fitting:
        rows = differs[best[0]].any(dim=1).nonzero().view(-1).tolist()
        m = rows[0]
        n = int(differs[best[0]][m].nonzero()[0])
        print(f"  of the best, rows of a with a difference: {rows}")
        print(f"  first at ({m}, {n}): got {got[m, n].item().hex()}")
        for name, codes in (("a", a[m]), ("b", b[n])):
            print(f"    {name} = {bytes(codes.tolist()).hex()}")


def bf16_bits(x: Tensor) -> Tensor:
    """float32 rounded to bfloat16 as integers."""
    return hopper.bits_of(x.bfloat16())


def probe_specials(device: torch.device) -> None:
    """Print the bits that infinities and NaN give: each pair of codes beside 1 * 1, in the first and the last step."""
    inf, one, zero, nan, largest = 0x7C, 0x3C, 0x00, 0x7F, 0x7B  # of E5M2
    negative = 0x80
    of_e4m3 = {"1": 0x38, "-1": 0xB8, "0": 0x00, "448": 0x7E, "NaN": 0x7F}
    cases = {
        "inf * 1": ([inf], ["1"]),
        "inf * -1": ([inf], ["-1"]),
        "-inf * -1": ([inf | negative], ["-1"]),
        "inf * 448": ([inf], ["448"]),
        "inf * 0": ([inf], ["0"]),
        "inf * 1 + inf * 1": ([inf, inf], ["1", "1"]),
        "inf * 1 + inf * -1": ([inf, inf], ["1", "-1"]),
        "inf * 1 - largest * 448": ([inf, largest | negative], ["1", "448"]),
        "NaN * 1": ([nan], ["1"]),
        "-NaN * 1": ([0xFF], ["1"]),
        "signalling NaN * 1": ([0x7D], ["1"]),
        "1 * NaN": ([one], ["NaN"]),
        "inf * NaN": ([inf], ["NaN"]),
        "0 * NaN": ([zero], ["NaN"]),
    }
    print("\ninfinities and NaN, E5M2 by E4M3, K = 256: float32 bits (fast), float32, bfloat16; step apart")
    for name, (codes_a, codes_b) in cases.items():
        line = []
        for apart in (1, 40, 130):  # in one step, in two steps, in two 128-blocks
            a, b = torch.zeros(16, 256, dtype=torch.uint8), torch.zeros(16, 256, dtype=torch.uint8)
            a[:, 5], b[:, 5] = one, of_e4m3["1"]
            for i, (code_a, code_b) in enumerate(zip(codes_a, codes_b, strict=True)):
                a[:, 9 + i * apart], b[:, 9 + i * apart] = code_a, of_e4m3[code_b]
            a, b = a.to(device), b.to(device)
            outputs = (
                multiply(a, b, (E5M2, E4M3), dtype, fast=fast)[0, 0]
                for dtype, fast in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False))
            )
            masks = (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF)
            line.append(" ".join(f"{int(hopper.bits_of(x)) & m:X}" for x, m in zip(outputs, masks, strict=True)))
            if len(codes_a) == 1:
                break
        print(f"  {name:<24} {' | '.join(line)}")


def probe_refusals(device: torch.device) -> None:
    """Print what torch says to E5M2 elsewhere."""
    print("\nE5M2 elsewhere")
    codes = torch.zeros(128, 256, dtype=torch.uint8, device=device)
    one, blocks = torch.ones((), device=device), torch.ones(128, 2, device=device)
    for of_a, of_b in ((E5M2, E5M2), (E5M2, E4M3), (E4M3, E5M2)):
        a, b = (codes.view(torch.float8_e5m2) if fmt == E5M2 else codes for fmt in (of_a, of_b))
        layouts = {"1x128 by 1x128": (blocks, blocks), "1x128 by 128x128": (blocks, blocks[:1])}
        if of_a == of_b:
            layouts["tensor-wise"] = (one, one)
        for layout, scales in layouts.items():
            try:
                hopper.scaled_mm(a, scales[0], b, scales[1], torch.float32)
                answer = "computed"
            except GemmRefused as error:
                answer = f"refused: {error}"
            print(f"  {of_a} by {of_b}, {layout}: {answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, action="append", help="K, a multiple of 128; default: " + str(DEPTHS))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not hopper.has_scaled_mm(device):
        sys.exit(f"probe_e5m2: device is {device}, needed one of compute capability 9.0")
    start = time.perf_counter()
    for pair, depth, fast in itertools.product(PAIRS, arguments.depth or DEPTHS, (True, False)):
        probe(pair, depth, fast=fast, device=device)
    probe_specials(device)
    if device.type == "cuda":
        probe_refusals(device)
    print(f"\n{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
