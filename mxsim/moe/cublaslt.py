"""cuBLASLt's block-scaled FP8 GEMM for each expert, with the algorithm kept from call to call.

    rows    out[start_e : start_e + m_e] = a_e @ b_e.T, a by rows of 128, b by tiles of 128 x 128
    wgrad   out[e] = a_e @ b_e.T over the rows of the expert, a and b columns turned into rows of 128; 0 without rows

These are the GEMMs that torch's `scaled_mm` runs. It asks cuBLASLt for an algorithm at every call, which takes the host
longer than an expert takes the GPU. Here algorithms are kept: one for all m that round up to the same multiple of 128,
and never one that splits K (NUMERICS 9.5). An expert then costs the layouts of its shape, two scale pointers, a launch.

cuBLASLt counts by columns: it computes out.T [n, m] = op(A) B, where A is b.T [k, n] by columns (that is, b as it lies,
taken transposed) and B is a.T [k, m]. Its m, n are our n, m. Scales: of rows, [rows, k/128] with strides (1, rows); of
tiles, [n/128, k/128] in rows of ceil4(k/128); every pointer a multiple of 16 bytes.

The handle is torch's own of the thread, device and stream. Descriptors are plain memory, owned by Python and by one
call, so that threads do not meet and nothing is left to free. Workspace comes from torch's allocator, as in torch. A
captured graph needs what any cuBLAS call needs: the same call before the capture.

Source: cublasLt.h, cublas_api.h and library_types.h of cuBLAS 13.1.2 and CUDA 13.0.
"""

import ctypes
import os
from ctypes import addressof, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxsim.kernels.layouts import FP8_BLOCK, Fp8Cols, Fp8Tiles, RaggedFp8Rows, round_up
from mxsim.moe.expert_gemms import aligned, empty_wgrad
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import ROW_MULTIPLE

MIN_VERSION = 120900  # 12.9 brought scales of blocks of 128
_WORKSPACE_BYTES = 32 << 20  # at most; what torch allows itself on Hopper
_NUM_ALGORITHMS = 8  # asked for at once, the fastest first
_MAX_TRIED_ROWS = 4096  # m beyond which the search for an algorithm ends
_NOT_SUPPORTED = 15

_SUCCESS = 0  # cublasStatus_t
_STATUS = {
    1: "not initialized",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    _NOT_SUPPORTED: "not supported",
}
_COMPUTE_32F = 68  # cublasComputeType_t
_OP_N, _OP_T = 0, 1  # cublasOperation_t
_R_32F, _R_16BF, _R_8F_E4M3 = 0, 14, 28  # cudaDataType
_DESC_TRANSA, _DESC_TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER = 17, 18
_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE = 31, 32
_SCALE_VEC128_32F, _SCALE_BLK128X128_32F = 4, 5  # cublasLtMatmulMatrixScale_t
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_PREF_MIN_ALIGNMENT_BYTES = (5, 6, 7, 8)  # of A, B, C, D
_REDUCTION_SCHEME_NONE = 0  # cublasLtReductionScheme_t
_ALGO_CONFIG_SPLITK_NUM, _ALGO_CONFIG_REDUCTION_SCHEME = 2, 3  # cublasLtMatmulAlgoConfigAttributes_t

_Layout = c_uint64 * 8  # cublasLtMatrixLayoutOpaque_t
_Descriptor = c_uint64 * 32  # cublasLtMatmulDescOpaque_t
_Preference = c_uint64 * 8  # cublasLtMatmulPreferenceOpaque_t
_AlgorithmData = c_uint64 * 8  # cublasLtMatmulAlgo_t
_TYPES = {torch.float32: _R_32F, torch.bfloat16: _R_16BF}
_ALPHA, _BETA = c_float(1.0), c_float(0.0)
_ONE, _ZERO = addressof(_ALPHA), addressof(_BETA)


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _AlgorithmData),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Kept(NamedTuple):
    """An algorithm for cublasLtMatmul: where it is, what it needs, and the memory that holds it."""

    address: int
    workspace_bytes: int
    memory: Any


