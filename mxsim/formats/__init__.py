"""The bit-level element formats: records, exact rounding, codes, packing. NumPy only."""

from mxsim.formats.catalog import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, FP16, FP32, INT8
from mxsim.formats.codec import decode, decode_table, encode, round_to
from mxsim.formats.float_format import CodeForm, FloatFormat, Specials
from mxsim.formats.packing import pack, unpack
from mxsim.formats.rescale import rescale
from mxsim.formats.rounding import Overflow, Rounding, philox4x32, philox_bits

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP16",
    "FP32",
    "INT8",
    "CodeForm",
    "FloatFormat",
    "Overflow",
    "Rounding",
    "Specials",
    "decode",
    "decode_table",
    "encode",
    "pack",
    "philox4x32",
    "philox_bits",
    "rescale",
    "round_to",
    "unpack",
]
