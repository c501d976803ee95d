"""Other libraries beside the ops. Each is an optional install."""

from typing import Any

import torch
from torch import Tensor

from mxsim.bench.cases import Layout, Shape, num_bytes
from mxsim.bench.rivals import Rival


def torchao(device: torch.device) -> list[Rival]:
    """torchao's `to_mx`, compiled on a CUDA device, eager on the CPU.

    Raises:
        ImportError: if torchao is not installed, or has its prototype elsewhere.
    """
    import torchao
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def to_mxfp4(x: Tensor) -> Any:
        return to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)

    def to_mxfp8(x: Tensor) -> Any:
        return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)

    def codes_first(results: Any) -> tuple[Tensor, ...]:
        scales, codes = results
        return codes, scales

    def bytes_of_mxfp8(shape: Shape) -> int:
        return num_bytes(Layout.BF16, shape) + shape.num_elements * 33 // 32

    is_compiled = device.type == "cuda"
    how = "compiled" if is_compiled else "eager"
    return [
        Rival(
            f"torchao {torchao.__version__} to_mx MXFP4 FLOOR, {how}",
            "bf16_to_fp4_row",
            Layout.BF16,
            torch.compile(to_mxfp4, dynamic=False) if is_compiled else to_mxfp4,
            lambda shape: num_bytes(Layout.BF16, shape) + num_bytes(Layout.FP4_ROWS, shape),
            same_bits=codes_first,
        ),
        Rival(
            f"torchao {torchao.__version__} to_mx MXFP8 FLOOR, {how}",
            "bf16_to_fp8_row",
            Layout.BF16,
            torch.compile(to_mxfp8, dynamic=False) if is_compiled else to_mxfp8,
            bytes_of_mxfp8,
            note="blocks of 32",
        ),
    ]
