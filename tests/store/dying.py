"""Writes of a store that end, or fail, at one of their system calls; and a process to die in."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from warploom.generator.artifact import Artifact
from warploom.generator.store import Store

Fault = Callable[[str, int, Callable[[], object], tuple[Any, ...]], object]

STEPS = ("mkdir", "open", "write", "fsync", "close", "replace", "utime")
REAL_WRITE = os.write


def intercept(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Route every system call of a write through `fault(name, number, call, arguments)`."""
    numbers = itertools.count()

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object, **options: object) -> object:
            return fault(name, next(numbers), lambda: original(*arguments, **options), arguments)

        return call

    for name in STEPS:
        patch.setattr(os, name, wrap(name, getattr(os, name)))


def write_half(arguments: tuple[Any, ...]) -> None:
    descriptor, data = arguments
    REAL_WRITE(descriptor, data[: len(data) // 2])


def put_killed_at(step: int, root: Path, artifact: Artifact, key: str, torn: bool) -> None:
    """Put into `root`, but die just before system call number `step`.

    A `torn` write dies with half of its bytes in the file.
    """

    def fault(
        name: str, number: int, call: Callable[[], object], arguments: tuple[Any, ...]
    ) -> object:
        if number < step:
            return call()
        if torn and name == "write":
            write_half(arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with pytest.MonkeyPatch.context() as patch:
        intercept(patch, fault)
        Store(root).put(key, artifact)


def code_of_process(function: Callable[..., None], *arguments: object) -> int | None:
    """The exit code of a process that runs a function of a module and has loaded little else.

    To fork the process of the tests, which has all of them loaded, takes a tenth of a second.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "warploom.generator.store"])
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode
