"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.sparse_gemm import SparseGemmOperation, SparseGemmSchedule
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.quantization.sparse_weight import sparsify
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.sparse_gemm import reference
from warploom.runtime.families.sparse_gemm.call import SparseGemmCall
from warploom.runtime.measure import largest_share

BESIDE = 256  # elements on both sides of what is guarded


def spec(*schedule: int, element: str = "bf16", split_k: int = 1, **options: Any) -> KernelSpec:
    """A kernel by its schedule."""
    operation = SparseGemmOperation(element, **options)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, SparseGemmSchedule(*schedule, split_k=split_k))  # type: ignore[arg-type]


EVERY = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "sparse_gemm"
]


def short(kernel: KernelSpec) -> str:
    """What tests are called by."""
    return kernel.name.removeprefix("sparse_gemm_sm90a_")


@dataclass(frozen=True)
class Made:
    """A call whose result lies in a room of 0xff bytes, which are NaN."""

    call: SparseGemmCall
    guarded: Guarded

    def run(self) -> torch.Tensor:
        """Run it on a poisoned result, and return that."""
        self.guarded.room.fill_(-1)
        plan.run(self.call)
        return self.guarded.view

    def verify(self) -> None:
        """Run it, and assert that y is within its bound and that nothing else was written."""
        call, y = self.call, self.run()
        exact, bound = reference.bound(call.x, call.weight, call.items, y.dtype)
        assert largest_share(y, exact, bound) <= 1
        assert self.guarded.untouched_outside()


def made(
    kernel: KernelSpec, m: int, n: int, k: int, *, pad: int = 0, shift: int = 0, seed: int = 0
) -> Made:
    """A call of a kernel; rows of x and y are `pad` elements longer, and y begins `shift` on.

    What lies beside the rows of x is NaN. Magnitudes differ along k, so that no group of four, and
    no value of one, can stand for another.
    """
    operation: SparseGemmOperation = kernel.operation  # type: ignore[assignment]
    dtype, of_y = TORCH[operation.element], TORCH[operation.of_output]
    random = torch.Generator("cuda").manual_seed(seed + 7 * m + n + k)

    def drawn(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=random, device="cuda")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        """Integers fill their range; rounding and saturation are the reference's own inputs."""
        if dtype == torch.int8:
            return (tensor * (40 / tensor.abs().mean())).round().clamp(-127, 127).to(dtype)
        return tensor.to(dtype)

    def scales(count: int) -> torch.Tensor | None:
        """Positive, no two alike."""
        return drawn(count).abs() / 64 + 1e-3 if operation.scaled else None

    weight = drawn(n, k) * torch.exp2(
        torch.randint(-3, 4, (1, k), generator=random, device="cuda").float()
    )
    room = torch.full((m, k + pad), 127 if dtype == torch.int8 else float("nan"), device="cuda")
    room = room.to(dtype)
    x = room[:, :k].copy_(cast(drawn(m, k)))
    packed = sparsify(cast(weight if dtype.itemsize == 1 else weight / k**0.5))
    pitch = n + pad
    size = 2 * BESIDE + m * pitch + shift
    out = torch.full((size,), -1, dtype=torch.int16, device="cuda")
    inside = torch.zeros(size, dtype=torch.bool, device="cuda")
    down, across = torch.arange(m, device="cuda"), torch.arange(n, device="cuda")
    inside[down[:, None] * pitch + across + BESIDE + shift] = True
    view = out.view(of_y)[BESIDE + shift :].as_strided((m, n), (pitch, 1))
    call = SparseGemmCall(
        x,
        packed.values,
        packed.metadata,
        drawn(n).to(of_y) if operation.bias else None,
        None if operation.activation == "none" else operation.activation,
        view,
        kernel,
        scales(m),
        scales(n),
    )
    return Made(call, Guarded(out, view, inside))
