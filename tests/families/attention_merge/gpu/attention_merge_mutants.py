"""Kernels that are wrong in one place each, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import attention_merge_cases as cases
import torch

from warploom.generator import nvrtc
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels
from warploom.runtime import plan
from warploom.runtime.families.attention_merge.call import AttentionMergeCall

KERNEL = cases.spec()


@dataclass(frozen=True)
class Mutant:
    """A text that is in the kernel, what comes in its place, and a check that notices."""

    old: str
    new: str
    check: Callable[[KernelSpec], None]
    kernel: KernelSpec = KERNEL

    def sources(self) -> tuple[str, str]:
        """The text of the kernel, and of the one that is wrong."""
        whole = render(self.kernel)
        if whole.count(self.old) != 1:
            raise LookupError(f"{whole.count(self.old)} times in the text: {self.old}")
        return whole, whole.replace(self.old, self.new)


def plain(kernel: KernelSpec) -> None:
    """Rows that no block divides, with elements between them that are no one's."""
    cases.made(kernel, 3, 5, 67, pad=8).verify()


def nothing(kernel: KernelSpec) -> None:
    """Rows of which one side, or both, attended to nothing, and holds NaN."""
    made = cases.made(kernel, 40)
    call: AttentionMergeCall = made.call
    call.lse_a[:20], call.lse_b[10:30] = -torch.inf, torch.inf
    call.out_a[:20], call.out_b[10:30] = torch.nan, torch.nan
    made.verify()


def apart(kernel: KernelSpec) -> None:
    """Logarithms of which one counts alone."""
    made = cases.made(kernel, 40)
    made.call.lse_a[::2] += 300
    made.call.lse_b[1::2] += 300
    made.verify()


def in_place(kernel: KernelSpec) -> None:
    """Each row is read whole, by all of its threads, before it is written."""
    made = cases.made(kernel, 1000)
    call = made.call
    expected, logs = (one.clone() for one in made.verify())
    out, lse = call.out_a.clone(), call.lse_a.clone()
    plan.run(AttentionMergeCall(out, lse, call.out_b, call.lse_b, out, lse, spec=kernel))
    assert torch.equal(out, expected) and torch.equal(lse, logs)


MUTANTS = {
    "the last row is left out": Mutant("if (row >= p.rows)", "if (row + 1 >= p.rows)", plain),
    "rows past the last are written": Mutant(
        "if (row >= p.rows) return", "if (row > p.rows) return", plain
    ),
    "a step is another dimension's": Mutant("at1 * step1", "at1 * step2", plain),
    "lanes past the end of a row write": Mutant(
        "column >= kDim) break;\n    Values<Out>",
        "column > kDim) break;\n    Values<Out>",
        plain,
        cases.spec(96),
    ),
    "infinity is a large logarithm": Mutant(
        "return lse == infinity() ? -infinity() : lse", "return lse", nothing
    ),
    "what has no weight is multiplied": Mutant(
        "weight_a == 0.f ? 0.f : weight_a", "weight_a", nothing
    ),
    "the smaller logarithm is the base": Mutant(
        "fmaxf(log_a, log_b)", "fminf(log_a, log_b)", apart
    ),
    "the logarithm of the sum is lost": Mutant("base + logf(sum)", "base", plain),
}


def outcome(mutant: Mutant) -> str:
    """`caught`, `survived`, or what is wrong without the fault too."""
    whole, wrong = mutant.sources()
    try:
        _verify(mutant, whole)
    except AssertionError as error:
        return f"the kernel is wrong without the fault, too: {error}"
    try:
        _verify(mutant, wrong)
    except AssertionError:
        return "caught"
    return "survived"


def _verify(mutant: Mutant, source: str) -> None:
    """Check with the kernel of `source` in the place of the mutant's."""
    spec = mutant.kernel
    artifact = nvrtc.compile(source, name=spec.name, arch=spec.arch, toolchain=find())
    before = kernels._kernels.pop(spec, None)
    plan.forget()  # plans hold the kernel that was there before
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)
    try:
        mutant.check(spec)
    finally:
        del kernels._kernels[spec]
        if before is not None:
            kernels._kernels[spec] = before
        plan.forget()
