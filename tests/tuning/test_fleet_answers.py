"""What a node of a cluster answers is stored only where it is what was asked for."""

# ruff: noqa: ANN401 (Ray has no types here)

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from warploom.errors import CompilationError, DeviceError, ToolchainError
from warploom.generator import build
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.configurations import smoke
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.store import Store, source_digest
from warploom.generator.workers import WorkerPool
from warploom.tuning.fleet import actor
from warploom.tuning.fleet import cluster as clusters
from warploom.tuning.fleet.actor import Sent
from warploom.tuning.fleet.cluster import Cluster

SPECS = expand_file(next(path for path in smoke() if path.parent.name == "gemm")).specs
SPEC = SPECS[0]
OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17")
TOOLCHAIN: Any = SimpleNamespace(identity="5" * 64, options=lambda arch: OPTIONS)

Answer = Callable[[str, str, str, str], object]


class NoRay:
    """Runs a task at once, in this process."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "one", "Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, _: object) -> Any:
        def options(**_: object) -> Any:
            return SimpleNamespace(remote=self._answer)

        return SimpleNamespace(options=options)


def honest(source: str, name: str, arch: str, toolchain: str) -> Artifact:
    found = {entry: Resources(168, 0, 0) for entry in build.entries(source)}
    digest = source_digest(source)
    return Artifact(name, arch, b"\x7fELF cubin", digest, toolchain, OPTIONS, found, (), 0.5)


@pytest.fixture(autouse=True)
def toolchain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that is made up, which this machine has."""
    monkeypatch.delenv("WARPLOOM_COMPILE", raising=False)
    for module in (clusters, build):
        monkeypatch.setattr(module, "find", lambda: TOOLCHAIN)
    return


def compiled(answer: Answer, store: Store, count: int = 1) -> list[object]:
    """What becomes of the first specs of a configuration on a cluster that answers so."""
    opened = Cluster(NoRay(answer), "auto")
    opened.answer = lambda ref, stopped=None: ref  # type: ignore[method-assign,assignment,misc]
    return list(build.build_many(SPECS[:count], store, 1, worker=opened.compiler))


def tampered(change: Callable[[Artifact], Artifact]) -> Answer:
    return lambda *asked: Sent.of(change(honest(*asked)))


FIELDS: dict[str, Callable[[Artifact], Artifact]] = {
    "name of another kernel": lambda one: replace(one, name=SPECS[1].name),
    "arch": lambda one: replace(one, arch="sm_100a"),
    "source": lambda one: replace(one, source_digest=source_digest("other")),
    "toolchain": lambda one: replace(one, toolchain="6" * 64),
    "options, one more": lambda one: replace(one, options=(*OPTIONS, "--use_fast_math")),
    "options, one less": lambda one: replace(one, options=OPTIONS[:1]),
    "options in another order": lambda one: replace(one, options=OPTIONS[::-1]),
    "entries, one more": lambda one: replace(
        one, resources={**one.resources, "other": Resources(1, 0, 0)}
    ),
    "entries of other names": lambda one: replace(one, resources={"other": Resources(1, 0, 0)}),
}


def test_an_answer_that_is_what_was_asked_for_is_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (found,) = compiled(tampered(lambda one: one), store)
    assert isinstance(found, Artifact)
    assert [name for name, _ in store.listed()] == [SPEC.name]


@pytest.mark.parametrize("field", FIELDS)
def test_an_answer_that_differs_in_one_field_is_a_failed_build(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was stored under the key of whatever it said of itself, and found there later."""
    store = Store(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "warploom"):
        found = compiled(tampered(FIELDS[field]), store, 3 if "name" not in field else 1)
    what = field.replace(",", "").split()[0]
    for spec, one in zip(SPECS, found, strict=False):
        assert isinstance(one, CompilationError)
        assert spec.name in str(one) and f"{what} " in one.log
        assert "another kernel than was asked for" in one.log
    assert store.listed() == []
    assert len(caplog.records) == 1, "said once"


@pytest.mark.parametrize(
    "broken",
    [
        lambda sent: replace(sent, key="0" * 64),
        lambda sent: replace(
            sent, record=sent.record.replace(b'"registers":168', b'"registers":16')
        ),
        lambda sent: replace(sent, record=b""),
        lambda sent: replace(sent, record=None),
        lambda sent: replace(sent, packed=sent.packed[:-1] + bytes([sent.packed[-1] ^ 1])),
        lambda sent: replace(sent, packed=b""),
        lambda sent: replace(sent, packed=None),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failed_build(
    broken: Callable[[Sent], Sent], tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    (found,) = compiled(lambda *asked: broken(Sent.of(honest(*asked))), store)
    assert isinstance(found, CompilationError) and store.listed() == []


def test_a_node_that_is_lost_says_nothing_of_the_kernel(tmp_path: Path) -> None:
    """What it was compiling was a failed kernel in the journal, which no later run tried again."""

    def lost(*_: str) -> object:
        raise DeviceError("the node died")

    (found,) = compiled(lost, Store(tmp_path / "store"))
    assert isinstance(found, CompilationError) and found.lost
    (found,) = compiled(lambda *_: "error: no such type", Store(tmp_path / "store"))
    assert isinstance(found, CompilationError) and not found.lost


def test_a_compiler_that_was_killed_on_a_node_says_nothing_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: object, **named: str) -> object:
        raise CompilationError(named["name"], log="error: SIGKILL", source="", lost=True)

    monkeypatch.setattr(actor, "find", lambda: TOOLCHAIN)
    monkeypatch.setattr(actor, "_workers", [SimpleNamespace(compile=killed)])
    with pytest.raises(DeviceError, match="SIGKILL"):
        actor.compiled("source", "kernel", "sm_90a", TOOLCHAIN.identity)


def test_nobody_waits_for_a_busy_cluster_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waited until other jobs of the cluster had left a core, whatever time that took."""

    class Late(Exception):
        """No answer yet."""

    asked = Event()

    def get(*_: object, **__: object) -> object:
        asked.set()
        raise Late

    busy: Any = NoRay(lambda *_: None)
    busy.get = get
    busy.exceptions = SimpleNamespace(GetTimeoutError=Late, RayTaskError=KeyError, RayError=OSError)
    with WorkerPool(2, worker=Cluster(busy, "auto").compiler) as pool:
        found = pool.submit(lambda one: one.compile("source", name="kernel", arch="sm_90a"))
        assert asked.wait(60)
    error = found.exception()
    assert isinstance(error, CompilationError) and error.lost


def test_a_cluster_without_cores_compiles_nothing_and_says_so() -> None:
    """A task that no node can run was waited for, without a word and without an end."""
    ray = NoRay(lambda *_: pytest.fail("nothing is asked"))
    ray.nodes = lambda: [{"NodeID": "one", "Alive": True, "Resources": {"GPU": 8.0}}]  # type: ignore[method-assign]
    with pytest.raises(ToolchainError, match=r"none has a core for tasks.*--num-cpus"):
        Cluster(ray, "auto").compile("source", "name", "sm_90a")


def test_the_source_of_every_kernel_names_its_entries() -> None:
    """Answers are held against them."""
    assert all(build.entries(render(spec)) for spec in SPECS[:4])
