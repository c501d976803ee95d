"""Output files that appear together when all is done, or not at all."""

import os
import shutil
import threading
from pathlib import Path
from types import TracebackType

from mxsim.commands.bad_input import BadInput


class OutputFiles:
    """Written beside their places under temporary names, and moved there when the block ends without an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with OutputFiles() as outputs:
    ...         _ = outputs.reserve(Path(folder) / "a.txt").write_text("done")
    ...     os.listdir(folder)
    ['a.txt']
    """

    def __init__(self) -> None:
        self._temporary: dict[Path, Path] = {}  # final place -> temporary file
        self._made_folders: list[Path] = []

    def reserve(self, target: Path) -> Path:
        """The temporary file to write for a target; made at once, so that a bad place is known before long work.

        Raises:
            BadInput: if the target cannot be written.
        """
        if target.is_dir():
            raise BadInput(f"cannot write {target}: it is a directory")
        if target.exists() and not target.is_file():
            raise BadInput(f"cannot write {target}: it is not a regular file")
        if target.exists() and not os.access(target, os.W_OK):
            raise BadInput(f"cannot write {target}: Permission denied")
        target = Path(os.path.realpath(target))  # a link stays, what it points to is written
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.touch()
            if target.exists():
                shutil.copymode(target, temporary)
        except OSError as error:
            raise BadInput(f"cannot write {target}: {error.strerror}") from error
        self._temporary[target] = temporary
        return temporary

    def folder(self, path: Path) -> Path:
        """The folder, made if it is missing (its parent must exist) and removed again if the block fails.

        Raises:
            BadInput: if it is no folder and cannot become one.
        """
        if path.exists() and not path.is_dir():
            raise BadInput(f"cannot write into {path}: it is not a directory")
        if not path.exists():
            try:
                path.mkdir()
            except OSError as error:
                raise BadInput(f"cannot make the directory {path}: {error.strerror}") from error
            self._made_folders.append(path)
        return path

    def __enter__(self) -> "OutputFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for target, temporary in self._temporary.items():
                    temporary.replace(target)
        except OSError as failure:
            error = failure
        finally:
            for temporary in self._temporary.values():
                temporary.unlink(missing_ok=True)
            if error is not None:
                for folder in self._made_folders:
                    folder.rmdir()
        if isinstance(error, OSError):  # a full disk
            raise BadInput(f"cannot write {', '.join(map(str, self._temporary))}: {error.strerror}") from error
