"""PackedWeight: a weight of few bits as kernels read it, its tensors and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


class PackedWeight:
    """W [N, K] in few bits: W[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group]).

    `slabs`, also `data`, are uint8 [row blocks, slabs of k, bytes]; `channel_scales` and
    `channel_zeros` [N padded to 64] are there where scales are per channel (group None), and None
    elsewhere. `metadata` says what is in them. Made by `quantize`, `from_codes`, `from_tensors` or
    `load`: the constructor takes its arguments as they are. A packed weight is a node of torch's
    trees (`torch.compile`, `tree_map`), is never changed in place, and has no gradient.
    """

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
        """Pack what another quantiser has made.

        `codes` [N, K] are integers of any type within the format's range; of e4m3 also
        torch.float8_e4m3fn, whose bits are the codes; of mxfp4 and nvfp4 the four bits. `scales`
        are [N, K / group], or [N, 1] where `group` is None, of a type that the format takes (of
        mxfp4 uint8 or torch.float8_e8m0fnu, of nvfp4 torch.float8_e4m3fn); they may be negative.
        `zeros`, integers of that shape, go with formats that have zero points. `global_scale`, []
        or [N] of fp32, multiplies all of a row beside its scales: nvfp4 has one, which is 1 if not
        given. `activations` are what it will be multiplied by: "16-bit" (fp16, bf16), "e4m3" or
        "int8".

        ProblemError names what does not fit, before anything is made.
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
        """Return a packed weight whose bytes are whatever was in memory; padding is not set."""
        kinds = metadata.tensors()
        made = {name: torch.empty(s, dtype=t, device=device) for name, (s, t) in kinds.items()}
        return cls(metadata=metadata, **made)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Metadata) -> PackedWeight:
        """Take the tensors that `tensors()` gave, as they are.

        ProblemError names one that is missing, unknown, or of another shape, type or device.
        """
        kinds = metadata.tensors()
        if set(tensors) != set(kinds):
            raise ProblemError(
                f"tensors {', '.join(sorted(tensors)) or 'none'} of a packed weight",
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
    def data(self) -> Tensor:
        """The slabs, by the name that they have among `tensors()`."""
        return self.slabs

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.slabs.device

    @property
    def bits(self) -> float:
        """Bits of memory for each weight, with scales, zero points and padding."""
        return 8 * self.metadata.nbytes / (self.metadata.n * self.metadata.k)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors there are, by name: with `metadata`, all that is to be kept."""
        values = (self.slabs, self.channel_scales, self.channel_zeros)
        found = dict(zip(NAMES, values, strict=True))
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def __repr__(self) -> str:
        m = self.metadata
        return (
            f"PackedWeight(shape={self.shape}, format={m.format!r}, group={m.group}, "
            f"scale={m.scale!r}, activations={m.activations!r}, bits={self.bits:.3f}, "
            f"device={str(self.device)!r})"
        )

    # ---- What can be done with it ----------------------------------------------------------------

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedWeight:
        """Return it on `device`; itself where it is there already."""
        if isinstance(device, torch.dtype):
            raise ProblemError(
                f"a packed weight to {device}",
                rule="must keep its types",
                fix="dequantize(dtype) is the weight in that type",
            )
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors().items()
        }
        same = all(moved[name] is tensor for name, tensor in self.tensors().items())
        return self if same else PackedWeight(metadata=self.metadata, **moved)

    def rows(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and zero points of one of slabs.row_ranges, as `unpack` does."""
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

        Codes are int8 (int2, ternary, int4, int8), uint8 (uint4, mxfp4) or torch.float8_e4m3fn;
        scales of their own type (torch.float8_e8m0fnu of mxfp4), zero points uint8, None where
        there are none.
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
        """Return the scales [rows, 1] beside those of groups; None of formats without them."""
        if self.channel_scales is None or not self.metadata.slab.row.scaled_twice:
            return None
        return self.channel_scales[first:end, None]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return W [N, K] of type `dtype`: fp16, bf16, fp32, or float64, in which it is exact."""
        return dequantize(self, dtype)

    def error(self, weight: Tensor) -> ErrorReport:
        """Return how far this is from `weight` [N, K], on the same device."""
        return report(self, weight)


def _flatten(weight: PackedWeight) -> tuple[list[Any], Metadata]:
    return [weight.slabs, weight.channel_scales, weight.channel_zeros], weight.metadata


def _flatten_with_keys(
    weight: PackedWeight,
) -> tuple[list[tuple[_pytree.KeyEntry, Any]], Metadata]:
    values, metadata = _flatten(weight)
    return [(_pytree.GetAttrKey(name), one) for name, one in zip(NAMES, values, strict=True)], (
        metadata
    )


def _unflatten(values: Iterable[Any], metadata: Metadata) -> PackedWeight:
    data, channel_scales, channel_zeros = values
    return PackedWeight(data, metadata, channel_scales, channel_zeros)


_pytree.register_pytree_node(
    PackedWeight,
    _flatten,
    _unflatten,
    serialized_type_name="warploom.quantization.PackedWeight",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=Metadata.as_dict,
    from_dumpable_context=Metadata.from_dict,
)
