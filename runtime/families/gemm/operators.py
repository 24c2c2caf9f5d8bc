"""The operators of GEMM that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its steps flatten it: a word for each, and their tensors and numbers; outputs of steps,
which are written, cross beside `out`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families._product.epilogue import unseen
from warploom.runtime.families._product.examples import Dimension, Examples, items, unfit
from warploom.runtime.families._product.operands import result_type
from warploom.runtime.families._product.steps import KINDS, columns, flatten
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.block_scales import block_scales, without_gradients
from warploom.runtime.families.gemm.call import (
    GemmCall,
    refuse_grad,
    requiring_grad,
    written_unseen,
)
from warploom.runtime.families.gemm.gradient import gradients, once
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    GradientOptions,
    Preactivation,
    kept_type,
    numbers_of,
    read_by,
    rule,
    storing_items,
    tensors_of,
    way_of,
)
from warploom.runtime.families.gemm.operator_arguments import (
    WIDTH,
    Call,
    Gradients,
    Outputs,
    dispatched,
    empty_product,
    empty_result,
    listed_of,
)
from warploom.runtime.operator import is_distributed, no_gradient, register
from warploom.runtime.plan import planned


class _Refused(NamedTuple):
    """What the operator takes that raises; `name` is that of an output that requires grad."""

    a: Annotated[torch.Tensor, "Tensor"]
    b: Annotated[torch.Tensor, "Tensor"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    name: Annotated[str, "str"]


_AUXILIARY = [kind for kind, one in KINDS.items() if one.step.auxiliary]
_WRITTEN = {
    "out": "Tensor(a!)",
    **{kind: f"Tensor({chr(ord('b') + i)}!)?" for i, kind in enumerate(_AUXILIARY)},
}


def _run(
    call: Call, out: torch.Tensor | None, written: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    found = parse_name(call.spec) if call.spec else None
    listed = listed_of(call, written)
    with torch.no_grad():
        gemm = GemmCall(call.a, call.b, listed, out, call.out_dtype, call.accumulation, found)
        return planned(gemm).run(gemm)


def _gemm(*given: Any) -> torch.Tensor:
    return _run(Call(*given[:WIDTH]), None, {})


def _gemm_outputs(*given: Any) -> list[torch.Tensor]:
    call, outputs = Call(*given[:WIDTH]), Outputs(*given[WIDTH : WIDTH + 2])
    asked = Gradients(*given[WIDTH + 2 :])
    if asked.accumulate_into is not None:
        refuse_copied(asked.accumulate_into)
    written = [
        torch.empty_like(one) if KINDS[kind].overwrites else one.clone()
        for kind, one in zip(outputs.written_kinds, outputs.written, strict=True)
    ]
    return [_run(call, None, dict(zip(outputs.written_kinds, written, strict=True))), *written]


def _gemm_out(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    _run(Call(*given), out, written)


def _refused(*given: Any) -> NoReturn:
    raise unseen(_Refused(*given).name)


def _refuse_grad(
    *given: Any, out: torch.Tensor | None = None, **written: torch.Tensor | None
) -> None:
    if torch.is_grad_enabled():
        refuse_grad(given[0], given[1], out, listed_of(Call(*given), written))


def _fake(*given: Any) -> torch.Tensor:
    return empty_result(Call(*given[:WIDTH]))


def _fake_outputs(*given: Any) -> list[torch.Tensor]:
    outputs = Outputs(*given[WIDTH : WIDTH + 2])
    return [_fake(*given), *map(torch.empty_like, outputs.written)]


def _fake_out(*given: Any, **written: torch.Tensor | None) -> None:
    return None


def _fake_refused(*given: Any) -> torch.Tensor:
    call = _Refused(*given)
    return empty_product(call.a, call.b, call.b.shape[-1], call.out_dtype)


# ---- Gradients and vmap --------------------------------------------------------------------------


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: torch.Tensor | Sequence[torch.Tensor],
) -> None:
    """Keep what the gradients of an operator's call need."""
    call = Call(*inputs[:WIDTH])
    asked = Gradients(*inputs[WIDTH + len(Outputs._fields) :])
    results = [output] if isinstance(output, torch.Tensor) else output
    listed = read_by(listed_of(call, {}))
    tensors = (call.a, call.b, *call.operands)
    needed = tuple(one.requires_grad for one in tensors)
    stored = call.out_dtype in FLOATS
    how = way_of(listed, needed, preactivation=asked.preactivation, stored=stored)
    ctx.rule = rule(tensors, listed, needed, how)
    kept = [tensors[place] for place in ctx.rule.kept]
    if how in ("output", "save"):  # what is stored for that comes last
        kept.append(results[0 if how == "output" else -1])
    ctx.save_for_backward(*kept)
    ctx.set_materialize_grads(False)
    ctx.numbers = numbers_of(listed)
    dtype = asked.gradient_dtype or torch.bfloat16
    ctx.options = GradientOptions(call.accumulation, dtype, asked.accumulate_into)
    ctx.none = list(map(no_gradient, inputs))


