"""The report: exhibits, paper beside ours, validation and provenance in one HTML file without any other."""

import base64
import hashlib
import json
import platform
import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mxsim
from paper_figures.exhibit import TOPICS, load
from paper_figures.files import OUT, RESULTS
from paper_figures.page import NOT_MEASURED, ROW_NAMES, finding, rows_of, table_of

STYLE = Path(__file__).with_name("report.css")
_LIBRARIES = ("numpy", "pandas", "matplotlib", "scipy")
_NARROW_PIXELS = 1200  # a picture of one column of text
_SECTIONS = {
    "paper": "The paper's exhibits",
    "own": "The library's own exhibits",
    "validation": "Validation",
    "provenance": "Provenance",
}


def html() -> str:
    """The whole document."""
    modules = [load(topic) for topic in TOPICS]
    exhibits = {
        "paper": [module for module in modules if module.EXHIBIT.claim],
        "own": [module for module in modules if not module.EXHIBIT.claim],
    }
    made = datetime.now(UTC).strftime("%Y-%m-%d")
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    body = [
        "<header><h1>mxsim: exhibits, validation, provenance</h1>",
        "<p>MXFP4 activations in FP8 training of mixture-of-experts models, after “Practical FP4 Training for "
        "Large-Scale MoE Models on Hopper GPUs” (arXiv 2603.02731): the paper's claims, in our words, beside what "
        "mxsim finds.</p>",
        f'<p class="small">mxsim {mxsim.__version__}, Python {platform.python_version()}, {libraries}; written {made}. '
        "What was measured where is at each exhibit, and at the end for every result.</p></header>",
        _contents(exhibits),
        "<main>",
    ]
    for name, title in _SECTIONS.items():
        body.append(f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>')
        if name in exhibits:
            body += [_exhibit(module) for module in exhibits[name]]
        else:
            body.append(_validation() if name == "validation" else _provenance())
        body.append("</section>")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>mxsim {mxsim.__version__}: report</title>",
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style></head><body>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _contents(exhibits: dict[str, list[ModuleType]]) -> str:
    lines = ['<nav aria-label="Contents"><ul>']
    for name, title in _SECTIONS.items():
        lines.append(f'<li><a href="#{name}">{escape(title)}</a>')
        found = exhibits.get(name, [])
        items = [f'<li><a href="#{module.TOPIC}">{escape(module.EXHIBIT.title)}</a></li>' for module in found]
        lines.append("".join(["<ul>", *items, "</ul></li>"]) if items else "</li>")
    return "\n".join([*lines, "</ul></nav>"])


# ------------------------------------------------------------------------------------------------------------ exhibits
def _exhibit(module: ModuleType) -> str:
    exhibit, topic = module.EXHIBIT, module.TOPIC
    table = table_of(topic)
    parts = [f'<article aria-labelledby="{topic}"><h3 id="{topic}">{escape(exhibit.title)}</h3>']
    if exhibit.claim:
        parts.append(f"<p><strong>The paper:</strong> {escape(exhibit.claim)}</p>")
    else:
        parts.append(f"<p><strong>{escape(finding(module))}</strong></p>")
    parts.append(_picture(topic, exhibit.alt) if table is not None else f"<p>{NOT_MEASURED}</p>")
    if rows := rows_of(exhibit, table):
        parts.append(_table("The paper's figure beside ours", ("figure", *ROW_NAMES[1:]), rows))
    parts.append(f"<p>{escape(exhibit.note)}</p>")
    paper = f"The paper: {exhibit.paper_hardware}. " if exhibit.claim else ""
    parts.append(f'<p class="hardware">{escape(f"{paper}Here: {exhibit.hardware}.")}</p></article>')
    return "\n".join(parts)


def _picture(topic: str, alt: str) -> str:
    path = OUT / f"{topic}.png"
    if not path.exists():
        return f"<p>Not drawn; mxsim figures {topic} draws it.</p>"
    png = path.read_bytes()
    width, height = struct.unpack(">II", png[16:24])  # of the header, the first chunk
    kind = "narrow" if width < _NARROW_PIXELS else "wide"
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure class="{kind}"><img alt="{escape(alt)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, num_text: int = 1) -> str:
    """The first column is the rows' heading; those after num_text are aligned to the right."""

    def cells(row: Sequence[str], tag: str) -> str:
        first = f'<th scope="{"col" if tag == "th" else "row"}">{escape(row[0])}</th>'
        scope = ' scope="col"' if tag == "th" else ""
        kinds = ("" if i < num_text else ' class="number"' for i in range(1, len(row)))
        others = (f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row[1:], strict=True))
        return f"<tr>{first}{''.join(others)}</tr>"

    name = escape(caption)
    return "\n".join(
        [
            f'<div class="table" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>',
            f"<thead>{cells(header, 'th')}</thead><tbody>",
            *(cells(row, "td") for row in rows),
            "</tbody></table></div>",
        ]
    )


# ------------------------------------------------------------------------------------------------------------- results
def _results(pattern: str = "*.json") -> dict[str, dict[str, Any]]:
    """By path below benchmarks/results."""
    found = sorted(RESULTS.rglob(pattern))
    return {path.relative_to(RESULTS).as_posix(): json.loads(path.read_text(encoding="utf-8")) for path in found}


def _validation() -> str:
    parts = [
        "<p>Outputs of the kernels, and of the GPU's own FP8 GEMM, compared bit by bit with the simulator; what every "
        "bit must be is in docs/NUMERICS.md.</p>"
    ]
    for name, report in _results("validate_*.json").items():
        rows = [
            (op["op"], f"{op['cases']:,}", f"{op['elements']:,}", f"{op['mismatches']:,}", _verdict(op))
            for op in report["ops"]
        ]
        total = f"{report['elements']:,} elements compared, {report['mismatches']:,} differ"
        parts.append(f"<h3>{escape(name)}</h3><p>{escape(report['device'])}: {total}.</p>")
        parts.append(_table("By op", ("op", "cases", "elements", "mismatches", "verdict"), rows))
        skipped = {reason: count for op in report["ops"] for reason, count in op["skipped_cases"].items()}
        if skipped:
            parts.append(f'<p class="small">Skipped: {sum(skipped.values()):,} cases, {len(skipped)} reasons:</p><ul>')
            for reason, count in skipped.items():
                parts.append(f'<li class="small">{count:,}: {escape(reason.split(". ")[0])}</li>')
            parts.append("</ul>")
    return "\n".join(parts)


def _verdict(op: dict[str, Any]) -> str:
    problems = "; ".join(f"{problem['case']}: {problem['message']}" for problem in op["problems"])
    return "equal" if op["ok"] else problems or "differs"


def _provenance() -> str:
    rows = []
    for name, report in _results().items():
        made = report.get("provenance", {}) | report.get("versions", {})
        device = made.get("device") or made.get("machine") or report.get("device", "")
        versions = [f"{key} {made[key]}" for key in ("driver", "cuda", "torch", "triton", "python") if key in made]
        sources = [f"{key.removesuffix('_sha256')} {made[key][:12]}" for key in made if key.endswith("sources_sha256")]
        digest = hashlib.sha256((RESULTS / name).read_bytes()).hexdigest()
        rows.append(
            (
                name,
                device,
                made["date"][:10] if "date" in made else "not recorded",
                made.get("command", "not recorded"),
                ", ".join(versions),
                ", ".join(sources) or "not recorded",
                digest[:12],
            )
        )
    header = ("result", "device", "date", "command", "versions", "SHA-256 of the sources", "of the file")
    return _table("Every file of benchmarks/results", header, rows, num_text=len(header))
