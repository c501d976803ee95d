"""The error of the weight gradients that a recipe causes: the same weights, the same tokens, another arithmetic.

One forward and one backward pass a recipe, so that errors do not mix with where training went: deterministic, and far
more sensitive than a loss. B sequences of S + 1 tokens, T = B * S; K experts a token.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mxsim.formats import Rounding
from mxsim.moe import TopKRouter
from mxsim.train.config import VOCABULARY, TrainConfig
from mxsim.train.loop import adamw, choose_device, deterministic
from mxsim.train.model import DenseMlp, LanguageModel
from mxsim.train.recipes import RECIPES

FP32 = "fp32"
ANOTHER_BATCH = "another batch"
_TOKENS_AT_ONCE = 16_384
_EPSILON = 1e-8  # AdamW's

Progress = Callable[[int, int, str], object]  # passes done, passes, recipe


class Choices(StrEnum):
    """Who chooses a token's experts."""

    OWN = "own"  # the recipe's routers, from activations with the recipe's errors
    REFERENCE = "reference"  # what the reference's routers chose: the error without that of other choices


class Group(StrEnum):
    """Parameters that are judged together."""

    ALL = "all"
    ROUTED_W1 = "routed w1"
    ROUTED_W2 = "routed w2"
    SHARED = "shared"
    DENSE = "dense"
    ROUTER = "router"
    ATTENTION = "attention"
    EMBEDDING = "embedding"  # and head
    NORMS = "norms"


@dataclass(frozen=True)
class GradientError:
    """How far a gradient g of some parameters is from the reference's gradient r of the same parameters.

    Args:
        recipe: of RECIPES, or ANOTHER_BATCH: the reference's gradient of other tokens, for the noise of the data.
        choices: who chose the experts.
        num_averaged: gradients whose mean is g: 1, or the draws of a recipe that rounds stochastically. 1 with several
            draws: the root mean square of their errors, the means of their cosines, biases and choices.
        layer: None is all layers, embedding and head included.
        relative_error: |g - r| / |r|.
        preconditioned_error: |u(g) - u(r)| / |u(r)| of what AdamW makes of either gradient x, clipped, before momentum:
            u(x) = x / (sqrt(beta2 v + (1 - beta2) x**2) + 1e-8) by element, v the second moment before the step.
            Small gradients count as much as large ones, but none for more than 1 / sqrt(1 - beta2), also where v says
            that there has been no gradient for long, as for rare tokens. NaN where v is not known.
        cosine: <g, r> / (|g| |r|).
        bias: <g, r> / |r|**2 - 1, the share by which g is longer along r; negative where it shrinks.
        differing_choices: share of a token's K experts that are not among the reference's, over the layer's or all
            layers' tokens. NaN where there are no routers, for other tokens, and for a mean of gradients.

    Errors, cosine and bias are NaN where r is zero.
    """

    recipe: str
    choices: Choices
    num_averaged: int
    group: Group
    layer: int | None
    relative_error: float
    preconditioned_error: float
    cosine: float
    bias: float
    differing_choices: float


