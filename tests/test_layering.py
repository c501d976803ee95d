"""Imports point one way, and the NumPy-only packages stay so: read from the syntax tree of every module."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import mxsim

PACKAGE_DIR = Path(mxsim.__file__).parent
MODULE_FILES = sorted(PACKAGE_DIR.rglob("*.py"))

# part of mxsim -> the other parts that it may import
MAY_IMPORT = {
    "formats": set(),
    "blocks": {"formats"},
    "kernels": {"formats", "blocks"},
    "validate": {"formats", "blocks", "kernels", "provenance"},
    "provenance": set(),
    "bench": {"formats", "blocks", "kernels", "validate", "moe", "provenance"},
    "analysis": {"formats", "blocks", "kernels"},
    "plotting": {"formats", "blocks", "analysis"},
    "moe": {"formats", "blocks", "kernels"},
    "train": {"formats", "blocks", "kernels", "moe", "analysis", "provenance"},
    "commands": {"formats", "blocks", "kernels", "validate", "bench", "analysis", "plotting", "moe", "train"},
    "cli": {"formats", "blocks", "kernels", "validate", "bench", "analysis", "plotting", "moe", "train", "commands"},
}
NUMPY_ONLY = {"formats", "blocks"}
ALLOWED = sys.stdlib_module_names | {"mxsim", "numpy", "jaxtyping"}
ALLOWED_INSIDE_FUNCTIONS = ALLOWED | {"ml_dtypes", "safetensors", "torch"}


class Import(NamedTuple):
    target: str  # dotted, absolute; `from a import b` gives "a.b"
    is_lazy: bool  # inside a function
    line: int


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import statement of `source`, the text of the module with that dotted name."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, is_lazy, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            # level 1 is the package itself, each further level one parent up
            parents = package[: len(package) + 1 - node.level] if node.level else []
            prefix = [*parents, *([node.module] if node.module else [])]
            for alias in node.names:
                yield Import(".".join([*prefix, alias.name]), is_lazy, node.lineno)
        is_lazy = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_lazy)

    yield from visit(ast.parse(source), False)


def layering_errors(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What in `source` breaks the order of MAY_IMPORT or the NumPy-only rule, a line for each."""
    part = [*module.split("."), ""][1]  # "" for mxsim itself, which imports no part
    if part and part not in MAY_IMPORT:
        return [f"{module}: mxsim.{part} has no place in MAY_IMPORT"]
    errors = []
    for target, is_lazy, line in imports_of(source, module, is_package=is_package):
        top, *rest = target.split(".")
        if top == "mxsim" and rest and rest[0] != part and rest[0] in MAY_IMPORT.keys() - MAY_IMPORT.get(part, set()):
            errors.append(f"{module}:{line}: mxsim.{part} must not import mxsim.{rest[0]}")
        if part in NUMPY_ONLY and top not in (ALLOWED_INSIDE_FUNCTIONS if is_lazy else ALLOWED):
            errors.append(f"{module}:{line}: mxsim.{part} must not import {top}{'' if is_lazy else ' at module level'}")
    return errors


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE_DIR.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", MODULE_FILES, ids=module_name)
def test_imports_point_one_way(file):
    assert layering_errors(file.read_text(), module_name(file), is_package=file.name == "__init__.py") == []


def test_the_numpy_only_packages_are_among_the_files_read():
    assert {"mxsim.formats", "mxsim.blocks"} <= {module_name(file) for file in MODULE_FILES}


@pytest.mark.parametrize(
    "module, source",
    [
        ("mxsim.formats.codec", "from mxsim.blocks import quantize"),
        ("mxsim.formats.codec", "from mxsim import blocks"),
        ("mxsim.formats.codec", "from .. import blocks"),
        ("mxsim.formats.codec", "from ..blocks.tensor import BlockTensor"),
        ("mxsim.formats.codec", "def late():\n    import mxsim.blocks.tensor"),
        ("mxsim.formats.codec", "import torch"),
        ("mxsim.formats.codec", "try:\n    import ml_dtypes\nexcept ImportError:\n    pass"),
        ("mxsim.formats.codec", "def late():\n    import pandas"),
        ("mxsim.blocks.tensor", "import scipy.stats"),
        ("mxsim.blocks.tensor", "class Late:\n    import safetensors"),
        ("mxsim.blocks.tensor", "from mxsim.kernels import ops"),
        ("mxsim.kernels.ops", "from mxsim.moe import MoE"),
        ("mxsim.moe.recipe", "import mxsim.train"),
        ("mxsim.analysis.sweep", "from mxsim.plotting import use_theme"),
        ("mxsim", "from mxsim import formats"),
        ("mxsim.elsewhere", ""),
    ],
)
def test_a_violation_would_be_caught(module, source):
    assert len(layering_errors(source, module, is_package=module == "mxsim")) == 1


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "mxsim.formats.codec",
            "import math\nimport numpy as np\nfrom jaxtyping import UInt8\nfrom .rounding import Rounding",
        ),
        ("mxsim.formats.codec", "def late():\n    import ml_dtypes"),
        (
            "mxsim.blocks.tensor",
            "from mxsim.formats import encode\nfrom ..formats.codec import decode\nfrom . import gemm",
        ),
        ("mxsim.blocks.tensor", "def save():\n    from safetensors.numpy import save_file"),
        ("mxsim.train.loop", "import torch\nfrom mxsim.moe import MoE\nfrom mxsim import kernels"),
        ("mxsim.cli", "from mxsim import __version__, formats"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert layering_errors(source, module) == []
