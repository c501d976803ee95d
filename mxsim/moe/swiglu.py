"""SwiGLU, and its backward pass from BF16 or MXFP4.

R rows, F intermediate size; h_R2F has the gate in its first F columns and the up projection in the last F.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mxsim import kernels
from mxsim.kernels import Fp4Rows
from mxsim.kernels.layouts import FP4_BLOCK
from mxsim.moe.library import not_differentiable, operator

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def swiglu(h_R2F: Float[Tensor, "R 2F"], probs_R: Float[Tensor, " R"] | None = None) -> Float[Tensor, "R F"]:
    """a = ((gate * sigmoid(gate)) * up) * p, in that order in float32, rounded once to h's dtype; p = 1 without probs.

    float64 stays float64. Differentiable once; keeps h and probs. The sigmoid is accurate in both tails. gate = -inf
    gives NaN, as in torch's silu.

    Args:
        h_R2F: bfloat16, float16, float32 or float64, any strides.
        probs_R: float32 (float64 beside float64): the routing weight of each row.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes or devices.
    """
    return _swiglu(h_R2F, probs_R)


def swiglu_backward(
    da_RF: Float[Tensor, "R F"], h: Float[Tensor, "R 2F"] | Fp4Rows, probs_R: Float[Tensor, " R"] | None = None
) -> tuple[Float[Tensor, "R 2F"], Float[Tensor, " R"] | None]:
    """(dh, dprobs): with s = sigmoid(gate),

    dgate = da * p * up * s * (1 + gate * (1 - s)),  dup = da * p * gate * s,
    dprobs = sum over F of da * gate * s * up.

    In float32, dh rounded once to da's dtype, dprobs in float32 and summed in a fixed order; float64 stays float64.

    Args:
        da_RF: gradient of swiglu's result, any strides.
        h: what swiglu was given, of da's dtype; or its MXFP4 rows, whose dequantized values are then used.
        probs_R: as given to swiglu; without it dprobs is None.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes or devices.
    """
    if isinstance(h, Fp4Rows):
        dh_R2F, dprobs_R = _swiglu_backward_fp4(da_RF, h.codes, h.scales, probs_R)
    else:
        dh_R2F, dprobs_R = _swiglu_backward(da_RF, h, probs_R)
    return dh_R2F, None if probs_R is None else dprobs_R


# ------------------------------------------------------------------------------------------------- arithmetic in torch
def _forward(h: Tensor, probs: Tensor | None) -> Tensor:
    gate, up = _wide(h).chunk(2, dim=1)
    a = gate * _sigmoid(gate)[0] * up
    return (a if probs is None else a * probs[:, None]).to(h.dtype)


def _backward(da: Tensor, h: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, up = _wide(h).chunk(2, dim=1)
    grad = _wide(da)
    s, one_minus_s = _sigmoid(gate)
    silu = gate * s
    dprobs = (grad * silu * up).sum(1) if probs is not None else grad.new_empty((0,))
    if probs is not None:
        grad = grad * probs[:, None]
    dgate = grad * up * (s * (1 + gate * one_minus_s))
    return torch.cat([dgate, grad * silu], dim=1).to(da.dtype), dprobs


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), 1 - sigmoid(x)): from exp(-|x|), which never overflows."""
    e = torch.exp(-x.abs())
    large = 1 / (1 + e)
    small = e * large
    is_negative = x < 0
    return torch.where(is_negative, small, large), torch.where(is_negative, large, small)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ------------------------------------------------------------------------------------------------- operators
def _check_forward(h: Tensor, probs: Tensor | None) -> None:
    _check_float("swiglu", "h", h)
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"swiglu: h has shape {tuple(h.shape)}, needed rows of an even number of columns")
    _check_probs("swiglu", probs, h.shape[0], h)


def _check_backward(da: Tensor, h: Tensor, probs: Tensor | None) -> None:
    op = "swiglu_backward"
    _check_float(op, "da", da)
    if da.dim() != 2:
        raise ValueError(f"{op}: da has {da.dim()} axes, needed 2")
    if h.dtype != da.dtype:
        raise TypeError(f"{op}: h has dtype {h.dtype}, needed {da.dtype}, as da, or MXFP4 rows")
    _check_like(op, "h", h, (da.shape[0], 2 * da.shape[1]), da)
    _check_probs(op, probs, da.shape[0], da)


