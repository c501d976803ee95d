"""Time of a call on a device, without the time that Python takes to make it; and that time alone.

CUDA: median over samples of the time between two events, divided by the calls between them. The device first waits
(`torch.cuda._sleep`) until everything is enqueued; a sample where it did not wait long enough is taken again with a
longer wait. Short calls are captured into a CUDA graph, which leaves out the gaps between separate launches. CPU: the
wall clock.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
_SAMPLE_US = 2000.0  # what a sample takes at least
_MAX_CALLS = 64  # of a sample, so that the launch queue (1024) holds them
_GRAPH_BELOW_US = 60.0
_FIRST_WAIT_CYCLES, _MAX_WAIT_CYCLES = 1_000_000, 2_000_000_000
_CACHES_TO_PASS = 4  # memory that calls on copies take in turn, in last caches
_MAX_TURNS = 32
_CPU_SECONDS = 2.0  # after which three samples suffice
_DEFAULT_CPU_CACHE_BYTES = 32 * 2**20


class Method(Enum):
    """How the calls of a sample followed each other."""

    QUEUE = "queue"
    GRAPH = "graph"
    CPU = "loop"


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. is_queue_full: whether the device never waited for Python."""

    us: float
    min_us: float
    max_us: float
    method: Method
    num_samples: int
    calls_per_sample: int
    is_queue_full: bool = True


def time_calls(calls: Sequence[Call], device: torch.device, num_samples: int) -> Timing:
    """Median time of one call. calls: the same work on different memory, made in turn.

    As many results are kept as there are calls, so that results take turns in memory, too.
    """
    return time_in_turn([calls], device, num_samples)[0]


def time_in_turn(
    works: Sequence[Sequence[Call]], device: torch.device, num_samples: int, max_wait_cycles: int | None = None
) -> list[Timing]:
    """`time_calls` of each work. CUDA: a sample of each in turn, so that a drift of the clock meets all alike.

    max_wait_cycles: how long the device may wait for a sample to be enqueued.
    """
    if device.type != "cuda":
        return [_time_on_cpu(calls, num_samples) for calls in works]
    with torch.cuda.device(device):
        samplers = [_Sampler(calls, max_wait_cycles) for calls in works]
        for _ in range(num_samples):
            for sampler in samplers:
                sampler.take()
        return [sampler.timing() for sampler in samplers]


