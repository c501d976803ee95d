"""The README does not lie: its example runs, its numbers are those of benchmarks/results, its files exist."""

import csv
import json
import re
import statistics
import subprocess
import sys
from math import ceil, floor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())


def test_the_example_prints_what_its_comments_say(capsys):
    example, _, _ = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(example, {})
    in_rows_and_columns, at_headroom_0 = capsys.readouterr().out.splitlines()
    assert in_rows_and_columns == "0 0"
    assert int(at_headroom_0) > 0


def test_the_torch_example_runs():
    torch = pytest.importorskip("torch")
    _, example, _ = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names = {}
    exec(example.replace("4096, 7168", "4096, 256"), names)
    assert names["cols"].padded_group_sizes.tolist() == [1024, 0, 3072]
    assert names["fp8"].codes.dtype == torch.float8_e4m3fn


def test_the_example_of_the_layer_runs():
    torch = pytest.importorskip("torch")
    _, _, example = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    for size, small in (
        ("7168, 2048", "256, 128"),
        ("256, top_k=8", "8, top_k=2"),
        ('device="cuda"', "dtype=torch.bfloat16"),
    ):
        assert size in example
        example = example.replace(size, small)
    x = torch.randn(2, 5, 256).bfloat16().requires_grad_()
    names = {"torch": torch, "x": x, "model": torch.nn.Linear(256, 1, dtype=torch.bfloat16)}
    exec(example, names)
    assert names["y"].shape == x.shape
    assert names["loss"].shape == (2, 5, 1)


