"""A tensor of codes and scales: what it holds, how large it is, how it is stored and handed over."""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from mxsim.blocks.block_format import BLOCK_FORMATS, BlockFormat
from mxsim.blocks.layout import as_matrices, block_of, chunks, join_blocks, normalize_axis, per_block, split_blocks
from mxsim.formats import BF16, FORMATS, FP32, FloatFormat, Overflow, decode, encode, pack, unpack
from mxsim.formats.inputs import check_subnormals

# Name of the ml_dtypes dtype of an element or scale format; INT8 codes are plain int8, FP32 scales float32.
_ML_DTYPES = {
    "E2M1": "float4_e2m1fn",
    "E2M3": "float6_e2m3fn",
    "E3M2": "float6_e3m2fn",
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "E8M0": "float8_e8m0fnu",
    "INT8": "int8",
    "FP32": "float32",
}


@dataclass(frozen=True, eq=False, repr=False)
class BlockTensor:
    """value = scale * element, times tensor_scale in NVFP4.

    codes: uint8, one element a byte (low bits), in the tensor's shape. scales: uint8 codes, or float32 for the FP8
    blocks; the tensor's shape with each blocked axis divided by the block's length, rounded up. axis: negative, along
    which blocks run (-1 for tiles, which cover the last two). source_rows: set on a column conversion's result [K, M]
    only: its first source_rows columns are the rows of the source, the rest is padding.

    Raises:
        TypeError, ValueError: where dtypes, shapes or the presence of tensor_scale do not fit the format.
    """

    codes: UInt8[np.ndarray, "*shape"]
    scales: UInt8[np.ndarray, "*blocks"] | Float[np.ndarray, "*blocks"]
    format: BlockFormat
    axis: int = -1
    tensor_scale: np.float32 | None = None
    source_rows: int | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        if not isinstance(fmt, BlockFormat):
            raise TypeError(f"BlockTensor: format is {fmt!r}, needed a BlockFormat")
        for name, array in (("codes", self.codes), ("scales", self.scales)):
            if not isinstance(array, (np.ndarray, np.generic)):
                raise TypeError(f"BlockTensor: {name} is a {type(array).__name__}, needed an array")
        if self.codes.dtype != np.uint8:
            raise TypeError(f"BlockTensor: codes has dtype {self.codes.dtype}, needed uint8")
        object.__setattr__(self, "axis", normalize_axis(self.axis, self.codes.ndim, fmt, "BlockTensor"))
        if self.scales.dtype != scale_dtype(fmt):
            raise TypeError(f"BlockTensor: scales has dtype {self.scales.dtype}, needed {scale_dtype(fmt)} for {fmt}")
        needed = fmt.scales_shape(self.codes.shape, self.axis)
        if self.scales.shape != needed:
            raise ValueError(
                f"BlockTensor: scales has shape {self.scales.shape}, needed {needed} for {fmt} codes of shape "
                f"{self.codes.shape} along axis {self.axis}"
            )
        if self.codes.size and int(self.codes.max()) >= fmt.element.num_codes:
            raise ValueError(
                f"BlockTensor: codes holds {self.codes.max()}, needed 0 to {fmt.element.num_codes - 1} for {fmt}"
            )
        if (self.tensor_scale is not None) != fmt.tensor_scaled:
            raise ValueError(
                f"BlockTensor: tensor_scale is {self.tensor_scale}, needed "
                f"{'a float32' if fmt.tensor_scaled else 'None'} for {fmt}"
            )
        if self.tensor_scale is not None:
            object.__setattr__(self, "tensor_scale", np.float32(self.tensor_scale))
        if not (self.source_rows is None or 0 <= self.source_rows <= self.codes.shape[-1]):
            raise ValueError(
                f"BlockTensor: source_rows is {self.source_rows}, needed None or 0 to {self.codes.shape[-1]}"
            )

    def __repr__(self) -> str:
        size = " x ".join(str(n) for n in self.shape)
        return f"BlockTensor({self.format}, {size}, axis {self.axis}, {self.nbytes} bytes packed)"

    def equal(self, other: "BlockTensor") -> bool:
        """Whether both hold the same bits: format, axis, codes, scales (NaN by its bits), tensor_scale, source_rows."""
        return (
            isinstance(other, BlockTensor)
            and (self.format, self.axis, self.shape, self.source_rows)
            == (other.format, other.axis, other.shape, other.source_rows)
            and np.array_equal(self.codes, other.codes)
            and self.scales.tobytes() == other.scales.tobytes()
            and np.array(self.tensor_scale).tobytes() == np.array(other.tensor_scale).tobytes()
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes stored: packed codes (each row of the last axis in whole bytes), scales, tensor scale."""
        *batch, n = self.shape
        code_bytes = int(np.prod(batch, dtype=np.int64)) * -(-n * self.format.element.bits // 8)
        return code_bytes + int(self.scales.nbytes) + (4 if self.tensor_scale is not None else 0)

    @property
    def bits_per_element(self) -> float:
        """8 * nbytes over the number of elements; NaN for an empty tensor."""
        return 8 * self.nbytes / self.codes.size if self.codes.size else float("nan")

    def packed(self) -> UInt8[np.ndarray, "*batch num_bytes"]:
        """Codes packed along the last axis, as `mxsim.formats.pack` lays them out."""
        return pack(self.codes, self.format.element)

    def scale_values(self) -> Float[np.ndarray, "*blocks"]:
        """Scales as exact float64, without tensor_scale; a NaN scale is NaN."""
        scales = self.scales if self.format.scale == FP32 else decode(self.scales, self.format.scale)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return scales.astype(np.float64)

    def dequantize(self, dtype: Any = np.float32) -> Float[np.ndarray, "*shape"]:
        """See `dequantize`."""
        return dequantize(self, dtype)

    def to_ml_dtypes(self) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) as arrays of the ml_dtypes scalar types, for libraries that speak them; no copy.

        E2M1 becomes float4_e2m1fn, one element a byte, and so on; INT8 becomes int8 (value * 64), FP32 float32.
        """
        return _as_ml_dtype(self.codes, self.format.element), _as_ml_dtype(self.scales, self.format.scale)

    @classmethod
    def from_ml_dtypes(
        cls,
        codes: np.ndarray,
        scales: np.ndarray,
        fmt: BlockFormat,
        *,
        axis: int | None = None,
        tensor_scale: float | None = None,
    ) -> "BlockTensor":
        """The tensor whose `to_ml_dtypes` is (codes, scales); no copy.

        Raises:
            TypeError: if a dtype is not the one that fmt has in ml_dtypes.
            ValueError: if the shapes do not fit.
        """
        parts = []
        for name, array, part in (("codes", codes, fmt.element), ("scales", scales, fmt.scale)):
            needed = _ml_dtype(part)
            if array.dtype != needed:
                raise TypeError(f"from_ml_dtypes: {name} has dtype {array.dtype}, needed {needed} for {fmt}")
            parts.append(array if part == FP32 else array.view(np.uint8))
        scale = None if tensor_scale is None else np.float32(tensor_scale)
        return cls(parts[0], parts[1], fmt, fmt.default_axis if axis is None else axis, scale)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write packed codes, scales and description to a .npz or .safetensors file, chosen by the suffix; lossless.

        The file appears whole or not at all: it is written beside its place and then moved.

        Raises:
            ValueError: for another suffix, or a format that is not in BLOCK_FORMATS, which `load` could not find.
        """
        named = _checked_path(path, "save")
        target = Path(os.path.realpath(named))  # a link stays, what it points to is written
        if BLOCK_FORMATS.get(self.format.name) != self.format:
            raise ValueError(f"save: format is {self.format}, needed one of {', '.join(BLOCK_FORMATS)}")
        # NOTE: safetensors writes the memory of an array as it lies, whatever its strides.
        arrays = {"codes": np.ascontiguousarray(self.packed()), "scales": np.ascontiguousarray(self.scales)}
        if self.tensor_scale is not None:
            arrays["tensor_scale"] = np.array(self.tensor_scale)
        header = {
            "format": self.format.name,
            "axis": self.axis,
            "shape": list(self.shape),
            "source_rows": self.source_rows,
        }
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with temporary.open("wb") as file:
                if named.suffix == ".npz":
                    np.savez(file, allow_pickle=False, mxsim=np.array(json.dumps(header)), **arrays)
                else:
                    import safetensors.numpy

                    file.write(safetensors.numpy.save(arrays, metadata={"mxsim": json.dumps(header)}))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BlockTensor":
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the suffix is another, or the file is damaged or not one of `save`'s.
        """
        source = _checked_path(path, "load")
        if not source.is_file():
            raise FileNotFoundError(f"load: {source} does not exist")
        try:
            header, arrays = _read(source)
            fmt = BLOCK_FORMATS[header["format"]]
            shape = tuple(header["shape"])
            codes = unpack(arrays["codes"], fmt.element, shape[-1]).reshape(shape)
            tensor_scale = np.float32(arrays["tensor_scale"]) if "tensor_scale" in arrays else None
            return cls(codes, arrays["scales"], fmt, header["axis"], tensor_scale, header["source_rows"])
        except Exception as error:
            raise ValueError(f"load: {source} is damaged or was not written by BlockTensor.save ({error})") from error


def dequantize(t: BlockTensor, dtype: Any = np.float32) -> Float[np.ndarray, "*shape"]:
    """scale * element (* tensor_scale), computed exactly and rounded once (ties to even) to dtype.

    dtype is float64 (exact), float32, float16 or ml_dtypes.bfloat16. Overflow gives infinity; the sign of zero is kept;
    a NaN element or scale gives the positive quiet NaN.

    Raises:
        TypeError: for another dtype, or if t is not a BlockTensor.
    """
    if not isinstance(t, BlockTensor):
        raise TypeError(f"dequantize: t is a {type(t).__name__}, needed a BlockTensor")
    check_subnormals("dequantize")
    given = dtype
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # a torch dtype, for one
        dtype = None
    if dtype not in (np.float64, np.float32, np.float16) and (dtype is None or dtype.name != "bfloat16"):
        raise TypeError(f"dequantize: dtype is {given}, needed NumPy's float64, float32, float16 or ml_dtypes.bfloat16")
    out: np.ndarray = np.empty(t.shape, dtype)
    scales = t.scale_values()
    if t.tensor_scale is not None:
        scales *= np.float64(t.tensor_scale)  # 4 by 24 bits: exact
    codes, values, scales = (as_matrices(a, t.format, t.axis) for a in (t.codes, out, scales))
    block = block_of(t.format, t.axis)
    for piece, blocks in chunks(codes.shape, block):
        elements = decode(split_blocks(codes[piece], block), t.format.element)
        with np.errstate(invalid="ignore"):  # 0 times an infinite scale
            exact = elements * per_block(scales[blocks])  # 4 by 28 bits at most: exact in float64
        exact[np.isnan(exact)] = np.nan
        _, rows, columns = codes[piece].shape
        values[piece] = join_blocks(_round_once(exact, dtype), rows, columns)
    return out


def scale_dtype(fmt: BlockFormat) -> np.dtype:
    """NumPy dtype of the stored scales."""
    return np.dtype(np.float32 if fmt.scale == FP32 else np.uint8)


def _round_once(exact: Float[np.ndarray, "*shape"], dtype: np.dtype) -> np.ndarray:
    if dtype.name == "bfloat16":
        return encode(exact, BF16, overflow=Overflow.TO_NONFINITE).view(dtype)
    with np.errstate(over="ignore", under="ignore"):
        return exact.astype(dtype)  # float64 -> float32, float16 and float64 round once, ties to even


def _ml_dtype(fmt: FloatFormat) -> np.dtype:
    import ml_dtypes

    if FORMATS.get(fmt.name) != fmt:
        raise TypeError(f"{fmt} has no dtype in ml_dtypes that this package knows")
    name = _ML_DTYPES[fmt.name]
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def _as_ml_dtype(array: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    return array.view(_ml_dtype(fmt))


def _checked_path(path: str | os.PathLike[str], caller: str) -> Path:
    checked = Path(path)
    if checked.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{caller}: {checked} ends in {checked.suffix!r}, needed .npz or .safetensors")
    return checked


def _read(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if source.suffix == ".npz":
        # NOTE: given a path to a damaged file, np.load leaves it open.
        with source.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return json.loads(str(arrays.pop("mxsim"))), arrays
    import safetensors

    with safetensors.safe_open(source, framework="numpy") as file:
        return json.loads(file.metadata()["mxsim"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
