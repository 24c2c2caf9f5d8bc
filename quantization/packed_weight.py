"""PackedWeight: a weight of few bits as kernels read it, its tensors and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.generator.slabs import ROWS
from warploom.quantization import checks, slabs
from warploom.quantization.codes import from_stored, stored
from warploom.quantization.dequantize import dequantize
from warploom.quantization.error import ErrorReport, report
from warploom.quantization.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = ("data", "channel_scales", "channel_zeros")


class Packed:
    """The tensors of a quantized weight, or of those of several experts, and what they are."""

    __slots__ = ("channel_scales", "channel_zeros", "metadata", "slabs")

    def __init__(
        self,
        data: Tensor,
        metadata: Metadata,
        channel_scales: Tensor | None = None,
        channel_zeros: Tensor | None = None,
    ) -> None:
        self.slabs = data
        self.metadata = metadata
        self.channel_scales = channel_scales
        self.channel_zeros = channel_zeros

    @property
    def data(self) -> Tensor:
        """The slabs, by the name that they have among `tensors()`."""
        return self.slabs

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.slabs.device

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors there are by name, as `from_tensors` takes them with `metadata`."""
        values = (self.slabs, self.channel_scales, self.channel_zeros)
        found = dict(zip(NAMES, values, strict=True))
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """Move the weight to a device.

        Args:
            device: As torch.Tensor.to takes it, but for dtypes.
            non_blocking: Copy from pinned memory without waiting.

        Returns:
            The weight there; the same object if it is there already.
        """
        if isinstance(device, torch.dtype):
            raise ProblemError(
                f"a quantized weight to {device}",
                rule="must keep its types",
                fix="dequantize(dtype) is the weight in that type",
            )
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors().items()
        }
        same = all(moved[name] is tensor for name, tensor in self.tensors().items())
        return self if same else type(self)(metadata=self.metadata, **moved)


