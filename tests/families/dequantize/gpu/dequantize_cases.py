"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from dequantize_weights import EVERY, experts, rows, rows_spec, spec
from rooms import Guarded

from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.dequantize.family import FAMILY, AnyCall
from warploom.runtime.families.gemm.block_scales import dequantised
from warploom.runtime.sampled import differ

BESIDE = 4096  # elements on both sides of W that nothing may write
SCHEDULES = [(slabs, ctas) for slabs in (1, 2, 4, 8) for ctas in (4, 6, 8)]
KINDS = {
    spec(kind, ("bf16", "fp16")[i % 2], *SCHEDULES[i % len(SCHEDULES)]): kind
    for i, kind in enumerate(EVERY)
}
SOME = [*KINDS][::9]
ROWS = [
    rows_spec(w, scale, *SCHEDULES[i])
    for i, (w, scale) in enumerate((w, s) for w in ("bf16", "fp16") for s in ("fp32", "e8m0"))
]
KERNELS = [*KINDS, *ROWS]


def short(kernel: KernelSpec) -> str:
    """A kernel's name without its family."""
    return kernel.name.removeprefix("dequantize_sm90a_")


def there(packed: PackedExperts) -> PackedExperts:
    """The same weights on the GPU."""
    tensors = {name: one.cuda() for name, one in packed.tensors().items()}
    return PackedExperts.from_tensors(tensors, packed.metadata)


def strided(one: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU, of the same strides."""
    made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")
    if one.dtype.itemsize == 1:
        made.view(torch.uint8).copy_(one.view(torch.uint8))
    else:
        made.copy_(one)
    return made


@dataclass
class Made:
    """A call of one kernel, whose result is in a room where every byte is 0xff."""

    call: AnyCall
    guarded: Guarded
    right: torch.Tensor

    def verify(self) -> None:
        """Run it, and assert that each bit is right and that nothing else was written."""
        self.guarded.room.fill_(-1)
        plan.run(self.call)
        wrong = differ(self.guarded.view, self.right)
        assert not wrong.any(), wrong.nonzero()[:8].tolist()
        assert self.guarded.untouched_outside()


def made(
    kernel: KernelSpec,
    count: int,
    n: int,
    k: int,
    *,
    pad: tuple[int, int] = (0, 0),
    shift: int = 0,
    seed: int = 0,
) -> Made:
    """A call on experts of random bytes; rows and experts of W have elements between them, and so
    have rows of e4m3.
    """
    operation: Any = kernel.operation
    dtype, keywords = TORCH[operation.w], dict[str, Any]()
    weight: Any
    if operation.layout == "rows":
        data, scale = rows(kernel, count, n, k, pad[0], seed)
        right = dequantised(data, scale, torch.float32).to(dtype)
        weight, keywords["scale"] = strided(data), strided(scale)
    else:
        kind = operation.format, operation.group or None, operation.scale, operation.activations
        packed = experts(kind, count, n, k, seed)
        weight, right = there(packed), packed.dequantize(dtype)
    row_stride = k + pad[0]
    steps = n * row_stride + pad[1], row_stride, 1
    size = count * steps[0] + 2 * BESIDE + shift
    room = torch.full((size,), -1, dtype=torch.int16, device="cuda")
    view = room.as_strided((count, n, k), steps, BESIDE + shift)
    inside = torch.zeros_like(room, dtype=torch.bool)
    inside.as_strided((count, n, k), steps, BESIDE + shift).fill_(True)
    out = view.view(dtype)
    call = FAMILY.call(weight, dtype, spec=kernel, out=out, **keywords)
    return Made(call, Guarded(room, out, inside), right.cuda())
