"""A one-read FP8 quantizer to compare with: whether it is there, and right."""

from collections.abc import Callable

import torch
from torch import Tensor

from mxsim import kernels
from mxsim.bench.cases import Data, Layout, Shape, flat
from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Rows

Fused = Callable[[Tensor], tuple[Fp8Rows, Fp8Cols]]
NUM_WARPS = (4, 8, 16)  # all are timed, the fastest counts
_CHECKED = Shape(512, 768)
# zeros, subnormals, amax at and around 448 times a power of two, the extremes, infinity, NaN
_SPECIAL_BITS = (0x0000, 0x8000, 0x0001, 0x007F, 0x43E0, 0x43E1, 0xC3E0, 0x0460, 0x0461, 0x7F7F, 0xFF7F, 0xFF80, 0x7FC1)


class Unavailable(Exception):
    """Why there is nothing to compare with."""


def fused_kernels(device: torch.device) -> dict[int, Fused]:
    """The kernel by its number of warps, its bits equal to those of two kernels.

    Raises:
        Unavailable: with the reason, if it cannot run, or its bits differ.
    """
    if device.type != "cuda":
        raise Unavailable("it runs on a CUDA device")
    try:
        from mxsim.bench.moe.triton_fused_fp8 import bf16_to_fp8_row_and_col
    except ImportError as error:
        raise Unavailable(f"{error} (CUDA builds of torch bring Triton)") from error

    def with_warps(num_warps: int) -> Fused:
        return lambda x: bf16_to_fp8_row_and_col(x, num_warps)

    found = {num_warps: with_warps(num_warps) for num_warps in NUM_WARPS}
    for num_warps, fused in found.items():
        for x in (special_matrix(device), Data.random(_CHECKED, device).of(Layout.BF16)[0]):
            if not same_bits(fused, x):
                raise Unavailable(f"its bits differ from bf16_to_fp8_row's and bf16_to_fp8_col's ({num_warps} warps)")
    return found


def special_matrix(device: torch.device) -> Tensor:
    """A special value in each block in turn, in the rows of a tile and in its columns."""
    bits = torch.tensor(_SPECIAL_BITS, dtype=torch.int32).to(torch.int16)
    size = 4 * FP8_BLOCK
    x = torch.randn((size, size), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[:FP8_BLOCK] = 0
    x[:, :FP8_BLOCK] *= 2.0**-130
    values = bits.view(torch.bfloat16)
    for number in range(size):
        value = values[number % len(values)]
        x[number, (37 * number) % size] = value
    return x.to(device)


def same_bits(fused: Fused, x: Tensor) -> bool:
    """Whether its results are those of the two kernels."""
    got = flat(fused(x))
    want = flat((kernels.bf16_to_fp8_row(x), kernels.bf16_to_fp8_col(x)))
    return all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(got, want, strict=True))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
