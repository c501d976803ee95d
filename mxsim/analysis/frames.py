"""Tables: pandas is imported when one is asked for, so that everything else works without it."""

import importlib
from typing import Any


def frame(data: Any) -> Any:
    """pandas.DataFrame of columns (a mapping) or records (a list of mappings).

    Raises:
        ModuleNotFoundError: if pandas is not installed; the message names the extra that brings it.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the tables need pandas: pip install 'mxsim[figures]'") from error
    return pandas.DataFrame(data)
