"""Gradients with extents near 2^31 are refused; no offsets lead outside the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_cases import MASKS, operation
from attention_offsets import CLAMPED, POISON, TOTAL, WILD, await_gpu, banded, offsets, packed
from extents import Refused, assert_refused, one

from warploom.generator.families.attention_backward import order
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.families.attention_backward import call as attention_backward
from warploom.runtime.families.attention_backward.call import BackwardCall

pytestmark = pytest.mark.gpu


def gradients(q: torch.Tensor, k: torch.Tensor, **keywords: Any) -> Callable[[], object]:
    """A backward pass by itself: its forward pass would be refused before."""
    lse = one(*((q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]), dtype=torch.float32)
    made = BackwardCall(Arguments(q, k, k, **keywords), q, lse, q)
    return lambda: attention_backward.attention_backward(made)


REFUSED: Refused = {
    "gradients of seq_q": (
        lambda: gradients(one(1, 1, LARGEST, 8), one(1, 1, 1, 8)),
        "seq_q 2147483647",
    ),
    "gradients of seq_k": (
        lambda: gradients(one(1, 1, 1, 8), one(1, 1, LARGEST, 8)),
        "seq_k 2147483647",
    ),
    "gradients of heads": (
        lambda: gradients(one(2**15, 2**15, 1, 8), one(2**15, 2**15, 1, 8)),
        "1073741824 heads of 1 tiles",
    ),
    "gradients of total_k": (
        lambda: gradients(one(1, 1, 8), one(2**30, 1, 8), **packed(1, 2**30)),
        "total_k 1073741824",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_32_bits_do_not_count_is_refused_before_anything_is_made(case: str) -> None:
    assert_refused(*REFUSED[case])


# Kv tiles have a direction only where they add to dq in order.
DIRECTIONS = {"leftward": 0, "rightward": math.inf}
BACKWARD = [
    pytest.param(kernel, rounds, id=f"{cases.short(kernel)}-{direction}")
    for kernel in cases.ALL
    if operation(kernel).lengths == "packed"
    for direction, rounds in DIRECTIONS.items()
    if cases.operation(kernel).deterministic or direction == "rightward"
]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("kernel", "rounds"), BACKWARD)
def test_no_offsets_lead_a_backward_pass_outside_or_let_it_wait_for_ever(
    kernel: KernelSpec, rounds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic = cases.operation(kernel).deterministic
    monkeypatch.setattr(order, "LEFTWARD_ROUNDS", rounds)
    plan.forget()
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.packed(kernel, [TOTAL], [TOTAL], **keywords)
    forward = made.forward
    forward.q, forward.k, forward.v, forward.out, made.dout = (
        banded(given.view) for given in (forward.q, forward.k, forward.v, forward.out, made.dout)
    )
    made.lse = banded(made.lse).view
    dq, dk, dv = (banded(gradient.view) for gradient in made.gradients)
    made.gradients = (dq, dk, dv)

    of_scores = {name: forward.keywords.get(name) for name in ("bias", "mask")}

    def run(values: tuple[int, ...], longest: int = TOTAL) -> list[torch.Tensor]:
        forward.keywords |= offsets(values) | {"max_seqlen_q": longest, "max_seqlen_k": longest}
        forward.keywords |= {
            name: one[..., :longest, :longest] for name, one in of_scores.items() if one is not None
        }
        for gradient in made.gradients:
            gradient.view.fill_(POISON)
        found = made.run()
        await_gpu()
        assert all(gradient.untouched_outside() for gradient in made.gradients), values
        return [gradient.clone() for gradient in found]

    usual = (0, 150, TOTAL)
    before = run(usual)
    for values in WILD:
        found = run(values)
        if values not in CLAMPED:
            continue
        assert all(gradient.isfinite().all() for gradient in found), values  # NaN lies outside
        if deterministic:
            assert all(map(torch.equal, found, run(CLAMPED[values]))), values
    run(usual, longest=1)
    if deterministic:  # nothing is left of them
        assert all(map(torch.equal, run(usual), before))
