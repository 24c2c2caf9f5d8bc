"""The process that compiles: `python -m warploom.tuning.autotune.preparing JOBS`.

It serves a JSON line for each problem, at the lowest priority: finds the candidates, has them built
into the store by worker processes, and answers with those that can be measured. It loads neither
torch nor the driver, and ends with the last request.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock
from typing import Any

from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.build import Builder
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import restore_operation, restore_shape
from warploom.generator.restore import restore
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.workers import until_last
from warploom.tuning.autotune.candidates import candidates

PRIORITY = 19  # the least that a process can ask for
Say = Callable[[Mapping[str, Any]], None]


def main(jobs: int) -> None:
    """Answer requests until the last; what else is printed goes to standard error."""
    with suppress(OSError):
        os.nice(PRIORITY)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    writing = Lock()

    def say(message: Mapping[str, Any]) -> None:
        with writing, suppress(BrokenPipeError):
            replies.write(json.dumps(message) + "\n")
            replies.flush()

    with Builder(jobs=jobs) as builder:
        for line in until_last(requests):
            serve(json.loads(line), builder, say)


def serve(request: Mapping[str, Any], builder: Builder, say: Say) -> None:
    """Begin to build what a request asks for; `say` is told how many, and at the end which."""
    number = request["number"]
    try:
        specs = [parse_name(name) for name in request["kernels"]]
        if "operation" in request:
            operation = restore_operation(request["operation"])
            shape = restore_shape(operation.family, request["shape"])
            target = restore(DeviceLimits, request["target"])
            specs = candidates(operation, shape, target, specs)
        say({"number": number, "compiling": len(specs)})
        _Batch(number, specs, builder, say)
    except WarploomError as error:
        say({"number": number, "failed": str(error)})


class _Batch:
    """The kernels of a request, which answers when the last of them has ended."""

    def __init__(self, number: int, specs: list[KernelSpec], builder: Builder, say: Say) -> None:
        self._number, self._say = number, say
        self._builds = {spec: builder.submit(spec) for spec in specs}
        self._left = {*self._builds}
        self._lock = Lock()
        for spec, build in self._builds.items():
            build.add_done_callback(lambda _, spec=spec: self._done(spec))  # type: ignore[misc]

    def _done(self, spec: KernelSpec) -> None:
        with self._lock:
            self._left.discard(spec)
            if self._left:
                return
        built = [spec.name for spec, build in self._builds.items() if _measurable(build)]
        self._say({"number": self._number, "built": built})


def _measurable(build: Future[Any]) -> bool:
    """Whether a build is a kernel without spills, local memory or serialised wgmma."""
    try:
        built = build.result()
    except Exception:
        return False
    if not isinstance(built, Artifact) or built.serialised:
        return False
    return all(entry.clean for entry in built.resources.values())


if __name__ == "__main__":
    main(int(sys.argv[1]))
