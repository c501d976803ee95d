"""Peers: what differs is told by class and is no failure; what is not installed is said in one line."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mxsim import validate
from mxsim.cli import app
from mxsim.validate.peers import PEERS, load


def test_ml_dtypes_encodes_as_the_simulator():
    report = validate.run_peer("ml_dtypes", device="cpu", size="quick")
    assert {op.op for op in report.ops} == {"bf16_to_fp4_row", "bf16_to_fp8_row"}
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["torchao", "microxcaling"])
def test_a_peer_that_is_not_installed_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, {"torchao": "torchao", "microxcaling": "mx"}[name], None)
    with pytest.raises(ValueError, match=f"peer {name} cannot be imported"):
        load(name)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_differs_in_nan_blocks_and_at_tiny_scales():
    report = validate.run_peer("torchao", device="cpu", size="quick")
    assert any("NaN or infinity" in step for step in report.ops[0].by_step)


def test_a_fake_microxcaling_is_read_back_as_codes(monkeypatch):
    """A package whose quantization keeps every value: what E2M1 cannot hold is a difference."""
    import types

    ops = types.ModuleType("mx.mx_ops")
    ops._quantize_mx = lambda x, *positional, **keywords: x
    package = types.ModuleType("mx")
    package.mx_ops = ops
    monkeypatch.setitem(sys.modules, "mx", package)
    monkeypatch.setitem(sys.modules, "mx.mx_ops", ops)
    function = load("microxcaling").candidates["bf16_to_fp4_row"]
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :6] = torch.tensor([6.0, -0.5, -0.0, 3.0, 1.0, 5.0])
    codes, scales = function(x)
    assert codes[0, :3].tolist() == [0x97, 0x58, 0xF2]
    assert scales.tolist() == [[127]]
    assert np.unique(codes[0, 3:].numpy()).tolist() == [0]


def test_differences_of_a_peer_give_exit_status_0(monkeypatch):
    from mxsim import kernels
    from mxsim.validate import peers

    def truncating(x):
        codes, scales = kernels.bf16_to_fp4_row(x)
        return codes & 0xFE, scales

    peer = peers.Peer("torchao", "0", {"bf16_to_fp4_row": truncating}, "a note")
    monkeypatch.setattr(peers, "load", lambda name: peer)
    result = CliRunner().invoke(app, ["validate", "--peer", "torchao", "--device", "cpu", "--quick", "--case", "BF16"])
    assert result.exit_code == 0
    assert "a note" in result.stdout
    assert "NUMERICS 3.5 rounding" in result.stdout


def test_all_peers_are_known():
    assert PEERS == ("torchao", "ml_dtypes", "microxcaling")
