"""Every kernel on small shapes, compared with the host build, for compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1    # one allocation a tensor, so that bounds are the tensors' own
    compute-sanitizer --tool memcheck --report-api-errors no python benchmarks/sanitize.py

and with the tools racecheck, initcheck and synccheck. API errors are left out: the bindings ask the driver for
functions that it may not have.
"""

import torch

from mxsim import kernels

SHAPES = ((1, 128), (130, 384), (257, 640))


def results(x: torch.Tensor) -> list[torch.Tensor]:
    """Every op on x's device, dense and ragged with sizes in a list: nothing unspecified is left to read."""
    rows = x.shape[0]
    sizes = [0, rows // 2, rows - rows // 2]
    fp4, fp8 = kernels.bf16_to_fp4_row(x), kernels.bf16_to_fp8_row(x)
    made = [
        fp4,
        fp8,
        kernels.bf16_to_fp4_row(x.float()),
        kernels.bf16_to_fp4_row(x.half()),
        kernels.fp8_row_to_fp4_row(fp8.codes, fp8.scales),
        kernels.bf16_to_fp8_tile(x),
        kernels.bf16_to_fp8_tile(x, transpose=True),
        (kernels.fp4_to_bf16(*fp4),),
        kernels.fp8_row_to_ragged(fp8.codes, fp8.scales, group_sizes=sizes),
    ]
    for groups in (None, sizes):
        made += [
            kernels.fp4_row_to_fp8_row(*fp4, group_sizes=groups),
            kernels.fp4_row_to_fp8_col(*fp4, group_sizes=groups),
            kernels.fp8_row_to_fp8_col(fp8.codes, fp8.scales, group_sizes=groups),
            kernels.bf16_to_fp8_row(x, group_sizes=groups),
            kernels.bf16_to_fp8_col(x, group_sizes=groups),
            *kernels.bf16_to_fp4_and_fp8_row(x, group_sizes=groups),
        ]
    return [tensor for part in made for tensor in part if tensor is not None]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    flat = x.cpu().flatten().clone()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def main() -> None:
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns).bfloat16()
        pairs = list(zip(results(x.cuda()), results(x), strict=True))
        differing = sum(not torch.equal(as_bytes(got), as_bytes(want)) for got, want in pairs)
        print(f"{rows} x {columns}: {len(pairs)} tensors, {differing} differ")
        if differing:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
