"""The GEMMs of a layer of experts over ragged groups, in FP8 or with plain tensors: one seam, several backends.

    grouped_gemm    y_e = a_e @ b_e.T     Fprop and Dgrad
    grouped_wgrad   g_e = a_e.T @ b_e     over the rows of the expert

FP8 operands: activations and gradients in blocks of 1x128, weights in tiles of 128x128. `Gemm` chooses who computes;
all but DEQUANTIZED give the same bits (NUMERICS 9; only SCALED_MM may split K). Plain tensors (the BF16 recipe) have
one way each: `torch.nn.functional.grouped_mm` for bfloat16 on CUDA, else a matmul an expert, which autograd can
differentiate.

Shapes: R rows, the sum of the groups' sizes; E experts.
"""

from enum import StrEnum
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mxsim.kernels import Fp8Cols, Fp8Tiles, RaggedFp8Rows
from mxsim.moe import cublaslt, expert_gemms
from mxsim.moe.expert_gemms import SCALED_MM_COLUMNS
from mxsim.moe.gemm_record import GemmRecord, record_gemms, record_rows, record_wgrad
from mxsim.moe.groups import Groups
from mxsim.moe.ragged import check_cols, check_device, check_rows, check_tiles

_OUTPUTS = (torch.bfloat16, torch.float32)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_HOPPER_CAPABILITY = (9, 0)
_SCALED_MM_ROWS = 4  # scaled_mm takes m in multiples of it


class Gemm(StrEnum):
    """Who computes the FP8 GEMMs.

    AUTO: on a device of compute capability 9.0 CUBLASLT for large experts and TRITON for small ones, or what there is
        (SCALED_MM, at last DEQUANTIZED); DEQUANTIZED on any other and on the CPU.
    CUBLASLT: the GEMM of `scaled_mm` for each expert, by cuBLASLt itself, which is called with an algorithm found
        before; never a split K. Compute capability 9.0.
    SCALED_MM: `torch.nn.functional.scaled_mm` for each expert, public and slow to launch; compute capability 9.0.
    TRITON: one launch for all experts; CUDA devices of compute capability 8.9 and more.
    DEQUANTIZED: exact operands in FP32, an FP32 matmul for each expert: FP32 sums where Hopper keeps 14 bits.
    HOPPER: Hopper's arithmetic in ordinary instructions (`kernels.fp8_gemm_emulated`), slow; CPU too.
    """

    AUTO = "auto"
    CUBLASLT = "cublaslt"
    SCALED_MM = "scaled_mm"
    TRITON = "triton"
    DEQUANTIZED = "dequantized"
    HOPPER = "hopper"


# ------------------------------------------------------------------------------------------------------- the two GEMMs
def grouped_gemm(
    a: RaggedFp8Rows | Float[Tensor, "R K"],
    b: Fp8Tiles | Float[Tensor, "E N K"],
    groups: Groups,
    *,
    gemm: Gemm = Gemm.AUTO,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "R N"]:
    """y_e = a_e @ b_e.T for the rows of every expert e.

    Args:
        a: FP8 rows in the ragged form of the default row multiple, or a tensor [R, K].
        b: FP8 tiles [E, N, K], or a tensor [E, N, K] of a's dtype, of any strides.
        gemm: who multiplies FP8 operands; of no effect on tensors.
        out_dtype: bfloat16 (None) or float32 for FP8 operands; None: a's for tensors.

    Raises:
        TypeError: for operands of other types or dtypes.
        ValueError: for shapes, devices or groups that do not belong together, or a backend that cannot compute them.
    """
    op = "grouped_gemm"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _check_plain(op, a, b, (2, 3), groups)
        if b.shape[0] != groups.num_groups:
            raise ValueError(f"{op}: b has {b.shape[0]} matrices, needed {groups.num_groups}, one for each group")
        if a.shape[1] != b.shape[2]:
            raise ValueError(f"{op}: b has rows of {b.shape[2]} elements, needed {a.shape[1]}, as in a")
        return _plain_rows(a, b, groups).to(out_dtype or a.dtype)
    if not isinstance(a, RaggedFp8Rows) or not isinstance(b, Fp8Tiles):
        raise TypeError(
            f"{op}: a and b are {type(a).__name__} and {type(b).__name__}, needed RaggedFp8Rows and "
            "Fp8Tiles, or tensors"
        )
    out_dtype = _out_dtype(op, out_dtype)
    a = check_rows(op, a, groups)
    b = check_tiles(op, b, groups.num_groups, a.codes.shape[1])
    device = a.codes.device
    check_device(op, "b", b.codes, a.codes)
    shape = (groups.num_rows, b.codes.shape[1])
    if 0 in shape or a.codes.shape[1] == 0:
        return torch.zeros(shape, dtype=out_dtype, device=device)

    chosen = _choose(op, gemm, device, groups, fits_scaled_mm=shape[1] % SCALED_MM_COLUMNS == 0)
    if chosen is Gemm.CUBLASLT:
        out = cublaslt.rows(a, b, groups, out_dtype)
    elif chosen is Gemm.SCALED_MM:
        out = expert_gemms.scaled_mm_rows(a, b, groups, out_dtype)
    elif chosen is Gemm.TRITON:
        from mxsim.moe import triton_gemm

        out = triton_gemm.rows(a, b, groups, out_dtype)
    elif chosen is Gemm.HOPPER:
        out = expert_gemms.emulated_rows(a, b, groups, out_dtype)
    else:
        out = expert_gemms.dequantized_rows(a, b, groups, out_dtype)
    record_rows(a, b, groups, out)
    return out


