"""The operators of GEMM that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its steps flatten it: a word for each, and their tensors and numbers; outputs of steps,
which are written, cross beside `out`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.runtime.arguments import places_of, schema_of
from warploom.runtime.families._product.call import written_keywords
from warploom.runtime.families._product.epilogue import ITEMS, unseen
from warploom.runtime.families._product.examples import Dimension, Examples, items, unfit
from warploom.runtime.families._product.operands import broadcast, result_type
from warploom.runtime.families._product.steps import KINDS
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.block_scales import block_scales, without_gradients
from warploom.runtime.families.gemm.call import GRADIENT, PRODUCT, GemmCall
from warploom.runtime.families.gemm.gradient import gradients, once
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    kept_type,
    numbers_of,
    read_by,
    rule,
    storing_items,
    tensors_of,
    way_of,
)
from warploom.runtime.operator import is_distributed, no_gradient, register
from warploom.runtime.plan import planned

_PRODUCT, _GRADIENT = schema_of(PRODUCT), schema_of(GRADIENT)
_OUTPUTS = "str[] written_kinds, Tensor[] written"  # of steps, as they were before
_PLACES = places_of(PRODUCT)
_A, _B, _OPERANDS, WIDTH = _PLACES["a"], _PLACES["b"], _PLACES["operands"], len(_PLACES)


def _gemm(*values: Any, **written: torch.Tensor | None) -> torch.Tensor:
    call = GemmCall.crossed(*values, **written)
    with torch.no_grad():
        return planned(call).run(call)


def _gemm_outputs(*values: Any) -> list[torch.Tensor]:
    kinds, before, _, into, _ = values[WIDTH:]
    if into is not None:
        refuse_copied(into)
    written = {
        kind: torch.empty_like(one) if KINDS[kind].overwrites else one.clone()
        for kind, one in zip(kinds, before, strict=True)
    }
    return [_gemm(*values[:WIDTH], **written), *written.values()]


def _gemm_out(*values: Any, **written: torch.Tensor | None) -> None:
    _gemm(*values, **written)


def _refused(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, name: str) -> NoReturn:
    raise unseen(name)


def _refuse_grad(*values: Any, **written: torch.Tensor | None) -> None:
    GemmCall.crossed(*values, **written).refuse()


def _fake(*values: Any) -> torch.Tensor:
    return GemmCall.crossed(*values).fake()


def _fake_outputs(*values: Any) -> list[torch.Tensor]:
    return [_fake(*values[:WIDTH]), *map(torch.empty_like, values[WIDTH + 1])]


def _fake_out(*values: Any, **written: torch.Tensor | None) -> None:
    return None


def _fake_refused(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, name: str
) -> torch.Tensor:
    return GemmCall(a, b, out_dtype=out_dtype).fake()


# ---- Gradients and vmap --------------------------------------------------------------------------


def save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: torch.Tensor | Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients of an operator's call need."""
    asked = inputs[WIDTH + 2 :] or ("recompute", None, None)
    call = GemmCall.crossed(*inputs[:WIDTH], *asked)
    results = [output] if isinstance(output, torch.Tensor) else output
    tensors = tensors_of(call.a, call.b, call.listed)
    listed = read_by(call.listed)
    needed = tuple(one.requires_grad for one in tensors)
    stored = call.out_dtype in FLOATS
    how = way_of(listed, needed, preactivation=call.preactivation, stored=stored)
    ctx.rule = rule(tensors, listed, needed, how)
    kept = [tensors[place] for place in ctx.rule.kept]
    if how in ("output", "save"):  # what is stored for that comes last
        kept.append(results[0 if how == "output" else -1])
    ctx.save_for_backward(*kept)
    ctx.set_materialize_grads(False)
    ctx.numbers = numbers_of(listed)
    ctx.options = call.gradient_options
    ctx.none = list(map(no_gradient, inputs))


def backward(ctx: Any, *arriving: Any) -> tuple[object, ...]:  # noqa: ANN401
    """Return the gradients of an operator's arguments, in their structure."""
    dd = arriving[0][0] if isinstance(arriving[0], list | tuple) else arriving[0]
    if dd is None:
        return tuple(ctx.none)
    given = (ctx.rule, ctx.numbers, ctx.options, dd, *ctx.saved_tensors)
    if any(map(is_distributed, given[3:])):
        from warploom.runtime.families.gemm import sharding  # which imports torch's

        found = sharding.gradients(*given)
    else:
        found = once(partial(gradients, *given[:3]), *given[3:])
    results = [*ctx.none]
    results[_A], results[_B], results[_OPERANDS] = found[0], found[1], list(found[2:])
    return tuple(results)


