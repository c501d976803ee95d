"""Tensors in .safetensors, .npy, .npz and .pt files, opened without reading more than is asked for."""

import fnmatch
import json
import math
import mmap
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mxsim.formats.inputs import as_float, as_numpy


class TensorFileError(ValueError):
    """The file cannot be read: missing, damaged, of another kind; the message is one line that names it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: what it is, and how to get its elements.

    `load` returns the array, memory-mapped where the file allows it; a compressed or a .pt member may be read whole.
    `release` lets go of the pages that the mapping has read so far, so that a long scan stays small; the array remains
    valid. `problem` says why the elements are no real numbers that NumPy and ml_dtypes can hold, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    problem: str | None
    load: Callable[[], np.ndarray]
    release: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@contextmanager
def open_tensors(path: str | os.PathLike[str], patterns: Sequence[str] = ()) -> Iterator[list[StoredTensor]]:
    """The tensors of a file, in file order; usable until the block ends.

    Args:
        patterns: shell patterns; only tensors whose name fits one of them. None given: all.

    Raises:
        TensorFileError: on entry, or from `load`, if the file is missing, damaged, or of a kind that is not known; if
            it needs a package that is not installed, or holds no tensor that fits.
    """
    source = Path(path)
    with ExitStack() as stack:
        with _one_line_errors(source):
            if not source.exists():
                raise TensorFileError(f"{source}: no such file")
            if not source.is_file():
                raise TensorFileError(f"{source}: is {'a directory' if source.is_dir() else 'not a regular file'}")
            reader = _READERS.get(source.suffix.lower())
            if reader is None:
                known = ", ".join(_READERS)
                raise TensorFileError(f"{source}: unknown kind of file {source.suffix!r}, needed one of {known}")
            tensors = reader(source, stack)
            if not tensors:
                raise TensorFileError(f"{source}: holds no tensors")
            chosen = [t for t in tensors if not patterns or any(fnmatch.fnmatchcase(t.name, p) for p in patterns)]
            if not chosen:
                raise TensorFileError(f"{source}: none of its {len(tensors)} tensors fits {' or '.join(patterns)}")
        yield chosen


@contextmanager
def _one_line_errors(source: Path) -> Iterator[None]:
    """Whatever goes wrong while foreign bytes are read becomes one line that names the file."""
    try:
        yield
    except TensorFileError:
        raise
    except MemoryError:
        raise TensorFileError(f"{source}: does not fit into memory") from None
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise TensorFileError(f"{source}: {error.strerror}") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = source.suffix.lower().removeprefix(".")
        raise TensorFileError(f"{source}: is damaged or no {kind} file ({_shortened(reason)})") from error


def _shortened(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Mapping:
    """A file mapped for reading; goes with the last of its arrays."""

    def __init__(self, source: Path) -> None:
        with source.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int, order: Any = "C") -> np.ndarray:
        array: np.ndarray = np.ndarray(shape, dtype, self._map, offset, order=order)
        return array

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def floating_point_problem(dtype: np.dtype) -> str | None:
    """Why elements of this dtype are not studied, None if they are real floating-point numbers."""
    if dtype.kind in "iub":
        return "not floating-point"
    if dtype.kind == "c":
        return "complex"
    try:
        as_float(np.empty(0, dtype), caller="", name="")
    except TypeError:
        return "no floating-point dtype of at most 64 bits"
    return None


# ------------------------------------------------------------------------------------------------------- safetensors
# dtype in the header -> name in NumPy or ml_dtypes
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
    "C64": "complex64",
}


def _read_safetensors(source: Path, stack: ExitStack) -> list[StoredTensor]:
    import ml_dtypes
    import safetensors

    # The library checks header and file length; its NumPy side cannot hand out bfloat16, so the bytes are mapped here.
    with safetensors.safe_open(source, framework="numpy"):
        pass
    mapping = _Mapping(source)
    with source.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, offset = tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0]
        dtype_name = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype_name is None:
            tensors.append(StoredTensor(name, shape, entry["dtype"], "packed elements of another dtype", _unreadable))
            continue
        dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))

        def load(dtype: np.dtype = dtype, shape: tuple[int, ...] = shape, offset: int = offset) -> np.ndarray:
            return mapping.array(dtype, shape, offset)

        tensors.append(StoredTensor(name, shape, dtype_name, floating_point_problem(dtype), load, mapping.release))
    return tensors


def _unreadable() -> np.ndarray:
    raise TypeError("load: this tensor has a problem")


# --------------------------------------------------------------------------------------------------------------- npy
def _read_npy(source: Path, stack: ExitStack) -> list[StoredTensor]:
    with source.open("rb") as file:
        shape, order, dtype = _npy_header(file)
        offset = file.tell()
    problem = _npy_problem(dtype)
    mapping = _Mapping(source)
    if problem is None:
        mapping.array(dtype, shape, offset, order)  # so that a truncated file is refused at once

    def load() -> np.ndarray:
        return mapping.array(dtype, shape, offset, order)

    return [StoredTensor(source.stem, shape, str(dtype), problem, load, mapping.release)]


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], str, np.dtype]:
    """(shape, order, dtype); the file stands at the first element afterwards."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:  # 3.0 differs from 2.0 in the encoding of field names only
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, "F" if is_fortran else "C", dtype


