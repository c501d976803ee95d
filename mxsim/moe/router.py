"""Which experts a token goes to, and with what weight.

T tokens, H hidden size, E experts, K experts a token (top_k).
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

_SMALLEST_SUM = 2.0**-126  # divides scores that are all zero without giving NaN


class Router(Enum):
    """How logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # DeepSeek-V3: balanced by a bias on the selection, without an auxiliary loss


class Routing(NamedTuple):
    """The experts of each token, best first, their weights, and the scores of all experts."""

    topk_ids_TK: Int64[Tensor, "T K"]
    topk_weights_TK: Float[Tensor, "T K"]
    scores_TE: Float[Tensor, "T E"]


class _Logits(torch.autograd.Function):
    """x @ weight.T in a wide dtype; keeps x and weight as they are, and widens them again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return x_TH.to(wide) @ weight_EH.to(wide).t()

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_TH, weight_EH = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx_TH = dweight_EH = None
        with torch.autocast(grad_TE.device.type, enabled=False):
            if needs_x:
                dx_TH = (grad_TE @ weight_EH.to(grad_TE.dtype)).to(x_TH.dtype)
            if needs_weight:
                dweight_EH = (x_TH.to(grad_TE.dtype).t() @ grad_TE).t().to(weight_EH.dtype)
        return dx_TH, dweight_EH, None


class TopKRouter(nn.Module):
    """scores = f(x @ weight.T); the K best by score + bias are chosen, and weighted by their scores alone.

    SOFTMAX: f is the softmax over the experts; there is no bias. SIGMOID: f is the sigmoid, and `update_bias` moves the
    bias so that experts with many tokens are chosen less often. With normalize the chosen scores are divided by their
    sum, by 2**-126 at least; then all are multiplied by scaling_factor.

    Computed in float32 (for float64 tokens in float64), autocast or not. Scores that tie are chosen by the lower index,
    on every device: a stable sort, since torch.topk leaves ties open. A NaN score ranks above all others and makes its
    weight NaN (with normalize, all weights of its token): a NaN stays visible rather than rerouted. Gradients flow
    through weights and scores, not through the choice. For the backward pass x itself is kept, no wider copy.

    Args:
        normalize: whether the weights of a token sum to scaling_factor.
        scaling_factor: DeepSeek-V3 has 2.5.
        bias_update_speed: what `update_bias` adds or subtracts.
        num_groups, top_groups: SIGMOID only. The experts form num_groups groups of equal size; a token's K experts come
            from its top_groups groups, by the sum of the two largest score + bias in each. None: no groups.

    Raises:
        TypeError: for a router that is no Router.
        ValueError: for numbers that do not fit each other.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; groups as in its published inference code.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: Router = Router.SIGMOID,
        normalize: bool = True,
        scaling_factor: float = 1.0,
        bias_update_speed: float = 0.001,
        num_groups: int | None = None,
        top_groups: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not isinstance(router, Router):
            raise TypeError(f"TopKRouter: router is {router!r}, needed a Router")
        if hidden_size < 1:
            raise ValueError(f"TopKRouter: hidden_size is {hidden_size}, needed 1 or more")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"TopKRouter: top_k is {top_k}, needed 1 to {num_experts}, the number of experts")
        _check_groups(router, num_experts, top_k, num_groups, top_groups)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.router = router
        self.normalize = normalize
        self.scaling_factor = scaling_factor
        self.bias_update_speed = bias_update_speed
        self.num_groups, self.top_groups = num_groups, top_groups
        self.weight = nn.Parameter(torch.empty((num_experts, hidden_size), device=device, dtype=dtype))
        bias_E = torch.zeros(num_experts, device=device) if router is Router.SIGMOID else None
        self.register_buffer("bias", bias_E)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform within 1 / sqrt(H), as nn.Linear's; bias zero."""
        bound = self.hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_TH: Float[Tensor, "T H"]) -> Routing:
        """The routing of every token; no tokens give tensors without rows.

        Raises:
            TypeError: for tokens that are no floats.
            ValueError: for another shape.
        """
        if not x_TH.is_floating_point():
            raise TypeError(f"TopKRouter: x has dtype {x_TH.dtype}, needed a float")
        if x_TH.dim() != 2 or x_TH.shape[1] != self.hidden_size:
            raise ValueError(f"TopKRouter: x has shape {tuple(x_TH.shape)}, needed rows of {self.hidden_size}")
        wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        with torch.autocast(x_TH.device.type, enabled=False):
            logits_TE = _Logits.apply(x_TH, self.weight, wide)
            scores_TE = logits_TE.softmax(1) if self.router is Router.SOFTMAX else logits_TE.sigmoid()
            ids_TK = self._choose(scores_TE.detach())
            weights_TK = scores_TE.gather(1, ids_TK)
            if self.normalize:
                weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(_SMALLEST_SUM)
            return Routing(ids_TK, weights_TK * self.scaling_factor, scores_TE)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        ranks_TE = scores_TE if self.bias is None else scores_TE + self.bias
        if self.num_groups is not None:
            assert self.top_groups is not None
            grouped = ranks_TE.unflatten(1, (self.num_groups, -1))  # (T, groups, experts of a group)
            of_group = grouped.topk(min(2, grouped.shape[2])).values.sum(2)  # equal values: which of them is no matter
            chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, _best(of_group, self.top_groups), True)
            ranks_TE = grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1)
        return _best(ranks_TE, self.top_k)

    @torch.no_grad()
    def update_bias(self, counts_E: Int64[Tensor, " E"]) -> None:
        """bias += speed * sign(mean(counts) - counts), the sign in integers; once an optimizer step.

        Args:
            counts_E: tokens that each expert got (`Permutation.group_sizes_E`), summed over the steps that were
                accumulated and over all ranks: every rank must pass the same counts.

        Raises:
            TypeError: for counts that are no integers.
            ValueError: for another shape, or where there is no bias.
        """
        if self.bias is None:
            raise ValueError(f"update_bias: router is {self.router}, needed Router.SIGMOID, which has a bias")
        if counts_E.is_floating_point() or counts_E.dtype == torch.bool:
            raise TypeError(f"update_bias: counts has dtype {counts_E.dtype}, needed integers")
        if counts_E.shape != (self.num_experts,):
            raise ValueError(f"update_bias: counts has shape {tuple(counts_E.shape)}, needed {(self.num_experts,)}")
        counts_E = counts_E.to(torch.int64)
        direction = (counts_E.sum() - counts_E * self.num_experts).sign()
        self.bias += self.bias_update_speed * direction.to(self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "TopKRouter":
        """`module.to(bfloat16)` leaves the bias in float32: steps of 0.001 would be lost in bfloat16."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != before.dtype:
            self.bias = before.to(self.bias.device)
        return self

    def extra_repr(self) -> str:
        groups = "" if self.num_groups is None else f", {self.top_groups} of {self.num_groups} groups"
        return f"{self.hidden_size}, {self.router.name}, top {self.top_k} of {self.num_experts}{groups}"


def _best(ranks: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last axis, in descending order, ties by the lower index."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _check_groups(router: Router, num_experts: int, top_k: int, num_groups: int | None, top_groups: int | None) -> None:
    op = "TopKRouter"
    if (num_groups is None) != (top_groups is None):
        raise ValueError(f"{op}: num_groups is {num_groups} and top_groups {top_groups}, needed both or neither")
    if num_groups is None or top_groups is None:
        return
    if router is not Router.SIGMOID:
        raise ValueError(f"{op}: num_groups is {num_groups} with {router}, needed Router.SIGMOID or no groups")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{op}: num_groups is {num_groups}, needed a divisor of {num_experts}, the number of experts")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"{op}: top_groups is {top_groups}, needed 1 to {num_groups}, num_groups")
    if top_groups * (num_experts // num_groups) < top_k:
        raise ValueError(
            f"{op}: top_groups is {top_groups}, needed groups with {top_k} experts or more in all, for the top_k"
        )


__all__ = ["Router", "Routing", "TopKRouter"]
