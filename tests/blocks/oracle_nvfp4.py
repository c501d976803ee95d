"""NVFP4 as the specification's sentence, one float32 operation after another on scalars.

s_enc = min(2688 / amax, FLT_MAX);   scale = E4M3((amax_b / 6) * s_enc)          order PAPER
                                     scale = E4M3(amax_b * (s_enc * (1 / 6)))    order TE
code = E2M1(x * min(1 / (scale * (1 / s_enc)), FLT_MAX))

The last steps, E4M3 and E2M1, are the oracle's, on Fractions.
"""

import numpy as np

from tests import oracle
from tests.formats.table_codec import encode_by_table

F = np.float32
FLT_MAX = F(3.4028234663852886e38)


def nvfp4_by_steps(x: np.ndarray, order: str) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, scales, tensor scale) of float32 rows [rows, 16 * blocks]."""
    assert x.dtype == np.float32
    rows, columns = x.shape
    codes, scales = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns // 16), np.uint8)
    with np.errstate(all="ignore"):
        finite = [abs(v) for v in x.ravel() if np.isfinite(v)]
        amax = max(finite, default=F(0))
        s_enc = F(1) if amax == 0 else min(F(2688) / amax, FLT_MAX)
        inverse = F(1) / s_enc
        for r in range(rows):
            for b in range(columns // 16):
                block = x[r, 16 * b : 16 * b + 16]
                if not all(np.isfinite(v) for v in block):
                    scales[r, b] = 0x7F
                    continue
                block_amax = max(abs(v) for v in block)
                if order == "PAPER":
                    wanted = F(F(block_amax / F(6)) * s_enc)
                else:
                    wanted = F(block_amax * F(s_enc * F(F(1) / F(6))))
                wanted = min(wanted, FLT_MAX)  # E4M3 saturates either way
                scales[r, b] = oracle.encode(float(wanted), oracle.E4M3)
                if scales[r, b] == 0:
                    continue
                scale = F(float(oracle.decode(int(scales[r, b]), oracle.E4M3).value))
                step = F(scale * inverse)
                factor = min(F(1) / step, FLT_MAX) if step else FLT_MAX
                for j, v in enumerate(block):
                    codes[r, 16 * b + j] = oracle.encode(float(F(v * factor)), oracle.E2M1)
    return codes, scales, inverse


def nvfp4_by_arrays(
    x: np.ndarray,
    order: str,
    *,
    rounding: str = "TIES_TO_EVEN",
    random_words: np.ndarray | None = None,
    k: int = 32,
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """The same on whole arrays, for sweeps: NumPy rounds every float32 operation once."""
    assert x.dtype == np.float32
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // 16, 16)
    with np.errstate(all="ignore"):
        finite = np.abs(x[np.isfinite(x)])
        amax = finite.max() if finite.size else F(0)
        s_enc = F(1) if amax == 0 else min(F(2688) / amax, FLT_MAX)
        inverse = F(1) / s_enc
        good = np.isfinite(blocks).all(axis=-1)
        block_amax = np.abs(np.where(good[..., None], blocks, F(0))).max(axis=-1)
        wanted = block_amax / F(6) * s_enc if order == "PAPER" else block_amax * (s_enc * (F(1) / F(6)))
        assert wanted.dtype == np.float32
        scale_codes = encode_by_table(wanted, oracle.E4M3)
        values = np.array([float(oracle.decode(c, oracle.E4M3).value) for c in range(0x7F)], np.float32)
        factor = np.minimum(F(1) / (values[scale_codes] * inverse), FLT_MAX)
        used = (good & (scale_codes != 0))[..., None]
        scaled = np.where(used, blocks, F(0)) * factor[..., None]
        assert scaled.dtype == np.float32
    words = None if random_words is None else random_words.reshape(blocks.shape)
    codes = encode_by_table(scaled, oracle.E2M1, rounding, r=words, k=k)
    scales = np.where(good, scale_codes, 0x7F)
    return np.where(used, codes, 0).astype(np.uint8).reshape(x.shape), scales.astype(np.uint8), inverse
