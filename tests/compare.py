"""Comparison of codes and of floats as bits: the sign of zero, NaN codes and NaN signs count."""

import numpy as np


def float_bits(x) -> np.ndarray:
    """Storage bits of a float array; every NaN payload becomes the quiet one, its sign is kept."""
    x = np.asarray(x)
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    bits = np.ascontiguousarray(x).view(unsigned).reshape(x.shape)
    quiet = np.array(np.nan, x.dtype).view(unsigned)
    sign = unsigned.type(1) << unsigned.type(8 * x.dtype.itemsize - 1)
    return np.where(np.isnan(x), (quiet & ~sign) | (bits & sign), bits)


def _hex(value, itemsize: int) -> str:
    return f"0x{int(value):0{2 * itemsize}X}"


def assert_codes_equal(got, want, x_bits=None, label: str = "codes") -> None:
    """Both arrays have the same shape and the same integers; x_bits are the inputs (floats are shown as bits).

    A failure reads: E2M1 rowwise: 3 of 4096 codes differ; first at (17, 30): input 0x3F400000, got 0x01, want 0x02
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype.kind in "iu", f"{label}: got dtype {got.dtype}, want integers"
    assert got.shape == want.shape, f"{label}: got shape {got.shape}, want {want.shape}"
    wrong = got != want
    if not wrong.any():
        return
    index = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
    shown_input = ""
    if x_bits is not None:
        x_bits = np.asarray(x_bits)
        if x_bits.dtype.kind not in "iu":
            x_bits = np.ascontiguousarray(x_bits).view(f"u{x_bits.dtype.itemsize}").reshape(x_bits.shape)
        shown_input = f"input {_hex(x_bits[index], x_bits.dtype.itemsize)}, "
    raise AssertionError(
        f"{label}: {int(wrong.sum())} of {wrong.size} codes differ; first at {index}: {shown_input}"
        f"got {_hex(got[index], got.dtype.itemsize)}, want {_hex(want[index], got.dtype.itemsize)}"
    )


def assert_floats_equal(got, want, x_bits=None, label: str = "values") -> None:
    """Both float arrays have the same dtype, shape and bits; a NaN equals a NaN of the same sign."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{label}: got dtype {got.dtype}, want {want.dtype}"
    assert_codes_equal(float_bits(got), float_bits(want), x_bits, label)
