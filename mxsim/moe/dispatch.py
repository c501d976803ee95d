"""Rows of tokens to the ranks that hold their experts and back: who sends what to whom, and the all-to-alls.

T tokens and K choices on this rank, R = T * K routed rows that it sends, Q rows that it receives; W ranks, E experts,
L = E / W of them on a rank; tokens are sent in C chunks, one after another.

A row goes to every expert of its token: a token with several experts on a rank is sent there once for each of them.
Rows lie in three orders:

    sent       by (chunk, expert, token); experts of a rank follow each other, so it is also by destination
    arrived    by (chunk, source rank, local expert, token)
    by expert  by (local expert, source rank, token): the order that one process has with the ranks' tokens concatenated
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor

from mxsim.moe.permute import Permutation

Encode = Callable[[slice], Sequence[Tensor]]  # a range of tokens -> matrices with a row for each, sent side by side
_WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}  # what rows are moved in: all backends know these
_CHECKED_STEP = "all-to-all of {what}: rank {rank} of {size} could not finish it; another rank has failed or is late"


class Chunk(NamedTuple):
    """What one chunk's all-to-all moves; the ranges are of tokens, of rows as sent and of rows as arrived."""

    tokens: slice
    sent: slice
    arrived: slice
    sent_to: tuple[int, ...]  # rows for each rank
    arrived_from: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """Where the rows of one forward pass go; made on every rank alike, used by its backward pass, too.

    permutation: of this rank's tokens to the rows as sent; its groups are (chunk, expert).
    sizes_L: rows of each local expert, on the CPU.
    arrival_Q: where each row by expert lies among those that arrived; None: in the same place.
    """

    group: Any
    permutation: Permutation
    chunks: tuple[Chunk, ...]
    sizes_L: Int64[Tensor, " L"]
    arrival_Q: Int64[Tensor, " Q"] | None
    num_received: int

    @classmethod
    def plan(
        cls, topk_ids_TK: Int64[Tensor, "T K"], num_experts: int, group: Any = None, num_chunks: int = 1
    ) -> "Route":
        """Exchange the counts and wait, once, for the device.

        Args:
            topk_ids_TK: experts, 0 to num_experts - 1; those of rank r are r * L to (r + 1) * L - 1.
            group: a process group; None: the default one.
            num_chunks: C, the same on all ranks.

        Raises:
            RuntimeError: if there is no process group, or another rank does not take part.
            ValueError: if the ranks do not divide the experts, or num_chunks is no positive integer.
        """
        _, num_ranks = rank_and_size(group)
        if num_experts % num_ranks:
            raise ValueError(f"ExpertParallel: num_experts is {num_experts}, which {num_ranks} ranks do not divide")
        if type(num_chunks) is not int or num_chunks < 1:
            raise ValueError(f"ExpertParallel: num_chunks is {num_chunks!r}, needed a positive integer")
        num_tokens, num_local = len(topk_ids_TK), num_experts // num_ranks
        starts = [num_tokens * c // num_chunks for c in range(num_chunks + 1)]
        keys_TK = topk_ids_TK
        if num_chunks > 1:
            # starts[c] <= t < starts[c + 1]  where  c = ((t + 1) * C - 1) // T
            token_T = torch.arange(num_tokens, device=topk_ids_TK.device)
            chunk_T = ((token_T + 1) * num_chunks - 1) // max(1, num_tokens)
            keys_TK = topk_ids_TK + num_experts * chunk_T.unsqueeze(1)
        permutation = Permutation.from_topk(keys_TK, num_chunks * num_experts)

        sent_WCL = permutation.group_sizes_E.view(num_chunks, num_ranks, num_local).transpose(0, 1).contiguous()
        arrived_WCL = torch.empty_like(sent_WCL)
        all_to_all("counts", arrived_WCL, sent_WCL, None, None, group)
        counts = torch.stack([sent_WCL, arrived_WCL]).cpu()  # the one wait
        sent_CW, arrived_CW = counts.sum(3).transpose(1, 2).tolist()  # (2, C, W)
        chunks = []
        sent = arrived = 0
        for c in range(num_chunks):
            sent_to, arrived_from = tuple(sent_CW[c]), tuple(arrived_CW[c])
            tokens = slice(starts[c], starts[c + 1])
            sent_end, arrived_end = sent + sum(sent_to), arrived + sum(arrived_from)
            chunks.append(Chunk(tokens, slice(sent, sent_end), slice(arrived, arrived_end), sent_to, arrived_from))
            sent, arrived = sent_end, arrived_end
        return cls(
            group,
            permutation,
            tuple(chunks),
            counts[1].sum((0, 1)),
            _arrival(counts[1], arrived, topk_ids_TK.device) if num_ranks * num_chunks > 1 else None,
            arrived,
        )

    def rows_to_others(self) -> int:
        """Rows that leave this rank."""
        rank, _ = rank_and_size(self.group)
        return sum(n for chunk in self.chunks for r, n in enumerate(chunk.sent_to) if r != rank)

    # ------------------------------------------------------------------------------------------------------------ rows
    def to_experts(self, encode: Encode) -> list[Tensor]:
        """The rows of the local experts, by expert: a contiguous matrix for each that encode returns, every bit kept.

        Each chunk is encoded and copied to its rows while the one before it travels (CUDA: on NCCL's stream).
        """
        return self.unpack(self.exchange(encode))

    def exchange(self, encode: Encode) -> "Arrived":
        """The rows as they arrived, packed."""
        arrived: Tensor | None = None
        works = []
        layout: list[tuple[torch.dtype, int]] = []
        for chunk in self.chunks:
            parts = [part.detach() for part in encode(chunk.tokens)]
            layout = [(part.dtype, part.shape[1]) for part in parts]
            sent = self.pack(parts, chunk)
            if arrived is None:
                arrived = sent.new_empty((self.num_received, sent.shape[1]))
            works.append(
                all_to_all(
                    "rows",
                    arrived[chunk.arrived],
                    sent,
                    chunk.arrived_from,
                    chunk.sent_to,
                    self.group,
                    is_async=len(self.chunks) > 1,
                )
            )
        _wait("rows", works, self.group)
        assert arrived is not None
        return Arrived(arrived, layout)

    def pack(self, parts: Sequence[Tensor], chunk: Chunk) -> Tensor:
        """[rows of the chunk, bytes of a row]: each part of a row beside the one before it."""
        index = self.permutation.row_token_R[chunk.sent]
        if chunk.tokens.start:
            index = index - chunk.tokens.start
        words = _as_words(parts)
        packed = words[0].new_empty((len(index), sum(part.shape[1] for part in words)))
        for part, place in _places(words, packed):
            _gather(part, place, index)
        return packed

    def unpack(self, arrived: "Arrived") -> list[Tensor]:
        """The parts of the rows, by expert."""
        packed = arrived.packed
        parts = []
        start = 0
        for dtype, num_columns in arrived.layout:
            num_words = num_columns * dtype.itemsize // packed.itemsize
            source = packed[:, start : start + num_words]
            part = packed.new_empty((len(packed), num_words))
            if self.arrival_Q is None:
                part.copy_(source)
            else:
                _gather(source, part, self.arrival_Q)
            parts.append(part.view(dtype))
            start += num_words
        return parts

    def to_tokens(self, rows_QH: Tensor) -> Tensor:
        """The rows of the local experts, by expert, to where they came from: rows as sent, [R, H]."""
        (words,) = _as_words([rows_QH.detach()])
        if self.arrival_Q is not None:
            arrived = torch.empty_like(words)
            _scatter(words, arrived, self.arrival_Q)
            words = arrived
        back = words.new_empty((len(self.permutation.row_token_R), words.shape[1]))
        works = [
            all_to_all("results", back[c.sent], words[c.arrived], c.sent_to, c.arrived_from, self.group, is_async=True)
            for c in self.chunks
        ]
        _wait("results", works, self.group)
        return back.view(rows_QH.dtype)

    # --------------------------------------------------------------------------------------------------------- weights
    def weights_to_experts(self, weights_R: Tensor) -> Tensor:
        """A number for each row, as sent -> by expert."""
        arrived = weights_R.new_empty(self.num_received)
        for c in self.chunks:
            all_to_all("weights", arrived[c.arrived], weights_R[c.sent], c.arrived_from, c.sent_to, self.group)
        return arrived if self.arrival_Q is None else arrived.index_select(0, self.arrival_Q)

    def weights_to_tokens(self, weights_Q: Tensor) -> Tensor:
        """A number for each row, by expert -> as sent."""
        if self.arrival_Q is not None:
            weights_Q = torch.empty_like(weights_Q).index_copy_(0, self.arrival_Q, weights_Q)
        back = weights_Q.new_empty(len(self.permutation.row_token_R))
        for c in self.chunks:
            all_to_all("gradients", back[c.sent], weights_Q[c.arrived], c.sent_to, c.arrived_from, self.group)
        return back


class Arrived(NamedTuple):
    """Rows as they arrived, in words; dtype and columns of the parts of a row."""

    packed: Tensor
    layout: list[tuple[torch.dtype, int]]


def row_bytes(parts: Sequence[Tensor]) -> int:
    """Bytes of a row on the wire: MXFP4 17 * H / 32, FP8 33 * H / 32, BF16 2 * H."""
    return sum(part.shape[1] * part.itemsize for part in parts)


def _arrival(counts_WCL: Tensor, num_rows: int, device: torch.device) -> Tensor:
    """For every row by (expert, source, chunk) its place by (chunk, source, expert)."""
    first = counts_WCL.transpose(0, 1).flatten().cumsum(0)  # (chunk, source, expert)
    first = first.view(counts_WCL.transpose(0, 1).shape) - counts_WCL.transpose(0, 1)
    sizes = counts_WCL.permute(2, 0, 1).flatten()
    shift = first.permute(2, 1, 0).flatten() - (sizes.cumsum(0) - sizes)
    both = torch.stack([shift, sizes])
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return torch.arange(num_rows, device=device) + both[0].repeat_interleave(both[1], output_size=num_rows)


# ---------------------------------------------------------------------------------------------------------- collectives
def rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in the group, and how many there are.

    Raises:
        RuntimeError: unless a process group was made, of which this process is a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "ExpertParallel: there is no process group, needed torch.distributed.init_process_group in every process "
            "(torchrun starts them)"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError("ExpertParallel: this process is not in process_group, needed one that it is a member of")
    return rank, dist.get_world_size(group)


def all_to_all(
    what: str,
    out: Tensor,
    source: Tensor,
    out_sizes: Sequence[int] | None,
    source_sizes: Sequence[int] | None,
    group: Any,
    *,
    is_async: bool = False,
) -> Any:
    """`torch.distributed.all_to_all_single` of rows; the work to wait for, if asynchronous.

    Raises:
        RuntimeError: if another rank has failed, or does not take part within the group's timeout. NCCL: its watchdog
            ends the process instead, after the same time.
    """
    sizes = [None if n is None else list(n) for n in (out_sizes, source_sizes)]
    try:
        return dist.all_to_all_single(out, source, *sizes, group=group, async_op=is_async)
    except RuntimeError as error:
        raise _failure(what, group, error) from error


def _wait(what: str, works: Sequence[Any], group: Any) -> None:
    try:
        for work in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise _failure(what, group, error) from error


def _failure(what: str, group: Any, error: RuntimeError) -> RuntimeError:
    rank, size = rank_and_size(group)
    reason = " ".join(str(error).split())
    return RuntimeError(f"ExpertParallel: {_CHECKED_STEP.format(what=what, rank=rank, size=size)} ({reason})")


# --------------------------------------------------------------------------------------------------------- moving rows
def _as_words(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same bytes as matrices of the widest integers that every row is whole numbers of."""
    parts = [part.contiguous() for part in parts]
    size = next(n for n in _WORDS if all(part.shape[1] * part.itemsize % n == 0 for part in parts))
    aligned = [part.clone() if part.storage_offset() * part.itemsize % size else part for part in parts]
    return [part.view(_WORDS[size]) for part in aligned]


def _places(parts: Sequence[Tensor], packed: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each part, and its columns in the packed matrix."""
    ends = list(accumulate(part.shape[1] for part in parts))
    return [(part, packed[:, end - part.shape[1] : end]) for part, end in zip(parts, ends, strict=True)]


def _gather(source: Tensor, out: Tensor, index: Tensor) -> None:
    """out[r] = source[index[r]]."""
    if source.is_cuda and _has_triton():
        from mxsim.moe.triton_move_rows import move_rows

        move_rows(source, out, index, scatter=False)
    else:
        out.copy_(source.index_select(0, index))


def _scatter(source: Tensor, out: Tensor, index: Tensor) -> None:
    """out[index[r]] = source[r]."""
    if source.is_cuda and _has_triton():
        from mxsim.moe.triton_move_rows import move_rows

        move_rows(source, out, index, scatter=True)
    else:
        out.index_copy_(0, index, source)


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


__all__ = ["Arrived", "Chunk", "Route", "rank_and_size", "row_bytes"]
