"""The bound of an attention holds for what a kernel computes, and fails what it must not compute.

`kernel` here does what a kernel does, on the CPU: tiles of keys, a running maximum, probabilities
rounded to 16 bits, fp32 sums.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from warploom.runtime.families._attention import function as chunked
from warploom.runtime.families._attention import reference, scores
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers import Softcap
from warploom.runtime.families._attention.modifiers.modifier import Rows
from warploom.runtime.measure import largest_share

BF16, FP16 = torch.bfloat16, torch.float16
TILE = 48
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Wrong = Callable[[Tensors, Function], tuple[torch.Tensor, torch.Tensor]]


def operands(
    seq_q: int, seq_k: int, dtype: torch.dtype, *, dim: int = 64, size: float = 1.0
) -> Tensors:
    generator = torch.Generator().manual_seed(seq_q + seq_k)

    def one(heads: int, seq: int, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(1, heads, seq, dim, generator=generator) * factor).to(dtype)

    return one(4, seq_q, size), one(2, seq_k, size), one(2, seq_k)


def softcap_of(function: Function) -> float:
    """The softcap of a function that has one, and nothing else."""
    (softcap,) = function.modifiers
    assert isinstance(softcap, Softcap)
    return softcap.value


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Function
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as a kernel computes it, tile by tile from the right."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).float() for t in (k, v))
    s = q.float() @ k.mT * function.scale
    if function.modifiers:
        s = torch.tanh(s / softcap_of(function)) * softcap_of(function)
    chunk = Rows(slice(0, 1), slice(0, q.shape[2]))
    s = s.masked_fill(~scores.visible(q, k, function.band, chunk), -torch.inf)
    top = torch.full((*q.shape[:-1], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(q.shape)
    for first in reversed(range(0, k.shape[2], TILE)):
        tile = s[..., first : first + TILE]
        new = torch.maximum(top, tile.amax(-1, keepdim=True))
        base = new.masked_fill(new == -torch.inf, 0)
        factor, p = (top - base).exp(), (tile - base).exp()
        total = total * factor + p.sum(-1, keepdim=True)
        out = out * factor + p.to(q.dtype).float() @ v[:, :, first : first + TILE]
        top = new
    lse = (top + total.log()).squeeze(-1)
    return (out / total).nan_to_num(0.0).to(q.dtype), lse


def shares(computed: tuple[torch.Tensor, ...], given: Tensors, function: Function) -> list[float]:
    """The largest error of out and of lse, as shares of their bounds."""
    exact, bound = reference.exact(*given, function), reference.bound(*given, function)
    return [largest_share(*one) for one in zip(computed, exact, bound, strict=True)]


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
    given = operands(*lengths, dtype)
    for compute in (kernel, reference.attention):
        found = shares(compute(*given, FUNCTIONS[name]), given, FUNCTIONS[name])
        assert max(found) <= 1


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_bound_holds_for_scores_of_1e4(dtype: torch.dtype) -> None:
    given, function = operands(65, 130, dtype, size=40.0), Function(1.0)
    assert reference.exact(*given, function)[1].abs().max() > 1e4
    assert max(shares(kernel(*given, function), given, function)) <= 1


def lose_a_column(given: Tensors, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given
    return kernel(q, k[:, :, :-1], v[:, :, :-1], function)


def swap_columns(given: Tensors, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given
    other = v.clone()
    other[:, :, 0:8], other[:, :, 8:16] = v[:, :, 8:16], v[:, :, 0:8]
    return kernel(q, k, other, function)


def lose_a_k_step(given: Tensors, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given
    shorter = q.clone()
    shorter[..., -16:] = 0
    return kernel(shorter, k, v, function)


def unmask_the_next(given: Tensors, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    band = Band(right=1, bottom_right=True)
    return kernel(*given, Function(function.scale, band=band))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "wrong", [lose_a_column, swap_columns, lose_a_k_step, unmask_the_next], ids=lambda f: f.__name__
)
def test_the_bound_fails_a_result_that_is_wrong(wrong: Wrong, dtype: torch.dtype) -> None:
    given = operands(130, 130, dtype)
    function = FUNCTIONS["causal" if wrong is unmask_the_next else "plain"]
    exact, bound = reference.exact(*given, function), reference.bound(*given, function)
    out, lse = wrong(given, function)
    outside = ((out.double() - exact[0]).abs() > bound[0]).double().mean()
    assert outside > 0.3
    if wrong is not swap_columns:
        assert ((lse.double() - exact[1]).abs() > bound[1]).double().mean() > 0.5


def test_a_row_that_attends_to_nothing_must_be_exactly_0_and_its_lse_minus_infinity() -> None:
    given, function = operands(9, 5, BF16), FUNCTIONS["causal"]
    out, lse = kernel(*given, function)
    assert (lse[:, :, :4] == -torch.inf).all()
    assert max(shares((out, lse), given, function)) <= 1
    out[0, 0, 0, 0] = 1e-30
    assert shares((out, lse), given, function)[0] > 1
    lse[0, 0, 0] = -1e30
    assert shares((out, lse), given, function)[1] == torch.inf


@pytest.mark.parametrize("name", FUNCTIONS)
def test_chunks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(37, 51, FP16)
    given = (torch.cat([q] * 3), torch.cat([k] * 3), torch.cat([v] * 3))
    functions = (reference.exact, reference.plain, reference.bound, reference.attention)
    whole = [function(*given, FUNCTIONS[name]) for function in functions]
    for size in (1, 4 * 51 * 10, 4 * 51 * 37 * 2):
        monkeypatch.setattr(chunked, "_CHUNK", size)
        for function, (out, lse) in zip(functions, whole, strict=True):
            found = function(*given, FUNCTIONS[name])
            # A score below 8 that is rounded the other way, by 2**-8, moves its row by as much.
            moved = 2**-7 * float(v.abs().max()) if function is reference.plain else 1e-6
            assert torch.allclose(found[0].double(), out.double(), rtol=1e-3, atol=moved)
            assert torch.allclose(found[1].double(), lse.double(), rtol=1e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_plain_expression_is_near_the_exact_one(name: str) -> None:
    given, function = operands(65, 97, BF16), FUNCTIONS[name]
    out, lse = reference.plain(*given, function)
    exact = reference.exact(*given, function)
    assert (out.double() - exact[0]).abs().max() < 0.05
    shown = exact[1].isfinite()
    assert torch.equal(lse.isfinite(), shown)
    assert (lse.double() - exact[1])[shown].abs().max() < 0.05


def test_flops_count_the_scores_that_are_not_masked() -> None:
    assert reference.flops(5, 7, Band()) == 4 * 35
    assert reference.flops(4, 4, Band(right=0)) == 4 * 10
    assert reference.flops(4, 6, Band(right=0, bottom_right=True)) == 4 * (3 + 4 + 5 + 6)
    assert reference.flops(6, 4, Band(right=0, bottom_right=True)) == 4 * 10
    assert reference.flops(6, 6, Band(left=1, right=1)) == 4 * (2 + 3 * 4 + 2)


def test_an_ulp_is_the_spacing_of_the_type() -> None:
    assert reference.ulp(BF16, 1.0) == 2.0**-7
    assert reference.ulp(BF16, -3.9) == 2.0**-6
    assert reference.ulp(FP16, 0.0) == 2.0**-24
