"""Kernels that are wrong in one place each: how one is declared, and what becomes of it.

What a mutant does not wait for may have come by then, and its results be right by luck. So a kernel
is made to pause where the fault lies. A right one is right however slow it is: its text with the
pause, and without the fault, is run first and must pass. The two get different data: what the first
left in shared memory would be right for the second.

A mutant that may hang runs in a process of its family's mutants (`main`), which a clock on its
kernels ends. One that cannot runs in the process of the tests (`outcome`).
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.generator.workers import WorkerPool
from warploom.runtime import kernel as kernels
from warploom.runtime import plan

# 30,000 cycles are 15 to 20 us: what TMA was told to do before has long been done.
PAUSE = "    for (const auto since = clock64(); clock64() - since < 30000;) {}\n"
HANGS_SECONDS = 25  # a kernel that takes so long does; a right one takes milliseconds

Edit = tuple[str, str]  # a text that is in the kernel, and what comes in its place
Clock = Callable[[], AbstractContextManager[None]]


class Mutant:
    """A kernel, where it pauses, what is wrong with it, and a call that makes that show."""

    wrong: tuple[Edit, ...]
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec

    def sources(self) -> tuple[str, str]:
        """The text of the kernel that pauses, and of the one that is wrong too."""
        whole = edited(render(self.kernel), self.pauses)
        return whole, edited(whole, self.wrong)

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a call of its kernel, with a clock on it, is right."""
        raise NotImplementedError


@dataclass(frozen=True)
class Checked:
    """A mutant that cannot hang: a text that is in its kernel once, and what comes in its place.

    `check` asserts that a call of the kernel is right, on data of a seed.
    """

    old: str
    new: str
    check: Callable[[KernelSpec, int], None]
    kernel: KernelSpec
    pauses: tuple[Edit, ...] = ()

    def sources(self) -> tuple[str, str]:
        """The text of the kernel that pauses, and of the one that is wrong too."""
        whole = edited(render(self.kernel), self.pauses, once=True)
        return whole, edited(whole, ((self.old, self.new),), once=True)


def edited(text: str, edits: tuple[Edit, ...], *, once: bool = False) -> str:
    """The text with every edit made; LookupError where one has no place, or `once` several."""
    for old, new in edits:
        count = text.count(old)
        if count == 0 or (once and count > 1):
            raise LookupError(f"{count} times in the text of the kernel: {old}")
        text = text.replace(old, new)
    return text


# ---- In the process of the tests -----------------------------------------------------------------


def outcome(mutant: Checked) -> str:
    """`caught`, `survived`, or what is wrong without the fault too."""
    whole, wrong = mutant.sources()
    try:
        _check(mutant, whole, seed=1)
    except AssertionError as error:
        return f"the kernel is wrong without the fault, too: {error}"
    try:
        _check(mutant, wrong, seed=2)
    except AssertionError:
        return "caught"
    return "survived"


def _check(mutant: Checked, source: str, seed: int) -> None:
    """Check with the kernel of `source` in the place of the mutant's."""
    spec = mutant.kernel
    artifact = nvrtc.compile(source, name=spec.name, arch=spec.arch, toolchain=find())
    before = kernels._kernels.pop(spec, None)
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)
    try:
        mutant.check(spec, seed)
    finally:
        del kernels._kernels[spec]
        if before is not None:
            kernels._kernels[spec] = before
        plan.forget()


# ---- In a process that a clock may end -----------------------------------------------------------


@contextmanager
def clock(begun: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the process where the kernels that are launched here do not end; `begun` is told."""
    begun()
    faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()


def compiled(mutants: Mapping[str, Mutant]) -> dict[str, tuple[Artifact, Artifact]]:
    """Compile both texts of each, all at once."""
    sources = {name: mutant.sources() for name, mutant in mutants.items()}
    with WorkerPool(2 * len(mutants)) as pool:
        futures = {
            name: [pool.submit(partial(compile_text, mutants[name].kernel, text)) for text in texts]
            for name, texts in sources.items()
        }
        return {name: (one.result(), two.result()) for name, (one, two) in futures.items()}


def compile_text(spec: KernelSpec, source: str, worker: Any) -> Artifact:  # noqa: ANN401
    """Compile a text in the place of a kernel's, by a worker."""
    artifact: Artifact = worker.compile(source, name=spec.name, arch=spec.arch)
    return artifact


def run(mutant: Mutant, artifact: Artifact, seed: int, clock: Clock) -> None:
    """Verify a call of the mutant's kernel with `artifact` in its place."""
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[mutant.kernel] = kernels.Kernel(mutant.kernel, artifact)
    mutant.verify(seed, clock)


def judge(mutant: Mutant, whole: Artifact, wrong: Artifact, report: Callable[[str], None]) -> None:
    """Report `caught`, `survived`, or why it cannot be told.

    A kernel that hangs ends the process: `hung` is what is reported when the wrong one begins.
    """
    try:
        run(mutant, whole, seed=1, clock=clock)
    except AssertionError as error:
        report(f"the kernel is wrong without the fault, too: {error}")
        return
    try:
        run(mutant, wrong, seed=2, clock=partial(clock, partial(report, "hung")))
    except AssertionError:
        report("caught")
    else:
        report("survived")


def main(mutants: Mapping[str, Mutant]) -> None:
    """Print what became of the mutants named in the arguments, or of all: a line of JSON for each.

    The last line about a mutant is the one that counts.
    """
    chosen = {name: mutants[name] for name in sys.argv[1:] or mutants}
    artifacts = compiled(chosen)
    for name, mutant in chosen.items():
        judge(
            mutant,
            *artifacts[name],
            lambda found, name=name: print(json.dumps({name: found}), flush=True),
        )
