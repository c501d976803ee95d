"""Makes austen.txt.xz: `python -m mxsim.train.texts.make_austen r-cran-janeaustenr_1.0.0-1_all.deb austen.txt.xz`.

The archive is Debian's build of the R package janeaustenr; on Debian 12 `apt-get download r-cran-janeaustenr` fetches
it. README.md beside this file has its hash, the origin of the texts and their licence.

Inside: an `ar` archive with data.tar.xz, in it Rdata.rdb, which is one record a novel: the length (4 bytes, big-endian)
and a zlib stream of R's serialization (version 3, XDR) of a character vector with one string a line.
"""

import hashlib
import io
import lzma
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

DEB_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
RDATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
EDITORS_NOTE = b"\n\n\n\nA NOTE ON THE TEXT\n"  # ends Northanger Abbey; not by Jane Austen
STRING_VECTOR, STRING = 16, 9


def member(deb: bytes, name: str) -> bytes:
    """A file of an `ar` archive: 8 bytes of magic, then 60 bytes of header and the data, padded to an even length."""
    start = 8
    while start < len(deb):
        header = deb[start : start + 60]
        size = int(header[48:58])
        if header[:16].decode().rstrip(" /") == name:
            return deb[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
    raise ValueError(f"member: the archive has no {name}")


def records(rdb: bytes) -> Iterator[bytes]:
    """The decompressed records, in the order of the file."""
    while rdb:
        stream = zlib.decompressobj()
        yield stream.decompress(rdb[4:])
        rdb = stream.unused_data


def lines(record: bytes) -> Iterator[bytes]:
    """The strings of a serialized character vector."""
    (encoding_length,) = struct.unpack_from(">I", record, 14)  # after "X\n" and three version numbers
    start = 18 + encoding_length
    kind, count = struct.unpack_from(">II", record, start)
    assert kind == STRING_VECTOR
    start += 8
    for _ in range(count):
        flags, length = struct.unpack_from(">II", record, start)
        assert flags & 0xFF == STRING
        yield record[start + 8 : start + 8 + length]
        start += 8 + length
    assert start == len(record)


def austen(deb: bytes) -> bytes:
    """The six novels, without the note of a later editor, with a zero byte between two."""
    if hashlib.sha256(deb).hexdigest() != DEB_SHA256:
        raise ValueError(f"austen: the archive's SHA-256 must be {DEB_SHA256}")
    with tarfile.open(fileobj=io.BytesIO(member(deb, "data.tar.xz"))) as tar:
        file = tar.extractfile(RDATA)
        assert file is not None
        novels = [b"\n".join(lines(record)) for record in records(file.read())]
    return b"\0".join(novel.split(EDITORS_NOTE)[0].rstrip(b"\n") + b"\n" for novel in novels)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_bytes(lzma.compress(austen(source.read_bytes()), preset=9))
