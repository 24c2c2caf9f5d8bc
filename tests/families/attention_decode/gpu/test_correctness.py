"""Every option and schedule against float64, element by element, at lengths of every kind."""

from __future__ import annotations

import decode_arena as arena
import decode_cases as cases
import pytest
import torch
from decode_cases import SHAPES, SIMPLE, SINGLE, Shape, short
from rooms import assert_repeats

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def verify(kernel: KernelSpec, shape: Shape, seed: int = 0) -> None:
    arena.verify(arena.call(kernel, cases.fitting(kernel, shape), seed=seed))


def test_no_kernel_of_the_table_spills(built: dict[str, Artifact]) -> None:
    artifacts = [built[kernel.name] for kernel in cases.USUAL]
    resources = {artifact.name: artifact.resources[artifact.name] for artifact in artifacts}
    assert {n for n, used in resources.items() if used.spill_bytes or used.local_bytes} == set()


@over_shapes
@pytest.mark.parametrize("kernel", cases.OPTIONS, ids=short)
def test_no_two_options_or_fields_of_a_schedule_are_wrong_together(
    kernel: KernelSpec, shape: Shape
) -> None:
    verify(kernel, shape, seed=cases.OPTIONS.index(kernel))


@pytest.mark.parametrize(("name", "shape"), cases.TABLE, ids=" ".join)
def test_what_the_table_chooses_is_right(name: str, shape: str) -> None:
    verify(cases.TABLE[name, shape], SHAPES[shape], seed=1)


@pytest.mark.parametrize("name", SINGLE)
def test_a_call_takes_the_kernel_of_the_table(name: str) -> None:
    made = arena.call(None, SHAPES["ragged"], of=SINGLE[name], seed=2)
    found = warploom.explain(warploom.attention_decode, *made.tensors, **made.keywords)
    assert found.kernel == cases.TABLE[name, "ragged"].name
    arena.verify(made)


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_length_to_300_is_right(name: str, rows: int) -> None:
    kernel = SIMPLE[name]
    shape = cases.fitting(kernel, Shape(301, 1, 3, rows, 300))
    arena.verify(arena.call(kernel, shape, lengths=range(301)))


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("keys", [300, 5000])
def test_every_key_is_attended_to(name: str, keys: int) -> None:
    """In each head of each sequence another key has nearly all of the weight: its value comes."""
    kernel, kv_heads = SIMPLE[name], 10
    shape = cases.fitting(
        kernel, Shape(-(-keys // kv_heads) if keys < 1000 else 50, kv_heads, 2, 1, keys)
    )
    made = arena.call(kernel, shape, lengths=[keys] * shape.batch)
    slots = torch.arange(shape.batch * kv_heads, device=arena.DEVICE)
    chosen = (slots * (keys // len(slots) or 1) % keys).view(shape.batch, kv_heads)
    arena.plant(made, chosen)
    arena.verify(made)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 12, 16, 32])
@pytest.mark.parametrize("name", ["plain", "causal", "e4m3"])
def test_every_number_of_rows_is_right(name: str, group: int) -> None:
    kernel = SIMPLE[name]
    most = 256 // group
    for seq_q in sorted({1, 2, 3, most // 2, most} - {0}):
        verify(kernel, Shape(3, 2, group, seq_q, 407), seed=seq_q)


@pytest.mark.parametrize("size", [0.0, 8.0])
@pytest.mark.parametrize("name", SIMPLE)
def test_equal_scores_and_those_of_one_key_are_right(name: str, size: float) -> None:
    arena.verify(arena.call(SIMPLE[name], SHAPES["ragged"], size=size))


@pytest.mark.parametrize("name", ["sinks", "sinks in fp32"])
@pytest.mark.parametrize("value", [-torch.inf, -100.0, 100.0])
def test_a_sink_takes_all_of_the_weight_or_none(name: str, value: float) -> None:
    made = arena.call(None, SHAPES["ragged"], of=SINGLE[name])
    made.keywords["sinks"].fill_(value)
    out, lse = arena.verify(made)
    if value > 0:
        assert (out == 0).all() and torch.allclose(lse, torch.full_like(lse, value))


@pytest.mark.parametrize("name", SIMPLE)
def test_a_kernel_is_bit_equal_over_300_runs_beside_another_kernel(name: str) -> None:
    kernel = SIMPLE[name]
    made = arena.call(kernel, cases.fitting(kernel, Shape(5, 2, 4, 2, 9001)))
    first = [one.clone() for one in arena.verify(made)]
    assert_repeats(made.run, first, [made.out], runs=300)
