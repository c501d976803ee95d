"""Tokens to the rows of their experts and back.

T tokens, K choices a token, R = T * K routed rows in the order of their experts, E experts, H columns.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mxsim.moe.library import not_differentiable, operator

_MAX_EXPERTS = 2**15 - 1  # arange(num_experts + 1) in int16


class Permutation(NamedTuple):
    """Which row each choice of each token has: rows sorted by expert, those of one expert by token.

    All three lie on the device of the choices; making them waits for nothing there.
    """

    group_sizes_E: Int64[Tensor, " E"]  # rows of each expert
    row_token_R: Int64[Tensor, " R"]  # token of each row
    row_of_TK: Int64[Tensor, "T K"]  # row of choice k of token t

    @classmethod
    def from_topk(cls, topk_ids_TK: Int64[Tensor, "T K"], num_experts: int) -> "Permutation":
        """Stable sort of the choices (t, k), in row-major order, by expert.

        No tokens give no rows; an expert that nobody chose has group size 0.

        Args:
            topk_ids_TK: experts, 0 to num_experts - 1. CUDA tensors are not checked for that: with other ids the group
                sizes mean nothing, the rows still are a permutation.

        Raises:
            TypeError: unless the ids are int64 or int32.
            ValueError: for ids that are no matrix with a column at least, for num_experts outside 1 to 32767, and on
                the CPU for an id that is no expert's.
        """
        return cls(*_permutation(topk_ids_TK, num_experts))


def permute(x_TH: Float[Tensor, "T H"], permutation: Permutation) -> Float[Tensor, "R H"]:
    """x[row_token_R]: the token of every row. Backward: `unpermute_sum` of the gradient.

    Raises:
        TypeError: for a dtype that is no float (codes: `permute_rows`).
        ValueError: for a shape or device that is not the permutation's.
    """
    return _permute(x_TH, permutation.row_token_R, permutation.row_of_TK)


def unpermute_sum(y_RH: Float[Tensor, "R H"], permutation: Permutation) -> Float[Tensor, "T H"]:
    """Sum over k of y[row_of_TK[t, k]], k ascending, in float32 and rounded once; float64 in float64.

    The same bits on every device, but for the payload of a NaN. Backward: `permute` of the gradient.

    Raises:
        TypeError: for a dtype that is no float.
        ValueError: for a shape or device that is not the permutation's.
    """
    return _gather_sum(y_RH, permutation.row_of_TK, permutation.row_token_R)


def permute_rows(rows: Tensor, permutation: Permutation) -> Tensor:
    """rows[row_token_R] of codes or scales [T, ...], any dtype, every byte as it was; no gradient."""
    if rows.dim() < 1 or rows.shape[0] != permutation.row_of_TK.shape[0]:
        raise ValueError(
            f"permute_rows: rows has shape {tuple(rows.shape)}, needed {permutation.row_of_TK.shape[0]} rows, "
            "the permutation's tokens"
        )
    rows = rows.detach()
    if rows.itemsize > 1:
        return rows.index_select(0, permutation.row_token_R)
    return rows.view(torch.uint8).index_select(0, permutation.row_token_R).view(rows.dtype)


def permute_weights(weights_TK: Float[Tensor, "T K"], permutation: Permutation) -> Float[Tensor, " R"]:
    """The weight of every row: result[row_of_TK[t, k]] = weights[t, k]. Differentiable.

    Raises:
        ValueError: for a shape that is not the permutation's.
    """
    if weights_TK.shape != permutation.row_of_TK.shape:
        raise ValueError(
            f"permute_weights: weights has shape {tuple(weights_TK.shape)}, needed {tuple(permutation.row_of_TK.shape)}"
        )
    flat = weights_TK.reshape(-1)
    return torch.zeros_like(flat).index_copy(0, permutation.row_of_TK.reshape(-1), flat)


# ------------------------------------------------------------------------------------------------- implementations
def _permutation_cpu(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_ids(topk_ids, num_experts)
    outside = (topk_ids < 0) | (topk_ids >= num_experts)
    if bool(outside.any()):
        raise ValueError(
            f"Permutation: topk_ids holds {int(topk_ids[outside][0])}, needed experts 0 to {num_experts - 1}"
        )
    return _sorted_by_expert(topk_ids, num_experts)


def _permutation_cuda(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_ids(topk_ids, num_experts)
    return _sorted_by_expert(topk_ids, num_experts)


def _sorted_by_expert(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    device = topk_ids.device
    # A radix sort takes a pass for each byte of its keys.
    sorted_ids_R, order_R = topk_ids.reshape(-1).to(torch.int16).sort(stable=True)
    # Where each expert's rows start: torch.bincount would wait for the device.
    starts = torch.searchsorted(sorted_ids_R, torch.arange(num_experts + 1, dtype=torch.int16, device=device))
    row_of_R = torch.empty_like(order_R)
    row_of_R[order_R] = torch.arange(len(order_R), device=device)
    return starts.diff(), order_R // topk_ids.shape[1], row_of_R.view(topk_ids.shape)


def _permutation_fake(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_ids(topk_ids, num_experts)
    return (
        topk_ids.new_empty((num_experts,), dtype=torch.int64),
        topk_ids.new_empty((topk_ids.numel(),), dtype=torch.int64),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int64),
    )


def _check_ids(topk_ids: Tensor, num_experts: int) -> None:
    if topk_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"Permutation: topk_ids has dtype {topk_ids.dtype}, needed int64 or int32")
    if topk_ids.dim() != 2 or topk_ids.shape[1] < 1:
        raise ValueError(f"Permutation: topk_ids has shape {tuple(topk_ids.shape)}, needed tokens by 1 choice or more")
    if not 1 <= num_experts <= _MAX_EXPERTS:
        raise ValueError(f"Permutation: num_experts is {num_experts}, needed 1 to {_MAX_EXPERTS}")


def _check(op: str, name: str, x: Tensor, num_rows: int, index: Tensor) -> None:
    if not x.is_floating_point() or x.itemsize < 2:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, needed bfloat16, float16, float32 or float64")
    if x.dim() != 2 or x.shape[0] != num_rows:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, needed {num_rows} rows, the permutation's")
    if x.device != index.device:
        raise ValueError(f"{op}: {name} is on {x.device}, needed {index.device}, where the permutation is")


def _permute_impl(x: Tensor, row_token: Tensor, row_of: Tensor) -> Tensor:
    _check("permute", "x", x, row_of.shape[0], row_of)
    return x.index_select(0, row_token)


def _permute_fake(x: Tensor, row_token: Tensor, row_of: Tensor) -> Tensor:
    _check("permute", "x", x, row_of.shape[0], row_of)
    return x.new_empty((row_token.shape[0], x.shape[1]))


def _gather_sum_cpu(y: Tensor, row_of: Tensor, row_token: Tensor) -> Tensor:
    _check("unpermute_sum", "y", y, row_token.shape[0], row_of)
    first, *others = row_of.unbind(1)
    total = y.index_select(0, first)
    total = total if y.dtype == torch.float64 else total.float()
    for rows in others:
        total += y.index_select(0, rows)
    return total.to(y.dtype)


def _gather_sum_cuda(y: Tensor, row_of: Tensor, row_token: Tensor) -> Tensor:
    _check("unpermute_sum", "y", y, row_token.shape[0], row_of)
    from mxsim.moe import triton_gather_sum

    return triton_gather_sum.gather_sum(y.contiguous(), row_of.contiguous())


def _gather_sum_fake(y: Tensor, row_of: Tensor, row_token: Tensor) -> Tensor:
    _check("unpermute_sum", "y", y, row_token.shape[0], row_of)
    return y.new_empty((row_of.shape[0], y.shape[1]))


def _save_indices(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    row_token, row_of = ctx.saved_tensors
    return _gather_sum(grad, row_of, row_token), None, None


def _gather_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    row_of, row_token = ctx.saved_tensors
    return _permute(grad, row_token, row_of), None, None


_permutation = operator(
    "moe_permutation(Tensor topk_ids, SymInt num_experts) -> (Tensor, Tensor, Tensor)",
    cpu=_permutation_cpu,
    cuda=_permutation_cuda,
    fake=_permutation_fake,
    backward=not_differentiable("Permutation"),
)
_permute = operator(
    "moe_permute(Tensor x, Tensor row_token, Tensor row_of) -> Tensor",
    cpu=_permute_impl,
    cuda=_permute_impl,
    fake=_permute_fake,
    backward=_permute_backward,
    setup_context=_save_indices,
)
_gather_sum = operator(
    "moe_gather_sum(Tensor y, Tensor row_of, Tensor row_token) -> Tensor",
    cpu=_gather_sum_cpu,
    cuda=_gather_sum_cuda,
    fake=_gather_sum_fake,
    backward=_gather_sum_backward,
    setup_context=_save_indices,
)