def gradient_errors(
    config: TrainConfig,
    state: Mapping[str, Tensor],
    tokens_BS1: Int[Tensor, "B S+1"] | Int[np.ndarray, "B S+1"],
    recipes: Iterable[str] = tuple(RECIPES),
    *,
    reference: str = FP32,
    other_tokens_BS1: Int[Tensor, "C S+1"] | Int[np.ndarray, "C S+1"] | None = None,
    second_moments: Mapping[str, Float32[Tensor, "..."]] | None = None,
    num_draws: int = 8,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> list[GradientError]:
    """Errors of the gradient of the mean loss, for every recipe, for each `Choices`, group and layer.

    The reference FP32 computes all of the model in FP32 (attention by its formula; TF32 is off unless torch was told
    otherwise) with the master weights unrounded: the others' errors contain all that their arithmetic does, for "bf16"
    BF16's own. A recipe that rounds to nearest is a reference, too: "bf16" shows what a recipe adds to BF16, "mxfp4"
    what a variant of it changes at all. Squares are summed in float64. Draw i of a stochastic recipe takes torch's
    random numbers of seed i. Batches are computed 16,384 tokens at a time, and their gradients added in FP32.

    Args:
        config: of the run that the state is from; its recipe, batch size and `compile` are of no effect.
        state: `LanguageModel.state_dict()`, router biases included.
        other_tokens_BS1: for ANOTHER_BATCH; None leaves that out.
        second_moments: for the preconditioned errors: v of every parameter, by name, as `second_moments_of` reads it
            from a checkpoint.
        num_draws: of each recipe that rounds stochastically.
        device: None is CUDA where there is a device.

    Raises:
        ConfigError: for a recipe that is not known, or that cannot have the model's sizes.
        TypeError, ValueError: for tokens of another type, shape or range, a state or second moments of another model,
            no draws, a reference that is not known, one whose gradient is not finite, or a device that is none.
    """
    where = choose_device(device)
    config = replace(config, compile=False)
    if isinstance(recipes, str):
        raise TypeError(f"recipes is the string {recipes!r}, needed names")
    configs = {name: replace(config, recipe=name) for name in recipes}
    if reference not in (known := [FP32, *(name for name in RECIPES if not _is_stochastic(name))]):
        raise ValueError(f"reference is {reference!r}, needed one of {', '.join(known)}")
    if type(num_draws) is not int or num_draws < 1:
        raise ValueError(f"num_draws is {num_draws!r}, needed an integer of 1 or more")
    tokens = _checked("tokens_BS1", tokens_BS1, config).to(where)
    others = None if other_tokens_BS1 is None else _checked("other_tokens_BS1", other_tokens_BS1, config).to(where)

    draws = {name: num_draws if _is_stochastic(name) else 1 for name in configs}
    num_passes = 1 + (others is not None) + len(Choices) * sum(draws.values())
    num_done = 0

    def done(name: str) -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress(num_done, num_passes, name)

    rows: list[GradientError] = []
    with (
        deterministic(config),
        torch.enable_grad(),
        torch.random.fork_rng([where] if where.type == "cuda" else []),
    ):
        # 1. The reference, and the noise of the data.
        model = _model(replace(config, recipe="bf16" if reference == FP32 else reference), state, where, reference)
        places = _places(model)
        optimizer = None if second_moments is None else _AdamW.of(model, second_moments, config)
        want = _pass(model, tokens)
        done(reference)
        if not all(gradient.isfinite().all() for gradient in want.gradients.values()):
            raise ValueError(f"the gradient of the reference {reference} is not finite: weights or loss are no numbers")
        if others is not None:
            sums = _sums(_pass(model, others).gradients, want.gradients, places, optimizer)
            no_choices = dict.fromkeys([None, *range(config.num_layers)], math.nan)
            rows += _rows(ANOTHER_BATCH, Choices.OWN, 1, [sums], [no_choices])
            done(ANOTHER_BATCH)
        del model

        # 2. The recipes.
        for name, recipe_config in configs.items():
            model = _model(recipe_config, state, where)
            for choices in Choices:
                replayed = want.choices if choices is Choices.REFERENCE else None
                total: dict[str, Tensor] = {}
                all_sums, all_differing = [], []
                for draw in range(draws[name]):
                    torch.default_generator.manual_seed(draw)
                    got = _pass(model, tokens, replayed)
                    all_sums.append(_sums(got.gradients, want.gradients, places, optimizer))
                    all_differing.append(_differing(got.choices, want.choices, config.num_layers))
                    if draws[name] > 1:
                        for key, gradient in got.gradients.items():
                            total[key] = total[key].add_(gradient) if draw else gradient.double()
                    done(name)
                rows += _rows(name, choices, 1, all_sums, all_differing)
                if total:
                    mean = {key: gradient.div_(draws[name]) for key, gradient in total.items()}
                    none = dict.fromkeys(all_differing[0], math.nan)
                    rows += _rows(name, choices, draws[name], [_sums(mean, want.gradients, places, optimizer)], [none])
            del model
    return rows


def second_moments_of(config: TrainConfig, checkpoint: Mapping[str, Any]) -> dict[str, Float32[Tensor, "..."]]:
    """v / (1 - beta2**step) of every parameter, from what `run_folder.load_checkpoint` returns, where that has it.

    Raises:
        ValueError: if the checkpoint is of another model.
    """
    weights = checkpoint["model"]["norm.weight"]
    model = _model(config, checkpoint["model"], weights.device)
    optimizer = adamw(model, config)
    optimizer.load_state_dict(checkpoint["optimizer"])
    correction = 1 - config.beta2 ** checkpoint["step"]
    return {name: optimizer.state[weight]["exp_avg_sq"] / correction for name, weight in model.named_parameters()}


def _checked(name: str, tokens: Any, config: TrainConfig) -> Int[Tensor, "B S+1"]:
    if not isinstance(tokens, Tensor | np.ndarray):
        raise TypeError(f"{name} is a {type(tokens).__name__}, needed a tensor or an array")
    array = tokens.detach().cpu().numpy() if isinstance(tokens, Tensor) else tokens
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, needed integers")
    longest = config.sequence_length + 1
    if array.ndim != 2 or len(array) == 0 or not 2 <= array.shape[1] <= longest:
        raise ValueError(f"{name} has shape {array.shape}, needed one or more sequences of 2 to {longest} tokens")
    if not 0 <= array.min() <= array.max() < VOCABULARY:
        raise ValueError(f"{name} has tokens from {array.min()} to {array.max()}, needed 0 to {VOCABULARY - 1}")
    return torch.from_numpy(array.astype(np.int64))


def _is_stochastic(name: str) -> bool:
    return RECIPES[name].rounding is Rounding.STOCHASTIC


# -------------------------------------------------------------------------------------------------------------- passes
class _Fp32Model(LanguageModel):
    """The recipe BF16 computes in what it gets."""

    def embed(self, tokens_BS: Int[Tensor, "B S"]) -> Float32[Tensor, "B S H"]:
        return F.embedding(tokens_BS, self.embedding.weight)

    def forward(self, tokens_BS: Int[Tensor, "B S"]) -> Float32[Tensor, "B S V"]:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(tokens_BS)


def _model(config: TrainConfig, state: Mapping[str, Tensor], device: torch.device, kind: str = "") -> LanguageModel:
    model = (_Fp32Model if kind == FP32 else LanguageModel)(config, device)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"state is not of this configuration: {' '.join(str(error).split())[:200]}") from error
    model.prepare_weights()
    return model


