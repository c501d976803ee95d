"""Layers on pipeline stages, and how many micro-batches each stage holds."""

from itertools import pairwise

from mxsim.moe.memory.models import ModelShape


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """Consecutive layers, as many on every stage; the first ones have one more where it does not come out even.

    Raises:
        ValueError: if there are more stages than layers.

    >>> layers_of_stages(5, 2)
    [range(0, 3), range(3, 5)]
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"layers_of_stages: num_stages is {num_stages}, needed 1 to the {num_layers} layers")
    size, rest = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def micro_batches_in_flight(num_stages: int, stage: int, num_micro_batches: int | None = None) -> int:
    """One forward, one backward (1F1B): stage p of P has begun P - p micro-batches when its first backward pass starts.

    num_micro_batches: of a step; None: at least as many as stages.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2.
    """
    in_flight = num_stages - stage
    return in_flight if num_micro_batches is None else min(in_flight, num_micro_batches)


def count_layers(model: ModelShape, layers: range) -> tuple[int, int]:
    """Dense and MoE layers among them."""
    dense = sum(layer < model.num_dense_layers for layer in layers)
    return dense, len(layers) - dense
