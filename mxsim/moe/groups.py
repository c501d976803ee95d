"""How many rows each expert has, and where they lie in ragged operands. Known on the host."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from mxsim.kernels.layouts import round_up

T = TypeVar("T")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Span(NamedTuple):
    """The rows of one expert that has any: start : start + size of R rows, and the same of rows padded by expert."""

    expert: int
    start: int
    size: int
    padded_start: int
    padded_size: int


@dataclass(frozen=True)
class Groups:
    """The rows of each expert, in order; none for an expert without a token.

    Args:
        sizes: rows of each expert, 0 or more.
        device: where `ends` is wanted.

    Raises:
        TypeError: for sizes that are no integers.
        ValueError: for a negative size.
    """

    sizes: tuple[int, ...]
    device: torch.device
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            sizes = tuple(map(operator.index, self.sizes))
        except TypeError:
            raise TypeError(f"Groups: sizes is {self.sizes!r}, needed integers") from None
        if sizes and min(sizes) < 0:
            raise ValueError(f"Groups: sizes holds {min(sizes)}, needed sizes of 0 or more")
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "device", torch.device(self.device))

    @classmethod
    def from_tensor(cls, sizes: Int[Tensor, " E"], num_rows: int, *, device: torch.device | None = None) -> "Groups":
        """The groups of a tensor of sizes; waits once for the device that it is on.

        Args:
            num_rows: what the sizes must add up to.
            device: None: where sizes is.

        Raises:
            TypeError: unless sizes is a tensor of integers.
            ValueError: unless it has one axis, sizes of 0 or more, and the sum num_rows.
        """
        if not isinstance(sizes, Tensor):
            raise TypeError(f"Groups: sizes is a {type(sizes).__name__}, needed a torch tensor")
        if sizes.dtype not in _INTEGERS:
            raise TypeError(f"Groups: sizes has dtype {sizes.dtype}, needed integers")
        if sizes.dim() != 1:
            raise ValueError(f"Groups: sizes has {sizes.dim()} axes, needed 1")
        groups = cls(tuple(sizes.tolist()), sizes.device if device is None else device)
        if groups.num_rows != num_rows:
            raise ValueError(f"Groups: sizes sum to {groups.num_rows}, needed {num_rows}, the rows")
        return groups

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    @cached_property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each expert."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def padded(self, multiple: int) -> tuple[int, ...]:
        """The sizes, each rounded up to a multiple."""
        return tuple(round_up(size, multiple) for size in self.sizes)

    def padded_rows(self, multiple: int) -> int:
        """The sum of `padded(multiple)`."""
        spans = self.spans(multiple)
        return spans[-1].padded_start + spans[-1].padded_size if spans else 0

    def spans(self, multiple: int) -> list[Span]:
        """Where the rows of every expert that has any lie, in R rows and padded to a multiple; made once."""
        return self.made(("spans", multiple), lambda: list(self._make_spans(multiple)))

    def _make_spans(self, multiple: int) -> Iterator[Span]:
        padded_start = 0
        for expert, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size:
                yield Span(expert, start, size, padded_start, round_up(size, multiple))
                padded_start += round_up(size, multiple)

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned when it was first asked for under this key."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @cached_property
    def ends(self) -> Int32[Tensor, " E"]:
        """The row after each expert's last one, on the device: what `torch.nn.functional.grouped_mm` calls offs."""
        return self.on_device(list(accumulate(self.sizes)))

    def on_device(self, values: list[int]) -> Int32[Tensor, " n"]:
        """Integers as int32 on the device; nothing waits for it."""
        if self.device.type != "cuda":
            return torch.tensor(values, dtype=torch.int32, device=self.device)
        return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(self.device, non_blocking=True)