def calls_on_copies(
    run: Callable[..., Any], inputs: Sequence[Any], num_bytes: int, cache: int
) -> tuple[list[Call], bool]:
    """(calls on so many copies of the inputs that caches are passed, whether their memory is little more than a cache).

    Args:
        inputs: tensors and tuples of them.
        num_bytes: what a call reads and writes.
        cache: size of the last cache in bytes.
    """
    turns = max(1, min(_MAX_TURNS, -(-_CACHES_TO_PASS * cache // max(1, num_bytes))))
    sets = [tuple(inputs), *(tuple(map(copy_of, inputs)) for _ in range(turns - 1))]
    return [partial(run, *tensors) for tensors in sets], turns * num_bytes < 2 * cache


def host_and_wall_us(step: Call, device: torch.device, num_steps: int) -> tuple[float, float]:
    """(median time until a step returns, the device having nothing queued; time of a step, one right after another)."""
    ticks = []
    for _ in range(num_steps):
        torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        step()
        ticks.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize(device)
    return statistics.median(ticks) / 1e3, (time.perf_counter_ns() - start) / num_steps / 1e3


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    with contextlib.suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    return _DEFAULT_CPU_CACHE_BYTES


def overhead_us(call: Call, device: torch.device, num_calls: int) -> float:
    """Median time until a call returns, the queue of the device being short."""
    ticks = []
    for number in range(num_calls + num_calls // 10):
        if device.type == "cuda" and number % 50 == 0:
            torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        call()
        ticks.append(time.perf_counter_ns() - start)
    return statistics.median(ticks[num_calls // 10 :]) / 1e3


def copy_of(x: Any) -> Any:
    """The same values and strides at another place, of a tensor or a tuple of tensors."""
    if isinstance(x, tuple):
        copies = map(copy_of, x)
        return type(x)(*copies) if hasattr(x, "_fields") else tuple(copies)
    if not isinstance(x, Tensor):
        return x
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


# ---------------------------------------------------------------------------------------------------------------- CUDA
class _Queue:
    """Samples on the current stream, its queue filled before the device begins."""

    def __init__(self, max_wait_cycles: int | None) -> None:
        self.wait_cycles = _FIRST_WAIT_CYCLES
        self._max_wait_cycles = max_wait_cycles or _MAX_WAIT_CYCLES
        self.is_full = True

    def sample_us(self, launch: Call) -> float:
        """Device time of what `launch` enqueues."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.wait_cycles)
            start.record()
            launch()
            end.record()
            is_full = not start.query()
            torch.cuda.synchronize()
            if is_full or self.wait_cycles >= self._max_wait_cycles:
                self.is_full &= is_full
                return 1e3 * start.elapsed_time(end)
            self.wait_cycles *= 2


class _Turns:
    """The calls in turn, each with its last results kept."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._kept: list[Any] = [None] * len(calls)

    def make(self, count: int) -> None:
        """So many calls, from the first on."""
        for number in range(count):
            place = number % len(self._calls)
            self._kept[place] = self._calls[place]()


class _Sampler:
    """Samples of one call's time: its calls are warm, a sample is long enough, short calls are in a graph."""

    def __init__(self, calls: Sequence[Call], max_wait_cycles: int | None) -> None:
        turns, self.queue = _Turns(calls), _Queue(max_wait_cycles)
        turns.make(max(3, 2 * len(calls)))  # memory for the results is there from now on
        torch.cuda.synchronize()
        estimate_us = self.queue.sample_us(lambda: turns.make(len(calls))) / len(calls)
        if estimate_us < _SAMPLE_US:  # several together: gaps between launches count less, and the queue holds them
            round_of = len(calls) * -(-5 // len(calls))
            estimate_us = self.queue.sample_us(lambda: turns.make(round_of)) / round_of
        self.queue.is_full = True
        if estimate_us < _GRAPH_BELOW_US:
            self.method, self.queue = Method.GRAPH, _Queue(max_wait_cycles)
            self._launch, self.count = _replays(calls, estimate_us)
        else:
            self.method = Method.QUEUE
            self.count = _clamped(_SAMPLE_US / (estimate_us * len(calls)), 1, _MAX_CALLS // len(calls)) * len(calls)
            self._launch = lambda: turns.make(self.count)
        self._samples: list[float] = []

    def take(self) -> None:
        """One sample more."""
        self._samples.append(self.queue.sample_us(self._launch) / self.count)

    def timing(self) -> Timing:
        """Of the samples so far."""
        return _timing(self._samples, self.method, self.count, self.queue.is_full)


def _replays(calls: Sequence[Call], estimate_us: float) -> tuple[Call, int]:
    """(replays of one graph with every call at least once, how many calls they are)."""
    captured = len(calls) * -(-16 // len(calls))
    graph, turns = torch.cuda.CUDAGraph(), _Turns(calls)
    with torch.cuda.graph(graph):
        turns.make(captured)
    replays = _clamped(_SAMPLE_US / (estimate_us * captured), 2, 20)

    def replay(_kept: _Turns = turns) -> None:  # the graph writes to what they hold
        for _ in range(replays):
            graph.replay()

    replay()
    torch.cuda.synchronize()
    return replay, captured * replays


# ----------------------------------------------------------------------------------------------------------------- CPU
def _time_on_cpu(calls: Sequence[Call], num_samples: int) -> Timing:
    turns = _Turns(calls)
    for _ in range(2):  # the first may build something
        start = time.perf_counter()
        turns.make(len(calls))
        estimate_us = 1e6 * (time.perf_counter() - start) / len(calls)
    count = len(calls) * _clamped(_SAMPLE_US / (estimate_us * len(calls)), 1, _MAX_CALLS)
    samples = list(_cpu_samples(turns, count, num_samples))
    return _timing(samples, Method.CPU, count, True)


def _cpu_samples(turns: _Turns, count: int, num_samples: int) -> Iterator[float]:
    begin = time.perf_counter()
    for number in range(num_samples):
        if number >= 3 and time.perf_counter() - begin > _CPU_SECONDS:
            return
        start = time.perf_counter()
        turns.make(count)
        yield 1e6 * (time.perf_counter() - start) / count


def _clamped(x: float, low: int, high: int) -> int:
    return max(low, min(int(x) + 1, high))


def _timing(samples: Sequence[float], method: Method, count: int, is_queue_full: bool) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), method, len(samples), count, is_queue_full)
