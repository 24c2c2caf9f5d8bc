"""What is computed and how (fields of YAML, of names and of a search), and what of it is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from warploom.generator import rules
from warploom.generator.architectures import Architecture
from warploom.generator.elements import element
from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.knob import frozen, knob
from warploom.generator.shapes import Shape
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


# ---- The shape of a problem ----------------------------------------------------------------------

Strides = tuple[int, int, int]  # elements from batch to batch, head to head, row to row
NONE: Strides = (0, 0, 0)  # of a tensor that there is not


@dataclass(frozen=True, slots=True, order=True)
class AttentionQuantizeShape(Shape):
    """Batches, heads and rows of q, and of k and v; without q, where v is alone.

    Packed: as many sequences as batches, which have seq_k keys on average.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"heads", "seq_q"})

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int


@dataclass(frozen=True, slots=True)
class AttentionQuantizeProblem:
    """The sizes of one call, and the strides of what it reads and of q and k in 8 bits.

    The transposed v and everything in fp32 is dense. Packed: of one batch with the keys of all
    sequences.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    strides_v: Strides
    strides_q: Strides = NONE
    strides_k: Strides = NONE
    strides_q_out: Strides = NONE
    strides_k_out: Strides = NONE
    sequences: int = 0  # packed

    @property
    def groups(self) -> int:
        """Heads of k and v, of all batches."""
        return self.batch * self.kv_heads

    @property
    def tiles_q(self) -> int:
        """Tiles of rows of q, of one head."""
        return -(-self.seq_q // TILE)

    @property
    def tiles_k(self) -> int:
        """Tiles of keys, of one head; packed sequences begin at tiles of their own."""
        if self.sequences:
            return padded_total(self.seq_k, self.sequences) // TILE
        return -(-self.seq_k // TILE)


# ---- What is legal -------------------------------------------------------------------------------

MOST_VECTORS = 8  # rows of which a thread holds 16 values at a time: 64 registers
USUAL_VECTORS = 4


def operation_reasons(operation: AttentionQuantizeOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    reasons = [rules.multiple_of("dim", operation.dim, 32 if operation.quantizes else VALUES)]
    if operation.quantizes and operation.scores == "none":
        reasons.append(f"scores none of element {operation.element}: must be int8 or e4m3")
    if not operation.quantizes and operation.scores != "none":
        reasons.append(f"scores {operation.scores} of element e4m3: must be none, as v is alone")
    if operation.quantizes and operation.lengths == "packed":
        reasons.append(f"lengths packed of element {operation.element}: only e4m3 v has them")
    if operation.smooth and operation.scores == "none":
        reasons.append("smooth with scores none: must be left out, as there is no k")
    return rules.broken(reasons)


def schedule_reasons(
    arch: Architecture, operation: AttentionQuantizeOperation, schedule: AttentionQuantizeSchedule
) -> list[str]:
    """Why the schedule does not fit the operation; empty when it does."""
    least, most = TILE * operation.lanes // MOST_VECTORS, TILE * operation.lanes
    if least <= schedule.threads <= most:
        return []
    return [f"threads {schedule.threads} of dim {operation.dim}: must be {least} to {most}"]


def complete(
    arch: str, operation: AttentionQuantizeOperation, fields: Mapping[str, Any]
) -> AttentionQuantizeSchedule:
    """`threads: auto`: so many that each has four rows of a tile."""
    given = {name: value for name, value in fields.items() if value != "auto"}
    threads: Any = max(64, TILE * operation.lanes // USUAL_VECTORS)
    return AttentionQuantizeSchedule(**{"threads": threads, **given})
