"""Benchmark of expert parallelism in BF16, FP8 and MXFP4: the dispatch and the whole layer over several processes.

>>> from mxsim.bench import ep                                                          # doctest: +SKIP
>>> ep.run("cuda", num_ranks=2).figures                                                 # doctest: +SKIP
"""

from mxsim.bench.ep.report import EpReport
from mxsim.bench.ep.run import run
from mxsim.bench.ep.workload import FULL, TINY, EpShape

__all__ = ["FULL", "TINY", "EpReport", "EpShape", "run"]
