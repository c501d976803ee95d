"""Sizes of the layer and of what each process has."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxsim.bench.moe.workload import LayerShape, Routing, expert_ids


@dataclass(frozen=True)
class EpShape:
    """A layer whose experts are spread over the ranks; tokens: of each rank, several numbers in turn.

    num_chunks: in how many parts tokens are sent, several in turn; 1 first.
    """

    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared: int
    num_chunks: tuple[int, ...]

    def at(self, tokens: int) -> LayerShape:
        """The layer at one number of tokens."""
        return LayerShape(tokens, self.hidden, self.intermediate, self.num_experts, self.top_k)

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, top-{self.top_k} of {self.num_experts} experts, "
            f"{self.num_shared} shared"
        )


FULL = EpShape(
    tokens=(4096, 8192, 32768),
    hidden=7168,
    intermediate=2048,
    num_experts=256,
    top_k=8,
    num_shared=1,
    num_chunks=(1, 2, 4),
)  # DeepSeek-V3
TINY = EpShape(tokens=(64,), hidden=256, intermediate=128, num_experts=8, top_k=2, num_shared=1, num_chunks=(1, 2))
ROUTING = (
    "Dispatch: every expert gets as many rows of every rank, chosen at random, so a rank sends (ranks - 1) / ranks of "
    "its rows. A token is sent once to each of its experts. Layer: routed by its own router, of random weights."
)


def balanced_ids(shape: EpShape, tokens: int, rank: int, device: torch.device) -> Tensor:
    """The experts of a rank's tokens, [T, K]."""
    return expert_ids(Routing.BALANCED, shape.at(tokens), seed=rank).to(device)


def random_rows(tokens: int, hidden: int, rank: int, device: torch.device, seed: int = 0) -> Tensor:
    """N(0, 1) in bfloat16, other values on every rank."""
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    return torch.randn((tokens, hidden), dtype=torch.bfloat16, device=device, generator=generator)
