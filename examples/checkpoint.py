"""Checkpoints in numpy's npz: files that hold arrays and one JSON object, and no code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from warploom.atomic_file import replacing

_ABOUT = "about"


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and what is told `about` them, whole or not at all.

    The file is written under another name and takes the place of the one before only once it is
    on the disk: whoever stops the process, the checkpoint before is still there.
    """
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as written, written.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays, **{_ABOUT: np.array(json.dumps(about))})


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return what `write` was given; ClickException for a file that is none of its."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about: dict[str, Any] = json.loads(str(arrays.pop(_ABOUT)))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise click.ClickException(
            f"{path}: {error}: must be a checkpoint: leave out --resume to begin anew"
        ) from error
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, about
