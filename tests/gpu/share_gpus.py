"""Processes that run tests side by side each begin with another GPU; all of them see all GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess


def begin_with(number: int) -> None:
    """Turn CUDA's list of GPUs so that number `number`, counted round and round, comes first."""
    names = visible()
    if names:
        first = number % len(names)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first:] + names[:first])


def visible() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; none where there is no driver."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
    gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(gpus))]
