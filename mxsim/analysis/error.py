"""How far a quantized tensor is from its source, in sums that can be taken piece by piece."""

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float64

from mxsim.analysis.exact_sum import ExactSum
from mxsim.blocks import BlockTensor
from mxsim.blocks.layout import as_matrices, block_of, per_block, split_blocks
from mxsim.formats import CodeForm, FloatFormat

# NVFP4's scales are rounded to FP32 more than once: an element this close to the limit is not called saturated.
_FP32_SLACK = 1 + 2.0**-20
STRIP = 512


@dataclass
class ErrorSums:
    """Error of q = dequantized against the source x, over all pieces added so far.

    - `sqnr_db` = 10 log10(sum x**2 / sum (q - x)**2): infinite without error, NaN where both sums are 0.
    - relative error = |q - x| / |x|, over x != 0; NaN without such an element.
    - saturated: |x| > element.max_finite * scale. underflowed: q = 0 but x != 0. subnormal: the code is a subnormal
      number of the element format; NaN for INT8, a fixed-point format. Each is a share of the elements compared.

    A block whose scale is NaN (a NaN or an infinity in the source) is counted in `num_poisoned_blocks`, and its
    elements are left out of everything else. Sums are float64 within a strip of STRIP elements of a row, and exact
    beyond, so pieces that begin at multiples of STRIP along the last axis give the same bits however they are cut.
    """

    num_elements: int = 0  # compared
    num_poisoned_blocks: int = 0
    num_poisoned_elements: int = 0
    num_nonzero: int = 0
    num_saturated: int = 0
    num_underflowed: int = 0
    num_subnormal: int | None = 0  # None: the element format has no subnormals to speak of
    max_relative: float = 0.0
    signal: ExactSum = field(default_factory=ExactSum)
    noise: ExactSum = field(default_factory=ExactSum)
    relative: ExactSum = field(default_factory=ExactSum)

    def add(self, x: Float[np.ndarray, "*shape"], t: BlockTensor) -> None:
        """Add the piece x and its quantized form t, of the same shape."""
        x = np.ascontiguousarray(x, np.float64)
        q = t.dequantize(np.float64)
        scales = t.scale_values()
        poisoned_blocks = np.isnan(scales)
        num_poisoned = 0
        if poisoned_blocks.any():
            poisoned = np.isnan(q)
            num_poisoned = int(np.count_nonzero(poisoned))
            x, q = np.where(poisoned, 0, x), np.where(poisoned, 0, q)
        magnitude = np.abs(x)
        num_zero = x.size - int(np.count_nonzero(x))

        self.num_elements += x.size - num_poisoned
        self.num_poisoned_blocks += int(np.count_nonzero(poisoned_blocks))
        self.num_poisoned_elements += num_poisoned
        self.num_nonzero += x.size - num_zero
        self.num_saturated += _num_saturated(magnitude, scales, t)
        self.num_underflowed += q.size - int(np.count_nonzero(q)) - num_zero  # x = 0 always gives q = 0
        subnormal = _num_subnormal(t)
        self.num_subnormal = None if subnormal is None or self.num_subnormal is None else self.num_subnormal + subnormal

        error = np.abs(np.subtract(q, x, out=q), out=q)
        if num_zero:
            np.copyto(magnitude, 1, where=magnitude == 0)  # where the error is 0 as well
        with np.errstate(over="ignore", under="ignore"):
            relative = np.divide(error, magnitude, out=magnitude)
            self.max_relative = max(self.max_relative, float(relative.max(initial=0)))
            for total, terms in (
                (self.relative, relative),
                (self.noise, np.square(error, out=error)),
                (self.signal, np.square(x)),
            ):
                for strips in _strip_sums(terms):
                    total.add(strips)

    def merge(self, other: "ErrorSums") -> None:
        """Add the sums of other pieces."""
        for name in ("elements", "poisoned_blocks", "poisoned_elements", "nonzero", "saturated", "underflowed"):
            setattr(self, f"num_{name}", getattr(self, f"num_{name}") + getattr(other, f"num_{name}"))
        if self.num_subnormal is not None:
            self.num_subnormal = None if other.num_subnormal is None else self.num_subnormal + other.num_subnormal
        self.max_relative = max(self.max_relative, other.max_relative)
        for name in ("signal", "noise", "relative"):
            getattr(self, name).merge(getattr(other, name))

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in decibels."""
        signal, noise = float(self.signal), float(self.noise)
        if math.isnan(signal) or math.isnan(noise) or signal == 0:
            return math.nan
        return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf

    @property
    def max_relative_error(self) -> float:
        """Largest relative error."""
        return self.max_relative if self.num_nonzero else math.nan

    @property
    def mean_relative_error(self) -> float:
        """Mean relative error."""
        return float(self.relative) / self.num_nonzero if self.num_nonzero else math.nan

    @property
    def saturated(self) -> float:
        """Share of elements that the largest finite value cut off."""
        return self._share(self.num_saturated)

    @property
    def underflowed(self) -> float:
        """Share of elements that became zero."""
        return self._share(self.num_underflowed)

    @property
    def subnormal(self) -> float:
        """Share of elements stored as subnormal numbers."""
        return self._share(self.num_subnormal)

    def _share(self, count: int | None) -> float:
        return count / self.num_elements if count is not None and self.num_elements else math.nan


def _strip_sums(terms: Float[np.ndarray, "*batch n"]) -> list[Float64[np.ndarray, "*strips"]]:
    """Sums over STRIP consecutive elements of the last axis, and over what is left at its end."""
    *batch, n = terms.shape
    whole = n - n % STRIP
    strips = terms[..., :whole].reshape(*batch, whole // STRIP, STRIP).sum(axis=-1)
    return [strips, terms[..., whole:].sum(axis=-1)] if whole < n else [strips]


def _num_saturated(magnitude: Float[np.ndarray, "*shape"], scales: Float[np.ndarray, "*blocks"], t: BlockTensor) -> int:
    block = block_of(t.format, t.axis)
    blocks, limits = (as_matrices(a, t.format, t.axis) for a in (magnitude, saturation_limit(scales, t)))
    return int(np.count_nonzero(split_blocks(blocks, block) > per_block(limits)))


def saturation_limit(scales: Float[np.ndarray, "*blocks"], t: BlockTensor) -> Float[np.ndarray, "*blocks"]:
    """The magnitude above which an element of a block with that scale (without tensor_scale) saturates."""
    limit = scales * t.format.element.max_finite
    if t.tensor_scale is not None:
        limit = limit * (float(t.tensor_scale) * _FP32_SLACK)
    return np.where(limit == 0, np.inf, limit)  # a scale that rounded to 0: underflow, not saturation


def _num_subnormal(t: BlockTensor) -> int | None:
    element = t.format.element
    if not has_subnormals(element):
        return None
    smallest_normal = np.uint8(1 << element.mantissa_bits)
    magnitude = t.codes & np.uint8(element.magnitude_mask)
    return int(np.count_nonzero((magnitude > 0) & (magnitude < smallest_normal)))


def has_subnormals(element: FloatFormat) -> bool:
    """Whether a share of subnormal elements says anything: not where the format is fixed point."""
    return element.has_subnormals and element.code_form is CodeForm.SIGN_MAGNITUDE
