"""Differential validation: any implementation of an op of `mxsim.kernels` against the NumPy simulator, bit by bit.

Also Hopper's FP8 GEMM, torch's `scaled_mm`, against its emulation, and `probe_split_k`. Needs torch.

>>> from mxsim import validate
>>> report = validate.run("fp4_to_bf16", device="cpu", size="quick")
>>> report.ok, report.num_mismatches
(True, 0)
"""

from mxsim.validate.gemm_cases import SCALED_MM, GemmLayout
from mxsim.validate.reference import OPS
from mxsim.validate.report import Report
from mxsim.validate.runner import check, run, run_peer
from mxsim.validate.split_k import probe_split_k

__all__ = ["OPS", "SCALED_MM", "GemmLayout", "Report", "check", "probe_split_k", "run", "run_peer"]
