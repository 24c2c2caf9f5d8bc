"""Whatever is launched, the hardware takes: tensor maps, grids, blocks; every value has a field."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GEMM, gemm_specs, problems

from warploom.generator.epilogue import GATES
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap


@settings(deadline=None, max_examples=200)
@given(gemm_specs(), st.data(), st.one_of(st.just(132), st.integers(1, 200)))
def test_the_hardware_takes_what_is_launched(
    spec: KernelSpec, data: st.DataObject, multiprocessors: int
) -> None:
    """One sample for all: to draw legal specs takes longer than to look at launches."""
    problem = data.draw(problems(spec))
    made = GEMM.launches(spec, problem, DeviceLimits(multiprocessors))
    assert_maps_are_such_as_the_driver_encodes(spec, made[0])
    assert_every_field_has_a_value(spec, made)
    assert_rows_are_loaded_and_few_past_the_end(spec, problem, made[0])
    assert_grid_is_of_whole_clusters(spec, problem, made[0], multiprocessors)
    assert_only_a_batched_kernel_takes_batches(spec, problem, made[0])


def assert_maps_are_such_as_the_driver_encodes(spec: KernelSpec, launch: Launch) -> None:
    """The rules are those of cuTensorMapEncodeTiled (CUDA driver API)."""
    maps = [value for value in launch.parameters.values() if isinstance(value, TensorMap)]
    a = ["a", "a"] if spec.operation.layout_a == "row" else ["a"]  # type: ignore[union-attr]
    assert [found.tensor for found in maps] in ([*a, "b"], [*a, "b", "d"])
    for found in maps:
        size = found.element.bytes
        assert len(found.extents) == len(found.box) == len(found.pitches) + 1
        assert all(1 <= extent <= 2**32 for extent in found.extents)
        assert all(1 <= length <= 256 for length in found.box)
        assert all(pitch % 16 == 0 and 0 < pitch < 2**40 for pitch in found.pitches)
        assert found.pitches[0] >= found.extents[0] * size
        assert found.box[0] * size == found.span
        assert found.span in (16, 32, 64, 128)


def assert_every_field_has_a_value(spec: KernelSpec, made: Sequence[Launch]) -> None:
    """None is left over either."""
    fields = [field.name for field in GEMM.parameters(spec).fields]
    assert all(sorted(launch.parameters) == sorted(fields) for launch in made)
    sums = [step for step in spec.operation.epilogue if step.step == "column_sum"]  # type: ignore[union-attr]
    assert len(made) == 1 + (spec.schedule.split_k > 1) + len(sums)  # type: ignore[union-attr]


def assert_rows_are_loaded_and_few_past_the_end(
    spec: KernelSpec, problem: GemmProblem, launch: Launch
) -> None:
    """Tiles along m load every row of A, and at most 7 of each slice past the end."""
    values, schedule = launch.parameters, spec.schedule
    assert isinstance(schedule, GemmSchedule)
    if "a_tail_map" not in values:
        return
    tile = schedule.tile[0]
    slices = schedule.cluster[1] if tile % (8 * schedule.cluster[1]) == 0 else 1
    loaded = (problem.m - 1) // tile * tile + values["a_tail_rows"]  # type: ignore[operator]
    assert problem.m <= loaded < problem.m + 8 * slices
    tail = values["a_tail_map"]
    assert isinstance(tail, TensorMap)
    assert tail.box[1] * slices == values["a_tail_rows"] <= tile
    if problem.m % tile == 0 or problem.m < tile:  # one map, encoded once
        assert values["a_map"] == tail


def assert_grid_is_of_whole_clusters(
    spec: KernelSpec, problem: GemmProblem, launch: Launch, multiprocessors: int
) -> None:
    """No more than there are tiles or SMs."""
    operation, schedule = spec.operation, spec.schedule
    assert isinstance(operation, GemmOperation)
    assert isinstance(schedule, GemmSchedule)
    size = schedule.cluster[0] * schedule.cluster[1] * schedule.cluster_split_k
    rows, columns = (schedule.tile[i] * schedule.cluster[i] for i in range(2))
    tiles = -(-problem.m // rows) * -(-problem.n // columns) * problem.batches
    tiles *= min(schedule.split_k, -(-problem.k // (schedule.tile[2] * schedule.cluster_split_k)))
    assert launch.cluster == size
    most = DeviceLimits(multiprocessors).clusters(size) * size
    if schedule.stream_k:  # clusters share tiles where that makes them end sooner
        assert min(tiles * size, most, 144 // size * size) <= launch.grid <= most
    else:
        assert launch.grid == min(tiles * size, most)
    assert launch.grid <= max(size, multiprocessors)
    assert launch.block == 128 * (1 + schedule.consumers)
    assert launch.shared_bytes <= 232_448


def assert_only_a_batched_kernel_takes_batches(
    spec: KernelSpec, problem: GemmProblem, launch: Launch
) -> None:
    maps = [value for value in launch.parameters.values() if isinstance(value, TensorMap)]
    assert isinstance(spec.operation, GemmOperation)
    rank = 3 if spec.operation.batched else 2
    gated = {"b"} if any(isinstance(step, GATES) for step in spec.operation.epilogue) else set()
    for found in maps:  # a gate's and up's rows of B are loaded in turns, by two dimensions more
        assert len(found.extents) == rank + 2 * (found.tensor in gated)
    assert ("a_repeat" in launch.parameters) is spec.operation.batched
    for name, lie in (("a", problem.batches_a), ("b", problem.batches_b)):
        if spec.operation.batched:
            assert launch.parameters[f"{name}_batches"] == lie.count
            assert launch.parameters[f"{name}_repeat"] == lie.repeat
            assert next(m for m in maps if m.tensor == name).extents[-1] == lie.count
