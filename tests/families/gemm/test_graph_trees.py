"""The CUDA graphs of torch.compile copy no sums; one that did is refused, where it is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_gradients import K, M, N, leaf, random
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm.operators import refuse_copied


def of_a_weight(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return warploom.gemm(x, weight.t(), main_grad=into.t())


def as_they_are(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return warploom.gemm(x, weight, main_grad=into)


def of_a_part(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return warploom.gemm(x, weight[1], main_grad=into[1])


def checkpointed(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    d: torch.Tensor = checkpoint(of_a_weight, x, weight, into, use_reentrant=False)
    return d


def of_a_copy(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return warploom.gemm(x, weight, main_grad=into.clone())


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (of_a_weight, (N, K), ["l_into_"]),
        (as_they_are, (K, N), ["l_into_"]),
        (of_a_part, (2, K, N), ["l_into_"]),
        (checkpointed, (N, K), ["l_into_"]),
        (of_a_copy, (K, N), []),
    ],
)
def test_graphs_copy_inputs_but_sums(
    layer: Callable[..., torch.Tensor], shape: tuple[int, ...], expected: list[str]
) -> None:
    """The gradient would be added to a copy; x is copied, or each call would record a graph."""
    fixed: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        inputs = graph.graph.find_nodes(op="placeholder")
        fixed.extend(one.name for one in inputs if one.meta["tensor_dict"])
        return graph.forward

    torch._dynamo.reset()
    into = torch.zeros(shape)
    torch.compile(layer, fullgraph=True, backend=backend)(random(M, K), leaf(random(*shape)), into)
    assert fixed == expected
    assert not vars(into)  # as the user gave it


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

    with pytest.raises(ProblemError, match=r"main_grad \[4, 8\].*a copy.*TORCHINDUCTOR_CACHE_DIR"):
        asked(inside)
    asked(Trees(at + 64))
    asked(Trees(at - 64, result=at))
    stream = "another"
    asked(inside)
    stream, capturing = "stream", False
    asked(inside)
