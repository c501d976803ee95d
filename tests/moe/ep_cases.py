"""Processes that run `ExpertParallel`, what each of them has, and the same on one process.

Children of `torch.multiprocessing` import this module: it must not import pytest.
"""

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from mxsim import kernels
from mxsim.formats import Rounding
from mxsim.moe import (
    Activation,
    Conversion,
    ExpertParallel,
    Fp4Tokens,
    MoE,
    Permutation,
    Recipe,
    expert_mlp,
    permute,
    permute_weights,
    unpermute_sum,
)
from mxsim.moe.recipe import Gradients

H, F, E, K = 128, 128, 8, 3
ONLY_SWIGLU = replace(Recipe.MXFP4, name="SwiGLU only", stored_fp4=frozenset({Activation.SWIGLU_INPUT}))
STOCHASTIC = replace(Recipe.MXFP4, name="stochastic", rounding=Rounding.STOCHASTIC)
FP4_GRADIENTS = replace(
    Recipe.MXFP4, name="FP4 gradients", gradients=Gradients.MXFP4, conversion=Conversion.THROUGH_BF16
)
RECIPES = (Recipe.BF16, Recipe.FP8, Recipe.MXFP4, ONLY_SWIGLU, FP4_GRADIENTS)
DEADLINE_S = 120


# ---------------------------------------------------------------------------------------------------------------- cases
@dataclass(frozen=True)
class Case:
    """How many tokens each of four ranks has (two ranks: those of the first two and of the last two together).

    experts: which ones tokens choose from.
    """

    name: str
    tokens: tuple[int, int, int, int]
    experts: tuple[int, ...] = tuple(range(E))
    num_chunks: int = 1

    def counts(self, num_ranks):
        a, b, c, d = self.tokens
        return {1: (a + b + c + d,), 2: (a + b, c + d), 4: self.tokens}[num_ranks]

    def tokens_of(self, rank, num_ranks):
        """(x, ids, weights, dy) of a rank, x and weights leaves."""
        counts = self.counts(num_ranks)
        part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        generator = torch.Generator().manual_seed(len(self.name))
        total = sum(self.tokens)
        scale = torch.exp2(torch.randint(-3, 4, (total, 1), generator=generator).float())
        x = (torch.randn(total, H, generator=generator) * scale).bfloat16()
        order = torch.rand(total, len(self.experts), generator=generator).argsort(1)[:, :K]
        ids = torch.tensor(self.experts)[order]
        weights = torch.rand(total, K, generator=generator)
        scale = torch.exp2(torch.randint(-6, 7, (total, 1), generator=generator).float())
        dy = (torch.randn(total, H, generator=generator) * scale).bfloat16()
        x, ids, weights, dy = (t[part].clone() for t in (x, ids, weights, dy))
        return x.requires_grad_(), ids, weights.requires_grad_(), dy


CASES = (
    Case("uneven ranks", (60, 7, 31, 40)),
    Case("in chunks", (60, 7, 31, 40), num_chunks=3),
    Case("more chunks than tokens", (2, 0, 1, 0), num_chunks=4),
    Case("ranks without tokens", (0, 0, 40, 9)),
    Case("experts without tokens, others with two blocks of rows", (70, 60, 1, 5), experts=(0, 2, 5)),
    Case("all experts of a token on one rank, the others idle", (30, 4, 50, 6), experts=(4, 5, 6, 7)),
    Case("no tokens anywhere", (0, 0, 0, 0)),
    Case("no tokens in chunks", (0, 0, 0, 0), num_chunks=2),
)
# (recipe, gemm, case): every case in the three presets, Hopper's sums and the recipe between them in the first.
RUNS = [(recipe, "dequantized", case) for recipe in RECIPES[:3] for case in CASES]
RUNS += [(recipe, "hopper", CASES[0]) for recipe in RECIPES[1:4]]
RUNS += [(recipe, "dequantized", CASES[1]) for recipe in RECIPES[3:]]


def moe(recipe, gemm="dequantized", **options):
    torch.manual_seed(0)
    return MoE(H, F, E, K, recipe=recipe, gemm=gemm, dtype=torch.bfloat16, **options)


