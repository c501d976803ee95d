"""Before an op is timed: its results, bit by bit."""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from mxsim.bench.cases import Case, Data
from mxsim.kernels import build, host
from mxsim.validate.reference import expected

_ROWS_FOR_SIMULATOR = 200
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Reference(Enum):
    """What the results must equal."""

    HOST = "the host build, everything that will be timed"
    SIMULATOR = "the simulator, the first rows"


def reference_for(device: torch.device) -> Reference:
    """The host build for a CUDA device, where there is one."""
    if device.type == "cpu":
        return Reference.SIMULATOR
    try:
        host.library()
    except (build.BuildError, OSError):
        return Reference.SIMULATOR
    return Reference.HOST


def problem_with(case: Case, data: Data, device: torch.device, reference: Reference) -> str:
    """What is wrong with the op's results, or nothing."""
    if reference is Reference.SIMULATOR:
        case = Case(case.op, case.shape.first(_ROWS_FOR_SIMULATOR), case.variant)
        data = data.first(_ROWS_FOR_SIMULATOR)
    inputs, options = case.inputs(data), case.options(device)
    for result in case.call(inputs, options):
        _integers(result).bitwise_not_()  # the next results are likely to get this memory: it must not hold them yet
    got = case.call(inputs, options)
    want = _simulated(case, inputs) if reference is Reference.SIMULATOR else _from_host(case, data)
    if len(got) != len(want):
        return f"{len(got)} tensors, needed {len(want)}"
    return "; ".join(filter(None, map(_difference, range(len(got)), got, want)))


def _from_host(case: Case, data: Data) -> Sequence[Tensor]:
    """Results on the CPU; there they end with the last group."""
    return case.call(case.inputs_on_cpu(data), case.options(torch.device("cpu")))


def _simulated(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    names = ("x",) if len(inputs) == 1 else ("codes", "scales")
    if case.op == "bf16_to_fp8_tile":
        names = ("w",)
    arrays = {name: _array(t) for name, t in zip(names, inputs, strict=True)}
    options = dict(case.options(torch.device("cpu")))
    if case.shape.num_experts:
        options["group_sizes"] = case.shape.group_sizes
    return [_tensor(leaf.bits) for leaf in expected(case.op, arrays, options)]


def _array(x: Tensor) -> np.ndarray:
    """bfloat16 as uint16 bits, FP8 codes as uint8, scales as they are."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).cpu().numpy().view(np.uint16)
    return (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x).cpu().numpy()


def _tensor(bits: np.ndarray) -> Tensor:
    signed = bits if bits.dtype == np.uint8 else bits.view(f"i{bits.dtype.itemsize}")
    return torch.from_numpy(np.ascontiguousarray(signed))


def _difference(number: int, got: Tensor, want: Tensor) -> str:
    """How a result differs from what it must be; bytes past the last group are unspecified."""
    got, want = _integers(got), _integers(want).to(got.device)
    if got.dtype != want.dtype or got.shape[1:] != want.shape[1:] or got.shape[0] < want.shape[0]:
        return f"result {number} is {got.dtype} of shape {tuple(got.shape)}, needed {want.dtype} {tuple(want.shape)}"
    got = got[: want.shape[0]]
    if torch.equal(got, want):
        return ""
    differing = got != want
    first = tuple(int(i) for i in np.unravel_index(int(differing.flatten().int().argmax()), got.shape))
    count = int(differing.count_nonzero())
    digits = 2 * got.element_size()
    bits = [f"0x{int(t[first]) & (1 << 4 * digits) - 1:0{digits}X}" for t in (got, want)]
    return f"result {number}: {count} of {got.numel()} entries differ, first at {first}: {bits[0]}, needed {bits[1]}"


def _integers(x: Tensor) -> Tensor:
    return x.view(_INTEGERS[x.element_size()])
