"""The package behind the operations of `bug_cases`: bits in, bits out. What it has no operation for says why."""

from typing import NoReturn

import ml_dtypes
import numpy as np

from mxsim.blocks import (
    FP8_1X128,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockTensor,
    ScaleRule,
    count_inexact,
    fp4_row_to_fp8_col,
    fp4_row_to_fp8_row,
    fp8_row_to_fp8_col,
    quantize,
    scale_exponent,
)
from mxsim.formats import E2M1, E4M3, E5M2, E8M0, Overflow, Rounding, decode, encode, pack, philox_bits, unpack
from tests.cases.bug_cases import Unsupported

ELEMENTS = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2, "e8m0": E8M0}
MX_FORMATS = {"e2m1": MXFP4, "e4m3": MXFP8_E4M3, "e5m2": MXFP8_E5M2}
RULES = {"floor": ScaleRule.FLOOR, "rceil": ScaleRule.RCEIL, "even": ScaleRule.EVEN}
OVERFLOWS = {"sat": Overflow.SATURATE, "ieee": Overflow.TO_NONFINITE}
DTYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}

NO_NAN_CODE = "E2M1 has no code for NaN: encode raises, a block is poisoned instead"
NO_DEVICES = "the simulator is NumPy's and knows no devices"
NO_SWIZZLE = "swizzled scale layouts are not produced"
NO_UE8M0 = "scales packed four to a word are not produced"
NO_PADDING = "scales are stored for real rows only"
NO_OFFSETS = "NumPy indexes; there is no offset arithmetic to get wrong"
NO_GGML = "GGML's half-split nibble order is not read"
ONE_ZERO_SCALE = "an all-zero block has one scale, 2**-127"
NO_ZERO_AS_NAN = "E8M0 of zero is 2**-127"
NO_HEADROOM_ABOVE_6 = "headroom stops at 6, so that nothing saturates; 7 is refused"
NO_AMAX_FLOOR = "amax has no floor"


def refuse(reason: str) -> NoReturn:
    raise Unsupported(reason)


def floats(bits, source: str = "f32") -> np.ndarray:
    dtype = np.dtype(DTYPES[source])
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def bits_of(x: np.ndarray) -> list[int]:
    return x.view(f"u{x.dtype.itemsize}").reshape(-1).tolist()


