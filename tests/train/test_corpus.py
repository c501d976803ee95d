"""The corpus: its bytes, its split, what the build takes from an archive, and the hashes that pin all of it."""

import gzip
import hashlib
import io
import json
import logging
import lzma
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mxsim.cli import app
from mxsim.commands import corpus as command
from mxsim.train import package_index
from mxsim.train.corpus import MIN_BYTES, CorpusError, load_corpus, split
from mxsim.train.corpus_build import PINS, Pins, Source, build, compose, documents, read_pins

KIB16 = 16 * 1024
PERMISSIVE = {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT"}
LONG = "word " * 60  # longer than the shortest document that is taken
RNG = np.random.default_rng(7)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_sdist(folder: Path, name: str, files: list[tuple[str, bytes]], *, with_code: bool = True) -> Source:
    """A source distribution with the files in the given order, and its pin."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file, data in files:
            entry = tarfile.TarInfo(f"{name}-1.0/{file}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        link = tarfile.TarInfo(f"{name}-1.0/link.rst")
        link.type, link.linkname, link.size = tarfile.SYMTYPE, "/etc/hostname", 300
        tar.addfile(link)
    data = path.read_bytes()
    return Source(name, "1.0", path.name, len(data), sha256(data), "MIT", with_code)


def doc(text: str) -> bytes:
    return f"{text} {LONG}".encode()


# ------------------------------------------------------------------------------------------------------- load and split
def test_the_text_that_comes_with_mxsim_is_the_pinned_one_and_only_text():
    corpus = load_corpus()
    text = lzma.decompress((PINS.parent / "texts" / "austen.txt.xz").read_bytes())
    assert corpus.name == "austen"
    assert corpus.sha256 == sha256(text) == "812bc3dc64adda588c71d2df0230b820120c7301a8aeb41a751fe333750b6774"
    assert corpus.num_bytes == len(text) == 4_024_601
    assert corpus.sha256 in (PINS.parent / "texts" / "README.md").read_text()
    novels = text.split(b"\0")
    titles = [novel.decode().split("\n")[0].upper() for novel in novels]
    assert titles == [
        "EMMA",
        "MANSFIELD PARK",
        "NORTHANGER ABBEY",
        "PERSUASION",
        "PRIDE AND PREJUDICE",
        "SENSE AND SENSIBILITY",
    ]
    assert b"It is a truth universally acknowledged" in novels[4]
    assert not re.search(rb"(?i)gutenberg|copyright|signet", text)


def test_every_32nd_chunk_from_the_second_on_is_held_out_and_the_rest_is_trained_on():
    # Chunk i holds only the byte i, the 66th is half a chunk: the parts can be read off.
    text = b"".join(bytes([i]) * KIB16 for i in range(65)) + bytes([65]) * (KIB16 // 2)
    train, validation = split(text)
    assert train.dtype == validation.dtype == np.uint8
    assert np.unique(validation).tolist() == [1, 33, 65]
    assert train.reshape(-1, KIB16)[:, 0].tolist() == [i for i in range(65) if i not in (1, 33)]
    assert (train.reshape(-1, KIB16) == train[::KIB16, None]).all()
    assert np.bincount(validation)[[1, 33, 65]].tolist() == [KIB16, KIB16, KIB16 // 2]
    train[0] = validation[0] = 9  # what trains may shuffle in place


@pytest.mark.parametrize("size", [MIN_BYTES, MIN_BYTES + 1, 33 * KIB16, 33 * KIB16 + 1, 34 * KIB16 - 1])
def test_the_parts_have_every_byte_of_the_text_once(size):
    text = RNG.integers(0, 256, size, dtype=np.uint8)
    train, validation = split(text.tobytes())
    chunk = np.arange(size) // KIB16
    assert np.array_equal(train, text[chunk % 32 != 1])
    assert np.array_equal(validation, text[chunk % 32 == 1])


@pytest.mark.parametrize(
    "name, pack", [("a.txt", bytes), ("a", bytes), ("a.gz", gzip.compress), ("a.XZ", lzma.compress)]
)
def test_plain_and_compressed_files_are_the_same_text(tmp_path, name, pack):
    text = RNG.integers(0, 256, MIN_BYTES, dtype=np.uint8).tobytes()
    (tmp_path / name).write_bytes(pack(text))
    corpus = load_corpus(tmp_path / name)
    assert corpus.sha256 == sha256(text)
    assert corpus.name == name
    assert (corpus.train.size, corpus.validation.size) == (MIN_BYTES - KIB16, KIB16)


def _bad_files(folder: Path) -> dict[str, str]:
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_bytes(b"a" * (MIN_BYTES - 1))
    (folder / "cut.gz").write_bytes(gzip.compress(RNG.bytes(MIN_BYTES))[:-20])
    (folder / "cut.xz").write_bytes(lzma.compress(RNG.bytes(MIN_BYTES))[:-20])
    (folder / "not.xz").write_bytes(b"a" * MIN_BYTES)
    (folder / "not.gz").write_bytes(b"a" * MIN_BYTES)
    (folder / "a.zst").write_bytes(b"a" * MIN_BYTES)
    return {
        "missing.txt": "cannot read the corpus .*missing.txt: No such file",
        ".": "is a directory; a text file is needed",
        "/dev/null": "/dev/null is not a regular file",
        "empty.txt": "empty.txt is empty",
        "short.txt": "has 65535 bytes of text; at least 65536 are needed",
        "cut.gz": "no whole .gz file",
        "cut.xz": "no whole .xz file",
        "not.xz": "no whole .xz file",
        "not.gz": "no whole .gz file",
        "a.zst": ".zst is not supported; use .xz, .gz or plain text",
    }


def test_what_cannot_be_used_is_named_in_one_line(tmp_path):
    for name, message in _bad_files(tmp_path).items():
        with pytest.raises(CorpusError, match=message):
            load_corpus(tmp_path / name)
        result = CliRunner().invoke(app, ["corpus", "info", str(tmp_path / name)])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# ---------------------------------------------------------------------------------------------------------------- pins
def test_every_pin_is_complete_permissive_and_names_its_version():
    pins = read_pins()
    assert pins.size_bytes >= 100_000_000
    assert len({source.file for source in pins.sources}) == len({source.name for source in pins.sources})
    assert [s.name for s in pins.sources] == sorted((s.name for s in pins.sources), key=str.lower)
    for hash_ in (pins.sha256, *(source.sha256 for source in pins.sources)):
        assert re.fullmatch("[0-9a-f]{64}", hash_)
    for source in pins.sources:
        assert source.file.lower().replace("_", "-") == f"{source.name}-{source.version}.tar.gz".lower()
        assert 100_000 < source.size_bytes < 50_000_000
        assert source.licence in PERMISSIVE or source.name in ("docutils", "matplotlib"), source
    assert "://" not in PINS.read_text()


# --------------------------------------------------------------------------------------------------------------- build
def test_documents_are_the_wanted_files_sorted_by_path(tmp_path):
    taken = {
        "README.md": doc("readme"),
        "docs/Z.RST": doc("upper case before lower case"),
        "docs/a.rst": doc("é is UTF-8"),
        "docs/a/b.txt": doc("deeper"),
        "latest/attestation.py": doc("a folder whose name only has test in it"),
        "src/code.py": doc("code"),
        "src/exactly.txt": b"x" * 256,
        "src/largest.txt": b"y" * 2**19,
    }
    left = {
        "docs/picture.svg": doc("no text suffix"),
        "setup.cfg": doc("neither"),
        "src/latin.txt": doc("") + b"\xe9",
        "src/zero.txt": doc("") + b"\0",
        "src/short.txt": b"x" * 255,
        "src/large.txt": b"y" * (2**19 + 1),
        "pkg/tests/test_a.py": doc("a test"),
        "pkg/Tests/data.txt": doc("a test's data"),
        "pkg/_vendor/other.py": doc("vendored"),
        "pkg.egg-info/SOURCES.txt": doc("a list of files"),
    }
    shuffled = list((taken | left).items())
    RNG.shuffle(shuffled)
    source = make_sdist(tmp_path, "pkg", [(str(name), bytes(data)) for name, data in shuffled])
    assert list(documents(tmp_path / source.file, source.suffixes)) == sorted(taken.items())
    prose = [path for path, _ in documents(tmp_path / source.file, replace(source, with_code=False).suffixes)]
    assert prose == sorted(path for path in taken if not path.endswith(".py"))


def test_the_text_is_sorted_by_package_and_has_every_document_once(tmp_path):
    b = make_sdist(tmp_path, "Beta", [("z.md", doc("5")), ("licence.txt", doc("same\r\nlines")), ("a.md", doc("4"))])
    a = make_sdist(tmp_path, "alpha", [("b.py", doc("2")), ("c.md", doc("2")), ("a.txt", doc("same\nlines"))])
    c = make_sdist(tmp_path, "aleph", [("b.py", doc("code of a source of prose")), ("b.md", doc("0"))], with_code=False)
    want = b"\0".join(map(doc, ["0", "same\nlines", "2", "4", "5"]))
    for sources in ([a, b, c], [c, b, a]):
        assert compose([(source, tmp_path / source.file) for source in sources]) == want


def test_another_archive_or_another_text_than_the_pinned_one_is_refused(tmp_path):
    source = make_sdist(tmp_path, "pkg", [("a.md", doc("a"))])
    archives = {source.file: tmp_path / source.file}
    text = doc("a")
    pins = Pins(len(text), sha256(text), (source,))
    assert build(pins, archives) == text
    with pytest.raises(CorpusError, match=f"the text .* SHA-256 {pins.sha256} .*pinned is {'0' * 64}"):
        build(replace(pins, sha256="0" * 64), archives)
    other = replace(source, sha256="1" * 64)
    with pytest.raises(CorpusError, match=rf"pkg-1\.0\.tar\.gz has SHA-256 {source.sha256}; pinned is {'1' * 64}"):
        build(replace(pins, sources=(other,)), archives)


# --------------------------------------------------------------------------------------------------------------- fetch
@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for its only index."""
    pytest.importorskip("pip._internal.commands")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_REQUIRE_HASHES", "PIP_ONLY_BINARY", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{shelf} {tmp_path / 'nowhere'}")  # pip warns of the second
    return shelf


