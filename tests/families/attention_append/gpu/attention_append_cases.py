"""Kernels and calls that the gpu tests share.

A call is made on the CPU, where every tensor lies in a room that is larger, and its like on the
GPU: what the reference leaves in the rooms, and around what is in them, a kernel must leave too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from warploom.generator.configurations import smoke
from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendSchedule,
)
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import filled, written

BESIDE = 1 << 15  # elements of a room on both sides of what lies in it: more than a page
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
PAGE = 16
PLAIN = AttentionAppendOperation("bf16", 128)
PAGED = replace(PLAIN, rotary="halves", queries=True, paged=True)
FULL = replace(PAGED, cache="e4m3", scales="token", packed=True)


def spec(operation: AttentionAppendOperation, threads: int = 128) -> KernelSpec:
    """A kernel."""
    return KernelSpec("sm_90a", operation, AttentionAppendSchedule(threads))  # type: ignore[arg-type]


SMOKE = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "attention_append"
]
_CACHES = (
    ("same", "none"),
    ("e4m3", "none"),
    ("e4m3", "head"),
    ("e4m3", "token"),
    ("int8", "token"),
)
EVERY = [
    *SMOKE,
    *(
        spec(replace(PAGED, cache=cache, scales=scales, packed=packed, rotary=rotary))
        for (cache, scales), (packed, rotary) in itertools.product(
            _CACHES, ((False, "halves"), (True, "interleaved"))
        )
    ),
    *(spec(replace(FULL, dim=dim, element="fp16", table="same")) for dim in (32, 80, 512)),
    *(spec(operation) for operation in (PLAIN, FULL, replace(PLAIN, packed=True))),
    spec(replace(PLAIN, cache="int8", scales="head")),
]


def lying(*extents: int, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """A tensor in a room, all of bytes that are no accident; its rows are `pad` further apart."""
    whole = (*extents[:-1], extents[-1] + pad)
    room = torch.empty(torch.Size(whole).numel() + 2 * BESIDE, dtype=dtype)
    filled(room)
    return room[BESIDE:-BESIDE].view(whole)[..., : extents[-1]]


def room(one: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in, as integers."""
    size = one.untyped_storage().nbytes() // one.element_size()
    return one.as_strided((size,), (1,), 0).view(INTEGERS[one.element_size()])


def there(one: Any) -> Any:  # noqa: ANN401 (whatever an argument is)
    """The same in a room of its own on the GPU."""
    if not isinstance(one, torch.Tensor):
        return one
    whole = room(one).cuda().view(one.dtype)
    return whole.as_strided(one.shape, one.stride(), one.storage_offset())


@dataclass
class Made:
    """A call on the CPU, and the kernel that it is made for."""

    call: AttentionAppendCall
    kernel: KernelSpec

    def verify(self) -> dict[str, torch.Tensor]:
        """Run both, and assert that all rooms have the same bits; return what the GPU wrote."""
        fields = {name: getattr(self.call, name) for name in self.call.__dataclass_fields__}
        other = AttentionAppendCall(**{name: there(one) for name, one in fields.items()})
        other.spec = self.kernel
        details: Any = None
        self.call.compute(details, (self.call.out,))
        plan.run(other)
        found = written(other)
        for name, one in written(self.call).items():
            right, got = room(one), room(found[name]).cpu()
            wrong = (right != got).nonzero().flatten() - one.storage_offset()
            assert not len(wrong), (name, len(wrong), wrong[:8].tolist(), one.shape, one.stride())
        return found


def made(
    kernel: KernelSpec,
    lengths: Sequence[int] = (3, 0, 31, 17, 46),
    new: Sequence[int] = (2,),
    *,
    kv_heads: int = 2,
    heads: int = 6,
    columns: int = 3,
    seed: int = 0,
) -> Made:
    """A call of a kernel; `new` tokens of each sequence, which of those not packed are alike."""
    operation: AttentionAppendOperation = kernel.operation  # type: ignore[assignment]
    random = torch.Generator().manual_seed(seed)
    batch, dim, element = len(lengths), operation.dim, TORCH[operation.element]
    counts = list(itertools.islice(itertools.cycle(new), batch))
    pages, page = (batch * columns + 2, PAGE) if operation.paged else (batch, columns * PAGE)

    def drawn(count: int) -> torch.Tensor:
        extents = (sum(counts),) if operation.packed else (batch, counts[0])
        one = torch.randn(*extents, count, dim, generator=random).to(element)
        one[..., 0] *= 100
        return one if operation.packed else one.transpose(1, 2)

    def cache() -> torch.Tensor:
        kind = TORCH[operation.cached]
        return lying(pages, page, kv_heads, dim, dtype=kind, pad=16).transpose(1, 2)

    given: dict[str, Any] = {"lengths_after": lying(batch, dtype=torch.int32)}
    if operation.paged:
        order = torch.randperm(pages, generator=random)[: batch * columns]
        given["page_table"] = order.view(columns, batch).t().contiguous().to(torch.int32)
    if operation.packed:
        given["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    if operation.rotary != "none":
        rotary = dim if dim % 32 else dim // 2  # all of a row, or half of it
        angles = 7 * torch.rand(columns * PAGE + 1, rotary // 2, generator=random)
        kind = TORCH[operation.angle]
        given |= {"cos": angles.cos().to(kind), "sin": angles.sin().to(kind)}
        given["interleaved"] = operation.rotary == "interleaved"
    if operation.queries:
        given["q"] = drawn(heads)
        given["out"] = lying(*given["q"].shape, dtype=element, pad=8)
    if operation.scales == "head":
        scales = torch.rand(2, kv_heads, generator=random) / 4 + 0.01
        given["scale_k"], given["scale_v"] = scales
    if operation.scales == "token":
        for name in ("scale_k", "scale_v"):
            given[name] = lying(pages, kv_heads, page, dtype=torch.float32, pad=3)
    numbers = torch.tensor(lengths, dtype=torch.int32)
    call = AttentionAppendCall(cache(), cache(), drawn(kv_heads), drawn(kv_heads), numbers, **given)
    return Made(call, kernel)


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("attention_append_sm90a_")
