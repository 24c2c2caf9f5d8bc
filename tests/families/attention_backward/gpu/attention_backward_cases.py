"""The backward kernels that the gpu tests run; their shapes and masks are those of the forward."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any, cast

import attention_cases
from attention_cases import ARCH, OTHER_DIMS, Shape

from warploom.generator.families import family
from warploom.generator.families._attention import DIMS
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose
from warploom.runtime.families._attention.mask import Band, shape
from warploom.runtime.families._attention.problem import Extents


def wanted(
    dim: int,
    *,
    element: str = "bf16",
    mask: str = "none",
    softcap: bool = False,
    lengths: str = "fixed",
    deterministic: bool = False,
    further: dict[str, Any] | None = None,
) -> AttentionBackwardOperation:
    """Return an operation by what is not as usual."""
    fields: Any = (element, dim, mask, softcap, lengths, deterministic)
    return AttentionBackwardOperation(*fields, **(further or {}))


def chosen(dim: int, *, seq: int = 4096, sharing: int = 1, **others: Any) -> KernelSpec:
    """Return the kernel that the table has for sequences of one length, and heads that share."""
    packed = others.get("lengths") == "packed"
    sizes = Extents(1, sharing, 1, seq, seq, dim, seq, seq, packed)
    return choose(wanted(sizes.kernel_dims[0], **others), shape(sizes, Band())).spec


def spec(dim: int, fields: dict[str, Any], **others: Any) -> KernelSpec:
    """Return a kernel by the fields of its schedule."""
    operation = wanted(dim, **others)
    schedule = family(operation.family).complete(ARCH, operation, fields)
    return KernelSpec(ARCH, operation, schedule)


def operation(kernel: KernelSpec) -> AttentionBackwardOperation:
    """The operation of a backward kernel."""
    return cast("AttentionBackwardOperation", kernel.operation)


def short(kernel: KernelSpec) -> str:
    """The kernel's name without what all names share."""
    return kernel.name.removeprefix("attention_backward_sm90a_")[:-9]