def test_pip_fetches_the_pinned_file_once_and_runs_nothing_of_it(shelf, tmp_path, capfd, caplog):
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w').close()  # {LONG}".encode()
    source = make_sdist(shelf, "mxsimfake", [("setup.py", code)])
    cache, updates = tmp_path / "new" / "cache", []
    archives = package_index.fetch([source], cache, lambda *update: updates.append(update))
    assert archives == {source.file: cache / source.file}
    assert archives[source.file].read_bytes() == (shelf / source.file).read_bytes()
    assert [path.name for path in cache.iterdir()] == [source.file]
    assert updates[-1] == (source.size_bytes, source.size_bytes, source.file)
    assert not marker.exists()
    (shelf / source.file).unlink()
    assert package_index.fetch([source], cache) == archives
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert logging.getLogger("pip").propagate


def test_what_the_index_lacks_is_one_line_and_keeps_what_is_there(shelf, tmp_path, capfd):
    have = make_sdist(shelf, "mxsimfake", [("a.md", doc("a"))])
    lack = replace(have, name="mxsimnone", file="mxsimnone-1.0.tar.gz")
    (tmp_path / f"{lack.file}.part").write_bytes(b"begun")
    with pytest.raises(CorpusError, match=r"^pip finds no mxsimnone-1.0.tar.gz: its index is out of reach or [^\n]*$"):
        package_index.fetch([have, lack], tmp_path)
    assert (tmp_path / have.file).exists()
    assert (tmp_path / f"{lack.file}.part").read_bytes() == b"begun"
    assert capfd.readouterr() == ("", "")


