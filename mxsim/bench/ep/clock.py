"""Time on several processes at once: they start together, and the slowest counts.

CUDA: between events on the current stream; the device first waits, until everything is enqueued, then for the other
ranks. CPU: the wall clock after a barrier.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Part = Callable[[Any], Any]  # takes what the part before it returned
_WAIT_CYCLES = 20_000_000  # about 10 ms: what Python needs to enqueue a sample


@dataclass(frozen=True)
class Times:
    """Microseconds of each part and of all, medians over samples of the slowest rank's.

    is_queue_full: whether no device waited for Python.
    """

    parts: tuple[float, ...]
    us: float
    min_us: float
    max_us: float
    num_samples: int
    is_queue_full: bool


def time_in_turn(works: Sequence[Sequence[Part]], device: torch.device, num_samples: int) -> list[Times]:
    """Each work's parts in sequence; a sample of each in turn, after one that is not counted. On all ranks alike."""
    samples: list[list[tuple[list[float], bool]]] = [[] for _ in works]
    for number in range(num_samples + 1):
        for work, taken in zip(works, samples, strict=True):
            sample = _sample(work, device)
            if number:
                taken.append(sample)
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, samples)
    return [_slowest([rank[number] for rank in everybodys]) for number in range(len(works))]


def _sample(work: Sequence[Part], device: torch.device) -> tuple[list[float], bool]:
    """(us from the start to the end of each part, whether the device had everything when it began)."""
    state: Any = None
    if device.type != "cuda":
        dist.barrier()
        ticks = [time.perf_counter()]
        for part in work:
            state = part(state)
            ticks.append(time.perf_counter())
        return [1e6 * (tick - ticks[0]) for tick in ticks[1:]], True
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(work) + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)
    dist.all_reduce(torch.zeros(1, device=device))
    events[0].record()
    for part, event in zip(work, events[1:], strict=True):
        state = part(state)
        event.record()
    is_full = not events[0].query()
    torch.cuda.synchronize()
    return [1e3 * events[0].elapsed_time(event) for event in events[1:]], is_full


def _slowest(ranks: Sequence[Sequence[tuple[list[float], bool]]]) -> Times:
    """By rank, then by sample."""
    samples = list(zip(*ranks, strict=True))
    ends = [[max(rank[0][part] for rank in sample) for part in range(len(sample[0][0]))] for sample in samples]
    parts = [[end - start for start, end in zip([0.0, *sample], sample, strict=False)] for sample in ends]
    wholes = [sample[-1] for sample in ends]
    return Times(
        tuple(statistics.median(part) for part in zip(*parts, strict=True)),
        statistics.median(wholes),
        min(wholes),
        max(wholes),
        len(wholes),
        all(is_full for rank in ranks for _, is_full in rank),
    )


def wall_us(step: Callable[[], Any], device: torch.device, num_samples: int) -> tuple[float, float, float]:
    """(median, smallest, largest) time of a step with its waits for the device, of the slowest rank."""
    ticks = []
    for _ in range(num_samples + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        ticks.append(1e6 * (time.perf_counter() - start))
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, ticks[1:])
    slowest = [max(sample) for sample in zip(*everybodys, strict=True)]
    return statistics.median(slowest), min(slowest), max(slowest)
