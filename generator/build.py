"""Spec -> artifact: from the store where it is there, else compiled and stored.

`WARPLOOM_COMPILE` (or `policy`) is `allow` or `forbid`. Where compiling is forbidden or there is
no toolchain, a kernel that any toolchain made of the same source serves; without one there is a
KernelMissingError, never a stall. `counters` says what this process did, and so does the log, with
one record at level INFO for each kernel.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

from warploom.errors import CompilationError, KernelMissingError, ToolchainError
from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact
from warploom.generator.locks import fork_lock
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store, key, source_digest
from warploom.generator.store_directory import warn_once
from warploom.generator.toolchain import Toolchain, find
from warploom.generator.workers import Compiling, Worker, WorkerPool
from warploom.variables import choice

_ENTRY = re.compile(r"__global__ void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(")

_COPIED = 4  # names of missing kernels that an error repeats in a command to copy

logger = logging.getLogger(__name__)

Result = Artifact | CompilationError


@dataclass(slots=True)
class Counters:
    """What this process did: kernels compiled (by its workers too), kernels found stored."""

    compiles: int = 0
    store_hits: int = 0


counters = Counters()
_counting = fork_lock()


def build(spec: KernelSpec, store: Store | None = None, *, policy: str | None = None) -> Artifact:
    """Return the compiled kernel of `spec`, from `store` (default: the user's) if it is there.

    Raises CompilationError, or KernelMissingError where the kernel is neither stored nor may be
    compiled.
    """
    store = Store.default() if store is None else store
    found = _sought(spec, store, _compiler(policy))
    if isinstance(found, Artifact):
        return found
    return found.compiled(store, partial(nvrtc.compile, toolchain=found.toolchain))


def build_many(
    specs: Sequence[KernelSpec],
    store: Store | None = None,
    jobs: int | None = None,
    on_done: Callable[[KernelSpec, Result], None] = lambda spec, result: None,
    *,
    policy: str | None = None,
    worker: Callable[..., Compiling] = Worker,
) -> list[Result]:
    """Build all of `specs` with `jobs` worker processes (default: one a CPU); keep their order.

    A kernel that fails is its CompilationError in the list; the others are built all the same.
    `worker` makes what compiles in the place of a process.
    `on_done` is called in this thread as each ends. Raises KernelMissingError, which names all that
    are missing, where one is neither stored nor may be compiled.
    """
    store = Store.default() if store is None else store
    compiler = _compiler(policy)
    results: dict[int, Result] = {}
    missing: dict[int, _Kernel] = {}
    if isinstance(compiler, _Barred):
        compiler.require(specs, store)
    for index, spec in enumerate(specs):
        found = _sought(spec, store, compiler)
        if isinstance(found, Artifact):
            results[index] = found
            on_done(spec, found)
        else:
            missing[index] = found
    workers = max(1, min(jobs or len(os.sched_getaffinity(0)), len(missing)))
    with WorkerPool(workers, more=len(missing) > workers, worker=worker) as pool:
        futures = {
            pool.submit(partial(kernel.attempted, store)): index
            for index, kernel in missing.items()
        }
        for future in as_completed(futures):
            index = futures[future]
            results[index] = future.result()
            on_done(specs[index], results[index])
    return [results[index] for index in range(len(specs))]


def require(
    specs: Sequence[KernelSpec], store: Store | None = None, *, policy: str | None = None
) -> None:
    """Raise one KernelMissingError for all of `specs` that are not stored and may not be compiled.

    Nothing is compiled.
    """
    compiler = _compiler(policy)
    if isinstance(compiler, _Barred):
        compiler.require(specs, Store.default() if store is None else store)


class Builder:
    """Builds kernels in `jobs` worker processes as they are asked for; used as a context.

    None of the processes touches a GPU. What is asked for twice is built once.
    """

    def __init__(
        self,
        store: Store | None = None,
        jobs: int | None = None,
        worker: Callable[..., Compiling] = Worker,
    ) -> None:
        self._store = Store.default() if store is None else store
        self._compiler = _compiler(None)
        self._pool = WorkerPool(jobs or len(os.sched_getaffinity(0)), more=True, worker=worker)
        self._asked: dict[KernelSpec, Future[Result]] = {}

    def submit(self, spec: KernelSpec) -> Future[Result]:
        """Return the kernel to come, or the CompilationError it ends with."""
        if spec not in self._asked:
            self._asked[spec] = self._pool.submit(partial(self._build, spec))
        return self._asked[spec]

    def _build(self, spec: KernelSpec, worker: Compiling) -> Result:
        found = _sought(spec, self._store, self._compiler)
        return found if isinstance(found, Artifact) else found.attempted(self._store, worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.__exit__(*exception)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that may be compiled."""

    spec: KernelSpec
    source: str
    toolchain: Toolchain

    @property
    def key(self) -> str:
        options = self.toolchain.options(self.spec.arch)
        return key(self.source, options, self.spec.arch, self.toolchain.identity)

    def stored(self, store: Store) -> Artifact | None:
        return _found(store.get(self.key), self.spec, self.source)

    def compiled(self, store: Store, compile: Callable[..., Artifact]) -> Artifact:
        with store.lock(self.key):
            artifact = self.stored(store)  # another process may have been first meanwhile
            if artifact is None:
                logger.debug("compiling %s", self.spec.name)
                artifact = compile(self.source, name=self.spec.name, arch=self.spec.arch)
                _count("compiles")
                logger.info("compiled %s in %.1f s", artifact.name, artifact.compile_seconds)
                # Under what the artifact itself says: a worker finds its toolchain on its own.
                own = key(self.source, artifact.options, artifact.arch, artifact.toolchain)
                store.put(own, artifact)
        return artifact

    def attempted(self, store: Store, worker: Compiling) -> Result:
        try:
            return self.compiled(store, worker.compile)
        except CompilationError as error:
            return error


@dataclass(frozen=True, slots=True)
class _Barred:
    """Stands for a toolchain that is missing, or must not be used."""

    reason: str
    fix: str
    identity: str | None  # of the toolchain that must not be used

    def recorded(self, spec: KernelSpec, store: Store) -> Artifact:
        source = render(spec)
        found = store.find(source_digest(source), spec.arch, self.identity)
        artifact = _found(found, spec, source)
        if artifact is None:
            raise self._missing([spec.name])
        return artifact

    def require(self, specs: Sequence[KernelSpec], store: Store) -> None:
        """Raise KernelMissingError for those that the store lacks, all of them at once."""
        lacking = [
            spec.name
            for spec in dict.fromkeys(specs)
            if store.find(source_digest(render(spec)), spec.arch, self.identity) is None
        ]
        if lacking:
            raise self._missing(lacking)

    def _missing(self, names: Sequence[str]) -> KernelMissingError:
        one = len(names) == 1
        them, called = ("it", "kernel") if one else ("them", f"{len(names)} kernels")
        told = "is" if one else "are"
        command = "`warploom compile` with these names"
        if len(names) <= _COPIED:
            command = f"`warploom compile {' '.join(names)}`"
        return KernelMissingError(
            f"{called} {', '.join(names)}",
            rule=f"{told} not in the store, and cannot be compiled here: {self.reason}",
            fix=f"{self.fix}; or compile {them} elsewhere, by {command}, and bring {them} here "
            "with `warploom cache export` and `warploom cache import`",
            kernels=tuple(names),
        )


def _compiler(policy: str | None) -> Toolchain | _Barred:
    policy = choice("WARPLOOM_COMPILE", policy)
    try:
        toolchain = find()
    except ToolchainError as error:
        return _Barred(f"{error.value}: {error.rule}", error.fix, None)
    if policy == "forbid":
        return _Barred("WARPLOOM_COMPILE=forbid", "WARPLOOM_COMPILE=allow", toolchain.identity)
    return toolchain


def _sought(spec: KernelSpec, store: Store, compiler: Toolchain | _Barred) -> Artifact | _Kernel:
    """What the store has of a spec, or what to compile; KernelMissingError where nothing may be."""
    if isinstance(compiler, _Barred):
        return compiler.recorded(spec, store)
    kernel = _Kernel(spec, render(spec), compiler)
    return kernel.stored(store) or kernel


def entries(source: str) -> set[str]:
    """Return the names of the kernels in a source."""
    return set(_ENTRY.findall(source))


def _found(artifact: Artifact | None, spec: KernelSpec, source: str) -> Artifact | None:
    """Return what the store has under the key of `spec`, unless its record speaks of another."""
    if artifact is None:
        return None
    if artifact.name != spec.name or artifact.resources.keys() != entries(source):
        warn_once(f"what is stored of {spec.name} is of another kernel: it counts as missing")
        return None
    _count("store_hits")
    logger.info("found %s in the store", artifact.name)
    return artifact


def _count(what: Literal["compiles", "store_hits"]) -> None:
    with _counting:
        setattr(counters, what, getattr(counters, what) + 1)