_element = cycle(("bf16", "fp16"))
_mask = cycle(("causal", "none", "window"))
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
DETERMINISTIC = [
    *(
        chosen(dim, element=next(_element), mask=next(_mask), deterministic=True)
        for dim in (*DIMS, *DIMS)
    ),
    chosen(64, mask="causal", softcap=True, deterministic=True),
]
PACKED = [
    *(
        chosen(dim, element=next(_element), mask=mask, lengths="packed")
        for dim, mask in product((64, 128, 256), ("none", "causal", "window"))
    ),
    chosen(96, mask="causal", softcap=True, lengths="packed"),
    *(chosen(dim, mask="causal", lengths="packed", deterministic=True) for dim in (64, 128, 256)),
]
_sinks = cycle(("same", "fp32"))
SINKS = [
    chosen(
        dim,
        element=next(_element),
        mask=next(_mask),
        softcap=dim == 96,
        lengths=lengths,
        deterministic=dim == 64,
        further={"sinks": next(_sinks)},
    )
    for dim, lengths in product(DIMS, ("fixed", "packed"))
]
_further = cycle(
    {**one, "bias_gradient": True} if "bias" in one else one for one in attention_cases.FURTHER
)
SCORED = [
    *(
        chosen(
            dim,
            element=next(_element),
            mask=mask,
            lengths=lengths,
            deterministic=dim == 96,
            sharing=1 + dim // 128,
            further=next(_further),
        )
        for (dim, mask), lengths in product(
            product(DIMS, ("none", "causal", "window")), ("fixed", "packed")
        )
        if (dim, mask) != (32, "window")
    ),
    *(
        chosen(dim, softcap=True, mask="causal", lengths=lengths, further=further)
        for dim, lengths in ((64, "packed"), (128, "fixed"), (256, "fixed"))
        for further in ({"alibi": True}, {"bias": "bf16", "masked": True})
    ),
]
_MASKED: dict[str, Any] = {"masked": True}
KEYS = [  # of masks of keys
    *(chosen(dim, mask=next(_mask), further=_MASKED) for dim in DIMS),
    chosen(64, mask="causal", softcap=True, further=_MASKED),
    chosen(128, element="fp16", further=_MASKED),
    chosen(128, sharing=8, further=_MASKED),
    spec(128, {"q_tile": 64, "kv_tile": 128, "cluster": 2}, further=_MASKED),
    *(chosen(dim, lengths="packed", mask=next(_mask), further=_MASKED) for dim in (64, 128, 256)),
    *(
        chosen(dim, mask=mask, lengths=lengths, deterministic=True, further=_MASKED)
        for dim, mask, lengths in (
            (64, "none", "fixed"),
            (64, "causal", "fixed"),
            (128, "window", "fixed"),
            (128, "causal", "packed"),
            (256, "none", "fixed"),
        )
    ),
    chosen(128, further={"bias": "bf16", **_MASKED}),
    chosen(64, further={"bias": "bf16", "bias_gradient": True, **_MASKED}),
    chosen(128, mask="causal", further={"alibi": True, **_MASKED}),
    chosen(64, further={"dropout": True, **_MASKED}),
    chosen(128, mask="causal", further={"dropout": True, **_MASKED}),
]
DROPOUT = [
    *(
        chosen(
            dim,
            element=next(_element),
            mask=next(_mask),
            lengths=lengths,
            deterministic=dim % 128 == 0 and lengths == "packed",
            further={"dropout": True},
        )
        for dim, lengths in product(DIMS, ("fixed", "packed"))
    ),
    *(chosen(dim, mask="causal", softcap=True, further={"dropout": True}) for dim in (64, 128)),
    chosen(128, mask="causal", further={"dropout": True, "sinks": "fp32"}),
]
COMBINED = [
    chosen(
        dim,
        element=("fp16", "bf16")[index % 2],
        mask=("causal", "window", "none")[index % 3],
        lengths=("fixed", "packed")[index // 2 % 2],
        softcap=index % 7 == 2,
        deterministic=index % 5 == 4,
        sharing=1 + index % 2,
        further={
            "dropout": True,
            **attention_cases.BESIDE[index % 7],
            "bias_gradient": "bias" in attention_cases.BESIDE[index % 7],
        },
    )
    for index, dim in enumerate(dim for dim in DIMS for _ in range(3))
]
_cluster = cycle((2, 4, 8))
CLUSTERS = [  # dk and dv summed at once, and (128 x 128, 1 stage) one after the other
    spec(dim, {**fields, "cluster": cluster}, element=next(_element), mask=mask, lengths=lengths)
    for dim, fields, mask, lengths, cluster in (
        *(
            (128, {"q_tile": 64, "kv_tile": 128, "overlap": False}, mask, lengths, cluster)
            for mask, lengths, cluster in product(
                ("none", "causal"), ("fixed", "packed"), (2, 4, 8)
            )
        ),
        *(
            (dim, fields, mask, lengths, next(_cluster))
            for (dim, fields), (mask, lengths) in product(
                (
                    (32, {"q_tile": 128, "kv_tile": 128, "accumulate": "direct"}),
                    (64, {"q_tile": 96, "kv_tile": 128, "accumulate": "direct"}),
                    (96, {"q_tile": 64, "kv_tile": 64, "overlap": False}),
                    (128, {"q_tile": 80, "kv_tile": 128, "overlap": False}),
                    (128, {"q_tile": 64, "kv_tile": 128, "stages": 1, "overlap": False}),
                    (192, {"q_tile": 64, "kv_tile": 128, "stages": 1, "overlap": False}),
                    (256, {"q_tile": 64, "kv_tile": 64, "stages": 1, "overlap": False}),
                ),
                (("causal", "fixed"), ("window", "packed")),
            )
        ),
    )
]
DETERMINISTIC_CLUSTERS = [
    spec(
        dim,
        {"overlap": False, **fields},
        element=next(_element),
        mask=mask,
        lengths=lengths,
        deterministic=True,
    )
    for dim, fields, mask, lengths in (
        (64, {"q_tile": 128, "kv_tile": 128, "cluster": 2}, "none", "fixed"),
        (
            128,
            {"q_tile": 64, "kv_tile": 128, "cluster": 4, "v_in_registers": "half"},
            "causal",
            "fixed",
        ),
        (128, {"q_tile": 64, "kv_tile": 128, "cluster": 8}, "window", "packed"),
        (128, {"q_tile": 64, "kv_tile": 128, "cluster": 2}, "causal", "packed"),
        (192, {"q_tile": 64, "kv_tile": 64, "stages": 1, "cluster": 4}, "causal", "fixed"),
    )
]
HELD = [  # v in registers, of every dim that it fits
    spec(
        dim,
        {"kv_tile": 128, "overlap": False, **fields},
        element=next(_element),
        mask=mask,
        lengths=lengths,
        deterministic=fields["accumulate"] == "bulk",
    )
    for (dim, fields), (mask, lengths) in product(
        (
            (32, {"q_tile": 64, "v_in_registers": "half", "accumulate": "direct"}),
            (64, {"q_tile": 96, "v_in_registers": "all", "accumulate": "direct"}),
            (64, {"q_tile": 128, "v_in_registers": "half", "accumulate": "direct"}),
            (64, {"q_tile": 64, "kv_tile": 64, "v_in_registers": "all", "accumulate": "bulk"}),
            (96, {"q_tile": 64, "v_in_registers": "half", "accumulate": "bulk"}),
            (128, {"q_tile": 64, "v_in_registers": "half", "accumulate": "direct"}),
            (128, {"q_tile": 64, "v_in_registers": "half", "accumulate": "bulk"}),
            (128, {"q_tile": 48, "v_in_registers": "all", "accumulate": "direct"}),
        ),
        (("none", "fixed"), ("causal", "fixed"), ("window", "packed")),
    )
]
PAIRS = [  # blocks that share the rows of a kv tile: dq straight and swapped
    spec(
        dim,
        {"kv_tile": 128, "cluster_split": "rows", **fields},
        element=next(_element),
        mask=mask,
        lengths=lengths,
        softcap=softcap,
    )
    for (dim, fields), (mask, lengths, softcap) in product(
        (
            (192, {"q_tile": 64, "overlap": False}),
            (192, {"q_tile": 64, "stages": 2}),
            (192, {"q_tile": 128, "stages": 1, "overlap": False, "accumulate": "direct"}),
            (256, {"q_tile": 64, "stages": 1, "overlap": False}),
            (256, {"q_tile": 48, "overlap": False}),
            (256, {"q_tile": 48}),
            (256, {"q_tile": 32, "stages": 3}),
            (256, {"q_tile": 96, "stages": 1, "overlap": False, "accumulate": "direct"}),
            (256, {"q_tile": 64, "overlap": False, "accumulate": "direct", "single_do": True}),
            (256, {"q_tile": 64, "accumulate": "direct", "single_do": True}),
        ),
        (
            ("none", "fixed", False),
            ("causal", "fixed", True),
            ("window", "fixed", False),
            ("causal", "packed", False),
            ("window", "packed", True),
        ),
    )
]
DETERMINISTIC_PAIRS = [
    spec(
        dim,
        {"kv_tile": 128, "cluster_split": "rows", **fields},
        element=next(_element),
        mask=mask,
        lengths=lengths,
        deterministic=True,
    )
    for (dim, fields), (mask, lengths) in product(
        (
            (192, {"q_tile": 64, "overlap": False}),
            (256, {"q_tile": 64, "stages": 1, "overlap": False}),
            (256, {"q_tile": 48}),
        ),
        (("none", "fixed"), ("causal", "fixed"), ("window", "packed")),
    )
]
_DIM_V: dict[str, Any] = {"dim_v": 128}
UNLIKE = [  # v of another dimension than q and k
    *(
        chosen(
            192,
            element=next(_element),
            mask=mask,
            lengths=lengths,
            deterministic=deterministic,
            further=_DIM_V,
        )
        for mask, lengths, deterministic in product(
            ("none", "causal", "window"), ("fixed", "packed"), (False, True)
        )
    ),
    *(
        chosen(
            192,
            element=next(_element),
            mask=next(_mask),
            softcap=index % 7 == 0,
            lengths=("fixed", "packed")[index % 2],
            deterministic=index % 3 == 1,
            further={**_DIM_V, **further, "bias_gradient": "bias" in further},
        )
        for index, further in enumerate(
            (*attention_cases.FURTHER, {"sinks": "fp32"}, {"dropout": True}, {"dropout": True})
        )
    ),
    *(
        spec(192, {"kv_tile": 128, **fields}, mask="causal", lengths=lengths, further=_DIM_V)
        for fields, lengths in product(
            (
                {"q_tile": 64, "overlap": False, "cluster_split": "rows"},
                {"q_tile": 64, "cluster_split": "rows", "single_do": True},
                {"q_tile": 64, "accumulate": "direct"},  # blocks that share columns
                {"q_tile": 64, "stages": 1, "overlap": False},
                {"q_tile": 64, "kv_tile": 64, "overlap": False, "accumulate": "direct"},
            ),
            ("fixed", "packed"),
        )
    ),
]
SIMPLE = {  # for tests of something else than the kernel itself
    "none": chosen(64, seq=512),
    "causal": chosen(64, mask="causal", seq=512),
    "long": chosen(128, mask="causal"),
    "wide": chosen(256, mask="causal", seq=512),
    "packed": chosen(64, mask="causal", lengths="packed", seq=512),
    "dropout": chosen(64, further={"dropout": True}),
    "deterministic": chosen(64, mask="causal", deterministic=True, seq=512),
    "deterministic, packed": chosen(64, mask="causal", lengths="packed", deterministic=True),
    "cluster": spec(
        128, {"q_tile": 64, "kv_tile": 128, "overlap": False, "cluster": 4}, mask="causal"
    ),
    "deterministic, cluster": spec(
        128,
        {"q_tile": 64, "kv_tile": 128, "overlap": False, "cluster": 4},
        mask="causal",
        deterministic=True,
    ),
    "pair": spec(
        256,
        {"q_tile": 64, "kv_tile": 128, "stages": 1, "overlap": False, "cluster_split": "rows"},
        mask="causal",
    ),
    "pair, overlapped": spec(
        256,
        {
            "q_tile": 64,
            "kv_tile": 128,
            "accumulate": "direct",
            "cluster_split": "rows",
            "single_do": True,
        },
        mask="causal",
    ),
    "pair, deterministic": spec(
        256,
        {"q_tile": 48, "kv_tile": 128, "cluster_split": "rows"},
        mask="causal",
        deterministic=True,
    ),
}
SIMPLE_UNLIKE = {
    "overlapped": UNLIKE[4],
    "deterministic": UNLIKE[5],
    "serial": UNLIKE[-10],
    "columns": UNLIKE[-6],
}
SHORT = [chosen(dim, mask=mask, seq=512) for dim in OTHER_DIMS for mask in ("none", "causal")]

ALL = list(
    dict.fromkeys(
        (
            *(*OPERATIONS, *SOFTCAPS, *DETERMINISTIC, *PACKED, *SINKS, *SCORED),
            *(*DROPOUT, *COMBINED),
            *(*CLUSTERS, *DETERMINISTIC_CLUSTERS, *HELD),
            *(*PAIRS, *DETERMINISTIC_PAIRS, *SIMPLE.values(), *SHORT, *UNLIKE),
        )
    )
)
FORWARD = [  # what `warploom.attention` runs in tests that begin there
    attention_cases.chosen(dim, mask=mask, lengths=lengths, seq=seq)
    for dim in (64, 128)
    for mask in ("none", "causal")
    for lengths in ("fixed", "packed")
    for seq in (512, 4096)
]
MANY_TILES = Shape(1, 6, 2, 131, 2053)  # of keys: the order of the sums of dq matters
LENGTHS = attention_cases.LENGTHS | {  # some of more columns than a kv tile has
    "many": ([1 + 7 * i % 50 for i in range(40)], [1 + 11 * i % 190 for i in range(40)])
}
