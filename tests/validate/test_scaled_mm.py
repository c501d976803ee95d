"""The validator of the FP8 GEMM, given the model in place of the GPU: it passes the right one and finds every other."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mxsim import validate
from mxsim.blocks import EXACT, HOPPER, PromotionOrder
from mxsim.cli import app
from mxsim.formats import E4M3, E5M2, Rounding
from mxsim.validate import runner
from mxsim.validate import scaled_mm as hopper
from mxsim.validate.gemm_cases import (
    CODES,
    SCALES,
    Accumulation,
    GemmCase,
    GemmLayout,
    Operands,
    e5m2_cases,
    gemm_cases,
)
from mxsim.validate.gemm_runner import GemmRunner
from mxsim.validate.generators import Size
from mxsim.validate.report import OpReport
from mxsim.validate.split_k import probe_operands, probe_split_k, splits

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_LAYOUTS = (GemmLayout.ROWS, GemmLayout.TILES)
NEAREST = replace(HOPPER, term_rounding=Rounding.TIES_TO_EVEN, sum_rounding=Rounding.TIES_TO_EVEN)


def operands_of(a, a_scales, b, b_scales):
    layout = GemmLayout.ROWS if b_scales.shape[0] == b.shape[0] else GemmLayout.TILES
    return Operands(a, a_scales, b, b_scales, layout)


def fake(accumulator=HOPPER, split_k=1):
    """A GPU that computes so."""
    return lambda *tensors: hopper.simulated(
        operands_of(*tensors[:4]), tensors[4], accumulator=accumulator, split_k=split_k
    )


def without_promotion(a, a_scales, b, b_scales, out_dtype):
    """Where the scales of a row are all the same."""
    is_same = all(torch.equal(x, x[:, :1].expand_as(x)) for x in (a_scales, b_scales))
    accumulator = replace(HOPPER, promotion_interval=None) if is_same else HOPPER
    return fake(accumulator)(a, a_scales, b, b_scales, out_dtype)


def scales_in_other_order(*arguments):
    is_rows = operands_of(*arguments[:4]).layout is GemmLayout.ROWS
    order = PromotionOrder.SCALES_FIRST if is_rows else PromotionOrder.A_THEN_B
    return fake(replace(HOPPER, scale_order=order))(*arguments)


def ieee_nan(*arguments):
    out = fake()(*arguments)
    return torch.where(out.isnan(), torch.tensor(float("nan"), dtype=out.dtype), out)


def split_in_one_tile(*arguments):
    """The upper rows as one sum, the lower ones as two."""
    half = arguments[0].shape[0] // 2
    return torch.cat([fake()(*arguments)[:half], fake(split_k=2)(*arguments)[half:]])


def truncated_bfloat16(*arguments):
    out = fake()(*arguments[:4], torch.float32)
    cut = (out.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return out if arguments[4] is torch.float32 else cut


MUTANTS = {
    "14 bits": (fake(replace(HOPPER, fraction_bits=14)), "9.1 14 fraction bits"),
    "12 bits": (fake(replace(HOPPER, fraction_bits=12)), "9.1 12 fraction bits"),
    "nearest": (fake(NEAREST), "9.1 rounding to nearest"),
    "16 products": (fake(replace(HOPPER, products_per_step=16)), "9.1 16 products a step"),
    "exact": (fake(EXACT), "9, by no single rule"),
    "no promotion": (without_promotion, "9.3 no promotion"),
    "other order": (scales_in_other_order, "9.3 scales in the other order"),
    "split 2": (fake(split_k=2), "9.5 split_k = 2, not 1"),
    "split 2 below": (split_in_one_tile, "9.5 split_k = 2, not 1"),
    "truncated BF16": (truncated_bfloat16, "9, by no single rule"),
}


def test_the_model_passes():
    report = validate.run("scaled_mm", "cpu", fake(), "quick")
    assert report.ok, str(report)
    assert report.ops[0].num_cases == len(gemm_cases(Size.QUICK, "cpu"))


def test_the_host_build_passes():
    report = validate.run("scaled_mm", "cpu", size="quick")
    assert report.ok, str(report)
    assert report.ops[0].num_cases == len(gemm_cases(Size.QUICK, "cpu")) + len(e5m2_cases(Size.QUICK, "cpu"))


@pytest.mark.slow
def test_the_host_build_passes_in_full():
    assert validate.run("scaled_mm", "cpu").ok


@pytest.mark.gpu
def test_the_gpu_passes():
    if not hopper.has_scaled_mm(torch.device("cuda")):
        pytest.skip("no Hopper GPU")
    report = validate.run("scaled_mm", "cuda", size="quick")
    assert report.ok, str(report)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    gemm, step = MUTANTS[name]
    (found,) = validate.run("scaled_mm", "cpu", gemm, "quick", cases="12x48x256").ops
    assert not found.ok
    assert not found.problems
    assert step in found.by_step
    assert sum(found.by_step.values()) == found.num_mismatches > 0


def test_nan_bits_are_compared():
    (found,) = validate.run("scaled_mm", "cpu", ieee_nan, "quick", cases="NaN").ops
    assert set(found.by_step) == {"9.4 NaN"}
    assert found.mismatches[0].want in ("0x7FFFFFFF", "0x7FFF")


def test_one_wrong_bit_is_located():
    def wrong_once(*arguments):
        out = fake()(*arguments)
        out[11, 47] = torch.nextafter(out[11, 47], out.new_tensor(1e9))
        return out

    case = "12x48x256, 1x128 by 1x128, float32, normal, scales 1"
    (found,) = validate.run("scaled_mm", "cpu", wrong_once, "full", cases=case).ops
    assert {m.index for m in found.mismatches} == {(11, 47)}  # first and last rows are in every sample
    assert found.num_mismatches == 1


def test_results_of_another_form_are_problems():
    forms = (lambda *x: None, lambda *x: fake()(*x).double(), lambda *x: fake()(*x).t())

    def overwrites(a, *rest):
        out = fake()(a, *rest)
        a.zero_()
        return out

    def raises(*arguments):
        raise RuntimeError("no")

    for gemm in (*forms, overwrites, raises):
        report = validate.run("scaled_mm", "cpu", gemm, "quick", cases="4x16x128, 1x128 by 1x128, float32, normal")
        assert not report.ok
        assert len(report.ops[0].problems) == 1


# --------------------------------------------------------------------------------------------------------------- split
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", BLOCK_LAYOUTS)
def test_the_split_is_found(layout, dtype):
    for blocks in (1, 2, 7, 12):
        for split_k in splits(blocks):
            gemm = fake(split_k=split_k)
            found = probe_split_k(8, 16, 128 * blocks, layout=layout, device="cpu", out_dtype=dtype, gemm=gemm)
            assert found == split_k


def test_splits_cut_in_different_ways():
    assert list(splits(1)) == [1]
    assert list(splits(8)) == [1, 2, 3, 4, 8]  # 5, 6 and 7 parts of 2 blocks are 4
    assert list(splits(56))[:7] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", BLOCK_LAYOUTS)
def test_every_output_of_the_probe_tells_most_splits_apart(layout, dtype):
    for blocks in (3, 8, 56):
        operands = probe_operands(4, 16, 128 * blocks, layout, CPU)
        results = [hopper.bits_of(hopper.emulated(operands, dtype, split_k=s)) for s in splits(blocks)]
        for i, result in enumerate(results):
            for other in results[:i]:
                assert (result != other).float().mean() > 0.25


@pytest.mark.parametrize("gemm", [fake(replace(HOPPER, fraction_bits=14)), split_in_one_tile])
def test_no_split_fits_another_arithmetic(gemm):
    with pytest.raises(ValueError, match=r"no split fits 8x16x1024.* fits \d+ of 128 outputs"):
        probe_split_k(8, 16, 1024, device="cpu", gemm=gemm)


def test_bad_probes_are_refused():
    with pytest.raises(ValueError, match="k is 100"):
        probe_split_k(4, 16, 100, device="cpu", gemm=fake())
    with pytest.raises(ValueError, match=r"capability 9\.0"):
        probe_split_k(4, 16, 128, device="cpu")


@pytest.mark.parametrize("layout", BLOCK_LAYOUTS)
def test_a_probed_split_is_noted_and_used(layout):
    case = GemmCase(8, 16, 512, layout, torch.float32, "normal", "any float32")
    report = OpReport("scaled_mm")
    GemmRunner(fake(split_k=2), CPU, probes_split=True).run_case(case, report)
    assert report.ok
    assert report.notes == [f"8x16x512, {layout.value}, float32: K in 2 parts"]


def test_a_probe_without_an_answer_is_a_problem_once():
    report = OpReport("scaled_mm")
    gemm_runner = GemmRunner(fake(NEAREST), CPU, probes_split=True)
    for codes in ("normal", "wide range"):
        gemm_runner.run_case(GemmCase(8, 16, 512, GemmLayout.ROWS, torch.float32, codes, "1"), report)
    assert len(report.problems) == 1
    assert set(report.by_step) == {"9.1 rounding to nearest"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_unequal_parts_are_added_as_the_model_adds_them(dtype):
    for codes, scales in (("normal", "any float32"), ("NaN and infinity", "NaN and infinity")):
        operands = GemmCase(16, 144, 640, GemmLayout.TILES, dtype, codes, scales).operands(CPU)
        for split_k in (1, 2, 3, 5):
            want = hopper.simulated(operands, dtype, split_k=split_k)
            got = hopper.emulated(operands, dtype, split_k=split_k)
            assert torch.equal(hopper.bits_of(got), hopper.bits_of(want))


# --------------------------------------------------------------------------------------------------------------- torch
@pytest.fixture
def torch_like(monkeypatch):
    """torch's `scaled_mm` on the CPU: checks layouts as it documents them and computes with the model.

    As on an H200 it takes E5M2 tensor-wise only, and not in both operands.
    """
    refused = []

    def scaled_mm(a, b, a_scales, a_recipe, b_scales, b_recipe, *, output_dtype):
        recipe = torch.nn.functional.ScalingType
        assert a_recipe == recipe.BlockWise1x128
        if not a.dtype is b.dtype is torch.float8_e4m3fn:
            raise ValueError("block scales need float8_e4m3fn")
        assert a_scales.stride() == (1, a.shape[0])
        blocks = a.shape[1] // 128
        if b_recipe == recipe.BlockWise1x128:
            if b_scales.shape != (blocks, b.shape[1]):
                refused.append(tuple(b_scales.shape))
                raise ValueError("the scales of b lie the other way round")
            scales = b_scales.t()
        else:
            padded = -(-blocks // 4) * 4
            assert b_scales.shape == (padded, -(-b.shape[1] // 128))
            assert b_scales.stride() == (1, padded)
            scales = b_scales[:blocks].t()
        return fake()(a.view(torch.uint8), a_scales, b.t().view(torch.uint8), scales, output_dtype)

    def tensor_wise(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        assert scale_a.shape == scale_b.shape == ()
        assert (a.stride(1), b.stride(0)) == (1, 1)
        if a.dtype is b.dtype is torch.float8_e5m2:
            raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
        codes = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (a, b.t()))
        (a_codes, b_codes) = codes
        return hopper.emulation(a_codes, scale_a, b_codes, scale_b, out_dtype, use_fast_accum=use_fast_accum)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", tensor_wise)
    return refused


def test_torch_gets_the_layouts_that_it_wants(torch_like):
    (found,) = validate.run("scaled_mm", "cpu", hopper_without_probe, "quick").ops
    assert found.ok
    assert torch_like


def hopper_without_probe(*arguments):
    return hopper.scaled_mm(*arguments)


def test_what_torch_refuses_is_skipped_and_said(torch_like, monkeypatch):
    def refuses_tiles(*arguments, **keywords):
        if arguments[5] != torch.nn.functional.ScalingType.BlockWise1x128:
            raise RuntimeError("no tiles")
        return served(*arguments, **keywords)

    served = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuses_tiles)
    monkeypatch.setattr("mxsim.validate.split_k.hopper.has_scaled_mm", lambda device: True)
    (found,) = validate.run("scaled_mm", "cpu", hopper.scaled_mm, "quick", cases="4x16x128").ops
    assert found.ok
    assert found.skipped == Counter({"refused by the library, 4x16x128, 1x128 by 128x128: no tiles": 20})
    assert "scaled_mm against" in found.notes[0]


@pytest.fixture
def like_a_gpu(torch_like, monkeypatch):
    """torch's scaled_mm is what is validated, where there is no device."""
    monkeypatch.setattr(runner, "default_gemm", lambda device: hopper.scaled_mm)
    monkeypatch.setattr("mxsim.validate.split_k.hopper.has_scaled_mm", lambda device: True)


