"""A model of the published scaling-aware FP8 transpose, which does not round: for comparison only, never for use."""

import math

import numpy as np

from mxsim.blocks import FP8_1X128, BlockTensor
from mxsim.formats import E4M3, FP32

_BLOCK = FP8_1X128.block_size


def published_fp8_transpose(t: BlockTensor) -> BlockTensor:
    """FP8 rows [m, K] -> FP8 columns [K, ceil128(m)] as arXiv 2511.02302 has it, in the form of `fp8_row_to_fp8_col`.

    The scale of a 128 x 128 tile is the largest of its 128 row blocks', those of all-zero rows included. With d = the
    tile's biased scale exponent less the row's, a code (sign, field, mantissa) becomes (sign, max(field - d, 0),
    mantissa), and +0 where field = 0. Nothing is rounded, so:

    - field > d: exact, as in `fp8_row_to_fp8_col`.
    - 0 < field <= d: the mantissa stays where it was and the implicit bit is gone. 1.875 * 2**-6 with d = 5 becomes
      0.875 * 2**-6, fifteen times the exact 1.875 * 2**-11; 2**-6 becomes 0 even with d = 1.
    - a subnormal, or -0, becomes +0, d = 0 included.
    - NaN (field 15, mantissa 7) with 0 < d becomes the finite 1.875 * 2**(8 - d).

    The last tile down the rows may have fewer than 128 real ones; the padding is code 0x00. Scales that FP32 holds as
    subnormals have biased exponent 0, whatever their value: d is wrong there, as in the published code.

    Args:
        t: FP8_1X128 along the last axis; leading axes are flattened into rows. Scales are powers of two.

    Returns:
        FP8_1X128 of shape [K, ceil128(m)] with source_rows = m.

    Raises:
        TypeError: if t is not a BlockTensor.
        ValueError: if t is not FP8_1X128 along its last axis, or a scale is no power of two; a NaN scale is none, and
            what the published kernel makes of one depends on how its hardware takes a maximum.

    Source: arXiv 2511.02302 and its public code, from their description; not checked against a run of that code.

    >>> rows = BlockTensor(np.array([[0x0F], [0x38]], np.uint8), np.array([[1], [32]], np.float32), FP8_1X128)
    >>> [hex(code) for code in published_fp8_transpose(rows).codes[0, :2]]
    ['0x7', '0x38']
    """
    caller = "published_fp8_transpose"
    if not isinstance(t, BlockTensor):
        raise TypeError(f"{caller}: t is a {type(t).__name__}, needed a BlockTensor")
    if t.format != FP8_1X128 or t.axis != -1:
        raise ValueError(f"{caller}: t is {t.format} along axis {t.axis}, needed {FP8_1X128} along axis -1")
    num_rows, num_columns = math.prod(t.shape[:-1]), t.shape[-1]
    scales = t.scales.reshape(num_rows, t.scales.shape[-1])  # (rows, tiles)
    is_power = (np.frexp(scales)[0] == 0.5) & np.isfinite(scales)
    if not is_power.all():
        row, block = np.argwhere(~is_power)[0]
        raise ValueError(f"{caller}: scale {scales[row, block]} of row {row}, block {block}, needed a power of two")

    padded_rows = -(-num_rows // _BLOCK) * _BLOCK
    fields = np.zeros((padded_rows, scales.shape[1]), np.int16)
    fields[:num_rows] = scales.view(np.uint32) >> FP32.mantissa_bits
    tiles = fields.reshape(-1, _BLOCK, scales.shape[1])  # (tile rows, 128, tiles)
    d = (tiles.max(axis=1, keepdims=True) - tiles).reshape(fields.shape)[:num_rows]
    values = np.zeros((padded_rows, scales.shape[1]), np.float32)
    values[:num_rows] = scales
    tile_scales = values.reshape(tiles.shape).max(axis=1)

    columns = np.zeros((num_columns, padded_rows), np.uint8)
    codes = t.codes.reshape(num_rows, num_columns)
    columns[:, :num_rows] = _shift(codes, np.repeat(d, _BLOCK, axis=1)[:, :num_columns]).T
    column_scales = np.repeat(tile_scales.T, _BLOCK, axis=0)[:num_columns]
    return BlockTensor(columns, np.ascontiguousarray(column_scales), FP8_1X128, source_rows=num_rows)


def _shift(codes: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d off each exponent field, which stops at 0; a field that was 0 gives the code 0."""
    field = (codes & E4M3.magnitude_mask) >> E4M3.mantissa_bits
    mantissa = codes & ((1 << E4M3.mantissa_bits) - 1)
    shifted = np.maximum(field.astype(np.int16) - d, 0).astype(np.uint8)
    moved: np.ndarray = (codes & E4M3.sign_mask) | (shifted << E4M3.mantissa_bits) | mantissa
    return np.where(field == 0, np.uint8(0), moved)
