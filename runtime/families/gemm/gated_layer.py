"""down(f(x gate^T) * (x up^T)), a gated layer, as one function of autograd: two GEMMs forward.

The first stores what its gate is given, z, beside h, which the second multiplies. Backward, the
GEMM that computes the gradient of h takes it past the gate in its epilogue: it stores that of z and
computes h again, so that nothing else of [.., inner] is kept or passed over. Those of x and of the
weights are GEMMs of these. Compilers and modes see two operators, one each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch

from warploom.generator.epilogue import GateFunction
from warploom.runtime.families._product.operands import matrix
from warploom.runtime.families._product.steps.gate_gradient import gradient_kind
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.gemm.api import multiplied
from warploom.runtime.families.gemm.gradient import add, once
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.operands import dense_copy
from warploom.runtime.operator import no_gradient, register
from warploom.runtime.tensors import launchable

Keeps = Literal["z", "h", "nothing"]
"""What the backward pass has beside x and weights: what the gate is given, its result, or nothing,
where z is computed again.
"""


class GatedLayer(NamedTuple):
    """What a gated layer computes: of x [.., k] by gate and up [inner, k] and down [n, inner]."""

    x: Annotated[torch.Tensor, "Tensor"]
    gate: Annotated[torch.Tensor, "Tensor"]
    up: Annotated[torch.Tensor, "Tensor"]
    down: Annotated[torch.Tensor, "Tensor"]
    gate_bias: Annotated[torch.Tensor | None, "Tensor?"]
    up_bias: Annotated[torch.Tensor | None, "Tensor?"]
    down_bias: Annotated[torch.Tensor | None, "Tensor?"]
    function: Annotated[GateFunction, "str"]
    keeps: Annotated[Keeps, "str"]


TENSORS = 7  # the first fields
WEIGHTS = slice(1, 4)


class MainGrads(NamedTuple):
    """The fp32 tensors that gradients of the weights are added to; None: they are returned."""

    gate: torch.Tensor | None = None
    up: torch.Tensor | None = None
    down: torch.Tensor | None = None


class Needed(NamedTuple):
    """Which gradients are wanted; of gate and up, both or none are computed."""

    x: bool
    both: bool
    down: bool
    both_bias: bool
    down_bias: bool

    @classmethod
    def of(cls, needed: Sequence[bool]) -> Needed:
        """Those of the tensors of a layer."""
        x, gate, up, down, gate_bias, up_bias, down_bias = needed
        return cls(x, gate or up, down, gate_bias or up_bias, down_bias)

    @property
    def inner(self) -> bool:
        """Whether a gradient passes the gate."""
        return self.x or self.both or self.both_bias


class Found(NamedTuple):
    """Gradients; those of gate and up as one tensor."""

    x: torch.Tensor | None = None
    both: torch.Tensor | None = None
    down: torch.Tensor | None = None
    both_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def gated_layer(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    function: GateFunction,
    preactivation: Preactivation = "save",
    main_grads: MainGrads | None = None,
) -> torch.Tensor:
    """Return down(f(gate(x)) * up(x)), differentiable once, where a gradient is wanted.

    Args:
        x: [.., k], bf16 or fp16, with two dimensions at least and not empty.
        weights: Of gate and up, [inner, k], and of down, [n, inner], of x's type. One tensor behind
            the other in memory are read in place, else they are copied; inner a multiple of 8.
        biases: Of these; gate and up both have one or none.
        function: Of the gate.
        preactivation: "save" keeps what the gate is given for the backward pass, 2 inner values a
            row; "recompute" computes it again there.
        main_grads: Where gradients of weights are added, which are then not returned. Not for
            compiled functions.

    Returns:
        [.., n], of x's type.
    """
    tensors = (x, *weights, *biases)
    needed = Needed.of([one is not None and one.requires_grad for one in tensors])
    keeps: Keeps = "h" if not needed.inner else "z" if preactivation == "save" else "nothing"
    layer = GatedLayer(x, *weights, *biases, function, keeps)
    compiling = torch.compiler.is_compiling()
    if compiling or not launchable(*[one for one in tensors if one is not None]):
        y: torch.Tensor = torch.ops.warploom.gated_layer(*layer)[0]
        return y
    found: torch.Tensor = _apply(main_grads or MainGrads(), *layer)
    return found


def whole(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Two tensors as one of twice the rows: a view where the second follows the first in memory."""
    if joined(one, other):
        return one.detach().as_strided((2 * one.shape[0], *one.shape[1:]), one.stride())
    return torch.cat((one.detach(), other.detach()))


