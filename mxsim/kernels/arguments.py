"""What the ops accept, and the errors for everything else (NUMERICS section 10).

Messages read "<op>: <argument> has ..., needed ...", in the simulator's words where it refuses the same thing.
"""

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from mxsim.blocks import Accumulator, PromotionOrder, ScaleRule
from mxsim.formats import Rounding
from mxsim.kernels.layouts import FP4_BLOCK, FP8_BLOCK

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BF16 = (torch.bfloat16,)
FP4_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
E8M0_SCALES = (torch.uint8, torch.float8_e8m0fnu)
FP8_CODES = (torch.uint8, torch.float8_e4m3fn)
GEMM_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
FP32_SCALES = (torch.float32,)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SCALE_RULES = (ScaleRule.FLOOR, ScaleRule.RCEIL, ScaleRule.CEIL, ScaleRule.EVEN)  # by number: enum ScaleRule of scale.h
_RULE_NUMBERS = {rule: number for number, rule in enumerate(SCALE_RULES)}
# Of the terms and of their sum, by the number that the backends know them by (gemm_rule of gemm.h).
GEMM_ROUNDINGS = (
    (Rounding.TOWARD_ZERO, Rounding.TOWARD_ZERO),
    (Rounding.TIES_TO_EVEN, Rounding.TIES_TO_EVEN),
    (None, Rounding.TOWARD_ZERO),
    (None, Rounding.TIES_TO_EVEN),
    (Rounding.TOWARD_ZERO, Rounding.TIES_TO_EVEN),
    (Rounding.TIES_TO_EVEN, Rounding.TOWARD_ZERO),
)
PROMOTION_ORDERS = (PromotionOrder.A_THEN_B, PromotionOrder.SCALES_FIRST, PromotionOrder.EXACT)
_MAX_EXACT_SPAN = 2**17
_MAX_CUDA_STEP = 32


# ------------------------------------------------------------------------------------------------- before dispatching
def check_tensor(op: str, name: str, x: Any) -> None:
    """Raises TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}, needed a torch tensor")


def rule_number(op: str, scale_rule: ScaleRule | None) -> int:
    """The rule as the backends know it; None is MXFP4's default, FLOOR."""
    if scale_rule is None:
        return 0
    if not isinstance(scale_rule, ScaleRule):
        raise TypeError(f"{op}: scale_rule is {scale_rule!r}, needed a ScaleRule or None")
    return _RULE_NUMBERS[scale_rule]


def stochastic_seeds(op: str, rounding: Rounding, seed: int | None) -> tuple[int, ...]:
    """What an operator takes for stochastic rounding, the seed's 64 bits in two's complement; nothing for TIES_TO_EVEN.

    Raises:
        TypeError: if rounding is no Rounding, or the seed no integer.
        ValueError: for another rounding than these two, a seed that STOCHASTIC lacks or TIES_TO_EVEN has no use for, or
            one outside 0 to 2**64 - 1.
    """
    if rounding is Rounding.TIES_TO_EVEN:
        if seed is not None:
            raise ValueError(f"{op}: seed is {seed!r}, but rounding is TIES_TO_EVEN, needed None")
        return ()
    if not isinstance(rounding, Rounding):
        raise TypeError(f"{op}: rounding is {rounding!r}, needed a Rounding")
    if rounding is not Rounding.STOCHASTIC:
        raise ValueError(f"{op}: rounding is {rounding.name}, needed TIES_TO_EVEN or STOCHASTIC")
    if seed is None:
        raise ValueError(f"{op}: seed is None, but rounding is STOCHASTIC, needed an integer 0 to 2**64 - 1")
    if type(seed) is bool or not isinstance(seed, (int, np.integer, torch.SymInt)):
        raise TypeError(f"{op}: seed is {seed!r}, needed an integer 0 to 2**64 - 1")
    if isinstance(seed, np.integer):
        seed = int(seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"{op}: seed is {seed}, needed an integer 0 to 2**64 - 1")
    return (seed if seed < 2**63 else seed - 2**64,)


