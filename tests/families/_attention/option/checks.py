"""What holds where the files of this folder lie in the package: test_option.py runs it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom.generator import names
from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.families import family
from warploom.generator.launches import Address, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store
from warploom.runtime.arguments import declared, tensor
from warploom.runtime.families._attention import problem, reference
from warploom.runtime.families._attention.function import function_of
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.recency import Recency
from warploom.runtime.families.attention_forward.call import AttentionCall

FORWARD, BACKWARD = "attention_forward", "attention_backward"
SCHEDULES: dict[str, dict[str, Any]] = {
    FORWARD: {"q_tile": 128, "kv_tile": 64},
    BACKWARD: {"q_tile": 64, "kv_tile": 128, "overlap": False},
}
CAPPED = {"softcap": True, "mask": "causal", "lengths": "packed", "sinks": "same"}
BIASED = {"alibi": True, "bias": "fp32", "masked": True}


def make(name: str, **fields: Any) -> KernelSpec:
    described = family(name)
    operation = described.operation("bf16", 64, **fields)
    return KernelSpec("sm_90a", operation, described.schedule(**SCHEDULES[name]))


@declared
class Call(AttentionCall):
    """A call with the argument of the toy, which whoever adds an option declares."""

    recency: torch.Tensor | None = tensor(default=None, schema="Tensor?=None", grad=True)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(problem, "MODIFIERS", [*problem.MODIFIERS, Recency])
    q, k, v = (torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    return Call(q, k, v, recency=torch.empty(4, device="meta"))


def test_kernels_with_it_compile_without_spills() -> None:
    """By one process, which reads the headers that they share once."""
    cases = ((FORWARD, CAPPED), (FORWARD, BIASED), (BACKWARD, BIASED))
    specs = [make(name, recency=True, **fields) for name, fields in cases]
    assert all("rate column" in render(spec) for spec in specs)
    for spec, artifact in zip(specs, build_many(specs, Store(None), jobs=1), strict=True):
        assert isinstance(artifact, Artifact), artifact
        assert artifact.resources[spec.name].clean, spec.name


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_kernels_without_it_are_what_they_were(name: str) -> None:
    plain, spec = make(name), make(name, recency=True)
    assert '"recency"' not in plain.canonical_json
    assert "recency" not in render(plain)
    assert "_recency_" in spec.name
    described = family(name)
    read = names.read(spec.name, name, described.operation, described.schedule)
    assert read == ("sm_90a", spec.operation, spec.schedule)


def test_a_call_with_it_is_planned(call: Call) -> None:
    draft = call.draft(DeviceLimits(132))
    spec = draft.choice.spec
    assert spec.operation.recency
    assert draft.problem is not None
    (launch,) = family(FORWARD).launches(spec, draft.problem, DeviceLimits(132))
    assert launch.parameters["recency"] == Address("recency")
    assert "recency" in draft.tensors
    assert call.further == {"recency": call.recency}


def test_the_reference_computes_it(call: Call) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=random).double() for _ in range(3))
    drawn = Recency.sample(make(FORWARD, recency=True).operation, (1, 2, 9, 9), "cpu", random)
    function = function_of(Call(q, k, v, **drawn), Band())
    s = q @ k.mT / 4 + drawn["recency"].double()[:, None, None] * torch.arange(9)
    torch.testing.assert_close(reference.exact(q, k, v, function)[0], s.softmax(-1) @ v)
