"""The attention kernels that the gpu tests run, and the shapes; tables vary one thing each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, cast

from warploom.generator.families import family
from warploom.generator.families._attention import DIMS, UNLIKE_DIMS
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose
from warploom.runtime.families._attention.mask import Band, shape
from warploom.runtime.families._attention.problem import Extents

ARCH = "sm_90a"


@dataclass(frozen=True)
class Shape:
    """Extents of a call; a prime or an odd one in each, but for those named after their length."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int


SHAPES: dict[str, Shape] = {
    "1": Shape(1, 1, 1, 1, 1),
    "63": Shape(3, 2, 1, 63, 63),
    "64": Shape(1, 2, 2, 64, 64),
    "65": Shape(2, 3, 1, 65, 65),
    "127": Shape(1, 5, 5, 127, 127),
    "1000": Shape(1, 2, 1, 1000, 1000),
    "one row": Shape(2, 8, 2, 1, 257),
    "few rows": Shape(3, 4, 2, 65, 1021),
    "few columns": Shape(1, 3, 3, 1000, 63),
    "more tiles than multiprocessors": Shape(5, 33, 11, 257, 193),
}
LONG = Shape(1, 2, 1, 4097, 4097)
EMPTY: dict[str, Shape] = {
    "no batch": Shape(0, 2, 1, 65, 65),
    "no heads": Shape(2, 0, 0, 65, 65),
    "no rows": Shape(2, 2, 1, 0, 65),
    "no columns": Shape(2, 2, 1, 65, 0),
}
# By the mask of a kernel: what calls of it ask for.
MASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "none": ({},),
    "causal": (
        {"causal": "bottom_right"},
        {"causal": "top_left"},
        {"window": (None, 70)},
    ),
    "window": (
        {"window": (70, 5)},
        {"window": (0, 0)},
        {"window": (3, 200)},
        {"window": (129, None), "causal": "bottom_right"},
        {"window": (64, 64), "causal": "top_left"},
    ),
}


