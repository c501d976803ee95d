"""Compiling the kernels on first use: the only caller of the C++ compiler and of NVRTC, and the cache of their output.

An artefact's file is named for what it was made from and for what it holds:

    <stem>-<hash of sources, flags, compiler and machine>-<SHA-256 of the file><suffix>

so that a truncated or foreign file is recognised, removed and made again. A file appears whole, by a rename; processes
that want the same one wait for each other, and whatever a killed process left behind goes when the next one builds.

Folder: $MXSIM_CACHE_DIR, else $XDG_CACHE_HOME/mxsim or ~/.cache/mxsim; where that cannot be written, mxsim-<user> in
the temporary folder, if it belongs to this user alone; else one for this process.
"""

import atexit
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

FOLDER = Path(__file__).parent
_KEY_DIGITS = 20
_HOST_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-DNDEBUG")  # no fast-math: see NUMERICS 2.6
_COMPILERS = ("g++", "c++", "clang++")


class BuildError(RuntimeError):
    """A compiler is missing, or did not compile."""


# ------------------------------------------------------------------------------------------------------------- the host
def compile_host() -> Path:
    """Path of the shared library made from src/host_api.cpp for this machine.

    Raises:
        BuildError: if there is no C++ compiler ($CXX, else g++, c++ or clang++), or it does not compile.
        OSError: if no folder can be written.
    """
    compiler = _host_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or " or ".join(_COMPILERS)
        raise BuildError(f"mxsim.kernels: no C++ compiler found (looked for {wanted}); install g++")
    command, version = compiler
    sources = [*sorted((FOLDER / "include/mxsim").glob("*.h")), *sorted((FOLDER / "src/host").glob("*.hpp"))]
    main = FOLDER / "src/host_api.cpp"
    parts = [version.encode(), _machine().encode(), *_contents([*sources, main])]
    error: BuildError | None = None
    for flags in ((*_HOST_FLAGS, "-march=native"), _HOST_FLAGS):  # some compilers know no native target
        arguments = [*flags, f"-I{FOLDER / 'include'}", f"-I{FOLDER / 'src'}", str(main)]

        def make(target: Path, arguments: list[str] = arguments) -> None:
            _run([*command, *arguments, "-o", str(target)])

        try:
            return cached("host", ".so", [" ".join(flags).encode(), *parts], make)
        except BuildError as failure:
            error = error or failure
    assert error is not None
    raise error


@lru_cache(maxsize=1)
def _host_compiler() -> tuple[list[str], str] | None:
    """(command, version), or None."""
    chosen = os.environ.get("CXX")
    for command in [shlex.split(chosen)] if chosen else [[name] for name in _COMPILERS]:
        if command and shutil.which(command[0]):
            with contextlib.suppress(BuildError):
                return command, _run([*command, "--version"])
    return None


@lru_cache(maxsize=1)
def _machine() -> str:
    """What -march=native depends on."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    return "\n".join([platform.machine(), platform.processor(), *(f"{k}: {v}" for k, v in sorted(found.items()))])


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    except OSError as error:
        raise BuildError(f"mxsim.kernels: {command[0]} does not run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(f"mxsim.kernels: {command[0]} failed with exit status {done.returncode}:\n{said}")
    return done.stdout


def _contents(files: Sequence[Path]) -> list[bytes]:
    return [part for file in files for part in (file.name.encode(), file.read_bytes())]


# ----------------------------------------------------------------------------------------------------------- the device
def compile_cuda(source: str, arch: str) -> bytes:
    """cubin of src/<source>.cu for an architecture such as sm_90a, by NVRTC.

    Raises:
        BuildError: if NVRTC or its bindings are missing, or it does not compile.
        OSError: if no folder can be written.
    """
    file = FOLDER / f"src/{source}.cu"
    headers = [path for suffix in ("h", "cuh") for path in sorted((FOLDER / "include/mxsim").glob(f"*.{suffix}"))]
    parts = [_nvrtc_version().encode(), arch.encode(), *_contents([*headers, file])]
    return cached(f"{source}-{arch}", ".cubin", parts, lambda target: _run_nvrtc(file, arch, target)).read_bytes()


@lru_cache(maxsize=1)
def _nvrtc_version() -> str:
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # the bindings raise RuntimeError where the library is not found
        raise BuildError(
            "mxsim.kernels: CUDA kernels need NVRTC and cuda-core, which are not installed: "
            f"pip install 'mxsim[cuda]' ({error})"
        ) from error
    return f"{major}.{minor}"


def _run_nvrtc(file: Path, arch: str, target: Path) -> None:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", include_path=[str(FOLDER / "include")], name=file.name)
    try:
        cubin = Program(file.read_text(), "c++", options).compile("cubin")
    except Exception as error:  # whatever the binding's own exception is
        raise BuildError(
            f"mxsim.kernels: NVRTC does not compile {file.name} for {arch}: {str(error)[-2000:]}"
        ) from error
    target.write_bytes(cubin.code)


# ------------------------------------------------------------------------------------------------------------ the cache
def cached(stem: str, suffix: str, parts: Sequence[bytes], make: Callable[[Path], None]) -> Path:
    """File that make(path) wrote for exactly these parts: found where it was made before, else made now.

    Raises:
        OSError: if no folder can be written; and what make raises.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    name = f"{stem}-{digest.hexdigest()[:_KEY_DIGITS]}"
    failures = []
    for folder in _folders():
        try:
            found = _find(folder, name, suffix)
            return found if found is not None else _build(folder, stem, name, suffix, make)
        except OSError as error:
            failures.append(f"{folder}: {error}")
    raise OSError(f"mxsim.kernels: no folder for compiled kernels can be written ({'; '.join(failures)})")


def _find(folder: Path, name: str, suffix: str) -> Path | None:
    """The whole artefact of that name; what is damaged is removed."""
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if path.name == f"{name}-{hashlib.sha256(content).hexdigest()}{suffix}":
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _build(folder: Path, stem: str, name: str, suffix: str, make: Callable[[Path], None]) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(folder / f".{stem}.lock") as is_locked:
        found = _find(folder, name, suffix)  # another process may have been first
        if found is not None:
            return found
        if is_locked:
            for leftover in folder.glob(f".{stem}-*.tmp"):  # of a process that was killed: it held the lock
                leftover.unlink(missing_ok=True)
        handle, temporary_name = tempfile.mkstemp(dir=folder, prefix=f".{stem}-", suffix=".tmp")
        os.close(handle)
        temporary = Path(temporary_name)
        try:
            make(temporary)
            target = folder / f"{name}-{hashlib.sha256(temporary.read_bytes()).hexdigest()}{suffix}"
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the file's lock; False where the file system has none, and two processes may then do the same work."""
    with path.open("ab") as file:
        is_locked = False
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                is_locked = True
        yield is_locked  # closing the file unlocks it


def _folders() -> Iterator[Path]:
    """Where artefacts may lie, in order."""
    chosen, cache_home = os.environ.get("MXSIM_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        yield Path(chosen)
    else:
        with contextlib.suppress(RuntimeError):  # no home
            yield Path(cache_home) / "mxsim" if cache_home else Path.home() / ".cache" / "mxsim"
    shared = Path(tempfile.gettempdir()) / f"mxsim-{_user()}"
    if _is_private(shared):
        yield shared
    yield _process_folder()


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _is_private(folder: Path) -> bool:
    """Whether the folder, made if need be, belongs to this user and nobody else can put a file there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_own = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and status.st_mode & 0o022 == 0)
    return is_own and folder.is_dir() and not folder.is_symlink()


@lru_cache(maxsize=1)
def _process_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="mxsim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
