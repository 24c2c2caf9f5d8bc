"""Weights of layers that train in fp8, gathered in fp8 by `fully_shard`: half of the bytes.

FSDP2 asks the part of a parameter that a process has what is to be sent, and makes the whole weight
of what arrives. Here a part is cast by the scale of the whole weight, whose largest magnitude the
processes agree on first. The layer multiplies by what was gathered: nothing is cast again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from warploom.errors import ProblemError
from warploom.integrations.recipes import E4M3
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast

_aten = torch.ops.aten
# Operators by which FSDP2 divides a parameter, and makes new ones of its parts.
_DIVIDES = {
    *(_aten.detach.default, _aten.clone.default, _aten.empty_like.default),
    *(_aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default),
    *(_aten.as_strided.default, _aten._to_copy.default, _aten._pin_memory.default),
    _aten.copy_.default,
}
_Metadata = tuple[torch.Tensor, torch.Size]  # the scale, and the size of the whole weight


class ShardedWeight(torch.Tensor):
    """A weight [N, K], or a part of its rows, of 16 bits or fp32, which is gathered in e4m3.

    `own` has its values; operators compute with these.
    """

    own: torch.Tensor

    def __new__(cls, own: torch.Tensor) -> Self:
        """A tensor that looks like `own`, and has no memory of its own."""
        made: Self = _looking_like(cls, own, own.dtype)
        return made

    def __init__(self, own: torch.Tensor) -> None:
        self.own = own

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401 (torch's operators)
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Compute with the values; parts and copies are such weights again."""
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.own, (args, dict(kwargs or {})))
        found = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, found) if func in _DIVIDES else found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.own!r})"

    # Of these torch has C++ functions that look at the memory of a tensor, where this has none.

    @property
    def data(self) -> torch.Tensor:
        """Such a weight with the same memory, without a gradient."""
        return type(self)(self.own.data)

    @data.setter
    def data(self, found: torch.Tensor) -> None:
        """Take other values, as `module.to(dtype)` and some optimizers give them."""
        own = (found.own if isinstance(found, ShardedWeight) else found).detach()
        torch.Tensor.data.__set__(self, ShardedWeight(own))  # type: ignore[attr-defined]
        self.own = own

    def data_ptr(self) -> int:
        """Where the values begin, as safetensors asks."""
        return self.own.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the values, which `share_memory` moves."""
        return self.own.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A weight with memory of its own; of a parameter a parameter, without its gradient."""
        made: torch.Tensor = type(self)(self.own.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        """Be saved as the tensor, or parameter, that it stands for: files know no class of ours."""
        plain = self.own.detach()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(
        self,
        mesh: Any,  # noqa: ANN401 (torch.distributed is imported by its users)
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,  # noqa: ANN401
    ) -> tuple[tuple[torch.Tensor], _Metadata]:
        """Return these rows in e4m3, with zeros to the rows that every process sends."""
        from torch import distributed

        own, rows = self.own.detach(), -(-outer_size[0] // mesh.size())
        if own.shape[1:] != outer_size[1:]:
            raise ProblemError(
                f"a weight {(*outer_size,)} of which a process has {(*own.shape,)}",
                rule="must be divided by rows to be gathered in fp8",
                fix="leave out fully_shard's shard_placement_fn for it, or "
                "enable_fsdp_float8_all_gather",
            )
        peak = own.abs().amax().float() if own.numel() else own.new_zeros((), dtype=torch.float32)
        distributed.all_reduce(peak, distributed.ReduceOp.MAX, mesh.get_group())
        scale = 1.0 / reference.factors(peak, E4M3, pow2=False)
        values, _ = cast(own, E4M3, scale=scale)
        sent = torch.zeros((rows, *outer_size[1:]), dtype=torch.uint8, device=own.device)
        sent[: len(own)] = values.view(torch.uint8)
        return (sent.view(E4M3),), (scale, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        *,
        out: Any = None,  # noqa: ANN401 (a GatheredWeight)
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the whole weight, and its memory; or give it a new scale, where it is known."""
        (values,), (scale, size) = all_gather_outputs, metadata
        if scale.is_cuda:  # which was computed on the stream of gathers, and is read on this one
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is not None:
            out.scale = scale
            return None
        return GatheredWeight(values[: size[0]], scale, param_dtype), (values,)


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] in e4m3 with one scale, which looks like one of 16 bits or fp32.

    Layers in fp8 read `eight_bits` and `scale`; operators compute with their product.
    """

    eight_bits: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Self:
        """A tensor of a type that looks like `values`, and has no memory of its own."""
        made: Self = _looking_like(cls, values, dtype)
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.eight_bits, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Compute with the weight in its type; what FSDP2 makes a parameter of is one again."""
        first = args[0] if args else None
        same = func is _aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        if isinstance(first, GatheredWeight) and (same or func is _aten.detach.default):
            return cls(first.eight_bits, first.scale, first.dtype)
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.wide(), (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.eight_bits!r}, {self.scale!r}, {self.dtype})"

    def wide(self) -> torch.Tensor:
        """The weight in the type that it looks like."""
        return (self.eight_bits.float() * self.scale).to(self.dtype)


def gathered_in_fp8(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter with the memory of a weight, which `fully_shard` gathers in fp8."""
    return torch.nn.Parameter(ShardedWeight(weight.detach()), weight.requires_grad)


def unwrapped(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight that is in no `fully_shard`; other weights as they are."""
    return weight.own if isinstance(weight, ShardedWeight) else weight


def _looking_like(cls: Any, one: torch.Tensor, dtype: torch.dtype) -> Any:  # noqa: ANN401
    make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    return make(
        cls,
        one.size(),
        strides=one.stride(),
        storage_offset=one.storage_offset(),
        dtype=dtype,
        layout=one.layout,
        device=one.device,
        requires_grad=one.requires_grad,
    )
