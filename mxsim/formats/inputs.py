"""What counts as an array of real numbers, and how it becomes a NumPy array without changing a value."""

import sys
from typing import Any

import numpy as np

# torch dtypes that NumPy lacks -> (integer dtype that views them, name of the equal ml_dtypes dtype)
_TORCH_VIEWS = {
    "torch.bfloat16": ("uint16", "bfloat16"),
    "torch.float8_e4m3fn": ("uint8", "float8_e4m3fn"),
    "torch.float8_e5m2": ("uint8", "float8_e5m2"),
    "torch.float8_e4m3fnuz": ("uint8", "float8_e4m3fnuz"),
    "torch.float8_e5m2fnuz": ("uint8", "float8_e5m2fnuz"),
    "torch.float8_e8m0fnu": ("uint8", "float8_e8m0fnu"),
}
_EXACT_INTEGER = 2**53
_SMALLEST, _ONE = np.float32(2.0**-149), np.float32(1)


def as_numpy(x: Any, *, caller: str, name: str) -> np.ndarray:
    """x as a NumPy array of its own dtype: torch CPU tensors are detached and viewed, everything else is `np.asarray`.

    torch is never imported: a tensor can only come from a torch that is loaded already.

    Raises:
        TypeError: for a torch tensor that is not a dense CPU tensor, or of a dtype that NumPy and ml_dtypes lack; for a
            masked array with a masked element, which has no value.
        ValueError: for what NumPy makes no array of, such as rows of different lengths.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
            raise TypeError(f"{caller}: {name} is a masked array with masked elements, needed a value for each element")
        try:
            return np.asarray(x)
        except ValueError as error:  # rows of different lengths
            raise ValueError(f"{caller}: {name} is no array: {error}") from None
    if x.device.type == "cuda":
        raise TypeError(
            f"{caller}: {name} is a torch tensor on {x.device}, needed a CPU tensor; mxsim.kernels takes CUDA tensors"
        )
    if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else x.layout
        raise TypeError(f"{caller}: {name} is a torch tensor on {x.device} ({kind}), needed a dense CPU tensor")
    x = x.detach().resolve_conj().resolve_neg()
    if str(x.dtype) in _TORCH_VIEWS:
        import ml_dtypes

        integer, dtype = _TORCH_VIEWS[str(x.dtype)]
        array: np.ndarray = x.view(getattr(torch, integer)).numpy().view(getattr(ml_dtypes, dtype))
        return array
    try:
        return np.asarray(x.numpy())
    except TypeError:
        raise TypeError(
            f"{caller}: {name} is a torch tensor of {x.dtype}, needed a real floating-point dtype"
        ) from None


def as_float(x: Any, *, caller: str, name: str) -> np.ndarray:
    """x as a native float32 or float64 array with the same values; float32 wherever that holds them all.

    float16, bfloat16, the small ml_dtypes floats and 8- and 16-bit integers become float32; wider integers and
    Python numbers float64.

    Raises:
        TypeError: if x holds no real numbers, or numbers wider than float64.
        ValueError: for an integer beyond +-2**53, which float64 may not hold.
        RuntimeError: if this thread flushes subnormal numbers to zero.
    """
    check_subnormals(caller)
    array = as_numpy(x, caller=caller, name=name)
    dtype = array.dtype
    if dtype.kind in "iu":
        if dtype.itemsize <= 2:
            return array.astype(np.float32)
        if array.size and (int(array.max()) > _EXACT_INTEGER or int(array.min()) < -_EXACT_INTEGER):
            raise ValueError(f"{caller}: {name} holds an integer beyond 2**53, which float64 does not hold exactly")
        return array.astype(np.float64)
    if _is_small_ml_dtype(dtype):
        return array.astype(np.float32)
    if dtype.kind == "f" and dtype.itemsize <= 8:
        return array.astype(np.float64 if dtype.itemsize == 8 else np.float32, copy=False)
    raise TypeError(
        f"{caller}: {name} has dtype {dtype}, needed a real floating-point array of at most 64 bits an element"
    )


def check_subnormals(caller: str) -> None:
    """Raise RuntimeError where the processor is set to flush subnormal numbers to zero: no result would be exact."""
    if _SMALLEST * _ONE == 0:
        raise RuntimeError(
            f"{caller}: this thread flushes subnormal numbers to zero, needed IEEE arithmetic; "
            "turn it off (torch.set_flush_denormal(False))"
        )


def _is_small_ml_dtype(dtype: np.dtype) -> bool:
    ml_dtypes = sys.modules.get("ml_dtypes")
    if ml_dtypes is None or dtype.kind not in "Vf" or dtype.names is not None:
        return False
    try:
        return int(ml_dtypes.finfo(dtype).bits) <= 16
    except ValueError:
        return False
