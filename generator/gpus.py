"""GPU kinds: how the files that are kept for each are called."""

from __future__ import annotations

import re


def file_name(gpu: str) -> str:
    """The name of a GPU kind's files: `NVIDIA H200` has nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"