def _vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
    """The rule of `warploom::gemm`."""
    values, _ = _folded(info.batch_size, in_dims, given).crossing()
    return torch.ops.warploom.gemm(*values), 0


def _vmap_outputs(
    info: Any,  # noqa: ANN401
    in_dims: tuple[Any, ...],
    *given: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of `warploom::gemm_outputs`, of which each example may store a preactivation."""
    kinds, before, _, into, _ = given[WIDTH:]
    folded = _folded(info.batch_size, in_dims, given)
    if any(kind != "preactivation" for kind in kinds):
        raise unfit(", ".join(kinds))
    if into is not None:
        raise unfit("main_grad")
    stored = [item[0] for item in folded.listed].index("preactivation") if kinds else 0
    shape = replace(folded, listed=folded.listed[:stored]).fake().shape
    written = [one.new_empty((), device=folded.a.device).expand(shape) for one in before]
    values, _ = folded.crossing()
    results: list[torch.Tensor] = torch.ops.warploom.gemm_outputs(
        *values, kinds, written, *given[WIDTH + 2 :]
    )
    return results, [0] * len(results)


def _folded(count: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]) -> GemmCall:
    """A call of all examples."""
    call = GemmCall.crossed(*values[:WIDTH])
    a, b = call.a, call.b
    dim_a: Dimension = in_dims[_A]
    dim_b: Dimension = in_dims[_B]
    own: Sequence[Any] = in_dims[_OPERANDS] or [None] * len(values[_OPERANDS])
    one_a = a if dim_a is None else a.select(dim_a, 0)
    one_b = b if dim_b is None else b.select(dim_b, 0)
    _refuse_block_scales(one_a, one_b, call.listed, own)
    batches = torch.broadcast_shapes(one_a.shape[:-2], one_b.shape[:-2])  # type: ignore[no-untyped-call]
    examples = Examples(count, Extents(tuple(batches), one_a.shape[-2], one_b.shape[-1]))
    if dim_a is None and dim_b is None:  # only items differ
        a, dim_a = a.expand(count, *a.shape), 0
    if dim_a is not None:
        a = examples.first(a, dim_a, 2)
    if dim_b is not None:
        b = examples.first(b, dim_b, 2)
    return replace(call, a=a, b=b, listed=list(items(call.listed, iter(own), examples)))


def _refuse_block_scales(
    a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item], own: Sequence[Dimension]
) -> None:
    dims = iter(own)
    examples = [
        (item[0], item[1] if (dim := next(dims)) is None else item[1].select(dim, 0), *item[2:])
        if isinstance(item[1], torch.Tensor)
        else item
        for item in listed
    ]
    if block_scales(a, b, examples) is not None:
        raise ProblemError(
            "block scales inside of torch.func's vmap",
            rule="must be of calls outside of it",
            fix="give batches as leading dimensions, of the scales too",
        )


# ---- Registration --------------------------------------------------------------------------------


register(
    "gemm",
    _PRODUCT,
    returns="Tensor",
    run=_gemm,
    fake=_fake,
    backward=backward,
    save=save,
    vmap=_vmap,
)
register(
    "gemm_outputs",
    f"{_PRODUCT}, {_OUTPUTS}, {_GRADIENT}",
    returns="Tensor[]",
    run=_gemm_outputs,
    fake=_fake_outputs,
    backward=backward,
    save=save,
    vmap=_vmap_outputs,
)
register(
    "gemm_out",
    _PRODUCT,
    returns="()",
    run=_gemm_out,
    fake=_fake_out,
    written=written_keywords(),
    refuse=_refuse_grad,
)
register(
    "gemm_unseen",
    "Tensor a, Tensor b, ScalarType out_dtype, str name",
    returns="Tensor",
    run=_refused,
    fake=_fake_refused,
)


# ---- A call, for a compiler to trace -------------------------------------------------------------


def call(gemm: GemmCall) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    `out` with what requires grad. Dynamo would make another error of that one, so there an operator
    raises it, as soon as the compiled function runs.
    """
    a, b, listed, into = gemm.a, gemm.b, gemm.listed, gemm.main_grad
    if is_distributed(a) or is_distributed(b):
        from warploom.runtime.families.gemm import sharding  # noqa: F401 (registers the rules)
    dtype = result_type(a, gemm.out, gemm.out_dtype, len(listed) > 0)
    gemm.out_dtype = dtype
    wanted = torch.is_grad_enabled() and gemm.requiring_grad() is not None
    if wanted and block_scales(a, b, listed) is not None:
        raise without_gradients()
    name = gemm.written_unseen() if wanted else None
    if name is not None:
        if not torch.compiler.is_dynamo_compiling():
            raise unseen(name)
        columns = b[..., : gemm.fake().shape[-1]]
        return _refuse(a, columns, gemm.out, dtype, name)
    if into is not None and torch.compiler.is_dynamo_compiling():
        keep_in_place(into)
    saves = wanted and _saves(gemm)
    if saves:
        kept = kept_type(dtype, a.dtype)
        z = a.new_empty((), dtype=kept).expand((*broadcast(a, b), a.shape[-2], b.shape[-1]))
        gemm.listed = storing_items(listed, z)
    kinds = [kind for kind, _ in ITEMS.written(gemm.listed)]
    if len({*kinds}) < len(kinds):
        often = max(kinds, key=kinds.count)
        raise ProblemError(
            f"an epilogue with {kinds.count(often)} {often} under torch.compile",
            rule="must be one at most",
            fix="call warploom.gemm outside of the compiled function",
        )
    if wanted and (kinds or into is not None or gemm.gradient_dtype is not None):
        return _outputs(gemm, saves=saves)
    return gemm.dispatched()


def _refuse(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, name: str
) -> torch.Tensor:
    refused: torch.Tensor = torch.ops.warploom.gemm_unseen(a.detach(), b.detach(), dtype, name)
    if out is not None:
        out.detach().copy_(refused)
    return refused


def _saves(gemm: GemmCall) -> bool:
    """True for a call that stores what its activation is given; what is exported does not."""
    if gemm.spec is not None or gemm.preactivation == "recompute":
        return False
    if torch.compiler.is_exporting():
        return False
    needed = [one.requires_grad for one in tensors_of(gemm.a, gemm.b, gemm.listed)]
    stored = gemm.out_dtype in FLOATS
    return way_of(gemm.listed, needed, preactivation="save", stored=stored) == "save"


def _outputs(gemm: GemmCall, *, saves: bool) -> torch.Tensor:
    """Run a call for autograd, whose operators write to nothing: what steps write is copied.

    What is kept for the backward pass only comes last.
    """
    (values, _), written = gemm.crossing(), dict(ITEMS.written(gemm.listed))
    kinds = sorted(written, key=lambda kind: kind == "preactivation")
    before = [written[kind] for kind in kinds]
    asked = "save" if saves else "recompute", gemm.main_grad, gemm.gradient_dtype
    d: torch.Tensor
    d, *after = torch.ops.warploom.gemm_outputs(*values, kinds, before, *asked)
    for one, new in zip(before[: len(kinds) - saves], after, strict=False):
        one.copy_(new.detach())
    return d


# ---- Sums in the CUDA graphs of torch.compile ----------------------------------------------------
#
# Such a graph (mode "reduce-overhead") copies an input whose address may change into memory of its
# own. What the forward graph keeps for the backward pass is then the copy, which the gradient would
# be added to, and be lost. So sums are marked as inputs that stay where they are; a copy that is
# made all the same is refused. As read in torch/_dynamo/variables/builder.py and
# torch/_inductor/cudagraph_trees.py, of torch 2.11 and 2.13.


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
    """Raise ProblemError for a `main_grad` that a graph which is being recorded has copied.

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
                f"main_grad {list(into.shape)} in a CUDA graph of torch.compile, a copy",
                rule="must be at an address that is fixed, and a multiple of 16",
                fix="pass the compiled function the tensor itself, or a view of it, and empty "
                "TORCHINDUCTOR_CACHE_DIR, where torch may have an older graph that copies it",
            )
