"""Registration of this package's operators, `mxsim::moe_*`, so that torch.compile takes each as one node."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("mxsim", "FRAGMENT")


def operator(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """The operator of this schema. fake: allocates the results from shapes alone.

    backward, setup_context: as `torch.library.register_autograd` takes them.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"mxsim::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"mxsim::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.mxsim, base), overload or "default")


def not_differentiable(name: str) -> Callable[..., Any]:
    """The backward of an operator that has none: raises NotImplementedError."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name}: has no derivative; the backward pass cannot be differentiated again")

    return backward
