"""Compare the outputs of a block-scaled FP8 GEMM with the model, and find which rule of NUMERICS 9 a difference breaks.

On a CUDA device the model is the emulation kernel, which is compared in turn with the NumPy model, in small cases, and
with the host build, in the first rows of every case.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mxsim.blocks import HOPPER, Accumulator, PromotionOrder
from mxsim.formats import BF16, FP32, Rounding
from mxsim.validate import scaled_mm as hopper
from mxsim.validate.compare import Mismatch, hex_of, value_of
from mxsim.validate.gemm_cases import GemmCase, GemmLayout, Operands
from mxsim.validate.report import MAX_MISMATCHES_KEPT, CaseProblem, OpReport
from mxsim.validate.split_k import Gemm, probe_split_k, splits

_KEPT_OF_CASE = 2
_MAX_TRIED = 16  # rows and columns that an explanation must fit
_MAX_TRIED_SPLIT = 8
_MAX_PRODUCTS_OF_NUMPY, _MAX_PRODUCTS_OF_HOST = 2**18, 2**29
_NUMPY_SAMPLE = 16
_NAN_STEP, _ZERO_STEP, _UNKNOWN_STEP = "9.4 NaN", "9.3 sign of zero", "9, by no single rule"


def default_gemm(device: torch.device) -> Gemm:
    """torch's `scaled_mm` on a Hopper GPU, the host build on the CPU.

    Raises:
        ValueError: where there is none.
    """
    if device.type == "cpu":
        return hopper.emulation
    if not hopper.has_scaled_mm(device):
        raise ValueError(
            f"validate: scaled_mm needs torch's scaled_mm and a device of compute capability 9.0; device is {device}"
        )
    return hopper.scaled_mm


class GemmRunner:
    """Runs cases of one GEMM on one device; the splits of K are probed once for each shape if the GEMM is torch's."""

    def __init__(self, gemm: Gemm, device: torch.device, *, probes_split: bool | None = None) -> None:
        self._gemm, self._device = gemm, device
        self._probes_split = gemm is hopper.scaled_mm if probes_split is None else probes_split
        self._splits: dict[tuple[str, GemmLayout, torch.dtype], int] = {}
        self._emulation_checked: Counter[str] = Counter()  # outputs of the emulation kernel, by what they equal

    def run_case(self, case: GemmCase, report: OpReport) -> None:
        """Adds what came to the report; whatever the GEMM raises passes through."""
        start = time.perf_counter()
        split_k = self._split_of(case, report)
        operands = case.operands(self._device)
        sample = case.sample(self._device)
        arguments = operands.arguments
        copies = [hopper.bits_of(x).clone() for x in arguments] if case.m * case.k < 2**20 else []
        self._synchronize()
        called = time.perf_counter()
        try:
            out = self._gemm(*arguments, case.out_dtype, **case.keywords)
        except hopper.GemmRefused:
            if self._device.type == "cuda":  # the emulation is there all the same
                self._check_emulation(case, operands, self._model(case, operands, split_k), split_k, report)
            raise
        self._synchronize()
        returned = time.perf_counter()
        report.num_cases += 1
        report.seconds += returned - called
        problem = self._problem(out, arguments, copies, case)
        if problem:
            report.problems.append(CaseProblem(case.name, problem))
        else:
            if sample is not None:
                operands, out = operands.select(*sample), out[sample[0]][:, sample[1]]
            want = self._model(case, operands, split_k)
            report.num_elements += want.numel()
            if not torch.equal(hopper.bits_of(out), hopper.bits_of(want)):
                self._add(report, case, operands, sample, out, want, split_k)
            if self._device.type == "cuda":
                self._check_emulation(case, operands, want, split_k, report)
        report.reference_seconds += time.perf_counter() - returned + called - start

    def _model(self, case: GemmCase, operands: Operands, split_k: int) -> Tensor:
        return hopper.model(operands, case.out_dtype, accumulator=case.accumulator, split_k=split_k)

    def add_notes(self, report: OpReport) -> None:
        """What the report needs to be understood, once the cases are through."""
        if self._gemm is hopper.emulation:
            report.notes.append(
                "compared were mxsim's two models of it, kernels.fp8_gemm_emulated and mxsim.blocks.fp8_gemm (NumPy); "
                "torch's scaled_mm was not run: it needs a GPU of compute capability 9.0"
            )
        if self._gemm is hopper.scaled_mm:
            report.notes.insert(
                0, f"torch {torch.__version__}'s scaled_mm against kernels.fp8_gemm_emulated on the device"
            )
        for name, count in self._emulation_checked.items():
            report.notes.append(f"kernels.fp8_gemm_emulated on the device equals {name} in {count:,} outputs")

    def _split_of(self, case: GemmCase, report: OpReport) -> int:
        if not self._probes_split or case.layout is GemmLayout.TENSOR:
            return 1
        key = case.shape, case.layout, case.out_dtype
        if key not in self._splits:
            self._splits[key] = 1
            try:
                self._splits[key] = probe_split_k(
                    case.m,
                    case.n,
                    case.k,
                    layout=case.layout,
                    device=self._device,
                    out_dtype=case.out_dtype,
                    gemm=self._gemm,
                )
            except ValueError as error:
                report.problems.append(CaseProblem(case.name, str(error)))
            if self._splits[key] != 1:
                dtype = str(case.out_dtype).removeprefix("torch.")
                report.notes.append(f"{case.shape}, {case.layout.value}, {dtype}: K in {self._splits[key]} parts")
        return self._splits[key]

    def _problem(self, out: Tensor, arguments: tuple[Tensor, ...], copies: list[Tensor], case: GemmCase) -> str:
        """What is wrong with a result as such, or nothing."""
        if not isinstance(out, Tensor):
            return f"returned a {type(out).__name__}, needed a tensor"
        if out.dtype is not case.out_dtype or tuple(out.shape) != (case.m, case.n):
            return f"has dtype {out.dtype} and shape {tuple(out.shape)}, needed {case.out_dtype} and {(case.m, case.n)}"
        if out.device.type != self._device.type:
            return f"is on {out.device}, needed {self._device}"
        if any(not torch.equal(hopper.bits_of(x), copy) for x, copy in zip(arguments, copies, strict=False)):
            return "the candidate wrote to its inputs"
        return ""

    def _add(
        self,
        report: OpReport,
        case: GemmCase,
        operands: Operands,
        sample: tuple[Tensor, Tensor] | None,
        out: Tensor,
        want: Tensor,
        split_k: int,
    ) -> None:
        """Counts and describes the differences."""
        places = (hopper.bits_of(out) != hopper.bits_of(want)).nonzero()
        rows, columns = places.unbind(1)
        got, wanted = out[rows, columns], want[rows, columns]
        explanation = _explanation(operands, out, places, case, split_k)
        is_nan = got.isnan() | wanted.isnan()
        is_zero = (got == 0) & (wanted == 0)
        counts = {_NAN_STEP: int(is_nan.sum()), _ZERO_STEP: int(is_zero.sum())}
        counts[explanation] = len(places) - sum(counts.values())
        report.num_mismatches += len(places)
        for step, count in counts.items():
            if count:
                report.by_step[step] += count
                report.cases_by_step[step] += 1
        fmt, mask = (FP32, 0xFFFFFFFF) if case.out_dtype is torch.float32 else (BF16, 0xFFFF)
        kept = Counter(m.step for m in report.mismatches)
        for i in range(min(_KEPT_OF_CASE, len(places))):
            step = _NAN_STEP if is_nan[i] else _ZERO_STEP if is_zero[i] else explanation
            if kept[step] >= MAX_MISMATCHES_KEPT:
                continue
            place = int(rows[i]), int(columns[i])
            index = place if sample is None else (int(sample[0][place[0]]), int(sample[1][place[1]]))
            got_bits, want_bits = (int(hopper.bits_of(x[i : i + 1])[0]) & mask for x in (got, wanted))
            report.mismatches.append(
                Mismatch(
                    case=case.name,
                    result="out",
                    index=index,
                    input=f"row {index[0]} of a, row {index[1]} of b",
                    scale="",
                    got=hex_of(got_bits, fmt),
                    want=hex_of(want_bits, fmt),
                    got_value=value_of(got_bits, fmt),
                    want_value=value_of(want_bits, fmt),
                    step=step,
                )
            )

    def _check_emulation(
        self, case: GemmCase, operands: Operands, want: Tensor, split_k: int, report: OpReport
    ) -> None:
        """The kernel's outputs by the NumPy model, if the case is small, and the first of them by the host build."""
        products = case.m * case.n * case.k
        found = {}
        if products <= _MAX_PRODUCTS_OF_NUMPY:
            corner = operands.select(*(torch.arange(min(n, _NUMPY_SAMPLE), device=want.device) for n in want.shape))
            numpy = hopper.simulated(corner, case.out_dtype, accumulator=case.accumulator, split_k=split_k)
            found["mxsim.blocks.fp8_gemm"] = numpy, want[: numpy.shape[0], : numpy.shape[1]]
        _, n, k = operands.shape
        first = operands.first_rows(_MAX_PRODUCTS_OF_HOST // max(n * k, 1))
        host = hopper.emulated(first.cpu(), case.out_dtype, accumulator=case.accumulator, split_k=split_k)
        found["the host build"] = host, want[: len(host)].cpu()
        for name, (other, emulated) in found.items():
            count = int((hopper.bits_of(other) != hopper.bits_of(emulated)).sum())
            self._emulation_checked[name] += other.numel() - count
            if count:
                report.problems.append(
                    CaseProblem(
                        case.name, f"the CUDA emulation differs from {name} in {count} of {other.numel()} outputs"
                    )
                )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


# -------------------------------------------------------------------------------------------------------- explanations
def _explanation(operands: Operands, out: Tensor, places: Tensor, case: GemmCase, split_k: int) -> str:
    """The one change of the model with which it gives the differing rows and columns bit for bit."""
    rows, columns = (torch.unique(x)[:_MAX_TRIED] for x in places.unbind(1))
    got = hopper.bits_of(out[rows][:, columns])
    part = operands.select(rows, columns)
    for step, accumulator, split in _changes(part, case.accumulator, split_k):
        changed = hopper.model(part, case.out_dtype, accumulator=accumulator, split_k=split)
        if torch.equal(hopper.bits_of(changed), got):
            return step
    return _UNKNOWN_STEP


def _changes(operands: Operands, base: Accumulator, split_k: int) -> Iterator[tuple[str, Accumulator, int]]:
    """(step of NUMERICS and what is changed, accumulator, split_k)"""
    if operands.layout is not GemmLayout.TENSOR:
        is_rows = operands.layout is GemmLayout.ROWS
        other_order = PromotionOrder.SCALES_FIRST if is_rows else PromotionOrder.A_THEN_B
        yield "9.3 scales in the other order", replace(base, scale_order=other_order), split_k
    if base.promotion_interval is None:
        yield "9.3 promotion every 128", HOPPER, split_k
    for split in splits(operands.shape[2] // 128):
        if split != split_k and split <= _MAX_TRIED_SPLIT:
            yield f"9.5 split_k = {split}, not {split_k}", base, split
    for bits in (12, 14):
        yield f"9.1 {bits} fraction bits", replace(base, fraction_bits=bits), split_k
    nearest = replace(base, term_rounding=Rounding.TIES_TO_EVEN, sum_rounding=Rounding.TIES_TO_EVEN)
    yield "9.1 rounding to nearest", nearest, split_k
    yield "9.1 16 products a step", replace(base, products_per_step=16), split_k
    scales = (operands.a_scales, operands.b_scales)
    if base.promotion_interval is not None and all(torch.equal(x, x[:, :1].expand_as(x)) for x in scales):
        yield "9.3 no promotion", replace(base, promotion_interval=None), split_k
