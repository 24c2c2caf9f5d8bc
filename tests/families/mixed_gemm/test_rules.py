"""Which products with weights of few bits there are, and how tuner and tests draw them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from warploom.errors import SpecificationError
from warploom.generator.elements import element
from warploom.generator.epilogue import (
    Activation,
    Amax,
    Bias,
    Gate,
    GateFunction,
    MeanSquare,
    RmsScale,
)
from warploom.generator.families.mixed_gemm import FAMILY as GENERATED
from warploom.generator.families.mixed_gemm import Format, MixedGemmOperation, MixedGemmShape
from warploom.generator.families.mixed_gemm.layout import mixed_gemm_layout
from warploom.generator.families.mixed_gemm.rules import operation_reasons
from warploom.generator.families.mixed_gemm.schedule import Scales
from warploom.generator.formats import FORMATS, SCALE_TYPES
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose
from warploom.runtime.families.mixed_gemm.family import FAMILY
from warploom.runtime.plan import run

INTERLEAVED = Gate("silu", "interleaved")
OPERATION = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16")


def operations() -> list[MixedGemmOperation]:
    """Every legal operation, of results in bf16."""
    inputs = get_args(get_type_hints(MixedGemmOperation)["a"])
    every = (
        replace(OPERATION, a=a, b=b, group=group, scale=scale)
        for a in inputs
        for b in FORMATS
        for group in (0, 32, 64, 128)
        for scale in SCALE_TYPES
    )
    return [one for one in every if not operation_reasons(one)]


def test_fields_have_what_the_tables_have() -> None:
    assert get_args(Format) == tuple(FORMATS)
    assert get_args(Scales) == tuple(SCALE_TYPES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": "e4m3", "b": "int8"}, "must be one of int4, uint4, e4m3, mxfp4"),
        ({"a": "int8", "b": "mxfp4", "scale": "e8m0", "group": 32}, "one of int4, uint4, int8"),
        ({"b": "mxfp4", "scale": "e8m0"}, "group of mxfp4 128: must be 32"),
        ({"b": "mxfp4", "group": 32}, "scale of mxfp4 'bf16': must be e8m0"),
        ({"scale": "e8m0"}, "scale of int4 'e8m0'"),
        ({"epilogue": (Gate("silu"),)}, "must be interleaved in a packed weight"),
        ({"epilogue": (INTERLEAVED, Amax())}, "amax with gate_silu_interleaved: must be without"),
        (
            {"epilogue": (MeanSquare(), INTERLEAVED)},
            "mean_square with gate_silu_interleaved: must be without outputs beside D",
        ),
    ],
)
def test_what_no_kernel_multiplies_is_told(change: dict[str, object], said: str) -> None:
    assert said in "; ".join(operation_reasons(replace(OPERATION, **change)))


def test_every_code_less_zero_is_exact_in_its_activations_type() -> None:
    """Else results would depend on where scales are applied."""
    for operation in operations():
        row = operation.weight
        if (row.codes != "uint8" and row.codes != "int8") or row.name == "mxfp4":
            continue
        values = torch.arange(row.lowest - (row.highest_zero or 0), row.highest + 1)
        kind = getattr(torch, element(operation.a).torch)
        assert torch.equal(values.double().to(kind).double(), values.double())


@pytest.mark.parametrize("operation", operations()[::7], ids=str)
def test_drawn_calls_are_right_by_their_bound(operation: MixedGemmOperation) -> None:
    operation = replace(operation, epilogue=(Bias("bf16"), Activation("silu")))
    trial = FAMILY.trial(operation, MixedGemmShape(9, 72, 256), "cpu", 0)
    assert trial.held_share() == float("inf")  # before it ran
    run(trial.sets[0])
    assert 0 < trial.held_share() <= 1
    spread = float(trial.results[0].float().std())
    assert 1 < spread < 2000


@pytest.mark.parametrize("before", [(), (RmsScale(),)], ids=str)
@pytest.mark.parametrize("gate", ["silu", "swiglu_oai"])
def test_drawn_calls_of_interleaved_gates_are_right_by_their_bound(
    gate: GateFunction, before: tuple[RmsScale, ...]
) -> None:
    epilogue = (*before, Bias("bf16"), Gate(gate, "interleaved"))
    operation = replace(OPERATION, epilogue=epilogue)
    trial = FAMILY.trial(operation, MixedGemmShape(9, 80, 256), "cpu", 0)
    run(trial.sets[0])
    assert trial.results[0].shape == (9, 40)
    assert 0 < trial.held_share() <= 1


def test_a_gate_of_a_norm_beside_zeros_of_small_groups_gets_a_smaller_tile() -> None:
    """It spilled 8 bytes: with zeros of channels or of larger groups the same tile does not."""
    tile = {"tile": (16, 128, 256), "multiply": "mma", "scaled": "sums"}
    fields = {**tile, "warp_split_k": 2, "ctas_per_sm": 2}
    for b, group, epilogue, fits in (
        ("uint4", 64, (RmsScale(), INTERLEAVED), False),
        ("uint4", 64, (RmsScale(),), True),
        ("uint4", 128, (RmsScale(), INTERLEAVED), True),
        ("int4", 64, (RmsScale(), INTERLEAVED), True),
    ):
        operation = MixedGemmOperation("bf16", b, "bf16", group, "bf16", epilogue)  # type: ignore[arg-type]
        layout = mixed_gemm_layout(operation, GENERATED.complete("sm_90a", operation, fields))  # type: ignore[arg-type]
        assert (layout.registers <= layout.register_budget) is fits


@pytest.mark.parametrize("before", [(), (RmsScale(),)], ids=str)
def test_kernels_of_a_gate_store_directly_and_every_number_of_rows_has_one(
    before: tuple[RmsScale, ...],
) -> None:
    operation = replace(OPERATION, epilogue=(*before, INTERLEAVED))
    fields = {"tile": (64, 128, 128), "multiply": "wgmma", "scaled": "sums", "store": "tma"}
    with pytest.raises(SpecificationError, match="store tma with gate_silu_interleaved"):
        KernelSpec("sm_90a", operation, GENERATED.complete("sm_90a", operation, fields))
    for m in (1, 16, 64, 512, 4096):
        shape = MixedGemmShape(m, 28672, 4096)
        spec = choose(operation, shape, requires=GENERATED.table.required(operation, shape)).spec
        assert (spec.operation, spec.schedule.store) == (operation, "direct")
    assert GENERATED.table.timed_as(operation) == replace(OPERATION, epilogue=before)
