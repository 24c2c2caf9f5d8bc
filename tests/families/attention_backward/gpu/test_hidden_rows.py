"""Gradients of rows that a large finite bias hides, and of fully masked rows.

Guards against weights of a row that do not sum to 1 where its log-sum-exp is -1e9 or less, whose
neighbours in fp32 are 64 and more away; and against a NaN or Inf in the gradient of a fully masked
row, which times a weight of 0 is NaN in all of dk and dv.
"""

from __future__ import annotations

import math
from typing import Any

import attention_backward_arena as arena
import attention_hidden_cases as hidden
import pytest
import torch
from attention_backward_cases import SIMPLE, chosen, operation, short
from attention_cases import Shape
from attention_hidden_cases import LENGTHS, SHAPE, VALUES

from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.modifiers.score_tensors import room_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
HIDDEN = [
    chosen(
        dim,
        **fields,
        deterministic=index % 4 == 1,
        sharing=1 + index % 2,
        further={
            **further,
            "bias_gradient": index % 3 == 0 and not fields.get("softcap"),
        },
    )
    for index, (dim, fields, further) in enumerate(hidden.OPERATIONS)
]
USUAL = [name for name in SIMPLE if "packed" not in name and name not in ("none", "dropout")]
SHORTER = Shape(2, 4, 2, 300, 161)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kernel", HIDDEN, ids=short)
def test_gradients_of_rows_that_a_finite_bias_hides_are_right(
    kernel: KernelSpec, value: float
) -> None:
    keywords = hidden.keywords(operation(kernel), value)
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, *LENGTHS, dlse=True, **keywords)
    else:
        made = arena.make(kernel, SHAPE, **keywords)
    arena.verify(made, beside_plain=False)


def masking(kernel: KernelSpec) -> dict[str, Any]:
    """What masks some rows of SHORTER."""
    if not operation(kernel).hides:
        return {"causal": "bottom_right"}
    mask = torch.ones(1, 1, SHORTER.seq_q, SHORTER.seq_k, dtype=torch.bool, device="cuda")
    mask[:, :, 7::31] = False
    if operation(kernel).masked:
        return {"mask": room_for(SHORTER.seq_k, mask)}
    bias = torch.where(mask, 0.0, -math.inf).to(torch.bfloat16)
    return {"bias": room_for(SHORTER.seq_k, bias)}


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e4])
@pytest.mark.parametrize(
    "kernel",
    [
        *(SIMPLE[name] for name in USUAL),
        *(chosen(dim, further={"masked": True}) for dim in (32, 64, 96, 128, 192, 256)),
        chosen(128, further={"bias": "bf16", "bias_gradient": True}),
        chosen(64, further={"masked": True, "dropout": True}),
        chosen(128, softcap=True, further={"masked": True}),
        chosen(128, mask="causal", further={"sinks": "fp32"}),
        chosen(64, further={"masked": True, "sinks": "same"}),
        chosen(128, further={"bias": "bf16", "masked": True, "sinks": "fp32"}),
    ],
    ids=short,
)
def test_gradients_of_fully_masked_rows_stay_out_of_all_others(
    kernel: KernelSpec, number: float
) -> None:
    made = arena.make(kernel, SHORTER, dlse=True, **masking(kernel))
    _, *first = arena.clones(arena.verify(made, beside_plain=False))
    masked = made.lse == -math.inf
    sinks = made.forward.keywords.get("sinks")
    if sinks is not None:  # which have the gradient of lse, then
        masked = (made.lse - sinks.float()[:, None]).abs() < 1e-6
    elif made.dlse is not None:
        made.dlse[masked] = number
    assert masked.any()
    made.dout.view[masked] = number
    dq, *found = arena.verify(made, beside_plain=False)
    assert all(map(torch.equal, found, first))
    assert (dq[masked] == 0).all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["packed", "deterministic, packed"])
def test_gradients_of_fully_masked_packed_rows_stay_out_of_all_others(
    name: str, number: float
) -> None:
    made = arena.packed(SIMPLE[name], [150, 0, 77, 40], [100, 30, 20, 0], causal="bottom_right")
    _, *first = arena.clones(arena.verify(made))
    masked = (made.lse == -math.inf).T
    made.dout.view[masked] = number
    dq, *found = arena.verify(made, beside_plain=False)
    assert all(map(torch.equal, found, first))
    assert (dq[masked] == 0).all()
