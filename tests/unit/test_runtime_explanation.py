"""What explain prints is read by people: of CPU tensors too, and without the words of the table."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.families._attention.table import lengths

A, B = torch.zeros(4, 16).bfloat16(), torch.zeros(16, 8).bfloat16()
Q = torch.zeros(1, 2, 64, 64).bfloat16()


def test_a_call_on_cpu_tensors_is_told_to_run_the_reference() -> None:
    for told in (warploom.explain(A, B), warploom.explain(Q, Q, Q, causal=True)):
        assert told.reference
        assert str(told).startswith("runs     the reference, on the CPU")
        assert "grid" not in str(told)
        assert "store" not in str(told)
    named = warploom.explain(A, B, gpu="NVIDIA H200")
    assert not named.reference
    assert "grid     1 blocks" in str(named)


def test_a_call_is_told_by_its_function_too() -> None:
    assert warploom.explain(warploom.gemm, A, B).kernel == warploom.explain(A, B).kernel
    told = warploom.explain(warploom.attention, Q, Q, Q, causal=True, gpu="NVIDIA H200")
    assert told.kernel == warploom.explain(Q, Q, Q, causal=True, gpu="NVIDIA H200").kernel
    for wrong in (lambda: warploom.explain(warploom.gemm, Q, Q, Q), lambda: warploom.explain(min)):
        with pytest.raises(ProblemError, match="must be of a plan"):
            wrong()


class Chooser:
    """What an integration is to `explain`: an object that knows which kernel its calls run."""

    def explanation(
        self, *operands: torch.Tensor | None, gpu: str | None = None, scaled: bool = False
    ) -> warploom.Explanation:
        if any(tensor is None or tensor.dim() > 2 for tensor in operands):
            return warploom.Explanation.by_torch(f"of {len(operands)}, scaled={scaled}", gpu or "")
        return warploom.explain(warploom.gemm, *operands, gpu=gpu)


def test_an_object_that_explains_itself_is_asked_with_all_that_was_given() -> None:
    chooser = Chooser()
    assert warploom.explain(chooser, A, B).kernel == warploom.explain(A, B).kernel
    told = warploom.explain(chooser, A, B, gpu="NVIDIA H200")
    assert (told.gpu, told.torch) == ("NVIDIA H200", False)
    assert warploom.explain(chooser, None, Q, Q, Q, scaled=True).reason == "of 4, scaled=True"
    with pytest.raises(ProblemError, match="must be of a plan"):
        warploom.explain(Chooser, A, B)  # the class makes choosers; none of it was asked


def test_a_call_that_is_left_to_torch_says_so_and_why_and_nothing_else() -> None:
    told = warploom.explain(Chooser(), Q)
    assert (told.torch, told.kernel, told.backward) == (True, "", None)
    assert str(told) == "runs     torch's own kernel\nbecause  of 1, scaled=False"
    named = str(warploom.explain(Chooser(), Q, gpu="NVIDIA H200"))
    assert named.startswith("GPU      NVIDIA H200\nruns     torch's own kernel\n")


def test_a_function_of_several_operations_tells_each_of_them() -> None:
    """Functions that are no family's own were refused: "must be of a plan"."""
    hidden, ids = A.new_empty(16, 64, device="meta"), torch.empty(16, 2, device="meta").long()
    weights = (hidden.new_empty(4, 96, 64), hidden.new_empty(4, 64, 48))
    told = warploom.explain(
        warploom.experts, hidden, ids, ids.bfloat16(), *weights, gpu="NVIDIA H200"
    )
    names = [name for name, _ in told.operations]
    assert names == ["route", "permute", "grouped_gemm", "grouped_gemm", "combine"]
    assert "gate_silu" in told.operations[2][1].kernel and all(
        one.grid for _, one in told.operations
    )
    assert str(told).startswith("calls    route\nGPU      NVIDIA H200\nkernel   route_")
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    grouped = warploom.explain(warploom.grouped_gemm, hidden, weights[0].mT, offs=offs, gpu="h200")
    assert "_groups_rows_" in grouped.kernel and grouped.operations == ()
    copied = warploom.explain(warploom.permute, A, torch.zeros(4, 2, dtype=torch.int32))
    assert copied.reference and "_permute_" in copied.kernel
    with pytest.raises(ProblemError, match="must come with offs"):
        warploom.explain(warploom.grouped_gemm, hidden, weights[0].mT, gpu="h200")


def test_every_label_has_its_column_and_the_tables_words_are_explained() -> None:
    lines = f"{warploom.explain(A, B)}\n{warploom.explain(Q, Q, Q)}".splitlines()
    assert all(line[8] == " " and line[9] != " " for line in lines)
    reason = next(at for at, line in enumerate(lines) if "waves * cost" in line)
    assert "waves: tiles of the busiest SM" in lines[reason + 1]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0, 2147483647, "of any length"),
        (0, 512, "of up to 512"),
        (513, 4096, "of 513 to 4096"),
        (4097, 2147483647, "of 4097 or more"),
    ],
)
def test_lengths_read_as_a_person_says_them(low: int, high: int, said: str) -> None:
    assert lengths(low, high) == said
