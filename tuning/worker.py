"""The process that measures: `python -m warploom.tuning.worker`, on the GPU it can see.

It serves one JSON line a batch and answers in lines: what it is about to try, then the results of
all. Whoever started it knows from the last line what to blame if it hangs or dies. Kernels are
found in the store; compiling is others' work. Each sample is a single launch, as models run it
(runtime/alone.py). What is slow once, such as what torch imports on first use, is done before the
first kernel is tried: a kernel has little time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any

import torch

from warploom.errors import CompilationError, DeviceError, WarploomError
from warploom.generator.architectures import products, served
from warploom.generator.families import names
from warploom.generator.records import restore_operation, restore_shape
from warploom.generator.specification import KernelSpec, parse_name
from warploom.printable import first_line
from warploom.runtime import driver
from warploom.runtime import kernel as kernels
from warploom.runtime.alone import alone
from warploom.runtime.families import family
from warploom.runtime.measure import Call, Sampler
from warploom.runtime.trial import FEWEST, Trial, exactly
from warploom.tuning.journal import Result
from warploom.tuning.loop import Loop, loop

WARMING = 1.5  # seconds until clocks settle
LARGE = 0.25  # of the GPU's memory: what verifying and the kernels need comes on top


class GpuLost(Exception):
    """A kernel left the GPU's context unusable; the process can only end."""


@dataclass
class Worker:
    """Measures batches; `say` is told what is tried."""

    say: Callable[[Mapping[str, Any]], None]
    device: str = "cuda"
    sampler: Callable[[Sequence[Call]], Sampler] = alone
    settle: Callable[[], None] = lambda: time.sleep(1.0)
    fetch: Callable[[KernelSpec], object] = kernels.kernel
    _batches: int = field(default=0, repr=False)

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What is said in answer to a request, a batch."""
        results = self.measure(request)
        return {"results": {name: _plain(result) for name, result in results.items()}}

    def measure(self, request: Mapping[str, Any]) -> dict[str, Result]:
        """Verify every kernel of a request on fresh data, then time those that are right."""
        operation = restore_operation(request["operation"])
        shape = restore_shape(operation.family, request["shape"])
        specs = [parse_name(name) for name in request["kernels"]]
        self._batches += 1
        self.say({"trying": None})
        seed = int.from_bytes(os.urandom(7)) if self.device == "cuda" else self._batches
        make = partial(family(operation.family).trial, operation, shape)
        try:
            trial = self._trial(make, seed, request["sets"])
        except (WarploomError, torch.OutOfMemoryError) as error:
            self._require_context(error)
            reason = f"no operands of this shape: {first_line(error)}"
            return {
                spec.name: Result(spec.schedule, "launch error", reason=reason) for spec in specs
            }
        self._prepare(trial, specs)
        results: dict[str, Result] = {}
        samplers: dict[str, Sampler] = {}
        for spec in specs:
            self.say({"trying": spec.name})
            result, sampler = self._verified(trial, spec)
            results[spec.name] = result
            if sampler:
                samplers[spec.name] = sampler
        if samplers:
            found, noisy = self._timed(samplers, request["precision"])
            results |= {name: _result(results[name], found, name, noisy=noisy) for name in samplers}
        return results

    def _trial(self, make: Callable[[str, int], Trial], seed: int, sets: int) -> Trial:
        """Fresh random data, in so many sets of buffers, or as many as are no burden.

        Where buffers lie suits one kernel and not another: times that each of two loops knew to
        0.2 % were 1 to 3 % apart between them by four sets (an H100, 2026-11-26).
        """
        with exactly(1):
            before, one = allocated(), make(self.device, seed)
        taken = allocated() - before
        del one
        most = int(LARGE * memory() / taken) if taken else sets
        with exactly(max(FEWEST, min(sets, most))):
            return make(self.device, seed)

    def _prepare(self, trial: Trial, specs: Sequence[KernelSpec]) -> None:
        """Leave to the kernels what is theirs alone. What fails here fails again, and says so."""
        with suppress(torch.OutOfMemoryError):
            trial.held_share()  # of what no kernel has written yet: the first check is slow
        for spec in specs:
            with suppress(WarploomError):
                self.fetch(spec)

    def _verified(self, trial: Trial, spec: KernelSpec) -> tuple[Result, Sampler | None]:
        """A kernel's outcome without its time, and what times it if it is right."""
        try:
            share = trial.error_share(spec)
            self._synchronise()
            if share > 1:
                reason = f"an error of {share:.3g} times its bound"
                return Result(spec.schedule, "wrong", reason=reason), None
            sampler = self.sampler(trial.calls(spec))
            self._synchronise()
        except torch.AcceleratorError as error:
            raise GpuLost(first_line(error)) from error
        except CompilationError as error:
            return Result(spec.schedule, "compile error", reason=str(error)), None
        except (DeviceError, torch.OutOfMemoryError) as error:
            self._require_context(error)
            return Result(spec.schedule, "launch error", reason=first_line(error)), None
        except (WarploomError, RuntimeError) as error:
            return Result(spec.schedule, "launch error", reason=first_line(error)), None
        return Result(spec.schedule, "correct"), sampler

    def _timed(self, samplers: Mapping[str, Sampler], precision: float) -> tuple[Loop, bool]:
        """Time all in turns; where clocks were unsteady once more, and say if they were again."""
        told = {name: partial(self._told, name, sample) for name, sample in samplers.items()}
        try:
            found = loop(told, precision)
            if found.unsteady:
                self.settle()
                found = loop(told, precision)
        except torch.AcceleratorError as error:
            raise GpuLost(first_line(error)) from error
        return found, found.unsteady

    def _told(self, name: str, sample: Sampler) -> float:
        self.say({"trying": name})
        return sample()

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _require_context(self, error: Exception) -> None:
        """Raise GpuLost where an error was not the launch's own but has ended the context."""
        try:
            self._synchronise()
        except (torch.AcceleratorError, RuntimeError):
            raise GpuLost(first_line(error)) from error


