"""Whether all processes of a group decide by the same records, and so run the same kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from warploom.errors import RecordsError
from warploom.generator.targets import target
from warploom.runtime import records


def records_digest(gpu: str | None = None) -> str:
    """Return a digest of the tuned configs that this process has read, to compare processes.

    Args:
        gpu: The name of a GPU kind, such as "NVIDIA H200"; by default that of the current GPU.

    Returns:
        SHA-256 in hex. Processes with equal digests, on GPUs of one kind, choose the same kernels
        for the same calls.

    Raises:
        UnknownNameError: For a GPU that Warploom does not know.

    Example:
        >>> len(warploom.records_digest("NVIDIA H200"))
        64
    """
    return records.digest(_kind(gpu))


def assert_same_records(group: Any = None, gpu: str | None = None) -> None:  # noqa: ANN401
    """Check that the processes of a torch.distributed group choose by the same tuned configs.

    Every process of the group must call it, as any collective.

    Args:
        group: The process group; None is the default group.
        gpu: The name of a GPU kind; by default that of the current GPU.

    Raises:
        RecordsError: In all processes, if some differ; it names their ranks.

    Example:
        torch.distributed.init_process_group("nccl")
        warploom.assert_same_records()
    """
    from torch import distributed

    own = records_digest(gpu)
    told: list[str] = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(told, own, group=group)
    usual, _ = Counter(told).most_common(1)[0]
    if differing := [rank for rank, one in enumerate(told) if one != usual]:
        ranks = ", ".join(map(str, differing))
        raise RecordsError(
            f"ranks {ranks} of {len(told)}",
            rule="must decide by the same records as the others, to run the same kernels",
            fix="give all of them one WARPLOOM_RECORDS_DIR; what one has just tuned is read "
            "within a few seconds by others that run the same calls",
        )


def _kind(gpu: str | None) -> str:
    if gpu is not None:
        return target(gpu).gpu
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
