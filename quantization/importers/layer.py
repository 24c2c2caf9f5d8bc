"""What an importer reads of one layer, in the words of the formats, and what all importers check.

Codes, scales and zero points are those of the checkpoint; only their order and packing change, so
that the weight is the same number for number. Whatever is refused is refused here or in the
importer, before anything is packed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.printable import brief
from warploom.quantization.packed_weight import PackedWeight
from warploom.quantization.quantize import quantize

SCALES = (torch.float16, torch.bfloat16, torch.float32)
LIMIT = 1 << 31  # above all sizes of a weight
GROUPS = (128, 64, 32)  # largest first: fewest scales

Tensors = Mapping[str, Tensor]
Config = Mapping[str, object]


class BlockScaled(NamedTuple):
    """A weight e4m3 [n, k], and its scales, fp32 [n / 128, k / 128], rounded up: they multiply."""

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's weight W [n, k]: W = scale (code - zero), each scale for `group` of k.

    codes: [n, k] as the format has them; scales and zeros: [n, k // group], [n, 1] where group is
    None. `offsets`, like scales, is added to W: no format has it, so such a layer is quantized anew
    or not at all. `blocks` is the same weight with a scale for each 128x128, where it has those.
    """

    format: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int | None
    offsets: Tensor | None = None
    blocks: BlockScaled | None = None
    global_scale: Tensor | None = None  # that multiplies beside scales: nvfp4 has one

    def packed(self, activations: Activations, requantize: str | None = None) -> PackedWeight:
        """Return the same weight as kernels read it.

        One that has offsets is quantized anew, to the format `requantize` of the same groups.

        Raises:
            ProblemError: it has offsets and is not to be quantized anew, or values that the format
                does not take.
        """
        if self.offsets is None:
            return PackedWeight.from_codes(
                self.codes,
                self.scales,
                self.zeros,
                format=self.format,
                group=self.group,
                activations=activations,
                global_scale=self.global_scale,
            )
        if requantize is None:
            raise ProblemError(
                "zero points that are no whole multiples of the scale",
                rule="W must be scale (code - zero) with a whole zero from 0 to 16",
                fix="requantize='int8' quantizes the weight anew, in finer steps",
            )
        groups = self.codes.reshape(len(self.codes), self.scales.shape[1], -1).float()
        weight = groups * self.scales.float()[..., None] + self.offsets.float()[..., None]
        return quantize(
            weight.flatten(1),
            requantize,
            self.group,
            scale_dtype=self.scales.dtype,
            activations=activations,
        )

    def interleaved(self, up: Layer) -> Layer | None:
        """Return the layer whose rows are this one's and those of `up` in turn.

        None if the two are not alike in format, group and dtype of scales.
        """
        mine, theirs = self._by_rows(), up._by_rows()
        kinds = [
            (one.format, one.group, {name: part.dtype for name, part in parts.items()})
            for one, parts in ((self, mine), (up, theirs))
        ]
        if kinds[0] != kinds[1]:
            return None
        both: dict[str, Any] = {
            name: torch.stack((mine[name], theirs[name]), 1).flatten(0, 1) for name in mine
        }
        return replace(self, blocks=None, **both)

    def _by_rows(self) -> dict[str, Tensor]:
        """The tensors that have an entry for each row, of those that there are."""
        names = ("codes", "scales", "zeros", "offsets")
        found = {name: one for name in names if (one := getattr(self, name)) is not None}
        if self.global_scale is not None:
            found["global_scale"] = self.global_scale.expand(len(self.codes))
        return found


def refused(source: str, value: str, *, rule: str = "", fix: str = "") -> ProblemError:
    """Return the error that names what `source` has and no importer reads."""
    return ProblemError(f"{source}: {value}", rule=rule, fix=fix)


def required(
    source: str,
    tensors: Tensors,
    name: str,
    *,
    rank: int | tuple[int, ...],
    types: Collection[torch.dtype],
) -> Tensor:
    """Return the tensor of that name, once it is known to be of such a rank and type.

    Raises:
        ProblemError: it is missing, or another.
    """
    if name not in tensors:
        have = ", ".join(sorted(tensors)) or "none"
        raise refused(source, f"no tensor {name}", rule=f"the layer has {have}")
    tensor = tensors[name]
    ranks = (rank,) if isinstance(rank, int) else rank
    if tensor.dim() not in ranks or tensor.dtype not in types:
        must = " or ".join(str(one).removeprefix("torch.") for one in types)
        able = " or ".join(map(str, ranks))
        raise refused(
            source,
            f"{name} is {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}",
            rule=f"must be of rank {able} and of {must}",
        )
    return tensor


