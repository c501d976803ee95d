"""What the ops must return, made from the simulator's results by slicing; compared with tensors as bits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mxsim.blocks import FP8_1X128, MXFP4, BlockTensor, quantize
from mxsim.formats import E2M1, unpack
from tests.compare import assert_codes_equal


class Want(NamedTuple):
    """codes uint8, scales uint8 or float32, padded group sizes or None: as the results' fields."""

    codes: np.ndarray
    scales: np.ndarray
    padded_group_sizes: list[int] | None = None


def bits_of(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """Storage as unsigned integers, in the logical shape."""
    if isinstance(x, torch.Tensor):
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        x = x.cpu().view(integer).numpy()
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def assert_bits_equal(got: torch.Tensor, want: np.ndarray, label: str) -> None:
    """Same shape, element size and bits; every NaN scale is the quiet NaN."""
    assert got.element_size() == want.dtype.itemsize, label
    assert_codes_equal(bits_of(got), bits_of(want), label=label)


def assert_result(got, want: Want, label: str = "") -> None:
    """A result of rows, columns or tiles agrees in every bit, and in what its padded group sizes say."""
    assert_bits_equal(got.codes, want.codes, f"{label} codes")
    assert_bits_equal(got.scales, want.scales, f"{label} scales")
    if len(got) > 2:
        sizes = getattr(got, "padded_group_sizes", None)  # dense FP8 rows have none
        assert (None if sizes is None else sizes.tolist()) == want.padded_group_sizes, label
        assert sizes is None or sizes.dtype == torch.int64


# ------------------------------------------------------------------------------------------------------------- results
def fp4_rows(t: BlockTensor) -> Want:
    """Packed rows, leading axes flattened."""
    return Want(t.packed().reshape(-1, t.shape[-1] // 2), t.scales.reshape(-1, t.shape[-1] // 32))


def fp8_rows(t: BlockTensor) -> Want:
    return Want(t.codes.reshape(-1, t.shape[-1]), t.scales.reshape(-1, t.shape[-1] // 128))


def ragged_fp8_rows(codes: np.ndarray, scales: np.ndarray, sizes: Sequence[int], multiple: int = 4) -> Want:
    """Each expert's rows, then zero rows with scale 1; its scales transposed, chunk after chunk, flat."""
    num_columns, num_blocks = codes.shape[1], scales.shape[1]
    all_codes, all_scales, padded_sizes, start = [], [], [], 0
    for size in sizes:
        padded = size
        while padded % multiple:
            padded += 1
        expert_codes = np.zeros((padded, num_columns), np.uint8)
        expert_codes[:size] = codes[start : start + size]
        expert_scales = np.ones((num_blocks, padded), np.float32)
        expert_scales.view(np.uint32)[:, :size] = scales.view(np.uint32)[start : start + size].T
        all_codes.append(expert_codes)
        all_scales.append(expert_scales.ravel())
        padded_sizes.append(padded)
        start += size
    assert start == len(codes)
    return Want(
        np.concatenate([np.zeros((0, num_columns), np.uint8), *all_codes]),
        np.concatenate([np.zeros(0, np.float32), *all_scales]),
        padded_sizes,
    )


def fp8_cols(t: BlockTensor) -> Want:
    """A column result [K, ceil128(m)] of the simulator: scales lie the other way round."""
    return Want(t.codes, np.ascontiguousarray(t.scales.T))


def ragged_fp8_cols(columns: Sequence[BlockTensor], num_columns: int) -> Want:
    """Chunks of codes [K, padded] back to back, flat; scales one below the other."""
    return Want(
        np.concatenate([np.zeros(0, np.uint8), *(c.codes.ravel() for c in columns)]),
        np.concatenate([np.zeros((0, num_columns), np.float32), *(c.scales.T for c in columns)]),
        [c.shape[1] for c in columns],
    )


def quantized_cols(x: torch.Tensor) -> BlockTensor:
    """`bf16_to_fp8_col` of one expert as a column result: rows of the transpose, the last block padded with zeros."""
    num_rows, num_columns = x.shape
    padded = torch.zeros((num_columns, -(-num_rows // 128) * 128), dtype=x.dtype)
    padded[:, :num_rows] = x.t()
    t = quantize(padded, FP8_1X128)
    codes = t.codes.copy()
    codes[:, num_rows:] = 0  # the padding of a block with a NaN is code 0x00 too
    return BlockTensor(codes, t.scales, FP8_1X128, source_rows=num_rows)


def split(x, sizes: Sequence[int]) -> list:
    """The rows of each expert."""
    starts = np.cumsum([0, *sizes])
    return [x[start : start + size] for start, size in zip(starts, sizes, strict=False)]


# -------------------------------------------------------------------------------------------------------------- inputs
def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> BlockTensor:
    """The simulator's tensor of packed rows."""
    return BlockTensor(unpack(bits_of(codes), E2M1), bits_of(scales), MXFP4)


def fp8(codes: torch.Tensor, scales: torch.Tensor) -> BlockTensor:
    return BlockTensor(bits_of(codes), np.ascontiguousarray(scales.numpy()), FP8_1X128)


def torch_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Unsigned integers as a tensor of that dtype."""
    signed = np.ascontiguousarray(bits).view(f"i{bits.dtype.itemsize}" if bits.dtype.itemsize > 1 else "u1")
    return torch.from_numpy(signed.copy()).view(dtype)
