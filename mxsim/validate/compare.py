"""Bit comparison of results with what was expected, and which step of NUMERICS a difference breaks.

Tensors are compared where they lie, each as one; only a result that differs is brought to the CPU and looked into.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxsim.formats import BF16, E2M1, E4M3, E8M0, FP16, FP32, FloatFormat, decode
from mxsim.validate.cases import Case, Inputs
from mxsim.validate.reference import PADDING, Leaf, LeafKind

_MAX_SHOWN = 4  # mismatches described for each result of a case, and the first of each step
_UINT8_LIKE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
_DTYPES = {
    LeafKind.FP4_CODES: _UINT8_LIKE,
    LeafKind.FP8_CODES: _UINT8_LIKE,
    LeafKind.E8M0_SCALES: _UINT8_LIKE,
    LeafKind.FP32_SCALES: (torch.float32,),
    LeafKind.BF16_VALUES: (torch.bfloat16,),
    LeafKind.SIZES: (torch.int64,),
}
_BITS = {  # the integers that torch compares, and the format of one entry
    LeafKind.FP4_CODES: (torch.uint8, E2M1),
    LeafKind.FP8_CODES: (torch.uint8, E4M3),
    LeafKind.E8M0_SCALES: (torch.uint8, E8M0),
    LeafKind.FP32_SCALES: (torch.int32, FP32),
    LeafKind.BF16_VALUES: (torch.int16, BF16),
    LeafKind.SIZES: (torch.int64, None),
}
_LAYOUT = "8 layout"
_LEAST_REARRANGED = 3  # different entries that are elsewhere
_MAX_COPIES = 2  # of a large case that are looked into
_FURTHER_COPIES = "step not looked for, further copies of a large case"
# what breaks -> the step, by the sections that rule an op
_STEPS = {
    "3": {"poison": "3.3", "zero block": "3.4", "scale": "3.2", "rounding": "3.5"},
    "4": {"poison": "4.3", "zero block": "4.2", "scale": "4.1 and 4.2", "rounding": "4.3 and 4.4"},
    "5.1": {"poison": "5.1 and 4.3", "zero block": "5.1", "scale": "5.1 and 4.2", "rounding": "5.1 and 4.3"},
    "5.4": {"poison": "5.4", "zero block": "5.4", "scale": "5.4", "rounding": "5.4"},
    "6": {"poison": "6.4", "zero block": "3.4", "scale": "6.2", "rounding": "6.3"},
    "7": {"poison": "7.2", "zero block": "7.1", "scale": "7.1", "rounding": "7.1"},
    "8": {"poison": "8", "zero block": "8", "scale": "8", "rounding": "8"},
    "3.9": {"poison": "3.9", "zero block": "3.9", "scale": "3.9", "rounding": "3.9"},
}


@dataclass(frozen=True)
class Mismatch:
    """One entry of a result that differs. scale: that the code needed."""

    case: str
    result: str
    index: tuple[int, ...]
    input: str
    scale: str
    got: str
    want: str
    got_value: str
    want_value: str
    step: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass
class Comparison:
    """Elements compared in one case, and what differs; problems are results of the wrong number, dtype or shape."""

    num_elements: int = 0
    num_mismatches: int = 0
    by_step: Counter[str] = field(default_factory=Counter)
    first: list[Mismatch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def compare(
    case: Case, inputs: Inputs, leaves: Sequence[Leaf], results: Any, device: torch.device, *, prefix_only: bool
) -> Comparison:
    """Compare what a candidate returned with the leaves.

    prefix_only: results may be longer along their first axis, with unspecified bytes at the end.
    """
    comparison = Comparison()
    try:
        tensors = list(_tensors(results))
    except TypeError as error:
        comparison.problems.append(str(error))
        tensors = []
    if not comparison.problems and len(tensors) != len(leaves):
        names = ", ".join(leaf.name for leaf in leaves)
        comparison.problems.append(f"returned {len(tensors)} tensors, needed {len(leaves)}: {names}")
    if comparison.problems:
        _count_all(comparison, leaves, case)
        return comparison

    bits = {}
    for leaf, tensor in zip(leaves, tensors, strict=True):
        checked = _checked(leaf, tensor, case.repeat, prefix_only)
        if tensor.device.type != device.type:
            checked = f"is on {tensor.device}, needed {device}"
        if isinstance(checked, str):
            comparison.problems.append(f"{leaf.name}: {checked}")
            _count_all(comparison, [leaf], case)
        else:
            bits[leaf.name] = checked
    checked_leaves = {leaf.name: leaf for leaf in leaves if leaf.name in bits}
    for leaf in checked_leaves.values():
        comparison.num_elements += leaf.num_elements * case.repeat
        differing = _differing_copies(leaf, bits[leaf.name], case)
        for copy in differing[:_MAX_COPIES]:
            _look_into(leaf, _Evidence(case, inputs, checked_leaves, bits, copy), comparison)
        for copy in differing[_MAX_COPIES:]:
            count = _count_differing(leaf, bits[leaf.name], case, copy)
            comparison.num_mismatches += count
            comparison.by_step[_FURTHER_COPIES] += count
    return comparison


# ------------------------------------------------------------------------------------------------------------ results
def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, (tuple, list)):
        for part in results:
            if part is not None:
                yield from _tensors(part)
    else:
        raise TypeError(f"returned a {type(results).__name__}, needed tensors")


def _checked(leaf: Leaf, tensor: Tensor, repeat: int, prefix_only: bool) -> Tensor | str:
    """The result's bits, or what is wrong with it."""
    dtypes = _DTYPES[leaf.kind]
    if tensor.dtype not in dtypes:
        return f"has dtype {tensor.dtype}, needed {' or '.join(str(d) for d in dtypes)}"
    needed = _repeated_shape(leaf, repeat)
    shape = tuple(tensor.shape)
    if prefix_only and leaf.kind is not LeafKind.SIZES and len(shape) == len(needed) and shape[:1] >= needed[:1]:
        tensor = tensor[: needed[0]]
        shape = tuple(tensor.shape)
    if shape != needed:
        return f"has shape {shape}, needed {needed} ({_LAYOUT})"
    strides = leaf.layout.strides(shape)
    if tensor.numel() and any(n > 1 and s != t for n, s, t in zip(shape, tensor.stride(), strides, strict=True)):
        return f"has strides {tensor.stride()}, needed {strides} for shape {shape} ({_LAYOUT})"
    return tensor.view(_BITS[leaf.kind][0])


