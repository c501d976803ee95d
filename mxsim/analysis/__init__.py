"""Error metrics, the checkpoint study, whose rules made these bytes: arrays and files in, tidy rows out. NumPy only."""

from mxsim.analysis.chains import CHAINS, Chain, Conversion, Part
from mxsim.analysis.decomposition import Decomposition, decompose
from mxsim.analysis.error import ErrorSums
from mxsim.analysis.error_report import ErrorReport, measure
from mxsim.analysis.fp4_to_fp8 import exponent_spread, is_lossless
from mxsim.analysis.gemm_decomposition import decompose_gemm
from mxsim.analysis.identify import Comparison, Difference, Identification, identify
from mxsim.analysis.profile_catalog import PROFILES, profiles_of
from mxsim.analysis.profiles import Factor, NonFinitePolicy, Profile, Quotient, TieRule
from mxsim.analysis.published_transpose import published_fp8_transpose
from mxsim.analysis.row_to_column import RowToColumn, RowToColumnRow, columns_by, study_rows_to_columns
from mxsim.analysis.study import Skipped, Study, StudyRow, study_arrays, study_file
from mxsim.analysis.telling_apart import Distinction, tell_apart
from mxsim.analysis.tensor_files import StoredTensor, TensorFileError, open_tensors
from mxsim.analysis.theory import ExpectedError, MeasuredError, compare_with_theory, expected_error, measured_error

__all__ = [
    "CHAINS",
    "PROFILES",
    "Chain",
    "Comparison",
    "Conversion",
    "Decomposition",
    "Difference",
    "Distinction",
    "ErrorReport",
    "ErrorSums",
    "ExpectedError",
    "Factor",
    "Identification",
    "MeasuredError",
    "NonFinitePolicy",
    "Part",
    "Profile",
    "Quotient",
    "RowToColumn",
    "RowToColumnRow",
    "Skipped",
    "StoredTensor",
    "Study",
    "StudyRow",
    "TensorFileError",
    "TieRule",
    "columns_by",
    "compare_with_theory",
    "decompose",
    "decompose_gemm",
    "expected_error",
    "exponent_spread",
    "identify",
    "is_lossless",
    "measure",
    "measured_error",
    "open_tensors",
    "profiles_of",
    "published_fp8_transpose",
    "study_arrays",
    "study_file",
    "study_rows_to_columns",
    "tell_apart",
]
