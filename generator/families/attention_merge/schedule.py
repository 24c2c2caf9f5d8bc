"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.epilogue import Float
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

VALUES = 8  # of a row, that a thread moves at once: 16 bytes of 16-bit types


@frozen
class AttentionMergeOperation:
    """What is computed: the attention output over the keys of both a and b, from the outputs and
    log-sum-exps over each. Arithmetic is fp32.
    """

    a: Float = knob(name="{}|{}_{}_{}", doc="element type of out_a [.., dim]")
    b: Float = knob(name="", doc="element type of out_b [.., dim]")
    out: Float = knob(name="", doc="element type of the result [.., dim]")
    dim: int = knob(name="d{}", least=8, most=512, doc="elements of a row, a multiple of 8")
    family: Literal["attention_merge"] = knob(default="attention_merge", doc="the kernel family")

    @property
    def row_bytes(self) -> int:
        """Bytes that are moved for one row: three results and three log-sum-exps."""
        moved = sum(element(name).bytes for name in (self.a, self.b, self.out))
        return self.dim * moved + 3 * 4


@frozen
class AttentionMergeSchedule:
    """How it is computed: a row is shared by some threads of a warp."""

    threads: Literal[64, 128, 256, 512] = knob(name="{}x{}", doc="threads of a CTA")
    lanes: Literal[1, 2, 4, 8, 16, 32] = knob(
        name="",
        auto=True,
        doc="threads of a warp that share a row, 8 elements each at a time; auto: as many as "
        "the row has groups of 8, at most 32",
    )

    @property
    def tile(self) -> tuple[int]:
        """Rows of one block."""
        return (self.threads // self.lanes,)


AttentionMergeSpec = KernelSpec[AttentionMergeOperation, AttentionMergeSchedule]
