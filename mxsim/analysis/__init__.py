"""Error metrics and the checkpoint study: arrays and files in, tidy rows out. NumPy only."""

from mxsim.analysis.error import ErrorSums
from mxsim.analysis.fp4_to_fp8 import exponent_spread, is_lossless
from mxsim.analysis.study import Skipped, Study, StudyRow, study_arrays, study_file
from mxsim.analysis.tensor_files import StoredTensor, TensorFileError, open_tensors

__all__ = [
    "ErrorSums",
    "Skipped",
    "StoredTensor",
    "Study",
    "StudyRow",
    "TensorFileError",
    "exponent_spread",
    "is_lossless",
    "open_tensors",
    "study_arrays",
    "study_file",
]
