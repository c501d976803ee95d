"""The activations that a recipe may keep in MXFP4, shown to somebody who measures them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from mxsim.moe.recipe import Activation

Observer = Callable[[Activation, Tensor], object]

_observer: Observer | None = None


@contextmanager
def observe_activations(observer: Observer) -> Iterator[None]:
    """Call the observer with every activation of the layers that run in the block, in every recipe, before it is kept.

    EXPERT_INPUT: the tokens of an `MoE`, once, before they are copied to their experts. SWIGLU_INPUT and DOWN_INPUT:
    the rows of an expert layer, by expert; an `MoE` shows those of its routed experts first, then those of the shared
    ones. LINEAR_INPUT: the rows of a `Linear` that computes in FP8. The observer may keep the tensors, not change them.

    Under torch.compile an observer comes too late for what is compiled already: run eagerly to observe.

    Raises:
        RuntimeError: inside another observe_activations.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError("observe_activations: there is an observer already")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def show(activation: Activation, x: Tensor) -> None:
    """Show an activation to the observer, if there is one."""
    if _observer is not None:
        _observer(activation, x.detach())
