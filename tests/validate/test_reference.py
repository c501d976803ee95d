"""The oracle: values and layouts worked out by hand, and no help from what it judges."""

import ast
from pathlib import Path

import numpy as np
import pytest

import mxsim.validate.reference as reference
from mxsim.validate.reference import PADDING, Layout, expected


def _leaves(op, inputs, **options):
    return {leaf.name: leaf for leaf in expected(op, inputs, options)}


def _bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_nothing_of_the_kernels_is_imported():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in modules if m.startswith("mxsim.kernels")]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Import) and "mxsim" in ast.dump(n)]


def test_fp4_rows_put_element_0_in_the_low_nibble():
    x = np.zeros((1, 32), np.uint16)
    x[0, :3] = _bf16([6.0, -0.5, 1.0])
    leaves = _leaves("bf16_to_fp4_row", {"x": x})
    assert leaves["codes"].bits[0, :2].tolist() == [0x97, 0x02]
    assert leaves["scales"].bits.tolist() == [[127]]
    assert leaves["codes"].source()[0, :3].tolist() == [0, 2, 4]


def test_ragged_rows_have_scale_chunks_of_their_own():
    codes = np.arange(3, dtype=np.uint8)[:, None].repeat(256, axis=1)
    scales = np.array([[1, 2], [4, 8], [16, 32]], np.float32)
    leaves = _leaves("fp8_row_to_ragged", {"codes": codes, "scales": scales}, group_sizes=[2, 0, 1], row_multiple=3)
    assert leaves["codes"].bits[:, 0].tolist() == [0, 1, 0, 2, 0, 0]
    assert leaves["scales"].bits.view(np.float32).tolist() == [1, 4, 1, 2, 8, 1, 16, 1, 1, 32, 1, 1]
    assert leaves["scales"].source().tolist() == [0, 256, -1, 128, 384, -1, 512, -1, -1, 640, -1, -1]
    assert leaves["padded_group_sizes"].bits.tolist() == [3, 0, 3]


def test_ragged_columns_are_transposed_expert_by_expert():
    """Rows 0 and 1 belong to one expert, row 2 to another; 2**-3 and 1 share a column block, 1 has its own."""
    codes = np.full((3, 16), 0x22, np.uint8)  # every element 1.0
    scales = np.array([[127], [124], [127]], np.uint8)
    leaves = _leaves("fp4_row_to_fp8_col", {"codes": codes, "scales": scales}, group_sizes=[2, 1])
    chunks = leaves["codes"].bits.reshape(2, 32, 128)
    assert chunks[0, :, 0].tolist() == [0x68] * 32  # 1 * 2**6
    assert chunks[0, :, 1].tolist() == [0x50] * 32  # 1 * 2**3
    assert not chunks[0, :, 2:].any()
    assert chunks[1, :, 0].tolist() == [0x68] * 32
    assert leaves["scales"].bits.view(np.float32).tolist() == [[2.0**-6] * 32] * 2
    source = leaves["codes"].source().reshape(2, 32, 128)
    assert source[0, 5, :3].tolist() == [5, 32 + 5, PADDING]
    assert source[1, 5, 0] == 64 + 5


def test_tile_scales_are_those_of_the_output():
    w = np.zeros((129, 260), np.uint16)
    w[128, 0] = _bf16(448.0)
    w[0, 256] = _bf16(896.0)
    plain, transposed = (_leaves("bf16_to_fp8_tile", {"w": w}, transpose=t) for t in (False, True))
    assert plain["scales"].bits.view(np.float32).tolist() == [[1, 1, 2], [1, 1, 1]]
    assert transposed["scales"].bits.view(np.float32).tolist() == [[1, 1], [1, 1], [2, 1]]
    assert transposed["codes"].bits[0, 128] == plain["codes"].bits[128, 0] == 0x7E
    assert plain["scales"].source()[1, 2] == 128 * 260 + 256
    assert transposed["scales"].source()[2, 1] == 128 * 260 + 256


@pytest.mark.parametrize(
    "layout, shape, strides",
    [
        (Layout.CONTIGUOUS, (3, 5), (5, 1)),
        (Layout.CONTIGUOUS, (7,), (1,)),
        (Layout.CONTIGUOUS, (2, 3, 5), (15, 5, 1)),
        (Layout.ROWS_4, (5, 2), (1, 8)),
        (Layout.ROWS_4, (8, 2), (1, 8)),
        (Layout.COLUMNS_4, (2, 3, 5), (24, 8, 1)),
        (Layout.COLUMNS_4, (3, 4), (4, 1)),
    ],
)
def test_strides(layout, shape, strides):
    assert layout.strides(shape) == strides


@pytest.mark.parametrize(
    "sizes, clamped", [([1, 5], [1, 2]), ([5], [3]), ([-4, 2], [0, 2]), ([1, -(2**50), 2**60, 1], [1, 0, 2, 0])]
)
def test_group_sizes_are_clamped_in_order(sizes, clamped):
    codes = np.arange(3, dtype=np.uint8)[:, None].repeat(128, axis=1)
    leaves = _leaves(
        "fp8_row_to_ragged",
        {"codes": codes, "scales": np.ones((3, 1), np.float32)},
        group_sizes=sizes,
        row_multiple=1,
    )
    assert leaves["padded_group_sizes"].bits.tolist() == clamped
    assert leaves["codes"].bits[:, 0].tolist() == list(range(sum(clamped)))


def test_scales_that_are_no_powers_of_two_act_as_nan():
    codes = np.full((2, 128), 0x38, np.uint8)
    for bad in (0.0, -1.0, 3.0, np.inf, np.nan):
        scales = np.array([[bad], [1]], np.float32)
        leaves = _leaves("fp8_row_to_fp4_row", {"codes": codes, "scales": scales})
        assert leaves["scales"].bits.tolist() == [[0xFF] * 4, [125] * 4]