def spec(
    q_tile: int,
    kv_tile: int,
    *,
    element: str = "bf16",
    dim: int = 64,
    mask: str = "none",
    softcap: bool = False,
    lengths: str = "fixed",
    further: dict[str, Any] | None = None,
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel by its tile; ping-pong where there are warpgroups to take turns."""
    told = (element, dim, mask, softcap, lengths)
    wanted = AttentionOperation(*told, **(further or {}))  # type: ignore[arg-type]
    fields = {"q_tile": q_tile, "kv_tile": kv_tile, "pingpong": q_tile > 64, **schedule}
    return KernelSpec(ARCH, wanted, family(wanted.family).complete(ARCH, wanted, fields))


def chosen(
    dim: int,
    *,
    element: str = "bf16",
    mask: str = "none",
    softcap: bool = False,
    lengths: str = "fixed",
    seq: int = 4096,
    further: dict[str, Any] | None = None,
) -> KernelSpec:
    """Return the kernel that the table has for sequences of one length."""
    sizes = Extents(1, 1, 1, seq, seq, dim, seq, seq, packed=lengths == "packed")
    told = (element, sizes.kernel_dims[0], mask, softcap, lengths)
    wanted = AttentionOperation(*told, **(further or {}))  # type: ignore[arg-type]
    return choose(wanted, shape(sizes, Band())).spec


def operation(kernel: KernelSpec) -> AttentionOperation:
    """The operation of an attention kernel."""
    return cast("AttentionOperation", kernel.operation)


def short(kernel: KernelSpec) -> str:
    """The kernel's name without what all names share."""
    return kernel.name.removeprefix("attention_forward_sm90a_")[:-9]


_element = cycle(("bf16", "fp16"))
OPERATIONS = [
    *(
        chosen(dim, element=next(_element), mask=mask)
        for dim, mask in product(DIMS, ("none", "causal", "window"))
    ),
    *(chosen(128, element=element, mask="causal") for element in ("bf16", "fp16")),
]
SOFTCAPS = [
    chosen(dim, element=element, mask=mask, softcap=True)
    for dim, element, mask in (
        (64, "bf16", "none"),
        (128, "fp16", "causal"),
        (128, "bf16", "window"),
        (256, "bf16", "causal"),
    )
]
PACKED = [
    *(
        chosen(dim, element=next(_element), mask=mask, lengths="packed")
        for dim, mask in product((64, 128, 256), ("none", "causal", "window"))
    ),
    chosen(96, mask="causal", softcap=True, lengths="packed"),
]
_sinks = cycle(("same", "fp32"))
SINKS = [
    chosen(
        dim,
        element=next(_element),
        mask=mask,
        softcap=dim == 96,
        lengths=lengths,
        further={"sinks": next(_sinks)},
    )
    for (dim, mask), lengths in product(
        zip(DIMS, cycle(("none", "causal", "window")), strict=False), ("fixed", "packed")
    )
]
FURTHER: tuple[dict[str, Any], ...] = (  # what changes scores, one by one and together
    {"alibi": True},
    {"bias": "bf16"},
    {"masked": True},
    {"bias": "fp32", "masked": True},
    {"bias": "fp16", "alibi": True, "sinks": "same"},
)
_further = cycle(FURTHER)
SCORED = [
    *(
        chosen(
            dim,
            element=next(_element),
            mask=mask,
            lengths=lengths,
            softcap=dim == 64,
            further=next(_further),
        )
        for (dim, mask), lengths in product(
            product(DIMS, ("none", "causal", "window")), ("fixed", "packed")
        )
        if (dim, mask) != (32, "window")
    ),
    *(chosen(128, further=further) for further in FURTHER),
]
DROPOUT = [
    *(
        chosen(dim, element=next(_element), mask=mask, lengths=lengths, further={"dropout": True})
        for (dim, mask), lengths in product(
            zip(DIMS, cycle(("none", "causal", "window")), strict=False), ("fixed", "packed")
        )
    ),
    chosen(64, mask="causal", softcap=True, further={"dropout": True}),
    chosen(128, mask="causal", further={"dropout": True, "sinks": "fp32"}),
]
# Three of these for each dim: two bits of 16 and a byte, or what of them is most, beside words.
BESIDE: tuple[dict[str, Any], ...] = (
    *FURTHER,
    {"bias": "bf16", "masked": True},
    {"bias": "fp32", "masked": True, "alibi": True},
)
COMBINED = [
    chosen(
        dim,
        element=("bf16", "fp16")[index % 2],
        mask=("none", "causal", "window")[index % 3],
        lengths=("fixed", "packed")[index // 2 % 2],
        softcap=index % 7 == 3,
        further={"dropout": True, **BESIDE[index % 7]},
    )
    for index, dim in enumerate(dim for dim in DIMS for _ in range(3))
]
SCHEDULES = [
    spec(q_tile, kv_tile, dim=dim, mask="causal", **others)
    for q_tile, kv_tile, dim, others in (
        (64, 16, 64, {"scheduler": "single"}),
        (64, 64, 128, {"overlap": False, "stages": 1}),
        (64, 128, 64, {"stages": 3}),
        (64, 80, 256, {"scheduler": "dynamic"}),
        (128, 48, 64, {"stages": 4, "scheduler": "dynamic"}),
        (128, 112, 128, {"overlap": False}),
        (128, 112, 128, {"pingpong": False}),
        (128, 112, 128, {"pingpong": False, "overlap": False, "scheduler": "dynamic"}),
        (128, 128, 64, {"stages": 3, "scheduler": "single"}),
        (128, 64, 256, {"pingpong": False}),
        (192, 64, 64, {"scheduler": "dynamic"}),
        (192, 80, 32, {"overlap": False, "scheduler": "single"}),
        (192, 128, 32, {"pingpong": False}),
    )
]
RESCALES = [  # by how they rescale the output
    *(chosen(dim, mask=mask) for dim, mask in product((64, 128, 256), ("none", "causal"))),
    spec(128, 112, dim=128, mask="causal", rescale="needed", overlap=False),
    spec(128, 80, dim=256, rescale="always"),
]
SIMPLE = {  # for tests of something else than the kernel itself
    "none": chosen(64, seq=512),
    "causal": chosen(64, mask="causal", seq=512),
    "long": chosen(128, mask="causal"),
    "packed": chosen(64, mask="causal", lengths="packed", seq=512),
    "dynamic": spec(128, 64, dim=64, mask="causal", scheduler="dynamic"),
}
OTHER_DIMS = (8, 40, 72, 104, 136, 200)
SHORT = [chosen(dim, mask=mask, seq=512) for dim in OTHER_DIMS for mask in ("none", "causal")]

# v of another dimension than q and k: by masks and lengths, beside modifiers, and by schedules.
UNLIKE = [
    *(
        chosen(
            dim,
            element=next(_element),
            mask=mask,
            lengths=lengths,
            further={"dim_v": dim_v},
            seq=seq,
        )
        for (dim, dim_v), mask, (lengths, seq) in product(
            UNLIKE_DIMS, ("none", "causal", "window"), (("fixed", 512), ("packed", 8192))
        )
    ),
    *(
        chosen(
            dim,
            element=next(_element),
            mask="none" if "blocks" in further else "causal",
            softcap=dim == 96,
            further={"dim_v": dim_v, **further},
        )
        for (dim, dim_v), further in product(
            UNLIKE_DIMS,
            (
                {"sinks": "fp32"},
                {"alibi": True},
                {"bias": "bf16"},
                {"masked": True},
                {"bias": "fp32", "masked": True, "dropout": True},
                {"dropout": True},
                {"blocks": True},
            ),
        )
    ),
    *(
        spec(q_tile, kv_tile, dim=dim, mask="causal", further={"dim_v": dim_v}, **others)
        for q_tile, kv_tile, (dim, dim_v), others in (
            (128, 112, (192, 128), {"overlap": False, "scheduler": "single"}),
            (128, 64, (192, 128), {"pingpong": False, "stages": 3}),
            (64, 16, (192, 128), {"scheduler": "dynamic"}),
            (192, 80, (192, 128), {"scheduler": "dynamic"}),
            (64, 64, (96, 64), {"overlap": False, "stages": 1}),
            (128, 160, (96, 64), {"rescale": "needed"}),
            (192, 64, (128, 64), {"pingpong": False, "overlap": False}),
            (128, 48, (64, 128), {"stages": 4}),
        )
    ),
]

ALL = list(
    dict.fromkeys(
        (
            *OPERATIONS,
            *SOFTCAPS,
            *PACKED,
            *SINKS,
            *SCORED,
            *DROPOUT,
            *COMBINED,
            *SCHEDULES,
            *RESCALES,
            *SIMPLE.values(),
            *SHORT,
            *UNLIKE,
        ),
    )
)
# Of the rows and of the columns of packed sequences.
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "equal": ([65, 1, 128, 63, 200], [65, 1, 128, 63, 200]),
    "other keys": ([65, 1, 128, 63, 200], [5, 300, 127, 64, 1]),
    "some empty": ([0, 65, 0, 7, 0], [3, 0, 0, 130, 9]),
    "one": ([1000], [1000]),
    "many": ([1 + 7 * i % 50 for i in range(40)], [1 + 11 * i % 70 for i in range(40)]),
}