@pytest.mark.usefixtures("like_a_gpu")
def test_E5M2_is_compared_tensor_wise_and_its_refusals_are_said():
    (found,) = validate.run("scaled_mm", "cpu", size="quick", cases="E5M2").ops
    assert found.ok, found.problems
    cases = [case for case in e5m2_cases(Size.QUICK, "cpu") if E5M2 in case.elements]
    taken = [case for case in cases if case.layout is GemmLayout.TENSOR and E4M3 in case.elements]
    assert found.num_cases == len(taken)
    assert sum(found.skipped.values()) == len(cases) - len(taken)
    twice = "E5M2 by E5M2, fast: Multiplication of two Float8_e5m2 matrices is not supported"
    assert f"refused by the library, tensor-wise, {twice}" in found.skipped
    assert "refused by the library, 1x128 by 128x128, E4M3 by E5M2: block scales need float8_e4m3fn" in found.skipped


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(
    "change, step",
    [
        ({"fraction_bits": 14}, "9.1 14 fraction bits"),
        ({"products_per_step": 16}, "9.1 16 products a step"),
        ({"promotion_interval": 128}, "9.3 promotion every 128"),
    ],
)
def test_another_tensor_wise_accumulator_is_named(monkeypatch, change, step):
    def other(a, b, *, out_dtype, use_fast_accum, **scales):
        operands = Operands(a.view(torch.uint8), ones(a), b.t().view(torch.uint8), ones(b.t()), GemmLayout.TENSOR, both)
        changed = replace(HOPPER, **{"promotion_interval": None if use_fast_accum else 128, **change})
        return hopper.simulated(operands, out_dtype, accumulator=changed)

    def ones(x):
        return torch.ones(x.shape[0], x.shape[1] // 128)

    both = (E5M2, E4M3)
    monkeypatch.setattr(torch, "_scaled_mm", other)
    (found,) = validate.run("scaled_mm", "cpu", size="quick", cases="256, tensor-wise, E5M2 by E4M3, fast, float32").ops
    assert step in found.by_step
    assert not found.problems


def test_E5M2_cases_cover_every_kind():
    for size in Size:
        for device_type in ("cpu", "cuda"):
            cases = e5m2_cases(size, device_type)
            assert len({case.name for case in cases} | {c.name for c in gemm_cases(size, device_type)}) == len(
                cases
            ) + len(gemm_cases(size, device_type))
            tensor_wise = [case for case in cases if case.layout is GemmLayout.TENSOR]
            kinds = {(*case.elements, case.accumulation, case.out_dtype, case.codes) for case in tensor_wise}
            assert len(kinds) == 4 * 2 * 2 * (len(CODES) + 1)
            assert all(case.k == 128 for case in tensor_wise if case.accumulation is Accumulation.PROMOTED)
    special = next(c for c in e5m2_cases(Size.FULL, "cuda") if "E5M2 by E4M3, fast, float32, NaN and inf" in c.name)
    out = hopper.emulated(special.operands(CPU), torch.float32)
    assert out.isinf().any()
    assert out.isnan().any()
    assert out.isfinite().any()


def test_the_command_has_it():
    result = CliRunner().invoke(
        app, ["validate", "--op", "scaled_mm", "--device", "cpu", "--quick", "--case", "4x16x128"]
    )
    assert result.exit_code == 0
    assert "equal bit for bit" in result.stdout


def test_the_kernel_is_checked_by_the_model_and_the_host_build():
    case = GemmCase(16, 16, 256, GemmLayout.TILES, torch.float32, "normal", "any float32")
    report = OpReport("scaled_mm")
    operands, gemm_runner = case.operands(CPU), GemmRunner(fake(), CPU)
    right = hopper.simulated(operands, torch.float32, split_k=2)
    gemm_runner._check_emulation(case, operands, right, 2, report)
    assert not report.problems
    gemm_runner.add_notes(report)
    assert [note.split(" equals ")[1] for note in report.notes] == [
        "mxsim.blocks.fp8_gemm in 256 outputs",
        "the host build in 256 outputs",
    ]
    gemm_runner._check_emulation(case, operands, -right, 2, report)
    assert len(report.problems) == 2


def test_it_belongs_to_all_on_a_hopper_gpu_only(monkeypatch):
    monkeypatch.setattr(runner, "_run", lambda functions, *rest: list(functions))
    assert "scaled_mm" not in validate.run("all", "cpu")
    monkeypatch.setattr(runner, "has_scaled_mm", lambda device: True)
    assert validate.run("all", "cpu")[-1] == "scaled_mm"
    assert validate.run("all", "cpu", fake())[-1] != "scaled_mm"


# --------------------------------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("size", Size)
def test_the_cases_cover_every_kind(size, device_type):
    cases = gemm_cases(size, device_type)
    assert len({case.name for case in cases}) == len(cases)
    for layout in BLOCK_LAYOUTS:
        for dtype in DTYPES:
            here = [case for case in cases if case.layout is layout and case.out_dtype is dtype]
            assert {case.codes for case in here} == {*CODES, "NaN and infinity"}
            assert {case.scales for case in here} == {*SCALES, "NaN and infinity"}


def test_the_full_run_has_a_hundred_million_outputs_from_small_to_large():
    cases = gemm_cases(Size.FULL, "cuda")
    outputs = [min(case.m, case.most_rows) * min(case.n, case.most_columns) for case in cases]
    assert sum(outputs) > 10**8
    assert {"4x16x128", "256x128x7168", "8192x7168x7168"} <= {case.shape for case in cases}


def test_operands_are_the_same_at_every_call():
    for case in gemm_cases(Size.QUICK, "cpu"):
        first, second = (case.operands(CPU) for _ in range(2))
        for x, y in zip(first.tensors, second.tensors, strict=True):
            assert x.is_contiguous()
            assert torch.equal(*(z.view(torch.uint8) for z in (x, y)))


def test_a_sample_has_the_corners_and_keeps_the_results():
    case = GemmCase(40, 384, 256, GemmLayout.TILES, torch.float32, "normal", "any float32", 9, 30)
    rows, columns = case.sample(CPU)
    assert len(rows) == len(rows.unique()) == 9
    assert len(columns) == len(columns.unique()) == 30
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, 39, 0, 383)
    operands = case.operands(CPU)
    whole = hopper.simulated(operands, torch.float32)
    sampled = hopper.simulated(operands.select(rows, columns), torch.float32)
    assert torch.equal(sampled, whole[rows][:, columns])


def test_codes_and_scales_are_what_they_are_called():
    def operands(codes, scales):
        return GemmCase(16, 16, 256, GemmLayout.ROWS, torch.float32, codes, scales).operands(CPU)

    assert int((operands("all subnormal", "1").a & 0x7F).max()) == 7
    assert set((operands("+-largest", "1").a & 0x7F).unique().tolist()) == {0x7E}
    assert set((operands("largest beside smallest", "1").a & 0x7F).unique().tolist()) == {0x7E, 1}
    subnormal = operands("normal", "one subnormal").a_scales
    assert ((subnormal > 0) & (subnormal < 2.0**-126)).sum(dim=1).tolist() == [1] * 16
    for scales, is_there in (("near overflow", torch.isinf), ("near underflow", lambda x: x == 0)):
        out = hopper.simulated(operands("normal", scales), torch.float32)
        assert 0 < is_there(out).sum() < 256
    for codes in ("cancelling in a step", "cancelling between steps"):
        out, apart = (hopper.simulated(operands(c, "1"), torch.float32).abs().mean() for c in (codes, "normal"))
        assert out < apart / 4
