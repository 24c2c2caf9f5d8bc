"""A decode kernel at launch: how many blocks, what they cannot count to, and what they need."""

from __future__ import annotations

from warploom.generator.families.attention_decode import work
from warploom.generator.families.attention_decode.parameters import AtLaunch, parameters
from warploom.generator.families.attention_decode.problem import DecodeProblem
from warploom.generator.families.attention_decode.schedule import DecodeSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.shapes import refuse_beyond


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    problem, schedule = at.problem, at.schedule
    bounds = (problem.left if at.operation.mask == "window" else 0) + abs(problem.right)
    count, places = work.tiles(schedule, problem), work.parts(at.operation, schedule, problem)
    return {
        f"seq_k {problem.seq_k}": problem.seq_k + 2 * schedule.keys + bounds + problem.seq_q,
        f"{problem.entries} entries of {problem.entry_rows} keys": problem.entry_rows,
        f"total_q {problem.total_q}": problem.total_q,
        f"{count} tiles of {schedule.keys} keys": count + work.MOST_BLOCKS * schedule.ctas_per_sm,
        f"{places} parts": places,
    }


def launches(spec: DecodeSpec, problem: DecodeProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, lse (fp32, contiguous) and, where the operation has them, int32
    lengths, starts, page_table, cu_seqlens_q and cu_seqlens_k, fp32 scale_k and scale_v, and those
    of its modifiers. The host scalars are `scale`, which must be positive, and those of its
    modifiers. ProblemError for what is beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    refuse_beyond(_counted(at))
    return [
        Launch(
            entry=spec.name,
            grid=work.blocks(spec.schedule, problem, device.multiprocessors),
            block=spec.schedule.threads,
            cluster=spec.schedule.cluster,
            shared_bytes=at.layout.shared_bytes,
            parameters=parameters(spec).values(at),
            early=True,
        )
    ]


def workspaces(spec: DecodeSpec, problem: DecodeProblem) -> list[Workspace]:
    """Parts of items that several blocks share, their sums, and a counter of each item.

    Blocks of a cluster need none.
    """
    operation, schedule = spec.operation, spec.schedule
    if schedule.cluster > 1:
        return []
    rows = work.parts(operation, schedule, problem) * work.part_rows(schedule, problem)
    return [
        Workspace("parts", 4 * rows * operation.dim),
        Workspace("sums", 8 * rows),
        Workspace("counters", 4 * work.items(schedule, problem) * schedule.warps, kept=True),
    ]
