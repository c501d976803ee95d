"""The figures that the kernels are meant to reach, and whether one does."""

from dataclasses import dataclass
from enum import Enum

from mxsim.bench.cases import Case, Shape


class Verdict(Enum):
    """How a figure stands to its target."""

    AIM = "aim reached"
    REACHED = "reached"
    MISSED = "MISSED"


@dataclass(frozen=True)
class Target:
    """A bound that must hold and an aim beyond it; smaller is better where the aim is below the bound."""

    bound: float
    aim: float

    def verdict(self, value: float) -> Verdict:
        """Where the value stands."""
        sign = 1 if self.aim >= self.bound else -1
        if sign * value >= sign * self.aim:
            return Verdict.AIM
        return Verdict.REACHED if sign * value >= sign * self.bound else Verdict.MISSED


# On an H200 at 32768 x 7168, dense and split among 32 experts: fraction of a copy.
_FROM_BF16 = Target(0.90, 0.97)
_ROWS = Target(0.88, 0.95)
_COLUMNS = Target(0.80, 0.92)
_OF_COPY = {
    "bf16_to_fp4_row": _FROM_BF16,
    "bf16_to_fp8_row": _FROM_BF16,
    "fp4_row_to_fp8_row": _ROWS,
    "fp8_row_to_fp4_row": _ROWS,
    "bf16_to_fp4_and_fp8_row": _ROWS,
    "fp4_row_to_fp8_col": _COLUMNS,
    "bf16_to_fp8_col": _COLUMNS,
    "fp8_row_to_fp8_col": _COLUMNS,
}
_RAGGED_OF_COPY = {"fp4_row_to_fp8_col": _COLUMNS}
_SHAPE = Shape(32768, 7168)
_NUM_EXPERTS = 32
# How much faster than what stands beside it, at the same shape.
_UNFUSED_RATIO = Target(2.5, 3.5)
_TORCHAO_RATIO = Target(4.5, 5.0)
_RATIOS = {
    "fp4_row_to_fp8_row": ("fp4_to_bf16", _UNFUSED_RATIO),
    "fp4_row_to_fp8_col": ("fp4_to_bf16", _UNFUSED_RATIO),
    "bf16_to_fp4_row": ("torchao", _TORCHAO_RATIO),
}
OVERHEAD_US = Target(15.0, 8.0)
_CPU_ELEMENTS_PER_S = {"bf16_to_fp4_row": Target(500e6, 1500e6)}
_CPU_THREADS, _CPU_MIN_ELEMENTS = 2, 2**24


def of_copy_target(case: Case) -> Target | None:
    """Of the fraction of a copy's bandwidth on a CUDA device."""
    if (case.shape.rows, case.shape.columns) != (_SHAPE.rows, _SHAPE.columns):
        return None
    if case.shape.num_experts:
        return _RAGGED_OF_COPY.get(case.name) if case.shape.num_experts == _NUM_EXPERTS else None
    return _OF_COPY.get(case.name)


def elements_target(case: Case, num_threads: int) -> Target | None:
    """Of the elements a second of the host build, stated for two threads."""
    is_large = case.shape.num_elements >= _CPU_MIN_ELEMENTS
    return _CPU_ELEMENTS_PER_S.get(case.name) if is_large and num_threads == _CPU_THREADS else None


def ratio_target(op: str, rival: str, shape: Shape) -> Target | None:
    """Of the rival's time over the op's on a CUDA device."""
    prefix, target = _RATIOS.get(op, ("", None))
    return target if shape == _SHAPE and rival.startswith(prefix) else None
