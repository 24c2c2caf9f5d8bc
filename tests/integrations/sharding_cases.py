"""Calls on torch's distributed tensors, held against the same call in one process.

Run as a program, this is one of the processes: `sharding_cases.py RANK FOLDER` runs all cases and
writes to FOLDER what each raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import sharding_models  # noqa: F401 (which has cases)
import sharding_products  # noqa: F401 (which has cases)
import sharding_quantized  # noqa: F401 (which has cases)
import torch
from sharding_checks import CASES, PROCESSES

from warploom.integrations import devices

__all__ = ["CASES", "PROCESSES"]


def main(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=600),  # where one process raised, the other waits for it
    )
    devices.reasons[-1] = None  # layers decide as on a GPU; the reference then computes
    failed = {}
    for name, run in CASES.items():
        torch.manual_seed(0)
        try:
            run()
        except Exception:
            failed[name] = traceback.format_exc()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