def grouped_wgrad(
    a: Fp8Cols | Float[Tensor, "R M"],
    b: Fp8Cols | Float[Tensor, "R N"],
    groups: Groups,
    *,
    gemm: Gemm = Gemm.AUTO,
    out_dtype: torch.dtype | None = None,
) -> Float[Tensor, "E M N"]:
    """g_e = a_e.T @ b_e over the rows of every expert e; zeros for an expert without rows.

    Args:
        a: FP8 columns in the ragged form, or a tensor [R, M].
        b: FP8 columns in the ragged form, or a tensor [R, N] of a's dtype.
        gemm, out_dtype: as in `grouped_gemm`.

    Raises:
        TypeError, ValueError: as in `grouped_gemm`.
    """
    op = "grouped_wgrad"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _check_plain(op, a, b, (2, 2), groups)
        if b.shape[0] != a.shape[0]:
            raise ValueError(f"{op}: b has {b.shape[0]} rows, needed {a.shape[0]}, as in a")
        return _plain_wgrad(a, b, groups).to(out_dtype or a.dtype)
    if not isinstance(a, Fp8Cols) or not isinstance(b, Fp8Cols):
        raise TypeError(
            f"{op}: a and b are {type(a).__name__} and {type(b).__name__}, needed Fp8Cols of both, or tensors"
        )
    out_dtype = _out_dtype(op, out_dtype)
    a, b = check_cols(op, "a", a, groups), check_cols(op, "b", b, groups)
    device = a.codes.device
    check_device(op, "b", b.codes, a.codes)
    m, n = a.scales.shape[1], b.scales.shape[1]
    if 0 in (groups.num_rows, m, n):
        return torch.zeros((groups.num_groups, m, n), dtype=out_dtype, device=device)

    fits = m % _SCALED_MM_ROWS == 0 and n % SCALED_MM_COLUMNS == 0
    chosen = _choose(op, gemm, device, groups, fits_scaled_mm=fits)
    if chosen is Gemm.CUBLASLT:
        out = cublaslt.wgrad(a, b, groups, out_dtype)
    elif chosen is Gemm.SCALED_MM:
        out = expert_gemms.scaled_mm_wgrad(a, b, groups, out_dtype)
    elif chosen is Gemm.TRITON:
        from mxsim.moe import triton_gemm

        out = triton_gemm.wgrad(a, b, groups, out_dtype)
    elif chosen is Gemm.HOPPER:
        out = expert_gemms.emulated_wgrad(a, b, groups, out_dtype)
    else:
        out = expert_gemms.dequantized_wgrad(a, b, groups, out_dtype)
    record_wgrad(a, b, groups, out)
    return out


# ------------------------------------------------------------------------------------------------------- which backend
# On an H200 cuBLASLt is faster in 4 of 6 GEMMs with 64 experts of 512 rows, Triton in most with 256 of 128
# (benchmarks/probe_grouped_gemm.py): a launch for each expert is bound by the host where experts are small.
_CUBLASLT_MEAN_ROWS = 512  # of the experts that have any
_PER_EXPERT = (Gemm.CUBLASLT, Gemm.SCALED_MM)


def _choose(op: str, gemm: Gemm, device: torch.device, groups: Groups, *, fits_scaled_mm: bool) -> Gemm:
    """The backend; what was asked for, if it can compute this."""
    try:
        gemm = Gemm(gemm)
    except ValueError:
        raise ValueError(f"{op}: gemm is {gemm!r}, needed one of {', '.join(Gemm)}") from None
    capability = _capability(device)
    if gemm is Gemm.AUTO:
        return _fastest(groups, fits_scaled_mm) if capability == _HOPPER_CAPABILITY else Gemm.DEQUANTIZED
    if gemm in _PER_EXPERT:
        if capability != _HOPPER_CAPABILITY:
            raise ValueError(f"{op}: gemm is {gemm}, which needs a device of compute capability 9.0, not {device}")
        if not fits_scaled_mm:
            raise ValueError(
                f"{op}: gemm is {gemm}, which takes results whose columns are a multiple of {SCALED_MM_COLUMNS} "
                f"(and in grouped_wgrad rows a multiple of {_SCALED_MM_ROWS})"
            )
    if gemm is Gemm.CUBLASLT and (reason := cublaslt.unavailable()):
        raise ValueError(f"{op}: gemm is cublaslt, but {reason}")
    if gemm is Gemm.TRITON:
        if not _has_triton():
            raise ValueError(f"{op}: gemm is triton, which is not installed; torch for CUDA brings it")
        if capability < (8, 9):
            raise ValueError(
                f"{op}: gemm is triton, which needs a device of compute capability 8.9 or more, not {device}"
            )
    return gemm


