"""A few steps of the H200 preset, made small, on a CUDA device: the same bits again, resumed, and as diagnosed."""

import pytest

torch = pytest.importorskip("torch")

from dataclasses import replace  # noqa: E402

from mxsim.moe import Activation, Recipe  # noqa: E402
from mxsim.train import diagnostics  # noqa: E402
from mxsim.train.config import PRESETS  # noqa: E402
from mxsim.train.recipes import ABLATION  # noqa: E402
from tests.train.runs import run  # noqa: E402
from tests.train.test_diagnostics import wild  # noqa: E402
from tests.train.test_loop import read_state, without_time  # noqa: E402

pytestmark = pytest.mark.gpu
SMALLER = [
    "hidden_size=256",
    "num_layers=2",
    "num_heads=4",
    "expert_size=128",
    "num_experts=8",
    "sequence_length=256",
    "batch_size=16",
    "warmup_steps=4",
    "log_every=4",
    "eval_every=0",
    "eval_sequences=4",
    "diagnose_every=10",
    "diagnose_tokens=512",
]


def h200(recipe, *fields, steps=20):
    return replace(PRESETS["h200"], recipe=recipe, steps=steps).with_fields([*SMALLER, *fields])


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4", "mxfp4-gradients-stochastic"])
def test_the_loss_falls_and_a_rerun_gives_the_same_bits(tmp_path, recipe):
    _, first = run(h200(recipe), tmp_path / "a", device="cuda")
    _, second = run(h200(recipe), tmp_path / "b", device="cuda")
    assert without_time(first) == without_time(second)
    assert (tmp_path / "a" / "diagnostics.csv").read_text() == (tmp_path / "b" / "diagnostics.csv").read_text()
    assert first[-1].train_loss < first[0].train_loss - 1


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4-stochastic"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path, recipe):
    config = h200(recipe, "checkpoint_every=20")
    _, want = run(config, tmp_path / "whole", device="cuda")
    run(config, tmp_path / "parts", device="cuda", interrupt_at=9)
    _, got = run(config, tmp_path / "parts", device="cuda", resume=True)
    assert without_time(got) == without_time(want)
    states = [read_state(tmp_path / part)["model"] for part in ("whole", "parts")]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
def test_a_rerun_of_compiled_layers_gives_the_same_bits(tmp_path):
    runs = []
    for name in ("a", "b"):
        torch._dynamo.reset()
        runs.append(run(h200("mxfp4", "compile=true", steps=6), tmp_path / name, device="cuda")[1])
    assert without_time(runs[0]) == without_time(runs[1])


def test_recipes_stay_near_bf16(tmp_path):
    losses = {
        recipe: run(h200(recipe, steps=60), tmp_path / recipe, device="cuda")[0]["final_validation_loss"]
        for recipe in ("bf16", "fp8", "mxfp4")
    }
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.03)
    assert losses["mxfp4"] == pytest.approx(losses["bf16"], rel=0.03)


@pytest.mark.parametrize("recipe", [Recipe.MXFP4, *ABLATION.values()], ids=lambda recipe: recipe.name)
def test_figures_are_those_of_the_cpu(recipe):
    want = diagnostics._figures(wild(), Activation.DOWN_INPUT, recipe)
    got = diagnostics._figures(wild().cuda(), Activation.DOWN_INPUT, recipe)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-9, atol=0)