def expert_parallel(recipe, gemm="dequantized", *, device="cpu", group=None, num_chunks=1, **options):
    """With the weights of `moe`."""
    layer = ExpertParallel(
        H,
        F,
        E,
        K,
        recipe=recipe,
        gemm=gemm,
        dtype=torch.bfloat16,
        process_group=group,
        num_chunks=num_chunks,
        **options,
    )
    layer.load_state_dict(layer.local_state_dict(moe(recipe, gemm, **options).state_dict()))
    return layer.to(device)


def run_routed(layer, x, ids, weights, dy):
    """y and all gradients of the routed experts."""
    y = layer.routed(x, ids, weights)
    grads = torch.autograd.grad(y, [x, weights, layer.experts.w1, layer.experts.w2], dy)
    return dict(zip(("y", "x", "weights", "w1", "w2"), (y.detach().cpu(), *(g.cpu() for g in grads)), strict=True))


def run_layer(layer, x, dy):
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    names = ("y", "x", *(name for name, _ in layer.named_parameters()))
    return dict(zip(names, (y.detach().cpu(), *(g.cpu() for g in grads)), strict=True))


def run_on_one_process(layer, x, ids, weights, dy):
    """The same as `run_routed` by the parts of MoE, which send nothing."""
    recipe = layer.recipe
    permutation = Permutation.from_topk(ids, E)
    if recipe.keeps_fp4(Activation.EXPERT_INPUT):
        rows = Fp4Tokens.quantize(x, recipe).permute(permutation)
    else:
        rows = permute(x, permutation)
    y = layer.experts(rows, permutation.group_sizes_E, permute_weights(weights, permutation))
    y = unpermute_sum(y, permutation)
    grads = torch.autograd.grad(y, [x, weights, layer.experts.w1, layer.experts.w2], dy)
    return dict(zip(("y", "x", "weights", "w1", "w2"), (y.detach(), *grads), strict=True))


def quantize_columns_after_rows(monkeypatch):
    """On one process: columns of dy, and of an expert input in FP8, from the FP8 rows, as if these had travelled."""
    gradient, inputs = expert_mlp.quantize_gradient, expert_mlp.quantize_input

    def quantize_gradient(dy, recipe, sizes, seed):
        rows, cols = gradient(dy, recipe, sizes, seed)
        if len(sizes) == E and dy.shape[1] == H and recipe.gradients is Gradients.FP8:
            cols = kernels.fp8_row_to_fp8_col(*kernels.bf16_to_fp8_row(dy), group_sizes=sizes)
        return rows, cols

    def quantize_input(x, activation, recipe, sizes, seed):
        rows, kept = inputs(x, activation, recipe, sizes, seed)
        if len(sizes) == E and activation is Activation.EXPERT_INPUT and not recipe.keeps_fp4(activation):
            kept = list(kernels.fp8_row_to_fp8_col(*kernels.bf16_to_fp8_row(x), group_sizes=sizes))
        return rows, kept

    monkeypatch.setattr(expert_mlp, "quantize_gradient", quantize_gradient)
    monkeypatch.setattr(expert_mlp, "quantize_input", quantize_input)


