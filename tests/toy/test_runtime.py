"""Calls of a family that the runtime has never heard of: planned, explained, timed and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from precompiled import build_many

import warploom
from warploom.cli import main
from warploom.errors import ProblemError
from warploom.generator import build, configurations
from warploom.generator.families.base import Family
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import families, plan
from warploom.tuning.ahead import ahead
from warploom.tuning.worker import Worker

Function = Callable[..., torch.Tensor]
Make = Callable[..., KernelSpec]
H200 = DeviceLimits(132, "NVIDIA H200")


@pytest.fixture
def axpy_of(axpy: Family) -> Function:
    """Its function: a package that has it would export it."""
    from warploom.runtime.families.axpy.function import axpy as function

    return function


def pair(*extents: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(extents).to(dtype), torch.randn(extents).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("relu", [False, True])
def test_a_call_on_the_cpu_is_within_its_bound(
    axpy_of: Function, dtype: torch.dtype, relu: bool
) -> None:
    from warploom.runtime.families.axpy import reference

    x, y = pair(5, 33, dtype=dtype)
    exact, bound = reference.bound(x, y, 1.5, relu=relu)
    found = axpy_of(x, y, 1.5, relu=relu)
    assert found.dtype == dtype and ((found.double() - exact).abs() <= bound).all()
    assert ((exact - 1.02 * exact).abs() > bound).any()  # a bound that is one
    out = torch.empty_like(x)
    assert axpy_of(x.t().contiguous().t(), y, 1.5, relu=relu, out=out) is out
    assert torch.equal(out, found)
    assert axpy_of(x[:0], y[:0]).shape == (0, 33)


def test_plans_are_kept_by_signature(axpy_of: Function, make: Make) -> None:
    plan.forget()
    x, y = pair(64)
    first = [axpy_of(x, y, alpha) for alpha in (1.0, 2.0)]
    assert len(plan.known) == 1 and not torch.equal(*first)
    axpy_of(x, y, spec=make(threads=512).name)
    axpy_of(x[1:], y[1:])
    assert len(plan.known) == 3
    (chosen,) = {one.choice.spec for one in plan.known.values() if one.copies}
    assert chosen.schedule.threads == 128


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"x": [1.0]}, "must be a torch tensor"),
        ({"y": torch.zeros(3)}, "must be of one shape and type"),
        ({"out": torch.zeros(64).bfloat16()[::2]}, "must be contiguous"),
        (dict.fromkeys("xy", torch.zeros(32, dtype=torch.int64)), "element types are"),
        (dict.fromkeys("xy", torch.zeros(32, dtype=torch.int8)), "must be one of fp16, bf16, fp32"),
        ({"out": torch.zeros(1)}, "must be of one shape and type"),
        ({"x": torch.zeros(32).bfloat16().requires_grad_()}, "not differentiable"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(
    axpy_of: Function, wrong: dict[str, Any], rule: str
) -> None:
    x, y = pair(32)
    with pytest.raises(ProblemError, match=rule):
        axpy_of(**{"x": x, "y": y, **wrong})


def test_a_call_is_explained_for_a_gpu_that_is_not_here(axpy_of: Function) -> None:
    """By its function: two tensors alone are of the family that has them so already."""
    x, y = (one.to("meta") for one in pair(1 << 20))
    told = warploom.explain(axpy_of, x, y, gpu="NVIDIA H200")
    assert told.kernel.startswith("axpy_sm90a_bf16_512x8_turns4_")
    assert (told.grid, told.copies, told.stored) == (64, (), False)
    assert "default table: first of its class" in str(told)
    a, b = pair(64, 64)
    assert not warploom.explain(a, b, gpu="NVIDIA H200").kernel.startswith("axpy")


def test_kernels_are_chosen_and_compiled_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_many", build_many)
    (space,) = configurations.spaces()["axpy"]
    chosen = ahead(space, H200, ["4096", "100000000"])
    assert [one.choice.spec.schedule.threads for one in chosen] == [128, 512, 128, 512]
    arguments = ["compile", "axpy", "--shapes", "4096", "--gpu", "h200", "--json"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [row["clean"] for row in told["kernels"]] == [True] * 2


def test_the_measuring_process_verifies_and_times_it(axpy: Family, make: Make) -> None:
    spec = make(relu=True)
    trial = families.family("axpy").trial(spec.operation, axpy.shape(1000), "cpu", 1)
    assert trial.error_share(spec) <= 1
    trial.sets[0].out[7] += 1
    assert trial.held_share() > 1
    said: list[Any] = []
    worker = Worker(
        said.append,
        "cpu",
        lambda calls: lambda: float(calls[0]() is not None),
        settle=lambda: None,
        fetch=lambda spec: None,
    )
    request = {
        "operation": {"element": "bf16", "relu": True, "family": "axpy"},
        "shape": {"n": 1000},
        "kernels": [spec.name],
        "precision": 0.1,
        "sets": 1,
    }
    found = worker.measure(request)
    assert [(one.outcome, one.seconds) for one in found.values()] == [("correct", 1.0)]
