"""Expert parallelism on two and four processes: the bits of one process, and a clear error where a process fails."""

import pytest

torch = pytest.importorskip("torch")

from mxsim import kernels  # noqa: E402
from mxsim.moe import ExpertParallel, Permutation, Recipe  # noqa: E402
from mxsim.moe.dispatch import row_bytes  # noqa: E402
from mxsim.moe.expert_parallel import encode_gradient, encode_tokens  # noqa: E402
from tests.moe import ep_cases  # noqa: E402
from tests.moe.ep_cases import CASES, RECIPES, RUNS, E, H, K, launch, results  # noqa: E402

RANKS = (2, 4)
FP8_RECIPES = RECIPES[1:3]


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n} ranks")
def ranks(request, tmp_path_factory):
    """What every rank found, all cases in one start of the processes."""
    num_ranks = request.param
    folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
    assert launch(ep_cases.all_cases, num_ranks, folder) == [0] * num_ranks
    return [results(folder, rank) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    assert launch(ep_cases.what_two_processes_show, 2, folder) == [0, 0]
    return [results(folder, rank) for rank in range(2)]


def by_name(value):
    return value.name


def joined(found, key):
    """What the ranks found, put together."""
    return {name: torch.cat([rank[key][name] for rank in found]) for name in found[0][key]}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("recipe, gemm, case", RUNS, ids=lambda value: getattr(value, "name", value))
def test_every_bit_is_that_of_one_process(ranks, recipe, gemm, case, monkeypatch):
    """y and the gradients of x, weights, w1 and w2; columns of what travelled in FP8 are made from its rows."""
    if gemm == "hopper" and len(ranks) > 2:
        pytest.skip("on two ranks")
    ep_cases.quantize_columns_after_rows(monkeypatch)
    want = ep_cases.run_on_one_process(ep_cases.moe(recipe, gemm), *case.tokens_of(0, 1))
    assert_equal(joined(ranks, (recipe.name, gemm, case.name)), want)


@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
def test_only_columns_of_what_travelled_in_fp8_are_rounded_twice(ranks, recipe):
    """w2 in every FP8 recipe, w1 where the expert input is in FP8; the rows' magnitudes differ by up to 2**12 here.

    A second rounding changes a value by half an ulp of E4M3 at most, 2**-4 of it, or of a subnormal.
    """
    case = CASES[0]
    want = ep_cases.run_on_one_process(ep_cases.moe(recipe), *case.tokens_of(0, 1))
    got = joined(ranks, (recipe.name, "dequantized", case.name))
    rounded_twice = {"w2"} if recipe.keeps_fp4(ep_cases.Activation.EXPERT_INPUT) else {"w1", "w2"}
    for name, value in want.items():
        if name in rounded_twice:
            error = (got[name].double() - value.double()).norm() / value.double().norm()
            assert 0 < error < 2**-4, name
        else:
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=by_name)
def test_the_whole_layer(ranks, recipe):
    """Router and shared experts: each rank's gradients add up to one process's, but for roundings; the rest as above.

    The router's own matmul may round otherwise where there are other numbers of tokens, so nothing here is compared
    in bits. Limits: BF16 2**-8 a value; FP8 blocks of gradients of other rows, and double rounding, 2**-4.
    """
    case = CASES[0]
    x, _, _, dy = case.tokens_of(0, 1)
    layer = ep_cases.moe(recipe, num_shared_experts=1)
    want = ep_cases.run_layer(layer, x, dy)
    key = (recipe.name, "layer")
    for name, value in want.items():
        parts = [rank[key][name].double() for rank in ranks]
        got = sum(parts) if name.startswith(("router.", "shared.")) else torch.cat(parts)
        limit = 2**-4 if name.endswith(("w1", "w2")) and recipe is not Recipe.BF16 else 2**-8
        assert (got - value.double()).norm() <= limit * value.double().norm(), name


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=by_name)
def test_the_router_is_balanced_by_the_counts_of_all_ranks(ranks, recipe):
    layer = ep_cases.moe(recipe, num_shared_experts=1)
    x = CASES[0].tokens_of(0, 1)[0]
    counts = torch.bincount(layer.router(x).topk_ids_TK.flatten(), minlength=E)
    assert torch.equal(sum(rank[recipe.name, "num_routed"] for rank in ranks), counts)
    layer.router.update_bias(counts)
    for rank in ranks:
        assert torch.equal(rank[recipe.name, "bias"], layer.router.bias)


