"""The operators that torch.compile sees, registered with torch.library; eager calls pass them by.

A packed weight crosses as its tensors and what its metadata say, an epilogue as its steps flatten
it: a word for each, and their tensors and numbers; outputs of steps, which are written, cross
beside `out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec, parse_name
from warploom.quantization import Metadata, PackedWeight
from warploom.runtime.families._product.epilogue import unseen
from warploom.runtime.families._product.examples import Dimension, Examples, items
from warploom.runtime.families._product.operands import result_type
from warploom.runtime.families._product.steps import KINDS, flatten, step_of, unflatten
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Given, Item
from warploom.runtime.families.mixed_gemm import gradient
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.operator import no_gradient, register


class _Call(NamedTuple):
    """What both operators take, in order, each with its type in their schemas."""

    a: Annotated[torch.Tensor, "Tensor"]
    data: Annotated[torch.Tensor, "Tensor"]
    channel_scales: Annotated[torch.Tensor | None, "Tensor?"]
    channel_zeros: Annotated[torch.Tensor | None, "Tensor?"]
    format: Annotated[str, "str"]
    group: Annotated[int | None, "int?"]
    scale: Annotated[str, "str"]
    activations: Annotated[str, "str"]
    n: Annotated[int, "int"]
    k: Annotated[int, "int"]
    kinds: Annotated[Sequence[str], "str[]"]
    operands: Annotated[Sequence[torch.Tensor], "Tensor[]"]
    numbers: Annotated[Sequence[float], "float[]"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    spec: Annotated[str | None, "str?"]

    @property
    def weight(self) -> PackedWeight:
        """The packed weight again."""
        what = (self.format, self.group, self.scale, self.activations)
        metadata = Metadata(*what, self.n, self.k)
        return PackedWeight(self.data, metadata, self.channel_scales, self.channel_zeros)

    def listed(self, written: Mapping[str, torch.Tensor | None]) -> list[Item]:
        """The items, their outputs being `written`."""
        return unflatten(self.kinds, Given(iter(self.operands), iter(self.numbers), written))

    def asked(
        self, out: torch.Tensor | None, written: Mapping[str, torch.Tensor | None]
    ) -> MixedGemmCall:
        """The call."""
        spec = parse_name(self.spec) if self.spec else None
        return MixedGemmCall(self.a, self.weight, self.listed(written), out, self.out_dtype, spec)


_AUXILIARY = [kind for kind, one in KINDS.items() if one.step.auxiliary]
_WRITTEN = {
    "out": "Tensor(a!)",
    **{kind: f"Tensor({chr(ord('b') + i)}!)?" for i, kind in enumerate(_AUXILIARY)},
}


def _mixed_gemm(*given: Any) -> torch.Tensor:
    with torch.no_grad():
        return gradient.mixed_gemm(_Call(*given).asked(None, {}))


def _mixed_gemm_out(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    with torch.no_grad():
        gradient.mixed_gemm(_Call(*given).asked(out, written))


def _refuse_grad(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    _Call(*given).asked(out, written).refuse()


def _fake(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    return call.a.new_empty((*call.a.shape[:-1], call.n), dtype=call.out_dtype)


def _fake_out(*given: Any, **written: torch.Tensor | None) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
    call = _Call(*inputs)
    read = (call.a, *call.operands)
    needed = tuple(one.requires_grad for one in read)
    gradient.keep(ctx, call.weight, call.listed({}), read, needed)
    ctx.none = list(map(no_gradient, inputs))


def _backward(ctx: Any, dd: torch.Tensor | None) -> tuple[object, ...]:  # noqa: ANN401
    a, *operands = gradient.gradients(ctx, dd)
    return _Call(*ctx.none)._replace(a=a, operands=operands)  # type: ignore[arg-type]


def _vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
    """All examples are rows of one product."""
    call, dims = _Call(*given), _Call(*in_dims)
    if any(dim is not None for dim in in_dims[1:4]):
        raise ProblemError(
            "a packed weight inside of torch.func's vmap",
            rule="must be one for all examples",
            fix="call warploom.mixed_gemm for each",
        )
    dim: Dimension = dims.a  # type: ignore[assignment]
    a = call.a.expand(info.batch_size, *call.a.shape) if dim is None else call.a.movedim(dim, 0)
    examples = Examples(info.batch_size, Extents(tuple(a.shape[1:-2]), a.shape[-2], call.n))
    own: Sequence[Any] = dims.operands or [None] * len(call.operands)
    listed = items(call.listed({}), iter(own), examples)
    flat = flatten([_in_rows(item, examples) for item in listed])
    folded = call._replace(a=a, kinds=flat.words, operands=flat.tensors, numbers=flat.numbers)
    return torch.ops.warploom.mixed_gemm(*folded), 0


def _in_rows(item: Item, examples: Examples) -> Item:
    """An item that all examples share, with what it has for each row again for each of them."""
    kind, value, *rest = item
    reads = step_of(item).reads(item)
    own = examples.at.own(reads)
    if reads not in ("row", "fragment") or value.dim() > len(own):
        return item
    return (kind, examples.each(value, own), *rest)


register(
    "mixed_gemm",
    _Call,
    returns="Tensor",
    run=_mixed_gemm,
    fake=_fake,
    backward=_backward,
    save=_save,
    vmap=_vmap,
)
register(
    "mixed_gemm_out",
    _Call,
    returns="()",
    run=_mixed_gemm_out,
    fake=_fake_out,
    written=_WRITTEN,
    refuse=_refuse_grad,
)


def call(
    a: torch.Tensor,
    weight: PackedWeight,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | str | None,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace. Arguments are those of `MixedGemmCall`.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    outputs where a gradient is wanted.
    """
    asked = result_type(a, out, out_dtype, has_epilogue=True)
    flat, metadata = flatten(listed), weight.metadata
    written = dict(flat.written)
    if len(written) < len(flat.written):
        raise ProblemError(
            f"an epilogue with {len(flat.written)} outputs of {len(written)} kinds",
            rule="must have one of a kind at most under torch.compile",
            fix="call warploom.mixed_gemm outside of the compiled function",
        )
    writing = [*written, *(() if out is None else ("out",))]
    differentiable = MixedGemmCall(a, weight, listed, out)
    wanted = torch.is_grad_enabled() and differentiable.requires_grad
    if wanted and (kind := differentiable.unseen_kind) is not None:
        raise unseen(kind)
    if writing and wanted:
        raise ProblemError(
            f"{', '.join(writing)} under torch.compile, beside tensors that require grad",
            rule="must be left out: operators that autograd differentiates write to nothing",
            fix="call it under torch.no_grad(), or outside of the compiled function",
        )
    given = _Call(
        a,
        weight.slabs,
        weight.channel_scales,
        weight.channel_zeros,
        *(metadata.format, metadata.group, metadata.scale, metadata.activations),
        *(metadata.n, metadata.k),
        flat.words,
        flat.tensors,
        flat.numbers,
        asked,
        spec.name if isinstance(spec, KernelSpec) else spec,
    )
    if out is None and not written:
        result: torch.Tensor = torch.ops.warploom.mixed_gemm(*given)
        return result
    out = _fake(*given) if out is None else out
    torch.ops.warploom.mixed_gemm_out(*given, out=out, **written)
    return out