@dataclass(frozen=True)
class _Pass:
    gradients: dict[str, Float32[Tensor, "..."]]
    choices: dict[int, Int[Tensor, "T K"]]  # by layer


def _pass(
    model: LanguageModel, tokens_BS1: Int[Tensor, "B S+1"], replayed: Mapping[int, Tensor] | None = None
) -> _Pass:
    """Gradients of the mean loss, and who chose what; replayed: choices to take instead of the routers'."""
    at_once = max(1, _TOKENS_AT_ONCE // (tokens_BS1.shape[1] - 1))
    with _observed_choices(model, replayed) as seen:
        for part in tokens_BS1.split(at_once):
            (model.loss(part) * (len(part) / len(tokens_BS1))).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Pass(gradients, {layer: torch.cat(ids) for layer, ids in seen.items()})


@contextmanager
def _observed_choices(
    model: LanguageModel, replayed: Mapping[int, Tensor] | None
) -> Iterator[dict[int, list[Int[Tensor, "t K"]]]]:
    """What the routers choose in each forward pass, or get for their own choice, a batch's tokens in order."""
    seen: dict[int, list[Tensor]] = {}
    routers = [(i, block.mlp.router) for i, block in enumerate(model.blocks) if not isinstance(block.mlp, DenseMlp)]

    def watch(layer: int, router: TopKRouter) -> None:
        choose = router._choose
        ids_of_layer = seen.setdefault(layer, [])

        def chosen(scores_TE: Float[Tensor, "t E"]) -> Int[Tensor, "t K"]:
            if replayed is None:
                ids_TK = choose(scores_TE)
            else:
                start = sum(map(len, ids_of_layer))
                ids_TK = replayed[layer][start : start + len(scores_TE)]
            ids_of_layer.append(ids_TK)
            return ids_TK

        # A forward hook would come too late: weights and gradients follow from the choice inside the router.
        router.__dict__["_choose"] = chosen

    for layer, router in routers:
        watch(layer, router)
    try:
        yield seen
    finally:
        for _, router in routers:
            del router.__dict__["_choose"]


# ------------------------------------------------------------------------------------------------------------- figures
_Place = tuple[Group, int | None]


def _places(model: LanguageModel) -> dict[str, list[_Place]]:
    """The groups and layers that a parameter counts in."""
    found: dict[str, list[_Place]] = {}
    for name, _ in model.named_parameters():
        layer, group = None, Group.EMBEDDING
        if name.startswith("blocks."):
            _, number, inside = name.split(".", 2)
            layer = int(number)
            group = _group(inside, is_dense=isinstance(model.blocks[layer].mlp, DenseMlp))
        elif name == "norm.weight":
            group = Group.NORMS
        found[name] = [(Group.ALL, None), (group, None)]
        if layer is not None:
            found[name] += [(Group.ALL, layer), (group, layer)]
    return found


def _group(name: str, *, is_dense: bool) -> Group:
    """Of a parameter of a block."""
    if name.endswith("norm.weight"):
        return Group.NORMS
    if name.startswith("attention."):
        return Group.ATTENTION
    if is_dense:
        return Group.DENSE
    return {
        "mlp.experts.w1": Group.ROUTED_W1,
        "mlp.experts.w2": Group.ROUTED_W2,
        "mlp.shared.w1": Group.SHARED,
        "mlp.shared.w2": Group.SHARED,
        "mlp.router.weight": Group.ROUTER,
    }[name]


@dataclass(frozen=True)
class _AdamW:
    """What the optimizer makes of a gradient, before its momentum."""

    second_moments: dict[str, Float32[Tensor, "..."]]
    beta2: float
    max_grad_norm: float

    @staticmethod
    def of(model: LanguageModel, second_moments: Mapping[str, Tensor], config: TrainConfig) -> "_AdamW":
        found = {}
        for name, weight in model.named_parameters():
            if name not in second_moments:
                raise ValueError(f"second_moments has nothing for {name}, needed a tensor for every parameter")
            v = second_moments[name]
            if not isinstance(v, Tensor) or not v.is_floating_point() or v.is_meta:
                raise TypeError(f"second_moments of {name} is no tensor of floating-point numbers")
            if v.shape != weight.shape:
                raise ValueError(f"second_moments of {name} has shape {tuple(v.shape)}, needed {tuple(weight.shape)}")
            if not ((v >= 0) & v.isfinite()).all():
                raise ValueError(f"second_moments of {name} holds negative or infinite numbers or NaN")
            found[name] = v.to(weight.device)
        return _AdamW(found, config.beta2, config.max_grad_norm)

    def clipping(self, gradients: Mapping[str, Tensor]) -> float:
        """The factor, as `clip_grad_norm_` has it."""
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        return min(1.0, self.max_grad_norm / (float(torch.stack(squares).sum().sqrt()) + 1e-6))

    def step(self, name: str, clipped: Float64[Tensor, "..."]) -> Float64[Tensor, "..."]:
        v = self.beta2 * self.second_moments[name].double() + (1 - self.beta2) * clipped.square()
        return clipped / (v.sqrt() + _EPSILON)


@dataclass(frozen=True)
class _Sums:
    """Of squares and products over elements; e = g - r."""

    rr: float
    gg: float
    ee: float
    er: float
    rr_of_steps: float = math.nan  # r and e of AdamW's steps
    ee_of_steps: float = math.nan

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.ee / self.rr) if self.rr else math.nan

    @property
    def preconditioned_error(self) -> float:
        return math.sqrt(self.ee_of_steps / self.rr_of_steps) if self.rr_of_steps else math.nan

    @property
    def cosine(self) -> float:
        return (self.rr + self.er) / math.sqrt(self.gg * self.rr) if self.gg * self.rr else math.nan

    @property
    def bias(self) -> float:
        return self.er / self.rr if self.rr else math.nan


