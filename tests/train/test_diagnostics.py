"""Diagnostics against the error metrics of mxsim.analysis, which compute them from the simulator's blocks."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxsim.analysis import ErrorSums, exponent_spread, is_lossless  # noqa: E402
from mxsim.blocks import MXFP4, ScaleRule, fp4_row_to_fp8_col, quantize  # noqa: E402
from mxsim.moe import Activation, Conversion, Recipe  # noqa: E402
from mxsim.train import diagnostics  # noqa: E402
from mxsim.train.diagnostics import diagnose  # noqa: E402
from mxsim.train.model import LanguageModel  # noqa: E402
from tests.moe.reference import to_numpy  # noqa: E402
from tests.train.runs import small  # noqa: E402


def wild(rows=200, columns=256, seed=0):
    """Rows and 32-blocks of very different size, blocks of zeros, elements that saturate and vanish."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) ** 3
    x = x * torch.exp2(torch.randint(-9, 10, (rows, columns // 32), generator=generator).repeat_interleave(32, 1))
    x[::7, 64:96] = 0
    x[3, :] = 0
    return x.bfloat16()


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("headroom", [0, 6])
def test_figures_are_those_of_the_analysis(rule, headroom):
    x = wild()
    recipe = replace(Recipe.MXFP4, scale_rule=rule, headroom=headroom)
    signal, noise, saturated, zeroed, mean, largest, rows, columns = diagnostics._figures(
        x, Activation.EXPERT_INPUT, recipe
    ).tolist()
    t = quantize(to_numpy(x), MXFP4, scale_rule=rule)
    sums = ErrorSums()
    sums.add(to_numpy(x).astype(np.float64), t)
    assert diagnostics._decibels(signal, noise) == pytest.approx(sums.sqnr_db, rel=1e-9)
    assert (saturated, zeroed) == (pytest.approx(sums.saturated), pytest.approx(sums.underflowed))
    assert zeroed > 0
    spread = exponent_spread(t)
    assert mean == pytest.approx(spread[spread >= 0].mean())
    assert largest == spread.max() > 8
    assert rows == pytest.approx(1 - is_lossless(t, headroom=headroom).mean())
    converted = fp4_row_to_fp8_col(t, headroom=headroom)
    padded = np.zeros(converted.shape)
    padded[:, : len(x)] = t.dequantize(np.float64).T
    differs = (converted.dequantize(np.float64) != padded).reshape(256, -1, 128).any(2)
    assert columns == pytest.approx(differs.mean())
    assert columns > 0


def test_conversion_through_bf16_is_judged_by_what_it_gives():
    """Where elements are cut at the largest, E4M3's own 448 leaves room for fewer small ones than headroom 6."""
    x = wild()
    direct, through = (
        diagnostics._figures(x, Activation.DOWN_INPUT, replace(Recipe.MXFP4, conversion=conversion)).tolist()
        for conversion in Conversion
    )
    assert direct[:6] == through[:6]
    assert direct[6:] != through[6:]


def test_swiglus_input_feeds_no_gemm():
    figures = diagnostics._figures(wild(), Activation.SWIGLU_INPUT, Recipe.MXFP4)
    assert figures[6:].isnan().all()
    assert figures[:6].isfinite().all()


@pytest.mark.parametrize("x, sqnr_db", [(torch.zeros(2, 128), "nan"), (torch.ones(2, 128), "inf")])
def test_nothing_and_no_error(x, sqnr_db):
    signal, noise, *others = diagnostics._figures(x.bfloat16(), Activation.EXPERT_INPUT, Recipe.MXFP4).tolist()
    assert str(diagnostics._decibels(signal, noise)) == sqnr_db
    assert others[:2] == [0, 0]


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp4", "mxfp4-swiglu-input"])
def test_every_layer_and_activation_is_measured_in_every_recipe(recipe):
    config = small(recipe, "num_dense_layers=1", "dense_size=256", "linears=recipe")
    model = LanguageModel(config)
    found = diagnose(model, torch.randint(256, (2, 32)))
    kinds = ["swiglu_input", "down_input"]
    linear = [] if recipe == "bf16" else ["linear_input"]
    wanted = [(0, kind) for kind in [*linear, *kinds]] + [(1, kind) for kind in [*linear, "expert_input", *kinds]]
    assert [(d.layer, d.activation) for d in found] == wanted
    for d in found:
        assert d.is_stored == config.expert_recipe.keeps_fp4(Activation(d.activation))
        assert 10 < d.sqnr_db < 30
        assert 0 <= d.mean_spread <= d.max_spread < 30


def test_the_input_that_is_measured_is_the_layers(monkeypatch):
    model = LanguageModel(small("mxfp4"))
    tokens = torch.randint(256, (2, 32))
    inputs = []
    for moe in model.moe_layers():
        moe.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, 1)))
    found = [d for d in diagnose(model, tokens) if d.activation == "expert_input"]
    assert len(inputs) == len(found) == 2
    for d, x in zip(found, inputs, strict=True):
        sums = ErrorSums()
        sums.add(to_numpy(x).astype(np.float64), quantize(to_numpy(x), MXFP4, scale_rule=ScaleRule.EVEN))
        assert d.sqnr_db == pytest.approx(sums.sqnr_db)


def test_rows_that_fp8_blocks_do_not_divide_are_left_out():
    model = LanguageModel(small("bf16", "hidden_size=96", "num_layers=1"))
    assert [d.activation for d in diagnose(model, torch.randint(256, (2, 8)))] == ["swiglu_input", "down_input"]
