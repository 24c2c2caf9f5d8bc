"""The bound of gradients holds for what a kernel computes, and fails what it must not compute.

`kernel` here does what a kernel does, on the CPU: tiles of keys, probabilities and score gradients
rounded to 16 bits, fp32 sums, out of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from warploom.runtime.families._attention import function as chunked
from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention import scores
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers import Softcap
from warploom.runtime.families._attention.modifiers.modifier import Rows
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.reference import Gradients, Tensors
from warploom.runtime.measure import largest_share

BF16, FP16 = torch.bfloat16, torch.float16
TILE = 48
Wrong = Callable[[Tensors, Function], Gradients]


def tensors(
    seq_q: int,
    seq_k: int,
    dtype: torch.dtype,
    function: Function,
    *,
    size: float = 1.0,
    dlse: bool = False,
) -> Tensors:
    generator = torch.Generator().manual_seed(seq_q + seq_k)

    def one(heads: int, seq: int, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(1, heads, seq, 64, generator=generator) * factor).to(dtype)

    q, k, v, dout = one(4, seq_q, size), one(2, seq_k, size), one(2, seq_k), one(4, seq_q)
    out, lse = forward.attention(q, k, v, function)
    coming = torch.randn(lse.shape, generator=generator) if dlse else None
    return Tensors(q, k, v, out, lse, dout, coming)


def softcap_of(function: Function) -> float:
    """The softcap of a function that has one, and nothing else."""
    (softcap,) = function.modifiers
    assert isinstance(softcap, Softcap)
    return softcap.value


def kernel(given: Tensors, function: Function) -> Gradients:
    """The gradients as a kernel computes them, a tile of keys at a time."""
    q, dtype = given.q.float(), given.q.dtype
    sharing = given.q.shape[1] // given.k.shape[1]
    keys, values = (t.repeat_interleave(sharing, 1).float() for t in (given.k, given.v))
    dout, lse = given.dout.float(), given.lse[..., None]
    delta = (dout * given.out.float()).sum(-1, keepdim=True)
    if given.dlse is not None:
        delta = delta - given.dlse[..., None]
    chunk = Rows(slice(0, 1), slice(0, q.shape[2]))
    visible = scores.visible(given.q, given.k, function.band, chunk)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(keys.shape), torch.zeros(values.shape)
    for first in reversed(range(0, keys.shape[2], TILE)):
        at = (slice(None), slice(None), slice(first, first + TILE))
        s = q @ keys[at].mT * function.scale
        slope = torch.ones(())
        if function.modifiers:
            s = torch.tanh(s / softcap_of(function))
            slope, s = 1 - s * s, s * softcap_of(function)
        p = (s - lse).exp().masked_fill(~visible[:, at[2]] | (lse == -torch.inf), 0)
        ds = (p * (dout @ values[at].mT - delta) * slope).to(dtype).float()
        dv[at] = p.to(dtype).float().mT @ dout
        dk[at] = ds.mT @ q * function.scale
        dq += ds @ keys[at]
    dk, dv = (t.unflatten(1, (-1, sharing)).sum(2).to(dtype) for t in (dk, dv))  # type: ignore[no-untyped-call]
    return (dq * function.scale).to(dtype), dk, dv


def shares(found: Gradients, given: Tensors, function: Function) -> list[float]:
    """The largest error of dq, dk and dv, as shares of their bounds."""
    return shares_of(found, reference.exact(given, function), reference.bound(given, function))


def shares_of(found: Gradients, exact: Gradients, bound: Gradients) -> list[float]:
    return [largest_share(*one) for one in zip(found, exact, bound, strict=True)]


FUNCTIONS: dict[str, Function] = {
    "plain": Function(0.125),
    "causal": Function(0.125, band=Band(right=0, bottom_right=True)),
    "causal, top left": Function(0.125, band=Band(right=0)),
    "window": Function(0.125, band=Band(left=37, right=5, bottom_right=True)),
    "softcap": Function(0.125, modifiers=(Softcap(2.0),)),
    "flat": Function(1e-6),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("lengths", [(65, 65), (40, 300), (130, 97), (1, 1021)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bound_holds_for_what_a_kernel_computes(
    name: str, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    for dlse in (False, True):
        given = tensors(*lengths, dtype, FUNCTIONS[name], dlse=dlse)
        exact, bound = (one(given, FUNCTIONS[name]) for one in (reference.exact, reference.bound))
        for compute in (kernel, reference.gradients):
            assert max(shares_of(compute(given, FUNCTIONS[name]), exact, bound)) <= 1


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_bound_holds_for_scores_of_1e4(dtype: torch.dtype) -> None:
    function = Function(1.0)
    given = tensors(65, 130, dtype, function, size=40.0)
    assert given.lse.abs().max() > 1e4
    assert max(shares(kernel(given, function), given, function)) <= 1


def lose_a_column(given: Tensors, function: Function) -> Gradients:
    dq, dk, dv = kernel(replace(given, k=given.k[:, :, :-1], v=given.v[:, :, :-1]), function)
    return dq, *(torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (dk, dv))  # type: ignore[return-value]


def lose_a_tile_of_rows(given: Tensors, function: Function) -> Gradients:
    dout, delta = given.dout.clone(), given.out.clone()
    dout[:, :, -16:] = delta[:, :, -16:] = 0
    dq, dk, dv = kernel(replace(given, dout=dout, out=delta), function)
    return dq, dk, dv


def lose_a_head(given: Tensors, function: Function) -> Gradients:
    dout = given.dout.clone()
    dout[:, 1] = dout[:, 3] = 0
    return kernel(replace(given, dout=dout), function)


def lose_delta(given: Tensors, function: Function) -> Gradients:
    return kernel(replace(given, out=torch.zeros_like(given.out)), function)


def swap_columns(given: Tensors, function: Function) -> Gradients:
    found = kernel(given, function)
    for one in found:
        first = one[..., 0:8].clone()
        one[..., 0:8] = one[..., 8:16]
        one[..., 8:16] = first
    return found


def lose_a_k_step(given: Tensors, function: Function) -> Gradients:
    shorter = given.q.clone()
    shorter[..., -16:] = 0
    return kernel(replace(given, q=shorter), function)


def unmask_the_next(given: Tensors, function: Function) -> Gradients:
    band = Band(right=1, bottom_right=True)
    return kernel(given, replace(function, band=band))


def lose_the_slope(given: Tensors, function: Function) -> Gradients:
    """The gradient of a score as if the cap were not there, its value as it is."""
    capped = scores.scores(
        given.q,
        given.k,
        replace(function, band=Band()),
        Rows(slice(0, 1), slice(0, given.q.shape[2])),
        torch.float32,
    ).flatten(1, 2)
    keys, values = (t.repeat_interleave(2, 1).float() for t in (given.k, given.v))
    dout = given.dout.float()
    p = (capped - given.lse[..., None]).exp()
    delta = (dout * given.out.float()).sum(-1, keepdim=True)
    ds = p * (dout @ values.mT - delta) * function.scale
    _, _, dv = kernel(given, function)
    dk = (ds.mT @ given.q.float()).unflatten(1, (-1, 2)).sum(2)  # type: ignore[no-untyped-call]
    return (ds @ keys).to(given.q.dtype), dk.to(given.q.dtype), dv


# Of dq, dk and dv: those that each mistake must show in.
MISTAKES: dict[Wrong, tuple[bool, bool, bool]] = {
    lose_a_column: (True, True, True),
    lose_a_tile_of_rows: (True, True, True),
    lose_a_head: (True, True, True),
    lose_delta: (True, True, False),
    swap_columns: (True, True, True),
    lose_a_k_step: (True, True, True),
    unmask_the_next: (True, True, True),
    lose_the_slope: (True, True, False),
}
NAMES = {unmask_the_next: "causal", lose_the_slope: "softcap"}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("wrong", MISTAKES, ids=lambda f: f.__name__)
def test_the_bound_fails_a_result_that_is_wrong(wrong: Wrong, dtype: torch.dtype) -> None:
    function = FUNCTIONS[NAMES.get(wrong, "plain")]
    given = tensors(130, 130, dtype, function)
    found = shares(wrong(given, function), given, function)
    assert [share > 1 for share in found] == list(MISTAKES[wrong])


def test_what_nothing_reaches_must_be_exactly_0() -> None:
    function = FUNCTIONS["causal"]
    given = tensors(9, 5, BF16, function)
    dq, dk, dv = kernel(given, function)
    assert (dq[:, :, :4] == 0).all()
    assert max(shares((dq, dk, dv), given, function)) <= 1
    dq[0, 0, 0, 0] = 1e-30
    assert shares((dq, dk, dv), given, function)[0] > 1
    function = FUNCTIONS["causal, top left"]
    given = tensors(5, 9, BF16, function)
    dq, dk, dv = kernel(given, function)
    assert (dk[:, :, 5:] == 0).all()
    dk[0, 0, 8, 0] = dv[0, 0, 8, 0] = 1e-30
    assert min(shares((dq, dk, dv), given, function)[1:]) > 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_chunks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tensors(37, 51, FP16, FUNCTIONS[name], dlse=True)
    given = Tensors(
        *(torch.cat([getattr(one, f)] * 3) for f in ("q", "k", "v", "out", "lse", "dout", "dlse"))
    )
    functions = (reference.exact, reference.plain, reference.bound, reference.gradients)
    whole = [function(given, FUNCTIONS[name]) for function in functions]
    for size in (4 * 51 * 10, 4 * 51 * 37 * 2):
        monkeypatch.setattr(chunked, "_CHUNK", size)
        for function, wanted in zip(functions, whole, strict=True):
            tolerance = 1e-2 if function is reference.plain else 1e-3
            for found, expected in zip(function(given, FUNCTIONS[name]), wanted, strict=True):
                assert torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dlse", [False, True])
def test_the_plain_expression_is_near_the_exact_one(name: str, dlse: bool) -> None:
    for lengths in ((65, 97), (97, 65)):
        given = tensors(*lengths, BF16, FUNCTIONS[name], dlse=dlse)
        plain, exact = (
            reference.plain(given, FUNCTIONS[name]),
            reference.exact(given, FUNCTIONS[name]),
        )
        ours = kernel(given, FUNCTIONS[name])
        for found, wanted, one in zip(plain, exact, ours, strict=True):
            error = (found.double() - wanted).abs().max().item()
            assert error < 0.1
            ulp = forward.ulp(BF16, wanted.abs().max().item())
            assert (one.double() - wanted).abs().max().item() <= 2 * error + ulp


def test_exact_gradients_do_not_look_at_the_results_of_the_forward_pass() -> None:
    function = FUNCTIONS["plain"]
    given = tensors(33, 33, BF16, function)
    broken = replace(given, out=torch.zeros_like(given.out), lse=torch.zeros_like(given.lse))
    for one, other in zip(
        reference.exact(given, function), reference.exact(broken, function), strict=True
    ):
        assert torch.equal(one, other)
    assert max(shares(kernel(broken, function), given, function)) > 1