def readme_table(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/readme_table.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("arguments", [(), ("moe",), ("ep",), ("train",), ("ablation",)], ids=" ".join)
def test_the_measured_tables_are_those_of_the_results(arguments):
    assert readme_table(*arguments) in README


def test_the_table_of_the_ablation_is_in_the_results_too():
    rows = [line for line in readme_table("ablation").splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 14
    assert set(rows) <= set((ROOT / "benchmarks/results/train_h200.md").read_text().splitlines())


def test_the_errors_of_the_preset_tiny_are_those_measured():
    measured = json.loads((ROOT / "benchmarks/results/gradient_error_tiny.json").read_text())
    (config, tokens) = measured["config"], measured["num_tokens"]
    assert (config["recipe"], config["steps"], tokens) == ("bf16", measured["checkpoint_step"], 16384)
    percent = {
        row["recipe"]: 100 * row["relative_error"]
        for row in measured["rows"]
        if (row["group"], row["layer"], row["choices"], row["num_averaged"]) == ("all", None, "own", 1)
    }
    figures = [
        f"{name} {percent[recipe]:.1f} %"
        for name, recipe in (("MXFP4", "mxfp4"), ("FLOOR", "mxfp4-floor"), ("FP8", "fp8"))
    ]
    assert f"--tokens 16384  # {', '.join(figures)}" in README


def test_the_losses_of_the_preset_tiny_are_those_of_the_runs():
    def final(recipe, seed):
        run = json.loads((ROOT / f"benchmarks/results/ablation_tiny/{recipe}-seed{seed}/run.json").read_text())
        config = run["config"]
        assert (run["status"], run["steps_done"], config["recipe"], config["seed"]) == ("finished", 400, recipe, seed)
        return run["final_validation_loss"]

    said = []
    for recipe in ("mxfp4-gradients", "mxfp4"):
        percents = [100 * (final(recipe, seed) / final("bf16", seed) - 1) for seed in range(4)]
        mean, error = statistics.fmean(percents), statistics.stdev(percents) / 2
        said.append((f"{mean:+.1f} %", f"{min(percents):+.1f} to {max(percents):+.1f}", f"standard error {error:.1f}"))
    assert said == [
        ("+2.0 %", "+1.6 to +2.7", "standard error 0.3"),
        ("+0.9 %", "-0.3 to +3.1", "standard error 0.8"),
    ]
    assert "end +2.0 % above BF16 (1.6 to 2.7 %, standard error 0.3), four of `mxfp4` +0.9 % (-0.3 to +3.1 %" in PROSE


def rows_of(topic, **chosen):
    with (ROOT / "paper_figures/data" / f"{topic}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in chosen.items())]


def accumulation_percent(column="relative_frobenius_error", k="7168", error_of="accumulation", **chosen):
    """By data."""
    chosen = {"fraction_bits": "13", "operands": "E4M3 rows"} | chosen
    found = rows_of("accumulation", k=k, error_of=error_of, **chosen)
    return {row["data"]: 100 * float(row[column]) for row in found}


def test_the_accumulator_s_errors_are_those_of_the_table():
    promoted, never = (accumulation_percent(promotion_interval=interval) for interval in ("128", "never"))
    fp8, mxfp4 = (
        accumulation_percent(error_of="quantization", fraction_bits="exact", operands=name)
        for name in ("FP8_1X128", "MXFP4")
    )
    assert len(promoted) == len(never) == len(fp8) == len(mxfp4) == 5
    assert f"costs {min(promoted.values()):.1g} to {max(promoted.values()):.1g} % of a dot product of 7168" in PROSE
    positive = [errors.pop("positive normal") for errors in (never, fp8, mxfp4)]
    (cancelling,) = {f"{percent:.1g}" for percent in never.values()}
    assert f"never promoted it would cost {cancelling} % where terms cancel and {positive[0]:.0f} % where" in PROSE
    assert f"cost {min(fp8.values()):.0f} to {max(fp8.values()):.0f} % ({positive[1]:.2f} % on positive data)" in PROSE
    assert (
        f"MXFP4 operands {floor(min(mxfp4.values()))} to {ceil(max(mxfp4.values()))} % ({positive[2]:.1f} %)" in PROSE
    )


def test_the_published_prediction_is_compared_with_the_table_s_mean_errors():
    data = ("positive normal", "uniform [0, 1)", "uniform [1, 2)", "log-uniform, 16 binades")
    promoted, never = (
        accumulation_percent("mean_signed_relative_error", k="4096", promotion_interval=interval)
        for interval in ("128", "never")
    )
    promoted, never = ({name: found[name] for name in data} for found in (promoted, never))
    log_uniform = never.pop(data[-1])
    found = f"(-{-max(never.values()):.1f} to {min(never.values()):.1f} %; log-uniform {log_uniform:.1f} %)"
    assert f"holds for normal and uniform data {found}" in PROSE
    assert f"depends on the data ({max(promoted.values()):.3f} to {min(promoted.values()):.3f} %)" in PROSE


def test_what_headroom_0_rounds_is_what_the_table_says():
    rounded = rows_of("error_decomposition", chain="FP4 -> FP8 row, headroom 0", part="second rounding")
    assert f"of the {len(rounded)} slices of a small transformer in this repository, one (a residual stream)" in PROSE
    (row,) = (row for row in rounded if int(row["num_changed"]))
    assert row["data"].endswith("residual")
    assert f"headroom 0 rounds {row['num_changed']} of its {int(row['num_elements']):,} elements" in PROSE
    wide = {
        row["source"]
        for row in rows_of("lossless_window", quantity="row_blocks")
        if int(row["spread"]) > 8 and int(row["count"])
    }
    assert len(wide) == 1


def test_the_comparison_with_scaled_mm_is_the_result_s():
    result = json.loads((ROOT / "benchmarks/results/validate_scaled_mm_h200.json").read_text())
    assert f"{result['elements']:,} outputs in FP32 and BF16, E4M3 and E5M2, {result['mismatches']} differ" in PROSE
    notes = " ".join(result["ops"][0]["notes"])
    (host,) = re.findall(r"the host build in ([\d,]+) outputs", notes)
    assert f"{host} of them compared with the host build" in PROSE
    assert f"`mxsim validate --op scaled_mm --device cuda`, {result['seconds']:.0f} s;" in PROSE


def test_every_file_it_names_exists():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_it_counts_the_cases_that_broke_other_libraries():
    from tests.cases.bug_cases import CASES

    assert f"{len(CASES)} cases from public bug reports" in README
