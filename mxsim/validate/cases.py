"""One case of one op: the inputs as bits, the options, and how the tensors lie in memory."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Inputs = dict[str, np.ndarray]
"""By argument. bfloat16 as uint16 bits; float16, float32, and uint8 codes and scales as they are."""


class View(Enum):
    """How the tensors that the candidate gets lie in memory; the values are the same in each."""

    CONTIGUOUS = "contiguous"
    OFFSET = "storage offset of 1 element"
    SLICED = "columns of a wider matrix"
    TRANSPOSED = "transpose of a contiguous matrix"  # FP8 scales so lie as FP8 rows have them
    LEADING_AXES = "three axes"
    SMALL_FLOATS = "float8, float8_e8m0fnu and float4 views"


class SizesForm(Enum):
    """How the candidate gets group_sizes."""

    LIST = "list"
    CPU_TENSOR = "CPU tensor"
    DEVICE_INT64 = "int64 tensor on the device"
    DEVICE_INT32 = "int32 tensor on the device"


@dataclass(frozen=True)
class Case:
    """What a candidate is called with. The inputs follow from the case's name alone.

    options: keywords that differ from their defaults; group_sizes among them as a list.
    bad_input: the CPU raises ValueError, a CUDA device poisons or clamps (NUMERICS 10); only our own ops must do so.
    repeat: the tensors hold the inputs so many times over, row after row.
    """

    op: str
    name: str
    make: Callable[[np.random.Generator], Inputs] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    view: View = View.CONTIGUOUS
    sizes_form: SizesForm = SizesForm.LIST
    bad_input: bool = False
    repeat: int = 1

    def inputs(self) -> Inputs:
        """The inputs, the same at every call."""
        return self.make(np.random.default_rng(zlib.crc32(f"{self.op}: {self.name}".encode())))


def arguments(case: Case, inputs: Inputs, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    """(tensors, keywords) to call a candidate with."""
    tensors = [_viewed(_repeated(_tensor(array, device), case), name, case) for name, array in inputs.items()]
    keywords = dict(case.options)
    if "group_sizes" in keywords:
        sizes = list(keywords["group_sizes"]) * case.repeat
        on_device = case.sizes_form in (SizesForm.DEVICE_INT64, SizesForm.DEVICE_INT32)
        if case.sizes_form is SizesForm.LIST:
            keywords["group_sizes"] = sizes
        else:
            dtype = torch.int32 if case.sizes_form is SizesForm.DEVICE_INT32 else torch.int64
            keywords["group_sizes"] = torch.tensor(sizes, dtype=dtype, device=device if on_device else "cpu")
    return tensors, keywords


def has_sizes_on_device(case: Case) -> bool:
    """Whether results are allocated at their upper bound on a CUDA device."""
    return "group_sizes" in case.options and case.sizes_form in (SizesForm.DEVICE_INT64, SizesForm.DEVICE_INT32)


def _repeated(x: Tensor, case: Case) -> Tensor:
    return x if case.repeat == 1 else x.repeat(case.repeat, *[1] * (x.dim() - 1))


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of its own bytes: uint16 becomes bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).to(device).view(torch.bfloat16)
    return torch.from_numpy(np.array(array)).to(device)


def _viewed(x: Tensor, name: str, case: Case) -> Tensor:
    view = case.view
    if view is View.OFFSET:
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if view is View.SLICED:
        wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
        wide[..., 1 : 1 + x.shape[-1]] = x
        return wide[..., 1 : 1 + x.shape[-1]]
    if view is View.TRANSPOSED:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if view is View.LEADING_AXES:
        return x.reshape(2, x.shape[0] // 2, *x.shape[1:])
    if view is View.SMALL_FLOATS and x.dtype is torch.uint8:
        is_fp8 = case.op.startswith("fp8")
        return x.view(_small_dtype(name, is_fp8=is_fp8))
    return x


def _small_dtype(name: str, *, is_fp8: bool) -> torch.dtype:
    if name == "scales":
        return torch.float8_e8m0fnu
    return torch.float8_e4m3fn if is_fp8 else torch.float4_e2m1fn_x2
