"""GEMM at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from warploom.generator import limits
from warploom.generator.families._product import partials, reduction
from warploom.generator.families._product.launch import counted, part_workspaces
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.parameters import AtLaunch, parameters
from warploom.generator.families.gemm.problem import GemmProblem
from warploom.generator.families.gemm.schedule import GemmSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace


def workspaces(spec: GemmSpec, problem: GemmProblem) -> list[Workspace]:
    """Partial sums of columns, and of parts of tiles."""
    sums = gemm_layout(spec.operation, spec.schedule).sums_bytes
    parts = part_workspaces(spec.schedule, problem, sums)
    return partials.workspaces(spec, problem) + parts


def launches(spec: GemmSpec, problem: GemmProblem, device: DeviceLimits) -> list[Launch]:
    """One persistent launch, one that adds up parts of k, and one for each step with partial sums.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b, d, and as
    the epilogue's fields (`bias_0`, `residual_1`); host scalars are named as theirs (`scale_0`,
    `residual_1_beta`). Raises ProblemError for extents beyond 32 bits.
    """
    schedule = spec.schedule
    at = AtLaunch(spec, problem, device)
    clusters = at.cut.clusters
    limits.refuse_beyond(counted(schedule, problem, clusters))
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
        *reduction.launches(at, values),
        *partials.launches(at, values),
    ]
