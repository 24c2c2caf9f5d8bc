"""The small family on a GPU: every choice of its template, within its bound, and nothing beside."""

from __future__ import annotations

import pytest
import torch
from rooms import Guarded

from warploom.generator import configurations
from warploom.generator.build import build_many
from warploom.generator.families.base import Family
from warploom.generator.space import expand_file
from warploom.runtime import kernel as kernels
from warploom.runtime import plan
from warploom.runtime.elements import TORCH

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [1, 127, 4096, 100_003])
def test_every_kernel_is_right_and_writes_nothing_else(axpy: Family, n: int) -> None:
    from warploom.runtime.families.axpy import reference
    from warploom.runtime.families.axpy.call import AxpyCall

    (smoke,) = (path for path in configurations.smoke() if path.parent.name == "axpy")
    specs = expand_file(smoke).specs
    build_many(specs, kernels.store())
    for spec in specs:
        dtype = TORCH[spec.operation.element]
        x, y = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
        integer = torch.int16 if dtype.itemsize == 2 else torch.int32
        room = torch.full((n + 64,), -1, dtype=integer, device="cuda")
        inside = torch.zeros(n + 64, dtype=torch.bool, device="cuda")
        inside[32 : 32 + n] = True
        guarded = Guarded(room, room.view(dtype)[32 : 32 + n], inside)
        plan.run(AxpyCall(x, y, 1.5, spec.operation.relu, guarded.view, spec))
        exact, bound = reference.bound(x, y, 1.5, relu=spec.operation.relu)
        assert ((guarded.view.double() - exact).abs() <= bound).all(), spec.name
        assert guarded.untouched_outside(), spec.name


def test_operands_that_are_not_aligned_are_copied(axpy: Family) -> None:
    from warploom.runtime.families.axpy.function import axpy as function

    x, y = torch.randn(2, 1000, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(function(x[1:], y[:-1], 2.0), 2 * x[1:] + y[:-1])
