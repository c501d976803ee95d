"""Differential validation: any implementation of an op of `mxsim.kernels` against the NumPy simulator, bit by bit.

Needs torch.

>>> from mxsim import validate                                                          # doctest: +SKIP
>>> report = validate.run(device="cpu", size="quick")                                   # doctest: +SKIP
>>> report.ok, report.num_elements                                                      # doctest: +SKIP
"""

from mxsim.validate.reference import OPS
from mxsim.validate.report import Report
from mxsim.validate.runner import check, run, run_peer

__all__ = ["OPS", "Report", "check", "run", "run_peer"]
