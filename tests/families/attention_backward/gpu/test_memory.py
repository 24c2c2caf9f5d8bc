"""Which memory the backward pass reads, writes, copies and leaves alone; where NaN goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_arena import assert_within
from attention_backward_cases import SIMPLE, operation, short
from attention_cases import MASKS, Shape

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention import reference as forward_reference
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.reference import Tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BF16 = torch.bfloat16
LENGTH = 517
SHAPE = Shape(3, 4, 2, LENGTH, LENGTH)
# Kernels of which every gradient is bit-equal from run to run: so is what NaN does not reach.
STEADY = [kernel for kernel in cases.DETERMINISTIC if operation(kernel).dim in (64, 128, 256)]
PACKED = [kernel for kernel in cases.PACKED if operation(kernel).deterministic]
over_steady = pytest.mark.parametrize("kernel", STEADY, ids=short)
over_packed = pytest.mark.parametrize("kernel", PACKED, ids=short)


def make(kernel: KernelSpec) -> arena.Pass:
    """A pass of a kernel with its mask."""
    return arena.make(kernel, SHAPE, **MASKS[operation(kernel).mask][0])


# ---- NaN -----------------------------------------------------------------------------------------


@over_steady
@pytest.mark.parametrize("row", [0, 63, 64, 300, LENGTH - 1])
@pytest.mark.parametrize("which", ["q", "dout"])
def test_nan_in_a_row_reaches_no_other_row_of_dq_and_no_other_group_of_heads(
    kernel: KernelSpec, row: int, which: str
) -> None:
    made = make(kernel)
    clean = arena.clones(arena.verify(made))
    given = made.dout if which == "dout" else made.forward.q
    given.view[1, 2, row, 5] = torch.nan
    dq, dk, dv = made.run()
    assert dq[1, 2, row].isnan().all()
    dq[1, 2, row] = clean[0][1, 2, row]
    assert torch.equal(dq, clean[0])
    assert dk[1, 1].isnan().any()
    assert dv[1, 1].isnan().any()
    for one, wanted in ((dk, clean[1]), (dv, clean[2])):
        one[1, 1] = wanted[1, 1]
        assert torch.equal(one, wanted)


@over_steady
@pytest.mark.parametrize("column", [0, 64, 300, LENGTH - 1])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_a_key_reaches_no_other_column_and_no_other_group_of_heads(
    kernel: KernelSpec, column: int, which: str
) -> None:
    made = make(kernel)
    clean = arena.clones(arena.verify(made))
    getattr(made.forward, which).view[1, 1, column, 3] = torch.nan
    dq, dk, dv = made.run()
    assert dk[1, 1, column].isnan().all()
    assert dq[1, 2:4].isnan().any()
    # lse is that of clean keys here: the probabilities of other columns do not change.
    for one, wanted in ((dk, clean[1]), (dv, clean[2])):
        one[1, 1, column] = wanted[1, 1, column]
        assert torch.equal(one, wanted)
    dq[1, 2:4] = clean[0][1, 2:4]
    assert torch.equal(dq, clean[0])


@over_steady
def test_nan_in_one_batch_leaves_the_others_bit_equal(kernel: KernelSpec) -> None:
    made = make(kernel)
    clean = arena.clones(arena.verify(made))
    forward = made.forward
    for tensor in (*forward.given, forward.out.view, made.dout.view, made.lse):
        tensor[1] = torch.nan
    for one, wanted in zip(made.run(), clean, strict=True):
        assert one[1].isnan().any()
        one[1] = wanted[1]
        assert torch.equal(one, wanted)


@over_packed
@pytest.mark.parametrize("lengths", [[65, 70, 128], [200, 1, 63], [64, 193, 7]], ids=str)
def test_nan_in_the_next_sequence_leaves_this_one_bit_equal(
    kernel: KernelSpec, lengths: list[int]
) -> None:
    made = arena.packed(kernel, lengths, lengths, **MASKS[operation(kernel).mask][0])
    clean = arena.clones(arena.verify(made))
    first, second, _ = lengths
    middle = slice(first, first + second)
    for tensor in (*made.forward.given, made.forward.out.view, made.dout.view):
        tensor[middle] = torch.nan
    made.lse[:, middle] = torch.nan
    for one, wanted in zip(made.run(), clean, strict=True):
        assert one[middle].isnan().all()
        one[middle] = wanted[middle]
        assert torch.equal(one, wanted)
    assert all(guarded.untouched_outside() for guarded in made.gradients)


@pytest.mark.parametrize("kernel", cases.PACKED, ids=short)
def test_rows_past_the_last_sequence_are_not_read_and_their_gradients_are_0(
    kernel: KernelSpec,
) -> None:
    keywords = MASKS[operation(kernel).mask][0]
    made = arena.packed(kernel, [65, 63], [63, 100], past=200, **keywords)
    for one in arena.verify(made):
        assert (one[-200:] == 0).all()


# ---- What nothing has written yet ----------------------------------------------------------------


@pytest.fixture
def filled() -> Iterator[None]:
    """Have torch fill what it allocates with NaN, workspaces included."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS would refuse the references
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", SIMPLE)
def test_no_workspace_is_read_before_it_is_written(name: str) -> None:
    kernel = SIMPLE[name]
    deterministic = operation(kernel).deterministic
    keywords = {"deterministic": deterministic, **MASKS[operation(kernel).mask][0]}
    if operation(kernel).lengths == "packed":
        arena.verify(arena.packed(kernel, [65, 0, 257], [193, 5, 130], past=3, **keywords))
    else:
        arena.verify(arena.make(kernel, Shape(2, 4, 2, 257, 193), **keywords))


