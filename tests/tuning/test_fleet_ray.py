"""A Ray cluster of two cores and GPUs that play a sweep back: it is started once, for all of this.

Actors are killed, a node joins and goes, one GPU is slow and one lies; what is found is what one
process finds.
"""

# ruff: noqa: ANN401 (Ray has no types here)

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import commands
import forked
import pytest
from click.testing import CliRunner
from commands import lines, until
from fleets import KIND, Fake, Run, anchor_of, run
from roles import PACE, Cells, Role, doom
from sweeps import SHAPES, entries

from benchmarks import worker
from benchmarks.peers import gemm
from benchmarks.protocol import read
from warploom.cli import engines, main
from warploom.errors import CompilationError, DeviceError, ToolchainError
from warploom.generator import nvrtc, records_file
from warploom.generator.toolchain import find
from warploom.generator.workers import WorkerPool
from warploom.tuning import journal
from warploom.tuning.fleet import actor, gpus, members
from warploom.tuning.fleet import cluster as clusters
from warploom.tuning.fleet.cluster import Cluster, cluster
from warploom.tuning.fleet.gpus import Joining, RayGpu
from warploom.tuning.fleet.members import FAILURES
from warploom.tuning.gpu import Batch
from warploom.tuning.journal import Entry
from warploom.tuning.problems import Problem

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

KILLS = 3  # each starts a process: two seconds of a core
# A node that is gone is missed at once; one that is there has all the time that it needs.
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
PATIENT = {"health_check_timeout_ms": 600_000, "worker_register_timeout_seconds": 600}


@pytest.fixture(autouse=True)
def nobody_waits_to_look_and_actors_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOKING", 0.1)
    monkeypatch.setattr(Joining.first, "__defaults__", (600.0,))  # seconds for an actor to start,
    monkeypatch.setattr(members, "AWAITED", 600.0)  # and to start again


class SlowTime:
    """The time as Ray's nodes see it: it gives them 30 s to start, whatever the machine is at."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() / 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray._private.node, "time", SlowTime())
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # actors import fakes
        yield from _nodes()


def _nodes() -> Iterator[Any]:
    head = {"num_cpus": 2, "resources": {"fake_gpu": 4, "head_gpu": 1}, "include_dashboard": False}
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**head, "_system_config": QUICK | PATIENT}
    )
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def opened(nodes: Any) -> Iterator[Cluster]:
    with cluster("auto") as found:
        yield found


@pytest.fixture(scope="module")
def local(listed: list[Problem], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(listed, tmp_path_factory.mktemp("local"), {"0": Fake(listed)})


@pytest.fixture(scope="module")
def sweep_entries(listed: list[Problem]) -> list[Entry]:
    return [entry for one in listed for entry in entries(one, roughness=0.03)]


def test_a_run_whose_actors_are_killed_picks_what_one_process_does(
    opened: Cluster,
    listed: list[Problem],
    sweep_entries: list[Entry],
    local: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fate, killed, measure = random.Random(1), [], RayGpu.measure

    def dangerous(self: RayGpu, batch: Batch) -> Any:
        if len(batch.specs) > 1 and len(killed) < KILLS and fate.random() < 0.7:
            killed.append(self.hello.name)
            doom(roles, partial(ray.kill, self._actor), fate.random() * PACE)
        return measure(self, batch)

    monkeypatch.setattr(RayGpu, "measure", dangerous)
    (roles := tmp_path / "roles").mkdir()
    make = partial(Role, sweep_entries, roles)
    failed: list[str] = []
    joining = Joining(opened, make=make, resource="fake_gpu", say=failed.append)
    first: dict[str, Any] = {}
    until = time.monotonic() + 600
    while len(first) < 4 and time.monotonic() < until:
        first |= joining()
        assert not failed
        time.sleep(0.1)
    try:
        found = run(
            *(listed, tmp_path / "run", first),
            joining=joining,
            failures=FAILURES,
            anchor=anchor_of(listed[0]),
            confirms=True,
            retired=joining.retire,
        )
    finally:
        joining.close()
    assert found.picks == local.picks
    assert len(killed) == KILLS
    refused = [said for said in found.said if "is refused" in said]
    assert len(refused) == 2
    assert any("5.0% longer" in said for said in refused)
    assert any("30.0% shorter" in said for said in refused)
    assert len([said for said in found.said if "its work goes to others" in said]) >= KILLS - 1


def test_a_benchmark_whose_actor_is_killed_has_every_cell_once(
    opened: Cluster, sweep_entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU is slow, and refused before its first cell; one cell ends whatever measures it."""
    squares = [(m, n, 128) for m in (32, 64, 128) for n in (64, 128)]
    monkeypatch.setitem(gemm.LISTED, "squares", squares)
    killed, measure = [], RayGpu.cell

    def dangerous(self: RayGpu, asked: Any) -> Any:
        if not killed:
            killed.append(self.hello.name)
            doom(roles, partial(ray.kill, self._actor), PACE / 2)
        return measure(self, asked)

    (roles := tmp_path / "roles").mkdir()
    (roles / "lying").mkdir()  # that role is taken
    versions = {name: of for name, of in worker.versions().items() if name in worker.OWN}
    make = partial(Cells, sweep_entries, roles, versions, "128x64x128")
    monkeypatch.setattr(engines, "remote", commands.remote(make, "fake_gpu", together=2))
    monkeypatch.setattr(RayGpu, "cell", dangerous)
    result = tmp_path / "result.json"
    asked = ("gemm", "--cells", "squares", "--types", "bf16", "--json", str(result))
    done = CliRunner().invoke(main, ["bench", *asked, "--ray", "--gpus", "2"])
    assert done.exit_code == 4, done.output  # as where a cell is absent here
    found = read(result)
    cells = {cell["name"]: cell["ratio"] for cell in found["cells"]}
    assert list(cells) == [f"bf16 {m}x{n}x{k}" for m, n, k in squares]
    assert [name for name, ratio in cells.items() if ratio is None] == ["bf16 128x64x128"]
    assert f"GPU {killed[0]}" in done.stderr and "its work goes to others" in done.stderr
    assert "5.0% longer" in done.stderr and found["states"]


