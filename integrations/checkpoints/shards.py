"""The safetensors files of a checkpoint as one mapping, of which only what is read costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from warploom.errors import ProblemError
from warploom.printable import brief, cut

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_FIX = "download the checkpoint again"


class Shards(Mapping[str, Tensor]):
    """All tensors of a checkpoint by their names; each is read when it is asked for.

    A context manager: files are open from when they are first read until it ends.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Find out which file has which tensor.

        Args:
            folder: With config.json, and model.safetensors or an index and its shards.

        Raises:
            ProblemError: for a folder without these, a shard that is missing or damaged, and an
                index that names what a shard does not have.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ProblemError(
                f"{self.folder}",
                rule="must be a folder on this machine",
                fix="huggingface_hub.snapshot_download(name) downloads a checkpoint to one",
            )
        self.config = _json(self.folder / "config.json")
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        with ExitStack() as stack:  # closes what is open should any of this raise
            stack.callback(self._stack.close)
            self._places = self._found()
            stack.pop_all()
        self._stored = {name: name for name in self._places}  # what files call a tensor

    def _found(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if index.is_file():
            listed = _json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(
                isinstance(one, str) and Path(one).name == one for one in listed.values()
            ):
                raise ProblemError(
                    f"{index}: weight_map {brief(listed)}",
                    rule="must be a file of the folder for each tensor",
                    fix=_FIX,
                )
            places = {name: self.folder / file for name, file in listed.items()}
            for path in sorted({*places.values()}):
                has = set(self._open(path).keys())
                lost = sorted(name for name, at in places.items() if at == path and name not in has)
                if lost:
                    raise ProblemError(
                        f"{path}: no tensor {cut(', '.join(lost), 200)}",
                        rule=f"must have all tensors that {INDEX} lists for it",
                        fix=_FIX,
                    )
            return places
        whole = self.folder / WHOLE  # beside which adapters and other layouts may be stored
        paths = [whole] if whole.is_file() else sorted(self.folder.glob("*.safetensors"))
        places = {}
        for path in paths:
            for name in self._open(path).keys():  # noqa: SIM118 (no dictionary)
                if name in places:
                    raise ProblemError(
                        f"{name} in {places[name].name} and in {path.name}",
                        rule="must be in one file",
                        fix=f"keep one of them, or add {INDEX}",
                    )
                places[name] = path
        if not places:
            raise ProblemError(
                f"{self.folder}: no tensors in *.safetensors",
                rule="must be a checkpoint in safetensors files",
                fix="convert pickled checkpoints with safetensors.torch.save_file",
            )
        return places

    def _open(self, path: Path) -> Any:  # noqa: ANN401 (safetensors' handle)
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise ProblemError(
                    f"{path}: {error}", rule="must be a whole safetensors file", fix=_FIX
                ) from error
        return self._files[path]

    def __enter__(self) -> Self:
        """Return the mapping."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close all files."""
        self._files.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor to the host."""
        path = self._places[name]
        try:
            found: Tensor = self._open(path).get_tensor(self._stored[name])
        except SafetensorError as error:
            raise ProblemError(
                f"{path}: {name}: {error}", rule="must be readable", fix=_FIX
            ) from error
        return found

    def rename(self, old: str, new: str) -> None:
        """Call tensors otherwise than the files do: with `new` in the place of `old`."""
        stored = {name.replace(old, new): own for name, own in self._stored.items()}
        self._places = {name: self._places[own] for name, own in stored.items()}
        self._stored = stored

    def stored(self, name: str) -> str:
        """What the files call a tensor."""
        return self._stored[name]

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is of another type than those of 16 and 32 bits, without reading it."""
        kind = self._open(self._places[name]).get_slice(self._stored[name]).get_dtype()
        return kind not in ("F32", "F16", "BF16")

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._places)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._places)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProblemError(
            f"{path}: {cut(str(error), 200)}", rule="must be readable JSON", fix=_FIX
        ) from error
    if not isinstance(found, dict):
        raise ProblemError(f"{path}: {brief(found)}", rule="must be a JSON object", fix=_FIX)
    return found
