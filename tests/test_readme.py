"""The README does not lie: its example runs, its numbers are those of benchmarks/results, its files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


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


def test_the_measured_tables_are_those_of_the_results():
    script = ROOT / "benchmarks/readme_table.py"
    table = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert table.strip() in README


@pytest.mark.skipif(not (ROOT / "benchmarks/results/moe_h200.json").exists(), reason="no measured expert layer")
def test_the_tables_of_the_expert_layer_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "benchmarks/readme_table.py"), "moe"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.strip() in README


def test_the_tables_of_expert_parallelism_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "benchmarks/readme_table.py"), "ep"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.strip() in README


def test_the_table_of_the_loss_curves_is_that_of_the_runs():
    command = [sys.executable, str(ROOT / "benchmarks/readme_table.py"), "train"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.strip() in README


def test_every_file_it_names_exists():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_it_counts_the_cases_that_broke_other_libraries():
    from tests.cases.bug_cases import CASES

    assert f"{len(CASES)} cases from public bug reports" in README
