"""The dispatch in its parts: quantize, pack, all-to-all, regroup, convert; and in chunks, as a whole."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mxsim.bench.ep.clock import Part
from mxsim.moe import Recipe
from mxsim.moe.dispatch import Arrived, Route, all_to_all
from mxsim.moe.expert_parallel import encode_tokens
from mxsim.moe.stored import rows_of_tokens

PARTS = ("quantize", "pack", "all-to-all", "regroup", "convert")


def parts_of_dispatch(x: Tensor, route: Route, recipe: Recipe) -> list[Part]:
    """From BF16 tokens to what the first GEMM reads, one chunk, a part after another."""
    (chunk,) = route.chunks
    encode, convert = encoder(x, recipe), converter(route, recipe)
    layout: list[tuple[torch.dtype, int]] = []

    def quantize(_: None) -> Sequence[Tensor]:
        parts = encode(chunk.tokens)
        layout[:] = [(part.dtype, part.shape[1]) for part in parts]
        return parts

    def travel(packed: Tensor) -> Tensor:
        arrived = packed.new_empty((route.num_received, packed.shape[1]))
        all_to_all("rows", arrived, packed, chunk.arrived_from, chunk.sent_to, route.group)
        return arrived

    return [
        quantize,
        lambda parts: route.pack(parts, chunk),
        travel,
        lambda arrived: route.unpack(Arrived(arrived, layout)),
        convert,
    ]


def whole_dispatch(x: Tensor, route: Route, recipe: Recipe) -> list[Part]:
    """The same in the route's chunks, each quantized and packed while the one before it travels."""
    encode, convert = encoder(x, recipe), converter(route, recipe)
    return [lambda _: convert(route.to_experts(encode))]


def encoder(x: Tensor, recipe: Recipe) -> Callable[[slice], Sequence[Tensor]]:
    """What travels of a range of tokens."""
    return lambda tokens: encode_tokens(x, None, tokens, recipe)


def converter(route: Route, recipe: Recipe) -> Callable[[Sequence[Tensor]], object]:
    """Received rows to the operand of the first GEMM: FP8 rows; in BF16 there is nothing to do."""
    sizes = route.sizes_L.tolist()

    def convert(parts: Sequence[Tensor]) -> object:
        if len(parts) == 1:
            return parts
        codes, scales = parts
        return rows_of_tokens(codes, scales, recipe, sizes)

    return convert