def _repeated_shape(leaf: Leaf, repeat: int) -> tuple[int, ...]:
    shape = list(leaf.bits.shape)
    shape[leaf.repeat_axis] *= repeat
    return tuple(shape)


def _differing_copies(leaf: Leaf, got: Tensor, case: Case) -> list[int]:
    """Which copies of the inputs have another result."""
    want = _wanted(leaf, got.device)
    return [i for i, part in enumerate(_copies(leaf, got, case.repeat)) if not torch.equal(part, want)]


def _count_differing(leaf: Leaf, got: Tensor, case: Case, copy: int) -> int:
    difference = _copies(leaf, got, case.repeat)[copy] ^ _wanted(leaf, got.device)
    if leaf.kind is LeafKind.FP4_CODES:
        return int(torch.count_nonzero(difference & 0xF) + torch.count_nonzero(difference & 0xF0))
    return int(torch.count_nonzero(difference))


def _wanted(leaf: Leaf, device: torch.device) -> Tensor:
    signed = {np.uint32: np.int32, np.uint16: np.int16}.get(leaf.bits.dtype.type, leaf.bits.dtype.type)
    want = torch.from_numpy(np.array(leaf.bits.view(signed))).to(device)
    assert want.dtype is _BITS[leaf.kind][0]
    return want


def _copies(leaf: Leaf, got: Tensor, repeat: int) -> tuple[Tensor, ...]:
    """The results of each copy of the inputs."""
    if repeat == 1:
        return (got,)
    return got.unflatten(leaf.repeat_axis, (repeat, leaf.bits.shape[leaf.repeat_axis])).unbind(leaf.repeat_axis)