def _fastest(groups: Groups, fits_scaled_mm: bool) -> Gemm:
    """On a device of compute capability 9.0."""
    has_cublaslt = fits_scaled_mm and cublaslt.unavailable() is None
    is_large = groups.num_rows >= _CUBLASLT_MEAN_ROWS * sum(size > 0 for size in groups.sizes)
    if has_cublaslt and (is_large or not _has_triton()):
        return Gemm.CUBLASLT
    if _has_triton():
        return Gemm.TRITON
    return Gemm.SCALED_MM if fits_scaled_mm else Gemm.DEQUANTIZED


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _out_dtype(op: str, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None and out_dtype not in _OUTPUTS:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, needed bfloat16 or float32 for FP8 operands")
    return out_dtype or torch.bfloat16


# ------------------------------------------------------------------------------------------------------- plain tensors
def _check_plain(op: str, a: Tensor, b: Tensor, axes: tuple[int, int], groups: Groups) -> None:
    if a.dtype not in _FLOATS:
        raise TypeError(f"{op}: a has dtype {a.dtype}, needed one of {', '.join(str(d) for d in _FLOATS)}")
    if b.dtype != a.dtype:
        raise TypeError(f"{op}: b has dtype {b.dtype}, needed {a.dtype}, as a has")
    check_device(op, "b", b, a)
    for name, x, count in (("a", a, axes[0]), ("b", b, axes[1])):
        if x.dim() != count:
            raise ValueError(f"{op}: {name} has {x.dim()} axes, needed {count}")
    if a.shape[0] != groups.num_rows:
        raise ValueError(f"{op}: a has {a.shape[0]} rows, needed {groups.num_rows}, the sum of the groups")


def _plain_rows(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    if _fits_grouped_mm(a, b) and groups.num_rows:
        return torch.nn.functional.grouped_mm(a, b.transpose(1, 2), offs=groups.ends)
    if groups.num_groups == 0:
        return a.new_zeros((0, b.shape[1]))
    return torch.cat([matmul(a_e, b_e.t()) for a_e, b_e in zip(a.split(groups.sizes), b, strict=True)])


def _plain_wgrad(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    if _fits_grouped_mm(a, b) and groups.num_rows:
        out = torch.nn.functional.grouped_mm(a.t(), b, offs=groups.ends)
        empty = [expert for expert, size in enumerate(groups.sizes) if size == 0]
        return out.index_fill_(0, groups.on_device(empty).long(), 0) if empty else out
    if groups.num_groups == 0:
        return a.new_zeros((0, a.shape[1], b.shape[1]))
    return torch.stack(
        [matmul(a_e.t(), b_e) for a_e, b_e in zip(a.split(groups.sizes), b.split(groups.sizes), strict=True)]
    )


_CPU_HAS_BF16 = bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def matmul(a: Float[Tensor, "*m K"], b: Float[Tensor, "K N"]) -> Float[Tensor, "*m N"]:
    """a @ b in their dtype. bfloat16 on a CPU without instructions for it: by FP32 products and sums, rounded once.

    That is what torch computes there, too, some 20 times slower.
    """
    if a.dtype is torch.bfloat16 and a.device.type == "cpu" and not _CPU_HAS_BF16:
        product: Tensor = _MatmulThroughFp32.apply(a, b)
        return product
    return a @ b


class _MatmulThroughFp32(torch.autograd.Function):
    """Keeps the bfloat16 operands, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        da = matmul(dy, b.t()) if needs_a else None
        db = matmul(a.reshape(-1, a.shape[-1]).t(), dy.reshape(-1, dy.shape[-1])) if needs_b else None
        return da, db


def _fits_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """Whether torch has a grouped GEMM for them: bfloat16, rows (or columns) of whole 16 bytes one after another."""
    if a.dtype is not torch.bfloat16 or a.device.type != "cuda":
        return False
    return all(
        x.data_ptr() % 16 == 0 and 1 in x.stride()[-2:] and all(step == 1 or step % 8 == 0 for step in x.stride())
        for x in (a, b)
    )


__all__ = ["Gemm", "GemmRecord", "grouped_gemm", "grouped_wgrad", "record_gemms"]
