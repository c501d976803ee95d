"""Differential validation: any implementation of an op of `mxsim.kernels` against the NumPy simulator, bit by bit.

Needs torch.

>>> from mxsim import validate
>>> report = validate.run("fp4_to_bf16", device="cpu", size="quick")
>>> report.ok, report.num_mismatches
(True, 0)
"""

from mxsim.validate.reference import OPS
from mxsim.validate.report import Report
from mxsim.validate.runner import check, run, run_peer

__all__ = ["OPS", "Report", "check", "run", "run_peer"]