def _result(verified: Result, found: Loop, name: str, *, noisy: bool) -> Result:
    return replace(
        verified,
        seconds=found.seconds(name),
        spread=found.spread(name),
        relative=found.relative(name),
        error=found.error(name),
        noisy=noisy,
    )


# ---- The process ---------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """The GPU that kernels run on here. DeviceError where there is none, or they cannot."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU",
            rule=f"tuning measures on a GPU of {served()}",
            fix=f"run it on an {products()} with a driver; `warploom doctor` checks the machine",
        )
    driver.require_usable(0)
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}


def memory() -> int:
    """Bytes that the GPU here has."""
    return int(torch.cuda.get_device_properties(0).total_memory)


def allocated() -> int:
    """Bytes of it that tensors have; 0 where there is none."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def rehearse() -> None:
    """Call every family on the CPU: that brings what torch imports on first use, sympy for one."""
    for name in names():
        family(name).rehearse()


def get_ready() -> None:
    """Rehearse on the CPU while the GPU warms up, which ends last: it must not cool meanwhile."""
    with ThreadPoolExecutor(1) as aside:
        rehearsed = aside.submit(rehearse)
        warm(rehearsed.done)
        rehearsed.result()


def warm(ready: Callable[[], bool]) -> None:
    """Keep the GPU busy until its clocks settle and all is ready, in the way of what is timed."""
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    torch.mm(a.double(), a.double())  # torch brings what references are computed by on first use
    sample = alone([partial(torch.mm, a, a, out=torch.empty_like(a))])
    until = time.monotonic() + WARMING
    while time.monotonic() < until or not ready():
        sample()


def _end_with(parent: int) -> None:
    """End this process when the one that started it has gone, whatever the GPU does."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(
    kind: Callable[[Callable[[Mapping[str, Any]], None]], Worker] = Worker,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Answer requests until standard input ends; what else is printed goes to standard error.

    `kind` makes what answers; `more` is said of the GPU and what is with it, too.
    """
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    number: dict[str, int] = {}  # of the request that is being answered

    def say(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps({**message, **number}) + "\n")
        replies.flush()

    try:
        found = about() | more()
    except WarploomError as error:
        say({"error": {"value": error.value, "rule": error.rule, "fix": error.fix}})
        sys.exit(1)
    say(found)  # whoever waits for it can go on while this gets ready
    get_ready()
    worker = kind(say)
    with torch.no_grad():
        for line in requests:
            try:
                request = json.loads(line)
                number["number"] = request.pop("number")
                reply = worker.reply(request)
            except GpuLost as lost:
                say({"illegal": str(lost)})
                os._exit(1)  # its context is gone, and ending it properly would use it
            say(reply)


def _plain(result: Result) -> dict[str, Any]:
    names = ("outcome", "seconds", "spread", "relative", "error", "reason", "noisy")
    return {name: getattr(result, name) for name in names}


if __name__ == "__main__":
    serve()
