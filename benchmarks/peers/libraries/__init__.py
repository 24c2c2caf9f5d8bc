"""The libraries that Warploom is measured beside: a module for each, with all that it computes.

A library that is not installed, or that has no kernel for a problem, raises RuntimeError or
ValueError when it is called: its contender is then absent, with these words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refusing(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, whose ways to refuse are RuntimeErrors with its name."""

    @wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **keywords)
        except (ImportError, TypeError, AssertionError, NotImplementedError) as error:
            raise RuntimeError(f"{name}: {error}") from error

    return call


def imported(library: str, module: str) -> Any:  # noqa: ANN401 (no dependency)
    """A library's module; whatever fails in its own way at import is a RuntimeError."""
    try:
        return import_module(module)
    except Exception as error:
        raise RuntimeError(f"{library}: {type(error).__name__}: {error}") from error


def shared_library(name: str) -> str:
    """The path of a shared library in a folder of sys.path."""
    for folder in map(Path, sys.path):
        if (folder / name).is_file():
            return str(folder / name)
    raise RuntimeError(f"{name} is in no folder of sys.path")
