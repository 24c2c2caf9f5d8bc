"""`layer.weight` of a quantized layer, for code that takes it for the weight of torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch.utils import _pytree

from warploom.errors import ProblemError
from warploom.integrations.devices import unserved
from warploom.integrations.transforms import transforming
from warploom.quantization import Metadata, PackedWeight
from warploom.quantization.dequantize import TYPES
from warploom.runtime.families.dequantize.api import dequantize
from warploom.runtime.families.dequantize.call import DTYPES

_Context = tuple[Metadata, torch.dtype]


class UnansweredError(ProblemError, AttributeError):
    """What a quantized layer's weight is asked for, and only a torch.Tensor has."""


class LayerWeight(PackedWeight):
    """A packed weight [N, K] that says it is of `dtype`, as models read it of a layer's weight.

    It is no torch.Tensor: torch's graphs and fused kernels read the tensors that it is made of. But
    it has `__torch_function__`: torch.nn.functional.linear, for instance, computes with the
    dequantized weight, and modules of torch leave the fast paths that would read its memory.
    `data` is the weight itself, as for a torch.Tensor without autograd, and nothing changes it.
    """

    __slots__ = ("dtype",)

    grad = None
    ndim = 2

    @property
    def requires_grad(self) -> bool:
        """False: a quantized weight is not trained."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Leave it False, as code asks for that freezes or trains whole models."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Leave it False."""
        return self

    def __init__(
        self,
        data: torch.Tensor,
        metadata: Metadata,
        channel_scales: torch.Tensor | None = None,
        channel_zeros: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(data, metadata, channel_scales, channel_zeros)
        self.dtype = dtype

    @property  # type: ignore[override]
    def data(self) -> Self:
        """The weight itself; `slabs` are its bytes."""
        return self

    @data.setter
    def data(self, value: object) -> None:
        """Raise ProblemError: what assigns it, as merging an adapter does, means to change it."""
        raise _fixed("a quantized weight that is assigned other data")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Raise UnansweredError for what a torch.Tensor has beside; `hasattr` is False."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise UnansweredError(
            f"{name} of a quantized layer's weight",
            rule="must not be read: the weight is not a torch.Tensor, and cannot be sharded "
            "by tensor parallelism",
            fix="weight.dequantize(dtype) returns a tensor, and weight.tensors() those that it "
            "consists "
            "of; leave the layer out of what is to read or change weights",
        )

    @property
    def is_cuda(self) -> bool:
        """Whether the weight is on a GPU."""
        return self.device.type == "cuda"

    def dim(self) -> int:
        """Return 2."""
        return self.ndim

    def size(self, dim: int | None = None) -> int | torch.Size:
        """Return N and K, or one of them."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of weights, N * K."""
        return self.metadata.n * self.metadata.k

    def detach(self) -> Self:
        """Return the weight itself, which has no gradient."""
        return self

    def clone(self) -> LayerWeight:
        """Return a copy with memory of its own."""
        copied = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return LayerWeight(metadata=self.metadata, dtype=self.dtype, **copied)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch with dequantized weights, in the dtype of its other operands.

        Raises ProblemError for functions that write to the weight.
        """
        keywords = dict(kwargs or {})
        if not torch.compiler.is_dynamo_compiling():  # which has no name of a function
            name = getattr(func, "__name__", str(func))
            first = next(iter((*args, *keywords.values())), None)
            inplace = name.endswith("_") and not name.endswith("__")
            if _ours(keywords.get("out")) or (inplace and _ours(first)):
                raise _fixed(f"a quantized weight that {name} writes to")
        leaves = _pytree.tree_leaves((args, keywords), is_leaf=_ours)
        dtypes = (one.dtype for one in leaves if isinstance(one, torch.Tensor))
        dtype = next((one for one in dtypes if one in TYPES), None)

        def plain(one: Any) -> Any:  # noqa: ANN401
            return dequantized(one, dtype or one.dtype) if _ours(one) else one

        args, keywords = _pytree.tree_map(plain, (args, keywords), is_leaf=_ours)
        return func(*args, **keywords)


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return W [N, K] in `dtype`; of what torch.jit.trace records it is a constant.

    That tracer cannot record how bits are read as another type.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state() is None:
        return _dequantized(weight, dtype)
    tracing: Any = torch._C
    state = tracing._get_tracing_state()
    tracing._set_tracing_state(None)
    try:
        return _dequantized(weight, dtype)
    finally:
        tracing._set_tracing_state(state)


def _dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """By a kernel where there is one, else by torch; inside of transforms of torch.func, which no
    kernel takes part in, by torch, too. Compilers trace those as well, and see one operator.
    """
    served = dtype in DTYPES and unserved(weight.slabs.get_device()) is None
    if served and (torch.compiler.is_compiling() or transforming() is None):
        return dequantize(weight, dtype)
    return weight.dequantize(dtype)


def _ours(value: object) -> bool:
    return isinstance(value, LayerWeight)


def _fixed(what: str) -> ProblemError:
    return ProblemError(
        what,
        rule="must stay as it was quantized: it has no gradient and is not changed in place",
        fix="change the weight before it is quantized (merge adapters into the model before it is "
        "patched), or quantize layer.weight.dequantize() plus the change anew",
    )


# ---- A node of torch's trees ---------------------------------------------------------------------


def _flatten(weight: LayerWeight) -> tuple[list[Any], _Context]:
    values = [weight.slabs, weight.channel_scales, weight.channel_zeros]
    return values, (weight.metadata, weight.dtype)


def _unflatten(values: Iterable[Any], context: _Context) -> LayerWeight:
    data, channel_scales, channel_zeros = values
    metadata, dtype = context
    return LayerWeight(data, metadata, channel_scales, channel_zeros, dtype=dtype)


_pytree.register_pytree_node(LayerWeight, _flatten, _unflatten)