def _count_all(comparison: Comparison, leaves: Sequence[Leaf], case: Case) -> None:
    for leaf in leaves:
        comparison.num_elements += leaf.num_elements * case.repeat
        comparison.num_mismatches += leaf.num_elements * case.repeat
        comparison.by_step[_LAYOUT] += leaf.num_elements * case.repeat


# --------------------------------------------------------------------------------------------------------- mismatches
@dataclass
class _Evidence:
    """Inputs, expectations and results of one case, of one copy of its inputs, element by element on the CPU."""

    case: Case
    inputs: Inputs
    leaves: dict[str, Leaf]
    results: dict[str, Tensor]
    copy: int

    def got(self, leaf: Leaf) -> np.ndarray:
        """Bits of a result, an entry an element."""
        copy = _copies(leaf, self.results[leaf.name], self.case.repeat)[self.copy]
        return _elements(leaf, copy.cpu().numpy().view(leaf.bits.dtype))

    @cached_property
    def first_input(self) -> np.ndarray:
        """Codes or bits of the elements, [rows, columns]."""
        array = next(iter(self.inputs.values()))
        if self.input_format is E2M1:
            array = np.stack([array & 0xF, array >> 4], axis=-1).reshape(array.shape[0], -1)
        return array.view({2: np.uint16, 4: np.uint32, 1: np.uint8}[array.dtype.itemsize])

    @cached_property
    def input_format(self) -> FloatFormat:
        """Of the elements."""
        array = next(iter(self.inputs.values()))
        if self.case.op.startswith("fp4"):
            return E2M1
        if self.case.op.startswith("fp8"):
            return E4M3
        return {np.dtype(np.uint16): BF16, np.dtype(np.float16): FP16, np.dtype(np.float32): FP32}[array.dtype]

    def amax_of(self, leaf: Leaf) -> np.ndarray:
        """Largest magnitude code of each block of the leaf, at the index of the block's first element."""
        assert leaf.blocks is not None
        magnitudes = (self.first_input & self.input_format.magnitude_mask).reshape(-1)
        count = leaf.blocks.first_row.size * leaf.blocks.num_columns
        amax = np.zeros(magnitudes.size, magnitudes.dtype)
        np.maximum.at(amax, leaf.blocks.first_of(np.arange(count)), magnitudes[:count])
        return amax

    def scales_of(self, leaf: Leaf, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(got, wanted) scale bits of blocks, by the index of their first element; padding gets any."""
        scales = self.leaves[leaf.scales or ""]
        assert scales.source is not None
        source = scales.source().reshape(-1)
        order = np.argsort(source, kind="stable")
        place = order[np.minimum(np.searchsorted(source[order], firsts), source.size - 1)]
        want = scales.bits.reshape(-1)[place]
        got = self.got(scales).reshape(-1)[place] if scales.name in self.leaves else want
        return got, want


def _elements(leaf: Leaf, bits: np.ndarray) -> np.ndarray:
    """One entry an element: a byte of FP4 codes is two."""
    if leaf.kind is not LeafKind.FP4_CODES:
        return bits
    return np.stack([bits & 0xF, bits >> 4], axis=-1).reshape(*bits.shape[:-1], -1)


def _source(leaf: Leaf) -> np.ndarray:
    assert leaf.source is not None
    source = leaf.source()
    if leaf.kind is LeafKind.FP4_CODES:
        return np.stack([source, source + 1], axis=-1).reshape(*source.shape[:-1], -1)
    return source


def _look_into(leaf: Leaf, evidence: _Evidence, comparison: Comparison) -> None:
    got, want = evidence.got(leaf), _elements(leaf, leaf.bits)
    places = np.flatnonzero(got != want)
    comparison.num_mismatches += places.size
    got_bits, want_bits = got.reshape(-1)[places], want.reshape(-1)[places]
    source = None if leaf.source is None else _source(leaf).reshape(-1)[places]
    steps = _Steps(places.size)
    if source is None:
        steps.add("8 padded group sizes", np.ones(places.size, bool))
    elif _is_rearranged(got, want):
        steps.add(f"{_LAYOUT}: the right {leaf.kind.value}, elsewhere", np.ones(places.size, bool))
    else:
        _find_steps(steps, leaf, evidence, source, got_bits, want_bits)
    comparison.by_step.update(steps.counts())
    shown = sorted({*steps.first_of_each(), *range(min(_MAX_SHOWN, places.size))})
    element_format = _BITS[leaf.kind][1]
    for i in shown:
        index = list(np.unravel_index(places[i], want.shape))
        index[leaf.repeat_axis] += evidence.copy * want.shape[leaf.repeat_axis]
        comparison.first.append(
            Mismatch(
                case=evidence.case.name,
                result=leaf.name,
                index=tuple(int(n) for n in index),
                input="" if source is None else _describe_input(leaf, evidence, int(source[i])),
                scale="" if source is None else _describe_scale(leaf, evidence, int(source[i])),
                got=hex_of(got_bits[i], element_format),
                want=hex_of(want_bits[i], element_format),
                got_value=value_of(got_bits[i], element_format),
                want_value=value_of(want_bits[i], element_format),
                step=steps.name(i),
            )
        )


class _Steps:
    """Which step each of the differing entries breaks; what is added later overrides."""

    def __init__(self, size: int) -> None:
        self._names: list[str] = []
        self._of_entry = np.zeros(size, np.uint8)

    def add(self, name: str, where: np.ndarray) -> None:
        if name not in self._names:
            self._names.append(name)
        self._of_entry[where] = self._names.index(name)

    def name(self, entry: int) -> str:
        return self._names[self._of_entry[entry]]

    def counts(self) -> dict[str, int]:
        counts = np.bincount(self._of_entry, minlength=len(self._names))
        return {name: int(n) for name, n in zip(self._names, counts, strict=True) if n}

    def first_of_each(self) -> list[int]:
        return [int(np.argmax(self._of_entry == i)) for i in np.unique(self._of_entry)]


def _is_rearranged(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether got holds what want holds, in another order; two values that change places are no layout."""
    if np.unique(want[got != want]).size < _LEAST_REARRANGED:
        return False
    if want.dtype.itemsize == 1:
        return np.array_equal(np.bincount(got.reshape(-1), minlength=256), np.bincount(want.reshape(-1), minlength=256))
    return np.array_equal(np.sort(got, axis=None), np.sort(want, axis=None))


def _find_steps(
    steps: _Steps, leaf: Leaf, evidence: _Evidence, source: np.ndarray, got_bits: np.ndarray, want_bits: np.ndarray
) -> None:
    """The steps, as well as they can be told from the outside; the most telling ones come last."""
    names = _STEPS[leaf.step]
    fmt = _BITS[leaf.kind][1]
    assert fmt is not None
    assert leaf.blocks is not None
    firsts = leaf.blocks.first_of(source)
    is_zero_code = np.zeros(source.shape, bool)
    is_tiny = np.zeros(source.shape, bool)
    everywhere = np.ones(source.shape, bool)
    if leaf.kind in (LeafKind.E8M0_SCALES, LeafKind.FP32_SCALES):
        steps.add(f"{names['scale']} scale", everywhere)
    else:
        is_sign = (got_bits ^ want_bits) == fmt.sign_mask
        is_zero_code = is_sign & ((want_bits & fmt.magnitude_mask) == 0)
        steps.add(f"{names['rounding']} rounding", everywhere)
        steps.add(f"{names['rounding']} sign", is_sign)
        steps.add("2.4 sign of zero", is_zero_code)
        everywhere = ~is_sign
    if leaf.scales is not None:
        got_scales, want_scales = evidence.scales_of(leaf, firsts)
        scale_format = _BITS[evidence.leaves[leaf.scales].kind][1]
        assert scale_format is not None
        is_tiny = (want_scales == 0) if scale_format is E8M0 else want_scales < 0x00800000  # no normal float32
        steps.add(f"{names['rounding']} rounding, tiny scale", is_tiny & everywhere)
        is_tie = _is_tie(evidence, source, got_bits, want_bits, fmt, want_scales, scale_format)
        steps.add(f"{names['rounding']} rounding of ties", is_tie & everywhere)
        steps.add(f"{names['scale']} scale, and so the codes", got_scales != want_scales)
        steps.add(_poison(names), _is_nan(want_scales, scale_format))
    if evidence.input_format is not E2M1:
        is_zero_block = evidence.amax_of(leaf)[np.maximum(firsts, 0)] == 0
        steps.add(f"{names['zero block']} all-zero block", is_zero_block & ~is_zero_code)
    steps.add(_poison(names), _is_nan(want_bits, fmt))
    if evidence.case.op == "fp8_row_to_ragged":
        steps.add("8 codes and scales are copied", np.ones(source.shape, bool))
    is_row = evidence.case.op.endswith(("row", "ragged"))
    steps.add("8 padding: code 0x00, scale 1" if is_row else "5.2 padding: code 0x00", source == PADDING)


def _is_tie(
    evidence: _Evidence,
    source: np.ndarray,
    got_bits: np.ndarray,
    want_bits: np.ndarray,
    fmt: FloatFormat,
    scales: np.ndarray,
    scale_format: FloatFormat,
) -> np.ndarray:
    """Where an input without scales of its own lies midway between the two codes, each times the scale: exact here."""
    if "scales" in evidence.inputs:
        return np.zeros(source.shape, bool)
    x = decode(evidence.first_input.reshape(-1)[np.maximum(source, 0)], evidence.input_format)
    midway = (decode(got_bits, fmt) + decode(want_bits, fmt)) / 2 * decode(scales, scale_format)
    return (x == midway) & (got_bits != want_bits)


def _poison(names: dict[str, str]) -> str:
    return f"{names['poison']} NaN or infinity in the block"


def _is_nan(bits: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    if not fmt.has_nan:
        return np.zeros(bits.shape, bool)
    mask = fmt.magnitude_mask
    return (bits & mask) > (fmt.inf_code if fmt.inf_code is not None else fmt.max_code)


# -------------------------------------------------------------------------------------------------------- description
def _describe_input(leaf: Leaf, evidence: _Evidence, source: int) -> str:
    if source == PADDING:
        return "padding"
    fmt, array = evidence.input_format, evidence.first_input
    code = array.reshape(-1)[source]
    name = next(iter(evidence.inputs))
    index = tuple(int(i) for i in np.unravel_index(source, array.shape))
    text = f"{name}{list(index)} = {hex_of(code, fmt)} ({value_of(code, fmt)})"
    is_scale = leaf.kind in (LeafKind.E8M0_SCALES, LeafKind.FP32_SCALES)
    if is_scale and fmt is not E2M1:
        amax = evidence.amax_of(leaf)[source]
        text = f"block at {name}{list(index)}, amax {hex_of(amax, fmt)} ({value_of(amax, fmt)})"
    if "scales" in evidence.inputs:
        scales = evidence.inputs["scales"]
        row, column = index[0], index[1] * scales.shape[1] // array.shape[1]
        scale_format = E8M0 if scales.dtype == np.uint8 else FP32
        bits = scales[row, column] if scale_format is E8M0 else scales.view(np.uint32)[row, column]
        text += f", scale {hex_of(bits, scale_format)} ({value_of(bits, scale_format)})"
    return text


def _describe_scale(leaf: Leaf, evidence: _Evidence, source: int) -> str:
    if leaf.scales is None or source == PADDING:
        return ""
    assert leaf.blocks is not None
    _, want = evidence.scales_of(leaf, leaf.blocks.first_of(np.array([source])))
    fmt = _BITS[evidence.leaves[leaf.scales].kind][1]
    return f"{hex_of(want[0], fmt)} ({value_of(want[0], fmt)})"


def hex_of(bits: Any, fmt: FloatFormat | None) -> str:
    """Bits in as many digits as the format has; no format: a decimal integer."""
    return str(int(bits)) if fmt is None else f"0x{int(bits):0{-(-fmt.bits // 4)}X}"


def value_of(bits: Any, fmt: FloatFormat | None) -> str:
    """The number that bits stand for."""
    if fmt is None:
        return str(int(bits))
    value = float(decode(np.array([bits]), fmt)[0])
    fraction, exponent = np.frexp(value)
    if fraction == 0.5 and not 2.0**-10 < value < 2.0**10:
        return f"2^{exponent - 1}"
    return f"{value:.9g}"
