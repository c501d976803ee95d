"""The recipe: what it says of itself, what it refuses, and that no field is lost on its way into an operator."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from mxsim.blocks import ScaleRule
from mxsim.formats import Rounding
from mxsim.moe import Activation, Compute, Conversion, Gradients, Recipe
from mxsim.moe.expert_mlp import recipe_of

CHANGES = [
    {"stored_fp4": frozenset()},
    {"stored_fp4": frozenset({Activation.DOWN_INPUT})},
    {"scale_rule": ScaleRule.RCEIL},
    {"scale_rule": None},
    {"headroom": 0},
    {"rounding": Rounding.STOCHASTIC},
    {"conversion": Conversion.THROUGH_BF16},
    {"gradients": Gradients.MXFP4},
]


@pytest.mark.parametrize(
    "recipe, sentence",
    [
        (Recipe.BF16, "BF16: GEMMs in BF16; activations kept in BF16"),
        (
            Recipe.FP8,
            "FP8: GEMMs in FP8; GEMM inputs kept as FP8 columns, SwiGLU input in BF16; gradients in FP8",
        ),
        (
            replace(Recipe.MXFP4, stored_fp4=frozenset({Activation.DOWN_INPUT}), conversion=Conversion.THROUGH_BF16),
            "MXFP4: GEMMs in FP8; second GEMM's input kept in MXFP4 "
            "(scale rule EVEN, to FP8 through BF16, ties to even); gradients in FP8",
        ),
        (
            replace(Recipe.FP8, gradients=Gradients.MXFP4, rounding=Rounding.STOCHASTIC, headroom=0),
            "FP8: GEMMs in FP8; GEMM inputs kept as FP8 columns, SwiGLU input in BF16; "
            "gradients in MXFP4 (scale rule FLOOR, headroom 0, stochastic)",
        ),
    ],
)
def test_a_recipe_is_a_sentence(recipe, sentence):
    assert str(recipe) == sentence


def test_every_field_shows_in_the_sentence():
    sentences = {str(replace(Recipe.MXFP4, **change)) for change in [{}, *CHANGES[:3], *CHANGES[4:]]}
    assert len(sentences) == len(CHANGES)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"conversion": "direct"}, TypeError, "conversion is 'direct', needed a Conversion"),
        ({"gradients": "fp8"}, TypeError, "gradients is 'fp8', needed a Gradients"),
        ({"headroom": 7}, ValueError, "headroom is 7, needed an integer from 0 to 6"),
        ({"compute": Compute.BF16}, ValueError, "stored_fp4 with compute BF16"),
        (
            {"compute": Compute.BF16, "stored_fp4": frozenset(), "gradients": Gradients.MXFP4},
            ValueError,
            "gradients MXFP4 with compute BF16, needed compute FP8",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=f"Recipe: {message}"):
        replace(Recipe.MXFP4, **change)


@pytest.mark.parametrize("change", [{}, *CHANGES], ids=str)
def test_the_key_tells_all_but_the_name(change):
    recipe = replace(Recipe.MXFP4, **change)
    assert recipe_of(recipe.key) == replace(recipe, name="")


def test_recipes_differ_in_their_keys():
    recipes = [Recipe.BF16, Recipe.FP8, *(replace(Recipe.MXFP4, **change) for change in [{}, *CHANGES])]
    assert len({recipe.key for recipe in recipes}) == len(recipes)