def _check_backward_fp4(da: Tensor, codes: Tensor, scales: Tensor, probs: Tensor | None) -> None:
    op = "swiglu_backward"
    _check_float(op, "da", da)
    if da.dim() != 2 or da.dtype == torch.float64:
        raise TypeError(
            f"{op}: da is {da.dtype} of shape {tuple(da.shape)}, needed bfloat16, float16 or float32 [R, F]"
        )
    num_rows, num_columns = da.shape
    if 2 * num_columns % FP4_BLOCK:
        raise ValueError(f"{op}: da has {num_columns} columns, needed a multiple of {FP4_BLOCK // 2} beside MXFP4 rows")
    for name, x, columns in (("codes", codes, num_columns), ("scales", scales, 2 * num_columns // FP4_BLOCK)):
        if x.itemsize != 1:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}, needed uint8")
        _check_like(op, name, x, (num_rows, columns), da)
    _check_probs(op, probs, num_rows, da)


def _check_float(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, needed bfloat16, float16, float32 or float64")


def _check_like(op: str, name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, needed {tuple(shape)}")
    if x.device != like.device:
        raise ValueError(f"{op}: {name} is on {x.device}, needed {like.device}")


def _check_probs(op: str, probs: Tensor | None, num_rows: int, like: Tensor) -> None:
    if probs is None:
        return
    needed = torch.float64 if like.dtype == torch.float64 else torch.float32
    if probs.dtype != needed:
        raise TypeError(f"{op}: probs has dtype {probs.dtype}, needed {needed}")
    _check_like(op, "probs", probs, (num_rows,), like)


def _forward_cpu(h: Tensor, probs: Tensor | None) -> Tensor:
    _check_forward(h, probs)
    return _forward(h, probs)


def _forward_cuda(h: Tensor, probs: Tensor | None) -> Tensor:
    _check_forward(h, probs)
    if h.dtype == torch.float64:
        return _forward(h, probs)
    from mxsim.moe import triton_swiglu

    return triton_swiglu.forward(h.contiguous(), _contiguous(probs))


def _forward_fake(h: Tensor, probs: Tensor | None) -> Tensor:
    _check_forward(h, probs)
    return h.new_empty((h.shape[0], h.shape[1] // 2))


def _backward_cpu(da: Tensor, h: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward(da, h, probs)
    return _backward(da.contiguous(), h.contiguous(), probs)


def _backward_cuda(da: Tensor, h: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward(da, h, probs)
    if h.dtype == torch.float64:
        return _backward(da.contiguous(), h.contiguous(), probs)
    from mxsim.moe import triton_swiglu

    return triton_swiglu.backward(da.contiguous(), h.contiguous(), None, _contiguous(probs))


def _backward_fake(da: Tensor, h: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward(da, h, probs)
    return _backward_results(da, probs)


def _backward_fp4_cpu(da: Tensor, codes: Tensor, scales: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward_fp4(da, codes, scales, probs)
    return _backward(da.contiguous(), kernels.fp4_to_bf16(codes, scales), probs)


def _backward_fp4_cuda(da: Tensor, codes: Tensor, scales: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward_fp4(da, codes, scales, probs)
    from mxsim.moe import triton_swiglu

    codes, scales = codes.view(torch.uint8).contiguous(), scales.view(torch.uint8).contiguous()
    return triton_swiglu.backward(da.contiguous(), codes, scales, _contiguous(probs))


def _backward_fp4_fake(da: Tensor, codes: Tensor, scales: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_backward_fp4(da, codes, scales, probs)
    return _backward_results(da, probs)


def _backward_results(da: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = da.shape
    dprobs_dtype = torch.float64 if da.dtype == torch.float64 else torch.float32
    num_probs = 0 if probs is None else num_rows
    return da.new_empty((num_rows, 2 * num_columns)), da.new_empty((num_probs,), dtype=dprobs_dtype)


def _contiguous(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.contiguous()


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, da: Tensor) -> tuple[Tensor, Tensor | None]:
    return swiglu_backward(da, *ctx.saved_tensors)


_swiglu = operator(
    "moe_swiglu(Tensor h, Tensor? probs) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_cuda,
    fake=_forward_fake,
    backward=_differentiate,
    setup_context=_save,
)
_swiglu_backward = operator(
    "moe_swiglu_backward(Tensor da, Tensor h, Tensor? probs) -> (Tensor, Tensor)",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
    backward=not_differentiable("swiglu_backward"),
)
_swiglu_backward_fp4 = operator(
    "moe_swiglu_backward.fp4(Tensor da, Tensor codes, Tensor scales, Tensor? probs) -> (Tensor, Tensor)",
    cpu=_backward_fp4_cpu,
    cuda=_backward_fp4_cuda,
    fake=_backward_fp4_fake,
    backward=not_differentiable("swiglu_backward"),
)
