"""The faults that the gpu tests must notice can still be put into the kernels' text."""

from __future__ import annotations

import difflib
from types import ModuleType

import activation_backward_mutants
import attention_append_mutants
import attention_backward_mutants
import attention_merge_mutants
import attention_mutants
import attention_quantize_mutants
import cast_mutants
import combine_mutants
import decode_mutants
import fp32_pieces_mutants
import gemm_mutants
import gemm_spans
import mixed_mutants
import pytest
import route_mutants


def test_every_mutant_of_gemm_can_be_made() -> None:
    assert len(gemm_mutants.MUTANTS) >= 3
    for mutant in gemm_mutants.MUTANTS.values():
        assert mutant.source()  # LookupError where the text to take out is not there


@pytest.mark.parametrize(
    "mutants",
    [
        activation_backward_mutants,
        attention_append_mutants,
        attention_mutants,
        attention_backward_mutants,
        attention_merge_mutants,
        attention_quantize_mutants,
        cast_mutants,
        combine_mutants,
        decode_mutants,
        fp32_pieces_mutants,
        gemm_spans,
        mixed_mutants,
        route_mutants,
    ],
    ids=lambda module: module.__name__,
)
def test_every_other_mutant_differs_by_its_fault_alone(mutants: ModuleType) -> None:
    assert len(mutants.MUTANTS) >= 5
    for name, mutant in mutants.MUTANTS.items():
        whole, wrong = (source.splitlines() for source in mutant.sources())
        changed = [x for x in difflib.ndiff(whole, wrong) if x[:2] in ("- ", "+ ")]
        assert 1 <= len(changed) <= 2, (name, changed)
        assert not any("clock64" in line for line in changed), name
