"""FP8 copies of weight matrices: both operands that a layer multiplies by, and when they are made."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxsim import kernels
from mxsim.kernels import Fp8Tiles


class Fp8Weight(NamedTuple):
    """128 x 128 tiles of w [E, N, K] and of its transpose: for y = x w^T (contracts K) and dx = dy w (contracts N)."""

    codes: Tensor
    scales: Tensor
    codes_t: Tensor
    scales_t: Tensor

    def tiles(self) -> Fp8Tiles:
        """w, [E, N, K]."""
        return Fp8Tiles(self.codes, self.scales)

    def tiles_t(self) -> Fp8Tiles:
        """Its transpose, [E, K, N]."""
        return Fp8Tiles(self.codes_t, self.scales_t)


def quantize_weight(w: Float[Tensor, "E N K"] | Float[Tensor, "N K"]) -> Fp8Weight:
    """`bf16_to_fp8_tile` of w and of its transpose, E = 1 for a matrix; float32 is rounded to bfloat16 first."""
    w = w.detach().to(torch.bfloat16)
    w = w.unsqueeze(0) if w.ndim == 2 else w
    return Fp8Weight(*kernels.bf16_to_fp8_tile(w), *kernels.bf16_to_fp8_tile(w, transpose=True))


# Fused optimizers, and FSDP2's of a shard, leave a weight's version counter as it is: every step of any is counted.
_num_steps = 0


def _count_step(*_: Any) -> None:
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(_count_step)


class _State(NamedTuple):
    """What changes when a weight does."""

    num_steps: int
    version: int
    storage: StorageWeakRef  # holds the storage's identity, not its memory
    layout: tuple[Any, ...]

    def is_still(self, now: "_State") -> bool:
        return self[:2] == now[:2] and self.storage.cdata == now.storage.cdata and self.layout == now.layout


def _state_of(weight: Tensor) -> _State:
    layout = weight.dtype, weight.shape, weight.stride(), weight.storage_offset()
    return _State(_num_steps, weight._version, StorageWeakRef(weight.untyped_storage()), layout)


class Fp8WeightCache:
    """FP8 copies of a module's weights between `prepare` and the next change of the weight.

    Without `prepare` every forward pass makes its own copies. With it they are dropped at the next step of any
    `torch.optim.Optimizer`, when the weight's version counter moves (in-place changes, load_state_dict), and when the
    weight gets other storage (`weight.data = ...`). What nothing tells of, prepare again after: writes into
    `weight.data`, and with FSDP2 (prepare between `unshard()` and the forward pass) writes into shards. A copied or
    pickled module has nothing prepared. Under torch.compile, and for inference tensors, which have no version counter,
    the copies are always made anew.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[Tensor, _State, Fp8Weight]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Fp8WeightCache, ()

    def prepare(self, name: str, weight: nn.Parameter) -> None:
        """Make the copies of a weight, to be used until it changes."""
        if not weight.is_inference():
            self._made[name] = (weight, _state_of(weight), quantize_weight(weight))

    def clear(self) -> None:
        """Drop all copies."""
        self._made.clear()

    def get(self, name: str, weight: nn.Parameter) -> Fp8Weight:
        """The prepared copies where they are the weight's, new ones otherwise."""
        if torch.compiler.is_compiling():
            return quantize_weight(weight)
        made = self._made.get(name)
        if made is not None:
            source, state, copies = made
            if source is weight and state.is_still(_state_of(weight)):
                return copies
            self._made.pop(name, None)
        return quantize_weight(weight)
