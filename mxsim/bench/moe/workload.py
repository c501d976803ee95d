"""What the expert layer is given: its shape, tokens, and three ways to route them.

T tokens, K choices a token, E experts, R = T * K routed rows, H hidden, F intermediate.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor, nn

from mxsim.moe import Groups, Permutation, permute_weights


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer of experts and of its input; num_experts is a multiple of top_k, tokens of their quotient."""

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """Routed rows."""
        return self.tokens * self.top_k

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.num_experts} experts, "
            f"{self.tokens} tokens x top-{self.top_k} = {self.rows} rows"
        )


# DeepSeek-V3's layer, 32 of its 256 experts on a device.
FULL = LayerShape(tokens=4096, hidden=7168, intermediate=2048, num_experts=32, top_k=8)
TINY = LayerShape(tokens=64, hidden=256, intermediate=128, num_experts=8, top_k=2)


class Routing(Enum):
    """How tokens choose their experts, each K different ones."""

    BALANCED = "balanced"
    SKEWED = "skewed"
    EMPTY = "skewed, some experts empty"

    @property
    def description(self) -> str:
        """The distribution, in words."""
        return {
            Routing.BALANCED: "every expert gets as many rows, chosen at random",
            Routing.SKEWED: "Zipf with exponent 1: the expert of rank r is drawn with weight 1/r, without replacement",
            Routing.EMPTY: "such a Zipf distribution over three quarters of the experts; the others get no row",
        }[self]


_MAX_TRIES = 100


def expert_ids(routing: Routing, shape: LayerShape, seed: int = 0) -> Int64[Tensor, "T K"]:
    """The experts of every token, on the CPU; no expert is empty but those that are meant to be.

    Raises:
        ValueError: for a shape with too few rows for that.
    """
    num_experts, top_k = shape.num_experts, shape.top_k
    for number in range(seed, seed + _MAX_TRIES):
        generator = torch.Generator().manual_seed(number)
        if routing is Routing.BALANCED:
            # num_experts / top_k tokens share a random order of all experts.
            order = torch.rand(shape.rows // num_experts, num_experts, generator=generator).argsort(1)
            return order.view(shape.tokens, top_k)
        num_empty = num_experts // 4 if routing is Routing.EMPTY else 0
        expert_of_rank = torch.randperm(num_experts, generator=generator)[: num_experts - num_empty]
        weights = 1 / torch.arange(1, len(expert_of_rank) + 1, dtype=torch.float64)
        # The largest of log(weight) + Gumbel noise are a draw without replacement.
        uniform = torch.rand(shape.tokens, len(weights), dtype=torch.float64, generator=generator)
        gumbel = -torch.log(-torch.log(uniform.clamp_min(1e-300)))
        ids = expert_of_rank[(weights.log() + gumbel).topk(top_k, 1).indices]
        if len(ids.unique()) == len(weights):
            return ids
    raise ValueError(f"bench: {shape.rows} rows are too few for {num_experts} experts, none of them empty")


class Tokens(NamedTuple):
    """Input, the gradient of the output, and the routing; x and probs are leaves that take gradients."""

    x_TH: BFloat16[Tensor, "T H"]
    dy_TH: BFloat16[Tensor, "T H"]
    probs_R: Float32[Tensor, " R"]
    permutation: Permutation
    groups: Groups
    sizes_E: Int64[Tensor, " E"]  # on the CPU, where a dispatch leaves them: the layer waits for nothing


def make_tokens(routing: Routing, shape: LayerShape, device: torch.device) -> Tokens:
    """N(0, 1) tokens and gradients; weights of a token sum to 1."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.tokens, shape.hidden)
    x, dy = (torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
    weights = torch.rand((shape.tokens, shape.top_k), device=device, generator=generator) + 0.5
    permutation = Permutation.from_topk(expert_ids(routing, shape).to(device), shape.num_experts)
    probs = permute_weights(weights / weights.sum(1, keepdim=True), permutation)
    sizes = permutation.group_sizes_E.cpu()
    groups = Groups(tuple(sizes.tolist()), device)
    return Tokens(x.requires_grad_(), dy, probs.detach().requires_grad_(), permutation, groups, sizes)


def make_weights(shape: LayerShape, device: torch.device, seed: int = 2) -> tuple[nn.Parameter, nn.Parameter]:
    """w1 [E, 2F, H], w2 [E, H, F] in bfloat16, uniform in +-1 / sqrt(fan in), as `Experts` begins."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*size: int) -> nn.Parameter:
        bound = size[-1] ** -0.5
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        return nn.Parameter(weight.uniform_(-bound, bound, generator=generator))

    experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
    return uniform(experts, 2 * intermediate, hidden), uniform(experts, hidden, intermediate)
