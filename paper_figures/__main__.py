"""Make the figures: python -m paper_figures [topic ...]."""

import argparse
import importlib
import time
from pathlib import Path

from paper_figures.files import NotMeasured, save_figure

FOLDER = Path(__file__).resolve().parent
# topic -> module: fig_<topic>.py, or with the paper's number fig5_<topic>.py
MODULES = {path.stem.partition("_")[2]: path.stem for path in FOLDER.glob("fig*_*.py")}
TOPICS = sorted(MODULES)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures",
        description="Compute and draw the figures.",
        epilog=f"topics: {', '.join(TOPICS)}",
    )
    parser.add_argument("topics", nargs="*", metavar="topic", help="which figures; all of them if none is named")
    topics = parser.parse_args().topics or TOPICS
    unknown = sorted(set(topics) - set(TOPICS))
    if unknown:
        parser.error(f"no figure is called {', '.join(unknown)}; there are {', '.join(TOPICS)}")

    start = time.perf_counter()
    for number, topic in enumerate(topics, 1):
        print(f"[{number}/{len(topics)}] {topic} ...", end=" ", flush=True)
        figure_start = time.perf_counter()
        figure = importlib.import_module(f"paper_figures.{MODULES[topic]}")
        try:
            table = figure.compute()
        except NotMeasured as error:
            print(f"left out: {error}", flush=True)
            continue
        pictures = save_figure(figure.draw(table), topic)
        names = ", ".join(_shown(path) for path in pictures)
        print(f"{time.perf_counter() - figure_start:.1f} s: {names}", flush=True)
    print(
        f"{len(topics)} figures in {time.perf_counter() - start:.1f} s; their tables are in {_shown(FOLDER / 'data')}"
    )


def _shown(path: Path) -> str:
    """Relative to where the command runs, if it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
