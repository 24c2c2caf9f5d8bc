"""Problems on a GPU: scratch operands, launches timed as models run them, and results compared.

All of it runs on the caller's current stream, between its calls, and touches no tensor of theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TypeVar

import torch
from cuda.bindings import driver

from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime.alone import Flush, wait
from warploom.runtime.driver import check, enter
from warploom.runtime.elements import TORCH
from warploom.runtime.families import family
from warploom.runtime.measure import Call, marks
from warploom.runtime.plan import forget_named
from warploom.runtime.trial import (
    FEWEST,
    Trial,
    difference_share,
    exactly,
    generator,
    wrong,
)
from warploom.tuning.autotune.contest import Contest, Measured, NotMeasured, Turn

LEAD = 3e-4  # seconds that the GPU waits first, so that the host is ahead of it
AGAIN = 3  # times that turns are taken again to which the GPU came before the host was done
REHEARSED = 1 << 16  # elements
ROOM = 0.5  # of the memory that is free: what scratch may take,
DRAWN = 1 << 30  # and bytes of it: 18 GB of operands took most of a budget to draw
COMPARED = (5e-4, 1e-11)  # seconds, about, of comparing results, and of each of their elements
T = TypeVar("T")


def may_measure(device: int) -> bool:
    """Whether this thread's call on a GPU is one between which others can run.

    It is none under a capture, where a compiler or a mode looks on, and inside a transform.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def measure(
    operation: Operation,
    shape: Shape,
    device: int,
    present: KernelSpec,
    kept: Sequence[KernelSpec],
    candidates: Sequence[KernelSpec],
    budget: float,
) -> Measured:
    """Find the fastest of a problem's kernels on a GPU, in `budget` seconds of its time.

    NotMeasured where neither memory nor the budget suffice.
    """
    with _apart(device):
        before = torch.cuda.memory_reserved()
        try:
            stage = GpuStage(device)
            trial, spent = _drawn(stage, operation, shape)
            elements = sum(one.numel() for one in trial.results)
            contest = Contest(
                *(present, kept, trial.calls, _Difference(trial, present), stage, budget, spent),
                compared=COMPARED[0] + COMPARED[1] * elements,
            )
            return contest.run(candidates)
        except torch.OutOfMemoryError as error:
            raise NotMeasured("its scratch operands do not fit into free memory") from error
        finally:
            trial = contest = stage = None  # type: ignore[assignment]
            forget_named({present, *kept, *candidates})
            if torch.cuda.memory_reserved() > before:
                torch.cuda.empty_cache()


def rehearse(operation: Operation, device: int) -> None:
    """Do in small what torch does when a problem is measured: it loads kernels at their first run.

    That takes up to half a second once in a process, which no call has to wait for. All runs on a
    stream of its own, which no other thread captures or waits for.
    """
    with _apart(device), _own_stream(device):
        for dtype in _dtypes(operation):
            rehearse_on(dtype, "cuda")
        Flush(device)()
        wait(0)
        marks()[0].record()


def rehearse_on(dtype: torch.dtype, device: str) -> None:
    """Draw, fill and compare tensors as trials of this type do."""
    random = generator(device, 0)
    if dtype.is_floating_point:
        drawn = torch.randn(REHEARSED, generator=random, device=device).to(dtype)
    else:
        drawn = torch.randint(-127, 128, (REHEARSED,), generator=random, dtype=dtype, device=device)
    kept = drawn.clone()
    kept.copy_(wrong(drawn))
    difference_share(drawn, kept)
    torch.rand(REHEARSED, generator=random, device=device).add_(0.5)


def _dtypes(operation: Operation) -> list[torch.dtype]:
    """The types of an operation's tensors."""
    values = (getattr(operation, one.name) for one in fields(operation))
    return list(
        dict.fromkeys(TORCH[one] for one in values if isinstance(one, str) and one in TORCH)
    )