class Adapter:
    # ------------------------------------------------------------------------------------------------------- elements
    def encode_e2m1(self, x, nan=None):
        if nan is not None:
            refuse(NO_NAN_CODE)
        return encode(floats(x), E2M1)

    def encode_e4m3(self, x, overflow, src="f32"):
        return encode(floats(x, src), E4M3, overflow=OVERFLOWS[overflow])

    def encode_e5m2(self, x, overflow, src="f32"):
        return encode(floats(x, src), E5M2, overflow=OVERFLOWS[overflow])

    def encode_e8m0(self, x, rounding, zero="clamp"):
        if zero != "clamp":
            refuse(NO_ZERO_AS_NAN)
        roundings = {
            "up": Rounding.UP,
            "down": Rounding.DOWN,
            "nearest_even": Rounding.TIES_TO_EVEN,
            "nearest_up": Rounding.TIES_TO_AWAY,
        }
        return encode(floats(x), E8M0, rounding=roundings[rounding])

    def decode(self, fmt, codes, out="f32"):
        return bits_of(decode(np.array(codes, np.uint8), ELEMENTS[fmt]).astype(DTYPES[out]))

    def e8m0_inverse(self, codes):
        return bits_of((1 / decode(np.array(codes, np.uint8), E8M0).astype(np.float64)).astype(np.float32))

    def roundtrip(self, fmt):
        return encode(decode(np.arange(ELEMENTS[fmt].num_codes, dtype=np.uint8), ELEMENTS[fmt]), ELEMENTS[fmt])

    def stochastic(self, fmt, x, n, seed):
        values = np.full(n, floats(x))
        return encode(values, ELEMENTS[fmt], rounding=Rounding.STOCHASTIC, random_bits=philox_bits(seed, n))

    def fp4_to_fp8(self, codes):
        return encode(decode(np.array(codes, np.uint8), E2M1), E4M3)

    # --------------------------------------------------------------------------------------------------------- blocks
    def mx_scale(self, amax, elem, rule):
        return scale_exponent(floats(amax), ELEMENTS[elem], RULES[rule]) + 127

    def quantize_mx(self, x, rows, cols, elem, rule, axis=1, device=None, zero_scale=0):
        if device is not None:
            refuse(NO_DEVICES)
        if zero_scale != 0:
            refuse(ONE_ZERO_SCALE)
        t = quantize(floats(x).reshape(rows, cols), MX_FORMATS[elem], axis=axis, scale_rule=RULES[rule])
        return t.codes.reshape(-1), t.scales.reshape(-1)

    def quantize_mx_strided(self, base, rows, cols, row_stride, col_stride, offset, elem, rule):
        view = np.lib.stride_tricks.as_strided(floats(base)[offset:], (rows, cols), (4 * row_stride, 4 * col_stride))
        t = quantize(view, MX_FORMATS[elem], scale_rule=RULES[rule])
        return t.codes.reshape(-1), t.scales.reshape(-1)

    def quantize_mx_grouped_cols(self, x, group_sizes, cols, elem, rule):
        matrix, codes, scales, start = floats(x).reshape(-1, cols), [], [], 0
        for size in group_sizes:
            t = quantize(matrix[start : start + size], MX_FORMATS[elem], axis=-2, scale_rule=RULES[rule])
            codes += t.codes.reshape(-1).tolist()
            scales += t.scales.reshape(-1).tolist()
            start += size
        return codes, scales

    def dequantize_mx(self, codes, scales, elem):
        t = BlockTensor(np.array(codes, np.uint8), np.array(scales, np.uint8), MX_FORMATS[elem])
        return bits_of(t.dequantize())

    def quantize_fp8_groups(self, x, rows, cols, group, amax_floor):
        assert group == FP8_1X128.block_size
        matrix = floats(x).reshape(rows, cols)
        if any(abs(matrix[:, i : i + group]).max() < floats(amax_floor) for i in range(0, cols, group)):
            refuse(NO_AMAX_FLOOR)
        t = quantize(matrix, FP8_1X128)
        return t.codes.reshape(-1), bits_of(t.scales)

    def scale_block_count(self, n, block):
        fmt = {32: MXFP4, 128: FP8_1X128}[block]
        (count,) = fmt.scales_shape((n,), -1)
        if n < 2**20:
            assert quantize(np.ones(n, np.float32), fmt).scales.shape == (count,)
        return count

    # ---------------------------------------------------------------------------------------------------- conversions
    def mxfp4_to_fp8(self, codes, scales, out_scale):
        headroom = max(scales) - out_scale  # the output scale is 2**(E - headroom)
        if headroom > 6:
            refuse(NO_HEADROOM_ABOVE_6)
        source = BlockTensor(np.array([codes], np.uint8), np.array([scales], np.uint8), MXFP4)
        result = fp4_row_to_fp8_row(source, headroom=headroom)
        assert result.scales.tolist() == [[2.0 ** (out_scale - 127)]]
        return result.codes.reshape(-1), count_inexact(source, result) == 0

    def fp8_transpose_max_scale(self, codes, rows, cols, scales):
        matrix = np.array(codes, np.uint8).reshape(rows, cols)
        source = BlockTensor(matrix, np.exp2(np.float32(scales) - 127)[:, None], FP8_1X128)
        result = fp8_row_to_fp8_col(source)
        (scale,) = set(result.scales.reshape(-1).tolist())
        significand, exponent = np.frexp(scale)
        assert significand == 0.5
        return result.codes[:, :rows].reshape(-1), exponent - 1 + 127

    def pad_group_offsets(self, sizes, align):
        assert align == FP8_1X128.block_size
        rows = sum(sizes)
        source = BlockTensor(np.zeros((rows, 32), np.uint8), np.zeros((rows, 1), np.uint8), MXFP4)
        padded = [t.shape[1] for t in fp4_row_to_fp8_col(source, group_sizes=sizes)]
        return padded, [0, *np.cumsum(padded)]

    # -------------------------------------------------------------------------------------------------------- packing
    def pack_fp4(self, codes, order="low_first"):
        assert order == "low_first"
        return pack(np.array(codes, np.uint8), E2M1)

    def unpack_fp4(self, data, n):
        return unpack(np.array(data, np.uint8), E2M1, n)

    def transpose_packed_fp4(self, data, rows, cols):
        codes = unpack(np.array(data, np.uint8), E2M1, rows * cols).reshape(rows, cols)
        return pack(codes.T.reshape(-1), E2M1)

    # ------------------------------------------------------------------------------------------------- not this package
    def split16_to_linear(self, data):
        refuse(NO_GGML)

    def swizzled_scale_offset(self, row, col, n_cols):
        refuse(NO_SWIZZLE)

    def swizzled_scale_bytes(self, rows, n_cols):
        refuse(NO_SWIZZLE)

    def pad_scale_columns(self, scales, rows, groups, align, fill):
        refuse(NO_PADDING)

    def pack_ue8m0(self, scales):
        refuse(NO_UE8M0)

    def linear_offset(self, row, ld, col):
        refuse(NO_OFFSETS)
