"""What the tensors of a call must be before anything reads them.

Warm calls ask none of this but whether a level of forward-mode differentiation is open. New plans,
addresses that are new to a plan, and exceptions of calls do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from warploom.arguments import shown as shown
from warploom.errors import ProblemError
from warploom.runtime.counters import counters

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl

Named = Iterable[tuple[str, object]]  # what a call is given; None is left out
Written = Sequence[tuple[str, torch.Tensor | None]]  # what it is given for a kernel to write


_IN_MEMORY = {torch.Tensor, torch.nn.Parameter}


class WithoutMemoryError(ProblemError):
    """Meta and fake tensors and wrapper subclasses: operators know what they do, no kernel does."""


class UnlikeError(ProblemError):
    """Tensors that lie otherwise than those that a plan was made for: another way may take them."""


def explained(error: Exception, require: Callable[..., None], *given: object) -> Exception:
    """Return what `require` says of a call's arguments, which raised `error`; else `error`."""
    try:
        require(*given)
    except ProblemError as found:
        return found
    return error


def normal(
    extents: Sequence[int],
    random: torch.Generator | None,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of normal numbers; on `meta`, where torch would load its compiler to draw none."""
    if torch.device(device).type == "meta":
        return torch.empty(tuple(extents), device=device, dtype=dtype)
    return torch.randn(tuple(extents), generator=random, device=device, dtype=dtype)


def require_tensors(
    function: str,
    given: Named,
    required: Container[str],
    *,
    nested: str = "",
    gradients: str = "",
) -> None:
    """Raise ProblemError for the first that is no tensor which `function` could read.

    Those that are not `required` may be None. What the function has for those who pass `nested`
    tensors, or ask torch.func for `gradients`, ends the advice.
    """
    for name, value in given:
        if value is None and name not in required:
            continue
        if not isinstance(value, torch.Tensor):
            raise ProblemError(
                f"{name} {shown(value)} of type {type(value).__name__}",
                rule="must be a torch tensor",
                fix="torch.as_tensor makes one of numbers, lists and numpy arrays",
            )
        if value.layout != torch.strided or value.is_nested:
            raise ProblemError(
                f"{name}, a {'nested' if value.is_nested else 'sparse'} tensor ({value.layout})",
                rule="must be dense and strided",
                fix=f"use .to_dense(), for nested tensors .to_padded_tensor(0.0){nested}",
            )
    if torch._C._get_tracing_state() is not None:
        raise ProblemError(
            f"{function} under torch.jit.trace",
            rule="must be traced by torch.compile, torch.export or make_fx",
            fix="use one of them: torch.jit would keep the result's memory and not the launch",
        )
    refuse_transforms(function, gradients)


def refuse_transforms(function: str, gradients: str = "") -> None:
    """Raise ProblemError inside of a transform of torch.func, whose tensors no plan takes.

    What torch says of an autograd.Function there is for those who write one. `gradients` ends the
    advice; a compiler that traces takes its own way.
    """
    if torch.compiler.is_compiling():
        return
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        raise ProblemError(
            f"{function} inside of torch.func's {transform.key().name.lower()}",
            rule="must be called outside of vmap, grad, jvp and what is made of them",
            fix=f"give batches as leading dimensions{gradients}",
        )


def inside_vmap() -> bool:
    """True where the innermost transform of torch.func is vmap."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Vmap


def launchable(*tensors: torch.Tensor) -> bool:
    """True where plans may be launched on these tensors, and nothing is to see operators instead.

    They may still lie where no plan reads them.
    """
    return all(type(one) in _IN_MEMORY for one in tensors) and not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def require_memory(given: Named) -> None:
    """Raise ProblemError for tensors whose elements lie nowhere, or on several devices.

    It is a WithoutMemoryError where torch dispatches operators on such tensors by itself.
    """
    tensors = [(name, value) for name, value in given if isinstance(value, torch.Tensor)]
    missing = [one for one in tensors if not _in_memory(one[1])]
    if not missing:
        return
    require_one_device(tensors)
    name, tensor = missing[0]
    told = f"{name} {list(tensor.shape)} on {tensor.device}, a {type(tensor).__name__}"
    fakes = [name for name, tensor in missing if isinstance(tensor, FakeTensor)]
    if fakes and len(missing) < len(tensors):
        raise ProblemError(
            f"{', '.join(fakes)} together with tensors that have memory",
            rule="must all be fake tensors, or none",
            fix="call inside of their FakeTensorMode",
        )
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        raise WithoutMemoryError(
            f"{told} without memory of its own",
            rule="must have memory: a plan runs no operators",
            fix="call the function that the plan is of",
        )
    raise ProblemError(
        told,
        rule="must have memory: its storage is empty, as after untyped_storage().resize_(0)",
        fix="gather or allocate it first (FSDP frees parameters between their uses)",
    )


def lowered(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor where autocast is on for its device, as torch does those of its products."""
    device = tensor.device.type
    eligible = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not (eligible and device in ("cuda", "cpu") and torch.is_autocast_enabled(device)):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def require_one_device(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ProblemError for tensors on several devices."""
    devices = {name: tensor.device for name, tensor in tensors}
    if len(set(devices.values())) > 1:
        raise ProblemError(
            ", ".join(f"{name} on {device}" for name, device in devices.items()),
            rule="must be on one device",
            fix="move them together",
        )


def _in_memory(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return not tensor.is_meta
    try:
        if type(tensor) in _IN_MEMORY:  # told without an object for its storage, which takes a us
            return tensor.data_ptr() != tensor.storage_offset() * tensor.element_size()
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of a wrapper subclass
        return False


def refuse_dual(function: str, values: Iterable[object]) -> None:
    """Raise ProblemError for a tensor with a tangent, which a kernel would drop.

    To be asked where forward_ad._current_level >= 0 only, as everywhere else there is none.
    """
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise ProblemError(
                f"a dual tensor of shape {list(value.shape)}",
                rule=f"{function} has no forward-mode derivative",
                fix="pass forward_ad.unpack_dual(tensor).primal, or use plain torch operations",
            )


# ---- Tensors that torch has negated lazily -------------------------------------------------------
#
# Tensors that torch has negated lazily: their memory holds every value with the other sign.
#
# `x.conj().imag` sets the negative bit (`Tensor.is_neg()`), which torch's operators resolve and
# kernels do not see. A plan resolves what its kernel reads, as a copy that is counted, and refuses
# what its kernel writes. Signatures and torch's guards tell negated tensors from others, so that a
# warm call of plain tensors asks no more than that. The conjugate bit is set for complex tensors
# only, which no kernel takes.

CallT = TypeVar("CallT")  # a call, as call.py has it
Copied = Mapping[int, torch.Tensor]  # by the identity of what they stand for


def negated(given: Named) -> dict[str, torch.Tensor]:
    """Those tensors that have the negative bit, by their names."""
    return {
        name: value for name, value in given if isinstance(value, torch.Tensor) and value.is_neg()
    }


def refuse_negated(given: Named, rule: str = "must not be: kernels write its memory") -> None:
    """Raise ProblemError for the first tensor that has the negative bit."""
    for name, value in given:
        if isinstance(value, torch.Tensor) and value.is_neg():
            raise ProblemError(
                f"{name} {list(value.shape)} that torch has negated lazily (is_neg())",
                rule=rule,
                fix=f"pass {name}.resolve_neg(), which is a tensor of its own",
            )


def resolved(call: CallT) -> CallT:
    """The same call, of copies of what is negated; the call itself where nothing is."""
    return _with(call, _resolve)


def laid_out_as_resolved(call: CallT) -> CallT:
    """The same call with uninitialised tensors in the places of those copies, for a plan."""
    return _with(call, _room)


def _with(call: CallT, made: Callable[[str, torch.Tensor], torch.Tensor]) -> CallT:
    copies = {id(one): made(name, one) for name, one in negated(cast("Any", call).named()).items()}
    return cast("CallT", _replaced(call, copies)) if copies else call


def _resolve(name: str, tensor: torch.Tensor) -> torch.Tensor:
    counters.add("copies")
    return tensor.resolve_neg()


def _room(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool or (tensor.is_floating_point() and tensor.itemsize == 1):
        raise ProblemError(
            f"{name} of {tensor.dtype} that torch has negated lazily (is_neg())",
            rule="must be of a type that torch negates",
            fix="convert the tensor that it is a view of",
        )
    return torch.empty_like(tensor, requires_grad=tensor.requires_grad)


def _replaced(value: object, copies: Copied) -> object:
    """A call, or a part of one, with copies in the places of what they stand for."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, tuple | list):  # items of an epilogue, gradients
        parts = tuple(_replaced(one, copies) for one in value)
        same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if same else parts
    if is_dataclass(value) and not isinstance(value, type):
        found = {
            one.name: new
            for one in fields(value)
            if one.init and (new := _replaced(old := getattr(value, one.name), copies)) is not old
        }
        return replace(value, **found)
    return value
