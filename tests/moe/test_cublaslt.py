"""The calls of cuBLASLt, answered by a library of Python that reads and writes the same memory; and the real one.

The stand-in knows cuBLASLt's interface alone: matrices by columns, transposes, modes and pointers of scales, algorithms
that work for some shapes. What it computes are the bits of the NumPy model.
"""

import ctypes
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim.blocks import FP8_1X128, FP8_128X128, BlockTensor, fp8_gemm  # noqa: E402
from mxsim.kernels import Fp8Cols, RaggedFp8Rows  # noqa: E402
from mxsim.moe import cublaslt  # noqa: E402
from tests.compare import assert_codes_equal  # noqa: E402
from tests.moe.gemm_cases import OUTPUTS, SIZES, bits, expert_cols, expert_rows, expert_tiles, make, model  # noqa: E402

BY_SIZES = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
BY_OUTPUT = pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
HANDLE, STREAM = 0x1230, 0x4560
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
OUT_TYPES = {0: np.float32, 14: ml_dtypes.bfloat16}


def words(at, count=8):
    """The memory of a descriptor as integers."""
    return (ctypes.c_uint64 * count).from_address(at)


def array(at, dtype, shape):
    """Memory as an array, by columns."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(at), dtype).reshape(shape, order="F")


class Library:
    """What cublasLt.h says of the functions that are called, for FP8 operands."""

    def __init__(self):
        self.calls = Counter()
        self.refuses = lambda n, m, k, alignment: False  # an algorithm found with this alignment, for this product
        self.offers_unsplit = lambda m: True  # whether a query for algorithms that do not split K finds any
        self.unsplits = True  # whether an algorithm can be told not to split K
        self.splits = {}  # algorithm -> parts of K; algorithms are numbered from 1, 3 a query
        self.workspace_bytes = 0
        self.asked = []  # (n, m, k) of queries
        self.shapes = []  # (n, m, k) of products
        self.algorithms = {}  # number -> alignment that it was asked with

    def cublasLtMatrixLayoutInit_internal(self, at, size, kind, rows, columns, step):
        assert size == 64
        assert step == rows
        words(at)[:4] = kind, rows, columns, step
        return SUCCESS

    def cublasLtMatmulDescInit_internal(self, at, size, compute, scale):
        assert (size, compute, scale) == (256, 68, 0)
        words(at, 32)[:] = [0] * 32
        return SUCCESS

    def cublasLtMatmulDescSetAttribute(self, at, attribute, value, size):
        kind = {3: ctypes.c_int32, 4: ctypes.c_int32, 31: ctypes.c_int32, 32: ctypes.c_int32}
        number = kind.get(attribute, ctypes.c_uint64).from_address(value).value
        assert size == (4 if attribute in kind else 8)
        # The structure has room for 32 words, attributes go up to 38.
        words(at, 32)[attribute if attribute < 31 else attribute - 30] = number
        return SUCCESS

    def cublasLtMatmulPreferenceInit_internal(self, at, size):
        assert size == 64
        words(at)[:] = [0, 7, 256, 256, 256, 256, 0, 0]  # workspace, reduction schemes, alignments
        return SUCCESS

    def cublasLtMatmulPreferenceSetAttribute(self, at, attribute, value, size):
        slot = {1: 0, 3: 1, 5: 2, 6: 3, 7: 4, 8: 5}[attribute]
        assert size == (8 if attribute == 1 else 4)
        words(at)[slot] = (ctypes.c_uint64 if attribute == 1 else ctypes.c_uint32).from_address(value).value
        return SUCCESS

    def cublasLtMatmulAlgoGetHeuristic(self, handle, descriptor, a, b, c, d, preference, wanted, results, count):
        assert handle == HANDLE
        self.asked.append(self.shape(descriptor, a, b, c, d))
        workspace, schemes, *alignments = words(preference)[:6]
        assert workspace == 32 << 20
        assert schemes in (0, 7)  # no split K, or any
        if schemes == 0 and not self.offers_unsplit(self.asked[-1][1]):
            return NOT_SUPPORTED
        assert len(set(alignments)) == 1
        assert wanted >= 3
        for index in range(3):
            number = len(self.algorithms) + 1
            self.algorithms[number] = alignments[0]
            if schemes:
                self.splits[number] = 2
            # 64 bytes of algorithm, bytes of workspace, status and waves, 16 bytes reserved
            words(results + 96 * index, 12)[:10] = [number] * 8 + [self.workspace_bytes, SUCCESS]
        words(results, 12)[9] = NOT_SUPPORTED  # the first of them
        ctypes.c_int.from_address(count).value = 3
        return SUCCESS

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, value, size, written):
        assert (attribute, size) == (2, 4)
        ctypes.c_int32.from_address(value).value = self.splits.get(words(algorithm)[7], 1)
        ctypes.c_size_t.from_address(written).value = 4
        return SUCCESS

    def cublasLtMatmulAlgoConfigSetAttribute(self, algorithm, attribute, value, size):
        assert size == 4
        assert (attribute, ctypes.c_int32.from_address(value).value) in ((2, 1), (3, 0))
        if attribute == 2:
            self.splits[words(algorithm)[7]] = 1
        return SUCCESS if self.unsplits else INVALID_VALUE

    def cublasLtMatmulAlgoCheck(self, handle, descriptor, a, b, c, d, algorithm, result):
        assert handle == HANDLE
        self.shape(descriptor, a, b, c, d)
        assert self.splits[words(algorithm)[7]] == 1
        words(result, 12)[8] = self.workspace_bytes
        return SUCCESS

    def shape(self, descriptor, a, b, c, d):
        transposes = words(descriptor, 32)[3:5]
        assert transposes == [1, 0]
        assert c == d
        (kind_a, k, n), (kind_b, k_b, m), (_, *rows) = (words(at)[:3] for at in (a, b, d))
        assert kind_a == kind_b == 28
        assert k_b == k
        assert rows == [n, m]
        return n, m, k

    def cublasLtMatmul(
        self, handle, descriptor, alpha, a, at_a, beta_b, at_b, beta, c, at_c, d, at_d, algorithm, *workspace_and_stream
    ):
        workspace, workspace_bytes, stream = workspace_and_stream
        assert (handle, stream) == (HANDLE, STREAM)
        assert [ctypes.c_float.from_address(x).value for x in (alpha, beta)] == [1, 0]
        assert c is None
        n, m, k = self.shape(descriptor, at_a, at_b, at_c, at_d)
        scale_a, scale_b = words(descriptor, 32)[17:19]
        mode_a, mode_b = words(descriptor, 32)[1:3]
        number = words(algorithm)[7]
        assert list(words(algorithm)) == [number] * 8
        assert number % 3 != 1, "an algorithm whose status says that it is not supported"
        assert self.splits.get(number, 1) == 1
        assert workspace_bytes >= self.workspace_bytes
        assert bool(workspace) == bool(workspace_bytes)
        for address in (a, beta_b, d, scale_a, scale_b):
            assert address % 16 == 0
        assert m % 4 == n % 16 == k % 128 == 0
        self.calls["matmul"] += 1
        if self.refuses(n, m, k, self.algorithms[number]):
            return INVALID_VALUE
        self.shapes.append((n, m, k))
        left = self.operand(a, scale_a, mode_a, k, n)
        right = self.operand(beta_b, scale_b, mode_b, k, m)
        out = OUT_TYPES[words(at_d)[0]]
        # out.T by rows is out by columns. The model's order of scales is that of (right, left).
        array(d, out, (n, m))[:] = fp8_gemm(right, left, out=out).T
        return SUCCESS

    def operand(self, codes, scales, mode, k, columns):
        codes = np.ascontiguousarray(array(codes, np.uint8, (k, columns)).T)
        if mode == 4:  # stored by columns of `columns`
            scales = array(scales, np.float32, (columns, k // 128))
            return BlockTensor(codes, np.ascontiguousarray(scales), FP8_1X128)
        assert mode == 5
        tall = -(-(k // 128) // 4) * 4
        scales = array(scales, np.float32, (tall, -(-columns // 128)))[: k // 128]
        return BlockTensor(codes, np.ascontiguousarray(scales.T), FP8_128X128)


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "handle_and_stream", lambda: (HANDLE, STREAM))
    for kept in ("_rounded_algorithms", "_exact_algorithms"):
        monkeypatch.setattr(cublaslt, kept, {})
    return library


def assert_rows_as_model(got, case, out_dtype):
    sizes, start = list(case.groups.sizes), 0
    assert got.dtype is out_dtype
    assert got.shape == (sum(sizes), case.w.shape[1])
    for expert, size in enumerate(sizes):
        if size:
            want = model(expert_rows(case.rows, sizes, expert), expert_tiles(case.tiles, expert), out_dtype)
            assert_codes_equal(bits(got[start : start + size]), want, label=f"expert {expert}")
        start += size


# ------------------------------------------------------------------------------------------------------------ the calls
@BY_SIZES
@BY_OUTPUT
@pytest.mark.parametrize("n, k", [(64, 384), (160, 512)])
def test_rows_are_the_model_expert_by_expert(library, sizes, out_dtype, n, k):
    case = make(sizes, n, k)
    got = cublaslt.rows(case.rows, case.tiles, case.groups, out_dtype)
    assert_rows_as_model(got, case, out_dtype)
    assert library.shapes == [(n, -(-size // 4) * 4, k) for size in sizes if size]


@BY_SIZES
@BY_OUTPUT
def test_wgrad_is_the_model_expert_by_expert(library, sizes, out_dtype):
    case = make(sizes, 32, 128)
    got = cublaslt.wgrad(case.dy_cols, case.x_cols, case.groups, out_dtype)
    assert got.dtype is out_dtype
    assert got.shape == (len(sizes), 32, 128)
    for expert, size in enumerate(sizes):
        if size:
            want = model(expert_cols(case.dy_cols, sizes, expert), expert_cols(case.x_cols, sizes, expert), out_dtype)
            assert_codes_equal(bits(got[expert]), want, label=f"expert {expert}")
        else:
            assert not got[expert].any()
    assert library.shapes == [(128, 32, -(-size // 128) * 128) for size in sizes if size]


def test_operands_that_begin_anywhere_are_aligned(library):
    def shifted(x):
        buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
        buffer[1:] = x.contiguous().view(-1)
        return buffer[1:].view(x.shape)

    case = make([5, 3], 32, 384)
    rows = RaggedFp8Rows(shifted(case.rows.codes), shifted(case.rows.scales), case.rows.padded_group_sizes)
    tiles = case.tiles._replace(codes=shifted(case.tiles.codes))
    assert_rows_as_model(cublaslt.rows(rows, tiles, case.groups, torch.float32), case, torch.float32)
    cols = [Fp8Cols(shifted(x.codes), shifted(x.scales), None) for x in (case.dy_cols, case.x_cols)]
    want = cublaslt.wgrad(case.dy_cols, case.x_cols, case.groups, torch.float32)
    assert torch.equal(cublaslt.wgrad(*cols, case.groups, torch.float32), want)


# -------------------------------------------------------------------------------------------------------- what is kept
def test_the_heuristic_is_asked_once_for_all_m_that_round_up_alike(library):
    case = make([5, 6, 129, 250, 256, 127, 1], 32, 128)
    for _ in range(2):
        cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32)
    assert library.asked == [(32, 8, 128), (32, 256, 128), (32, 128, 128), (32, 4, 128)]
    assert library.calls["matmul"] == 14
    cublaslt.rows(case.rows, case.tiles, case.groups, torch.bfloat16)
    assert len(library.asked) == 8
    cublaslt.wgrad(case.dy_cols, case.x_cols, case.groups, torch.float32)
    assert library.asked[8:] == [(128, 32, 128), (128, 32, 256)]


def test_an_algorithm_that_is_refused_is_asked_for_again_by_the_exact_shape(library):
    library.refuses = lambda n, m, k, alignment: m == 12 and alignment == 256
    case = make([16, 9, 16], 32, 128)
    for _ in range(2):
        assert_rows_as_model(cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32), case, torch.float32)
    assert library.asked == [(32, 16, 128), (32, 12, 128)]
    assert library.calls["matmul"] == 7  # and one that was refused


def test_a_product_that_is_refused_twice_raises(library):
    library.refuses = lambda n, m, k, alignment: True
    case = make([16], 32, 128)
    with pytest.raises(RuntimeError, match=r"cublaslt: cublasLtMatmul returned 7, invalid value"):
        cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32)


def test_an_algorithm_that_splits_k_is_passed_over(library):
    case = make([16], 32, 128)
    library.splits = {2: 2}
    assert_rows_as_model(cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32), case, torch.float32)
    library.splits = dict.fromkeys(range(200), 2)
    library.unsplits = False
    with pytest.raises(RuntimeError, match=r"no algorithm without split K for n, k = 128, 128 at any m"):
        cublaslt.wgrad(case.dy_cols, case.x_cols, case.groups, torch.float32)


def test_where_every_algorithm_splits_k_the_best_is_told_not_to(library):
    """Few rows and a long K: cuBLASLt's heuristic then answers "not supported" to a query without split K."""
    library.offers_unsplit = lambda m: False
    library.workspace_bytes = 4096
    case = make([16], 32, 128)
    assert_rows_as_model(cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32), case, torch.float32)
    assert len(library.asked) == 2
    assert library.splits[2] == 1


