"""The GPUs of a run: those that join, measure, fail, are refused, and go. All are of one kind.

A batch is handed to one of them and comes back once: with its results, or as work to be given to
another. One that fails is closed; where it comes back it is used again, until it has failed as
often as it may. Nothing here knows where GPUs are; whoever does says who has joined.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from warploom.errors import DeviceError, WarploomError
from warploom.generator.specification import KernelSpec
from warploom.printable import first_line
from warploom.tuning.fleet.standing import Condition, Examination, Standing
from warploom.tuning.gpu import About, Batch, Gpu
from warploom.tuning.journal import Result, checked

FAILURES = 2  # of GPUs that may come back
HANGING = 600.0  # seconds without a result: beyond what a process that measures allows itself
AWAITED = 60.0  # seconds for another to join, where none is left
EVERY = 32  # batches between two examinations
FAULTS = 2  # examinations in a row that find one
FEW = 3  # examined: of fewer, nobody can say which of them is off
THREADS = 1024

logger = logging.getLogger(__name__)

Results = dict[KernelSpec, Result]
Work = TypeVar("Work")


def answered(batch: Batch, answer: object) -> Results:
    """Return the results of all kernels of a batch; DeviceError for an answer that has them not."""
    results = answer if isinstance(answer, dict) else {}
    if lacking := [spec.name for spec in batch.specs if spec not in results]:
        raise DeviceError(
            f"no result of {len(lacking)} of {len(batch.specs)} kernels",
            rule="must answer for all of a batch",
        )
    return {spec: checked(spec.schedule, results[spec]) for spec in batch.specs}


def _of_gpu(member: Member, error: Exception) -> DeviceError:
    """Return an error that names its GPU, as some do already."""
    if isinstance(error, DeviceError) and error.value.startswith("GPU "):
        return error
    if isinstance(error, WarploomError):
        return DeviceError(f"GPU {member.name}: {error.value}", rule=error.rule, fix=error.fix)
    logger.debug("GPU %s failed here", member.name, exc_info=error)
    told = f"GPU {member.name}: {type(error).__name__}: {first_line(error)}"
    return DeviceError(told, rule="its answer could not be read")


class ExaminedGpu(Gpu, Protocol):
    """A GPU that can be asked what its driver says of it."""

    def condition(self) -> Condition:
        """Return what may make its times differ from those of others. Blocks."""
        ...


@dataclass(eq=False)
class Member:
    """A GPU of the run, and what it is at: a batch, an examination, or nothing.

    trusted   it passed its examination, or needs none
    batches   measured since; faults: examinations in a row that found one
    prepared  what its GPU is to measure next, as far as anybody knows
    """

    name: str
    gpu: Gpu
    trusted: bool
    batches: int = 0
    faults: int = 0
    prepared: Batch | None = None
    work: Future[Any] | None = None
    examination: Future[Examination] | None = None
    judged: bool = True
    begun: float = 0.0
    gone: bool = False


class Fleet:
    """The GPUs that there are, by name, and those that join: all of the kind `about`.

    joining    asked often for those that have come since it was last asked
    failures   of one name, after which it is not used again
    anchor     what everyone is examined by, before its first batch and every so many; None: nobody
    confirms   finalists are measured on two GPUs, where there are two
    hanging    seconds without a result, after which a GPU has failed
    say        told who fails and is refused; retired: of names that are not used again
    """

    def __init__(
        self,
        about: About,
        gpus: Mapping[str, Gpu],
        *,
        joining: Callable[[], Mapping[str, Gpu]] | None = None,
        failures: int = 1,
        anchor: Batch | None = None,
        confirms: bool = False,
        hanging: float = HANGING,
        say: Callable[[str], None] = lambda text: None,
        retired: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.about, self.confirms, self._hanging = about, confirms, hanging
        self._joining, self._failures, self._anchor = joining, failures, anchor
        self._say, self._retired, self._clock = say, retired, clock
        self._members: dict[str, Member] = {}
        self._failed: Counter[str] = Counter()
        self._standing = Standing()
        self._threads = ThreadPoolExecutor(THREADS)
        self._lonely = clock()  # since when there is nobody
        self._last: DeviceError | None = None
        self._silent = -1.0  # until when a cluster that did not answer is not asked again
        for name, gpu in gpus.items():
            self._join(name, gpu)

    # ---- What a run asks -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def idle(self) -> list[Member]:
        """Who may be given a batch."""
        return [
            one
            for one in self._members.values()
            if one.trusted and one.work is None and one.examination is None
        ]

    def busy(self) -> list[Member]:
        """Who measures a batch."""
        return [one for one in self._members.values() if one.work is not None]

    def prepare(self, member: Member, batch: Batch) -> None:
        """Have a GPU that measures be sent what it may measure next. What fails is tried again."""
        if (ahead := getattr(member.gpu, "prepare", None)) and batch is not member.prepared:
            member.prepared = batch
            self._threads.submit(ahead, batch)

    def has_other(self, name: str) -> bool:
        """Whether there is a GPU beside that of a name."""
        return any(one != name for one in self._members)

    def submit(self, member: Member, batch: Batch, wake: Callable[[], None]) -> Future[Results]:
        """Have an idle member measure a batch; `wake` is called, in any thread, when it ends."""
        return self.begin(member, lambda: member.gpu.measure(batch), wake)

    def begin(
        self, member: Member, work: Callable[[], Work], wake: Callable[[], None]
    ) -> Future[Work]:
        """Have an idle member do any work of its GPU's, which counts as a batch."""
        member.batches += 1
        member.begun = self._clock()
        member.work = begun = self._threads.submit(work)
        begun.add_done_callback(lambda _: wake())
        return begun

    def results(self, member: Member, batch: Batch) -> Results | None:
        """What came of a batch that has ended; None where its GPU failed: it is work again."""
        return self.outcome(member, partial(answered, batch))

    def outcome(self, member: Member, read: Callable[[Any], Work]) -> Work | None:
        """What came of work that has ended; None where its GPU failed: it is work again.

        `read` makes of the answer what is wanted. Whatever it raises is a failure of the GPU, too:
        a broken node may answer anything, and ends no run.
        """
        work, member.work = member.work, None
        if member.gone or work is None:
            return None
        try:
            return read(work.result())
        except Exception as error:
            self.failed(member, _of_gpu(member, error))
            return None

    def failed(self, member: Member, error: DeviceError) -> None:
        """Close a GPU that failed. Its name may join again, unless it has failed too often."""
        self._failed[member.name] += 1
        retired = self._failed[member.name] >= self._failures
        if retired:
            self._retire(member.name)
        told = "it is not used again" if retired else "it is used again if it comes back"
        if self._joining or len(self._members) > 1:
            self._say(f"{error}; its work goes to others, {told}")
        self._remove(member, error)

    def contradicted(self, member: Member, other: Member) -> None:
        """Count a GPU as failed on which nothing of a batch worked, where some did on another."""
        if not member.gone:
            told = f"GPU {member.name}: no kernel of a batch is right, and some are on {other.name}"
            self.failed(member, DeviceError(told, rule="must compute what others do"))

    def refresh(self, wake: Callable[[], None]) -> None:
        """Take in who has joined, examine who is due, and close who hangs or is refused.

        DeviceError, the last one that was met, where nobody is left and nobody is to come.
        """
        for name, gpu in self._joined().items():
            self._join(name, gpu)
        for member in [*self._members.values()]:
            if member.examination is not None and member.examination.done():
                self._examined(member, member.examination)
            elif (member.work or member.examination) and self._hangs(member):
                told = f"GPU {member.name}: no result for {self._hanging:g} seconds"
                self.failed(member, DeviceError(told, rule="must measure a batch in less"))
                wake()
        self._judge()
        if self._anchor is not None:
            for member in self._members.values():
                if member.work is None and member.examination is None and self._due(member):
                    self._examine(member, self._anchor, wake)
        self._require_someone()

    def close(self) -> None:
        """End all at once, in the middle of a measurement if need be."""
        ended = [self._threads.submit(member.gpu.close) for member in self._members.values()]
        self._threads.shutdown()
        for one in ended:
            one.result()

    def _joined(self) -> Mapping[str, Gpu]:
        """Those that have joined; nobody while their cluster does not answer.

        The GPUs that have joined may answer all the same, and the cluster later: it is asked
        rarely, since each question may take long.
        """
        if self._joining is None or self._clock() < self._silent:
            return {}
        try:
            return self._joining()
        except DeviceError as error:
            if self._silent < 0:
                self._say(f"{error}; the run goes on with the GPUs that it has")
            self._silent, self._last = self._clock() + AWAITED / 2, error
            return {}

    # ---- Who comes and goes ----------------------------------------------------------------------

    def _join(self, name: str, gpu: Gpu) -> None:
        if name in self._members or self._failed[name] >= self._failures:
            gpu.close()
            return
        if unlike := gpu.about.unlike(self.about):
            self._retire(name)
            gpu.close()
            self._say(f"GPU {name} is refused: {unlike}")
            self._last = DeviceError(
                f"GPU {name}: {unlike}",
                rule="all GPUs of a run must be alike",
                fix="have the same on all nodes, or run it once for each",
            )
            return
        self._members[name] = Member(name, gpu, trusted=self._anchor is None)

    def _retire(self, name: str) -> None:
        self._failed[name] = self._failures
        self._retired(name)

    def _remove(self, member: Member, error: DeviceError) -> None:
        member.gone = True
        del self._members[member.name]
        member.gpu.close()
        self._lonely, self._last = self._clock(), error

    def _require_someone(self) -> None:
        if self._members:
            return
        if self._joining is None or self._clock() - self._lonely > AWAITED:
            raise self._last or DeviceError(
                f"no {self.about.gpu} has joined for {AWAITED:g} seconds",
                rule="there must be a GPU to measure on",
                fix="check the cluster's state; the journal has all measurements so far",
            )

    def _hangs(self, member: Member) -> bool:
        work = member.work or member.examination
        return not (work and work.done()) and self._clock() - member.begun > self._hanging

    # ---- Examinations ----------------------------------------------------------------------------

    def _due(self, member: Member) -> bool:
        return member.judged and (not member.trusted or member.batches >= EVERY)

    def _examine(self, member: Member, anchor: Batch, wake: Callable[[], None]) -> None:
        gpu = cast("ExaminedGpu", member.gpu)

        def examined() -> Examination:
            found = answered(anchor, gpu.measure(anchor))[anchor.specs[0]]
            return Examination(found, gpu.condition().checked())

        member.begun, member.judged = self._clock(), False
        member.examination = self._threads.submit(examined)
        member.examination.add_done_callback(lambda _: wake())

    def _examined(self, member: Member, examination: Future[Examination]) -> None:
        member.examination = None
        try:
            self._standing.note(member.name, examination.result())
        except Exception as error:
            self.failed(member, _of_gpu(member, error))

    def _judge(self) -> None:
        """Refuse whom two examinations in a row found fault with, and trust whom one did not.

        Where few are known, all that are being examined are waited for: of two that differ nobody
        can say who is off.
        """
        examined = any(one.examination for one in self._members.values())
        fresh = [
            one for one in self._members.values() if not one.judged and one.examination is None
        ]
        if not fresh or (examined and len(self._standing) < FEW):
            return
        faults = self._standing.faults()
        for member in fresh:
            member.judged, member.batches = True, 0
            member.faults = member.faults + 1 if member.name in faults else 0
            member.trusted = not member.faults
        for member in [*self._members.values()]:
            if member.faults >= FAULTS:
                self._refuse(member, faults[member.name])
            elif member.name in faults and member.trusted:  # beside one that has joined
                member.trusted = False

    def _refuse(self, member: Member, fault: str) -> None:
        self._retire(member.name)
        self._standing.forget(member.name)  # what was found of those that are lost stays known
        self._say(f"GPU {member.name} is refused: {fault}")
        error = DeviceError(
            f"GPU {member.name}: {fault}",
            rule="must be like the others of its kind",
            fix="`nvidia-smi -q` on its node says more; the run goes on without it",
        )
        self._remove(member, error)
