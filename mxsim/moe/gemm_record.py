"""What the FP8 GEMMs of a layer read and returned, to be compared with the emulation elsewhere, bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

from mxsim import kernels
from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Tiles, RaggedFp8Rows
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import ROW_MULTIPLE, cols_of_expert, rows_of_expert


@dataclass(frozen=True)
class GemmRecord:
    """One GEMM of one expert: out = a @ b.T. kind: "rows" (Fprop, Dgrad; b by tiles) or "wgrad" (b by rows)."""

    kind: Literal["rows", "wgrad"]
    expert: int
    a_codes: Float8e4m3fn[Tensor, "M K"]
    a_scales: Float[Tensor, "M K/128"]
    b_codes: Float8e4m3fn[Tensor, "N K"]
    b_scales: Float[Tensor, "_ K/128"]
    out: Float[Tensor, "M N"]

    def to(self, device: torch.device | str) -> "GemmRecord":
        """The same on another device."""
        values = (getattr(self, f.name) for f in fields(self))
        return GemmRecord(*(x.to(device) if isinstance(x, Tensor) else x for x in values))

    def emulated(self) -> Tensor:
        """What an H200 returns for the operands, computed where they are."""
        operands = (self.a_codes, self.a_scales, self.b_codes, self.b_scales)
        return kernels.fp8_gemm_emulated(*operands, out_dtype=self.out.dtype)


# Not a context variable: backward passes run on autograd's own threads.
_records: list[GemmRecord] | None = None


@contextmanager
def record_gemms() -> Iterator[list[GemmRecord]]:
    """Every FP8 GEMM of one expert in the block, in order, of all threads; operands and outputs are copies.

    Raises:
        RuntimeError: inside another record_gemms.
    """
    global _records
    if _records is not None:
        raise RuntimeError("record_gemms: is recording already")
    records: list[GemmRecord] = []
    _records = records
    try:
        yield records
    finally:
        _records = None


def record_rows(a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out: Tensor) -> None:
    """Record a grouped GEMM of rows, if anybody records."""
    if _records is None:
        return
    for span in groups.spans(ROW_MULTIPLE):
        a_e = rows_of_expert(a, span).rows(span.size)
        result = out[span.start : span.start + span.size]
        operands = (*a_e, b.codes[span.expert], b.scales[span.expert], result)
        _records.append(GemmRecord("rows", span.expert, *(x.clone() for x in operands)))


def record_wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out: Tensor) -> None:
    """Record a grouped Wgrad, if anybody records."""
    if _records is None:
        return
    for span in groups.spans(FP8_BLOCK):
        operands = (*cols_of_expert(a, span), *cols_of_expert(b, span), out[span.expert])
        _records.append(GemmRecord("wgrad", span.expert, *(x.clone() for x in operands)))