def _backward(ctx: Any, *arriving: Any) -> tuple[object, ...]:  # noqa: ANN401
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
    results = list(ctx.none)
    results[:2], results[Call._fields.index("operands")] = found[:2], list(found[2:])
    return tuple(results)


def _vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
    """The rule of `warploom::gemm`."""
    folded = _folded(info.batch_size, Call(*in_dims), Call(*given))
    return torch.ops.warploom.gemm(*folded), 0


def _vmap_outputs(
    info: Any,  # noqa: ANN401
    in_dims: tuple[Any, ...],
    *given: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of `warploom::gemm_outputs`, of which each example may store a preactivation."""
    call, outputs = Call(*given[:WIDTH]), Outputs(*given[WIDTH : WIDTH + 2])
    folded = _folded(info.batch_size, Call(*in_dims[:WIDTH]), call)
    shape = (*torch.broadcast_shapes(folded.a.shape[:-2], folded.b.shape[:-2]),)  # type: ignore[no-untyped-call]
    stored = folded.kinds.index("preactivation") if "preactivation" in folded.kinds else 0
    shape = (*shape, folded.a.shape[-2], columns(folded.kinds[:stored], folded.b.shape[-1]))
    if any(kind != "preactivation" for kind in outputs.written_kinds):
        raise unfit(", ".join(outputs.written_kinds))
    written = [one.new_empty((), device=folded.a.device).expand(shape) for one in outputs.written]
    into = given[WIDTH + 3]
    if into is not None:
        raise unfit("accumulate_into")
    results: list[torch.Tensor] = torch.ops.warploom.gemm_outputs(
        *folded, outputs.written_kinds, written, *given[WIDTH + 2 :]
    )
    return results, [0] * len(results)


def _folded(count: int, dims: Call, call: Call) -> Call:
    """A call of all examples."""
    a, b = call.a, call.b
    dim_a: Dimension = dims.a  # type: ignore[assignment]
    dim_b: Dimension = dims.b  # type: ignore[assignment]
    one_a = a if dim_a is None else a.select(dim_a, 0)
    one_b = b if dim_b is None else b.select(dim_b, 0)
    _refuse_block_scales(one_a, one_b, dims, call)
    batches = torch.broadcast_shapes(one_a.shape[:-2], one_b.shape[:-2])  # type: ignore[no-untyped-call]
    examples = Examples(count, Extents(tuple(batches), one_a.shape[-2], one_b.shape[-1]))
    if dim_a is None and dim_b is None:  # only items differ
        a, dim_a = a.expand(count, *a.shape), 0
    if dim_a is not None:
        a = examples.first(a, dim_a, 2)
    if dim_b is not None:
        b = examples.first(b, dim_b, 2)
    own: Sequence[Any] = dims.operands or [None] * len(call.operands)
    flat = flatten(list(items(listed_of(call, {}), iter(own), examples)))
    return call._replace(a=a, b=b, kinds=flat.words, operands=flat.tensors, numbers=flat.numbers)


def _refuse_block_scales(a: torch.Tensor, b: torch.Tensor, dims: Call, call: Call) -> None:
    own: Sequence[Any] = dims.operands or [None] * len(call.operands)
    pairs = zip(call.operands, own, strict=True)
    examples = [one if dim is None else one.select(dim, 0) for one, dim in pairs]
    if block_scales(a, b, listed_of(call._replace(operands=examples), {})) is not None:
        raise ProblemError(
            "block scales inside of torch.func's vmap",
            rule="must be of calls outside of it",
            fix="give batches as leading dimensions, of the scales too",
        )


# ---- Registration --------------------------------------------------------------------------------


register(
    "gemm",
    Call,
    returns="Tensor",
    run=_gemm,
    fake=_fake,
    backward=_backward,
    save=_save,
    vmap=_vmap,
)
register(
    "gemm_outputs",
    Call,
    Outputs,
    Gradients,
    returns="Tensor[]",
    run=_gemm_outputs,
    fake=_fake_outputs,
    backward=_backward,
    save=_save,
    vmap=_vmap_outputs,
)
register(
    "gemm_out",
    Call,
    returns="()",
    run=_gemm_out,
    fake=_fake_out,
    written=_WRITTEN,
    refuse=_refuse_grad,
)
register("gemm_unseen", _Refused, returns="Tensor", run=_refused, fake=_fake_refused)


# ---- A call, for a compiler to trace -------------------------------------------------------------


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulation: Accumulation,
    spec: KernelSpec | str | None,
    preactivation: Preactivation = "recompute",
    accumulate_into: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace. Arguments are those of `GemmCall`.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    `out` with what requires grad. Dynamo would make another error of that one, so there an operator
    raises it, as soon as the compiled function runs.
    """
    if is_distributed(a) or is_distributed(b):
        from warploom.runtime.families.gemm import sharding  # noqa: F401 (registers the rules)
    asked = result_type(a, out, out_dtype, len(listed) > 0)
    wanted = torch.is_grad_enabled() and requiring_grad(a, b, out, listed) is not None
    if wanted and block_scales(a, b, listed) is not None:
        raise without_gradients()
    name = written_unseen(a, b, out, listed) if wanted else None
    if name is not None:
        if not torch.compiler.is_dynamo_compiling():
            raise unseen(name)
        return _refuse(a, b[..., : columns(flatten(listed).words, b.shape[-1])], out, asked, name)
    if accumulate_into is not None and torch.compiler.is_dynamo_compiling():
        keep_in_place(accumulate_into)
    gradients = Gradients("recompute", accumulate_into, gradient_dtype)
    z: torch.Tensor | None = None
    if wanted and _saves(a, b, listed, asked, spec, preactivation):
        kept = kept_type(asked, a.dtype)
        z = a.new_empty((), dtype=kept).expand(empty_product(a, b, b.shape[-1], asked).shape)
        listed, gradients = storing_items(listed, z), gradients._replace(preactivation="save")
    flat = flatten(listed)
    written = dict(flat.written)
    if len(written) < len(flat.written):
        kinds = [kind for kind, _ in flat.written]
        often = max(kinds, key=kinds.count)
        raise ProblemError(
            f"an epilogue with {kinds.count(often)} {often} under torch.compile",
            rule="must be one at most",
            fix="call warploom.gemm outside of the compiled function",
        )
    kernel = spec.name if isinstance(spec, KernelSpec) else spec
    given = Call(a, b, flat.words, flat.tensors, flat.numbers, asked, accumulation, kernel)
    if wanted and (written or accumulate_into is not None or gradient_dtype is not None):
        return _outputs(given, gradients, written)
    return dispatched(given, out, written)


def _refuse(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, name: str
) -> torch.Tensor:
    refused: torch.Tensor = torch.ops.warploom.gemm_unseen(a.detach(), b.detach(), dtype, name)
    if out is not None:
        out.detach().copy_(refused)
    return refused


def _saves(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    dtype: torch.dtype,
    spec: object,
    preactivation: Preactivation,
) -> bool:
    """True for a call that stores what its activation is given; what is exported does not."""
    if spec is not None or preactivation == "recompute" or torch.compiler.is_exporting():
        return False
    needed = [one.requires_grad for one in tensors_of(a, b, listed)]
    stored = dtype in FLOATS
    return way_of(listed, needed, preactivation="save", stored=stored) == "save"


def _outputs(
    given: Call, gradients: Gradients, written: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Run a call for autograd, whose operators write to nothing: what steps write is copied.

    What is kept for the backward pass only comes last.
    """
    kinds = sorted(written, key=lambda kind: kind == "preactivation")
    outputs = Outputs(kinds, [written[kind] for kind in kinds])
    d: torch.Tensor
    d, *found = torch.ops.warploom.gemm_outputs(*given, *outputs, *gradients)
    own = gradients.preactivation == "save"
    for one, new in zip(outputs.written[: len(kinds) - own], found, strict=False):
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