def test_where_none_can_be_told_the_algorithm_for_more_rows_is_taken(library):
    library.offers_unsplit = lambda m: m >= 64
    library.unsplits = False
    case = make([16, 9], 32, 128)
    for _ in range(2):
        assert_rows_as_model(cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32), case, torch.float32)
    assert library.asked == [(32, m, 128) for m in (16, 16, 32, 32, 64)]
    assert library.shapes == [(32, m, 128) for m in (16, 12)] * 2


def test_a_workspace_is_as_large_as_the_algorithm_needs(library):
    library.workspace_bytes = 4096
    case = make([5, 300], 32, 128)
    assert_rows_as_model(cublaslt.rows(case.rows, case.tiles, case.groups, torch.float32), case, torch.float32)


# ---------------------------------------------------------------------------------------------------------- the library
@pytest.mark.parametrize("version, reason", [(120803, "version 12.8, needed 12.9"), (120900, None), (130102, None)])
def test_versions_before_12_9_are_not_available(monkeypatch, version, reason):
    class Old:
        def cublasLtGetVersion(self):
            return version

    monkeypatch.setattr(cublaslt, "library", Old)
    cublaslt.unavailable.cache_clear()
    try:
        got = cublaslt.unavailable()
    finally:
        cublaslt.unavailable.cache_clear()
    assert got is None if reason is None else reason in got


def test_without_cuda_there_is_no_library():
    if torch.version.cuda is None:
        assert "torch has not loaded libcublasLt" in cublaslt.unavailable()
        with pytest.raises(OSError, match=r"libcublasLt"):
            cublaslt.library()
