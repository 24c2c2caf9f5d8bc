"""The kernels that the gpu tests run, one table for each thing that can go wrong, and the shapes.

All are built before a test needs them, in parallel. Where choices have no bearing on each other,
their values take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import yaml
from gemm_cases import BACKWARD, FORWARD, ORDERS, QUANTISED, TWICE

from warploom.errors import SpecificationError
from warploom.generator.elements import element
from warploom.generator.epilogue import (
    Activation,
    Bias,
    EpilogueStep,
    Gate,
    MeanSquare,
    Residual,
    RmsScale,
    Scale,
    StochasticRounding,
    gate_of,
)
from warploom.generator.families.mixed_gemm import (
    FAMILY,
    MixedGemmOperation,
    MixedGemmSchedule,
    MixedGemmShape,
)
from warploom.generator.families.mixed_gemm.rules import operation_reasons
from warploom.generator.formats import weight_format
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose

Tile = tuple[int, int, int]  # m, n, k
Choice = tuple[Tile, str, str, dict[str, Any]]  # tile, instruction, what is scaled, and the rest
# m, n, k; k is rounded up to whole groups, n where D is stored by TMA, 16 bytes at a time.
PAIRWISE = Path(__file__).with_name("pairwise.yaml")
SHAPES: dict[str, tuple[int, int, int]] = {
    "single": (1, 1, 1),
    "whole": (64, 512, 256),
    "ragged": (17, 131, 193),
    "few rows": (5, 1000, 1051),
    "many k tiles": (61, 129, 4099),
    "many rows": (300, 712, 520),
    "more tiles than multiprocessors": (1531, 1003, 129),
    "thousands of rows": (4096, 264, 392),
}


def operation(
    *,
    a: str = "bf16",
    b: str = "int4",
    d: str | None = None,
    group: int = 128,
    scale: str = "bf16",
    epilogue: tuple[EpilogueStep, ...] = (),
) -> MixedGemmOperation:
    """Return an operation, legal or not; D is of A's type where that has 16 bits, else bf16."""
    d = d or (a if element(a).bits == 16 else "bf16")
    return MixedGemmOperation(a, b, d, group, scale, epilogue)  # type: ignore[arg-type]


