"""The examples run, as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]


def test_torchtitan_experts_learn_on_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, str(ROOT / "examples/torchtitan_experts.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
