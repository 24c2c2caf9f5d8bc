"""The tensors of one layer among all of a checkpoint: found by name, so that others cost nothing.

A checkpoint of many experts has a hundred thousand tensors, and is asked for each of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from warploom.errors import ProblemError
from warploom.printable import brief, cut
from warploom.quantization.importers import (
    awq,
    bitnet,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    torchao,
)
from warploom.quantization.importers.layer import Tensors

PREFIX = "_weight_"  # of torchao's in a safetensors file
NAMES = tuple(
    dict.fromkeys(
        [
            *(
                name
                for one in (awq, bitnet, compressed_tensors, fp8, gptq, mxfp4, nvfp4)
                for name in one.NAMES
            ),
            *torchao.NAMES,
            *(f"{PREFIX}{name}" for name in torchao.NAMES),
        ]
    )
)


class _Opened(Mapping[str, Tensor]):
    """What `safetensors.safe_open` gives, as a mapping that reads only what is asked for."""

    def __init__(self, file: Any) -> None:  # noqa: ANN401 (of safetensors)
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        try:
            found: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            if "does not contain tensor" in str(error):
                raise KeyError(name) from None
            raise ProblemError(f"{brief(name)}: {error}", rule="must be readable") from error
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def layer_of(tensors: object, name: str) -> Tensors:
    """Return the tensors of the layer called `name`, or all, by their names in the layer.

    `tensors`: a mapping by names, or an open safetensors file.

    Raises:
        ProblemError: there are none, or those of several weights.
    """
    if hasattr(tensors, "get_tensor") and hasattr(tensors, "keys"):
        tensors = _Opened(tensors)
    if not isinstance(tensors, Mapping):
        raise ProblemError(
            f"tensors of type {type(tensors).__name__}",
            rule="must be a dictionary by name, or what safetensors.safe_open gives",
        )
    found = _found(tensors, name)
    for own, tensor in found.items():
        if own in NAMES and (not isinstance(tensor, Tensor) or tensor.device.type == "meta"):
            raise ProblemError(f"{own} is {brief(tensor)}", rule="must be a tensor with contents")
    return found


def _found(tensors: Tensors, name: str) -> Tensors:
    if name:
        ways = (f"{name}.", NAMES), (f"{name}_", mxfp4.NAMES), ("", NAMES)
        for before, names in ways:
            if found := _named(tensors, before, names):
                return found
    return _any(tensors, name)


def _named(tensors: Tensors, before: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors whose names are `before` and one of `names`, by the names in their layers."""
    found = {}
    for name in names:
        try:
            found[name.removeprefix(PREFIX)] = tensors[before + name]
        except KeyError:
            continue
    return found


def _any(tensors: Tensors, name: str) -> Tensors:
    """The tensors of a mapping that is one layer's, by their names in it; gpt-oss's have more."""
    before = f"{name}." if name else ""
    keys = [key for key in tensors if isinstance(key, str) and key.startswith(before)]
    if not keys:
        before, keys = "", list(tensors)
    if not all(isinstance(key, str) for key in keys):
        raise ProblemError("tensors by other keys than names", rule="names must be strings")
    if keys and all("." in key.removeprefix(before) for key in keys):
        raise ProblemError(
            f"no tensors of the layer {name!r}" if name else "a checkpoint's tensors and no name",
            rule="the layer's path must be that of tensors in the checkpoint",
            fix="pass name='model.layers.0.mlp.up_proj' or the like",
        )
    short = {_short(key.removeprefix(before)): key for key in keys}
    if len(short) < len(keys):
        raise ProblemError(
            f"tensors {cut(', '.join(sorted(keys)), 120)}",
            rule="must be of one weight",
            fix="pass the weight's own name: model.layers.0.mlp.experts.down_proj or the like",
        )
    return {own: tensors[key] for own, key in short.items()}


def _short(key: str) -> str:
    """What a tensor is called in its layer, without gpt-oss's and torchao's prefixes."""
    if key.startswith(PREFIX):
        return key.removeprefix(PREFIX)
    _, _, last = key.rpartition("_")
    return last if last in mxfp4.NAMES else key
