"""Text to train on: the bytes of a file, of which a fixed part is held out for validation.

Tokens are bytes, so there is no vocabulary to build: 256 of them, and any file will do.

The split. The text is cut into chunks of 16 KiB; chunk 1, 33, 65, ... (every 32nd, 3.1 % of the text) is validation,
the rest training. Chunks from all over the text are held out rather than its tail: a concatenation of books or packages
changes its subject on the way, so that its tail is a text of another kind. Both parts are contiguous arrays with the
other's chunks cut out, so no window of either holds a byte of the other; a window across a seam reads two chunks that
are no neighbours in the text. Windows of a power of two of at most 16 Ki bytes that start at multiples of their length
meet no seam.
"""

import gzip
import hashlib
import lzma
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

CHUNK_BYTES = 16 * 1024
CHUNKS_PER_HELD_OUT = 32
FIRST_HELD_OUT = 1
MIN_BYTES = 4 * CHUNK_BYTES  # a whole chunk of validation and three of training

_OTHER_COMPRESSION = {".7z", ".bz2", ".lz4", ".zip", ".zst"}

# Between two documents of a corpus that mxsim makes; no document has one inside.
SEPARATOR = b"\0"

AUSTEN = Path(__file__).parent / "texts" / "austen.txt.xz"
AUSTEN_SHA256 = "812bc3dc64adda588c71d2df0230b820120c7301a8aeb41a751fe333750b6774"


class CorpusError(ValueError):
    """A corpus that cannot be read or made; the message is one line."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes to train on and bytes to validate with; `sha256` is that of the whole text, before the split."""

    name: str
    train: UInt8[np.ndarray, " train"]
    validation: UInt8[np.ndarray, " validation"]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return self.train.size + self.validation.size


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The corpus of a text file, plain or compressed as its name says (.gz, .xz).

    Without a path: the six novels of Jane Austen, 4 MB in the public domain, which come with mxsim; texts/README.md has
    their origin.

    Raises:
        CorpusError: if the file is missing, no regular file, not readable, damaged, empty or shorter than MIN_BYTES.

    >>> corpus = load_corpus()
    >>> corpus.train[:4].tobytes(), corpus.num_bytes, round(corpus.validation.size / corpus.num_bytes, 3)
    (b'EMMA', 4024601, 0.033)
    """
    file = AUSTEN if path is None else Path(path)
    text = _read(file)
    if not text:
        raise CorpusError(f"the corpus {file} is empty")
    if len(text) < MIN_BYTES:
        raise CorpusError(f"the corpus {file} has {len(text)} bytes of text; at least {MIN_BYTES} are needed")
    train, validation = split(text)
    name = "austen" if path is None else file.name
    return Corpus(name, train, validation, hashlib.sha256(text).hexdigest())


def split(text: bytes) -> tuple[UInt8[np.ndarray, " train"], UInt8[np.ndarray, " validation"]]:
    """The training and the validation part of a text, as the head of this module says; both are writable copies."""
    tokens = np.frombuffer(text, np.uint8)
    chunks = [tokens[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES)]
    validation = chunks[FIRST_HELD_OUT::CHUNKS_PER_HELD_OUT]
    del chunks[FIRST_HELD_OUT::CHUNKS_PER_HELD_OUT]
    return np.concatenate(chunks), np.concatenate(validation)


def _read(file: Path) -> bytes:
    """The file's text, decompressed.

    Raises:
        CorpusError: if it cannot be read.
    """
    try:
        if file.is_dir():
            raise CorpusError(f"the corpus {file} is a directory; a text file is needed")
        if file.exists() and not file.is_file():
            raise CorpusError(f"the corpus {file} is not a regular file")
        data = file.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read the corpus {file}: {error.strerror}") from error
    suffix = file.suffix.lower()
    if suffix in _OTHER_COMPRESSION:
        raise CorpusError(f"cannot read the corpus {file}: {suffix} is not supported; use .xz, .gz or plain text")
    try:
        match suffix:
            case ".gz":
                return gzip.decompress(data)
            case ".xz":
                return lzma.decompress(data)
            case _:
                return data
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise CorpusError(f"cannot read the corpus {file}: no whole {suffix} file ({error})") from error
