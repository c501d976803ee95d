"""microxcaling (`mx`): fake quantization, its values read back as codes under the FLOOR scales of NUMERICS 3.2."""

import importlib.metadata

import numpy as np
import torch
from torch import Tensor

from mxsim.blocks import MXFP4, quantize
from mxsim.formats import E2M1, decode
from mxsim.validate.peers import Peer

INSTALL = "clone github.com/microsoft/microxcaling and put it on PYTHONPATH"
_NOT_A_CODE = 0xF  # -6: shown as a difference where a value is no multiple of the scale that E2M1 has


def load() -> Peer:
    """Raises ImportError where `mx` is not importable."""
    from mx.mx_ops import _quantize_mx

    def bf16_to_fp4_row(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1]).float()
        values = _quantize_mx(rows.clone(), 8, "fp4_e2m1", axes=[-1], block_size=32, round="even")
        t = quantize(rows.cpu().numpy(), MXFP4)
        with np.errstate(invalid="ignore", under="ignore"):
            elements = values.cpu().double().numpy() / np.repeat(t.scale_values(), MXFP4.block_size, axis=-1)
        codes = _codes_of(elements)
        packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        return packed.to(x.device), torch.from_numpy(t.scales).to(x.device)

    return Peer(
        "microxcaling",
        _version(),
        {"bf16_to_fp4_row": bf16_to_fp4_row},
        "_quantize_mx(x, 8, fp4_e2m1, block 32, round=even) in float32, its values divided by the simulator's scales",
    )


def _codes_of(elements: np.ndarray) -> np.ndarray:
    """E2M1 codes of exact values; NaN counts as 0, which is the code of a NaN block."""
    magnitudes = decode(np.arange(8, dtype=np.uint8), E2M1).astype(np.float64)
    place = np.searchsorted(magnitudes, np.abs(np.nan_to_num(elements, nan=0.0))).clip(max=7)
    codes = (place | np.where(np.signbit(elements), 8, 0)).astype(np.uint8)
    codes[magnitudes[place] != np.abs(elements)] = _NOT_A_CODE
    codes[np.isnan(elements)] = 0
    return codes


def _version() -> str:
    try:
        return importlib.metadata.version("mx")
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
