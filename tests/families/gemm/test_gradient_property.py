"""Any product with any epilogue has the gradients that float64 has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gemm_gradients import BF16, FP16, FP32, Items, check, leaf, random, scales
from hypothesis import given, settings
from hypothesis import strategies as st

BATCHES = [((), ()), ((3,), ()), ((2, 3), (3,)), ((), (2,)), ((2, 1), (3,)), ((3,), (1,))]


def step(kind: str, lead: tuple[int, ...], m: int, n: int, *, ask: bool) -> tuple[Any, ...]:
    """An item of a kind, which asks for its gradient or not."""

    def asked(tensor: torch.Tensor) -> torch.Tensor:
        return leaf(tensor) if ask else tensor

    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "scale": lambda: ("scale", 0.5),
        "scale_a": lambda: ("scale_a", asked(scales(1))),
        "scale_row": lambda: ("scale_row", asked(scales(m))),
        "scale_column": lambda: ("scale_column", asked(scales(n))),
        "bias": lambda: ("bias", asked(random(n))),
        "residual": lambda: ("residual", asked(random(*lead, m, n)), -0.5),
        "silu": lambda: ("activation", "silu"),
        "gelu": lambda: ("activation", "gelu"),
    }
    return made[kind]()


KINDS = ["scale", "scale_a", "scale_row", "scale_column", "bias", "residual", "silu", "gelu"]


@settings(max_examples=60, deadline=None)
@given(
    extents=st.tuples(*[st.sampled_from([1, 2, 7, 8, 16, 24])] * 3),
    batches=st.sampled_from(BATCHES),
    across=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([BF16, FP16]),
    wide=st.booleans(),
    kinds=st.lists(st.sampled_from(KINDS), max_size=4),
    asking=st.lists(st.booleans(), min_size=6, max_size=6),
    preactivation=st.sampled_from(["save", "recompute"]),
)
def test_any_epilogue_of_any_product_is_differentiated(
    extents: tuple[int, int, int],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
    across: tuple[bool, bool],
    dtype: torch.dtype,
    wide: bool,
    kinds: list[str],
    asking: list[bool],
    preactivation: str,
) -> None:
    (m, n, k), (lead_a, lead_b) = extents, batches
    a = random(*lead_a, k, m).mT if across[0] else random(*lead_a, m, k)
    b = random(*lead_b, n, k).mT if across[1] else random(*lead_b, k, n)
    lead = tuple(torch.broadcast_shapes(lead_a, lead_b))
    asks = zip(kinds, asking[2:], strict=False)
    items: Items = [step(kind, lead, m, n, ask=ask) for kind, ask in asks]
    a, b = (
        leaf(one.to(dtype)) if ask else one.to(dtype)
        for one, ask in zip((a, b), asking, strict=False)
    )
    if not any(one.requires_grad for one in (a, b)):
        a = leaf(a)
    keywords: dict[str, Any] = {"preactivation": preactivation}
    check(a, b, items, keywords={**keywords, "out_dtype": FP32} if wide else keywords)