def accumulator_numbers(op: str, accumulator: Accumulator) -> tuple[int, int, int, int, int]:
    """(fraction bits or -1, products a step, rounding, promotion interval or 0, scale order or -1)."""
    if not isinstance(accumulator, Accumulator):
        raise TypeError(f"{op}: accumulator is {accumulator!r}, needed an Accumulator")
    a = accumulator
    return (
        -1 if a.fraction_bits is None else a.fraction_bits,
        a.products_per_step,
        GEMM_ROUNDINGS.index((a.term_rounding, a.sum_rounding)),
        a.promotion_interval or 0,
        -1 if a.scale_order is None else PROMOTION_ORDERS.index(a.scale_order),
    )


def split_group_sizes(op: str, group_sizes: Any) -> tuple[Tensor | None, list[int] | None]:
    """(sizes as a tensor, sizes as a list), the other one None."""
    if isinstance(group_sizes, Tensor):
        return group_sizes, None
    if isinstance(group_sizes, np.ndarray):
        if group_sizes.ndim != 1 or (group_sizes.size and group_sizes.dtype.kind not in "iu"):
            _refuse_group_sizes(op, group_sizes.dtype, group_sizes.shape)
        return None, group_sizes.tolist()
    if not isinstance(group_sizes, Sequence) or isinstance(group_sizes, (str, bytes)):
        raise TypeError(f"{op}: group_sizes is a {type(group_sizes).__name__}, needed a list of integers or a tensor")
    if any(type(n) is bool for n in group_sizes):
        raise TypeError(f"{op}: group_sizes is a list of bool, needed a list of integers")
    try:
        return None, [n if isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in group_sizes]
    except TypeError:
        kinds = sorted({type(n).__name__ for n in group_sizes})
        raise TypeError(f"{op}: group_sizes is a list of {', '.join(kinds)}, needed a list of integers") from None


# ------------------------------------------------------------------------------------------------- inside the op
def rows_of(op: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], per_byte: int, block: int) -> Tensor:
    """x as a contiguous matrix [rows, columns], its leading axes flattened; copied only where it must be.

    per_byte: elements in each entry of the last axis; their number must be a multiple of block.
    """
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, needed {_either(dtypes)}")
    shape = x.shape
    if len(shape) == 0:
        raise ValueError(f"{op}: {name} has no axes, needed at least 1")
    if shape[-1] * per_byte % block:
        raise ValueError(
            f"{op}: the last axis of {name} has {shape[-1] * per_byte} elements, which is not a multiple of {block}"
        )
    if len(shape) == 2 and x.is_contiguous():
        return x
    if x.itemsize == 1:
        x = x.view(torch.uint8)  # torch copies no float4
    return x.reshape(prod(shape[:-1]), shape[-1]).contiguous()