def joined(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor's memory follows that of another in one storage, with no gap."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    storage = one.untyped_storage()
    return (
        alike
        and one.is_contiguous()
        and other.is_contiguous()
        and storage.data_ptr() == other.untyped_storage().data_ptr()
        and other.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
    )


# ---- On tensors with memory ----------------------------------------------------------------------


def biased(bias: torch.Tensor | None) -> list[Item]:
    """The items of a bias, where there is one."""
    return [] if bias is None else [("bias", bias)]


def _both_bias(layer: GatedLayer) -> torch.Tensor | None:
    if layer.gate_bias is None or layer.up_bias is None:
        return None
    return whole(layer.gate_bias, layer.up_bias)


def forward(layer: GatedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what is kept for the backward pass."""
    x, both = layer.x, whole(layer.gate, layer.up)
    listed = biased(_both_bias(layer))
    z = x.new_empty((*x.shape[:-1], len(both) if layer.keeps == "z" else 0))
    if layer.keeps == "z":
        listed.append(("preactivation", z))
    h = multiplied(x, both.t(), [*listed, ("gate", layer.function)])
    y = multiplied(h, layer.down.detach().t(), biased(layer.down_bias))
    return y, h if layer.keeps == "h" else z


def backward(
    layer: GatedLayer,
    needed: Needed,
    main_grads: MainGrads,
    dy: torch.Tensor,
    kept: torch.Tensor,
) -> Found:
    """The gradients that are wanted, of a layer whose result has that of `dy`."""
    if dy.stride(-1) != 1 or dy.stride(-2) == 0:  # as that of a sum, expanded
        dy = dense_copy(dy)
    x, h, dz = layer.x, kept, None
    both = whole(layer.gate, layer.up) if needed.inner else None
    if both is not None:
        z = kept
        if layer.keeps == "nothing":
            z = multiplied(x, both.t(), biased(_both_bias(layer)))
        dz = torch.empty_like(z)
        h = multiplied(dy, layer.down.detach(), [(gradient_kind(layer.function, "halves"), z, dz)])
    of_x = of_both = of_down = of_both_bias = of_down_bias = None
    if needed.down:
        of_down = _of_weight(dy, h, main_grads.down)
    if needed.down_bias:
        of_down_bias = bias_gradient(dy, dy.dtype)
    if dz is not None and both is not None:
        if needed.x:
            of_x = multiplied(dz, both)
        if needed.both:
            of_both = _of_both(dz, x, main_grads)
        if needed.both_bias:
            of_both_bias = bias_gradient(dz, dz.dtype)
    return Found(of_x, of_both, of_down, of_both_bias, of_down_bias)


def _of_weight(
    d: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The gradient of a weight, or None where it was added to a tensor."""
    left, right = matrix(d).t(), matrix(x)
    if into is None:
        return multiplied(left, right)
    add(left, right, ((), None), into, "fast")
    return None


def _of_both(dz: torch.Tensor, x: torch.Tensor, into: MainGrads) -> torch.Tensor | None:
    if into.gate is None and into.up is None:
        return _of_weight(dz, x)
    inner = dz.shape[-1] // 2
    if into.gate is not None and into.up is not None and joined(into.gate, into.up):
        return _of_weight(dz, x, whole(into.gate, into.up))
    halves = (matrix(dz)[:, :inner], into.gate), (matrix(dz)[:, inner:], into.up)
    found = [_of_weight(half, x, one) for half, one in halves]
    if found[0] is None and found[1] is None:
        return None
    return torch.cat([x.new_empty((inner, x.shape[-1])) if one is None else one for one in found])


def bias_gradient(d: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The gradient of a bias that was added to what has the gradient `d`."""
    return cast("torch.Tensor", activation_backward(d, sums=True)[1]).to(dtype)


class _GatedLayer(torch.autograd.Function):
    """The result of a layer, differentiable in its tensors."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        main_grads: MainGrads,
        *given: Any,
    ) -> torch.Tensor:
        layer = GatedLayer(*given)
        y, kept = forward(layer)
        ctx.save_for_backward(kept, *layer[:TENSORS])
        ctx.set_materialize_grads(False)
        ctx.rest = layer[TENSORS:]
        ctx.main_grads = main_grads
        ctx.needed = Needed.of(ctx.needs_input_grad[1 : 1 + TENSORS])
        return y

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients that are wanted."""
        wanted = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(wanted)

        def compute(dy: torch.Tensor, kept: torch.Tensor, *tensors: torch.Tensor) -> Found:
            layer = GatedLayer(*tensors, *ctx.rest)  # type: ignore[arg-type]
            return backward(layer, ctx.needed, ctx.main_grads, dy, kept)

        found = once(compute, dy, *ctx.saved_tensors)
        return None, *in_order(Found(*found), wanted[1:], ctx.main_grads), None, None


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Any = super(torch.autograd.Function, _GatedLayer).apply


def in_order(
    found: Found, wanted: Sequence[bool], main_grads: MainGrads
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a layer's tensors, in order: those of gate and up are halves of one."""
    gate = up = gate_bias = up_bias = None
    if found.both is not None:
        gate, up = found.both.chunk(2)
    if found.both_bias is not None:
        gate_bias, up_bias = found.both_bias.chunk(2)
    each = (found.x, gate, up, found.down, gate_bias, up_bias, found.down_bias)
    added = (None, *main_grads, None, None, None)
    return tuple(
        one if asked and into is None else None
        for one, asked, into in zip(each, wanted, added, strict=False)
    )


# ---- Operators -----------------------------------------------------------------------------------


class _Backward(NamedTuple):
    """What the operator of the backward pass takes behind the layer."""

    dy: Annotated[torch.Tensor, "Tensor"]
    kept: Annotated[torch.Tensor, "Tensor"]
    needed: Annotated[Sequence[bool], "bool[]"]


_WIDTH = len(GatedLayer._fields)


def _forward_operator(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return forward(GatedLayer(*given))


def _fake_forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer = GatedLayer(*given)
    lead, inner = layer.x.shape[:-1], layer.gate.shape[0]
    kept = {"z": 2 * inner, "h": inner, "nothing": 0}[layer.keeps]
    y = layer.x.new_empty((*lead, layer.down.shape[0]))
    return y, layer.x.new_empty((*lead, kept))


def _backward_operator(*given: Any) -> list[torch.Tensor]:
    layer, rest = GatedLayer(*given[:_WIDTH]), _Backward(*given[_WIDTH:])
    with torch.no_grad():
        found = backward(layer, Needed(*rest.needed), MainGrads(), rest.dy, rest.kept)
    return [one for one in found if one is not None]


def _fake_backward(*given: Any) -> list[torch.Tensor]:
    layer, rest = GatedLayer(*given[:_WIDTH]), _Backward(*given[_WIDTH:])
    inner, k = layer.gate.shape
    shapes = (layer.x.shape, (2 * inner, k), layer.down.shape, (2 * inner,), layer.down.shape[:1])
    wanted = zip(shapes, rest.needed, strict=True)
    return [layer.x.new_empty(shape) for shape, needed in wanted if needed]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    layer = GatedLayer(*inputs)
    ctx.save_for_backward(output[1], *layer[:TENSORS])
    ctx.set_materialize_grads(False)
    ctx.rest = layer[TENSORS:]
    tensors = cast("tuple[torch.Tensor | None, ...]", layer[:TENSORS])
    ctx.wanted = [one is not None and one.requires_grad for one in tensors]
    ctx.none = list(map(no_gradient, inputs))


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dy: torch.Tensor | None,
    _: torch.Tensor | None,
) -> tuple[object, ...]:
    """Return the gradients of the operator's arguments."""
    if dy is None:
        return tuple(ctx.none)
    needed = Needed.of(ctx.wanted)

    def compute(dy: torch.Tensor, kept: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = torch.ops.warploom.gated_layer_backward(
            *tensors, *ctx.rest, dy, kept, list(needed)
        )
        return results

    results = iter(once(compute, dy, *ctx.saved_tensors))
    found = Found(*(next(results) if one else None for one in needed))
    return (*in_order(found, ctx.wanted, MainGrads()), *ctx.none[TENSORS:])


register(
    "gated_layer",
    GatedLayer,
    returns="(Tensor, Tensor)",
    run=_forward_operator,
    fake=_fake_forward,
    backward=_differentiate,
    save=_save,
)
register(
    "gated_layer_backward",
    GatedLayer,
    _Backward,
    returns="Tensor[]",
    run=_backward_operator,
    fake=_fake_backward,
)
