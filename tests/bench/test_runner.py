"""A whole run on the CPU, in the small: what is measured, what is left out, and what goes wrong."""

import sys
import types
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mxsim import (  # noqa: E402
    bench,
    kernels,
    provenance,
)
from mxsim.bench import peers, runner  # noqa: E402
from mxsim.bench.cases import OPS, Case, Shape, cases_at  # noqa: E402
from mxsim.bench.report import Comparison, Copy, Measurement, Overhead, Report  # noqa: E402
from mxsim.bench.runner import Effort  # noqa: E402
from mxsim.bench.targets import OVERHEAD_US, Target, Verdict  # noqa: E402
from mxsim.bench.timing import Method, Timing  # noqa: E402
from mxsim.provenance import sources_sha256  # noqa: E402

TINY = Effort(copy_bytes=2**16, num_samples=2, num_overhead_calls=5)
DENSE, RAGGED = Shape(128, 128), Shape(64, 128, 3)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch):
    monkeypatch.setattr(runner, "cache_bytes", lambda _: 2**16)


@pytest.fixture
def fake_torchao(monkeypatch):
    """A package with a to_mx that is ours; `spoil` changes a byte of its codes."""
    spoil = []

    def to_mx(x, dtype, block, mode):
        assert (block, mode) == (32, "floor")
        codes, scales = kernels.bf16_to_fp4_row(x)
        if spoil:
            codes[0, 0] ^= 1
        return scales.view(torch.float8_e8m0fnu), codes

    names = ["torchao", "torchao.prototype", "torchao.prototype.mx_formats"]
    modules = {name: types.ModuleType(name) for name in names}
    config = modules["torchao.prototype.mx_formats.config"] = types.ModuleType("config")
    tensor = modules["torchao.prototype.mx_formats.mx_tensor"] = types.ModuleType("mx_tensor")
    modules["torchao"].__version__ = "9.9"
    config.ScaleCalculationMode = types.SimpleNamespace(FLOOR="floor")
    tensor.to_mx = to_mx
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return spoil


@pytest.fixture
def no_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)


def test_everything_is_measured(no_torchao):
    steps = []
    report = bench.run("cpu", shapes=[DENSE, RAGGED], effort=TINY, progress=lambda *step: steps.append(step))
    assert report.ok
    assert [m.case for m in report.measurements] == [*cases_at(DENSE, OPS), *cases_at(RAGGED, OPS)]
    assert {c.ours.case.op for c in report.comparisons} == {
        "fp4_row_to_fp8_row",
        "fp4_row_to_fp8_col",
        "bf16_to_fp8_col",
    }
    assert len(report.overheads) == len(report.measurements)
    assert all(o.us > 0 and o.empty_us > 0 for o in report.overheads)
    assert any("torchao" in note and "pip install" in note for note in report.notes)
    texts, done, totals = zip(*steps, strict=True)
    assert texts[0] == "copy"
    assert list(done) == list(range(len(steps)))
    assert set(totals) == {len(steps)}


def test_rows_that_cannot_become_columns_have_no_unfused_transpose():
    report = bench.run("cpu", ["fp4_row_to_fp8_col"], [Shape(64, 128)], effort=TINY)
    assert report.ok
    assert report.comparisons == report.notes == []


def test_chosen_ops_alone_are_measured():
    report = bench.run("cpu", ["fp4_row_to_fp8_row"], [DENSE], effort=TINY)
    assert {m.case.op for m in report.measurements} == {"fp4_row_to_fp8_row"}
    assert [c.rival for c in report.comparisons] == ["fp4_to_bf16, bf16_to_fp8_row"]
    assert report.notes == []


