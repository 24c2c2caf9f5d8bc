"""Kernels that are wrong in one place each, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import attention_append_cases as cases
import torch
from attention_append_cases import FULL, PAGED, PLAIN

from warploom.generator import nvrtc
from warploom.generator.families.attention_append import AttentionAppendOperation
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels
from warploom.runtime import plan


def plain(kernel: KernelSpec) -> None:
    """Sequences of which some are full, and one is left out."""
    cases.made(kernel, (3, -1, 31, 47, 46, 48), (2,)).verify()


def packed(kernel: KernelSpec) -> None:
    """Tokens of sequences, and some that are of none."""
    made = cases.made(kernel, (3, 0, 31, 17, 45), (2, 0, 3, 1))
    assert made.call.cu_seqlens is not None
    made.call.cu_seqlens -= torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32)
    made.verify()


def past_the_pages(kernel: KernelSpec) -> None:
    """A table with the first page that there is not."""
    made = cases.made(kernel)
    assert made.call.page_table is not None
    made.call.page_table[1, 0] = made.call.k_cache.shape[0]
    made.verify()


@dataclass(frozen=True)
class Mutant:
    """A text that is in the kernel, what comes in its place, and a check that notices."""

    old: str
    new: str
    operation: AttentionAppendOperation = PLAIN
    check: Callable[[KernelSpec], None] = plain

    @property
    def kernel(self) -> KernelSpec:
        """The kernel that is made wrong."""
        return cases.spec(self.operation)

    def sources(self) -> tuple[str, str]:
        """The text of the kernel, and of the one that is wrong."""
        whole = render(self.kernel)
        if whole.count(self.old) != 1:
            raise LookupError(f"{whole.count(self.old)} times in the text: {self.old}")
        return whole, whole.replace(self.old, self.new)


LARGEST = "fmaxf(fabsf(one[i]), fabsf(other[i]))"
MUTANTS = {
    "a row past the end is written": Mutant("position < p.capacity", "position <= p.capacity"),
    "a sequence that is left out is written": Mutant("length >= 0 && ", ""),
    "a page that there is not is written": Mutant(
        "page < p.pages", "page <= p.pages", PAGED, past_the_pages
    ),
    "the last token of a sequence is left out": Mutant("index < p.seq", "index + 1 < p.seq"),
    "tokens of no sequence are written": Mutant(
        " && token < p.cu_seqlens[sequence + 1]", "", FULL, packed
    ),
    "a sequence without tokens has those of the next": Mutant(
        "ahead] <= token", "ahead] < token", FULL, packed
    ),
    "rows are turned the other way": Mutant(
        "__fsub_rn(__fmul_rn(x", "__fadd_rn(__fmul_rn(x", PAGED
    ),
    "what is not turned is": Mutant("value ? 0 : p.rotary", "p.rotary", PAGED),
    "half of a row has no say in its scale": Mutant(LARGEST, "fabsf(one[i])", FULL, packed),
    "neighbours have no say in the scale of a row": Mutant("step > 0", "step > 1", FULL, packed),
    "all heads have the scale of the first": Mutant(
        "head * p.head_step", "0 * p.head_step", replace(PLAIN, cache="e4m3", scales="head")
    ),
    "lengths afterwards are those before": Mutant("length : length + p.seq", "length : length"),
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
