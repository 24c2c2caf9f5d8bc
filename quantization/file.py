"""Packed weights in a safetensors file, and back: whole, checked, and of this release's layout.

Of each weight NAME the file has the tensors NAME.data and, per channel, NAME.channel_scales and
NAME.channel_zeros. The header's text says what each is (Metadata), and has a checksum of each
tensor: what was damaged on its way is refused, not multiplied. A file holds data, no programs.

A checksum is of the weight's name and metadata, the tensor's name, type and shape, and its bytes.
Former files have one of the bytes alone, under "crc32": they are read, too. The two never agree,
so that a file whose "checksums" were taken for "crc32" is refused like any other that changed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from warploom.atomic_file import replacing
from warploom.errors import ProblemError
from warploom.generator.json_file import parse
from warploom.printable import brief, cut
from warploom.quantization.metadata import Metadata
from warploom.quantization.packed_weight import PackedWeight

KEY = "warploom.packed_weights"  # of the header's text
SUMS, OLD_SUMS = "checksums", "crc32"  # of what a checksum is: see above
_RULE = "must be a file that warploom.quantization.save wrote, whole and unchanged"
_FIX = "save the weights again"


def save(weights: Mapping[str, PackedWeight], path: str | os.PathLike[str]) -> None:
    """Write packed weights by their names to `path`: the file appears whole or not at all.

    Those on a GPU are copied to the host first. ProblemError if it cannot be written.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    if not isinstance(weights, Mapping):
        raise ProblemError(f"weights {brief(weights)}", rule="must be a mapping by names")
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, PackedWeight):
            raise ProblemError(
                f"weight {name!r}: {weight!r:.80}", rule="must be a PackedWeight, by a name"
            )
        if not _is_text(name):
            raise ProblemError(f"weight {brief(name)}", rule="its name must be Unicode text")
        parts = {part: tensor.cpu() for part, tensor in weight.tensors().items()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        about = weight.metadata.as_dict()
        sums = {part: _checksum(tensor, name, part, about) for part, tensor in parts.items()}
        described[name] = {"metadata": about, SUMS: sums}
    try:
        with replacing(path) as written:
            save_file(tensors, written, {KEY: json.dumps(described, sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise ProblemError(
            f"{path}: {error}", rule="cannot be written", fix="name a path that can be"
        ) from error


def load(
    path: str | os.PathLike[str], device: torch.device | str | int = "cpu"
) -> dict[str, PackedWeight]:
    """Read what `save` wrote to `path`, to `device`.

    ProblemError, with nothing loaded, for a file that is damaged, of another version or another's.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            described = _described(path, file.metadata(), set(file.keys()))
            return {
                name: _weight(f"{path}: {name}", name, one, file).to(device)
                for name, one in described.items()
            }
    except (OSError, SafetensorError) as error:
        raise ProblemError(f"{path}: {error}", rule=_RULE, fix=_FIX) from error


def _described(path: Path, header: Mapping[str, str] | None, names: set[str]) -> dict[str, Any]:
    """Return what the header says of each weight; it says it of all tensors that there are."""
    if header is None or KEY not in header:
        raise ProblemError(f"{path}: no {KEY} in its header", rule=_RULE, fix=_FIX)
    try:
        described = parse(header[KEY].encode())
        expected = {f"{name}.{part}" for name, one in described.items() for part in _sums(one)}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = cut(str(error), 80)
        raise ProblemError(f"{path}: {KEY} in its header: {why}", rule=_RULE, fix=_FIX) from error
    if expected != names:
        differ = cut(", ".join(sorted(expected ^ names)[:3]), 120)
        raise ProblemError(f"{path}: tensors {differ}", rule=_RULE, fix=_FIX)
    return dict(described)


def _sums(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checksums of a weight's parts, of either kind."""
    found = one[OLD_SUMS] if OLD_SUMS in one else one[SUMS]
    if not isinstance(found, dict):
        raise TypeError("checksums must be by the names of parts")
    return found


def _weight(where: str, name: str, one: Mapping[str, Any], file: Any) -> PackedWeight:  # noqa: ANN401
    where = cut(where, 200)
    try:
        metadata = Metadata.from_dict(one["metadata"])
        tensors = {part: file.get_tensor(f"{name}.{part}") for part in _sums(one)}
        weight = PackedWeight.from_tensors(tensors, metadata)
    except (ProblemError, KeyError) as error:
        raise ProblemError(f"{where}: {cut(str(error), 400)}", rule=_RULE, fix=_FIX) from error
    for part, tensor in tensors.items():
        about = None if OLD_SUMS in one else metadata.as_dict()
        if _checksum(tensor, name, part, about) != _sums(one)[part]:
            raise ProblemError(f"{where}.{part}: its checksum differs", rule=_RULE, fix=_FIX)
    return weight


def _checksum(tensor: Tensor, name: str, part: str, about: Mapping[str, Any] | None) -> int:
    """The CRC-32 of what a tensor is, where `about` has it, and of its bytes."""
    start = 0
    if about is not None:
        kind = [name, dict(about), part, str(tensor.dtype), list(tensor.shape)]
        start = zlib.crc32(json.dumps(kind, sort_keys=True).encode())
    return zlib.crc32(tensor.view(torch.uint8).numpy().data, start)


def _is_text(name: str) -> bool:
    """Whether UTF-8 has it: no half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