def spec(
    tile: Tile,
    multiply: str,
    scaled: str,
    *,
    of: MixedGemmOperation | None = None,
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel; what is not given is the plainest, and as many stages as fit."""
    of = of or operation()
    fields = {"tile": tuple(tile), "multiply": multiply, "scaled": scaled, **schedule}
    return KernelSpec("sm_90a", of, FAMILY.complete("sm_90a", of, fields))


def short(kernel: KernelSpec) -> str:
    """The kernel's name without what all names share."""
    return kernel.name.removeprefix("mixed_gemm_sm90a_")[:-9]


def schedule(kernel: KernelSpec) -> MixedGemmSchedule:
    """How it is computed."""
    return cast("MixedGemmSchedule", kernel.schedule)


def stored_by_tma(kernel: KernelSpec) -> bool:
    """Whether D must have rows of whole 16 bytes."""
    return schedule(kernel).store == "tma"


def fitting(shape: tuple[int, int, int], kernel: KernelSpec) -> tuple[int, int, int]:
    """Return `shape` with the next k that has whole groups, and the next n that can be stored."""
    m, n, k = shape
    of = cast("MixedGemmOperation", kernel.operation)
    unit = 16 // element(of.d).bytes if stored_by_tma(kernel) else 1
    unit = 16 if gate_of(of.epilogue) else unit
    return m, n + -n % unit, k + -k % (of.group or 1)


# ---- Operations ----------------------------------------------------------------------------------

HINTS = get_type_hints(MixedGemmOperation)
PAIRS = [  # activations and weights that there are kernels for
    (a, b)
    for a, b in itertools.product(get_args(HINTS["a"]), get_args(HINTS["b"]))
    for row in (weight_format(b),)
    if not operation_reasons(operation(a=a, b=b, group=row.groups[0] or 0, scale=row.scales[0]))
]
PLAIN: list[Choice] = [  # of 16 bits: every way to scale
    ((16, 128, 128), "mma", "sums", {"ctas_per_sm": 2}),
    ((64, 128, 128), "wgmma", "sums", {}),
    ((8, 64, 256), "mma", "weights", {"warp_split_k": 2}),
    ((128, 128, 128), "wgmma", "weights", {}),
]

EIGHT: list[Choice] = [  # of 8 bits: every way to share k, and to store
    ((32, 64, 128), "wgmma", "sums", {"consumers": 1}),
    ((64, 128, 128), "wgmma", "sums", {}),
    ((64, 128, 256), "wgmma", "sums", {"stream_k": True}),
    ((16, 64, 256), "wgmma", "sums", {"warp_split_k": 2, "ctas_per_sm": 2, "cluster_split_k": 2}),
    ((128, 128, 128), "wgmma", "sums", {"store": "tma"}),
]
EIGHT += [  # of those, what e4m3 multiplies while weights are decoded
    ((128, 128, 256), "wgmma", "sums", {"lookahead": 2, "store": "tma"}),
    ((160, 128, 256), "wgmma", "sums", {"lookahead": 1}),
    ((128, 128, 128), "wgmma", "sums", {"lookahead": 1, "store": "tma"}),
    ((64, 128, 256), "wgmma", "sums", {"lookahead": 1, "stream_k": True}),
    ((64, 64, 512), "wgmma", "sums", {"lookahead": 2, "warp_split_k": 2, "cluster_split_k": 2}),
]


def legal(of: MixedGemmOperation, tile: Tile, multiply: str, scaled: str, **others: Any) -> bool:
    """Whether there is such a kernel of an operation."""
    try:
        spec(tile, multiply, scaled, of=of, **others)
    except SpecificationError:
        return False
    return True


def _scale(b: str, turn: int) -> str:
    scales = weight_format(b).scales
    return scales[turn % len(scales)]


def _formats() -> Iterator[KernelSpec]:
    """Every format by every type of activations, in every group, by every way to scale.

    Types of scales and instructions take turns; per channel there are all instructions.
    """
    turns = itertools.count()
    for a, b in PAIRS:
        row, table = weight_format(b), PLAIN if element(a).bits == 16 else EIGHT
        for group, scaled in itertools.product(row.groups, ("sums", "weights")):
            turn = next(turns)
            of = operation(a=a, b=b, group=group or 0, scale=_scale(b, turn))
            able = [one for one in table if one[2] == scaled and legal(of, *one[:3], **one[3])]
            count = 2 if group is None or len(row.groups) == 1 or table is EIGHT else 1
            for i in range(min(count, len(able))):
                tile, multiply, _, others = able[(turn // 2 + turn // 8 + i) % len(able)]
                yield spec(tile, multiply, scaled, of=of, **others)


FORMATS = list(_formats())


# ---- Schedules, with operations that take turns --------------------------------------------------


def _schedules() -> Iterator[KernelSpec]:
    """The kernels of pairwise.yaml, of the next operation that has them."""
    wide = itertools.cycle(one for one in PAIRS if element(one[0]).bits == 16)
    eight = itertools.cycle(one for one in PAIRS if one[0] == "e4m3")
    for i, fields in enumerate(yaml.safe_load(PAIRWISE.read_text())):
        group, pairs = fields.pop("of_k"), eight if "lookahead" in fields else wide
        turns = (operation(a=a, b=b, group=group, scale=_scale(b, i)) for a, b in pairs)
        of = next(of for of in itertools.islice(turns, len(PAIRS)) if legal(of, **fields))
        yield spec(of=of, **fields)


SCHEDULES = list(_schedules())
STREAMED = [one for one in (*SCHEDULES, *FORMATS) if schedule(one).stream_k]

# ---- Epilogues and outputs: every way in which a tile is finished --------------------------------

FINISHED: list[Choice] = [
    ((16, 128, 128), "mma", "sums", {"stream_k": True}),
    ((64, 128, 256), "wgmma", "sums", {"store": "tma"}),
    ((16, 64, 256), "mma", "sums", {"warp_split_k": 2}),
    ((64, 64, 128), "wgmma", "sums", {"consumers": 1, "cluster_split_k": 4}),
    ((128, 128, 128), "wgmma", "weights", {"store": "tma", "raster": "along_m", "swizzle_size": 3}),
    ((24, 128, 128), "mma", "weights", {"consumers": 2, "cluster_split_k": 4}),
    ((40, 128, 128), "wgmma", "weights", {"stream_k": True}),
]
ROUNDED = (Bias("fp32"), StochasticRounding())
STEPS = (*ORDERS.values(), FORWARD, BACKWARD, TWICE, QUANTISED, ROUNDED)
EPILOGUES = [
    spec(tile, multiply, scaled, of=operation(a=a, epilogue=steps), **others)
    for i, steps in enumerate(STEPS)
    for j, a in ((0, "bf16"), (3, "fp16"), (5, "bf16"))
    for tile, multiply, scaled, others in (FINISHED[(i + j) % len(FINISHED)],)
]
EPILOGUES += [  # of activations of 8 bits, with a scale for each row
    spec(tile, multiply, scaled, of=operation(a=a, epilogue=ORDERS[name]), **others)
    for a, name, choice in (
        *(("e4m3", "vectors", i) for i in (1, 3)),
        *(("int8", "layer", i) for i in (0, 3)),
    )
    for tile, multiply, scaled, others in (EIGHT[choice],)
]
NORMS = [  # RMSNorm through two epilogues
    spec(tile, multiply, scaled, of=operation(a=a, epilogue=steps), **others)
    for i, (tile, multiply, scaled, others) in enumerate(FINISHED)
    for a, steps in (
        ("bf16" if i % 2 else "fp16", (Residual("bf16"), MeanSquare())),
        ("fp16" if i % 2 else "bf16", (RmsScale(), Bias("fp32"))),
    )
]
NORMS += [
    spec((16, 128, 256), "mma", "sums", of=operation(epilogue=steps), consumers=4, warp_split_k=2)
    for steps in ((Residual("bf16"), MeanSquare()), (RmsScale(),))
]
GATED = [  # rows of gate and up take turns in W
    spec(tile, multiply, scaled, of=operation(a=a, epilogue=steps), **{**others, "store": "direct"})
    for i, (tile, multiply, scaled, others) in enumerate(FINISHED)
    for a, steps in (
        ("bf16", (Gate("silu", "interleaved"),)),
        ("fp16", (Bias("bf16"), Gate(("gelu", "swiglu_oai")[i % 2], "interleaved"), Scale("row"))),
    )
]
GATED += [  # of rows that are divided by a root first
    spec(tile, multiply, scaled, of=operation(a=a, epilogue=steps), **{**others, "store": "direct"})
    for i, (tile, multiply, scaled, others) in enumerate(FINISHED)
    for a, steps in (
        ("bf16", (RmsScale(), Gate("silu", "interleaved"))),
        (
            "fp16",
            (RmsScale(), Bias("bf16"), Gate(("gelu", "swiglu_oai")[i % 2], "interleaved")),
        ),
    )
]
GATED += [
    spec((16, 128, 256), "mma", "sums", of=GATED[-2].operation, consumers=4, warp_split_k=2),  # type: ignore[arg-type]
]
GATED += [
    spec((16, 64, 256), "mma", "sums", of=operation(epilogue=GATED[0].operation.epilogue), **how)  # type: ignore[attr-defined]
    for how in ({"warp_split_k": 2, "ctas_per_sm": 2}, {"warp_split_k": 2, "stream_k": True})
]
OUTPUTS = [
    spec(tile, multiply, scaled, of=operation(d=d, epilogue=steps), **{**others, "store": "direct"})
    for i, (d, steps) in enumerate(
        itertools.product(("fp16", "fp32", "e4m3", "e5m2", "int8"), ((), QUANTISED))
    )
    for tile, multiply, scaled, others in (FINISHED[i % len(FINISHED)],)
]
SIMPLE = {  # for tests of something else than the kernel itself
    "few": spec((16, 128, 128), "mma", "sums", ctas_per_sm=2, stream_k=True),
    "some": spec((64, 128, 256), "wgmma", "sums", stream_k=True),
    "many": spec((256, 128, 128), "wgmma", "weights", store="tma"),
    "split": spec((16, 64, 128), "mma", "sums", consumers=1, cluster_split_k=8),
    "shared": spec((16, 64, 256), "mma", "sums", warp_split_k=2, ctas_per_sm=2),
    "ahead": spec((64, 128, 256), "wgmma", "sums", of=operation(a="e4m3"), lookahead=2),
    "layer": spec(
        (16, 128, 128), "mma", "sums", of=operation(epilogue=ORDERS["layer"]), stream_k=True
    ),
    "residual": spec((32, 128, 128), "wgmma", "sums", of=operation(epilogue=(Residual("bf16"),))),
}


# ---- What the table has --------------------------------------------------------------------------


def chosen(of: MixedGemmOperation, shape: tuple[int, int, int]) -> KernelSpec:
    """Return the kernel that the table has for a shape on an H200, D contiguous."""
    at = MixedGemmShape(*shape)
    return choose(of, at, requires=FAMILY.table.required(of, at)).spec


CHOSEN_SHAPES = [(1, 4096, 2048), (16, 1000, 4096), (48, 136, 640), (300, 2048, 1024)]
CHOSEN_SHAPES += [(2047, 1016, 512)]
CHOSEN: list[tuple[KernelSpec, tuple[int, int, int]]] = [  # of int4 all, of others two each
    (chosen(of, shape), shape)
    for i, (a, b) in enumerate(PAIRS)
    for of in (operation(a=a, b=b, group=weight_format(b).groups[0] or 0, scale=_scale(b, 0)),)
    for j, shape in enumerate(CHOSEN_SHAPES)
    if (a, b) == ("bf16", "int4") or (i + j) % 5 in (0, 2)
]
LAYER = (Bias("bf16"), Activation("silu"))
# What tests that name no kernel ask the table for: a kernel that is missing here is compiled by the
# test itself, which takes a second.
ASKED = [
    chosen(operation(epilogue=steps), (m, 136, 256))
    for m, steps in ((1, ()), (17, ()), (43, ()), (86, ()), (258, ()), (17, LAYER))
]

USUAL = list(
    dict.fromkeys(
        (
            *FORMATS,
            *EPILOGUES,
            *NORMS,
            *GATED,
            *OUTPUTS,
            *SIMPLE.values(),
            *(one for one, _ in CHOSEN),
            *ASKED,
        )
    )
)
ALL = [*USUAL, *(kernel for kernel in SCHEDULES if kernel not in USUAL)]
