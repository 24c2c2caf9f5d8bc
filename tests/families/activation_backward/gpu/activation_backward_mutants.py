"""Kernels that are wrong in one place each, and what becomes of them.

What a mutant does not wait for may have come by then, and its results be right by luck. So a kernel
is made to pause where the fault lies: with the pause, and without the fault, it must be right.
"""

from __future__ import annotations

from dataclasses import dataclass

import activation_backward_cases as cases

from warploom.generator import nvrtc
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels
from warploom.runtime import plan

Edit = tuple[str, str]  # a text that is in the kernel, and what comes in its place
KERNEL = cases.spec("gelu_tanh")


@dataclass(frozen=True)
class Mutant:
    """What is wrong with a kernel, where it pauses, and extents that make that show."""

    wrong: Edit
    m: int
    n: int
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = KERNEL

    def sources(self) -> tuple[str, str]:
        """The text of the kernel that pauses, and of the one that is wrong too."""
        whole = render(self.kernel)
        for edit in self.pauses:
            whole = _edited(whole, edit)
        return whole, _edited(whole, self.wrong)


def _edited(text: str, edit: Edit) -> str:
    old, new = edit
    if text.count(old) != 1:
        raise LookupError(f"{text.count(old)} times in the text of the kernel: {old}")
    return text.replace(old, new)


ADD = "  // The sums of the threads that share columns, added from the first row on.\n"
PAUSE = "  for (const auto since = clock64(); clock64() - since < 30000;) {}\n"
SYNC = "  __syncthreads();\n  for (int i = threadIdx.x;"
SYNC_PARTS = "  shared[group][lane] = sum;\n  __syncthreads();\n"
ENTRY = "_sums(const __grid_constant__ Parameters p) {\n"
WAIT = '  asm volatile("griddepcontrol.wait;\\ngriddepcontrol.launch_dependents;" ::: "memory");\n'

MUTANTS = {
    "the last row of a part is left out": Mutant(
        wrong=("at >= last) break;", "at + 1 >= last) break;"), m=8192, n=4096
    ),
    "rows are added before all threads have laid down theirs": Mutant(
        wrong=(SYNC, SYNC.partition("\n")[2]),
        m=1031,
        n=520,
        pauses=((ADD, "  if (threadIdx.x >= 32)\n  " + PAUSE + ADD),),
    ),
    "parts are added before all groups have laid down theirs": Mutant(
        wrong=(SYNC_PARTS, SYNC_PARTS.partition("\n")[0] + "\n"),
        m=8192,
        n=4096,
        pauses=((SYNC_PARTS, "  if (group > 0)\n  " + PAUSE + SYNC_PARTS),),
    ),
    "parts are added before they are there": Mutant(
        wrong=(ENTRY + WAIT, ENTRY), m=8192, n=4096, pauses=((ADD, PAUSE + ADD),)
    ),
    "parts past the first of each group are left out": Mutant(
        wrong=("part += kGroups) sum", "part += p.parts) sum"), m=100_003, n=64
    ),
}


def outcome(mutant: Mutant) -> str:
    """`caught`, `survived`, or what is wrong without the fault too."""
    whole, wrong = mutant.sources()
    try:
        _verify(mutant, whole, seed=1)
    except AssertionError as error:
        return f"the kernel is wrong without the fault, too: {error}"
    try:
        _verify(mutant, wrong, seed=2)
    except AssertionError:
        return "caught"
    return "survived"


def _verify(mutant: Mutant, source: str, seed: int) -> None:
    """Verify a call with the kernel of `source` in the place of the mutant's."""
    spec = mutant.kernel
    artifact = nvrtc.compile(source, name=spec.name, arch=spec.arch, toolchain=find())
    before = kernels._kernels.pop(spec, None)
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)
    try:
        cases.made(spec, mutant.m, mutant.n, seed=seed).verify()
    finally:
        del kernels._kernels[spec]
        if before is not None:
            kernels._kernels[spec] = before
        plan.forget()
