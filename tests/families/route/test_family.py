"""What the generator says of the family: names, launches, the choice, registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.route import (
    RouteOperation,
    RouteProblem,
    RouteSchedule,
    RouteShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.model import rank
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch

FAMILY = family("route")
CONFIGS = Path(__file__).parents[3] / "configs" / "route"
LARGEST = 227 * 1024  # bytes of shared memory that a CTA may have


def spec(threads: int = 1024, cluster: int = 1, ids: str = "int64") -> KernelSpec:
    schedule = RouteSchedule(threads, cluster)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", RouteOperation(ids), schedule)  # type: ignore[arg-type]


def problem(tokens: int, k: int = 8, experts: int = 128) -> RouteProblem:
    return RouteProblem(tokens, k, experts, 0, (k, 1))


def test_what_is_not_legal_is_told() -> None:
    with pytest.raises(SpecificationError, match="must be one of int64, int32"):
        spec(ids="int8")
    with pytest.raises(SpecificationError, match="must be one of 1, 2, 4, 8"):
        spec(cluster=16)


@pytest.mark.parametrize("pairs", [1, 31, 32, 33, 1024, 4097, 262_144, 5_000_000])
def test_warps_have_every_pair_once(pairs: int) -> None:
    """Slices that overlapped would count pairs twice; one too short would lose the last."""
    for one in (spec(128), spec(1024), spec(512, 4), spec(1024, 8, "int32")):
        (launch,) = FAMILY.launches(one, problem(pairs, 1), NO_GPU)
        assert launch.grid == launch.cluster == one.schedule.cluster
        part = int(launch.parameters["slice"])  # type: ignore[call-overload]
        warps = launch.grid * launch.block // 32
        assert part % 32 == 0 and part * warps >= pairs > (part - 32) * warps


def test_counts_of_the_most_experts_fit_shared_memory() -> None:
    for one in expand_file(CONFIGS / "space.yaml").specs:
        (launch,) = FAMILY.launches(one, problem(100, 8, 1024), NO_GPU)
        assert launch.shared_bytes == FAMILY.layout(one).shared_bytes <= LARGEST
        (fewer,) = FAMILY.launches(one, problem(100, 8, 8), NO_GPU)
        assert fewer.shared_bytes < launch.shared_bytes // 50


def test_what_takes_more_than_32_bits_is_refused() -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), problem(2**28, 8), NO_GPU)


def test_few_pairs_have_one_cta_and_many_a_cluster() -> None:
    for tokens, cluster in ((1, 1), (64, 1), (512, 8), (32_768, 8)):
        chosen = dispatch.choose(RouteOperation("int64"), RouteShape(tokens, 8, 128)).spec
        assert chosen.schedule.cluster == cluster  # type: ignore[attr-defined]


def test_the_model_takes_a_cluster_for_many_pairs() -> None:
    many, few = RouteShape(32_768, 8, 128), RouteShape(1, 8, 128)
    specs = [spec(256), spec(1024, 8)]
    assert rank(None, specs, many, 132)[0].spec == specs[1]
    assert rank(None, specs, few, 132)[0].spec == specs[0]
