"""Triton kernels on a machine without a GPU run in triton's interpreter, where triton is installed at all."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined


@pytest.fixture
def interpreted():
    """CPU tensors in Triton kernels; the test is skipped without triton, and where kernels are compiled."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")
