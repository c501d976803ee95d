"""Where blocks lie in a tensor: every case is a stack of matrices cut into blocks of (rows, columns)."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from mxsim.blocks.block_format import BlockFormat

CHUNK = 2**17  # elements worked on at a time, so that temporaries stay small and in cache

Slices = tuple[slice, slice, slice]


def normalize_axis(axis: int | None, ndim: int, fmt: BlockFormat, caller: str) -> int:
    """The block axis as a negative number (-1 for tiles), checked against the format and the number of axes."""
    axis = fmt.default_axis if axis is None else axis
    needed_ndim = 2 if fmt.is_tile or fmt.default_axis == -2 else 1
    if ndim < needed_ndim:
        raise ValueError(f"{caller}: the tensor has {ndim} axes, needed at least {needed_ndim} for {fmt}")
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{caller}: axis is {axis!r}, needed an integer")
    axis = int(axis)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{caller}: axis is {axis}, needed {-ndim} to {ndim - 1} for a tensor of {ndim} axes")
    axis = axis if axis < 0 else axis - ndim
    if fmt.is_tile and axis < -2:
        raise ValueError(f"{caller}: axis is {axis}, but blocks of {fmt} cover the last two axes")
    if not fmt.is_tile and fmt.default_axis == -2 and axis != -2:
        raise ValueError(f"{caller}: axis is {axis}, needed -2 for {fmt}, whose blocks run down a column")
    return -1 if fmt.is_tile else axis


def block_of(fmt: BlockFormat, axis: int) -> tuple[int, int]:
    """(rows, columns) of a block in the matrices of `as_matrices`."""
    if fmt.is_tile:
        return fmt.block_shape
    return (1, fmt.block_size) if axis == -1 else (fmt.block_size, 1)


def as_matrices(array: np.ndarray, fmt: BlockFormat, axis: int) -> np.ndarray:
    """The array as (stack, rows, columns): blocks run along the columns of the last axis, else down the rows.

    A view where the array is contiguous, a copy elsewhere. Serves the tensor and its scales alike.
    """
    shape = array.shape
    if fmt.is_tile:
        return array.reshape(prod(shape[:-2]), *shape[-2:])
    if axis == -1:
        return array.reshape(1, prod(shape[:-1]), shape[-1])
    return array.reshape(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))


def chunks(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[tuple[Slices, Slices]]:
    """(elements, blocks) slices that cover the matrices in pieces of about CHUNK elements, cut at block borders."""
    stack, rows, columns = shape
    if not prod(shape):
        return
    block_rows, block_columns = block
    column_step = min(_round_up(columns, block_columns), max(1, CHUNK // block_rows // block_columns) * block_columns)
    row_step = min(_round_up(rows, block_rows), max(1, CHUNK // column_step // block_rows) * block_rows)
    stack_step = max(1, CHUNK // (row_step * column_step))
    for i in range(0, stack, stack_step):
        for r in range(0, rows, row_step):
            for c in range(0, columns, column_step):
                yield (
                    (slice(i, i + stack_step), slice(r, r + row_step), slice(c, c + column_step)),
                    (
                        slice(i, i + stack_step),
                        slice(r // block_rows, (r + row_step) // block_rows),
                        slice(c // block_columns, (c + column_step) // block_columns),
                    ),
                )


def split_blocks(piece: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """(stack, rows, columns) -> (stack, block rows, rows, block columns, columns), a short last block filled with 0."""
    stack, rows, columns = piece.shape
    padded_rows, padded_columns = _round_up(rows, block[0]), _round_up(columns, block[1])
    if (rows, columns) != (padded_rows, padded_columns):
        padded = np.zeros((stack, padded_rows, padded_columns), piece.dtype)
        padded[:, :rows, :columns] = piece
        piece = padded
    return piece.reshape(stack, padded_rows // block[0], block[0], padded_columns // block[1], block[1])


def join_blocks(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The inverse of `split_blocks`, for a piece of the given rows and columns."""
    stack, num_rows, block_rows, num_columns, block_columns = blocks.shape
    return blocks.reshape(stack, num_rows * block_rows, num_columns * block_columns)[:, :rows, :columns]


def per_block(values: np.ndarray) -> Any:
    """One value a block, shaped to broadcast against `split_blocks`."""
    return values[:, :, None, :, None]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
