"""Calls whose D is rounded at random, on integers, whose sums and products are exact in fp32.

A kernel then has the bits of the reference on the CPU, whatever its schedule.
"""

from __future__ import annotations

from typing import Any, cast

import gemm_cases as cases
import torch

import warploom
from warploom.generator.epilogue import Activation, Bias, Gate, Preactivation, Scale, columns
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps.gate import kind_of


def items(operation: GemmOperation, m: int, n: int) -> list[tuple[Any, ...]]:
    """Items of the steps on the CPU; the state comes last."""
    listed: list[tuple[Any, ...]] = []
    for step in operation.epilogue[:-1]:
        if isinstance(step, Scale):
            listed.append(("scale", 0.3701171875))
        elif isinstance(step, Bias):
            listed.append(("bias", torch.randint(-9, 10, (n,)).to(TORCH[step.element])))
        elif isinstance(step, Preactivation):
            listed.append(("preactivation", torch.empty(m, n, dtype=TORCH[step.element])))
        elif isinstance(step, Activation):
            listed.append(("activation", step.function))
        elif isinstance(step, Gate):
            listed.append((kind_of(step.layout), step.function))
        else:
            raise TypeError(f"{step.token} is not exact")
    return [*listed, ("stochastic_rounding", torch.randint(2**62, (2,)))]


def assert_rounded_as_the_reference(
    kernel: KernelSpec, m: int, n: int, k: int, *, seed: int = 0
) -> None:
    """Run a kernel on integers, and compare all bits of D, outside of which nothing is written."""
    torch.manual_seed(seed)
    operation = cast("GemmOperation", kernel.operation)
    m, n, k = cases.fitting((m, n, k), kernel)
    a = torch.randint(-3, 4, (m, k)).to(TORCH[operation.a])
    b = torch.randint(-3, 4, (n, k)).to(TORCH[operation.b]).t()
    listed, dtype = items(operation, m, n), TORCH[operation.d]
    expected = warploom.gemm(a, b, epilogue=listed, out_dtype=dtype)
    there = [
        (kind, value.cuda() if isinstance(value, torch.Tensor) else value) for kind, value in listed
    ]
    width = columns(operation.epilogue, n)
    room = torch.full((m + 2, width + 16), torch.nan).to(dtype).cuda()
    d = room[1 : m + 1, :width] if cases.stored_by_tma(kernel) else room[1 : m + 1, 1 : width + 1]
    around = torch.ones(room.shape, dtype=torch.bool, device="cuda")
    around[1 : m + 1, d.storage_offset() % room.shape[1] :][:, :width] = False
    warploom.gemm(a.cuda(), b.cuda(), epilogue=there, out=d, spec=kernel)
    assert torch.equal(d.cpu().view(torch.uint8), expected.view(torch.uint8)), kernel.name
    assert room.float()[around].isnan().all(), kernel.name
