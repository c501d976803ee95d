"""The mixture-of-experts layer with its experts spread over the processes of a group.

What travels, by row (a token that goes to one expert; H columns):

    forward    dispatch   MXFP4, FP8 or BF16, as the recipe keeps the expert input: 17 H/32, 33 H/32 or 2 H bytes
               combine    BF16
    backward   gradients of the combine's rows: FP8 in blocks of 1x128 (compute BF16: BF16; gradients MXFP4: so)
               gradients of the dispatched rows, on their way back to their tokens: BF16

and a float32 routing weight each way. Received MXFP4 or FP8 rows go straight to the experts and are what is kept for
the backward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mxsim import kernels
from mxsim.moe import expert_mlp
from mxsim.moe.dispatch import Route, rank_and_size
from mxsim.moe.expert_mlp import draw_seed, recipe_of, seed_of
from mxsim.moe.experts import Experts, check_weights
from mxsim.moe.fp4_tokens import Fp4Tokens
from mxsim.moe.grouped_gemm import Gemm
from mxsim.moe.layer import RoutedLayer
from mxsim.moe.permute import permute_weights, unpermute_sum
from mxsim.moe.recipe import Activation, Compute, Gradients, Recipe
from mxsim.moe.router import Router, TopKRouter
from mxsim.moe.stored import to_fp4

_SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of two ranks


class ExpertParallel(RoutedLayer):
    """`MoE` over the ranks of a process group: each holds E / ranks of the experts, all of the rest, and own tokens.

    y is what one process computes from the tokens of all ranks, rank after rank, and so is every gradient, with the
    exceptions below. `experts.w1` and `experts.w2` are those of the experts rank * L to (rank + 1) * L - 1, and their
    gradients are sums over the tokens of all ranks. Router and shared experts are the same on all ranks, and their
    gradients come from the rank's own tokens: sum them over the ranks (DistributedDataParallel averages them: then
    divide the experts' by the number of ranks, or scale the loss). All ranks call forward and backward in the same
    order, a rank without tokens too; num_tokens may differ.

    One process's bits: y, and the gradients of x, of the routing weights and of the experts. Exceptions:
      - compute FP8: the Wgrad of w2, whose gradient columns come from the FP8 rows that travelled, not from BF16; where
        the expert input is not kept in MXFP4 also that of w1, whose columns come from the FP8 rows. A second rounding,
        which changes nothing but elements that are subnormal in a row's block or in a column's.
      - router and shared experts: sums of the ranks' gradients in another order, and in FP8 other blocks of 128 rows.
      - stochastic rounding: other random bits.

    state_dict has the keys of MoE's, with the local experts alone: `local_state_dict` takes them from a MoE's.
    Ranks that draw the same torch seed before construction get the same router and shared experts, and different
    experts.

    Args:
        num_experts: E, of all ranks; a multiple of their number.
        process_group: None: the default group. It must exist before the layer does.
        num_chunks: tokens are sent in so many parts, each quantized and packed while the one before it travels; the
            same on all ranks. No bit depends on it.
        the others: as in `MoE`.

    Raises:
        RuntimeError: without a process group; in forward and backward if another rank fails or does not come within
            the group's timeout.
        ValueError: as `MoE`, or if the ranks do not divide the experts.

    Source: arXiv 2603.02731: dispatch in MXFP4 forward, gradients in FP8 backward, combine not in FP4. Departs: DeepEP,
    which the paper uses, sends a token once to a rank; here it is sent once to an expert.
    """

    num_routed_E: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        process_group: Any = None,
        num_shared_experts: int = 0,
        router: Router = Router.SIGMOID,
        recipe: Recipe = Recipe.MXFP4,
        gemm: Gemm | str = Gemm.AUTO,
        num_chunks: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **router_options: Any,
    ) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank_and_size(process_group)
        if type(num_experts) is not int or num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(
                f"ExpertParallel: num_experts is {num_experts!r}, needed a multiple of {self.num_ranks}, the ranks"
            )
        if type(num_chunks) is not int or num_chunks < 1:
            raise ValueError(f"ExpertParallel: num_chunks is {num_chunks!r}, needed a positive integer")
        options = {"recipe": recipe, "gemm": gemm, "device": device, "dtype": dtype}
        self.num_experts, self.num_chunks, self.recipe = num_experts, num_chunks, recipe
        self.process_group = process_group
        self.router = TopKRouter(hidden_size, num_experts, top_k, router=router, device=device, **router_options)
        self.shared = self._shared_experts(hidden_size, intermediate_size, num_shared_experts, options)
        self.experts = Experts(hidden_size, intermediate_size, num_experts // self.num_ranks, **options)
        seed = self._seed_of_rank(torch.randint(2**62, (1,), device="cpu"))
        if not self.experts.w1.is_meta:
            self.experts.reset_parameters(torch.Generator(self.experts.w1.device).manual_seed(int(seed)))
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("num_routed_E", counts, persistent=False)

    def local_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `load_state_dict` of this rank takes, from the state_dict of a `MoE` with all experts; no copies.

        Raises:
            ValueError: if its experts are not num_experts.
        """
        local = dict(state_dict)
        for name in ("experts.w1", "experts.w2"):
            if name in local:
                if local[name].shape[0] != self.num_experts:
                    raise ValueError(
                        f"local_state_dict: {name} has {local[name].shape[0]} experts, needed {self.num_experts}"
                    )
                local[name] = local[name].chunk(self.num_ranks)[self.rank]
        return local

    def _source(self, tokens: Float[Tensor, "T H"]) -> Float[Tensor, "T H"] | Fp4Tokens:
        """In MXFP4 where that must be before the chunks are: for the shared experts, or to draw random bits."""
        seed = self._draw_seed()
        is_fp4 = self.recipe.keeps_fp4(Activation.EXPERT_INPUT) and (self.shared is not None or seed is not None)
        return Fp4Tokens.quantize(tokens, self.recipe, seed) if is_fp4 else tokens

    @torch.compiler.disable
    def routed(
        self, source: Float[Tensor, "T H"] | Fp4Tokens, topk_ids_TK: Tensor, topk_weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T H"]:
        """The weighted sum over the experts that somebody else's router chose: dispatch, experts, combine.

        Raises:
            RuntimeError: if another rank fails or does not come within the group's timeout.
            TypeError: for weights whose dtype the recipe does not take.
            ValueError: for choices of more or fewer tokens than there are.
        """
        experts = self.experts
        check_weights("ExpertParallel", self.recipe, w1=experts.w1, w2=experts.w2)
        x, scales, anchor = source if isinstance(source, Fp4Tokens) else (source, None, None)
        if topk_ids_TK.shape[:1] != x.shape[:1]:
            raise ValueError(f"ExpertParallel: topk_ids has shape {tuple(topk_ids_TK.shape)}, needed {len(x)} rows")
        route = Route.plan(topk_ids_TK, self.num_experts, self.process_group, self.num_chunks)
        if self.training:
            self.num_routed_E += route.permutation.group_sizes_E.view(self.num_chunks, -1).sum(0)  # chunks, experts
        fp8 = self.recipe.compute is Compute.FP8
        weights = (experts.w1, experts.w2) if fp8 else (experts.w1.to(x.dtype), experts.w2.to(x.dtype))
        cache = experts.fp8_weights
        operands = (*cache.get("w1", experts.w1), *cache.get("w2", experts.w2)) if fp8 else ()
        y: Tensor = _RoutedExperts.apply(
            x,
            scales,
            anchor,
            permute_weights(topk_weights_TK, route.permutation),
            *weights,
            route,
            self._draw_seed(),
            self.recipe.key,
            experts.gemm.value,
            *operands,
        )
        return y

    @torch.no_grad()
    def update_router_bias(self) -> None:
        """`TopKRouter.update_bias` by what was routed since the last call in training mode, summed over the ranks.

        Once an optimizer step, on all ranks. A recomputed forward pass (activation checkpointing) counts twice, which
        changes no sign where all are recomputed.
        """
        dist.all_reduce(self.num_routed_E, group=self.process_group)
        self.router.update_bias(self.num_routed_E)
        self.num_routed_E.zero_()

    def _seed_of_rank(self, seed: Tensor) -> Tensor:
        """Ranks draw the same seed where their generators began alike; they must not share random bits."""
        return (seed + self.rank * _SEED_STEP % 2**62) % 2**62

    def _draw_seed(self) -> Tensor | None:
        seed = draw_seed(self.recipe)
        return None if seed is None else self._seed_of_rank(seed)

    def extra_repr(self) -> str:
        """Ranks and recipe."""
        return f"{self.num_experts} experts on {self.num_ranks} ranks, this is rank {self.rank}; {self.recipe}"


class _RoutedExperts(torch.autograd.Function):
    """y [T, H] of tokens (or of MXFP4 codes, whose gradient goes to `anchor`) through experts on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_scales: Tensor | None,
        anchor: Tensor | None,
        weights_R: Tensor,
        w1: Tensor,
        w2: Tensor,
        route: Route,
        seed: Tensor | None,
        recipe: str,
        gemm: str,
        *operands: Tensor,
    ) -> Tensor:
        rows_Q, *scales = route.to_experts(lambda tokens: encode_tokens(x, x_scales, tokens, recipe_of(recipe)))
        scales_Q = scales[0] if scales else None
        weights_Q = route.weights_to_experts(weights_R)
        ops1, ops2 = (list(operands[:4]), list(operands[4:])) if len(operands) else ([w1], [w2])
        y_Q, kept = expert_mlp.experts(
            rows_Q, scales_Q, weights_Q, ops1, ops2, route.sizes_L, seed, recipe, gemm, False
        )
        ctx.save_for_backward(rows_Q, scales_Q, weights_Q, seed, *kept, *(operands if len(operands) else (w1, w2)))
        ctx.num_kept = len(kept)
        ctx.settings = route, recipe, gemm, w1.dtype
        return unpermute_sum(route.to_tokens(y_Q), route.permutation)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> Any:  # type: ignore[override]
        rows_Q, scales_Q, weights_Q, seed, *rest = ctx.saved_tensors
        kept, operands = rest[: ctx.num_kept], rest[ctx.num_kept :]
        half = len(operands) // 2
        route, recipe, gemm, dtype = ctx.settings
        need_x, _, need_anchor, need_weights, need_w1, need_w2 = ctx.needs_input_grad[:6]
        needs = (need_x or need_anchor, need_weights, need_w1, need_w2)
        r = recipe_of(recipe)
        if r.gradients is Gradients.MXFP4:
            fp4 = to_fp4(dy_TH, r, seed_of(seed, 3))
            dy_Q, *scales = route.to_experts(lambda tokens: encode_tokens(*fp4, tokens, r))
        else:
            dy_Q, *scales = route.to_experts(lambda tokens: encode_gradient(dy_TH, tokens, r))
        dx_Q, dweights_Q, dw1, dw2 = expert_mlp.experts_backward(
            dy_Q,
            rows_Q,
            scales_Q,
            weights_Q,
            kept,
            operands[:half],
            operands[half:],
            seed,
            recipe,
            gemm,
            dtype,
            needs,
            scales[0] if scales else None,
        )
        dx = unpermute_sum(route.to_tokens(dx_Q), route.permutation) if needs[0] else None
        return (
            dx if need_x else None,
            None,
            dx if need_anchor else None,
            route.weights_to_tokens(dweights_Q) if need_weights else None,
            dw1 if need_w1 else None,
            dw2 if need_w2 else None,
            *(None for _ in ctx.needs_input_grad[6:]),
        )


def encode_tokens(x: Tensor, scales: Tensor | None, tokens: slice, recipe: Recipe) -> tuple[Tensor, ...]:
    """What travels of a range of tokens: codes and scales in the format that the expert input is kept in, or x itself.

    x with scales: MXFP4 already.
    """
    if scales is not None:
        return x[tokens], scales[tokens]
    if recipe.compute is Compute.BF16:
        return (x[tokens],)
    if recipe.keeps_fp4(Activation.EXPERT_INPUT):
        return to_fp4(x[tokens], recipe, None)
    return kernels.bf16_to_fp8_row(x[tokens])


def encode_gradient(dy: Tensor, tokens: slice, recipe: Recipe) -> tuple[Tensor, ...]:
    """What travels of a range of the gradient's rows."""
    return (dy[tokens],) if recipe.compute is Compute.BF16 else kernels.bf16_to_fp8_row(dy[tokens])


__all__ = ["ExpertParallel", "encode_gradient", "encode_tokens"]
