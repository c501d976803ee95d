"""Codes narrower than a byte <-> bytes."""

from math import gcd

import numpy as np
from jaxtyping import UInt, UInt8

from mxsim.formats.float_format import FloatFormat
from mxsim.formats.inputs import as_numpy


def pack(codes: UInt[np.ndarray, "*batch n"], fmt: FloatFormat | int) -> UInt8[np.ndarray, "*batch num_bytes"]:
    """Write the codes of each row one after another, lowest bits first: code i takes bits [i * bits, (i + 1) * bits).

    Two 4-bit codes a byte, element 2j in the low nibble (torch's float4_e2m1fn_x2); four 6-bit codes in three bytes.
    Each row is ceil(n * bits / 8) bytes; the bits after its last code are zero. fmt is a format of at most 8 bits, or
    the number of bits.

    Raises:
        TypeError: if codes are not integers.
        ValueError: if codes has no axis, or a code needs more than `bits` bits.

    Source: OCP MX v1.0 leaves the layout open; this is the order of torch, PTX and ml_dtypes' sub-byte views.

    >>> from mxsim.formats import E2M1
    >>> pack(np.array([1, 2, 3]), E2M1).tolist()    # 0x21, 0x03
    [33, 3]
    """
    bits, group, num_bytes = _layout(fmt, "pack")
    array = as_numpy(codes, caller="pack", name="codes")
    if array.ndim == 0:
        raise ValueError("pack: codes has no axis, needed at least one")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"pack: codes has dtype {array.dtype}, needed integers")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 2**bits):
        raise ValueError(f"pack: codes holds {array.min()} to {array.max()}, needed 0 to {2**bits - 1} for {bits} bits")
    *batch, n = array.shape
    num_groups = -(-n // group)
    padded = np.zeros((*batch, num_groups * group), np.uint8)
    padded[..., :n] = array
    grouped = padded.reshape(*batch, num_groups, group)  # (batch, groups, codes)
    word = np.zeros((*batch, num_groups), np.uint64)
    for i in range(group):
        word |= grouped[..., i].astype(np.uint64) << np.uint64(bits * i)
    out = np.empty((*batch, num_groups, num_bytes), np.uint8)
    for i in range(num_bytes):
        out[..., i] = (word >> np.uint64(8 * i)) & np.uint64(0xFF)
    return np.ascontiguousarray(out.reshape(*batch, num_groups * num_bytes)[..., : -(-n * bits // 8)])


def unpack(
    data: UInt8[np.ndarray, "*batch num_bytes"], fmt: FloatFormat | int, count: int | None = None
) -> UInt8[np.ndarray, "*batch count"]:
    """The first `count` codes of each packed row; all that fit into its bytes if count is None.

    Raises:
        TypeError: if data is not uint8.
        ValueError: if data has no axis, or its rows hold fewer than count codes.

    >>> from mxsim.formats import E2M1
    >>> unpack(np.array([0x21, 0x03], np.uint8), E2M1, 3).tolist()
    [1, 2, 3]
    """
    bits, group, num_bytes = _layout(fmt, "unpack")
    array = as_numpy(data, caller="unpack", name="data")
    if array.dtype != np.uint8:
        raise TypeError(f"unpack: data has dtype {array.dtype}, needed uint8")
    if array.ndim == 0:
        raise ValueError("unpack: data has no axis, needed at least one")
    *batch, size = array.shape
    held = size * 8 // bits
    count = held if count is None else count
    if not 0 <= count <= held:
        raise ValueError(f"unpack: count is {count}, needed 0 to {held}, the codes of {bits} bits in {size} bytes")
    num_groups = -(-size // num_bytes)
    padded = np.zeros((*batch, num_groups * num_bytes), np.uint8)
    padded[..., :size] = array
    grouped = padded.reshape(*batch, num_groups, num_bytes)  # (batch, groups, bytes)
    word = np.zeros((*batch, num_groups), np.uint64)
    for i in range(num_bytes):
        word |= grouped[..., i].astype(np.uint64) << np.uint64(8 * i)
    out = np.empty((*batch, num_groups, group), np.uint8)
    for i in range(group):
        out[..., i] = (word >> np.uint64(bits * i)) & np.uint64(2**bits - 1)
    return out.reshape(*batch, num_groups * group)[..., :count]


def _layout(fmt: FloatFormat | int, caller: str) -> tuple[int, int, int]:
    """(bits of a code, codes and bytes of the smallest whole group)."""
    if not isinstance(fmt, (FloatFormat, int, np.integer)) or isinstance(fmt, bool):
        raise TypeError(f"{caller}: fmt is {fmt!r}, needed a FloatFormat or a number of bits")
    bits = fmt.bits if isinstance(fmt, FloatFormat) else int(fmt)
    if not 1 <= bits <= 8:
        raise ValueError(f"{caller}: {fmt} has {bits} bits, needed 1 to 8")
    group = 8 // gcd(bits, 8)
    return bits, group, group * bits // 8