@contextmanager
def _own_stream(device: int) -> Iterator[None]:
    """Inside, the current stream is one that nothing else has: torch's own are shared."""
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    handle = check(driver.cuStreamCreate(flags))
    try:
        own = torch.cuda.ExternalStream(int(handle), device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            yield
            own.synchronize()
    finally:
        check(driver.cuStreamDestroy(handle))


@contextmanager
def _apart(device: int) -> Iterator[None]:
    """Autograd and autocast see nothing of what is inside, nor does another thread's capture."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.device(device), torch.no_grad(), torch.autocast("cuda", enabled=False):
        enter(device)
        mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            check(driver.cuThreadExchangeStreamCaptureMode(mode))


def _drawn(stage: GpuStage, operation: Operation, shape: Shape) -> tuple[Trial, float]:
    """Random operands, and the GPU's seconds for them, not the host's, which allocates memory."""
    found: list[Trial] = []
    spent = stage.launched(lambda: found.append(_trial(operation, shape)))
    return found[0], spent


def _trial(operation: Operation, shape: Shape) -> Trial:
    """Random operands: four sets of them, or as many as there is room for and are soon drawn."""
    draw, seed = family(operation.family).trial, int.from_bytes(os.urandom(7))
    before = torch.cuda.memory_allocated()
    with exactly(1):
        trial: Trial = draw(operation, shape, "cuda", seed)
    one = max(1, torch.cuda.memory_allocated() - before)
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    sets = min(FEWEST, int(ROOM * free) // one, DRAWN // one)
    if sets < 2:
        return trial
    del trial
    with exactly(sets):
        return draw(operation, shape, "cuda", seed)


class GpuStage:
    """Times launches on the current stream of a GPU."""

    def __init__(self, device: int) -> None:
        self._flush = Flush(device)
        self._host = 0.0  # seconds that the host took for one turn

    def timed(self, act: Callable[[], T]) -> tuple[T, float]:
        """What `act` returns, and the seconds that the GPU took for it."""
        begin, end = marks()
        begin.record()
        found = act()
        end.record()
        end.synchronize()
        return found, float(begin.elapsed_time(end)) * 1e-3

    def launched(self, call: Call) -> float:
        """Make a launch for the first time; the seconds from when the host was done with it.

        Until then the GPU waits: the host lays the launch out, and the driver loads the kernel, or
        allocates memory.
        """
        begin, end = marks()
        begin.record()
        entered = time.perf_counter()
        call()
        host = time.perf_counter() - entered
        end.record()
        end.synchronize()
        return max(0.0, float(begin.elapsed_time(end)) * 1e-3 - host)

    def lap(self, turns: Sequence[Turn]) -> tuple[list[float], float]:
        """The seconds of each turn's launch, and of all of it.

        The host is ahead of the GPU: pauses are at least as long as it needs for a turn. Turns in
        which it was not, all the same, are taken again.
        """
        seconds, spent, left = [0.0] * len(turns), 0.0, list(range(len(turns)))
        for _ in range(1 + AGAIN):
            found, late, more = self._pass([turns[index] for index in left])
            spent += more
            for index, one in zip(left, found, strict=True):
                seconds[index] = one
            left = [index for index, behind in zip(left, late, strict=True) if behind]
            if not left:
                break
        return seconds, spent

    def _pass(self, turns: Sequence[Turn]) -> tuple[list[float], list[bool], float]:
        """Take turns once: their seconds, whether the host was late, and the seconds of all."""
        (first, last), events = marks(), [marks() for _ in turns]
        late = []
        first.record()
        wait(LEAD)
        for turn, (begin, end) in zip(turns, events, strict=True):
            entered = time.perf_counter()
            self._flush()
            wait(max(turn.pause, 1.5 * self._host))
            begin.record()
            turn.call()
            end.record()
            late.append(bool(begin.query()))  # type: ignore[no-untyped-call]
            self._host = max(0.5 * self._host, min(time.perf_counter() - entered, LEAD))
        last.record()
        last.synchronize()
        seconds = [float(begin.elapsed_time(end)) * 1e-3 for begin, end in events]
        return seconds, late, float(first.elapsed_time(last)) * 1e-3


class _Difference:
    """How far a kernel's results are off those of the present one, on the first set of operands."""

    def __init__(self, trial: Trial, present: KernelSpec) -> None:
        self._trial, self._present = trial, present
        self._kept: list[torch.Tensor] = []

    def __call__(self, spec: KernelSpec) -> float:
        if spec == self._present:  # whose launch was the last
            self._kept = [one.clone() for one in self._trial.results]
            return 0.0
        found = zip(self._run(spec), self._kept, strict=True)
        return max(difference_share(one, kept) for one, kept in found)

    def _run(self, spec: KernelSpec) -> Sequence[torch.Tensor]:
        """The results of a kernel, which were full of what no right result is full of before."""
        for one in self._trial.results:
            one.copy_(wrong(one))
        self._trial.calls(spec)[0]()
        return self._trial.results
