"""Tensors that torch has negated lazily give kernels the values that torch sees."""

from __future__ import annotations

import pytest
import torch
from negated_calls import CASES, READ

import warploom

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("case", "name"), READ)
def test_a_negated_operand_has_the_result_of_its_values(case: str, name: str) -> None:
    """Kernels read memory, whose sign is the other one; in warm calls at the same addresses."""
    one = CASES[case]

    def results(*, negated: bool) -> list[torch.Tensor]:
        given = {key: value.cuda() for key, value in one.made().items()}
        if negated:
            given[name] = torch._neg_view(-given[name])
            assert given[name].is_neg()
        found = one.call(**given)
        made = [found] if isinstance(found, torch.Tensor) else list(found or ())  # type: ignore[call-overload]
        written = [given[key] for key in one.written]
        return [tensor for tensor in (*made, *written) if tensor is not None]

    expected = results(negated=False)
    for _ in range(2):
        for negated in (True, False):
            for found, exact in zip(results(negated=negated), expected, strict=True):
                assert torch.equal(found, exact)


def test_a_captured_call_resolves_in_every_replay() -> None:
    """The copy is a part of the graph: it reads what the operand holds when it is replayed."""
    a, b = torch.randn(64, 128, device="cuda").bfloat16(), torch.eye(128, device="cuda").bfloat16()
    negated = torch._neg_view(a)
    warploom.gemm(negated, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.gemm(negated, b)
    for _ in range(2):
        a.copy_(torch.randn_like(a))
        graph.replay()
        assert torch.equal(found, -a)
