"""Benchmarks of `mxsim.kernels`: time and bytes of every op beside a copy, unfused sequences and other libraries.

Needs torch.

>>> from mxsim import bench                                                             # doctest: +SKIP
>>> report = bench.run(device="cuda", ops=["fp4_row_to_fp8_col"])                       # doctest: +SKIP
>>> report.measurements[0].of_copy                                                      # doctest: +SKIP
"""

from mxsim.bench.cases import DEFAULT_SHAPES, OPS, QUICK_SHAPES, Shape
from mxsim.bench.report import Report
from mxsim.bench.runner import run

__all__ = ["DEFAULT_SHAPES", "OPS", "QUICK_SHAPES", "Report", "Shape", "run"]
