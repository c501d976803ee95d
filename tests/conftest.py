"""Settings of the whole suite: reproducible property tests without deadlines, and `gpu` tests only where a GPU is."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "mxsim",
    deadline=None,  # a busy machine is not a wrong result
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mxsim")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
