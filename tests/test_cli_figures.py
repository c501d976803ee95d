"""`mxsim figures` and `mxsim report`: what they write and say, and their one-line errors."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mxsim
from mxsim.cli import app
from mxsim.commands import figures as command
from paper_figures import fig_dispatch, fig_fused_kernels, page
from paper_figures.exhibit import TOPICS, Measured, load

ROOT = Path(__file__).resolve().parents[1]


def invoke(*args):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(args))


def one_line(result):
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    return line


# ---- figures ----


def test_list_names_every_exhibit_and_what_measures_it():
    lines = invoke("figures", "--list").output.splitlines()
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in TOPICS]
    assert names == TOPICS
    (dispatch,) = (line for line in lines if line.startswith("dispatch "))
    assert "mxsim bench ep" in dispatch


def test_a_folder_gets_table_and_pictures_and_the_page_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "write", lambda: pytest.fail("the page is of the committed tables"))
    result = invoke("figures", "fused_kernels", "--out", str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [f"fused_kernels.{end}" for end in ("csv", "pdf", "png")]
    assert (folder / "fused_kernels.csv").read_bytes() == (ROOT / "paper_figures/data/fused_kernels.csv").read_bytes()
    assert re.search(r"^fused_kernels: \d+\.\d s: .*fused_kernels\.pdf", result.output)
    assert "1 exhibit in" in result.output


def test_what_cannot_be_measured_here_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_lacking", lambda num_gpus: f"needs {num_gpus} of them")
    result = invoke("figures", "fused_kernels", "dispatch", "memory_236b", "--recompute", "--out", str(tmp_path))
    assert result.exit_code == 0
    first, second, third, _ = result.output.splitlines()
    assert first.endswith("(the committed result, not measured again: needs 1 of them)")
    assert second.endswith("(the committed result, not measured again: needs 2 of them)")
    assert third.endswith("memory_236b.png")  # nothing to measure


def test_a_machine_without_hopper_gpus_lacks_them():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command._lacking(1) == "needs a Hopper GPU, none here"
    assert command._lacking(2) == "needs 2 Hopper GPUs, none here"


def test_measured_again_it_is_drawn_from_the_new_result_and_measured_once(tmp_path, monkeypatch):
    result = json.loads(fig_fused_kernels.MEASURED.read_text())
    for op in result["ops"]:
        op["us"] *= 2
    calls = []

    def bench(args, **options):
        calls.append(args)
        Path(args[-1]).write_text(json.dumps(result))
        return subprocess.CompletedProcess(args, 0, stderr="")

    monkeypatch.setattr(command, "_lacking", lambda num_gpus: "")
    monkeypatch.setattr(command.subprocess, "run", bench)
    assert invoke("figures", "fused_kernels", "kernel_ceiling", "--recompute", "--out", str(tmp_path)).exit_code == 0
    assert calls == [
        [sys.executable, "-m", "mxsim.cli", "bench", "--device", "cuda", "--json", str(tmp_path / "bench.json")]
    ]
    table = (tmp_path / "fused_kernels.csv").read_text()
    assert f"{result['ops'][0]['us']:g}" in (tmp_path / "kernel_ceiling.csv").read_text()
    assert table != (ROOT / "paper_figures/data/fused_kernels.csv").read_text()


def test_a_measurement_that_fails_or_takes_too_long_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_lacking", lambda num_gpus: "")
    failed = subprocess.CompletedProcess([], 1, stderr="noise\nmxsim: bits differ\n")
    monkeypatch.setattr(command.subprocess, "run", lambda *args, **options: failed)
    measure = command._Measure(tmp_path)
    assert measure(Measured(("bench", "moe"))) == (None, "mxsim bench moe failed: bits differ")
    assert measure(Measured(("train",), by_hand="two hours")) == (None, "takes two hours")


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if load(topic).EXHIBIT.measured])
def test_measuring_commands_exist_and_compute_takes_their_result(topic):
    measured = load(topic).EXHIBIT.measured
    assert "measured" in (load(topic).compute.__kwdefaults__ or {})
    assert invoke(*measured.command, "--help").exit_code == 0


def test_what_was_never_measured_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(fig_dispatch.compute, "__kwdefaults__", {"measured": tmp_path / "ep_h200.json"})
    result = invoke("figures", "dispatch", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "dispatch: left out: ep_h200.json is not in" in result.output


def test_errors_are_one_line(tmp_path, monkeypatch):
    assert "unknown exhibit 'scale_rule'; did you mean scale_rules?" in one_line(invoke("figures", "scale_rule"))
    (tmp_path / "file").touch()
    assert "--out" in one_line(invoke("figures", "memory_236b", "--out", str(tmp_path / "file")))
    assert "is a directory" in one_line(invoke("report", "--out", str(tmp_path)))
    monkeypatch.setattr(mxsim, "__file__", str(tmp_path / "site-packages" / "mxsim" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    for name in ("figures", "report"):
        assert one_line(invoke(name)) == (
            f"mxsim: {name} needs a checkout of the repository: the exhibits are not part of the package"
        )


def test_the_module_is_the_same_command():
    run = subprocess.run(
        [sys.executable, "-m", "paper_figures", "nonsense"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("mxsim: unknown exhibit 'nonsense'")
    assert len(run.stderr.splitlines()) == 1


# ---- report ----

_VOID = {"meta", "img"}


class _Document(HTMLParser):
    """Checks that elements nest; keeps tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    result = invoke("report", "--out", str(path))
    assert result.exit_code == 0
    assert str(path) in result.output
    return _Document(path.read_text(encoding="utf-8"))


def test_the_report_needs_no_other_file(report):
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in report.tags}
    for tag, attributes in report.tags:
        for name in ("src", "href", "srcset", "style", "data"):
            if value := attributes.get(name):
                assert value.startswith(("data:image/png;base64,", "#")), f"{tag} {name}={value[:60]}"
    (style,) = (words for words in report.words if "@media print" in words)
    assert "url(" not in style
    assert "@import" not in style


def test_the_report_has_every_exhibit_described_and_its_links_lead_somewhere(report):
    ids = [attributes["id"] for _, attributes in report.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [name for name in ids if name in TOPICS] == TOPICS
    assert {attributes["href"][1:] for attributes in report.all("a")} == set(ids)
    drawn = [load(topic).EXHIBIT.alt for topic in TOPICS if page.table_of(topic) is not None]
    assert [image["alt"] for image in report.all("img")] == drawn
    text = " ".join(report.words)
    for topic in TOPICS:
        for row in page.rows_of(load(topic).EXHIBIT, page.table_of(topic)):
            assert row.what in text


def test_the_report_has_validation_and_provenance_of_every_result(report):
    text = " ".join(report.words)
    results = ROOT / "benchmarks/results"
    for path in sorted(results.rglob("*.json")):
        result = json.loads(path.read_text())
        assert path.relative_to(results).as_posix() in text
        if path.name.startswith("validate_"):
            assert f"{result['elements']:,} elements compared, {result['mismatches']:,} differ" in text
        else:
            assert result["provenance"]["command"] in text
    assert report.all("html") == [{"lang": "en"}]
    assert all(attributes["scope"] in ("row", "col") for attributes in report.all("th"))
