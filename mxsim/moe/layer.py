"""The mixture-of-experts layer: route, permute, experts, combine."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxsim.moe.activation_observer import show
from mxsim.moe.expert_mlp import draw_seed
from mxsim.moe.experts import Experts, check_input
from mxsim.moe.fp4_tokens import Fp4Tokens
from mxsim.moe.grouped_gemm import Gemm
from mxsim.moe.permute import Permutation, permute, permute_weights, unpermute_sum
from mxsim.moe.recipe import Activation, Recipe
from mxsim.moe.router import Router, TopKRouter


class RoutedLayer(nn.Module):
    """What `MoE` and `ExpertParallel` share: y = what the routed experts give, plus the shared experts of x."""

    router: TopKRouter
    experts: Experts
    shared: Experts | None
    recipe: Recipe

    def _shared_experts(self, hidden_size: int, intermediate_size: int, num: int, options: Any) -> Experts | None:
        """One expert, so many times as wide."""
        if type(num) is not int or num < 0:
            raise ValueError(f"{type(self).__name__}: num_shared_experts is {num!r}, needed an integer of 0 or more")
        return Experts(hidden_size, num * intermediate_size, 1, **options) if num else None

    def prepare_weights(self) -> None:
        """Make the FP8 copies of all expert weights once, for all passes until an optimizer changes them."""
        self.experts.prepare_weights()
        if self.shared is not None:
            self.shared.prepare_weights()

    def forward(self, x: Float[Tensor, "*batch H"]) -> Float[Tensor, "*batch H"]:
        """y, in x's dtype; FP8 recipes take bfloat16.

        Raises:
            TypeError: for a dtype of x or of the weights that the recipe does not take.
            ValueError: if the last axis is not hidden_size long.
        """
        what, hidden_size = type(self).__name__, self.experts.hidden_size
        if x.ndim == 0 or x.shape[-1] != hidden_size:
            raise ValueError(f"{what}: x has shape {tuple(x.shape)}, needed [..., {hidden_size}]")
        tokens = x.reshape(-1, hidden_size)
        check_input(what, tokens, hidden_size, self.recipe)
        show(Activation.EXPERT_INPUT, tokens)
        routing = self.router(tokens)
        source = self._source(tokens)
        y = self.routed(source, routing.topk_ids_TK, routing.topk_weights_TK)
        if self.shared is not None:
            y = y + self.shared(source, torch.full((1,), tokens.shape[0], dtype=torch.int64))
        return y if y.shape == x.shape else y.view(x.shape)

    def _source(self, tokens: Float[Tensor, "T H"]) -> Float[Tensor, "T H"] | Fp4Tokens:
        """What the routed and the shared experts read: the tokens, or their MXFP4."""
        raise NotImplementedError

    def routed(
        self, source: Float[Tensor, "T H"] | Fp4Tokens, topk_ids_TK: Tensor, topk_weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T H"]:
        """The weighted sum over the experts that somebody else's router chose."""
        raise NotImplementedError


class MoE(RoutedLayer):
    """y = sum over a token's top_k experts e of expert_e(x) * weight_e, plus the shared experts of x.

    Every recipe has the same parameters: w1 [E, 2F, H] and w2 [E, H, F] of `experts`, the router's, and those of the
    shared experts, which act as one expert of num_shared_experts * F. A routing weight enters before its expert's
    second GEMM. Where the recipe keeps the expert input in MXFP4, a token is quantized once, before it is copied to its
    experts, and the shared experts read the same codes.

    No token is dropped or padded; an expert may get none, or all. `group_sizes_E` holds how many each got in the last
    forward pass: what `router.update_bias` wants after the optimizer's step. With a fixed seed a rerun gives the same
    bits.

    Args:
        hidden_size: H; intermediate_size: F. FP8 recipes: multiples of 128.
        num_experts: E.
        top_k: experts of a token.
        num_shared_experts: experts that every token visits with weight 1.
        router: scoring, see `TopKRouter`; router_options go there.
        recipe: what is computed in and what is kept for the backward pass.
        gemm: backend of the expert GEMMs; "hopper" computes the bits of an H200 on any machine.

    Raises:
        ValueError: for sizes that the recipe's blocks do not divide, or top_k beyond num_experts.

    >>> layer = MoE(128, 128, num_experts=4, top_k=2, recipe=Recipe.MXFP4, dtype=torch.bfloat16)
    >>> layer(torch.randn(3, 5, 128, dtype=torch.bfloat16)).shape
    torch.Size([3, 5, 128])
    """

    group_sizes_E: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared_experts: int = 0,
        router: Router = Router.SIGMOID,
        recipe: Recipe = Recipe.MXFP4,
        gemm: Gemm | str = Gemm.AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **router_options: Any,
    ) -> None:
        super().__init__()
        options = {"recipe": recipe, "gemm": gemm, "device": device, "dtype": dtype}
        self.experts = Experts(hidden_size, intermediate_size, num_experts, **options)
        self.shared = self._shared_experts(hidden_size, intermediate_size, num_shared_experts, options)
        self.router = TopKRouter(hidden_size, num_experts, top_k, router=router, device=device, **router_options)
        self.recipe = recipe
        sizes = torch.zeros(num_experts, dtype=torch.int64, device=device)
        # A buffer: a module that sets attributes in its forward pass cannot be checkpointed under torch.compile.
        self.register_buffer("group_sizes_E", sizes, persistent=False)

    def _source(self, tokens: Float[Tensor, "T H"]) -> Float[Tensor, "T H"] | Fp4Tokens:
        keeps_fp4 = self.recipe.keeps_fp4(Activation.EXPERT_INPUT)
        return Fp4Tokens.quantize(tokens, self.recipe, draw_seed(self.recipe)) if keeps_fp4 else tokens

    def routed(
        self, source: Float[Tensor, "T H"] | Fp4Tokens, topk_ids_TK: Tensor, topk_weights_TK: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T H"]:
        """The weighted sum over the experts that somebody else's router chose: permute, experts, combine."""
        permutation = Permutation.from_topk(topk_ids_TK, self.experts.num_experts)
        self.group_sizes_E.copy_(permutation.group_sizes_E)
        probs_R = permute_weights(topk_weights_TK, permutation)
        rows = source.permute(permutation) if isinstance(source, Fp4Tokens) else permute(source, permutation)
        return unpermute_sum(self.experts(rows, permutation.group_sizes_E, probs_R), permutation)
