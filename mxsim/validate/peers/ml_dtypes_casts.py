"""ml_dtypes' casts as the element encoding; scales, and the codes of NaN blocks, are the simulator's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxsim.blocks import FP8_1X128, MXFP4, BlockFormat, ScaleRule, quantize
from mxsim.validate.peers import Peer

INSTALL = "pip install ml_dtypes"


def load() -> Peer:
    """Raises ImportError where ml_dtypes is not installed."""
    import ml_dtypes

    def cast(x: Tensor, fmt: BlockFormat, element: Any, rule: ScaleRule | None) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales); an element is cast from the exact quotient, which float64 holds."""
        values = x.reshape(-1, x.shape[-1]).cpu().double().numpy()
        t = quantize(values.astype(np.float32), fmt, scale_rule=rule)
        scale = np.repeat(t.scale_values(), fmt.block_size, axis=-1)
        limit = fmt.element.max_finite
        with np.errstate(invalid="ignore", under="ignore"):
            codes = np.clip(values / scale, -limit, limit).astype(element).view(np.uint8)
        return np.where(np.isnan(scale), t.codes, codes), t.scales

    def bf16_to_fp4_row(x: Tensor, *, scale_rule: ScaleRule = ScaleRule.FLOOR) -> tuple[Tensor, Tensor]:
        codes, scales = cast(x, MXFP4, ml_dtypes.float4_e2m1fn, scale_rule)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return torch.from_numpy(packed).to(x.device), torch.from_numpy(scales).to(x.device)

    def bf16_to_fp8_row(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = cast(x, FP8_1X128, ml_dtypes.float8_e4m3fn, None)
        stored = torch.ones(scales.shape[1], -(-scales.shape[0] // 4) * 4).t()[: scales.shape[0]]
        stored.copy_(torch.from_numpy(scales))
        return torch.from_numpy(codes).to(x.device), stored.to(x.device)

    return Peer(
        "ml_dtypes",
        ml_dtypes.__version__,
        {"bf16_to_fp4_row": bf16_to_fp4_row, "bf16_to_fp8_row": bf16_to_fp8_row},
        "astype(float4_e2m1fn) and astype(float8_e4m3fn) of x / scale, clipped; scales and NaN blocks by the simulator",
    )