def _npy_problem(dtype: np.dtype) -> str | None:
    if dtype.kind == "V" and dtype.names is None:
        return "raw bytes: a .npy file cannot say bfloat16 or float8"
    return "Python objects" if dtype.hasobject else floating_point_problem(dtype)


# --------------------------------------------------------------------------------------------------------------- npz
def _read_npz(source: Path, stack: ExitStack) -> list[StoredTensor]:
    archive = stack.enter_context(zipfile.ZipFile(source))
    tensors = []
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        with archive.open(member) as file:
            shape, _, dtype = _npy_header(file)
            stored_bytes = member.file_size - file.tell()
        problem = _npy_problem(dtype)
        if problem is None and stored_bytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{member.filename} holds {stored_bytes} bytes, its header promises {shape} of {dtype}")

        def load(member: zipfile.ZipInfo = member) -> np.ndarray:
            with _one_line_errors(source), archive.open(member) as file:
                return np.lib.format.read_array(file, allow_pickle=False)

        tensors.append(StoredTensor(member.filename.removesuffix(".npy"), shape, str(dtype), problem, load))
    return tensors


# ---------------------------------------------------------------------------------------------------------------- pt
def _read_pt(source: Path, stack: ExitStack) -> list[StoredTensor]:
    try:
        import torch
    except ImportError:
        raise TensorFileError(
            f"{source}: reading a {source.suffix} file needs torch; install it: pip install torch"
        ) from None
    if source.stat().st_size == 0:
        raise ValueError("the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except pickle.UnpicklingError:
        reason = "is damaged, or holds more than tensors in plain containers (save a state_dict)"
        raise TensorFileError(f"{source}: {reason}") from None
    tensors = []
    for name, tensor in _named_tensors(content, ""):
        try:
            array = as_numpy(tensor, caller="tensor", name="it")
            problem = floating_point_problem(array.dtype)
        except TypeError as error:
            array, problem = None, str(error).removeprefix("tensor: it is ")
        dtype = str(tensor.dtype).removeprefix("torch.")
        load = _unreadable if array is None else (lambda array=array: array)
        tensors.append(StoredTensor(name, tuple(tensor.shape), dtype, problem, load))
    return tensors


def _named_tensors(content: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors in nested dictionaries and lists, named by their keys joined with dots."""
    import torch

    if isinstance(content, torch.Tensor):
        yield name or "tensor", content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _named_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _named_tensors(value, f"{name}.{index}" if name else str(index))


_READERS: dict[str, Callable[[Path, ExitStack], list[StoredTensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".bin": _read_pt,
}
