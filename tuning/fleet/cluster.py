"""A Ray cluster: its cores, which compile, and what its actors and tasks answer.

Ray decides where things run, starts them when nodes join, and says when one is lost. What was
found is known to this process alone. The rooms of this folder alone import ray.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from warploom.errors import CompilationError, ConfigurationError, DeviceError, ToolchainError
from warploom.generator.artifact import Artifact
from warploom.generator.build import entries
from warploom.generator.store import source_digest
from warploom.generator.toolchain import Toolchain, find
from warploom.printable import first_line, last_line
from warploom.tuning.fleet.actor import NotHere, Sent, compiled

LOCAL, AUTO = "local", "auto"  # in place of an address: this host alone, the cluster it is part of
REACHING = 10.0  # seconds for a connection to a cluster's first node
ASKED = 1.0  # seconds between two looks at whether an answer is still wanted

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


@contextmanager
def cluster(address: str, **options: Any) -> Iterator[Cluster]:
    """Connect to a cluster; `options` are those of ray.init, for one that is LOCAL.

    One that this process is connected to already is taken as it is. ConfigurationError without ray,
    DeviceError without a cluster at the address.
    """
    ray = _ray()
    joined = ray.is_initialized()
    if not joined:
        _connect(ray, address, options)
    try:
        yield Cluster(ray, address)
    finally:
        if not joined:
            ray.shutdown()


def _ray() -> Any:  # noqa: ANN401 (Ray's types are not worth the time to read them)
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "--ray without ray",
            rule="a fleet is a Ray cluster, and ray is not installed",
            fix="pip install 'warploom[fleet]', here and on every node",
        ) from error
    return ray


def _connect(ray: Any, address: str, options: dict[str, Any]) -> None:  # noqa: ANN401
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = {"include_dashboard": False} if address == LOCAL else {"address": address}
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        _require_reachable(address)
        ray.init(log_to_driver=False, logging_level="ERROR", **where, **options)
    except Exception as error:  # some of those that Ray raises are of no other class
        raise DeviceError(
            f"--ray {address}: {first_line(error)}",
            rule="must be the address of a Ray cluster that can be reached, or local",
            fix="`ray start --head` begins one, and prints its address",
        ) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)  # in whose place Ray puts one of its own


def _require_reachable(address: str) -> None:
    """OSError where nothing listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=REACHING).close()


