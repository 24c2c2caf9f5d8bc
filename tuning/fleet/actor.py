"""What runs on the nodes of a cluster: an actor on each GPU, and tasks that compile.

The actor holds the process that measures, as a run on one host does: a kernel that hangs or faults
ends that process and not the actor. Kernels come as bytes, checked by their hash, into a store of
the actor's own, and are all that its process can run: no compiler of the node's has a say in what
is measured.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from warploom.errors import CompilationError, DeviceError, ToolchainError
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store
from warploom.generator.store_record import Record, pack
from warploom.generator.toolchain import find
from warploom.generator.workers import Worker
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch, Gpu, GpuProcess
from warploom.tuning.journal import Result

ROOMS = ("generator", "runtime", "templates", "tuning")  # what decides what is measured
SOURCES = (".py", ".jinja", ".cuh")
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


@dataclass(frozen=True, slots=True)
class Sent:
    """A kernel as it travels: its sealed record, which names the cubin's hash, and the cubin."""

    key: str
    record: bytes
    packed: bytes

    @classmethod
    def of(cls, artifact: Artifact) -> Sent:
        """Return what is sent of a kernel."""
        record = Record.of(artifact)
        return cls(record.key, record.serialise(), pack(artifact.cubin))

    def artifact(self) -> Artifact:
        """Return the kernel; ValueError unless all of it is what was sent."""
        record = Record.parse(self.key, self.record)
        return record.artifact(record.unpack(self.packed))


@dataclass(frozen=True, slots=True)
class Hello:
    """Where an actor is and what it has. `name` is the same whenever it is on the same GPU."""

    name: str
    node: str
    about: About
    code: str
    python: str


@cache
def code() -> str:
    """Digest of the code that renders, compiles and measures: equal wherever that is the same."""
    specs = ((room, find_spec(f"warploom.{room}")) for room in ROOMS)
    return digest(
        (room, Path(place).resolve())
        for room, spec in specs
        for place in (spec.submodule_search_locations if spec else None) or ()
    )


def digest(folders: Iterable[tuple[str, Path]], suffixes: Collection[str] = SOURCES) -> str:
    """Digest of the files with these suffixes in folders, which are given by their names."""
    hashed = hashlib.sha256()
    for name, folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in suffixes:
                hashed.update(f"{name}/{path.relative_to(folder).as_posix()}\0".encode())
                hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def python() -> str:
    """The version of Python, as far as what it runs depends on it."""
    return ".".join(platform.python_version_tuple()[:2])


def gpu_process() -> Gpu:
    """The process that measures on the GPU that this actor was given."""
    return GpuProcess(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


class Measurer:
    """An actor. `make` is what measures: the GPU's process, or a sweep that is played back."""

    def __init__(self, make: Callable[[], Gpu] = gpu_process) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray allows who asks for no core only one thread
        self._folder = tempfile.TemporaryDirectory(prefix="warploom-")
        self._store = self._opened(Path(self._folder.name))
        self._gpu = make()
        self._last: tuple[str, Any] = ("", None)

    def _opened(self, folder: Path) -> Store:
        """The store that kernels come into, and that alone is used."""
        os.environ["WARPLOOM_CACHE_DIR"] = str(folder)
        os.environ["WARPLOOM_CACHE_PATH"] = ""
        os.environ["WARPLOOM_COMPILE"] = "forbid"
        return Store(folder)

    def hello(self) -> Hello:
        """Say where this is, and what it has."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or f"process {os.getpid()}"
        name = f"{ray.util.get_node_ip_address()}/{visible}"
        return Hello(name, node, self._gpu.about, code(), python())

    def hold(self, *kernels: Sent) -> None:
        """Take kernels that are to be measured.

        ValueError for one that is not what was sent. DeviceError where this node's disk does not
        take it: the process that measures would not find it, and the kernel would be blamed.
        """
        for sent in kernels:
            artifact = sent.artifact()
            self._store.put(sent.key, artifact)
            if reason := self._store.kept_in_memory.get(artifact.name):
                raise DeviceError(
                    reason,
                    rule="a node must have space for the kernels that it measures",
                    fix="free some in its folder for temporary files, or set TMPDIR there",
                )

    def measure(self, number: str, batch: Batch) -> tuple[str, dict[KernelSpec, Result]]:
        """Measure a batch, once: one that is asked for again is answered from what was found."""
        return self._once(number, lambda: self._gpu.measure(batch))

    def _once(self, number: str, measure: Callable[[], Any]) -> tuple[str, Any]:
        if self._last[0] != number:
            self._last = (number, measure())
        return self._last

    def condition(self) -> Condition:
        """What the driver says of the GPU; nothing where there is no nvidia-smi."""
        own = getattr(self._gpu, "condition", None)
        return own() if own else condition(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))

    def close(self) -> None:
        """End what measures."""
        self._gpu.close()
        self._folder.cleanup()


def condition(visible: str) -> Condition:
    """What nvidia-smi says of a GPU, on which one process is this actor's."""
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):  # before and after R535
        names = ",".join(f"{prefix}.{name}" for name in SLOWED)
        if told := _asked(visible, f"--query-gpu=driver_version,{names}"):
            driver, *active = re.split(r"\s*,\s*", told[0])
            slowed = [
                name
                for name, state in zip(SLOWED, active, strict=False)
                if state.lower() == "active"
            ]
            processes = _asked(visible, "--query-compute-apps=pid")
            return Condition(driver, max(0, len(processes) - 1), ", ".join(slowed))
    return Condition()


def _asked(visible: str, query: str) -> list[str]:
    command = ["nvidia-smi", f"--id={visible}", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 (a constant, and the GPU as the cluster names it)
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


# ---- Compiling -----------------------------------------------------------------------------------

_workers: list[Worker] = []  # one, for as long as the cluster keeps this process


@dataclass(frozen=True, slots=True)
class NotHere:
    """Why a node cannot compile, and which it is."""

    node: str
    reason: str


def compiled(source: str, name: str, arch: str, toolchain: str) -> Sent | NotHere | str:
    """Compile a source in a child process; the compiler's log where it fails.

    Only the toolchain of that identity makes the machine code that was asked for. DeviceError where
    the child was killed, as by a node without memory: that says nothing of the kernel.
    """
    try:
        own = find().identity
        if own != toolchain:
            return NotHere(_node(), f"its toolchain is {own[:12]}, not {toolchain[:12]}")
        if not _workers:
            _workers.append(Worker(more=True))
        return Sent.of(_workers[0].compile(source, name=name, arch=arch))
    except ToolchainError as error:
        return NotHere(_node(), str(error))
    except CompilationError as error:
        if error.lost:
            raise DeviceError(str(error)) from error
        return error.log


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def refused(hello: Hello) -> DeviceError | None:
    """Why a node that greets so cannot be used; None of one that runs the same code as this."""
    for what, its, own in (("code", hello.code, code()), ("Python", hello.python, python())):
        if its != own:
            return DeviceError(
                f"GPU {hello.name}: its node has warploom's {what} {its}, this machine {own}",
                rule="every node must run the version that the command runs",
                fix="install the same on all of them, and start them again",
            )
    return None
