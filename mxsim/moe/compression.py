"""Any module's activations kept for its backward pass in MXFP4: 4.25 bits an element for BF16's 16. Lossy."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mxsim import kernels
from mxsim.blocks import ScaleRule
from mxsim.kernels import Fp4Rows
from mxsim.kernels.layouts import FP4_BLOCK

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Backward nodes of casts, copies and views, which leave the values as they are or round them.
_CASTS_AND_VIEWS = frozenset(
    f"{name}Backward0"
    for name in [
        *("Clone", "ToCopy"),
        *("Alias", "Expand", "Permute", "ReshapeAlias", "T", "Transpose", "UnsafeView", "View"),
        *("Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "Unbind", "Unsqueeze"),
    ]
)


@dataclass(frozen=True)
class CompressionReport:
    """What a compression has done so far, over every forward pass under it.

    Tensors saved several times count once as compressed, then as shared. Memory falls by bytes_saved where nobody else
    keeps the originals.
    """

    num_compressed: int = 0
    num_shared: int = 0
    num_kept: int = 0
    bytes_before: int = 0  # of the compressed tensors
    bytes_after: int = 0

    @property
    def bytes_saved(self) -> int:
        """bytes_before - bytes_after."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        return (
            f"{self.num_compressed} tensors compressed from {self.bytes_before:,} to {self.bytes_after:,} bytes "
            f"({self.num_shared} saves shared them), {self.num_kept} saves kept as they are"
        )