class Cluster:
    """What commands use of a cluster: tasks that compile, and answers of tasks and actors."""

    def __init__(self, ray: Any, address: str) -> None:  # noqa: ANN401
        self.ray, self.address = ray, address
        self._unable: dict[str, str] = {}  # nodes that cannot compile, and why
        self._warned = False  # of an answer that is not what was asked for

    def total(self, resource: str) -> int:
        """How many of a resource the cluster has now. DeviceError where it does not answer."""
        return int(self.ask(self.ray.cluster_resources).get(resource, 0))

    def alive(self) -> list[dict[str, Any]]:
        """The nodes that are alive. DeviceError where the cluster does not answer."""
        return [one for one in self.ask(self.ray.nodes) if one["Alive"]]

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What the cluster says; DeviceError where it says nothing, as when its head is gone."""
        try:
            return question()
        except DeviceError:
            raise
        except Exception as error:  # those of Ray's connection are of several classes
            raise DeviceError(
                f"the Ray cluster at {self.address}: {type(error).__name__}: {first_line(error)}",
                rule="its head must run, and be reachable, as long as the command",
                fix="`ray status` says how it is; then the same command goes on",
            ) from error

    def _require_cores(self) -> None:
        """ToolchainError where no node could ever run a task that compiles."""
        nodes = [one for one in self.alive() if one["Resources"].get("CPU", 0) >= 1]
        if all(one["NodeID"] in self._unable for one in nodes):
            why = next((self._unable[one["NodeID"]] for one in nodes), "none has a core for tasks")
            raise ToolchainError(
                f"no node of the cluster can compile: {why}",
                rule="some node must have this machine's toolchain, to the byte, and a core",
                fix="install the same wheels there, start nodes with --num-cpus, or compile "
                "without --ray",
            )

    def compiler(self, *, more: bool = False) -> RemoteWorker:
        """Stand in for a process that compiles, anywhere in the cluster."""
        del more
        return RemoteWorker(self)

    def compile(
        self, source: str, name: str, arch: str, stopped: Callable[[], bool] = lambda: False
    ) -> Artifact:
        """Compile on a node that has this machine's toolchain. Errors as `nvrtc.compile` has.

        An answer that is of another kernel, or was compiled otherwise, is a CompilationError, too;
        so is none, where it is `stopped` or its nodes are lost. ToolchainError where no node has
        the toolchain.
        """
        toolchain = find()
        identity = toolchain.identity
        while True:
            self._require_cores()
            options = {"num_cpus": 1, "max_retries": 3, **avoiding(self._unable)}
            task = self.ray.remote(compiled).options(**options)
            try:
                found = self.answer(task.remote(source, name, arch, identity), stopped)
                if isinstance(found, Sent):
                    return self._as_asked(found.artifact(), source, name, arch, toolchain)
            except DeviceError as error:  # lost thrice
                told = f"error: {error}"
                raise CompilationError(name, log=told, source=source, lost=True) from error
            except (ValueError, TypeError) as error:  # not whole
                raise CompilationError(name, log=f"error: {error}", source=source) from error
            if not isinstance(found, NotHere):
                raise CompilationError(name, log=str(found), source=source)
            self._unable[found.node] = found.reason

    def _as_asked(
        self, artifact: Artifact, source: str, name: str, arch: str, toolchain: Toolchain
    ) -> Artifact:
        """The artifact; ValueError unless all that it says of itself is what was asked for."""
        pairs = {
            "name": (artifact.name, name),
            "source": (artifact.source_digest, source_digest(source)),
            "arch": (artifact.arch, arch),
            "toolchain": (artifact.toolchain, toolchain.identity),
            "options": (artifact.options, toolchain.options(arch)),
            "entries": (sorted(artifact.resources), sorted(entries(source))),
        }
        unlike = [f"{what} {its}, not {own}" for what, (its, own) in pairs.items() if its != own]
        if not unlike:
            return artifact
        told = f"the cluster answered with another kernel than was asked for: {'; '.join(unlike)}"
        if not self._warned:
            self._warned = True
            logger.warning("%s: %s; such answers are failed builds", name, told)
        raise ValueError(told)

    def answer(self, ref: Any, stopped: Callable[[], bool] = lambda: False) -> Any:  # noqa: ANN401
        """What a task, or a call of an actor, returns.

        DeviceError where it is lost or fails, or nobody wants it any more.
        """
        errors = self.ray.exceptions
        while True:
            try:
                return self.ray.get(ref, timeout=ASKED)
            except errors.GetTimeoutError as error:
                if stopped():
                    raise DeviceError("nobody waits for it any more") from error
            except errors.RayTaskError as error:
                cause = error.cause or error
                told = cause if isinstance(cause, DeviceError) else DeviceError(first_line(cause))
                raise told from error
            except errors.RayError as error:
                raise DeviceError(last_line(error)) from error
            except Exception as error:  # the connection's, or what cannot be read
                raise DeviceError(f"{type(error).__name__}: {first_line(error)}") from error


class RemoteWorker:
    """Compiles as a worker process of this machine does, on some core of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._abandoned = cluster, False

    def compile(self, source: str, *, name: str, arch: str) -> Artifact:
        """Compile as `nvrtc.compile` does."""
        return self._cluster.compile(source, name, arch, lambda: self._abandoned)

    def abandon(self) -> None:
        """Wait for no answer any more: a cluster that others use may take any time."""
        self._abandoned = True

    def stop(self) -> None:
        """Nothing of it is here."""


def avoiding(nodes: Iterable[str]) -> dict[str, Any]:
    """Options of an actor or a task that must not run on some nodes."""
    listed = ",".join(sorted(nodes))
    return {"label_selector": {"ray.io/node-id": f"!in({listed})"}} if listed else {}