# ---- Views ---------------------------------------------------------------------------------------


def random(*shape: int) -> torch.Tensor:
    """Random numbers in bf16."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


VIEWS: dict[str, tuple[Any, int]] = {
    "heads before rows": (lambda: random(2, 4, 130, 64), 0),
    "rows before heads": (lambda: random(2, 130, 4, 64).transpose(1, 2), 0),
    "one of q, k and v together": (lambda: random(2, 130, 3, 4, 64)[:, :, 1].transpose(1, 2), 0),
    "part of a row": (lambda: random(2, 4, 130, 96)[..., 16:80], 0),
    "every other row": (lambda: random(2, 4, 260, 64)[:, :, ::2], 0),
    "batch inside": (lambda: random(4, 130, 2, 64).permute(2, 0, 1, 3), 0),
    "misaligned base": (lambda: random(2, 4, 130, 96)[..., 4:68], 1),
    "odd pitch": (lambda: random(2, 4, 130, 65)[..., :64], 1),
    "dim before rows": (lambda: random(2, 4, 64, 130).transpose(2, 3), 1),
    "one head for all": (lambda: random(2, 1, 130, 64).expand(2, 4, 130, 64), 1),
    "one number for all": (lambda: random(1)[:, None, None].expand(2, 4, 130, 64), 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_copied_only_where_tma_cannot_read_it(name: str) -> None:
    view, expected = VIEWS[name][0](), VIEWS[name][1]
    plain = random(2, 4, 130, 64)
    function = Function(64**-0.5, band=Band(right=0, bottom_right=True))
    for at in range(4):
        q, k, v, dout = (view if index == at else plain for index in range(4))
        given = Tensors(q, k, v, *forward_reference.attention(q, k, v, function), dout)
        wanted = zip(
            reference.exact(given, function), reference.bound(given, function), strict=True
        )
        bounds = dict(zip(arena.NAMES, wanted, strict=True))
        for _ in range(2):  # planned by then
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            out = warploom.attention(*leaves, causal=True)  # type: ignore[call-overload]
            before = warploom.counters.copies
            found = torch.autograd.grad(out, leaves, dout)
            assert warploom.counters.copies - before == expected
            for what, one in zip(arena.NAMES, found, strict=True):
                assert_within(what, one, *bounds[what])


def test_gradients_lie_in_memory_as_their_operands_do() -> None:
    together = random(2, 130, 3, 4, 64)
    q, k, v = (together[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3))
    out = warploom.attention(q, k, v, causal=True, deterministic=True)
    dout = random(2, 4, 130, 64)
    found = torch.autograd.grad(out, (q, k, v), dout)
    assert all(one.transpose(1, 2).is_contiguous() for one in found)
    same = [tensor.detach().contiguous().requires_grad_() for tensor in (q, k, v)]
    out = warploom.attention(*same, causal=True, deterministic=True)  # type: ignore[call-overload]
    again = torch.autograd.grad(out, same, dout)
    assert all(one.is_contiguous() for one in again)
    assert all(map(torch.equal, found, again))


def test_no_plan_keeps_what_a_copy_held() -> None:
    q = random(2, 4, 130, 64).requires_grad_()
    odd = random(2, 4, 130, 65)[..., :64]
    for value in (1.0, 2.0, 3.0):
        odd.mul_(value)
        k, plain = (t.detach().requires_grad_() for t in (odd, odd.contiguous()))
        found, wanted = (
            torch.autograd.grad(warploom.attention(q, t, t, deterministic=True).sum(), (q, t))
            for t in (k, plain)
        )
        assert all(map(torch.equal, found, wanted))


# ---- Size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_64k_tokens_take_memory_for_gradients_and_sums_of_dq(
    causal: bool, deterministic: bool
) -> None:
    tokens, heads, dim = 65_536, 4, 128
    leaves = [random(1, heads, tokens + i, dim)[:, :, :tokens].requires_grad_() for i in range(3)]
    q, k, v = leaves
    options: dict[str, Any] = {"causal": causal, "deterministic": deterministic}
    dout = random(1, heads, tokens + 3, dim)[:, :, :tokens]
    for _ in range(2):  # what the first one allocates, compiles and loads is no matter
        out, lse = warploom.attention(q, k, v, return_lse=True, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    results = dq.nbytes + dk.nbytes + dv.nbytes
    sums = heads * tokens * (4 * dim + 8)  # dq in fp32, and two numbers of each row
    assert peak <= results + sums * 1.01 + (4 << 20)
    # A few rows of dq, and of dk and dv those columns that only the last rows attend to.
    function = Function(dim**-0.5, band=Band(right=0, bottom_right=True) if causal else Band())
    for first in (0, 12_345, tokens - 65):
        rows = slice(first, first + 65)
        seen = slice(0, first + 65 if causal else tokens)
        at = (slice(None), slice(None), rows)
        given = Tensors(
            *(q[at].detach(), k[:, :, seen].detach(), v[:, :, seen].detach()),
            *(out[at].detach(), lse[at].detach(), dout[at]),
        )
        exact, bound = reference.exact(given, function), reference.bound(given, function)
        assert_within("dq", dq[at], exact[0], bound[0])
    if causal:
        last = tokens - 65
        given = Tensors(
            *(q[:, :, last:].detach(), k.detach(), v.detach()),
            *(out[:, :, last:].detach(), lse[:, :, last:].detach(), dout[:, :, last:]),
        )
        exact, bound = reference.exact(given, function), reference.bound(given, function)
        for name, one, index in (("dk", dk, 1), ("dv", dv, 2)):
            assert_within(
                name, one[:, :, last:], exact[index][:, :, last:], bound[index][:, :, last:]
            )


@pytest.mark.parametrize("long", ["q", "k"])
def test_tensors_past_2_to_the_31_elements_are_read_and_written_where_they_are(long: str) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 70 << 30:
        pytest.skip("needs 70 GB of GPU memory")
    heads, tokens, dim = 64, 262_147, 128
    assert heads * tokens * dim > 2**31
    small, large = (torch.empty(1, heads, n, dim, dtype=BF16, device="cuda") for n in (65, tokens))
    for tensor in (small, large):
        tensor.normal_(generator=torch.Generator("cuda").manual_seed(1))
    q, k = (large, small) if long == "q" else (small, large)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, k)]
    out, lse = warploom.attention(*leaves, return_lse=True)  # type: ignore[call-overload]
    dout = torch.empty_like(q).normal_(generator=torch.Generator("cuda").manual_seed(2))
    found = torch.autograd.grad(out, leaves, dout)
    function = Function(dim**-0.5)
    for head in (0, heads - 1):
        at = (slice(None), slice(head, head + 1))
        given = Tensors(q[at], k[at], k[at], out[at].detach(), lse[at].detach(), dout[at])
        exact, bound = reference.exact(given, function), reference.bound(given, function)
        for name, one, *wanted in zip(arena.NAMES, found, exact, bound, strict=True):
            assert_within(name, one[at], *wanted)