# ------------------------------------------------------------------------------------------------------------ two ranks
def test_ranks_with_one_seed_get_the_same_router_and_different_experts(two):
    first, second = (rank["state"] for rank in two)
    whole = ep_cases.moe(Recipe.MXFP4, num_shared_experts=1).state_dict()
    assert first.keys() == second.keys() == whole.keys()
    for name, value in first.items():
        if name.startswith("experts."):
            assert value.shape == (E // 2, *whole[name].shape[1:])
            assert not torch.equal(value, second[name])
            assert value.float().std() == pytest.approx(value.shape[-1] ** -0.5 / 3**0.5, rel=0.02)
        else:
            assert torch.equal(value, second[name]), name


def test_a_full_state_is_split_among_the_ranks(ranks):
    """Every expert's y already needed its own weights; here only that nothing is copied."""
    full = ep_cases.moe(Recipe.MXFP4).state_dict()
    layer = ExpertParallel.__new__(ExpertParallel)
    torch.nn.Module.__init__(layer)
    layer.rank, layer.num_ranks, layer.num_experts = 1, 2, E
    part = layer.local_state_dict(full)
    assert part["experts.w1"].data_ptr() == full["experts.w1"][E // 2].data_ptr()
    assert torch.equal(part["experts.w2"], full["experts.w2"][E // 2 :])
    assert part["router.weight"] is full["router.weight"]


def test_random_bits_follow_torchs_seed_and_differ_between_ranks(two):
    for rank in two:
        first, again = rank["stochastic"]
        assert torch.equal(first, again)
    assert not torch.equal(two[0]["stochastic"][0], two[1]["stochastic"][0])


def test_received_codes_are_what_is_kept(two):
    """Rows of the local experts as one quantization of the tokens gives them; and no BF16 copy of the expert input."""
    x, ids, *_ = CASES[0].tokens_of(0, 1)
    codes, scales = kernels.bf16_to_fp4_row(x.detach(), scale_rule=Recipe.MXFP4.scale_rule)
    permutation = Permutation.from_topk(ids, E)
    starts = [0, int(permutation.group_sizes_E[: E // 2].sum()), len(permutation.row_token_R)]
    for rank, found in enumerate(two):
        tokens = permutation.row_token_R[starts[rank] : starts[rank + 1]]
        kept = [t for t in found["kept"] if t.ndim == 2]
        assert torch.equal(kept[0], codes[tokens])
        assert torch.equal(kept[1], scales[tokens])
        assert not [t for t in kept if t.is_floating_point() and t.shape[0] >= len(tokens)]


def test_checkpointing_keeps_every_bit(two):
    assert [rank["checkpoint"] for rank in two] == [[True, True]] * 2


def test_evaluation_counts_no_routed_tokens(two):
    assert [rank["evaluation counts"] for rank in two] == [0, 0]


def test_leading_axes(two):
    assert all(rank["leading axes"] == (2, 3, H) for rank in two)


def test_errors(two):
    for rank in two:
        assert rank["errors"] == [
            f"ValueError: ExpertParallel: num_experts is {E + 1}, needed a multiple of 2, the ranks",
            "ValueError: ExpertParallel: num_chunks is 0, needed a positive integer",
            f"ValueError: ExpertParallel: x has shape (4, {H + 1}), needed [..., {H}]",
            "TypeError: ExpertParallel: x has dtype torch.float32, and the recipe MXFP4 needed bfloat16",
            f"ValueError: local_state_dict: experts.w1 has 4 experts, needed {E}",
        ]


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own, where a graph breaks
@pytest.mark.usefixtures("alone")
def test_one_rank_is_the_layer_itself_compiled_or_not():
    """torch.compile leaves the routed experts out."""
    x, _, _, dy = CASES[0].tokens_of(0, 1)
    layer = ep_cases.expert_parallel(Recipe.MXFP4, num_shared_experts=1)
    want = ep_cases.run_layer(layer, x, dy)
    moe = ep_cases.run_layer(ep_cases.moe(Recipe.MXFP4, num_shared_experts=1), x, dy)
    assert torch.equal(want["y"], moe["y"])
    assert torch.equal(want["x"], moe["x"])
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")(x)
    assert torch.equal(compiled, want["y"])
    assert torch.equal(torch.autograd.grad(compiled, x, dy)[0], want["x"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=by_name)
@pytest.mark.usefixtures("alone")
def test_weights_whose_gradient_no_gemm_returns(recipe, dtype):
    """Refused in the forward pass, before anything is sent; the BF16 recipe takes them."""
    x, ids, weights, dy = CASES[0].tokens_of(0, 1)
    layer = ep_cases.expert_parallel(recipe).to(dtype)
    message = rf"ExpertParallel: w1 has dtype {dtype}, and the recipe {recipe.name} needed bfloat16 or float32"
    with pytest.raises(TypeError, match=message):
        layer(x)
    with pytest.raises(TypeError, match=message):
        layer.routed(x, ids, weights)
    assert layer.num_routed_E.sum() == 0
    ep_cases.run_routed(ep_cases.expert_parallel(Recipe.BF16).to(dtype), x, ids, weights, dy)


@pytest.mark.parametrize("recipe", [Recipe.BF16, Recipe.MXFP4], ids=by_name)
@pytest.mark.usefixtures("alone")
def test_choices_of_other_tokens_than_there_are(recipe):
    """Refused before anything is sent."""
    x, ids, weights, _ = CASES[0].tokens_of(0, 1)
    layer = ep_cases.expert_parallel(recipe)
    for source in (x, layer._source(x)):
        for num in (len(x) - 1, 0):
            with pytest.raises(ValueError, match=rf"topk_ids has shape \({num}, {K}\), needed {len(x)} rows"):
                layer.routed(source, ids[:num], weights[:num])
    assert layer.num_routed_E.sum() == 0


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"there is no process group, needed torch\.distributed"):
        ExpertParallel(H, H, E, K)


def test_a_rank_that_is_late_or_fails_ends_the_others(tmp_path):
    statuses = launch(ep_cases.fail, 2, tmp_path)
    assert statuses == [0, 1]
    (late, late_s), (failed, failed_s) = results(tmp_path, 0)
    for message in (late, failed):
        assert (
            "ExpertParallel: all-to-all of counts: rank 0 of 2 could not finish it; another rank has failed" in message
        )
        assert message.startswith("RuntimeError")
    assert 1 < late_s < 4  # the group's timeout is 2 s, rank 1 sleeps 4
    assert failed_s < 30


# -------------------------------------------------------------------------------------------------------------- on wire
@pytest.mark.parametrize(
    "recipe, forward, backward",
    [(Recipe.BF16, 14336, 14336), (Recipe.FP8, 7392, 7392), (Recipe.MXFP4, 3808, 7392)],
    ids=["BF16", "FP8", "MXFP4"],
)
def test_bytes_of_a_row_at_hidden_7168(recipe, forward, backward):
    x = torch.randn(3, 7168).bfloat16()
    assert row_bytes(encode_tokens(x, None, slice(0, 3), recipe)) == forward
    assert row_bytes(encode_gradient(x, slice(0, 3), recipe)) == backward


# ----------------------------------------------------------------------------------------------------------------- GPUs
@pytest.mark.gpu
def test_every_bit_is_that_of_one_process_on_two_gpus(tmp_path, monkeypatch):
    """NCCL; gemm "auto" and "hopper" have the bits of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert launch(ep_cases.on_gpus, 2, tmp_path, backend="nccl") == [0, 0]
    found = [results(tmp_path, rank) for rank in range(2)]
    ep_cases.quantize_columns_after_rows(monkeypatch)
    for recipe, gemm, case in RUNS:
        x, ids, weights, dy = (t.detach().cuda() for t in case.tokens_of(0, 1))
        layer = ep_cases.moe(recipe, "hopper" if gemm == "hopper" else "auto").cuda()
        want = ep_cases.run_on_one_process(layer, x.requires_grad_(), ids, weights.requires_grad_(), dy)
        got = joined(found, (recipe.name, gemm, case.name))
        if recipe is not Recipe.BF16:
            assert_equal(got, {name: value.cpu() for name, value in want.items()})
            continue
        for name, value in want.items():  # torch's grouped GEMM may sum otherwise for other groups
            assert (got[name].double() - value.cpu().double()).norm() <= 2**-7 * value.cpu().double().norm(), name


@pytest.mark.gpu
def test_a_forward_pass_waits_once_for_the_device(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert launch(ep_cases.count_waits, 2, tmp_path, backend="nccl") == [0, 0]
    assert [results(tmp_path, rank) for rank in range(2)] == [1, 1]