def compress_activations(
    *,
    min_elements: int = 4096,
    scale_rule: ScaleRule | None = None,
    select: Callable[[Tensor], bool] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> "ActivationCompression":
    """A context: what the forward passes inside it save for backward is stored in MXFP4, and decoded when needed.

        with compress_activations() as compression:
            loss = model(x)
        loss.backward()
        print(compression.report())

    The forward pass does not change by a bit. The backward pass computes with the decoded values: its gradients carry
    the error of MXFP4 (one NaN or infinity makes 32 elements NaN). backward may run inside the context or after it.

    Compressed are strided tensors on the CPU or CUDA of one of the dtypes with min_elements or more, whose last axis
    is a multiple of 32 (blocks lie along it), for which select says yes. Kept as they are: everything else; parameters
    and their views; other leaves that require gradients; casts and views of either that require gradients; expanded
    views; tensor subclasses. A tensor that is saved again, also in another shape with the same last axis, is stored
    once. Decoded tensors are contiguous.

    NOTE:
      - Attention masks that hold -inf must not be compressed: `select=lambda t: t.requires_grad` leaves them out.
      - A kept tensor that is modified in place before its backward raises RuntimeError, as without the context; a
        compressed one was copied, and gives the gradient of what was saved.
      - A checkpointed region (torch.utils.checkpoint) saves its inputs only; they are compressed, and its forward pass
        is recomputed from the decoded values. Do not open the context inside such a region.
      - Under torch.compile a graph saves what it likes, casts of weights among it, which look like activations here.

    Args:
        min_elements: smaller tensors are kept.
        scale_rule: of the MXFP4 blocks; None is FLOOR.
        select: called with each tensor that would be compressed; False keeps it.
        dtypes: of bfloat16, float16 and float32. float32 tensors are often statistics that need their precision.
            Decoded float16 values stop at 65504.

    Raises:
        TypeError, ValueError: for an argument of another kind.
    """
    op = "compress_activations"
    if type(min_elements) is not int or min_elements < 0:
        raise ValueError(f"{op}: min_elements is {min_elements!r}, needed an integer of 0 or more")
    if not (scale_rule is None or isinstance(scale_rule, ScaleRule)):
        raise TypeError(f"{op}: scale_rule is {scale_rule!r}, needed a ScaleRule or None")
    if not (select is None or callable(select)):
        raise TypeError(f"{op}: select is {select!r}, needed a function of a tensor, or None")
    if isinstance(dtypes, torch.dtype) or not all(dtype in _DTYPES for dtype in dtypes):
        raise ValueError(f"{op}: dtypes is {dtypes!r}, needed some of bfloat16, float16 and float32")
    return ActivationCompression(min_elements, scale_rule, select, tuple(dtypes))


class ActivationCompression(torch.autograd.graph.saved_tensors_hooks):
    """What `compress_activations` makes. May be entered any number of times, one after another."""

    def __init__(
        self,
        min_elements: int,
        scale_rule: ScaleRule | None,
        select: Callable[[Tensor], bool] | None,
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        super().__init__(self._pack, _unpack)
        self._min_elements = min_elements
        self._scale_rule = scale_rule
        self._select = select
        self._dtypes = dtypes
        self._stored: weakref.WeakValueDictionary[tuple[Any, ...], _Stored] = weakref.WeakValueDictionary()
        self._report = CompressionReport()

    def __enter__(self) -> "ActivationCompression":
        super().__enter__()
        return self

    def report(self) -> CompressionReport:
        """Counts and bytes since the compression was made."""
        return self._report

    def _count(self, **more: int) -> None:
        self._report = CompressionReport(**{name: n + more.get(name, 0) for name, n in vars(self._report).items()})

    def _pack(self, x: Tensor) -> "_Kept | _Compressed":
        if not (self._is_compressible(x) and (self._select is None or self._select(x))):
            self._count(num_kept=1)
            # Detached: a node that kept its own output would never be freed.
            return _Kept(x.detach(), x._version)
        storage = StorageWeakRef(x.untyped_storage())
        layout = (x.numel(), x.shape[-1]) if x.is_contiguous() else (x.shape, x.stride())
        key = (storage.cdata, x.storage_offset(), layout, x.dtype, x._version)
        stored = self._stored.get(key)
        if stored is None:
            stored = _Stored(kernels.bf16_to_fp4_row(x.detach(), scale_rule=self._scale_rule), storage)
            self._stored[key] = stored
            self._count(num_compressed=1, bytes_before=x.nbytes, bytes_after=sum(part.nbytes for part in stored.rows))
        else:
            self._count(num_shared=1)
        return _Compressed(stored, x.shape, x.dtype)

    def _is_compressible(self, x: Tensor) -> bool:
        return (
            x.dtype in self._dtypes
            and x.numel() >= max(self._min_elements, 1)
            and x.dim() > 0
            and x.shape[-1] % FP4_BLOCK == 0
            and type(x) in (Tensor, nn.Parameter)
            and x.layout is torch.strided
            and x.device.type in ("cpu", "cuda")
            and not any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
            and not _is_parameter(x)
        )


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class _Stored:
    rows: Fp4Rows
    # Holds the storage's identity, not its memory: while this lives, no other storage can have the same key.
    source: StorageWeakRef


@dataclass(frozen=True)
class _Compressed:
    stored: _Stored
    shape: torch.Size
    dtype: torch.dtype


def _unpack(saved: _Kept | _Compressed) -> Tensor:
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"compress_activations: a tensor of shape {tuple(saved.tensor.shape)} that backward needs was modified "
                f"in place: it is at version {saved.tensor._version}, needed {saved.version}"
            )
        return saved.tensor
    x = kernels.fp4_to_bf16(*saved.stored.rows).view(saved.shape)
    if saved.dtype == torch.float16:
        x = x.float().clamp(-65504.0, 65504.0)  # 65504 may have been rounded to 65536
    return x.to(saved.dtype)


def _is_parameter(x: Tensor) -> bool:
    """Whether x is a parameter or its view, or comes from a leaf that requires gradients by casts and views alone."""
    if isinstance(x._base if x._is_view() else x, nn.Parameter):
        return True
    node = x.grad_fn
    if node is None:
        return x.requires_grad
    while node is not None and node.name() in _CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")


__all__ = ["ActivationCompression", "CompressionReport", "compress_activations"]
