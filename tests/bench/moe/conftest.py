"""One run on the CPU, shared, and the same as if it came from an H200."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mxsim.bench import moe  # noqa: E402
from mxsim.bench.moe import runner  # noqa: E402
from mxsim.bench.moe.figures import Figure  # noqa: E402
from mxsim.bench.moe.memory import Peak  # noqa: E402
from mxsim.bench.moe.runner import Effort  # noqa: E402
from mxsim.bench.targets import Target  # noqa: E402

LEAST = Effort(num_steps=1, num_samples=1, num_layers=2)


@pytest.fixture(scope="session")
def cpu_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "cache_bytes", lambda _: 1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices are too small to share
        yield moe.run("cpu", effort=LEAST)
        torch.set_num_threads(threads)


@pytest.fixture
def h200_report(cpu_report):
    """A missed and a reached figure, memory, and steps that are bound by the host where they are of MXFP4."""
    versions = {"device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "nvrtc": "13.0", "torch": "2.11.0"}
    routings = [
        replace(
            routing,
            steps=[
                replace(s, host_us=s.timing.us * (1.5 if s.name == "MXFP4" else 0.5), wall_us=2 * s.timing.us)
                for s in routing.steps
            ],
        )
        for routing in cpu_report.routings
    ]
    return replace(
        cpu_report,
        provenance=cpu_report.provenance | versions,
        routings=routings,
        peaks=[Peak(recipe, layers, 34 * 10**9, 10**9, 5 * 10**9) for layers in (1, 4) for recipe in ("BF16", "MXFP4")],
        figures=[
            Figure("quick", routings[0].routing, 1.8, Target(1.5, 1.7), "1.43 to 1.53"),
            Figure("slow", None, 0.9, Target(1.0, 1.1)),
            Figure("dense-linear, one-read FP8 / MXFP4", None, 0.77),
        ],
    )
