"""Which recomputation costs the least time of those that fit."""

from dataclasses import replace
from itertools import combinations

from mxsim.moe.memory.activations import Module
from mxsim.moe.memory.estimate import Run, judge
from mxsim.moe.memory.throughput import token_time


def fastest_that_fits(run: Run, gpu_gb: float = 80.0) -> Run | None:
    """The run with another scope, of all sets of modules the fastest that fits; None if none does.

    Of equally fast ones the one with the smallest worst stage, then with the fewest modules.
    """
    candidates = [
        replace(run, scope=frozenset(chosen))
        for size in range(len(Module) + 1)
        for chosen in combinations(Module, size)
    ]
    best: tuple[float, float, int] | None = None
    found = None
    for candidate in candidates:
        verdict = judge(candidate, gpu_gb)
        key = (token_time(candidate).total_us, verdict.worst.total, len(candidate.scope))
        if verdict.fits and (best is None or key < best):
            best, found = key, candidate
    return found
