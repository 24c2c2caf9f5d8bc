"""PackedExperts: the quantized weights of several experts, side by side as kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree

from warploom.arguments import shown
from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.quantization.metadata import Metadata
from warploom.quantization.packed_weight import Packed, PackedWeight, flatten
from warploom.quantization.quantize import described, quantize

if TYPE_CHECKING:
    from collections.abc import Iterator


class PackedExperts(Packed):
    """W [E, N, K] in 2, 4 or 8 bits: a `PackedWeight` [N, K] for each expert, all of one kind.

    `slabs`, also `data`, are uint8 [E, row blocks, slabs of k, bytes]; `channel_scales` and
    `channel_zeros` [E, N padded to 64] are there where one of a `PackedWeight` would have them.
    `metadata` says what one expert is. Made by `quantize`, `stack`, `empty` or `from_tensors`: the
    constructor takes its arguments as they are. It is a node of torch's trees, is never changed in
    place, and has no gradient.

    Example:
        >>> weight = torch.randn(4, 96, 64).bfloat16()  # [E, N, K]
        >>> packed = warploom.PackedExperts.quantize(weight, "mxfp4")
        >>> packed.shape, packed[1].shape
        ((4, 96, 64), (96, 64))
    """

    __slots__ = ()

    @classmethod
    def empty(
        cls, count: int, metadata: Metadata, device: torch.device | str | None = None
    ) -> PackedExperts:
        """Allocate experts whose bytes are not set: `put` fills them.

        Args:
            count: How many experts.
            metadata: Of one expert.
            device: Where; None: torch's default device.

        Returns:
            The experts.
        """
        made = {
            name: torch.empty((count, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in metadata.tensors().items()
        }
        return cls(metadata=metadata, **made)

    @classmethod
    def stack(cls, weights: Iterable[PackedWeight]) -> PackedExperts:
        """Copy the weights of one expert each into the memory of all.

        Args:
            weights: One for each expert, all with the same metadata and on one device.

        Returns:
            The experts, in the order of the weights.

        Raises:
            ProblemError: For no weight at all, and for weights that differ.
        """
        listed = [*weights]
        if not listed:
            raise ProblemError("no weight", rule="must be those of one expert at least")
        first = listed[0]
        if not isinstance(first, PackedWeight):
            raise _no_weight(first)
        packed = cls.empty(len(listed), first.metadata, first.device)
        for expert, weight in enumerate(listed):
            packed.put(expert, weight)
        return packed

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        format: str = "int4",
        group: int | Literal["auto"] | None = "auto",
        symmetric: bool | None = None,
        scale_dtype: torch.dtype | None = None,
        activations: Activations = "16-bit",
    ) -> PackedExperts:
        """Quantize the weights of all experts, each as `warploom.quantize` does.

        Args:
            weight: [E, N, K], fp16, bf16 or fp32.
            format: Of the codes, such as "int4" or "mxfp4".
            group: Values along K that share a scale; "auto" or None as in `warploom.quantize`.
            symmetric: Whether codes have no zero points; None: as the format has them.
            scale_dtype: Of the scales; None: the dtype of the weight.
            activations: What the weights are multiplied by: "16-bit", "e4m3" or "int8".

        Returns:
            The experts, on the device of the weight.

        Raises:
            ProblemError: For anything but a tensor [E, N, K], and what `warploom.quantize` refuses.
        """
        if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.shape[0]:
            told = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ProblemError(f"weight {told}", rule="must be a tensor [E, N, K] of some experts")
        metadata = described(weight.shape[1:], format, group, symmetric, scale_dtype, activations)
        packed = cls.empty(weight.shape[0], metadata, weight.device)
        how = (format, group, symmetric, scale_dtype, activations)
        for expert in range(weight.shape[0]):
            packed.put(expert, quantize(weight[expert], *how))
        return packed

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Metadata) -> PackedExperts:
        """Make experts of the tensors that `tensors()` returned, without a copy.

        Args:
            tensors: By name; contiguous, with an entry for every expert.
            metadata: Of one expert.

        Returns:
            The experts, which share the memory of the tensors.

        Raises:
            ProblemError: For a tensor that is missing, unknown, or of another shape or dtype.
        """
        for name, one in tensors.items():
            if not isinstance(one, Tensor):
                raise ProblemError(f"{name} {shown(one)}", rule="must be a tensor")
        data = tensors.get("data")
        whole = data is not None and all(one.dim() for one in tensors.values())
        count = data.shape[0] if data is not None and whole else 0
        for expert in range(min(count, 1)):  # one is as good as all: they share their strides
            PackedWeight.from_tensors(
                {name: one[expert] for name, one in tensors.items()}, metadata
            )
        wrong = [
            name
            for name, one in tensors.items()
            if not count or not one.is_contiguous() or one.shape[0] != count
        ]
        if wrong or data is None:
            raise ProblemError(
                f"tensors {', '.join(tensors) or 'none'} of experts",
                rule="must be contiguous, with an entry of each for every expert",
            )
        return cls(metadata=metadata, **tensors)

    def put(self, expert: int, weight: PackedWeight) -> None:
        """Write the weight of one expert, while all are being made.

        Args:
            expert: Its index.
            weight: With the metadata of all, and on their device.

        Raises:
            ProblemError: For an index that is no integer, anything but a PackedWeight, and one with
                other metadata or on another device.
        """
        _check_expert(expert)
        if not isinstance(weight, PackedWeight):
            raise _no_weight(weight)
        if weight.metadata != self.metadata or weight.device != self.device:
            raise ProblemError(
                f"expert {expert}: {weight!r}",
                rule=f"must have the format, shape and device of the other experts, {self!r}",
                fix="quantize all experts of a layer with the same options, on one device",
            )
        for name, tensor in weight.tensors().items():
            getattr(self, name)[expert] = tensor

    # ---- What it is ------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), without padding."""
        return len(self), self.metadata.n, self.metadata.k

    def __len__(self) -> int:
        return self.slabs.shape[0]

    def __getitem__(self, expert: int) -> PackedWeight:
        """The weight of one expert, in the memory of all."""
        _check_expert(expert)
        parts = {name: tensor[expert] for name, tensor in self.tensors().items()}
        return PackedWeight(metadata=self.metadata, **parts)

    def __iter__(self) -> Iterator[PackedWeight]:
        return (self[expert] for expert in range(len(self)))

    def __repr__(self) -> str:
        m = self.metadata
        return (
            f"PackedExperts(shape={self.shape}, format={m.format!r}, group={m.group}, "
            f"scale={m.scale!r}, activations={m.activations!r}, device={str(self.device)!r})"
        )

    # ---- What can be done with it ----------------------------------------------------------------

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Compute the weights that the codes stand for.

        Args:
            dtype: fp16, bf16, fp32, or float64, in which the result is exact.

        Returns:
            [E, N, K].
        """
        return torch.stack([weight.dequantize(dtype) for weight in self])


def _check_expert(expert: object) -> None:
    if not hasattr(expert, "__index__") or (isinstance(expert, Tensor) and expert.dim()):
        raise ProblemError(
            f"expert {shown(expert)}",
            rule="must be an integer: the index of one expert",
            fix="warploom.PackedExperts.stack makes experts of several weights",
        )


def _no_weight(weight: object) -> ProblemError:
    return ProblemError(
        f"weight {shown(weight)} of type {type(weight).__name__}",
        rule="must be a PackedWeight",
        fix="make one with warploom.quantize, or all with warploom.PackedExperts.quantize",
    )


def _unflatten(values: Iterable[Any], metadata: Metadata) -> PackedExperts:
    data, channel_scales, channel_zeros = values
    return PackedExperts(data, metadata, channel_scales, channel_zeros)


_pytree.register_pytree_node(
    PackedExperts,
    flatten,
    _unflatten,
    serialized_type_name="warploom.quantization.PackedExperts",
    to_dumpable_context=Metadata.as_dict,
    from_dumpable_context=Metadata.from_dict,
)