# -------------------------------------------------------------------------------------------------------- the two GEMMs
def rows(a: RaggedFp8Rows, b: Fp8Tiles, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """[R, N]; arguments are checked already, no matrix is empty, N is a multiple of 16.

    As in `expert_gemms.scaled_mm_rows`, up to 3 rows too many fall on rows that the next experts write later.
    """
    _, n, k = b.codes.shape
    out = torch.empty((groups.num_rows + ROW_MULTIPLE - 1, n), dtype=out_dtype, device=a.codes.device)
    operands = [aligned(a.codes), aligned(a.scales), aligned(b.codes), b.scales]
    at_a, at_a_scales, at_b, at_b_scales, at_out = (x.data_ptr() for x in (*operands, out))
    a_scales_row, b_scales_step = k // FP8_BLOCK * 4, b.scales.stride(0) * 4
    out_row = n * out.element_size()
    with torch.cuda.device_of(out):
        gemm = _Gemm(out, _SCALE_BLK128X128_32F)
        for expert, start, _, padded_start, m in groups.spans(ROW_MULTIPLE):
            a_e, a_scales_e = at_a + padded_start * k, at_a_scales + padded_start * a_scales_row
            b_e, b_scales_e = at_b + expert * n * k, at_b_scales + expert * b_scales_step
            gemm.run((m, n, k), (a_e, a_scales_e), (b_e, b_scales_e), at_out + start * out_row)
    return out.narrow(0, 0, groups.num_rows)


def wgrad(a: Fp8Cols, b: Fp8Cols, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """[E, M, N]; arguments are checked already, no matrix is empty, M and N are multiples of 4 and of 16."""
    m, n = a.scales.shape[1], b.scales.shape[1]
    out = empty_wgrad(a, b, groups, out_dtype)
    operands = [aligned(x) for x in (a.codes, a.scales, b.codes, b.scales)]
    at_a, at_a_scales, at_b, at_b_scales, at_out = (x.data_ptr() for x in (*operands, out))
    out_step = m * n * out.element_size()
    with torch.cuda.device_of(out):
        gemm = _Gemm(out, _SCALE_VEC128_32F)
        for expert, _, _, first, k in groups.spans(FP8_BLOCK):
            block = first // FP8_BLOCK
            a_e, a_scales_e = at_a + first * m, at_a_scales + block * m * 4
            b_e, b_scales_e = at_b + first * n, at_b_scales + block * n * 4
            gemm.run((m, n, k), (a_e, a_scales_e), (b_e, b_scales_e), at_out + expert * out_step)
    return out


# --------------------------------------------------------------------------------------------------------------- a call
_Kind = tuple[int, int, int]  # device, mode of b's scales, type of out
_Shape = tuple[int, int, int]  # m, n, k
_rounded_algorithms: dict[tuple[_Kind, _Shape], _Kept] = {}  # by m rounded up
_exact_algorithms: dict[tuple[_Kind, _Shape], _Kept] = {}  # where that of the rounded m was refused


class _Gemm:
    """Products into one tensor, one after another on the current stream of its device, which is the current one."""

    def __init__(self, out: Tensor, b_scale_mode: int) -> None:
        self._library = library()
        self._handle, self._stream = handle_and_stream()
        self._out_type = _TYPES[out.dtype]
        self._kind = (out.device.index or 0, b_scale_mode, self._out_type)
        self._descriptor = _Descriptor()
        self._at = addressof(self._descriptor)
        self._call("cublasLtMatmulDescInit_internal", self._at, sizeof(self._descriptor), _COMPUTE_32F, _R_32F)
        # A and B of cuBLASLt are our b and a.
        for attribute, value in (
            (_DESC_TRANSA, _OP_T),
            (_DESC_TRANSB, _OP_N),
            (_DESC_A_SCALE_MODE, b_scale_mode),
            (_DESC_B_SCALE_MODE, _SCALE_VEC128_32F),
        ):
            self._set(attribute, c_int32(value))
        self._scales = c_void_p(), c_void_p()  # of b and a
        self._at_scales = [addressof(scale) for scale in self._scales]
        self._set_attribute = self._library.cublasLtMatmulDescSetAttribute
        self._layouts = [_Layout() for _ in range(3)]  # of b, a and out
        self._at_layouts = [addressof(layout) for layout in self._layouts]
        self._shape: _Shape = (0, 0, 0)  # of the layouts
        self._laid_out = [(0, 0, 0)] * 3
        self._workspace = torch.empty(0, dtype=torch.uint8, device=out.device)

    def run(self, shape: _Shape, a: tuple[int, int], b: tuple[int, int], out: int) -> None:
        """Launch out[m, n] = a[m, k] @ b[n, k].T; operands: the addresses of codes and of scales.

        Raises:
            RuntimeError: where cuBLASLt has no algorithm, or fails.
        """
        if shape != self._shape:
            self._lay_out(shape)
        self._scales[0].value, self._scales[1].value = b[1], a[1]
        status = self._set_attribute(self._at, _DESC_A_SCALE_POINTER, self._at_scales[0], 8)
        status |= self._set_attribute(self._at, _DESC_B_SCALE_POINTER, self._at_scales[1], 8)
        _check("cublasLtMatmulDescSetAttribute", status)
        key = self._kind, shape
        algorithm = _exact_algorithms.get(key) or self._of_rounded(shape)
        if self._matmul(algorithm, a[0], b[0], out) != _SUCCESS:
            # Not for this m, or not for addresses that are multiples of 16 bytes alone.
            algorithm = _exact_algorithms[key] = self._find(shape, alignment=16)
            _check("cublasLtMatmul", self._matmul(algorithm, a[0], b[0], out))

    def _matmul(self, algorithm: _Kept, a: int, b: int, out: int) -> int:
        if algorithm.workspace_bytes > len(self._workspace):
            self._workspace = self._workspace.new_empty(algorithm.workspace_bytes)
        at_b, at_a, at_out = self._at_layouts
        scaled = (self._handle, self._at, _ONE, b, at_b, a, at_a, _ZERO, None, at_out, out, at_out)
        workspace = self._workspace.data_ptr(), len(self._workspace)
        status: int = self._library.cublasLtMatmul(*scaled, algorithm.address, *workspace, self._stream)
        return status

    def _lay_out(self, shape: _Shape) -> None:
        """Give the layouts a shape. By columns, b.T is [k, n], a.T is [k, m] and out.T is [n, m], without gaps."""
        m, n, k = self._shape = shape
        for i, layout in enumerate(((_R_8F_E4M3, k, n), (_R_8F_E4M3, k, m), (self._out_type, n, m))):
            if layout != self._laid_out[i]:
                self._laid_out[i] = layout
                _, height, _ = layout
                self._call("cublasLtMatrixLayoutInit_internal", self._at_layouts[i], sizeof(_Layout), *layout, height)

    def _of_rounded(self, shape: _Shape) -> _Kept:
        """The algorithm for m rounded up: to a power of two below 128, to a multiple of 128 above."""
        m, n, k = shape
        rounded = 1 << (m - 1).bit_length() if m < FP8_BLOCK else round_up(m, FP8_BLOCK), n, k
        key = self._kind, rounded
        found = _rounded_algorithms.get(key)
        if found is None:
            self._lay_out(rounded)
            found = _rounded_algorithms[key] = self._find(rounded)
            self._lay_out(shape)
        return found

    def _find(self, shape: _Shape, *, alignment: int | None = None) -> _Kept:
        """The fastest algorithm by cuBLASLt's heuristic that does not split K; the layouts have this shape already.

        Where K is long and m small the heuristic offers none; then the best that splits is told not to, and where none
        can be, the algorithm for twice as many rows is taken.

        alignment: of all addresses, in bytes; None: cuBLASLt's 256, as torch leaves it. `cublasLtMatmul` looks itself.
        """
        for result in self._candidates(alignment, may_split=False):
            algorithm = _AlgorithmData(*result.algorithm)
            if self._num_splits(algorithm) <= 1:
                return _Kept(addressof(algorithm), result.workspace_bytes, algorithm)
        for result in self._candidates(alignment, may_split=True):
            algorithm = _AlgorithmData(*result.algorithm)
            workspace_bytes = self._unsplit(algorithm)
            if workspace_bytes is not None:
                return _Kept(addressof(algorithm), workspace_bytes, algorithm)
        m, n, k = shape
        if m >= _MAX_TRIED_ROWS:
            raise RuntimeError(f"cublaslt: cuBLASLt has no algorithm without split K for n, k = {n}, {k} at any m")
        self._lay_out((2 * m, n, k))
        found = self._find((2 * m, n, k), alignment=alignment)
        self._lay_out(shape)
        return found

    def _candidates(self, alignment: int | None, *, may_split: bool) -> list[Any]:
        """What the heuristic offers, the fastest first."""
        preference = _Preference()
        at = addressof(preference)
        self._call("cublasLtMatmulPreferenceInit_internal", at, sizeof(preference))
        values: list[tuple[int, Any]] = [(_PREF_MAX_WORKSPACE_BYTES, c_uint64(_WORKSPACE_BYTES))]
        if not may_split:
            values.append((_PREF_REDUCTION_SCHEME_MASK, c_uint32(_REDUCTION_SCHEME_NONE)))
        if alignment is not None:
            values += [(attribute, c_uint32(alignment)) for attribute in _PREF_MIN_ALIGNMENT_BYTES]
        for attribute, value in values:
            self._call("cublasLtMatmulPreferenceSetAttribute", at, attribute, addressof(value), sizeof(value))
        results, count = (_Result * _NUM_ALGORITHMS)(), c_int()
        at_b, at_a, at_out = self._at_layouts
        problem = (self._handle, self._at, at_b, at_a, at_out, at_out, at)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *problem, _NUM_ALGORITHMS, addressof(results), addressof(count)
        )
        if status == _NOT_SUPPORTED:
            return []
        _check("cublasLtMatmulAlgoGetHeuristic", status)
        return [result for result in results[: count.value] if result.status == _SUCCESS]

    def _unsplit(self, algorithm: Any) -> int | None:
        """Have an algorithm not split K; the bytes of workspace that it then needs, None if it cannot."""
        for attribute, value in (
            (_ALGO_CONFIG_SPLITK_NUM, c_int32(1)),
            (_ALGO_CONFIG_REDUCTION_SCHEME, c_uint32(_REDUCTION_SCHEME_NONE)),
        ):
            arguments = addressof(algorithm), attribute, addressof(value), sizeof(value)
            if self._library.cublasLtMatmulAlgoConfigSetAttribute(*arguments) != _SUCCESS:
                return None
        result = _Result()
        at_b, at_a, at_out = self._at_layouts
        problem = (self._handle, self._at, at_b, at_a, at_out, at_out, addressof(algorithm), addressof(result))
        is_supported = self._library.cublasLtMatmulAlgoCheck(*problem) == _SUCCESS
        return result.workspace_bytes if is_supported and result.workspace_bytes <= _WORKSPACE_BYTES else None

    def _num_splits(self, algorithm: Any) -> int:
        splits, written = c_int32(), c_size_t()
        values = addressof(splits), sizeof(splits), addressof(written)
        self._call("cublasLtMatmulAlgoConfigGetAttribute", addressof(algorithm), _ALGO_CONFIG_SPLITK_NUM, *values)
        return splits.value

    def _set(self, attribute: int, value: Any) -> None:
        self._call("cublasLtMatmulDescSetAttribute", self._at, attribute, addressof(value), sizeof(value))

    def _call(self, name: str, *arguments: int) -> None:
        _check(name, getattr(self._library, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"cublaslt: {name} returned {status}, {_STATUS.get(status, 'unknown')}")


# ---------------------------------------------------------------------------------------------------------- the library
@lru_cache
def library() -> Any:
    """The libcublasLt that torch has loaded, with the arguments of what is called.

    Raises:
        OSError: where torch has loaded none.
    """
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    loaded = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    at, size = c_void_p, c_size_t
    loaded.cublasLtGetVersion.restype = size
    for function, arguments in {
        "cublasLtGetVersion": (),
        "cublasLtMatrixLayoutInit_internal": (at, size, c_int, c_uint64, c_uint64, c_int64),
        "cublasLtMatmulDescInit_internal": (at, size, c_int, c_int),
        "cublasLtMatmulDescSetAttribute": (at, c_int, at, size),
        "cublasLtMatmulPreferenceInit_internal": (at, size),
        "cublasLtMatmulPreferenceSetAttribute": (at, c_int, at, size),
        "cublasLtMatmulAlgoConfigGetAttribute": (at, c_int, at, size, at),
        "cublasLtMatmulAlgoConfigSetAttribute": (at, c_int, at, size),
        "cublasLtMatmulAlgoCheck": (at, at, at, at, at, at, at, at),
        "cublasLtMatmulAlgoGetHeuristic": (at, at, at, at, at, at, at, c_int, at, at),
        # handle, descriptor, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm,
        # workspace, its bytes, stream
        "cublasLtMatmul": (at,) * 14 + (size, at),
    }.items():
        getattr(loaded, function).argtypes = arguments
    return loaded


@lru_cache
def unavailable() -> str | None:
    """Why these GEMMs cannot be called, or None: the library of torch is missing, or older than 12.9."""
    try:
        version = library().cublasLtGetVersion()
    except (OSError, AttributeError):
        return "torch has not loaded libcublasLt, or not one of CUDA 12.9 or newer"
    if version < MIN_VERSION:
        return f"cuBLASLt is of version {version // 10000}.{version // 100 % 100}, needed 12.9 or newer"
    return None


def handle_and_stream() -> tuple[int, int]:
    """torch's cuBLAS handle, which is one of cuBLASLt, and the current stream, of the current device."""
    return torch.cuda.current_blas_handle(), torch.cuda.current_stream().cuda_stream
