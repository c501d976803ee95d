"""The parts are what the step does: no more, no less; and every FP8 GEMM has the flops that are counted for it."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.bench.moe import layer as layers  # noqa: E402
from mxsim.bench.moe import parts as parts_module  # noqa: E402
from mxsim.bench.moe.layer import Layer  # noqa: E402
from mxsim.bench.moe.parts import Kind, Weights, dense_parts, parts_of_layer  # noqa: E402
from mxsim.bench.moe.workload import TINY, Routing, make_tokens, make_weights  # noqa: E402
from mxsim.moe import Recipe, expert_mlp, fp4_tokens, record_gemms  # noqa: E402

CPU = torch.device("cpu")
R, H, F = TINY.rows, TINY.hidden, TINY.intermediate


@pytest.fixture(scope="module")
def setting():
    tokens, (w1, w2) = make_tokens(Routing.EMPTY, TINY, CPU), make_weights(TINY, CPU)
    return tokens, (w1, w2), parts_of_layer(TINY, tokens, Weights.of(w1, w2))


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of kernels, GEMMs, SwiGLU and permutations by name and shape of the first tensor."""
    counter = Counter()

    def counted(function, name):
        def wrapper(*arguments, **options):
            first = arguments[0]
            shape = tuple((first if isinstance(first, torch.Tensor) else first[0]).shape)
            counter[name, shape] += 1
            return function(*arguments, **options)

        return wrapper

    for name in kernels.__all__:
        if name.startswith(("bf16_to", "fp4_row")):
            monkeypatch.setattr(kernels, name, counted(getattr(kernels, name), name))
    for name in ("grouped_gemm", "grouped_wgrad", "swiglu", "swiglu_backward"):
        for module in (expert_mlp, parts_module):
            monkeypatch.setattr(module, name, counted(getattr(module, name), name))
    for name in ("permute", "unpermute_sum", "permute_rows"):
        for module in (layers, fp4_tokens, parts_module):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(getattr(module, name), name))
    return counter


# In the backward pass these run as operators, not by the names that are counted.
_UNCOUNTED = {"permute", "unpermute_sum"}


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=lambda r: r.name)
def test_a_recipes_parts_are_the_calls_of_its_step(recipe, setting, calls):
    tokens, weights, _ = setting
    layer = Layer(recipe, TINY, weights)
    parts = parts_of_layer(TINY, tokens, Weights.of(*weights))
    calls.clear()
    layer.step(tokens)
    wanted = Counter({call: n for call, n in calls.items() if call[0] not in _UNCOUNTED})
    calls.clear()
    for part in parts:
        if recipe in part.recipes and part.kind.is_in_step:
            part.run(*part.inputs)
    got = Counter({call: n for call, n in calls.items() if call[0] not in _UNCOUNTED})
    assert got == wanted
    assert len(wanted) >= 3


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.FP8, Recipe.MXFP4], ids=lambda r: r.name)
def test_a_step_permutes_twice_and_sums_twice(recipe, setting):
    _, _, parts = setting
    names = [p.key.split(".")[0] for p in parts if recipe in p.recipes and p.kind is Kind.PERMUTE]
    assert sorted(names) == ["permute", "permute", "unpermute", "unpermute"]


def test_fp8_gemms_have_the_flops_that_are_counted(setting):
    _, _, parts = setting
    gemms = [p for p in parts if p.key.startswith("fp8 ")]
    assert len(gemms) == 6
    for part in gemms:
        with record_gemms() as records:
            part.run(*part.inputs)
        if part.kind is Kind.WGRAD:  # over the rows without those that pad columns
            m, n = records[0].out.shape
            assert part.flops == 2 * R * m * n
        else:
            assert part.flops == sum(2 * r.out.numel() * r.a_codes.shape[1] for r in records)
    assert sum(p.flops for p in gemms) == 2 * 3 * R * 3 * F * H == sum(p.flops for p in parts) // 2


def test_bytes_are_inputs_and_results(setting):
    _, _, parts = setting
    by_key = {p.key: p for p in parts}
    assert by_key["tokens.fp4"].num_bytes() == TINY.tokens * H * (2 + 17 / 32)
    assert by_key["swiglu"].num_bytes() == R * F * 2 * 3 + R * 4


def test_dense_gemms_multiply_all_rows_at_once(setting):
    tokens, weights, _ = setting
    with record_gemms() as records:
        for part in dense_parts(TINY, tokens, Weights.of(*weights), {4: kernels.bf16_to_fp8_row}):
            part.run(*part.inputs)
    assert [tuple(r.out.shape) for r in records] == [(R, 2 * F), (2 * F, H)]