class PackedWeight(Packed):
    """Quantized W [N, K]: W[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group]).

    `slabs`, also `data`, are uint8 [row blocks, slabs of k, bytes]; `channel_scales` and
    `channel_zeros` [N padded to 64] are there where scales are per channel (group None), and None
    elsewhere. `metadata` says what is in them. Made by `quantize`, `from_codes`, `from_tensors` or
    `load`: the constructor takes its arguments as they are. A quantized weight is a node of torch's
    trees (`torch.compile`, `tree_map`), is never changed in place, and has no gradient.
    """

    __slots__ = ()

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        format: str,
        group: int | None,
        activations: Activations = "16-bit",
        global_scale: Tensor | None = None,
    ) -> PackedWeight:
        """Store codes and scales that another library has computed, without quantizing again.

        Args:
            codes: [N, K], integers of any dtype within the format's range. For e4m3 also
                torch.float8_e4m3fn; for mxfp4 and nvfp4 the four bits of each number.
            scales: [N, K / group], or [N, 1] if `group` is None, of a dtype that the format takes
                (mxfp4: uint8 or torch.float8_e8m0fnu; nvfp4: torch.float8_e4m3fn). They may be
                negative.
            zeros: Integers of the shape of `scales`, for formats with zero points.
            format: The format's name, as for `warploom.quantize`.
            group: Values along K that share a scale; None: all of a row.
            activations: The activations that it will be multiplied by: "16-bit", "e4m3" or "int8".
            global_scale: fp32 [] or [N], which multiplies the scales of a row: nvfp4 has one, by
                default 1.

        Returns:
            The quantized weight, on the device of `codes`.

        Raises:
            ProblemError: For what does not fit, before anything is made.
        """
        metadata = checks.metadata_of(codes, scales, format, group, activations)
        codes, scales = checks.resolved("codes", codes), checks.resolved("scales", scales)
        scales = checks.scales_of(scales, metadata)
        checks.require_zeros(zeros, scales, metadata)
        zeros = None if zeros is None else checks.resolved("zero points", zeros)
        whole = checks.global_scale_of(global_scale, codes, metadata)
        checks.require_codes(codes, metadata)
        packed = cls.empty(metadata, codes.device)
        for first, end in slabs.row_ranges(metadata, codes.device):
            rows = slice(first, end)
            part = None if zeros is None else zeros[rows].to(torch.uint8)
            fields = stored(codes[rows], metadata.slab)
            packed.write(first, end, fields, scales[rows], part, whole)
        return packed

    @classmethod
    def empty(cls, metadata: Metadata, device: torch.device | str | None = None) -> PackedWeight:
        """Return a quantized weight whose bytes are whatever was in memory; padding is not set."""
        kinds = metadata.tensors()
        made = {name: torch.empty(s, dtype=t, device=device) for name, (s, t) in kinds.items()}
        return cls(metadata=metadata, **made)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Metadata) -> PackedWeight:
        """Make a quantized weight of the tensors that `tensors()` returned, without a copy.

        Args:
            tensors: The tensors by name.
            metadata: The `metadata` of the weight that they are of.

        Raises:
            ProblemError: A tensor is missing, unknown, or has another shape, dtype or device.
        """
        kinds = metadata.tensors()
        if set(tensors) != set(kinds):
            raise ProblemError(
                f"tensors {', '.join(sorted(tensors)) or 'none'} of a quantized weight",
                rule=f"must be {', '.join(kinds)}",
            )
        devices = {str(tensor.device) for tensor in tensors.values()}
        for name, (shape, dtype) in kinds.items():
            found = tensors[name]
            if (tuple(found.shape), found.dtype) != (shape, dtype) or not found.is_contiguous():
                raise ProblemError(
                    f"{name} {found.dtype} {list(found.shape)}",
                    rule=f"must be {dtype} {list(shape)}, contiguous, for {metadata}",
                )
        if len(devices) > 1:
            raise ProblemError(
                f"tensors on {', '.join(sorted(devices))}", rule="must be on one device"
            )
        return cls(metadata=metadata, **tensors)

    def write(
        self,
        first: int,
        end: int,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        global_scale: Tensor | None = None,
    ) -> None:
        """Fill a range of rows (see slabs.row_ranges) while the weight is being made.

        `global_scale` [] or [N]: of formats that have one.
        """
        layout = self.metadata.slab
        slabs.write(slabs.of_rows(self.slabs, first, end), layout, codes, scales, zeros)
        if self.channel_scales is not None:
            padded = slice(first, -(-end // ROWS) * ROWS)
            self.channel_scales[padded] = 1
            own = scales[:, 0] if global_scale is None else global_scale.expand(self.metadata.n)
            self.channel_scales[first:end] = own if global_scale is None else own[first:end]
            if self.channel_zeros is not None and zeros is not None:
                self.channel_zeros[padded] = 0
                self.channel_zeros[first:end] = zeros[:, 0]

    # ---- What it is ------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), without padding."""
        return self.metadata.n, self.metadata.k

    @property
    def bits(self) -> float:
        """Bits of memory for each weight, with scales, zero points and padding."""
        return self.metadata.bits

    def __repr__(self) -> str:
        m = self.metadata
        return (
            f"PackedWeight(shape={self.shape}, format={m.format!r}, group={m.group}, "
            f"scale={m.scale!r}, activations={m.activations!r}, bits={self.bits:.3f}, "
            f"device={str(self.device)!r})"
        )

    # ---- What can be done with it ----------------------------------------------------------------

    def rows(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and zero points of one of slabs.row_ranges."""
        m = self.metadata
        part, count = slabs.of_rows(self.slabs, first, end), end - first
        found = from_stored(slabs.read(part, m.slab, count, m.k), m.slab)
        if m.group is not None or self.channel_scales is None:
            return found, *slabs.read_scales(part, m.slab, count, m.groups, m.scale_dtype)
        zeros = self.channel_zeros
        zeros = None if zeros is None else zeros[first:end, None]
        return found, self.channel_scales[first:end, None], zeros

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes [N, K], scales and zero points [N, groups], as `from_codes` takes them.

        Codes are int8 (int2, ternary, int4, int8), uint8 (uint4, mxfp4) or torch.float8_e4m3fn,
        scales of their own dtype (mxfp4: torch.float8_e8m0fnu), zero points uint8 or None.
        """
        m = self.metadata
        found = self.slabs.new_empty(self.shape, dtype=m.code_dtype)
        scales = self.slabs.new_empty(m.n, m.groups, dtype=m.scale_dtype)
        zeros = self.slabs.new_empty(m.n, m.groups) if m.slab.row.has_zeros else None
        for first, end in slabs.row_ranges(m, self.device):
            found[first:end], scales[first:end], points = self.rows(first, end)
            if zeros is not None and points is not None:
                zeros[first:end] = points
        return found, scales, zeros

    def global_scale(self, first: int, end: int) -> Tensor | None:
        """Return the scales [rows, 1] that multiply those of groups, or None."""
        if self.channel_scales is None or not self.metadata.slab.row.scaled_twice:
            return None
        return self.channel_scales[first:end, None]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return W [N, K], the numbers that the codes stand for.

        Args:
            dtype: torch.float16, bfloat16, float32, or float64, in which they are exact.
        """
        return dequantize(self, dtype)

    def error(self, weight: Tensor) -> ErrorReport:
        """Return a report of how far the quantized weight is from the original.

        Args:
            weight: The original weight [N, K], on the same device.
        """
        return report(self, weight)


def flatten(weight: Packed) -> tuple[list[Any], Metadata]:
    """The tensors of a node of torch's trees, and what they are."""
    return [weight.slabs, weight.channel_scales, weight.channel_zeros], weight.metadata


def _flatten_with_keys(
    weight: PackedWeight,
) -> tuple[list[tuple[_pytree.KeyEntry, Any]], Metadata]:
    values, metadata = flatten(weight)
    return [(_pytree.GetAttrKey(name), one) for name, one in zip(NAMES, values, strict=True)], (
        metadata
    )


def _unflatten(values: Iterable[Any], metadata: Metadata) -> PackedWeight:
    data, channel_scales, channel_zeros = values
    return PackedWeight(data, metadata, channel_scales, channel_zeros)


_pytree.register_pytree_node(
    PackedWeight,
    flatten,
    _unflatten,
    serialized_type_name="warploom.quantization.PackedWeight",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=Metadata.as_dict,
    from_dumpable_context=Metadata.from_dict,
)
