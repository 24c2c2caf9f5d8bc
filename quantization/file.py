"""Packed weights in a safetensors file, and back: whole, checked, and of this release's layout.

Of each weight NAME the file has the tensors NAME.data and, per channel, NAME.channel_scales and
NAME.channel_zeros. The header's text says what each is (Metadata), and has a checksum of each
tensor: what was damaged on its way is refused, not multiplied. A file holds data, no programs.
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
from warploom.quantization.metadata import Metadata
from warploom.quantization.packed_weight import PackedWeight

KEY = "warploom.packed_weights"  # of the header's text
_RULE = "must be a file that warploom.quantization.save wrote, whole and unchanged"
_FIX = "save the weights again"


def save(weights: Mapping[str, PackedWeight], path: str | os.PathLike[str]) -> None:
    """Write packed weights by their names to `path`: the file appears whole or not at all.

    Those on a GPU are copied to the host first. ProblemError if it cannot be written.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, PackedWeight):
            raise ProblemError(
                f"weight {name!r}: {weight!r:.80}", rule="must be a PackedWeight, by a name"
            )
        parts = {part: tensor.cpu() for part, tensor in weight.tensors().items()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        sums = {part: _checksum(tensor) for part, tensor in parts.items()}
        described[name] = {"metadata": weight.metadata.as_dict(), "crc32": sums}
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
        described = json.loads(header[KEY])
        expected = {f"{name}.{part}" for name, one in described.items() for part in one["crc32"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProblemError(f"{path}: {KEY} in its header: {error}", rule=_RULE) from error
    if expected != names:
        differ = ", ".join(sorted(expected ^ names)[:3])
        raise ProblemError(f"{path}: tensors {differ}", rule=_RULE, fix=_FIX)
    return dict(described)


def _weight(where: str, name: str, one: Mapping[str, Any], file: Any) -> PackedWeight:  # noqa: ANN401
    try:
        metadata = Metadata.from_dict(one["metadata"])
        tensors = {part: file.get_tensor(f"{name}.{part}") for part in one["crc32"]}
        weight = PackedWeight.from_tensors(tensors, metadata)
    except (ProblemError, KeyError) as error:
        raise ProblemError(f"{where}: {error}", rule=_RULE, fix=_FIX) from error
    for part, tensor in tensors.items():
        if _checksum(tensor) != one["crc32"][part]:
            raise ProblemError(f"{where}.{part}: its checksum differs", rule=_RULE, fix=_FIX)
    return weight


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)