def test_wrong_bytes_are_deleted_and_a_broken_off_file_is_kept(shelf, tmp_path):
    source = make_sdist(shelf, "mxsimfake", [("a.md", doc("a"))])
    part = tmp_path / f"{source.file}.part"
    with pytest.raises(CorpusError, match="pinned is 111"):
        package_index.fetch([replace(source, sha256="1" * 64)], tmp_path)
    assert not part.exists()
    with pytest.raises(CorpusError, match=f"broke off at {source.size_bytes} of {source.size_bytes + 1} bytes"):
        package_index.fetch([replace(source, size_bytes=source.size_bytes + 1)], tmp_path)
    assert part.stat().st_size == source.size_bytes
    assert not (tmp_path / source.file).exists()


class _Response:
    def __init__(self, status_code: int, data: bytes) -> None:
        self.status_code, self._data = status_code, data

    def __enter__(self) -> "_Response":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def raise_for_status(self) -> None:
        pass

    def iter_content(self, size: int) -> list[bytes]:
        return [self._data]


@pytest.mark.parametrize("does_ranges", [True, False])
def test_a_broken_off_file_is_fetched_on_from_its_end(tmp_path, does_ranges):
    source = make_sdist(tmp_path, "mxsimfake", [("a.md", doc("a"))])
    whole = (tmp_path / source.file).read_bytes()
    part = tmp_path / "part"
    part.write_bytes(whole[:100])

    class Finder:
        def find_all_candidates(self, name: str):
            link = type("Link", (), {"filename": source.file, "url": f"index:{name}#sha256=0"})
            return [type("Candidate", (), {"link": link})]

    class Session:
        def get(self, url: str, headers: dict[str, str], stream: bool) -> _Response:
            assert (url, headers["Range"]) == ("index:mxsimfake", "bytes=100-")
            return _Response(206, whole[100:]) if does_ranges else _Response(200, whole)

    assert list(package_index._Pip(Finder(), Session()).read(source, part)) == [len(whole)]
    assert part.read_bytes() == whole
    assert list(package_index._Pip(Finder(), Session()).read(source, part)) == []


