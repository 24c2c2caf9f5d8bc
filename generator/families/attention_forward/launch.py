"""Attention at launch: how many blocks, what they cannot count to, and what they need."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.families._attention.problem import AttentionProblem, lengths_counted
from warploom.generator.families.attention_forward.parameters import AtLaunch, parameters
from warploom.generator.families.attention_forward.schedule import AttentionSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `limits.refuse_beyond`."""
    schedule, mask = at.schedule, at.operation.mask
    return {
        **lengths_counted(at.problem, mask, schedule.tile, packed=at.packed),
        f"{at.q_tiles} tiles of {schedule.q_tile} rows": at.q_tiles * schedule.q_tile,
        # A section of them that begins past the last, and one of each block's in it.
        f"{at.all_heads} heads of {at.q_tiles} tiles": 2 * at.tiles + at.device.multiprocessors,
    }


def launches(spec: AttentionSpec, problem: AttentionProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, lse (fp32, contiguous), for packed lengths cu_seqlens_q and
    cu_seqlens_k (int32), where the kernel has them sinks, and the workspaces. The host scalars are
    `scale` and, where the kernel has one, `softcap`: both must be positive. Raises ProblemError for
    extents beyond 32 bits.
    """
    at, schedule = AtLaunch(spec, problem, device), spec.schedule
    limits.refuse_beyond(_counted(at))
    single = schedule.scheduler == "single"
    return [
        Launch(
            entry=spec.name,
            grid=at.tiles if single else min(at.tiles, device.multiprocessors),
            block=schedule.threads,
            cluster=1,
            shared_bytes=at.layout.shared_bytes,
            parameters=parameters(spec).values(at),
            early=True,
        )
    ]


def workspaces(spec: AttentionSpec, problem: AttentionProblem) -> list[Workspace]:
    """The counter that a dynamic scheduler takes tiles from."""
    dynamic = spec.schedule.scheduler == "dynamic"
    return [Workspace("counter", 4, kept=True)] if dynamic else []
