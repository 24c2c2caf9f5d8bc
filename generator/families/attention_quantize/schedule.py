"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import element
from warploom.generator.knob import frozen, knob
from warploom.generator.specification import KernelSpec

Scores = Literal["int8", "e4m3", "none"]

TILE = 128  # rows of q, or keys, of a CTA: so many keys share a scale
VALUES = 16  # that a thread quantizes at once: 16 bytes of the result
CHUNK = 256  # keys of a partial sum: the same on every GPU, and so are the bits of a mean


@frozen
class AttentionQuantizeOperation:
    """What is computed: q and k in 8 bits with scales, and v in e4m3, transposed. Arithmetic is
    fp32.
    """

    element: Literal["fp16", "bf16", "e4m3"] = knob(
        doc="element type of the q, k and v that are read; e4m3: there is only v, which is "
        "transposed as it is"
    )
    dim: int = knob(
        name="d{}",
        least=16,
        most=256,
        doc="elements of a row, a multiple of 32; where there is only v, of 16",
    )
    scores: Scores = knob(
        name="scores_{}",
        doc="element type of the quantized q and k; none: only v is converted",
    )
    smooth: bool = knob(
        default=False, doc="subtract the mean of k over all keys before k is quantized"
    )
    lengths: Literal["fixed", "packed"] = knob(
        default="fixed",
        name="{}",
        later=True,
        doc="whether sequences have one length, or (varlen) follow each other at the offsets in "
        "cu_seqlens; only where there is only v",
    )
    family: Literal["attention_quantize"] = knob(
        default="attention_quantize", doc="the kernel family"
    )

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized: else v is transposed as it is."""
        return self.element != "e4m3"

    @property
    def lanes(self) -> int:
        """Threads that share a row: a power of two, of which the last may have nothing."""
        return 1 << (self.dim // VALUES - 1).bit_length()

    def row_bytes(self) -> int:
        """Bytes that are moved for one row of q, of k or of v, where it is read once."""
        return self.dim * (element(self.element).bytes + 1)


@frozen
class AttentionQuantizeSchedule:
    """How it is computed: a CTA quantizes 128 rows of one head."""

    threads: Literal[64, 128, 256, 512] = knob(
        name="threads{}",
        auto=True,
        doc="threads of a CTA; auto: so many that each works on four rows at a time",
    )

    @property
    def tile(self) -> tuple[int]:
        """Rows of a CTA."""
        return (TILE,)


AttentionQuantizeSpec = KernelSpec[AttentionQuantizeOperation, AttentionQuantizeSchedule]