def _sums(
    gradients: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    places: Mapping[str, Sequence[_Place]],
    optimizer: _AdamW | None,
) -> dict[_Place, _Sums]:
    """Sums by group and layer, in float64."""
    if optimizer is not None:
        g_clipping, r_clipping = optimizer.clipping(gradients), optimizer.clipping(reference)
    of_parameters = []
    for name in places:
        g, r = gradients[name].double(), reference[name].double()
        e = g - r
        sums = [(r * r).sum(), (g * g).sum(), (e * e).sum(), (e * r).sum()]
        if optimizer is not None:
            step = optimizer.step(name, r * r_clipping)
            sums += [step.square().sum(), (optimizer.step(name, g * g_clipping) - step).square().sum()]
        of_parameters.append(torch.stack(sums))
    members: dict[_Place, list[list[float]]] = {}
    for values, places_of_parameter in zip(torch.stack(of_parameters).tolist(), places.values(), strict=True):
        for place in places_of_parameter:
            members.setdefault(place, []).append(values)
    return {place: _Sums(*(sum(column) for column in zip(*rows, strict=True))) for place, rows in members.items()}


def _differing(
    got: Mapping[int, Int[Tensor, "T K"]], want: Mapping[int, Int[Tensor, "T K"]], num_layers: int
) -> dict[int | None, float]:
    """Share of choices that are not among the reference's, by layer and, for None, over all."""
    shares: dict[int | None, float] = dict.fromkeys(range(num_layers), math.nan)
    for layer, ids_TK in got.items():
        is_shared_TK = (ids_TK[:, :, None] == want[layer][:, None, :]).any(2)
        shares[layer] = float((~is_shared_TK).double().mean())
    shares[None] = sum(shares[layer] for layer in got) / len(got) if got else math.nan  # all layers have T K choices
    return shares


def _rows(
    recipe: str,
    choices: Choices,
    num_averaged: int,
    sums: Sequence[Mapping[_Place, _Sums]],
    differing: Sequence[Mapping[int | None, float]],
) -> Iterator[GradientError]:
    """A row for each group and layer, over the draws."""
    order = {group: i for i, group in enumerate(Group)}
    for group, layer in sorted(sums[0], key=lambda place: (-1 if place[1] is None else place[1], order[place[0]])):
        of_draws = [draw[group, layer] for draw in sums]
        yield GradientError(
            recipe,
            choices,
            num_averaged,
            group,
            layer,
            relative_error=math.sqrt(_mean(s.relative_error**2 for s in of_draws)),
            preconditioned_error=math.sqrt(_mean(s.preconditioned_error**2 for s in of_draws)),
            cosine=_mean(s.cosine for s in of_draws),
            bias=_mean(s.bias for s in of_draws),
            differing_choices=_mean(shares[layer] for shares in differing),
        )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
