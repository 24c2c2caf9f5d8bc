"""GEMM at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.families.gemm import partials
from warploom.generator.families.gemm.cut import MOST_BLOCKS, MOST_PARTS
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.parameters import AtLaunch, parameters
from warploom.generator.families.gemm.problem import GemmProblem, tiles
from warploom.generator.families.gemm.schedule import GemmSchedule, GemmSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.wgmma import WARPGROUP


def _counted(schedule: GemmSchedule, problem: GemmProblem, clusters: int) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `limits.refuse_beyond`."""
    m, n, k = schedule.tile
    rows, columns = m * schedule.cluster[0], n * schedule.cluster[1]
    along_m, count = schedule.raster == "along_m", tiles(schedule, problem)
    across = -(-problem.n // columns) if along_m else -(-problem.m // rows)
    turns = schedule.consumers // schedule.sharing
    return {
        f"m {problem.m}": problem.m + rows,
        f"n {problem.n}": problem.n + columns,
        f"k {problem.k}": problem.k + k * schedule.split,
        f"m {problem.m}, n {problem.n}, batches {problem.batches}: {count} tiles of {m}x{n}": (
            count + turns * clusters  # the first that is not one any more
        ),
        f"group {schedule.group} of {across} tiles": schedule.group * across,
    }


def workspaces(spec: GemmSpec, problem: GemmProblem) -> list[Workspace]:
    """Partial sums of columns, and of tiles that are cut: a place for each block, and a flag for
    each of its warps that is 0 between launches.
    """
    found, schedule = partials.workspaces(spec, problem), spec.schedule
    if schedule.stream_k:
        clusters = MOST_BLOCKS // schedule.cluster_size
        if tiles(schedule, problem) < clusters:
            clusters = min(clusters, MOST_PARTS * tiles(schedule, problem))
        sums = gemm_layout(spec.operation, schedule).sums_bytes * schedule.multicast
        flags = 4 * schedule.cluster_size * schedule.consumers * WARPGROUP // 32
        found += [
            Workspace("parts", clusters * sums),
            Workspace("raised", clusters * flags, kept=True),
        ]
    return found


def launches(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch, and one for each step whose partial sums are added up.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b, d, and as
    the epilogue's fields (`bias_0`, `residual_1`); host scalars are named as theirs (`scale_0`,
    `residual_1_beta`). Raises ProblemError for extents beyond 32 bits.
    """
    schedule = spec.schedule
    at = AtLaunch(spec, problem, device)
    clusters = at.cut.clusters
    limits.refuse_beyond(_counted(schedule, problem, clusters))
    n = f"n {problem.n}, batches {problem.batches}"
    limits.refuse_beyond({f"{n}: blocks of sums": grid for grid in partials.grids(at).values()})
    values = parameters(spec).values(at)
    return [
        Launch(
            entry=spec.name,
            grid=clusters * schedule.cluster_size,
            block=schedule.threads,
            cluster=schedule.cluster_size,
            shared_bytes=at.layout.shared_bytes,
            parameters=values,
            early=True,
        ),
        *partials.launches(at, values),
    ]
