"""Before a recipe is timed: the ranks' layer has the bits of one process's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mxsim.bench.ep.workload import random_rows
from mxsim.moe import (
    Activation,
    ExpertParallel,
    Fp4Tokens,
    MoE,
    Permutation,
    Recipe,
    permute,
    permute_weights,
    unpermute_sum,
)
from mxsim.moe.recipe import Compute

_HIDDEN, _INTERMEDIATE, _TOP_K, _TOKENS = 512, 256, 3, 96
_NAMES = ("y", "dx", "dweights", "dw1", "dw2")


@dataclass(frozen=True)
class Check:
    """What was compared, and what differed, on any rank; "" for nothing."""

    recipe: str
    num_chunks: int
    compared: tuple[str, ...]
    problem: str


def check(recipe: Recipe, num_chunks: int, device: torch.device) -> Check:
    """Results and gradients of a small layer; every rank computes the single-process layer of all tokens for itself.

    FP8 and MXFP4: bit by bit. BF16: within 2**-7, since torch's grouped GEMM may sum otherwise for other groups.
    Left out are the Wgrads whose columns come from FP8 rows that travelled (ExpertParallel): w2's in FP8 and MXFP4,
    w1's in FP8.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    options = {"recipe": recipe, "dtype": torch.bfloat16, "device": device}
    moe = MoE(_HIDDEN, _INTERMEDIATE, 4 * num_ranks, _TOP_K, **options)
    layer = ExpertParallel(_HIDDEN, _INTERMEDIATE, 4 * num_ranks, _TOP_K, num_chunks=num_chunks, **options)
    layer.load_state_dict(layer.local_state_dict(moe.state_dict()))

    counts = [_TOKENS - 17 * r for r in range(num_ranks)]
    xs, dys = ([random_rows(n, _HIDDEN, r, device, seed) for r, n in enumerate(counts)] for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    scores = [torch.rand((n, 4 * num_ranks), generator=generator) for n in counts]
    ids = [s.topk(_TOP_K).indices.to(device) for s in scores]
    weights = [s.topk(_TOP_K).values.to(device) for s in scores]

    got = _gradients(layer.routed, layer, xs[rank], ids[rank], weights[rank], dys[rank])
    want = _gradients(
        lambda *tokens: _one_process(moe, *tokens), moe, *(torch.cat(parts) for parts in (xs, ids, weights, dys))
    )
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    local = slice(4 * rank, 4 * rank + 4)
    parts = dict(zip(_NAMES, (rows, rows, rows, local, local), strict=True))
    compared = list(_NAMES)
    if recipe.compute is Compute.FP8:
        compared.remove("dw2")
        if not recipe.keeps_fp4(Activation.EXPERT_INPUT):
            compared.remove("dw1")
    is_same = torch.equal if recipe.compute is Compute.FP8 else _is_close
    differing = [name for name in compared if not is_same(got[name], want[name][parts[name]])]
    everybodys: list[list[str]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(everybodys, differing)
    problems = [f"rank {r}: {', '.join(names)} differ" for r, names in enumerate(everybodys) if names]
    return Check(recipe.name, num_chunks, tuple(compared), "; ".join(problems))


def _gradients(
    forward: Callable[[Tensor, Tensor, Tensor], Tensor],
    layer: MoE | ExpertParallel,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    dy: Tensor,
) -> dict[str, Tensor]:
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    y = forward(x, ids, weights)
    grads = torch.autograd.grad(y, [x, weights, layer.experts.w1, layer.experts.w2], dy)
    return dict(zip(_NAMES, (y.detach(), *grads), strict=True))


def _is_close(x: Tensor, y: Tensor) -> bool:
    """NaN is not."""
    return bool((x.double() - y.double()).norm() <= 2**-7 * y.double().norm())


def _one_process(moe: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    permutation = Permutation.from_topk(ids, moe.experts.num_experts)
    rows: Tensor | Fp4Tokens
    if moe.recipe.keeps_fp4(Activation.EXPERT_INPUT):
        rows = Fp4Tokens.quantize(x, moe.recipe).permute(permutation)
    else:
        rows = permute(x, permutation)
    y = moe.experts(rows, permutation.group_sizes_E, permute_weights(weights, permutation))
    return unpermute_sum(y, permutation)
