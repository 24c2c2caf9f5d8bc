"""GEMM at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.families.gemm import partials
from warploom.generator.families.gemm.parameters import AtLaunch, parameters
from warploom.generator.families.gemm.problem import GemmProblem, tiles
from warploom.generator.families.gemm.schedule import GemmSchedule, GemmSpec
from warploom.generator.launches import DeviceLimits, Launch


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


def launches(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch, and one for each step whose partial sums are added up.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b, d, and as
    the epilogue's fields (`bias_0`, `residual_1`); host scalars are named as theirs (`scale_0`,
    `residual_1_beta`). Raises ProblemError for extents beyond 32 bits.
    """
    schedule = spec.schedule
    clusters = min(tiles(schedule, problem), device.clusters(schedule.cluster_size))
    limits.refuse_beyond(_counted(schedule, problem, clusters))
    at = AtLaunch(spec, problem, device)
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
