"""Every element of both results against float64, over extents that no block divides."""

from __future__ import annotations

import math

import attention_merge_cases as cases
import pytest
import torch
from attention_merge_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
ROWS = [(1,), (7, 33), (2, 3, 65), (5, 1, 1000)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_element_is_within_its_bound(kernel: KernelSpec) -> None:
    for rows in ROWS:
        cases.made(kernel, *rows).verify()
        cases.made(kernel, *rows, pad=8).verify()


def test_logarithms_of_every_size_are_right() -> None:
    """Differences from 0 to where the smaller weight is none, at sums near and far from 0."""
    apart = torch.linspace(-120, 120, 4001, device="cuda")
    for middle in (0.0, -3.0, 88.0, -1e4, 1e30):
        made = cases.made(cases.spec(), 4001)
        made.call.lse_a.copy_(middle + apart / 2)
        made.call.lse_b.copy_(middle - apart / 2)
        made.verify()


def test_what_attended_to_nothing_has_no_weight_whatever_it_holds() -> None:
    made = cases.made(cases.spec(), 60)
    call = made.call
    call.lse_a[:20], call.lse_a[40:50] = -torch.inf, torch.inf
    call.lse_b[10:30], call.lse_b[45:55] = -torch.inf, torch.inf
    call.out_a[:20], call.out_a[40:50], call.out_b[10:30], call.out_b[45:55] = [torch.nan] * 4
    out, lse = made.verify()
    nothing = torch.isinf(call.lse_a) & torch.isinf(call.lse_b)
    assert nothing.sum() == 15 and (out[nothing] == 0).all() and (lse[nothing] == -torch.inf).all()


def test_nan_reaches_its_row_alone() -> None:
    made = cases.made(cases.spec(), 64)
    out, lse = (one.clone() for one in made.verify())
    made.call.lse_a[3], made.call.out_b[9, 5] = torch.nan, torch.nan
    found, logs = made.run()
    assert found[3].isnan().all() and logs[3].isnan() and found[9, 5].isnan()
    found[3], logs[3], found[9, 5] = out[3], lse[3], out[9, 5]
    assert torch.equal(found, out) and torch.equal(logs, lse)


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_elements_rows_are_found() -> None:
    kernel, rows = cases.spec(512, 128, 32), (1 << 22) + 5
    a = torch.ones(1, 512, device="cuda").bfloat16().expand(rows, 512).contiguous()
    a[-1] = 3.0
    zero = torch.zeros(rows, device="cuda")
    call = AttentionMergeCall(a, zero, a, zero, a, spec=kernel)  # in place
    _, lse = plan.run(call)
    assert (a[:-1] == 1).all() and (a[-1] == 3).all()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)))


def test_parts_of_attention_merge_to_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 128, device="cuda").bfloat16() for n in (64, 500, 500))
    whole, whole_lse = warploom.attention(q, k, v, return_lse=True)
    merged = None
    for begin, end in ((0, 130), (130, 300), (300, 500)):
        keys, values = k[:, :, begin:end], v[:, :, begin:end]
        part = warploom.attention(q, keys.contiguous(), values.contiguous(), return_lse=True)
        merged = part if merged is None else warploom.merge_state(*merged, *part)
    assert merged is not None
    torch.testing.assert_close(merged[0], whole, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(merged[1], whole_lse, rtol=1e-5, atol=1e-5)


def test_the_gpu_computes_what_the_reference_does() -> None:
    made = cases.made(cases.spec(), 300)
    call = made.call
    given = [one.cpu() for one in (call.out_a, call.lse_a, call.out_b, call.lse_b)]
    assert (
        share([one.cpu() for one in made.run()], RUNTIME.expected(AttentionMergeCall(*given))) <= 1
    )
    assert share(warploom.merge_state(*given), RUNTIME.expected(AttentionMergeCall(*given))) <= 1
