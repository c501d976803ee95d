"""Other libraries as candidates: where they differ from NUMERICS, and how. Each is an optional install.

A peer follows rules of its own in places, for a block with a NaN say, so its report is a list of differences by class
and no verdict.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MODULES = {"torchao": "torchao_to_mx", "ml_dtypes": "ml_dtypes_casts", "microxcaling": "microxcaling"}
PEERS = tuple(_MODULES)


@dataclass(frozen=True)
class Peer:
    """What a library can be asked: candidates by op, and how they were made from its functions."""

    name: str
    version: str
    candidates: Mapping[str, Callable[..., Any]]
    note: str


def load(name: str) -> Peer:
    """The peer, its library imported.

    Raises:
        ValueError: for an unknown name, or if the library cannot be imported.
    """
    if name not in _MODULES:
        raise ValueError(f"validate: peer is {name!r}, needed one of {', '.join(PEERS)}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    try:
        peer: Peer = module.load()
    except ImportError as error:
        raise ValueError(f"validate: peer {name} cannot be imported ({error}); {module.INSTALL}") from None
    return peer
