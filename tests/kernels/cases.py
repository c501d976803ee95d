"""Inputs that hold everything at once: each block of a tensor is drawn from another kind of numbers."""

import numpy as np
import torch

FLOATS = {torch.bfloat16: "uint16", torch.float16: "uint16", torch.float32: "uint32"}
KINDS = 9


def floats(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of blocks of 32: normal, heavy-tailed, wide, tiny, huge, zeros, subnormal, any bits, NaN or infinity."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // 32, 32)
    kind = rng.integers(0, KINDS, (*shape[:2], 1))
    normal = rng.standard_normal(shape)
    heavy = normal / np.maximum(rng.random(shape), 1e-3) ** 2
    wide = np.ldexp(normal, rng.integers(-30, 30, shape))
    tiny, huge = np.ldexp(normal, -120), np.ldexp(normal, 126)
    poisoned = np.where(rng.random(shape) < 0.03, rng.choice([np.nan, np.inf, -np.inf], shape), normal)
    x = np.select([kind == k for k in range(5)], [normal, heavy, wide, tiny, huge], poisoned)
    x = np.where(kind == 5, np.copysign(0.0, normal), x)
    with np.errstate(over="ignore", under="ignore"):
        t = torch.from_numpy(x.astype(np.float32)).to(dtype)
    bits = t.view(torch.int16 if t.itemsize == 2 else torch.int32).numpy().view(FLOATS[dtype])
    mantissa_bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    sign = bits.dtype.type(1 << (8 * t.itemsize - 1))
    any_bits = rng.integers(0, 2 ** (8 * t.itemsize), shape, bits.dtype)
    subnormal = any_bits & (sign | bits.dtype.type((1 << mantissa_bits) - 1))
    bits[:] = np.where(kind == 6, subnormal, np.where(kind == 7, any_bits, bits))
    return t.reshape(rows, columns)


def fp4_rows(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes, scales): scales within 25 binades of each other, some anywhere, some NaN."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // 32)
    scales = rng.integers(115, 140, shape)
    scales = np.where(rng.random(shape) < 0.05, rng.integers(0, 256, shape), scales)
    scales = np.where(rng.random(shape) < 0.05, 0xFF, scales)
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scales.astype(np.uint8))


def fp8_rows(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): powers of two, near each other or anywhere, subnormal and NaN ones too; blocks of zeros."""
    rng = np.random.default_rng(seed)
    shape = (rows, columns // 128)
    exponents = np.where(rng.random(shape) < 0.05, rng.integers(-149, 128, shape), rng.integers(-8, 10, shape))
    scales = np.where(rng.random(shape) < 0.05, np.nan, np.ldexp(1.0, exponents)).astype(np.float32)
    codes = rng.integers(0, 256, (*shape, 128), np.uint8)
    codes = np.where(rng.random((*shape, 1)) < 0.5, np.where(codes & 0x7F == 0x7F, 0x33, codes), codes)  # without NaN
    codes = np.where(rng.random((*shape, 1)) < 0.2, codes & 0x80, codes)
    return torch.from_numpy(codes.reshape(rows, columns)), torch.from_numpy(scales)
