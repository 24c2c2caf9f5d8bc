"""A GPU kind is a row: what depends on one reads the table, and a new row is all that it takes."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warploom.cli import device
from warploom.errors import DeviceError
from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule
from warploom.generator.gpus import DEFAULT, KINDS, GpuKind, kind
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import names, target
from warploom.runtime import contest, driver
from warploom.runtime import kernel as kernels
from warploom.runtime.families.attention_forward.call import AttentionCall, gradients_choice
from warploom.runtime.families.gemm.call import GemmCall

ROOT = Path(__file__).parents[2]

OTHER = GpuKind(
    "Maker's Other",
    "sm_90a",
    40,
    flops={16: 1e12, 8: 3e12},
    bytes_per_second=1e12,
    at_a_time={1: 40, 2: 18, 3: 12, 4: 5, 5: 5, 6: 5, 7: 4, 8: 4},
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> GpuKind:
    """A second kind, whose clusters are not in proportion to the default's."""
    monkeypatch.setitem(KINDS, OTHER.name, OTHER)
    return OTHER


def test_rows_stand_under_their_names_and_the_default_has_every_figure() -> None:
    assert {name: row.name for name, row in KINDS.items()} == {name: name for name in KINDS}
    assert DEFAULT.at_a_time
    for row in KINDS.values():
        assert row.arch in ARCHITECTURES and sorted(row.flops) == [8, 16, 32]
        assert sorted(row.at_a_time) in ([], list(range(1, 9))), "all sizes, or nobody asked"
        assert not row.at_a_time or row.at_a_time[1] == row.multiprocessors


def test_clusters_are_those_of_the_kind_and_of_a_part_of_it_in_proportion(other: GpuKind) -> None:
    whole, half = DeviceLimits(40, other.name), DeviceLimits(20, other.name)
    assert [whole.clusters(size) for size in (1, 2, 4)] == [40, 18, 5]
    assert [half.clusters(size) for size in (1, 2, 4)] == [20, 9, 2]
    assert DeviceLimits(1, other.name).clusters(4) == 1


@pytest.mark.parametrize("name", ["", "NVIDIA H300"])
def test_a_kind_that_nobody_asked_for_its_clusters_has_the_defaults_in_proportion(
    name: str,
) -> None:
    count = DEFAULT.multiprocessors
    for size, whole in DEFAULT.at_a_time.items():
        assert DeviceLimits(count, name).clusters(size) == whole
        assert DeviceLimits(count // 2, name).clusters(size) == whole // 2


def test_a_row_is_a_gpu_that_kernels_can_be_chosen_for_by_name(other: GpuKind) -> None:
    found = target("maker's other")
    assert (found.gpu, found.multiprocessors, found.arch) == (other.name, 40, other.arch)
    assert other.name in names() and target("maker's other:7").multiprocessors == 7


def test_calls_on_the_cpu_are_planned_for_the_default() -> None:
    assert (NO_GPU.multiprocessors, NO_GPU.arch) == (DEFAULT.multiprocessors, DEFAULT.arch)
    assert NO_GPU.gpu == "" and kind(NO_GPU.gpu) is DEFAULT


def test_floors_are_of_the_gpu_that_a_benchmark_runs_on(
    other: GpuKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "here", lambda: other)
    assert contest.Floor.of(2 * 4096**3, 0, 8).seconds == 2 * 4096**3 / 3e12


# ---- Another architecture ------------------------------------------------------------------------

NEXT = replace(ARCHITECTURES[DEFAULT.arch], name="sm_97x", title="Next", capability=(9, 7))
SMALL = replace(OTHER, name="NVIDIA Next", arch=NEXT.name)


@pytest.fixture
def following(other: GpuKind, monkeypatch: pytest.MonkeyPatch) -> DeviceLimits:
    """A GPU of another architecture: two rows."""
    monkeypatch.setitem(ARCHITECTURES, NEXT.name, NEXT)
    monkeypatch.setitem(KINDS, SMALL.name, SMALL)
    return target("Next")


def test_the_kernel_of_a_call_is_for_the_architecture_of_the_gpu(following: DeviceLimits) -> None:
    a = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta")
    q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    call = AttentionCall(q, q, q)
    forward = call.draft(following)
    chosen = [
        GemmCall(a, a.mT, out_dtype=torch.bfloat16).draft(following).choice,
        forward.choice,
        gradients_choice(forward.choice, forward.details, following),
    ]
    assert [one.spec.arch for one in chosen] == [NEXT.name] * 3
    assert following.arch == NEXT.name != NO_GPU.arch


def test_grids_and_choices_are_of_the_clusters_that_a_kind_holds(other: GpuKind) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16")
    spec = KernelSpec(other.arch, operation, GemmSchedule((128, 128, 64), 4, cluster=(2, 1)))
    problem = GemmProblem(8192, 8192, 64, 64, 64, 8192)
    grids = [
        family("gemm").launches(spec, problem, one)[0].grid
        for one in (target(other.name), DeviceLimits(40, "NVIDIA H200"))
    ]
    assert grids == [2 * 18, 2 * 20]


def test_the_driver_takes_every_architecture_of_the_table_and_tells_of_no_other(
    following: DeviceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = NEXT.capability
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Next")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert driver.require_usable(0) == NEXT
    schedule = GemmSchedule((128, 128, 64), 4)
    spec = KernelSpec(DEFAULT.arch, GemmOperation("bf16", "bf16", "bf16"), schedule)
    with pytest.raises(DeviceError, match=r"cuda:0, which is sm_97x: .* leave spec out"):
        kernels.kernel(spec, 0)
    capability = (8, 0)
    with pytest.raises(DeviceError, match=r"Hopper: .* 9\.0\), sm_97x \(Next: .* 9\.7\)"):
        driver.require_usable(0)


def test_doctor_names_the_architecture_that_a_gpu_is_served_with(
    following: DeviceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(function: str, *arguments: object) -> object:
        if function == "cuDeviceGetAttribute":
            name = getattr(arguments[0], "name", "")
            return 9 if "MAJOR" in name else 7 if "MINOR" in name else 40
        return {"cuDeviceGetCount": 1, "cuDeviceGetName": b"NVIDIA Next\0"}.get(function, 1)

    monkeypatch.setattr(device, "ask", ask)
    (check,) = device.gpus()
    assert check.found == ("NVIDIA Next, compute capability 9.7, sm_97x, 40 multiprocessors, 0 GiB")


def test_only_the_tables_say_what_a_gpu_or_an_architecture_is() -> None:
    """A second kind was planned for as the first where a number or a name stood in the code."""
    tables = {f"generator/{name}.py" for name in ("architectures", "gpus")}
    written = re.compile(rf"\b{DEFAULT.multiprocessors}\b|sm_\d|\(9, 0\)|AT_A_TIME")
    found = [
        f"{path}:{number}: {line.strip()}"
        for room in (
            "generator",
            "integrations",
            "quantization",
            "runtime",
            "tuning",
            "src",
            "benchmarks",
        )
        for path in sorted((ROOT / room).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in tables
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if written.search(line)
    ]
    assert found == []
