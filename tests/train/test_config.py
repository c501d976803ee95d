"""Configurations: what is refused, and fields from text."""

import pytest

pytest.importorskip("torch")

from mxsim.train.config import ConfigError, TrainConfig


@pytest.mark.parametrize(
    "fields, message",
    [
        (["nonsense"], "'nonsense' is no field=value"),
        (["no_field=1"], r"unknown field 'no_field' \(known: recipe, "),
        (["steps=ten"], "steps is 'ten', needed an integer"),
        (["learning_rate=fast"], "learning_rate is 'fast', needed a number"),
        (["compile=1"], "compile is '1', needed true or false"),
        (["recipe=fp9"], "recipe is 'fp9', needed one of bf16, fp8, mxfp4, "),
        (["linears=fp8"], "linears is 'fp8', needed bf16 or recipe"),
        (["gemm=cuda"], "gemm is 'cuda', needed one of auto, "),
        (["steps=0"], "steps is 0, needed 1 or more"),
        (["top_k=9"], "top_k is 9, needed at most 8, the number of experts"),
        (["num_heads=3"], "num_heads is 3, needed heads of an even size for a hidden size of 128"),
        (["num_heads=128"], "num_heads is 128, needed heads of an even size"),
        (["hidden_size=192"], "hidden_size is 192, needed a multiple of 128 for FP8"),
        (["expert_size=64"], "expert_size is 64, needed a multiple of 128 for FP8"),
        (["num_dense_layers=3"], "num_dense_layers is 3, needed 0 to 2, the layers"),
        (["learning_rate=nan"], "learning_rate is nan, needed more than 0"),
        (["beta2=1"], "beta2 is 1.0, needed 0 to 1, 1 excluded"),
        (["eval_every=-1"], r"eval_every is -1, needed 0 \(never\) or more"),
    ],
)
def test_what_no_run_can_have_is_named(fields, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        TrainConfig().with_fields(fields)


@pytest.mark.parametrize("value", ["4", 4.0, True, None])
def test_fields_have_their_types(value):
    with pytest.raises(ConfigError, match=r"num_layers is .*, needed an integer"):
        TrainConfig(num_layers=value)


def test_sizes_of_the_bf16_recipe_are_free():
    assert TrainConfig(recipe="bf16").with_fields(["hidden_size=96", "expert_size=40"]).hidden_size == 96


def test_fields_are_read_by_their_types():
    config = TrainConfig().with_fields(["learning_rate=1e-4", "compile=TRUE", "recipe=fp8", "steps=7"])
    assert (config.learning_rate, config.compile, config.recipe, config.steps) == (1e-4, True, "fp8", 7)
    assert TrainConfig(learning_rate=1).learning_rate == 1


def test_tokens_of_a_step():
    assert TrainConfig(batch_size=3, sequence_length=7).tokens_per_step == 21
