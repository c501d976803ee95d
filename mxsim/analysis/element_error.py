"""The error of every element of a piece, and what the quantizer did to it."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64

from mxsim.analysis.error import has_subnormals, saturation_limit
from mxsim.blocks import BlockTensor
from mxsim.blocks.layout import block_of

Matrices = Float64[np.ndarray, "stack rows columns"]


class ElementErrors(NamedTuple):
    """Of x against q = dequantized; arrays of the piece's shape, 0 or False where nothing is `compared`.

    compared: x is finite and q is no NaN: a block with a NaN or an infinity is left out as a whole.
    error: q - x, rounded to float64.
    relative: |error| / |x|; 0 where x = 0.
    ulps: |error| / ulp(x). ulp(x) is the spacing of the element format, under the block's scale, in the binade of x:
        scale * 2**(e - mantissa_bits), where e = floor(log2(|x| / scale)), at least emin and at most emax. So rounding
        to nearest stays within 0.5, and saturation can exceed it. 0 where the scale is 0.
    saturated, underflowed, subnormal: as in `ErrorSums`; subnormal is None for a fixed-point format.
    """

    compared: Bool[np.ndarray, "stack rows columns"]
    x: Matrices
    q: Matrices
    error: Matrices
    relative: Matrices
    ulps: Matrices
    saturated: Bool[np.ndarray, "stack rows columns"]
    underflowed: Bool[np.ndarray, "stack rows columns"]
    subnormal: Bool[np.ndarray, "stack rows columns"] | None


def element_errors(x: Matrices, t: BlockTensor) -> ElementErrors:
    """The errors of a piece x and its quantized form t, of the same shape, blocks along axis -1 or -2."""
    element = t.format.element
    q = t.dequantize(np.float64)
    compared = np.isfinite(x) & ~np.isnan(q)
    x, q = np.where(compared, x, 0.0), np.where(compared, q, 0.0)
    magnitude = np.abs(x)
    is_zero = x == 0
    error = q - x
    distance = np.abs(error)

    scales = t.scale_values()
    limit = per_element(saturation_limit(scales, t), t)
    scale = per_element(scales if t.tensor_scale is None else scales * float(t.tensor_scale), t)
    has_ulp = compared & (scale != 0)
    scale = np.where(has_ulp, scale, 1.0)
    exponent = np.frexp(magnitude / scale)[1] - 1
    exponent = np.where(is_zero, element.emin, np.clip(exponent, element.emin, element.emax))
    ulp = np.ldexp(scale, exponent - element.mantissa_bits)

    subnormal = None
    if has_subnormals(element):
        code = t.codes & np.uint8(element.magnitude_mask)
        subnormal = compared & (code > 0) & (code < 1 << element.mantissa_bits)
    with np.errstate(invalid="ignore"):  # a NaN limit compares as False
        saturated = compared & (magnitude > limit)
    return ElementErrors(
        compared=compared,
        x=x,
        q=q,
        error=error,
        relative=distance / np.where(is_zero, 1.0, magnitude) * ~is_zero,
        ulps=distance / ulp * has_ulp,
        saturated=saturated,
        underflowed=(q == 0) & ~is_zero,
        subnormal=subnormal,
    )


def per_element(of_blocks: Float64[np.ndarray, "stack blocks blocks"], t: BlockTensor) -> Matrices:
    """A value a block -> one an element."""
    block_rows, block_columns = block_of(t.format, t.axis)
    _, rows, columns = t.shape
    return of_blocks.repeat(block_rows, axis=1)[:, :rows].repeat(block_columns, axis=2)[:, :, :columns]
