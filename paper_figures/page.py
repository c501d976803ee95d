"""README.md: the paper's figures beside ours, then the library's own exhibits, from the tables in data/."""

from pathlib import Path
from types import ModuleType

import pandas as pd

from paper_figures.exhibit import TOPICS, Exhibit, Row, load
from paper_figures.files import DATA

PAGE = Path(__file__).resolve().parent / "README.md"
ROW_NAMES = ("", "the paper", "here", "residual")
NOT_MEASURED = "Not measured yet."

_INTRODUCTION = """\
# Exhibits

Written by `mxsim figures` from the tables in [data](data); an edit by hand is lost. First the exhibits of the paper,
"Practical FP4 Training for Large-Scale MoE Models on Hopper GPUs" (arXiv 2603.02731), its claims in our words, beside
what is found here; then this library's own. A residual is ours less the paper's, or less the nearer end of its range.
`mxsim figures --recompute` measures again what the machine at hand can."""


def table_of(topic: str) -> pd.DataFrame | None:
    """data/<topic>.csv; None if it is not measured."""
    path = DATA / f"{topic}.csv"
    return pd.read_csv(path) if path.exists() else None


def rows_of(exhibit: Exhibit, table: pd.DataFrame | None) -> list[Row]:
    return exhibit.rows(table) if exhibit.rows is not None and table is not None else []


def finding(module: ModuleType) -> str:
    """What an exhibit of the library's own finds: the first line of its docstring."""
    return (module.__doc__ or "").splitlines()[0]


def text() -> str:
    """Markdown."""
    modules = [load(topic) for topic in TOPICS]
    ours = [module for module in modules if not module.EXHIBIT.claim]
    parts = [_INTRODUCTION]
    parts.append("\n".join(f"- [{module.EXHIBIT.title}](#{module.TOPIC})" for module in modules))
    parts.append("## The paper's")
    parts += [_section(module) for module in modules if module.EXHIBIT.claim]
    parts.append("## The library's own")
    parts += [_section(module) for module in ours]
    return "\n\n".join(parts) + "\n"


def _section(module: ModuleType) -> str:
    exhibit, topic = module.EXHIBIT, module.TOPIC
    table = table_of(topic)
    source = Path(module.__file__ or "").name
    hardware = f"Here: {exhibit.hardware}."
    parts = [f'### <a name="{topic}"></a>{exhibit.title}']
    if exhibit.claim:
        parts.append(f"**The paper:** {exhibit.claim}")
        hardware = f"The paper: {exhibit.paper_hardware}. {hardware}"
    else:
        parts.append(f"**{finding(module)}**")
    if table is None:
        return "\n\n".join([*parts, NOT_MEASURED, exhibit.note])
    parts.append(f"![{exhibit.alt}](out/{topic}.png)")
    if rows := rows_of(exhibit, table):
        lines = [ROW_NAMES, ("---",) * len(ROW_NAMES), *rows]
        parts.append("\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines))
    parts += [exhibit.note, f"{hardware} [{source}]({source}), [data](data/{topic}.csv)"]
    return "\n\n".join(parts)


def write() -> Path:
    PAGE.write_text(text(), encoding="utf-8")
    return PAGE
