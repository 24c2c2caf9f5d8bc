"""Given scales of both orientations: every bit against torch, and what delayed scaling does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cast_cases as cases
import pytest
import torch
from cast_cases import short

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
EXTENTS = [(1, 256), (127, 256), (130, 512), (257, 1280), (600, 768), (1031, 256)]
PLAIN = [one for one in cases.GIVEN if one.operation.gate == "none"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.GIVEN, ids=short)
def test_every_bit_is_right(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("extents", [(1, 1), (3, 63), (127, 129), (257, 1000), (1031, 17)], ids=str)
@pytest.mark.parametrize("kernel", PLAIN, ids=short)
def test_extents_that_no_vector_divides(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("kernel", cases.GIVEN, ids=short)
def test_rows_of_any_pitch_and_address_are_read_and_written_in_place(kernel: KernelSpec) -> None:
    for pad, shift in ((16, 0), (8, 8), (1, 0), (13, 1), (0, 3)):
        cases.made(kernel, 387, 512, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("kernel", PLAIN, ids=short)
def test_scales_may_have_any_strides_and_addresses(kernel: KernelSpec) -> None:
    """Scales of a column may follow each other, be apart, or be one number."""
    made = cases.made(kernel, 387, 520)
    call = made.call
    assert call.scale is not None and call.scale_t is not None

    def transposed(scale: torch.Tensor) -> torch.Tensor:
        return scale.t().contiguous().t()

    def apart(scale: torch.Tensor) -> torch.Tensor:
        rows, columns = scale.shape
        memory = torch.full((rows * (3 * columns + 5) + 1,), torch.nan, device="cuda")
        return memory[1:].view(rows, -1)[:, : 3 * columns : 3].copy_(scale)

    def one(scale: torch.Tensor) -> torch.Tensor:
        return scale[:1, :1].expand_as(scale)

    for change in (transposed, apart, one):
        made.call = replace(call, scale=change(call.scale), scale_t=change(call.scale_t))
        made.verify()


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("block", ["row", (1, 128)], ids=str)
def test_scales_and_values_of_every_kind(block: str | tuple[int, int], dtype: torch.dtype) -> None:
    """Of both signs, 0, tiny, huge, infinite and NaN, each for other rows of x and of x.T."""
    kinds = torch.tensor([1.0, -0.37, 2.0**-9, 1e30, 1e-38, 1e-45, 0.0, torch.inf, torch.nan, -3.0])
    random = torch.Generator().manual_seed(0)
    m, n = 301, 387
    for source in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(m, n, generator=random)
        for value in (torch.inf, -torch.inf, torch.nan, 0.0, 65504.0):
            places = (
                torch.randint(m, (40,), generator=random),
                torch.randint(n, (40,), generator=random),
            )
            x[places] = value
        x = x.to(source)
        across = (1, 1) if block == "row" else (-(-n // 128), -(-m // 128))
        scale, scale_t = (
            kinds[torch.randint(len(kinds), (rows, columns), generator=random)]
            for rows, columns in zip((m, n), across, strict=True)
        )
        right = warploom.cast(x, dtype, block=block, transpose=True, scale=scale, scale_t=scale_t)
        there = {"scale": scale.cuda(), "scale_t": scale_t.cuda()}
        found = warploom.cast(x.cuda(), dtype, block=block, transpose=True, **there)
        for one, other in zip(found, right, strict=True):
            assert not cases.differ(one.cpu(), other).any()


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("block", ["row", (1, 128)], ids=str)
def test_powers_of_two_that_a_call_returned_give_its_bits(
    block: str | tuple[int, int], offsets: bool
) -> None:
    x = torch.randn(700, 328, device="cuda").bfloat16()
    ends = torch.tensor([5, 5, 300, 640, 700], device="cuda", dtype=torch.int32)
    keywords: dict[str, Any] = {"block": block, "transpose": True}
    keywords |= {"offsets": ends} if offsets else {}
    q, scale, q_t, scale_t, *rest = warploom.cast(x, E4M3, pow2=True, **keywords)
    again = warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
    assert again[1] is scale and again[3] is scale_t
    last_t = int(rest[0][-1]) if rest else None
    assert torch.equal(again[0].float(), q.float())
    assert torch.equal(again[2][:, :last_t].float(), q_t[:, :last_t].float())


@pytest.mark.parametrize("block", ["row", (1, 128)], ids=str)
def test_a_call_is_one_launch_that_graphs_replay_with_other_scales(
    block: str | tuple[int, int],
) -> None:
    """Delayed scaling: scales are computed from the step before, in the memory that graphs read."""
    x = torch.randn(513, 392, device="cuda").bfloat16()
    keywords: dict[str, Any] = {"block": block, "transpose": True}
    _, scale, _, scale_t = warploom.cast(x, E4M3, **keywords)
    warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
    before = warploom.counters.as_dict()
    warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1
    assert after == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
    for factor in (0.5, 3.0, 0.0, -1.25):
        scale.mul_(factor).add_(0.01)
        scale_t.mul_(-factor).add_(0.02)
        x.normal_()
        graph.replay()
        there = {"scale": scale.cpu(), "scale_t": scale_t.cpu()}
        right = warploom.cast(x.cpu(), E4M3, **there, **keywords)
        for one, other in zip(found, right, strict=True):
            assert not cases.differ(one.cpu(), other).any()


@pytest.mark.parametrize("m,n", [(8192, 4096), (4099, 7168), (100_003, 64)])
@pytest.mark.parametrize("kernel", PLAIN[:1] + PLAIN[-1:], ids=short)
def test_large_extents(kernel: KernelSpec, m: int, n: int) -> None:
    cases.made(kernel, m, n).verify()


def test_rows_in_no_one_pitch_are_copied() -> None:
    x = torch.randn(6, 130, device="cuda").view(2, 3, 130)
    scale = (torch.rand(3, 2, 1, device="cuda") + 0.5).transpose(0, 1)
    scale_t = torch.rand(130, 1, device="cuda") + 0.5
    keywords: dict[str, Any] = {"block": "row", "transpose": True}
    before = warploom.counters.copies
    found = warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
    assert warploom.counters.copies - before == 1
    right = warploom.cast(x.cpu(), E4M3, scale=scale.cpu(), scale_t=scale_t.cpu(), **keywords)
    for one, other in zip(found, right, strict=True):
        assert not cases.differ(one.cpu(), other).any()


def test_what_runs_is_the_kernel_of_given_scales() -> None:
    kernel = PLAIN[0]
    made = cases.made(kernel, 130, 200)
    made.call.spec = None
    assert plan.make(made.call, plan.Plan).choice.spec == kernel
