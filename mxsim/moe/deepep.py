"""MXFP4 rows as the pair of tensors that DeepEP's `Buffer.dispatch` takes, and back. DeepEP itself is not needed here.

DeepEP sends a pair (x, scales) row by row without looking inside: x [T, hidden] with one byte an element, scales
[T, hidden // 128] in float32 or int32. MXFP4 rows fit that with hidden = K / 2 bytes of codes, and four E8M0 bytes seen
as an int32 for each 128 elements. hidden, as DeepEP counts it, is then K / 2 and the number of scales K / 128.

    recv, recv_ids, recv_weights, num_received, handle, event = buffer.dispatch(to_deepep(rows), ...)
    rows = from_deepep(recv)

Source: the argument checks of deepseek-ai/DeepEP's csrc (rows of whole 16 bytes; scales in float32 or int32, two axes).
"""

from importlib.util import find_spec

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from mxsim.kernels import Fp4Rows
from mxsim.kernels.layouts import FP4_BLOCK, FP8_BLOCK

DeepEpRows = tuple[UInt8[Tensor, "T K/2"], Int32[Tensor, "T K/128"]]


def has_deepep() -> bool:
    """Whether the module deep_ep is installed."""
    return find_spec("deep_ep") is not None


def to_deepep(rows: Fp4Rows) -> DeepEpRows:
    """(codes, scales as int32): the same bytes, copied only where they are not contiguous.

    Raises:
        TypeError: unless codes and scales are uint8.
        ValueError: for shapes that are not MXFP4 rows, or K no multiple of 128.
    """
    codes, scales = rows
    for name, x in (("codes", codes), ("scales", scales)):
        if x.dtype is not torch.uint8:
            raise TypeError(f"to_deepep: {name} has dtype {x.dtype}, needed uint8")
        if x.dim() != 2:
            raise ValueError(f"to_deepep: {name} has {x.dim()} axes, needed 2")
    num_columns = 2 * codes.shape[1]
    if num_columns % FP8_BLOCK:
        raise ValueError(f"to_deepep: codes hold {num_columns} elements a row, needed a multiple of {FP8_BLOCK}")
    if scales.shape != (codes.shape[0], num_columns // FP4_BLOCK):
        raise ValueError(
            f"to_deepep: scales has shape {tuple(scales.shape)}, needed {(codes.shape[0], num_columns // FP4_BLOCK)}"
        )
    scales = scales.contiguous()
    if scales.storage_offset() % 4:
        scales = scales.clone()
    return codes.contiguous(), scales.view(torch.int32)


def from_deepep(received: DeepEpRows) -> Fp4Rows:
    """What dispatch returned in place of the pair, as MXFP4 rows; no copy.

    Raises:
        TypeError: unless it is a pair of uint8 and int32.
        ValueError: for shapes that do not belong together.
    """
    codes, scales = received
    if codes.dtype is not torch.uint8 or scales.dtype is not torch.int32:
        raise TypeError(f"from_deepep: received {codes.dtype} and {scales.dtype}, needed uint8 and int32")
    if codes.dim() != 2 or scales.shape != (codes.shape[0], 2 * codes.shape[1] // FP8_BLOCK):
        raise ValueError(
            f"from_deepep: codes have shape {tuple(codes.shape)} and scales {tuple(scales.shape)}, needed [T, K/2] and "
            "[T, K/128]"
        )
    return Fp4Rows(codes, scales.contiguous().view(torch.uint8))


__all__ = ["DeepEpRows", "from_deepep", "has_deepep", "to_deepep"]
