"""Into how many parts of K a GEMM on the device at hand splits its sums."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mxsim.validate import scaled_mm as hopper
from mxsim.validate.gemm_cases import BLOCK, Draw, GemmLayout, Operands

Gemm = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
_MAX_SPLIT = 64
_MOST = 128  # rows and columns of the result looked at
_SIGN = 0x80


def probe_split_k(
    m: int,
    n: int,
    k: int,
    *,
    layout: GemmLayout = GemmLayout.ROWS,
    device: str | torch.device = "cuda",
    out_dtype: torch.dtype = torch.float32,
    gemm: Gemm | None = None,
) -> int:
    """The split_k with which the model gives the device's bits for this shape, layout and output.

    Each block of a row of a has the same magnitudes, and blocks cancel in pairs whose scales are 2**16 to 2**32: what
    is left is rounding errors, which change with every place where K is cut. Up to 128 rows and columns are compared
    with 1, 2, 3, ... parts of ceil(blocks / split_k) blocks, added in order; the first split that fits every output is
    it.

    gemm: another `scaled_mm(a, a_scales, b, b_scales, out_dtype)` than torch's; on the CPU there is no default.

    Raises:
        ValueError: if no split fits, K is no multiple of 128, or the device has no such GEMM.
        GemmRefused: if torch computes no such shape.
    """
    where = torch.device(device)
    if k < BLOCK or k % BLOCK:
        raise ValueError(f"probe_split_k: k is {k}, needed a multiple of {BLOCK}")
    if gemm is None and not hopper.has_scaled_mm(where):
        raise ValueError(f"probe_split_k: device is {where}, needed one of compute capability 9.0, or gemm")
    operands = probe_operands(m, n, k, layout, where)
    rows, columns = (Draw(f"probe {size}", where).some(size, _MOST) for size in (m, n))
    got = hopper.bits_of((gemm or hopper.scaled_mm)(*operands.tensors, out_dtype)[rows][:, columns])
    sample = operands.select(rows, columns)
    fits: dict[int, int] = {}
    for split_k in splits(k // BLOCK):
        want = hopper.bits_of(hopper.model(sample, out_dtype, split_k=split_k))
        fits[split_k] = int((got == want).sum())
        if fits[split_k] == got.numel():
            return split_k
    best = max(fits, key=lambda split_k: fits[split_k])
    raise ValueError(
        f"probe_split_k: no split fits {m}x{n}x{k}, {layout.value}, {out_dtype} on {where}; "
        f"split_k = {best} fits {fits[best]} of {got.numel()} outputs"
    )


def splits(blocks: int) -> Iterator[int]:
    """The split_k that cut so many blocks in different ways, ascending."""
    for split_k in range(1, min(blocks, _MAX_SPLIT) + 1):
        if -(-blocks // -(-blocks // split_k)) == split_k:
            yield split_k


def probe_operands(m: int, n: int, k: int, layout: GemmLayout, device: torch.device) -> Operands:
    """Of which each output tells where K is cut."""
    draw, blocks = Draw(f"probe {m}x{n}x{k}", device), k // BLOCK
    a, b = (
        (draw.normal(rows, BLOCK) * 40).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).repeat(1, blocks)
        for rows in (m, n)
    )
    # Scales and signs of pairs; an odd block stays alone, at scale 1 to 2.
    pairs = blocks // 2
    scales = torch.exp2(draw.uniform(m, pairs) * 16 + 16)
    alone = 1 + draw.uniform(m, blocks - 2 * pairs)
    signs = torch.zeros(m, blocks, dtype=torch.uint8, device=device)
    signs[:, pairs : 2 * pairs] = _SIGN
    order = draw.uniform(m, blocks).argsort(dim=1)
    a_scales = torch.cat([scales, scales, alone], dim=1).gather(1, order)
    a = a ^ signs.gather(1, order).repeat_interleave(BLOCK, dim=1)
    b_rows = n if layout is GemmLayout.ROWS else -(-n // BLOCK)
    b_scales = (1 + draw.uniform(b_rows, 1)).repeat(1, blocks)
    return Operands(a, a_scales, b, b_scales, layout)