def await_loss(node: str) -> None:
    """Until the cluster knows that a node is gone: its processes may outlive it for a while."""
    until = time.monotonic() + 600
    while any(one["NodeID"] == node and one["Alive"] for one in ray.nodes()):
        assert time.monotonic() < until, "the cluster does not miss its node"
        time.sleep(0.2)


def test_a_node_that_joins_is_used_and_one_that_goes_is_no_loss(
    nodes: Any,
    opened: Cluster,
    listed: list[Problem],
    sweep_entries: list[Entry],
    local: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = ray.get_runtime_context().get_node_id()
    added: list[Any] = []
    begun, enough, went, measure = Event(), Event(), Event(), RayGpu.measure
    measured: list[str] = []

    def moved(self: RayGpu, batch: Batch) -> Any:
        if self.hello.node == head:
            begun.set()
            assert went.wait(600)  # so that the other has to be used
        elif measured:
            enough.set()
            assert went.wait(600)
            await_loss(self.hello.node)
        else:
            measured.append(self.hello.name)
        return measure(self, batch)

    monkeypatch.setattr(RayGpu, "measure", moved)
    joining = Joining(opened, make=partial(Role, sweep_entries), resource="head_gpu")

    def joined() -> Any:
        if begun.is_set() and not added:
            added.append(nodes.add_node(num_cpus=0, resources={"head_gpu": 1}))
        if enough.is_set() and not went.is_set():
            nodes.remove_node(added[0], allow_graceful=False)
            went.set()
        return joining()

    try:
        found = run(
            *(listed, tmp_path / "run", joining.first()),
            joining=joined,
            failures=FAILURES,
            retired=joining.retire,
        )
    finally:
        went.set()
        joining.close()
    assert measured and added
    assert found.picks == local.picks
    (said,) = found.said
    assert measured[0] in said and "its work goes to others" in said


def test_a_command_that_is_stopped_and_then_killed_goes_on_and_ends_as_if_it_had_not_been(
    nodes: Any, space: Path, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run that is gone had on the GPU is ended by the cluster, which has it for the next."""
    asked = ("tune", str(space), "--shapes", ",".join(SHAPES), "--records")
    records, log = tmp_path / "records.json", tmp_path / "records.journal.jsonl"
    whole, all_of_it = tmp_path / "whole.json", tmp_path / "whole.journal.jsonl"
    assert not CliRunner().invoke(main, [*asked, str(whole), "--replay", str(sweep)]).exit_code

    def start() -> forked.Running:
        own = ("14", str(sweep), "head_gpu", *asked, str(records), "--ray", nodes.address)
        return forked.begin(forked.Program("import commands; commands.simulated()", own))

    running = start()
    os.kill(until(lambda: lines(log) >= 14, running), signal.SIGINT)
    (ended,) = running.wait()
    assert ended.returncode == 130, ended
    assert "the same command goes on" in ended.stderr and "Traceback" not in ended.stderr
    before = lines(log)
    running = start()
    os.kill(until(lambda: lines(log) >= before + 14, running), signal.SIGKILL)
    assert running.wait()[0].returncode == -signal.SIGKILL
    measured = lines(log)
    make = partial(Role, journal.read(sweep))
    monkeypatch.setattr(engines, "remote", commands.remote(make, "head_gpu"))
    done = CliRunner().invoke(main, [*asked, str(records), "--ray"])
    assert done.exit_code == 0, done.output
    picks = (
        {(one.operation, one.shape): one.best.schedule for one in records_file.read(path)}
        for path in (records, whole)
    )
    assert next(picks) == next(picks)
    assert lines(log) < measured + lines(all_of_it)  # what was measured was not measured again


SOURCE = 'extern "C" __global__ void __launch_bounds__(32) kernel(float* x) { x[0] = 1.0f; }\n'


def test_a_kernel_compiled_on_a_node_is_the_one_compiled_here(opened: Cluster) -> None:
    with WorkerPool(1, worker=opened.compiler) as pool:
        there = pool.submit(lambda one: one.compile(SOURCE, name="kernel", arch="sm_90a"))
        broken = pool.submit(lambda one: one.compile("int", name="kernel", arch="sm_90a"))
        here = nvrtc.compile(SOURCE, name="kernel", arch="sm_90a", toolchain=find())
        assert there.result().cubin == here.cubin and there.result().toolchain == here.toolchain
        with pytest.raises(CompilationError, match="error"):
            broken.result()


def test_a_node_with_another_toolchain_compiles_nothing_and_is_asked_once(
    opened: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine code would be another than what is asked for, and stand under its name."""
    own, plain, asked = find(), Cluster.answer, []
    told = r"no node of the cluster can compile: its toolchain is \w+, not another"
    with monkeypatch.context() as patch, pytest.raises(ToolchainError, match=told):
        patch.setattr(clusters, "find", lambda: replace(own, identity="another"))
        opened.compile(SOURCE, "kernel", "sm_90a")

    def answer(ref: Any, stopped: Any = None) -> Any:
        asked.append(ref)
        if len(asked) == 1:
            return actor.NotHere("gone", "no NVRTC")
        return plain(opened, ref)

    fresh = Cluster(ray, "auto")
    monkeypatch.setattr(fresh, "answer", answer)
    assert fresh.compile(SOURCE, "kernel", "sm_90a").name == "kernel" and len(asked) == 2


def test_who_asks_for_what_no_node_has_is_told(opened: Cluster, sweep_entries: list[Entry]) -> None:
    with pytest.raises(DeviceError, match="no GPU in the cluster at auto"):
        Joining(opened).first()
    other = Joining(
        opened, kind="NVIDIA H100", make=partial(Role, sweep_entries), resource="head_gpu"
    )
    with pytest.raises(DeviceError, match=f"no NVIDIA H100 in the cluster.*have {KIND.gpu}"):
        other.first()
    other.close()


class Older(actor.Measurer):
    """An actor on a node whose warploom is another version."""

    def hello(self) -> actor.Hello:
        assert "OMP_NUM_THREADS" not in os.environ  # Ray's, of one thread for what measures
        return replace(super().hello(), code="0123")


def test_a_node_of_another_version_is_refused_and_no_actor_starts_there_again(
    opened: Cluster, sweep_entries: list[Entry]
) -> None:
    said: list[str] = []
    make = partial(Role, sweep_entries)
    joining = Joining(opened, measurer=Older, make=make, resource="head_gpu", say=said.append)
    with pytest.raises(DeviceError, match=r"no GPU of the cluster at auto joined: .* code 0123"):
        joining.first()
    joining.close()
    assert len(said) == 1 and "its node has warploom's code 0123" in said[0]


def test_a_node_of_another_version_is_refused_by_name() -> None:
    own = actor.Hello("10.0.0.7/3", "node", KIND, actor.code(), actor.python())
    assert actor.refused(own) is None
    for its, what in (({"code": "0123"}, "code 0123"), ({"python": "3.9"}, "Python 3.9")):
        hello = actor.Hello(**{**{n: getattr(own, n) for n in own.__slots__}, **its})
        told = str(actor.refused(hello))
        assert f"GPU 10.0.0.7/3: its node has warploom's {what}" in told