def matrices_of(op: str, name: str, w: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """(w as contiguous matrices [batch, rows, columns], the shape of the batch)."""
    if w.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {w.dtype}, needed {_either(dtypes)}")
    shape = w.shape
    if len(shape) < 2:
        raise ValueError(f"{op}: {name} has {len(shape)} axes, needed at least 2")
    batch = tuple(shape[:-2])
    return w.reshape(prod(batch), *shape[-2:]).contiguous(), batch


def fp4_scales_of(op: str, scales: Tensor, codes: Tensor) -> Tensor:
    """E8M0 scales of packed FP4 codes as a contiguous matrix [rows, K/32]."""
    scales = _scales_of(op, scales, E8M0_SCALES, codes, FP4_BLOCK // 2, "MXFP4")
    return scales if scales.is_contiguous() else scales.view(torch.uint8).contiguous()


def fp8_scales_of(op: str, scales: Tensor, codes: Tensor) -> Tensor:
    """float32 scales of FP8 codes as a matrix [rows, K/128] of any strides."""
    return _scales_of(op, scales, FP32_SCALES, codes, FP8_BLOCK, "FP8_1X128")


def _scales_of(
    op: str,
    scales: Tensor,
    dtypes: tuple[torch.dtype, ...],
    codes: Tensor,
    bytes_per_scale: int,
    fmt: str,
    prefix: str = "",
) -> Tensor:
    if scales.dtype not in dtypes:
        raise TypeError(f"{op}: {prefix}scales has dtype {scales.dtype}, needed {_either(dtypes)}")
    if scales.device != codes.device:
        raise ValueError(f"{op}: {prefix}scales is on {scales.device}, needed {codes.device}, where {prefix}codes is")
    shape = codes.shape
    needed = (*shape[:-1], shape[-1] // bytes_per_scale)
    if scales.shape != needed:
        raise ValueError(
            f"{op}: {prefix}scales has shape {tuple(scales.shape)}, needed {tuple(needed)} for {fmt} codes of shape "
            f"{tuple(shape)}"
        )
    return scales if len(needed) == 2 else scales.reshape(prod(needed[:-1]), needed[-1])


class GemmOperands(NamedTuple):
    """a [M, K] and b [N, K]: codes as contiguous matrices, scales as matrices of any strides."""

    a: Tensor
    a_scales: Tensor
    b: Tensor
    b_scales: Tensor
    a_is_e5m2: bool
    b_is_e5m2: bool
    is_tiled: bool

    @property
    def rows_per_scale(self) -> int:
        """Rows of b that share a scale."""
        return FP8_BLOCK if self.is_tiled else 1


def gemm_operands(op: str, a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor) -> GemmOperands:
    """Checked; the shape of b_scales says whether they are those of tiles, the dtype of codes what they stand for."""
    a = rows_of(op, "a_codes", a_codes, GEMM_CODES, 1, FP8_BLOCK)
    b = rows_of(op, "b_codes", b_codes, GEMM_CODES, 1, FP8_BLOCK)
    if len(b_codes.shape) != 2:
        raise ValueError(f"{op}: b_codes has {len(b_codes.shape)} axes, needed 2")
    if b.device != a.device:
        raise ValueError(f"{op}: b_codes is on {b.device}, needed {a.device}, where a_codes is")
    if b.shape[1] != a.shape[1]:
        raise ValueError(f"{op}: b_codes has rows of {b.shape[1]} elements, needed {a.shape[1]}, as in a_codes")
    a_scales = _scales_of(op, a_scales, FP32_SCALES, a_codes, FP8_BLOCK, "FP8_1X128", "a_")
    n, num_blocks = b.shape[0], b.shape[1] // FP8_BLOCK
    tiles = (-(-n // FP8_BLOCK), num_blocks)
    is_tiled = len(b_scales.shape) == 2 and b_scales.shape[0] != n and b_scales.shape == tiles
    if not is_tiled:
        if b_scales.dtype in FP32_SCALES and b_scales.shape != (n, num_blocks):
            raise ValueError(
                f"{op}: b_scales has shape {tuple(b_scales.shape)}, needed {(n, num_blocks)} or {tiles} for codes of "
                f"shape {tuple(b.shape)}"
            )
        b_scales = _scales_of(op, b_scales, FP32_SCALES, b_codes, FP8_BLOCK, "FP8_1X128", "b_")
    elif b_scales.dtype not in FP32_SCALES:
        raise TypeError(f"{op}: b_scales has dtype {b_scales.dtype}, needed {_either(FP32_SCALES)}")
    elif b_scales.device != b.device:
        raise ValueError(f"{op}: b_scales is on {b_scales.device}, needed {b.device}, where b_codes is")
    a_is_e5m2, b_is_e5m2 = (x.dtype is torch.float8_e5m2 for x in (a_codes, b_codes))
    return GemmOperands(a, a_scales, b, b_scales, a_is_e5m2, b_is_e5m2, is_tiled)


def check_split_k(op: str, split_k: int, num_blocks: int) -> None:
    """Raises ValueError outside 1 to the number of blocks of K."""
    if not 1 <= split_k <= max(num_blocks, 1):
        raise ValueError(f"{op}: split_k is {split_k}, needed 1 to {max(num_blocks, 1)}, the blocks of K")


def check_exact_span(op: str, depth: int, fraction_bits: int, rounding: int, interval: int) -> None:
    """Raises ValueError where terms are added exactly over more elements than a float64 holds the sum of."""
    span = min(interval or depth, depth)
    if span > _MAX_EXACT_SPAN and (fraction_bits < 0 or GEMM_ROUNDINGS[rounding][0] is None):
        raise ValueError(
            f"{op}: a span has {span} elements, needed at most {_MAX_EXACT_SPAN} for an accumulator whose terms are "
            "added exactly"
        )


def check_equal_scales(op: str, name: str, scales: Tensor, interval: int, split_k: int) -> None:
    """Raises ValueError if scales [rows, blocks] differ within a span of interval elements (0: a whole part)."""
    num_blocks = scales.shape[1]
    part = max(-(-num_blocks // split_k), 1)
    step = interval // FP8_BLOCK if interval else part
    if step <= 1:
        return
    for start in range(0, num_blocks, part):
        for first in range(start, min(start + part, num_blocks), step):
            blocks = scales[:, first : min(first + step, start + part, num_blocks)]
            if not bool(((blocks == blocks[:, :1]) | (blocks.isnan() & blocks[:, :1].isnan())).all()):
                raise ValueError(
                    f"{op}: {name} differ within a span of {blocks.shape[1] * FP8_BLOCK} elements, needed equal ones "
                    f"for a promotion_interval of {interval or None}"
                )


def check_cuda_accumulator(
    op: str, fraction_bits: int, products_per_step: int, rounding: int, scale_order: int
) -> None:
    """Raises NotImplementedError for what only the host computes."""
    if fraction_bits < 0 or rounding > 1 or scale_order == 2 or products_per_step > _MAX_CUDA_STEP:
        raise NotImplementedError(
            f"{op}: accumulator adds exactly, rounds terms and sum differently or takes more than {_MAX_CUDA_STEP} "
            "products a step, which CUDA tensors have no kernel for: use CPU tensors"
        )


def check_headroom(op: str, headroom: Any) -> None:
    """Raises ValueError outside 0..6."""
    if type(headroom) is bool or not isinstance(headroom, (int, np.integer, torch.SymInt)) or not 0 <= headroom <= 6:
        raise ValueError(f"{op}: headroom is {headroom!r}, needed an integer 0 to 6")


def check_row_multiple(op: str, row_multiple: Any) -> None:
    """Raises ValueError unless it is a positive integer."""
    if type(row_multiple) is bool or not isinstance(row_multiple, (int, np.integer, torch.SymInt)) or row_multiple < 1:
        raise ValueError(f"{op}: row_multiple is {row_multiple!r}, needed an integer of 1 or more")


def check_group_sizes(op: str, sizes: Sequence[int], num_rows: int, rows_name: str) -> None:
    """Raises ValueError for a negative size, or if they do not sum to the rows."""
    for n in sizes:
        if n < 0:
            raise ValueError(f"{op}: group_sizes holds {min(sizes)}, needed sizes of 0 or more")
    if sum(sizes) != num_rows:
        raise ValueError(f"{op}: group_sizes sum to {sum(sizes)}, needed {num_rows}, the rows of {rows_name}")


def check_group_sizes_tensor(op: str, group_sizes: Tensor, codes: Tensor) -> None:
    """Raises unless it is a one-dimensional integer tensor on the CPU or on the device of codes."""
    if group_sizes.dtype not in _INTEGERS or group_sizes.dim() != 1:
        _refuse_group_sizes(op, group_sizes.dtype, tuple(group_sizes.shape))
    if not group_sizes.is_cpu and group_sizes.device != codes.device:
        needed = "cpu" if codes.is_cpu else f"{codes.device} or cpu"
        raise ValueError(f"{op}: group_sizes is on {group_sizes.device}, needed {needed}")


def raise_not_a_power_of_two(op: str, scales: Tensor, flat_index: int) -> NoReturn:
    """The ValueError for the scale at a row-major index."""
    index = tuple(int(i) for i in np.unravel_index(flat_index, scales.shape))
    raise ValueError(
        f"{op}: scale {np.float32(scales[index].item())} at index {index} is neither a positive power of two nor NaN"
    )


def first_not_a_power_of_two(scales: Tensor) -> int | None:
    """Row-major index of the first scale that is neither a positive power of two nor NaN. Reads the device back."""
    bits = scales.contiguous().view(torch.int32).reshape(-1)
    fraction = bits & 0x007FFFFF
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    normal = (bits >= 0x00800000) & (bits < 0x7F800000) & (fraction == 0)
    subnormal = (bits > 0) & (bits < 0x00800000) & (fraction & (fraction - 1) == 0)
    refused = torch.nonzero(~(is_nan | normal | subnormal))
    return int(refused[0]) if refused.numel() else None


def check_reading_back(op: str, x: Tensor) -> None:
    """Raises RuntimeError where the device cannot be read back: in the middle of a graph capture."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: check is True, which reads the device back, needed False under CUDA graph capture")


def _refuse_group_sizes(op: str, dtype: Any, shape: Any) -> NoReturn:
    raise TypeError(f"{op}: group_sizes is {dtype} of shape {shape}, needed a list of integers")


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(d).removeprefix("torch.") for d in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
