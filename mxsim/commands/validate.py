"""`mxsim validate`: the kernels, anybody's candidate or a peer library against the simulator."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mxsim.commands.bad_input import BadInput
from mxsim.commands.progress import progress_bar

MISMATCH_STATUS = 1


@dataclass(frozen=True)
class Request:
    """What to validate, and how much."""

    ops: Sequence[str] = ()  # none: all
    device: str | None = None  # None: CUDA where there is a device
    candidate: str | None = None  # "package.module:function"
    peer: str | None = None
    cases: str | None = None
    is_quick: bool = False


def validate(request: Request, *, as_json: bool, console: Console, progress_console: Console) -> int:
    """Run, print the report, and return the exit status: 1 for a mismatch of anything but a peer.

    Raises:
        BadInput: if something in the request cannot be used.
    """
    try:
        from mxsim.validate import run, run_peer
        from mxsim.validate.report import differences
        from mxsim.validate.runner import default_device
    except ImportError as error:
        raise BadInput(f"validate needs torch ({error}); install mxsim[train] or torch") from error

    if request.candidate is not None and request.peer is not None:
        raise BadInput("--candidate and --peer exclude each other")
    if request.candidate is not None and len(set(request.ops)) != 1:
        raise BadInput("--candidate is one function and needs one --op NAME")
    function = None if request.candidate is None else _candidate(request.candidate)
    ops = list(dict.fromkeys(request.ops)) or "all"
    device = request.device or default_device()
    size = "quick" if request.is_quick else "full"
    with progress_bar(progress_console) as update:
        progress = update and (lambda case, done, to_do: update(done, to_do, f"{case.op}: {case.name}"))
        try:
            if request.peer is not None:
                report = run_peer(request.peer, ops, device, size, cases=request.cases, progress=progress)
            else:
                report = run(ops, device, function, size, cases=request.cases, progress=progress)
        except ValueError as error:
            raise BadInput(str(error)) from error
    if as_json:
        console.file.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        console.print(report if request.peer is None else differences(report), soft_wrap=True)
    return 0 if report.ok or request.peer is not None else MISMATCH_STATUS


def _candidate(path: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, the working directory being importable."""
    module_name, separator, function_name = path.partition(":")
    if not (separator and module_name and function_name):
        raise BadInput(f"--candidate is {path!r}, needed package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except AttributeError as error:
        raise BadInput(f"--candidate {path}: {error}") from error
    except Exception as error:  # whatever the module does when it is imported
        raise BadInput(f"--candidate {path}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise BadInput(f"--candidate {path} is a {type(function).__name__}, needed a function")
    return function  # type: ignore[no-any-return]
