"""The CUDA graphs that torch.compile records (mode "reduce-overhead"), and sums that lie in them.

Such a graph copies an input whose address may change into memory of its own. What the forward graph
keeps for the backward pass is then the copy, which the gradient would be added to, and be lost. So
sums are marked as inputs that stay where they are; a copy that is made all the same is refused. As
read in torch/_dynamo/variables/builder.py and torch/_inductor/cudagraph_trees.py, of torch 2.11 and
2.13.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from warploom.errors import ProblemError


def keep_in_place(into: torch.Tensor) -> None:
    """Have graphs of the call that dynamo traces take `into` where it is, as they do parameters.

    For another address they are recorded again. Where dynamo does not trace, this does nothing.
    """
    torch._dynamo.comptime.comptime(_mark_inputs)


def _mark_inputs(context: Any) -> None:  # noqa: ANN401 (of torch._dynamo.comptime)
    """Mark the inputs that `into` is a view of, as torch._dynamo.mark_static_address has them."""
    proxy = context.get_local("into").as_proxy()
    storage, tracer = proxy.node.meta["example_value"].untyped_storage()._cdata, proxy.tracer
    while tracer is not None:  # of a part, such as a checkpoint, and of all around it
        for node in tracer.graph.find_nodes(op="placeholder"):
            told, value = node.meta.get("tensor_dict"), node.meta.get("example_value")
            if told is None or value.layout != torch.strided:  # others have no storage
                continue
            if value.untyped_storage()._cdata == storage:
                told.setdefault("_dynamo_static_input_type", "unguarded")
        tracer = tracer.parent


def refuse_copied(into: torch.Tensor) -> None:
    """Raise ProblemError for an `accumulate_into` that a graph which is being recorded has copied.

    Where no stream captures this asks nothing else. Graphs that users capture copy nothing.
    """
    if not (into.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees and trees.get_manager(into.get_device(), create_if_none_exists=False)
    if manager is None or torch.cuda.current_stream() != manager.stream:
        return
    node = manager.current_node  # the graph before this one, whose results are not copied
    if node is not None and node._is_cuda_graph_recorded_tensor(into):
        return
    address = into.untyped_storage().data_ptr()
    for one in torch.cuda.memory_snapshot(manager.cuda_graphs_thread_pool):  # type: ignore[no-untyped-call]
        if one["address"] <= address < one["address"] + one["total_size"]:
            raise ProblemError(
                f"accumulate_into {list(into.shape)} in a CUDA graph of torch.compile, a copy",
                rule="must be at an address that is fixed, and a multiple of 16",
                fix="pass the compiled function the tensor itself, or a view of it, and empty "
                "TORCHINDUCTOR_CACHE_DIR, where torch may have an older graph that copies it",
            )
