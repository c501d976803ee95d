"""`mxsim report`: the exhibits, the validation and the provenance as one HTML file."""

from pathlib import Path

from rich.console import Console

from mxsim.commands.figures import paper_figures
from mxsim.commands.output_files import OutputFiles


def report(out: Path, *, console: Console) -> None:
    """Write the file and say where it is.

    Raises:
        BadInput: if it cannot be written, or outside a checkout.
    """
    page = paper_figures("report", command="report")
    with OutputFiles() as files:
        target = files.reserve(out)
        target.write_text(page.html(), encoding="utf-8")
    console.print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, opens in any browser", markup=False, soft_wrap=True)
