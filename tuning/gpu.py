"""What measures: an interface, and the process of one GPU behind it.

The process may hang, crash or lose its GPU's context at any kernel. Then that kernel is marked, the
process is started anew, and the others are measured again; the run goes on.
"""

from __future__ import annotations

import json
import os
import reprlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any, Protocol, cast

from warploom.errors import DeviceError, SpecificationError
from warploom.generator import json_file
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.generator.workers import KILLS, ending, search_path
from warploom.tuning.journal import Outcome, Result, restore_result

COMMAND = (sys.executable, "-P", "-m", "warploom.tuning.worker")
STARTING = 120.0  # seconds for torch and the GPU's context
PREPARING = 120.0  # for warm clocks, operands and references
TRYING = 20.0  # for one kernel, whatever is done with it
DEATHS = 6  # in a row without a kernel that worked: then it is not the kernels
IDLE_DEATHS = 2  # the same, where it was at no kernel


@dataclass(frozen=True, slots=True)
class About:
    """The GPU that a process has, and the versions of what else has a part in its times."""

    gpu: str
    multiprocessors: int
    versions: tuple[tuple[str, str | int], ...] = ()

    def unlike(self, other: About) -> str:
        """How this differs from another, which a run is for; empty where it does not."""
        if (self.gpu, self.multiprocessors) != (other.gpu, other.multiprocessors):
            return (
                f"it has an {self.gpu} with {self.multiprocessors} multiprocessors, and the run "
                f"is for an {other.gpu} with {other.multiprocessors}"
            )
        own, its = dict(self.versions), dict(other.versions)
        for name in own | its:
            if own.get(name) != its.get(name):
                has, wanted = own.get(name, "none"), its.get(name, "none")
                return f"it has {name} {has}, and the run is for {wanted}"
        return ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Kernels of one problem to verify and to time in one loop.

    specs       the first is what the others' times are relative to, or the first that is correct
    precision   the standard error that the times of the first kernel and of the fastest are to have
                within their loop, as a share of them, where half a second suffices for that
    sets        of buffers that launches use in turn, where so many fit
    """

    operation: Operation
    shape: Shape
    specs: tuple[KernelSpec, ...]
    precision: float
    sets: int


class Gpu(Protocol):
    """Something that verifies and times kernels."""

    @property
    def about(self) -> About:
        """Which GPU it is."""
        ...

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        """Return what became of every kernel of the batch. Blocks."""
        ...

    def close(self) -> None:
        """End it, in the middle of a measurement if need be."""
        ...


class Died(Exception):
    """The process ended or was ended; `spec` is what it was at, None where it was at none.

    `killed` is True of a signal that others send, as a host without memory does.
    """

    def __init__(
        self, spec: str | None, outcome: Outcome, reason: str, *, killed: bool = False
    ) -> None:
        super().__init__(reason)
        self.spec, self.outcome, self.reason, self.killed = spec, outcome, reason, killed


class GpuProcess:
    """A process that measures on one GPU; started again when it dies.

    `visible` is the GPU as CUDA_VISIBLE_DEVICES names it. The process starts while its maker does
    something else: where it cannot be used, what is asked of it first raises DeviceError.
    """

    def __init__(
        self,
        visible: str,
        command: Sequence[str] = COMMAND,
        *,
        starting: float = STARTING,
        preparing: float = PREPARING,
        trying: float = TRYING,
    ) -> None:
        self._visible, self._command = visible, tuple(command)
        self._starting, self._preparing, self._trying = starting, preparing, trying
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str | None] = Queue()
        self._deaths = self._number = 0
        self._closed = False
        self._about: About | None = None
        self._met = False  # whether the process that is there has said what it has
        self._launch()

    @property
    def about(self) -> About:
        """Which GPU it is. Blocks until its process has started."""
        if self._about is None:
            self._meet()
        return cast("About", self._about)

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        """Return what became of every kernel of the batch; one that ends the process is marked.

        One at which it was killed is tried once more: that may have had nothing to do with it.
        """
        results: dict[KernelSpec, Result] = {}
        again: set[str] = set()
        left = {spec.name: spec for spec in batch.specs}
        while left and not self._closed:
            try:
                results |= self._request(batch, left)
                if any(result.outcome == "correct" for result in results.values()):
                    self._deaths = 0
                break
            except Died as death:
                self._count(death, DEATHS if death.spec is not None else IDLE_DEATHS)
                if death.spec is None or self._closed:
                    continue
                if death.killed and death.spec not in again:
                    again.add(death.spec)
                else:
                    spec = left.pop(death.spec)
                    results[spec] = Result(spec.schedule, death.outcome, reason=death.reason)
            except DeviceError:
                if not self._closed:  # else it is the process that was ended, as it was asked to be
                    raise
        return results

    def close(self) -> None:
        """End the process at once; a `measure` in another thread returns what it has."""
        self._closed = True
        self._stop()

    # ---- The conversation ------------------------------------------------------------------------

    def _request(self, batch: Batch, left: Mapping[str, KernelSpec]) -> dict[KernelSpec, Result]:
        request = {
            "operation": asdict(batch.operation),
            "shape": asdict(batch.shape),
            "kernels": list(left),
            "precision": batch.precision,
            "sets": batch.sets,
        }
        process = self._send(request)
        at: str | None = None
        while True:
            match self._next(process, at, self._trying if at else self._preparing):
                case {"trying": None}:
                    at = None
                case {"trying": str(name)} if name in left:
                    at = name
                case {"illegal": str(reason)}:
                    raise Died(at, "illegal", reason)
                case {"results": dict(results)} if results.keys() == left.keys():
                    return {spec: _result(spec, results[name]) for name, spec in left.items()}
                case other:
                    raise Died(at, "illegal", f"the measuring process said {reprlib.repr(other)}")

    def _send(self, request: Mapping[str, Any]) -> subprocess.Popen[str]:
        """Ask the process, which is started first where there is none.

        Requests have numbers, which all that is said in answer repeats.
        """
        if self._process is None:
            self._launch()
        if not self._met:
            self._meet()
        process = self._process
        if process is None:  # closed meanwhile
            raise Died(None, "illegal", "the measuring process was ended")
        self._number += 1
        with suppress(OSError):  # where it has died, its missing answer tells
            stdin = cast("IO[str]", process.stdin)
            stdin.write(json.dumps({**request, "number": self._number}) + "\n")
            stdin.flush()
        return process

    def _next(self, process: subprocess.Popen[str], at: str | None, limit: float) -> object:
        """Return the JSON value that comes next, or the line that is none.

        What answers an earlier request is left out: that was answered already, and the same kernels
        may be asked for again.
        """
        while True:
            try:
                line = self._lines.get(timeout=limit)
            except Empty:
                reason = f"no answer for {limit:g} seconds"
                raise Died(at, "timeout", reason) from None
            if line is None or not line.endswith("\n"):
                reason = f"the measuring process ended with {_ending(process)}"
                killed = -(process.returncode or 0) in KILLS
                raise Died(at, "illegal", reason, killed=killed)
            try:
                found: object = json_file.parse(line.encode())
            except ValueError:
                return line
            match found:
                case {"number": int(number)} if number < self._number:
                    continue
            return found

    def _count(self, death: Died, most: int) -> None:
        """End what is left of the process; DeviceError where it died so often in a row."""
        self._stop()
        self._deaths += 1
        if self._deaths >= most and not self._closed:
            raise DeviceError(
                f"the measuring process of GPU {self._visible} ended "
                f"{self._deaths} times: {death.reason}",
                rule="a GPU on which nothing can be measured ends the run",
                fix="check `nvidia-smi`; the journal or the result has all measurements so far",
            ) from death

    # ---- The process -----------------------------------------------------------------------------

    def _launch(self) -> None:
        path = os.pathsep.join(search_path())
        process = subprocess.Popen(  # noqa: S603 (a constant, or a test's)
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": self._visible},
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        self._process, self._lines, self._met = process, Queue(), False
        Thread(target=_pass_on, args=(process.stdout, self._lines), daemon=True).start()
        if self._closed:  # meanwhile
            self._stop()

    def _meet(self) -> None:
        """Take what the process says first. DeviceError where it cannot be used."""
        process = self._process  # which close() takes away in another thread
        try:
            if process is None:
                raise Died(None, "illegal", "the measuring process was ended")
            hello = self._next(process, None, self._starting)
        except Died as death:
            self._stop()
            raise DeviceError(
                f"GPU {self._visible}: {death.reason}",
                rule="a process that measures starts on each GPU",
                fix="its own message is above; `warploom doctor` checks driver and toolchain",
            ) from death
        match hello:
            case {"gpu": str(gpu), "multiprocessors": int(multiprocessors), **more}:
                versions = more.get("versions")
                found = versions.items() if isinstance(versions, dict) else ()
                self._about, self._met = About(gpu, multiprocessors, tuple(found)), True
                return
            case {"error": {"value": str(value), "rule": str(rule), "fix": str(fix)}}:
                self._stop()
                raise DeviceError(value, rule=rule, fix=fix)
        self._stop()
        raise DeviceError(
            f"GPU {self._visible}: its measuring process began with {reprlib.repr(hello)}",
            rule="must say which GPU it has",
            fix="see what else writes to its standard output, such as a sitecustomize",
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # the driver may hold on to it for a while
                process.wait(timeout=60)


def _pass_on(stream: IO[str], lines: Queue[str | None]) -> None:
    """Put the lines of `stream` into the queue, and None when it ends."""
    with suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(None)


def _ending(process: subprocess.Popen[str]) -> str:
    try:
        return ending(process.wait(timeout=10))
    except subprocess.TimeoutExpired:
        return "its output closed"


def _result(spec: KernelSpec, told: Any) -> Result:  # noqa: ANN401 (parsed JSON)
    """What the process told of a kernel; of times that are none, that they are."""
    try:
        return restore_result(spec.schedule, told)
    except SpecificationError as error:
        return Result(spec.schedule, "launch error", reason=f"no result: {error}")


def visible(count: int) -> list[str]:
    """The first `count` GPUs as CUDA_VISIBLE_DEVICES names them, of those that are visible now."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None
    if given is not None:  # an empty one hides all of them; a GPU named twice is one
        names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if names == []:
        raise DeviceError(
            f"no GPU: CUDA_VISIBLE_DEVICES is {given!r}",
            rule="it hides all of them",
            fix="unset it; `warploom doctor` checks the machine",
        )
    if names is not None and count > len(names):
        raise DeviceError(
            f"--gpus {count}",
            rule=f"CUDA_VISIBLE_DEVICES={given} shows {len(names)}",
            fix=f"pass at most {len(names)}, or let CUDA_VISIBLE_DEVICES show more",
        )
    return names[:count] if names is not None else [str(index) for index in range(count)]
