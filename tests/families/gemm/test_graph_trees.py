"""The CUDA graphs of torch.compile: sums that one would copy are refused, where it is recorded."""

from __future__ import annotations

import sys

import pytest
import torch
from gemm_gradients import random

from warploom.errors import ProblemError
from warploom.runtime.families.gemm.graph_trees import refuse_copied


class Trees:
    """Graph trees of torch that record, to a stream, into memory from `address` on."""

    def __init__(self, address: int, result: int = 0) -> None:
        self.stream, self.cuda_graphs_thread_pool = "stream", (0, 7)
        self.address, self.result, self.current_node = address, result, self

    def get_manager(self, _: int, create_if_none_exists: bool) -> Trees:
        assert not create_if_none_exists
        return self

    def memory_snapshot(self, pool: tuple[int, int]) -> list[dict[str, int]]:
        assert pool == self.cuda_graphs_thread_pool
        return [{"address": self.address, "total_size": 4096}]

    def _is_cuda_graph_recorded_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self.result


def test_sums_that_a_graph_of_a_compiler_has_copied_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient would be added to the copy; a user's own capture copies nothing."""
    into = random(4, 8).float()
    at, stream, capturing = into.data_ptr(), "stream", True
    inside = Trees(at - 64)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def asked(trees: Trees) -> None:
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", trees.memory_snapshot)
        refuse_copied(into)

    with pytest.raises(
        ProblemError, match=r"accumulate_into \[4, 8\].*a copy.*mark_static_address"
    ):
        asked(inside)
    asked(Trees(at + 64))
    asked(Trees(at - 64, result=at))
    stream = "another"
    asked(inside)
    stream, capturing = "stream", False
    asked(inside)
