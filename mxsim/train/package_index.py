"""Archives from the user's package index, fetched by pip and only fetched.

`pip download` would run an archive's build to learn its metadata. Here pip's own finder and session do only the first
half of its work: they find the file by name, in the indexes and with the certificates, proxies and credentials that pip
is configured with, and read it. Nothing of an archive runs.

NOTE: that part of pip has no public interface. Where a release of pip differs, the error says which files to put where.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import PARTIAL_CONTENT
from pathlib import Path
from typing import Any

from mxsim.train.corpus import CorpusError
from mxsim.train.corpus_build import PINS, Source, Update, check

BLOCK_BYTES = 1 << 20


def fetch(sources: Sequence[Source], folder: Path, update: Update | None = None) -> dict[str, Path]:
    """The path of every source's archive by its file name, in the folder; those that lie there are not fetched again.

    An archive that was cut off is fetched on from where it broke off (<file>.part), if the index can.

    The update gets bytes.

    Raises:
        CorpusError: if an archive cannot be had or is not the pinned one.
    """
    archives = {source.file: folder / source.file for source in sources}
    missing = [source for source in sources if not archives[source.file].exists()]
    if not missing:
        return archives
    done, to_do = 0, sum(source.size_bytes for source in missing)
    with _silent_pip(folder) as pip:
        for source in missing:
            part = folder / f"{source.file}.part"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for size_bytes in pip.read(source, part):
                    if update is not None:
                        update(done + size_bytes, to_do, source.file)
                _keep(source, part, archives[source.file])
            except OSError as error:  # the disk's, and those of pip's session
                raise CorpusError(f"cannot fetch {source.file} into {folder}: {error.strerror or error}") from error
            done += source.size_bytes
    return archives


def _keep(source: Source, part: Path, archive: Path) -> None:
    """Move a whole archive to its place; delete one of wrong bytes, to which nothing can be added.

    Raises:
        CorpusError: if the archive is not whole or not the pinned one.
    """
    size_bytes = part.stat().st_size
    if size_bytes < source.size_bytes:
        raise CorpusError(f"{source.file} broke off at {size_bytes} of {source.size_bytes} bytes; run again to go on")
    try:
        check(source, part)
    except CorpusError:
        part.unlink()
        raise
    part.replace(archive)


@dataclass(frozen=True)
class _Pip:
    """pip's finder and session."""

    finder: Any
    session: Any

    def read(self, source: Source, part: Path) -> Iterator[int]:
        """Add to the file what it lacks of the archive; yields its size so far."""
        start = part.stat().st_size if part.exists() else 0
        if start >= source.size_bytes:
            return
        candidates = self.finder.find_all_candidates(source.name)
        url = next((candidate.link.url for candidate in candidates if candidate.link.filename == source.file), None)
        if url is None:
            raise CorpusError(f"pip finds no {source.file}: its index is out of reach or does not have the file")
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with self.session.get(url.partition("#")[0], headers=headers, stream=True) as response:
            response.raise_for_status()
            with part.open("ab" if response.status_code == PARTIAL_CONTENT else "wb") as file:
                for block in response.iter_content(BLOCK_BYTES):
                    file.write(block)
                    yield file.tell()


@contextlib.contextmanager
def _silent_pip(folder: Path) -> Iterator[_Pip]:
    """pip as it is configured here, without its messages.

    Raises:
        CorpusError: if there is none, or one that cannot be called so; says what to put into the folder instead.
    """
    logger = logging.getLogger("pip")
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, logger, logger.handlers, logger.propagate)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
        try:
            from pip._internal.commands import create_command

            command: Any = create_command("download")
            options, _ = command.parse_args(["--no-deps", "--no-binary=:all:", "--no-cache-dir", "--retries=1"])
            stack.enter_context(command.main_context())
            session = command.get_default_session(options)
            finder = command._build_package_finder(options, session, ignore_requires_python=True)
        except (ImportError, AttributeError, TypeError) as error:
            raise CorpusError(
                f"pip cannot be called here ({error}); put the archives that {PINS.name} lists into {folder} by hand"
            ) from error
        yield _Pip(finder, session)


def _restore(logger: logging.Logger, handlers: list[logging.Handler], propagate: bool) -> None:
    logger.handlers, logger.propagate = handlers, propagate
