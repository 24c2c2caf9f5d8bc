"""Kernels are chosen and launched legally on GPUs that have other SMs than those measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
from same_kernels import configs, families, rows, samples, tabled
from same_launches import PROBLEMS, shapes

from warploom.generator import families as generator
from warploom.generator.families._product.launch import Cut
from warploom.generator.families._product.launch import cut as cut_gemm
from warploom.generator.families.mixed_gemm.launch import cut as cut_mixed
from warploom.generator.gpus import DEFAULT, KINDS
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.runtime import families as runtime
from warploom.tuning.ahead import ahead

# An H20, an H100 PCIe, MIG slices of a GPC and of part of one, and the least that could be.
DEVICES = (
    target("H20"),
    target("H100 PCIe"),
    target("H100 SXM MIG 3g.40gb:60"),
    target("H100 SXM MIG 1g.10gb:16"),
    target("H100 PCIe MIG 1g.10gb:14"),
    DeviceLimits(1, "NVIDIA H200"),
)
WHOLE = DeviceLimits(DEFAULT.multiprocessors, DEFAULT.name)
EACH = 120  # specs of a family
# One wave of CTAs.
PERSISTENT = {"gemm", "mixed_gemm", "sparse_gemm", "attention_forward", "attention_decode"}
# Cells that say little of waves are many; these have one tile, part of a wave, and several waves.
GIVEN = {
    "gemm": ("1x512x64", "61x4096x4160", "700x5120x8960", "3001x2048x16384"),
    "mixed_gemm": ("1x4096x4096", "61x4096x4096", "3001x4096x4096"),
    "sparse_gemm": ("1x4096x4096", "61x4096x4096", "3001x4096x4096"),
    "activation_backward": ("61x4096", "8192x11008"),
    "attention_merge": ("61", "40000"),
    "attention_quantize": ("1x16x4x300x1031", "16x16x16x1024x1024"),
    "cast": ("61x4096", "8192x11008"),
    "route": ("1x8x128", "32768x8x1024"),
    "combine": ("1x8x2048", "61x3x2880", "32768x8x7168"),
    "dequantize": ("1x4096x4096", "3x61x384", "32x5760x2944"),
    "fp32_pieces": ("61x4096", "8192x11008"),
}


@cache
def specs(name: str) -> tuple[KernelSpec, ...]:
    """Kernels of a family's samples and table, some of each operation."""
    own = [spec for spec in samples() if spec.operation.family == name]
    operations = dict.fromkeys(spec.operation for spec in own)  # in one order, as a set is not
    each = max(1, sum(1 for _ in rows(operations)) // (2 * EACH))  # of the table: some are legal
    every = dict.fromkeys((*own, *tabled(operations, each)))
    return tuple(islice(every, 0, None, max(1, len(every) // EACH)))


def problems(spec: KernelSpec) -> Iterator[Any]:
    yield from PROBLEMS.get(spec.operation.family, shapes)(spec)


def legal(launch: Launch, device: DeviceLimits, spec: KernelSpec, whole: Launch) -> None:
    """A grid of whole clusters that the hardware takes, no larger than that of a larger GPU."""
    told = spec.name, launch.entry, device
    assert 1 <= launch.grid < 1 << 31 and launch.grid % launch.cluster == 0, told
    assert 1 <= launch.cluster <= 8 and 32 <= launch.block <= 1024, told
    assert launch.grid <= whole.grid and launch.entry == whole.entry, told
    if launch.grid < whole.grid and spec.operation.family in PERSISTENT:
        resident = getattr(spec.schedule, "ctas_per_sm", 1)
        assert launch.grid <= max(launch.cluster, device.multiprocessors * resident), told


@pytest.mark.parametrize("name", families())
def test_launches_are_legal_with_any_number_of_sms(name: str) -> None:
    family, smaller = generator.family(name), 0
    for spec in specs(name):
        for problem in problems(spec):
            whole = family.launches(spec, problem, WHOLE)
            for device in DEVICES:
                found = family.launches(spec, problem, device)
                for launch, other in zip(found, whole, strict=False):
                    legal(launch, device, spec, other)
                    smaller += launch.grid < other.grid
    assert smaller or name not in PERSISTENT, "no grid depends on the GPU"


@pytest.mark.parametrize(("name", "cut"), [("gemm", cut_gemm), ("mixed_gemm", cut_mixed)])
def test_clusters_of_a_smaller_gpu_have_all_tiles_between_them(
    name: str, cut: Callable[..., Cut]
) -> None:
    """The tail of a persistent kernel: whole tiles in turns, those of stream-K in ranges."""
    cut_ones = 0
    shared = [one for one in samples() if one.operation.family == name]
    shared = [one for one in shared if one.schedule.stream_k]  # type: ignore[attr-defined]
    for spec in (*specs(name), *shared[:4]):
        for problem in problems(spec):
            for device in DEVICES:
                found = cut(spec.schedule, problem, device)
                told = spec.name, device
                assert 0 <= found.tiles <= found.all_tiles and found.clusters >= 1, told
                whole = found.all_tiles - found.tiles
                assert found.whole * found.clusters >= whole > (found.whole - 1) * found.clusters
                ranges = found.range_k_tiles * found.clusters
                assert ranges >= found.tiles * found.k_tiles, told
                assert found.parts <= found.clusters + 1, told
                cut_ones += bool(found.tiles)
    assert cut_ones


def choices(name: str, device: DeviceLimits) -> set[KernelSpec]:
    """What calls of a family's operations run on a GPU, at shapes or at the benchmarks' cells."""
    if name not in GIVEN:
        found = [one.choice for one in ahead(configs() / name / "smoke.yaml", device)]
    else:
        family, found = runtime.family(name), []
        operations = dict.fromkeys(spec.operation for spec in specs(name))
        turn = DEVICES.index(device)
        for place, operation in enumerate(operations):
            # Each shape and each operation on each device, but not all of them together.
            text = GIVEN[name][(place + turn) % len(GIVEN[name])]
            batched = "3x" if getattr(operation, "batched", False) else ""
            shape = generator.family(name).parse_shape(operation, batched + text)
            found += family.choices(operation, shape, device)
    return {one.spec for one in islice(found, 0, None, max(1, len(found) // EACH))}


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize("device", DEVICES[:4], ids=lambda one: f"{one.multiprocessors}")
def test_every_family_has_a_choice_that_can_be_launched(name: str, device: DeviceLimits) -> None:
    picked = choices(name, device)
    assert picked
    family = generator.family(name)
    for spec in picked:
        for problem in problems(spec):
            whole = family.launches(spec, problem, WHOLE)
            for launch, other in zip(family.launches(spec, problem, device), whole, strict=False):
                legal(launch, device, spec, other)


def test_clusters_that_nobody_counted_are_estimated_in_proportion_and_fit() -> None:
    for name, row in KINDS.items():
        device = target(row.names[0])
        assert device.gpu == name
        for size in range(1, 9):
            assert 1 <= device.clusters(size) <= row.multiprocessors // size
    for device in DEVICES:
        assert all(device.clusters(size) >= 1 for size in range(1, 9))
        assert device.clusters(1) == device.multiprocessors