def test_memory_takes_turns_until_the_cache_is_passed(monkeypatch):
    seen = []
    right = kernels.fp4_to_bf16
    monkeypatch.setattr(
        kernels, "fp4_to_bf16", lambda codes, scales: seen.append(codes.data_ptr()) or right(codes, scales)
    )
    report = bench.run("cpu", ["fp4_to_bf16"], [DENSE], effort=TINY)
    (measurement,) = report.measurements
    turns = -(-4 * 2**16 // measurement.case.num_bytes)
    assert len(set(seen[2:])) >= turns > 1  # the first two are the check's
    assert not measurement.is_in_cache


def test_a_wrong_op_is_not_timed(monkeypatch):
    right = kernels.fp8_row_to_fp4_row
    monkeypatch.setattr(kernels, "fp8_row_to_fp4_row", lambda *rows: replace_codes(right(*rows)))

    def replace_codes(rows):
        return rows._replace(codes=rows.codes ^ 0x80)

    report = bench.run("cpu", ["fp8_row_to_fp4_row", "fp4_to_bf16"], [DENSE], effort=TINY)
    assert not report.ok
    assert [m.case.op for m in report.measurements] == ["fp4_to_bf16"]
    ((case, message),) = report.problems
    assert case == "fp8_row_to_fp4_row 128x128"
    assert message.startswith("wrong results, not timed: result 0: 8192 of 8192 entries differ, first at (0, 0): 0x")


def test_an_op_that_raises_is_a_problem_and_the_rest_goes_on(monkeypatch):
    def broken(codes, scales):
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(kernels, "fp4_to_bf16", broken)
    report = bench.run("cpu", ["fp4_to_bf16", "fp8_row_to_fp4_row"], [DENSE], effort=TINY)
    assert ("fp4_to_bf16 128x128", "raised RuntimeError: no kernel") in report.problems
    assert [m.case.op for m in report.measurements] == ["fp8_row_to_fp4_row"]


def test_torchao_stands_beside_where_it_is_installed(fake_torchao):
    report = bench.run("cpu", ["bf16_to_fp4_row", "bf16_to_fp8_row"], [DENSE], effort=TINY)
    fp4, fp8 = report.comparisons
    assert (fp4.rival, fp4.note) == ("torchao 9.9 to_mx MXFP4 FLOOR, eager", "the same bits")
    assert (fp8.rival, fp8.note) == ("torchao 9.9 to_mx MXFP8 FLOOR, eager", "blocks of 32")
    assert fp4.rival_bytes == fp4.ours.case.num_bytes
    assert fp8.rival_bytes == 128 * 128 * (2 + 33 / 32)
    fake_torchao.append("spoil")
    report = bench.run("cpu", ["bf16_to_fp4_row"], [DENSE], effort=TINY)
    assert report.comparisons[0].note == "1 bytes differ"


def test_torchao_is_compiled_on_a_device(fake_torchao, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled.append(dynamic) or function)
    assert all("compiled" in rival.name for rival in peers.torchao(torch.device("cuda")))
    assert compiled == [False, False]


def test_a_rival_that_fails_is_a_note(fake_torchao, monkeypatch):
    def broken(*_):
        raise RuntimeError("cannot")

    sys.modules["torchao.prototype.mx_formats.mx_tensor"].to_mx = broken
    report = bench.run("cpu", ["bf16_to_fp4_row"], [DENSE], effort=TINY)
    assert report.ok
    assert report.comparisons == []
    assert any(note.endswith("failed: RuntimeError: cannot") for note in report.notes)


def test_quick_leaves_other_libraries_out(fake_torchao):
    report = bench.run("cpu", ["bf16_to_fp4_row"], [DENSE], quick=True, effort=TINY)
    assert report.comparisons == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ops": ["nope"]}, "op is 'nope', needed some of bf16_to_fp4_row, "),
        ({"device": "tpu"}, "device is 'tpu', needed cpu or cuda"),
        ({"device": "mps"}, "device is 'mps', needed cpu or cuda"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench.run(**{"device": "cpu", **arguments})


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but torch sees no CUDA device"):
        bench.run("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device is 'cuda:7', but torch sees 1 CUDA devices"):
        bench.run("cuda:7")


# -------------------------------------------------------------------------------------------------------------- report
def _timing(us):
    return Timing(us, us, us, Method.QUEUE, 9, 10)


def test_figures_by_hand():
    """10**9 bytes copied in 1 ms: 2 TB/s. An op at half the rate takes 1 us for each of its 10**6 bytes."""
    copy = Copy(10**9, _timing(1000.0))
    assert copy.bytes_per_s == pytest.approx(2e12)
    case = Case("bf16_to_fp4_row", Shape(32768, 7168))
    ours = Measurement(case, _timing(case.num_bytes / 1e6), copy, target=Target(0.90, 0.97))
    assert ours.bytes_per_s == pytest.approx(1e12)
    assert ours.of_copy == pytest.approx(0.5)
    assert ours.verdict is Verdict.MISSED
    beside = Comparison("torchao", case.num_bytes, _timing(5 * ours.timing.us), ours, Target(4.5, 5.0))
    assert beside.ratio == pytest.approx(5.0)
    report = Report({}, copy, "the host build", [ours], [beside], [Overhead("bf16_to_fp4_row", 9.0, 3.0, OVERHEAD_US)])
    assert list(report.verdicts()) == [
        (Verdict.MISSED, "bf16_to_fp4_row 32768x7168: 0.500 of the copy, at least 0.90"),
        (Verdict.AIM, "bf16_to_fp4_row against torchao: 5.00x, at least 4.5x"),
        (Verdict.REACHED, "Python time of bf16_to_fp4_row: 9.0 us, at most 15"),
    ]
    document = report.to_json()
    assert document["ops"][0]["target"] == {"of": "of_copy", "bound": 0.9, "aim": 0.97, "verdict": "missed"}
    assert document["copy"]["tb_per_s"] == 2.0
    host = replace(ours, of="elements_per_s", target=Target(500e6, 1500e6))
    assert next(Report({}, copy, "", [host]).verdicts())[1].endswith("M elements/s, at least 500")


def test_the_hash_covers_content_and_names_of_sources_alone(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cu").write_text("one")
    first = sources_sha256(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert sources_sha256(tmp_path) == first
    (tmp_path / "src" / "a.cu").write_text("two")
    second = sources_sha256(tmp_path)
    (tmp_path / "src" / "a.cu").rename(tmp_path / "src" / "b.cu")
    assert len({first, second, sources_sha256(tmp_path), sources_sha256()}) == 4


def test_provenance_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(provenance, "_driver", provenance._driver.__wrapped__)  # without its cache
    answer = types.SimpleNamespace(stdout="580.159.04\n580.159.04\n")
    monkeypatch.setattr(provenance.subprocess, "run", lambda *_, **__: answer)
    found = provenance.provenance(torch.device("cuda", 0))
    assert found["device"] == "NVIDIA H200"
    assert found["driver"] == "580.159.04"
    assert found["multiprocessors"] == 132
    assert {"cuda", "nvrtc", "torch", "mxsim", "date", "command", "kernel_sources_sha256"} <= found.keys()

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(provenance.subprocess, "run", missing)
    assert provenance.provenance(torch.device("cuda", 0))["driver"].split()[0] in ("for", "unknown")
