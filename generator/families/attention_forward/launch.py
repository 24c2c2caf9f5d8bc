"""Attention at launch: how many blocks, what they cannot count to, and what they need."""

from __future__ import annotations

from warploom.generator.families._attention.problem import AttentionProblem, lengths_counted
from warploom.generator.families.attention_forward.parameters import AtLaunch, parameters
from warploom.generator.families.attention_forward.schedule import AttentionSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.shapes import refuse_beyond

KEYS_THREADS = 256  # of a block that reads a row of a mask of keys


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    schedule, mask = at.schedule, at.operation.mask
    return {
        **lengths_counted(at.problem, mask, schedule.tile, packed=at.packed),
        f"{at.q_tiles} tiles of {schedule.q_tile} rows": at.q_tiles * schedule.q_tile,
        # A section of them that begins past the last, and one of each block's in it.
        f"{at.all_heads} heads of {at.q_tiles} tiles": 2 * at.tiles + at.device.multiprocessors,
    }


def launches(spec: AttentionSpec, problem: AttentionProblem, device: DeviceLimits) -> list[Launch]:
    """One launch, and one before it where a mask is of keys.

    No extent may be 0: no tensor map describes an empty tensor.
    Tensors are named q, k, v, o, lse (fp32, contiguous), for packed lengths cu_seqlens_q and
    cu_seqlens_k (int32), the tensors of its modifiers, and the workspaces. The host scalars are
    `scale`, which must be positive, and those of its modifiers. Raises ProblemError for extents
    beyond 32 bits.
    """
    at, schedule = AtLaunch(spec, problem, device), spec.schedule
    refuse_beyond(_counted(at))
    single, values = schedule.scheduler == "single", parameters(spec).values(at)
    main = Launch(
        entry=spec.name,
        grid=at.tiles if single else min(at.tiles, device.multiprocessors),
        block=schedule.threads,
        cluster=1,
        shared_bytes=at.layout.shared_bytes,
        parameters=values,
        early=True,
    )
    rows = sum(modifier.key_rows(problem) for modifier in spec.operation.modifiers)
    if not rows:
        return [main]
    return [Launch(f"{spec.name}_keys", rows, KEYS_THREADS, 1, 0, values, early=True), main]


def workspaces(spec: AttentionSpec, problem: AttentionProblem) -> list[Workspace]:
    """The counter that a dynamic scheduler takes tiles from, and what rows of a mask show."""
    found = []
    if spec.schedule.scheduler == "dynamic":
        found.append(Workspace("counter", 4, kept=True))
    modifiers = spec.operation.modifiers
    return [*found, *(one for modifier in modifiers for one in modifier.workspaces(problem))]