# ------------------------------------------------------------------------------------------------------------ processes
def launch(job, num_ranks, folder, backend="gloo", timeout_s=60.0):
    """Run job(rank, num_ranks, folder) in so many processes; returns their exit statuses."""
    context = mp.get_context("spawn")
    arguments = [(job, rank, num_ranks, folder, backend, timeout_s) for rank in range(num_ranks)]
    processes = [context.Process(target=_process, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    end = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
    assert not late, f"ranks {late} still run after {DEADLINE_S} s"
    return [process.exitcode for process in processes]


def _process(job, rank, num_ranks, folder, backend, timeout_s):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    job(rank, num_ranks, Path(folder))
    dist.destroy_process_group()


def results(folder, rank):
    return torch.load(folder / f"rank{rank}.pt", weights_only=False)


def all_cases(rank, num_ranks, folder, device="cpu", gemms=("dequantized", "hopper")):
    """Every run, and the whole layer; gemms: what stands for the two of RUNS."""
    found = {}
    for recipe, gemm, case in RUNS:
        if gemm == "hopper" and num_ranks > 2:
            continue  # slow, and no other than with two
        backend = gemms[gemm == "hopper"]
        layer = expert_parallel(recipe, backend, num_chunks=case.num_chunks, device=device)
        x, ids, weights, dy = (t.detach().to(device) for t in case.tokens_of(rank, num_ranks))
        found[recipe.name, gemm, case.name] = run_routed(layer, x.requires_grad_(), ids, weights.requires_grad_(), dy)
    for recipe in RECIPES[:3]:
        layer = expert_parallel(recipe, gemms[0], num_shared_experts=1, device=device)
        x, _, _, dy = (t.detach().to(device) for t in CASES[0].tokens_of(rank, num_ranks))
        found[recipe.name, "layer"] = run_layer(layer, x.requires_grad_(), dy)
        found[recipe.name, "num_routed"] = layer.num_routed_E.cpu().clone()
        layer.update_router_bias()
        found[recipe.name, "bias"] = layer.router.bias.cpu()
    torch.save(found, folder / f"rank{rank}.pt")


on_gpus = partial(all_cases, device="cuda", gemms=("auto", "hopper"))


def what_two_processes_show(rank, num_ranks, folder):
    """Initial weights, random bits, what is kept, and one layer inside other machinery."""
    found = {}
    torch.manual_seed(3)
    found["state"] = ExpertParallel(H, F, E, K, dtype=torch.bfloat16, num_shared_experts=1).state_dict()
    x, ids, weights, dy = CASES[0].tokens_of(rank, num_ranks)

    layer = expert_parallel(STOCHASTIC)
    same_x = CASES[0].tokens_of(0, num_ranks)[0]
    seen = []
    original = kernels.bf16_to_fp4_row
    kernels.bf16_to_fp4_row = lambda *args, **options: seen.append(original(*args, **options)) or seen[-1]
    for _ in range(2):
        torch.manual_seed(5)
        layer(same_x)
    kernels.bf16_to_fp4_row = original
    found["stochastic"] = [codes for codes, _ in seen if codes.shape == (len(same_x), H // 2)]

    layer = expert_parallel(Recipe.MXFP4)
    layer.prepare_weights()
    weight_storages = {t.data_ptr() for name in ("w1", "w2") for t in layer.experts.fp8_weights._made[name][2]}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer.routed(x, ids, weights)
    found["kept"] = [t.detach().clone() for t in kept if t.data_ptr() not in weight_storages]
    want = run_layer(layer, x, dy)
    y = checkpoint(layer, x, use_reentrant=False)
    found["checkpoint"] = [torch.equal(torch.autograd.grad(y, x, dy)[0], want["x"]), torch.equal(y, want["y"])]
    layer.eval()
    layer.num_routed_E.zero_()
    layer(x)
    found["evaluation counts"] = int(layer.num_routed_E.sum())
    found["leading axes"] = layer(x[:6].view(2, 3, H)).shape
    errors = (
        lambda: ExpertParallel(H, F, E + 1, K),
        lambda: ExpertParallel(H, F, E, K, num_chunks=0),
        lambda: layer(torch.ones(4, H + 1).bfloat16()),
        lambda: layer(torch.ones(4, H)),
        lambda: layer.local_state_dict({"experts.w1": torch.ones(4, 2, 2)}),
    )
    found["errors"] = [_message(call) for call in errors]
    torch.save(found, folder / f"rank{rank}.pt")


def fail(rank, num_ranks, folder):
    """Rank 1 comes too late in one group, and then fails in another; rank 0 reports what it sees."""
    late = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    layers = [expert_parallel(Recipe.MXFP4, group=group) for group in (late, None)]
    x = CASES[0].tokens_of(rank, num_ranks)[0]
    dist.barrier()
    if rank == 1:
        time.sleep(4)
        raise KeyError("rank 1 fails")
    seen = []
    for layer in layers:
        start = time.monotonic()
        seen.append((_message(lambda layer=layer: layer(x)), time.monotonic() - start))
    torch.save(seen, folder / "rank0.pt")


def _message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def count_waits(rank, num_ranks, folder):
    """How often a forward pass and its backward wait for the device."""
    import warnings

    layer = expert_parallel(Recipe.MXFP4, "auto", device="cuda")
    layer.prepare_weights()
    x, ids, weights, dy = (t.detach().cuda() for t in CASES[0].tokens_of(rank, num_ranks))
    x.requires_grad_()
    for _ in range(2):  # the first pass compiles
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            layer.routed(x, ids, weights).backward(dy)
            torch.cuda.set_sync_debug_mode("default")
    torch.save(sum("synchroniz" in str(w.message) for w in seen), folder / f"rank{rank}.pt")
