"""mxsim's expert parallelism behind the interface of torchtitan's routed experts. torchtitan itself is not needed here.

There an MoE layer calls experts(x, top_scores, selected_experts_indices), which dispatches, runs `_grouped_mm` and
combines. `Mxfp4Experts` takes the place of that module: the same call, the same result, tokens travel in MXFP4. Its
weights are torchtitan's: w1 (gate) and w3 (up) [experts, F, H], w2 [experts, H, F].

    torchrun --nproc-per-node 2 examples/torchtitan_experts.py        two processes, GPUs where there are two
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxsim.moe import ExpertParallel, Recipe

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 256, 128, 8, 2
TOKENS, STEPS = 64, 5


class Mxfp4Experts(nn.Module):
    """What torchtitan calls in place of its grouped experts and their token dispatcher."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int, **options: object) -> None:
        super().__init__()
        self.parallel = ExpertParallel(dim, hidden_dim, num_experts, top_k, **options)
        self.parallel.router = None  # torchtitan has its own, with its own balancing

    def load_torchtitan_weights(self, w1: Tensor, w2: Tensor, w3: Tensor) -> None:
        """This rank's part of torchtitan's weights of all experts."""
        full = {"experts.w1": torch.cat([w1, w3], 1), "experts.w2": w2}
        self.parallel.load_state_dict(self.parallel.local_state_dict(full), strict=False)

    def forward(self, x: Tensor, top_scores: Tensor, selected_experts_indices: Tensor) -> Tensor:
        """Tokens [T, dim], scores and experts [T, top_k] -> [T, dim]."""
        return self.parallel.routed(x, selected_experts_indices, top_scores)


class MoELayer(nn.Module):
    """The shape of torchtitan's MoE: a router, then experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x.float()).sigmoid()
        top_scores, selected = scores.topk(TOP_K, dim=-1)
        return self.experts(x, top_scores / top_scores.sum(-1, keepdim=True), selected)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    torch.manual_seed(0)  # the same router on all ranks
    options = {"recipe": Recipe.MXFP4, "device": device, "dtype": torch.bfloat16}
    layer = MoELayer(Mxfp4Experts(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, **options)).to(device)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
    wanted = x.roll(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = (layer(x).float() - wanted.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(layer.gate.weight.grad)  # replicated; the experts' gradients are sums already
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean / ranks:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