def test_without_pip_the_error_says_what_to_do(tmp_path, monkeypatch):
    source = make_sdist(tmp_path, "mxsimfake", [("a.md", doc("a"))])
    monkeypatch.setitem(sys.modules, "pip._internal.commands", None)
    with pytest.raises(CorpusError, match=r"pip cannot be called here .*; put the archives that corpus_sources\.toml"):
        package_index.fetch([source], tmp_path / "cache")


# ------------------------------------------------------------------------------------------------------------- command
def run(*args: str | Path, status: int = 0) -> tuple[str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["corpus", *map(str, args)])
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("name, unpack", [("out.txt", bytes), ("out.txt.xz", lzma.decompress)])
def test_build_writes_the_pinned_text_and_nothing_if_it_is_another(tmp_path, monkeypatch, name, unpack):
    source = make_sdist(tmp_path, "pkg", [(f"{i}.md", doc(f"document {i}") * 800) for i in range(9)])
    text = compose([(source, tmp_path / source.file)])
    assert len(text) > 2**21  # more than one block
    monkeypatch.setattr(command, "read_pins", lambda: Pins(len(text), sha256(text), (source,)))
    out = tmp_path / "out" / name
    out.parent.mkdir()
    stdout, stderr = run("build", "--out", out, "--cache", tmp_path)
    assert unpack(out.read_bytes()) == text
    assert f"{len(text):,} bytes of text of 1 packages" in stdout
    assert stderr == ""
    assert json.loads(run("info", out, "--json")[0])["known_as"] == "mxsim corpus build"

    out.unlink()
    monkeypatch.setattr(command, "read_pins", lambda: Pins(len(text), "0" * 64, (source,)))
    stdout, stderr = run("build", "--out", out, "--cache", tmp_path, status=1)
    assert (stdout, stderr.count("\n")) == ("", 1)
    assert "pinned is 000" in stderr
    assert list(out.parent.iterdir()) == []


def test_build_into_a_place_that_cannot_be_written_is_bad_input(tmp_path):
    assert "No such file" in run("build", "--out", tmp_path / "no" / "out.txt", "--cache", tmp_path, status=2)[1]


def test_info_prints_the_split_and_the_hash():
    lines = run("info")[0].splitlines()
    assert lines[0] == "austen, Jane Austen's novels"
    assert lines[3].split()[:3] == ["validation", "131,072", "bytes,"]
    facts = json.loads(run("info", "--json")[0])
    assert lines[4].split() == ["SHA-256", facts["sha256"]]
    assert facts["num_bytes"] == facts["train_bytes"] + facts["validation_bytes"] == 4_024_601
