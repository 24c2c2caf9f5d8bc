"""A product with weights of few bits at launch: how many blocks, and what they cannot count to."""

from __future__ import annotations

from dataclasses import replace

from warploom.generator import limits
from warploom.generator.families._product import partials
from warploom.generator.families._product.launch import counted, part_workspaces
from warploom.generator.families.mixed_gemm.layout import mixed_gemm_layout
from warploom.generator.families.mixed_gemm.parameters import AtLaunch, parameters
from warploom.generator.families.mixed_gemm.problem import MixedGemmProblem
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace


def workspaces(spec: MixedGemmSpec, problem: MixedGemmProblem) -> list[Workspace]:
    """Partial sums of columns, and of tiles that are cut."""
    sums = mixed_gemm_layout(spec.operation, spec.schedule).sums_bytes
    parts = part_workspaces(spec.schedule, problem, sums)
    every = [replace(one, bytes=one.bytes * spec.schedule.blocks) for one in parts]
    return partials.workspaces(spec, problem) + every


def launches(spec: MixedGemmSpec, problem: MixedGemmProblem, device: DeviceLimits) -> list[Launch]:
    """One launch, and one for each step whose partial sums are added up.

    No extent may be 0: no tensor map describes an empty matrix. Tensors are named a, b (the slabs),
    d, and as the epilogue's fields. Raises ProblemError for extents beyond 32 bits. It reads b
    before the launch that comes before it on the stream is done: see docs/families/mixed_gemm.md.
    """
    schedule = spec.schedule
    at = AtLaunch(spec, problem, device)
    clusters = at.cut.clusters
    limits.refuse_beyond(counted(schedule, problem, clusters))
    grids = partials.grids(at)
    limits.refuse_beyond({f"n {problem.n}: blocks of sums": grid for grid in grids.values()})
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