def shaped(source: str, name: str, tensor: Tensor, shape: tuple[int, ...], of: str) -> Tensor:
    """Return `tensor`, once it is known to have the `shape` that follows from what `of` says.

    Raises:
        ProblemError: it has another shape.
    """
    if tuple(tensor.shape) != shape:
        raise refused(
            source, f"{name} is {list(tensor.shape)}", rule=f"must be {list(shape)} for {of}"
        )
    return tensor


def fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of 4 or 8 bits of int32 words, low first along the last dimension: uint8.

    words [..., w] -> [..., w * 32 // bits].
    """
    # A dimension of size 1 may have any stride in a tensor that is contiguous; bytes need 1.
    words = words.clone(memory_format=torch.contiguous_format)
    octets = words.view(torch.uint8)  # low first: GPUs and their hosts are like that
    return octets if bits == 8 else nibbles(octets)


def nibbles(octets: Tensor) -> Tensor:
    """Return the halves of bytes, low first along the last dimension: uint8 [..., 2 w]."""
    octets = octets.view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def grouped(source: str, scales: Tensor, size: int, k: int) -> tuple[Tensor, int | None]:
    """Return `scales` [n, ceil(k / size)] for groups that formats have, and that group of k.

    A scale of a wider group becomes that of several, and the last group may be shorter: exact. One
    scale a row is that of no group.

    Raises:
        ProblemError: no group that formats have divides both `size` and k.
    """
    shaped(
        source, "the scales", scales, (scales.shape[0], -(-k // size)), f"groups of {size} of {k}"
    )
    if scales.shape[1] == 1 and size not in GROUPS:
        return scales, None
    group = next((group for group in GROUPS if size % group == 0 and k % group == 0), None)
    if group is None:
        if scales.shape[1] == 1:
            return scales, None
        raise refused(
            source,
            f"groups of {size} of k = {k}",
            rule="one of 32, 64 and 128 must divide the group and k",
        )
    return scales.repeat_interleave(size // group, dim=1)[:, : k // group], group


def whole(source: str, config: Config, field: str, default: int) -> int:
    """Return the integer that `config` has as `field`, or `default` where there is none.

    Raises:
        ProblemError: it is something else, or no tensor could be of such a size.
    """
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= LIMIT:
        raise refused(
            source, f"{field} is {brief(value)}", rule=f"must be an integer below {LIMIT} in size"
        )
    return value


def word(source: str, config: Config, field: str, default: str) -> str:
    """Return the string that `config` has as `field`, or `default` where there is none.

    Raises:
        ProblemError: it is something else.
    """
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        raise refused(source, f"{field} {brief(value)}", rule="must be a string")
    return value or default


def flag(source: str, config: Config, field: str, default: bool) -> bool:
    """Return the boolean that `config` has as `field`, or `default` where there is none.

    Raises:
        ProblemError: it is something else.
    """
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(source, f"{field} is {brief(value)}", rule="must be true or false")
    return value


def pair(source: str, field: str, value: object) -> tuple[int, int]:
    """Return the two positive integers, of n and of k, that a configuration has as `field`.

    Raises:
        ProblemError: it is something else.
    """
    if isinstance(value, list | tuple) and len(value) == 2:
        n, k = (whole(source, {field: one}, field, 0) for one in value)
        if n > 0 and k > 0:
            return n, k
    raise refused(source, f"{field} {brief(value)}", rule="must be two positive sizes, of n and k")


def strings(source: str, config: Config, field: str) -> list[str]:
    """Return the strings that `config` lists as `field`; none where it has no such field.

    Raises:
        ProblemError: it is no list of strings.
    """
    value = config.get(field)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise refused(source, f"{field} is {brief(value)}", rule="must be a list of strings")
    return list(value)


def mapping(source: str, config: Config, field: str) -> Config:
    """Return the mapping that `config` has as `field`, empty where it has none.

    Raises:
        ProblemError: it is something else.
    """
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused(source, f"{field} is {brief(value)}", rule="must be a mapping by strings")
    return value
