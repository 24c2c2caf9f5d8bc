"""GPUs of a cluster that join, or do not: what their actors say, and a cluster that goes away."""

# ruff: noqa: ANN401 (Ray has no types here)

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import HERE, KIND, Fake, Run, run
from sweeps import GPU

from warploom.errors import CompilationError, DeviceError, KernelMissingError, WarploomError
from warploom.generator import store as stores
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.records import Records
from warploom.generator.specification import KernelSpec
from warploom.tuning.fleet import actor, gpus
from warploom.tuning.fleet.actor import Hello, Measurer, Sent
from warploom.tuning.fleet.cluster import Cluster
from warploom.tuning.fleet.gpus import Joining
from warploom.tuning.fleet.members import Fleet
from warploom.tuning.journal import Journal
from warploom.tuning.problems import Problem
from warploom.tuning.tuner import Tuner

HELLO = Hello("10.0.0.1/0", "node1", KIND, actor.code(), actor.python())


class Timeout(Exception):
    """No answer yet."""


class Ray:
    """A cluster whose actors begin with what they are told to, one after the other."""

    def __init__(self, hellos: Sequence[object], count: int) -> None:
        self._hellos, self._count = [*hellos], count
        self.started: list[Any] = []
        self.killed: list[Any] = []
        self.gone = False
        self.exceptions = SimpleNamespace(
            GetTimeoutError=Timeout, RayTaskError=KeyError, RayError=OverflowError
        )

    def nodes(self) -> list[dict[str, Any]]:
        if self.gone:
            raise ConnectionError("the GCS is unreachable")
        resources = {"GPU": float(self._count), "CPU": 1.0}
        return [{"NodeID": "node1", "Alive": True, "Resources": resources}]

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.nodes()[0]["Resources"])

    def remote(self, _: object) -> Any:
        def start(_: object) -> Any:
            said = self._hellos.pop(0) if self._hellos else None
            one = SimpleNamespace(
                hello=SimpleNamespace(remote=lambda: SimpleAnswer(said)),
                close=SimpleNamespace(remote=lambda: SimpleAnswer(None)),
            )
            self.started.append(one)
            return one

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(self, refs: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        self.nodes()
        return refs, []

    def get(self, ref: Any, timeout: float) -> object:
        if isinstance(ref.said, Exception):
            raise ref.said
        return ref.said

    def kill(self, one: Any) -> None:
        self.nodes()
        self.killed.append(one)


class SimpleAnswer:
    """What a call will return."""

    def __init__(self, said: object) -> None:
        self.said = said


@pytest.fixture(autouse=True)
def nobody_waits_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOKING", 0.0)


def joining(ray: Ray, said: list[str]) -> Joining:
    return Joining(Cluster(ray, "10.0.0.1:6379"), say=said.append)


@pytest.mark.parametrize(
    "greeting",
    [
        None,
        3,
        "hello",
        replace(HELLO, about=None),  # type: ignore[arg-type]
        replace(HELLO, name=None),  # type: ignore[arg-type]
        ConnectionError("reset by peer"),
        OverflowError("the actor died"),
    ],
)
def test_an_actor_that_begins_with_anything_else_is_not_used_and_the_next_one_is(
    greeting: object,
) -> None:
    """It ended the run by an AttributeError."""
    said: list[str] = []
    opened = joining(Ray([greeting, HELLO], 1), said)
    assert opened() == {}
    assert opened() == {}
    assert list(opened()) == [HELLO.name]
    assert [one.startswith("an actor did not start: ") for one in said] == [True]
    opened.close()


def test_of_two_gpus_of_one_name_the_second_waits_and_is_started_once() -> None:
    """It was closed and started again every second, as long as the run lasted."""
    said: list[str] = []
    ray = Ray([HELLO, HELLO], 2)
    opened = joining(ray, said)
    assert opened() == {}
    (first,) = opened().values()
    for _ in range(5):
        assert opened() == {}
    assert len(ray.started) == 2 and ray.killed == []
    assert said == [f"two GPUs are called {HELLO.name}: one is used if the other is lost"]
    first.close()
    (second,) = opened().values()
    assert second is not first
    opened.close()


def test_a_cluster_whose_head_is_gone_is_named_and_closing_is_quiet() -> None:
    """What Ray's connection raises is of no class of its own, and was a traceback."""
    ray = Ray([HELLO], 1)
    opened = joining(ray, [])
    opened()
    ray.gone = True
    told = r"Ray cluster at 10\.0\.0\.1:6379: ConnectionError: .*unreachable.*same command goes on"
    for asked in (opened, opened.first, lambda: opened.cluster.compile("", "", "sm_90a")):
        with pytest.raises(DeviceError, match=told):
            asked()
    opened.close()


# ---- What says nothing of a kernel ---------------------------------------------------------------


class Broken:
    """A compiler with which nothing is built, for a reason that is not the kernels'."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, spec: KernelSpec) -> Future[Any]:
        found: Future[Any] = Future()
        if isinstance(self._error, CompilationError):
            found.set_result(self._error)
        else:
            found.set_exception(self._error)
        return found


@pytest.mark.parametrize(
    "error",
    [
        KernelMissingError("kernels", rule="no NVRTC here"),
        DeviceError("the Ray cluster"),
        CompilationError("kernel", log="error: the node died", source="", lost=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_no_compiler_was_there_for_is_tried_by_the_next_run(
    error: WarploomError, listed: list[Problem], tmp_path: Path
) -> None:
    """Each kernel stood in the journal as a compile error, and was never compiled again."""
    journal = Journal(tmp_path / "journal.jsonl")
    tuner = Tuner(
        *(listed[:1], Fleet(KIND, {"0": Fake(listed)}), Broken(error), journal),
        *(Records(GPU), HERE),
        budget=1e6,
        save=lambda record: pytest.fail("nothing was measured"),
    )
    (ended,) = tuner.run()
    journal.close()
    assert ended.status == "failed" and str(error) in ended.reason
    assert journal.entries == []
    found: Run = run(listed[:1], tmp_path, {"0": Fake(listed)})
    assert [one.status for one in found.ended] == ["tuned"]


def test_a_node_whose_disk_is_full_fails_and_its_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store kept them in memory, where what measures does not look: a compile error of each."""
    for name in ("WARPLOOM_CACHE_DIR", "WARPLOOM_CACHE_PATH", "WARPLOOM_COMPILE"):
        monkeypatch.setenv(name, "")  # which the actor sets
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    gpu: Any = SimpleNamespace(close=lambda: None)
    measurer = Measurer(lambda: gpu)
    used = {"kernel": Resources(168, 0, 0)}
    artifact = Artifact("kernel", "sm_90a", b"\x7fELF", "1" * 64, "2" * 64, (), used, (), 1.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    measurer.hold(Sent.of(artifact))
    monkeypatch.setattr(stores, "_write", full)
    with pytest.raises(DeviceError, match=r"No space left on device.*TMPDIR"):
        measurer.hold(Sent.of(artifact))
    measurer.close()
