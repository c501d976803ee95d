"""Benchmark of the expert layer of `mxsim.moe` in BF16, FP8 and MXFP4: time, memory, and figures to reach.

>>> from mxsim.bench import moe                                                         # doctest: +SKIP
>>> moe.run("cuda").figures                                                             # doctest: +SKIP
"""

from mxsim.bench.moe.report import MoeReport
from mxsim.bench.moe.runner import run
from mxsim.bench.moe.workload import FULL, TINY, LayerShape

__all__ = ["FULL", "TINY", "LayerShape", "MoeReport", "run"]
