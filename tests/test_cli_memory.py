"""`mxsim memory`: tables, JSON and one-line errors."""

import json

import pytest
from typer.testing import CliRunner

from mxsim.cli import app

V3 = ["--model", "deepseek-v3", "--recipe", "mxfp4", "--recompute", "mla-up-proj", "--pp", "32", "--ep", "8"]


def invoke(*args, columns=100):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["memory", *args])


def test_the_example_of_the_help_fits_and_names_the_largest_tensors():
    result = invoke(*V3, "--gpu-gb", "80")
    assert result.exit_code == 0
    for text in (
        "deepseek-v3, 671 B",
        "Fits: 77.0 GB on the fullest stage, of 84.0 GB (1 GB = 1e9 bytes)",
        "a GPU sold as 80 GB has 85.5, of which 1.5 are reserved",
        "70.1%",
        "queries, keys, values",
        "recomputed",
        "attention output",
    ):
        assert text in result.output
    assert "Example: mxsim memory --model deepseek-v3" in invoke("--help").output


def test_out_of_memory_and_what_would_fit():
    result = invoke("--recipe", "FP8", "--recompute", "mla-up-proj")
    assert result.exit_code == 0
    assert "Out of memory: 103.3 GB" in result.output
    assert "core-attn, mla-up-proj, layernorm, moe-experts" in result.output
    assert "nothing fits" in invoke("--gpu-gb", "10").output


@pytest.mark.parametrize("columns", [60, 80, 110, 160])
def test_no_width_cuts_a_figure(columns):
    output = invoke("--recipe", "FP8", columns=columns).output
    assert "…" not in output
    for text in ("one layer's backward pass", "residual before attention", "moe-experts", "stage", "micro-"):
        assert text in output, text


def test_one_of_each():
    output = invoke("--model", "deepseek-v2-lite", "--pp", "1", "--ep", "1", "--gpus", "1", "--gpu-gb", "141").output
    assert "on 1 GPU: 1 stage, experts over 1 GPU\n" in output
    assert "Stage 0: 1 dense and 26 MoE layers, 1 micro-batch in flight." in output


def test_json_adds_up_and_has_every_assumption():
    found = json.loads(invoke(*V3, "--json").output)
    assert found["fits"] is True
    assert found["recompute"] == ["mla-up-proj"]
    assert len(found["stages"]) == 32
    for stage in found["stages"]:
        parts = ("activations", "working", "weights", "gradients", "optimizer", "fp8_weights")
        assert stage["total"] == pytest.approx(sum(stage[part] for part in parts))
    kept = sum(t["bytes"] for t in found["moe_layer"] if t["is_kept"])
    assert found["stages"][2]["activations"] == pytest.approx(60 * kept)
    assert sum(v for v in found["token_time"].values()) == pytest.approx(1e6 / found["tokens_per_gpu_per_s"])
    assert all(a["source"] for a in found["assumptions"])


def test_attention_is_two_modules():
    assert json.loads(invoke("--recompute", "attention", "--json").output)["recompute"] == ["core-attn", "mla-up-proj"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--model", "deepseek-v4"], "unknown model 'deepseek-v4'; did you mean deepseek-v3?"),
        (["--recipe", "fp5"], "unknown recipe 'fp5'"),
        (["--recompute", "mla"], "unknown module 'mla'"),
        (["--pp", "62"], "pipeline is 62, needed at most the 61 layers"),
        (["--ep", "0"], "expert_parallel is 0, needed a positive integer"),
        (["--gpus", "100"], "100 GPUs are no multiple"),
        (["--micro-batch", "-1"], "micro_batch is -1"),
        (["--gpu-gb", "inf"], "gpu_gb is inf"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("mxsim: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
