"""torchao's `to_mx` in its four scale rules, eager."""

from typing import Any

import torch
from torch import Tensor

from mxsim.blocks import ScaleRule
from mxsim.validate.peers import Peer

INSTALL = "pip install torchao"


def load() -> Peer:
    """Raises ImportError where torchao is not installed, or has its prototype elsewhere."""
    import torchao
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def bf16_to_fp4_row(x: Tensor, *, scale_rule: ScaleRule = ScaleRule.FLOOR) -> tuple[Tensor, Tensor]:
        if x.dtype is torch.float16:
            x = x.float()  # to_mx takes bfloat16 and float32; exact
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        mode: Any = ScaleCalculationMode[scale_rule.name]
        scales, codes = to_mx(rows, torch.float4_e2m1fn_x2, 32, mode)
        return codes.view(torch.uint8), scales.view(torch.uint8)

    return Peer(
        "torchao",
        torchao.__version__,
        {"bf16_to_fp4_row": bf16_to_fp4_row},
        "to_mx(x, float4_e2m1fn_x2, 32, mode), eager; float16 inputs widened to float32 first",
    )
