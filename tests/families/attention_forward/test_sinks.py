"""Sinks on the CPU: one more score of each row, without a value, and its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.modifiers import Sinks

BF16 = torch.bfloat16
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},  # two rows of nine attend to nothing but their sink
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def leaves(kind: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and sinks: four query heads over two."""
    shapes = ((2, 4, 9, 40), (2, 2, 7, 40), (2, 2, 7, 40))
    given = [random(*shape, seed=i).to(BF16) for i, shape in enumerate(shapes)]
    return [one.requires_grad_() for one in (*given, random(4).to(kind))]


def shown(keywords: dict[str, Any]) -> torch.Tensor:
    """Which of 9 rows attends to which of 7 columns, by the words of the documentation."""
    row, column = torch.arange(9)[:, None], torch.arange(7)
    diagonal = row if keywords.get("causal") == "top_left" else row - 2
    left, right = keywords.get("window", (99, 0 if "causal" in keywords else 99))
    return (column >= diagonal - left) & (column <= diagonal + right)


def expected(
    given: list[torch.Tensor], keywords: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in the type of what is given, by torch's softmax over one score more."""
    q, k, v, sinks = given
    s = q @ k.repeat_interleave(2, 1).mT * 40**-0.5
    if cap := keywords.get("softcap"):
        s = cap * torch.tanh(s / cap)
    s = s.masked_fill(~shown(keywords), -torch.inf)
    s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
    return torch.softmax(s, -1)[..., :-1] @ v.repeat_interleave(2, 1), s.logsumexp(-1)


@pytest.mark.parametrize("kind", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_a_softmax_over_one_score_more(
    name: str, kind: torch.dtype
) -> None:
    given, keywords = leaves(kind), CALLS[name]
    out, lse = warploom.attention(*given[:3], sinks=given[3], return_lse=True, **keywords)
    arriving = random(*out.shape).to(BF16), random(*lse.shape)
    found = (out, lse, *torch.autograd.grad((out, lse), given, arriving))
    wide = [one.detach().double().requires_grad_() for one in given]
    results = expected(wide, keywords)
    gradients = torch.autograd.grad(results, wide, [one.double() for one in arriving])
    for one, wanted in zip(found, (*results, *gradients), strict=True):
        assert torch.allclose(one.double(), wanted, rtol=2e-2, atol=2e-2)
    assert (found[-1].dtype, found[-1].shape) == (kind, (4,))


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_and_differentiates_them(name: str) -> None:
    given, keywords = leaves(), CALLS[name]

    def layer(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, sinks = given
        out, lse = warploom.attention(q, k, v, sinks=sinks, return_lse=True, **keywords)
        return out * 2, lse + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    both = []
    for run in (layer, compiled):
        out, lse = run(*given)
        arriving = random(*out.shape).to(BF16), random(*lse.shape)
        both.append((out, lse, *torch.autograd.grad((out, lse), given, arriving)))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_each_gradient_is_there_where_it_is_wanted(wanted: tuple[int, ...], compiled: bool) -> None:
    given = [one.detach() for one in leaves()]
    every = leaves()
    for index in wanted:
        given[index].requires_grad_()

    def loss(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, sinks = given
        return warploom.attention(q, k, v, sinks=sinks).float().square().sum()

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    run(*given).backward()
    loss(*every).backward()
    for index, (one, whole) in enumerate(zip(given, every, strict=True)):
        assert (one.grad is not None) == (index in wanted)
        assert one.grad is None or torch.equal(one.grad, whole.grad)  # type: ignore[arg-type]


def test_torch_finds_no_fault_with_the_operators() -> None:
    *given, sinks = leaves()
    function = ("bottom_right", 3, None, 2.0, None, None, None, None, None)
    arguments = (*given, *function, None, None, None, sinks)
    torch.library.opcheck(torch.ops.warploom.attention.default, arguments)
    out, lse = torch.ops.warploom.attention(*arguments)
    results = (torch.randn_like(out), None, *given, out, lse)
    results = tuple(one if one is None else one.detach() for one in results)
    for wanted in (False, True):
        named = (wanted, False, False, False, False)
        none = (None,) * 5
        backward = (*results, *function, False, None, sinks.detach(), *none, *named)
        torch.library.opcheck(torch.ops.warploom.attention_backward_further.default, backward)
    into = (*(one.detach() for one in given), *function, None, torch.empty_like(out).detach())
    torch.library.opcheck(torch.ops.warploom.attention_into.default, (*into, sinks.detach()))


def test_a_checkpoint_gives_the_same_gradients() -> None:
    given = leaves()

    def layer(*given: torch.Tensor) -> torch.Tensor:
        return warploom.attention(*given[:3], sinks=given[3], causal="bottom_right")

    both = [layer(*given), checkpoint(layer, *given, use_reentrant=False)]
    found = [torch.autograd.grad(out.float().square().sum(), given) for out in both]
    assert all(map(torch.equal, *found))


def test_rows_without_keys_have_their_sink_alone() -> None:
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    of_keys = torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    given = [random(10, 4, 40, seed=0), random(5, 2, 40, seed=1), random(5, 2, 40, seed=2)]
    q, k, v = (one.to(BF16).requires_grad_() for one in given)
    sinks = random(4).requires_grad_()
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": of_keys}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 2}
    out, lse = warploom.attention(q, k, v, sinks=sinks, return_lse=True, **lengths, **longest)
    assert (out[3:8] == 0).all()
    assert torch.equal(lse[:, 3:8], sinks[:, None].expand(4, 5))
    (found,) = torch.autograd.grad(lse[:, 3:8].sum(), sinks)
    assert torch.allclose(found, torch.full((4,), 5.0))
    none = [one[:0] for one in (k, v)]
    out, lse = warploom.attention(
        q[None, :8].transpose(1, 2),
        *(one[None].transpose(1, 2) for one in none),
        sinks=sinks,
        return_lse=True,
    )
    assert (out == 0).all()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 4, 8))


@pytest.mark.parametrize(("sink", "vanishes"), [(70.0, False), (92.0, True), (1e4, True)])
def test_a_kernel_may_lose_only_what_is_no_normal_number_beside_its_sink(
    sink: float, vanishes: bool
) -> None:
    q, k, v, _ = (one.detach() for one in leaves())
    function = Function(40**-0.5, modifiers=(Sinks(torch.full((4,), sink)),))
    out = reference.exact(q, k, v, function)[0]
    bound = reference.bound(q, k, v, function)[0]
    assert bool((out.abs() <= bound).all()) == vanishes


def test_the_bound_of_rows_without_keys_is_of_their_sink_alone() -> None:
    q, k, v, sinks = (one.detach() for one in leaves())
    out, lse = reference.bound(
        q, k[:, :, :0], v[:, :, :0], Function(1.0, modifiers=(Sinks(sinks),))
    )
    assert out.max() < 1e-30
    assert lse.max() < 1e-4


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(2), r"sinks \[2\].*must be \[4\]"),
        (torch.zeros(4, 1), r"sinks \[4, 1\].*must be \[4\]"),
        (torch.zeros(8)[::2], r"strides \[2\].*contiguous"),
        (torch.zeros(4).half(), r"torch.float16.*of torch.float32 or torch.bfloat16"),
        (torch.zeros(4, device="meta"), "device"),
        (1.0, "sinks 1.0"),
    ],
    ids=str,
)
def test_sinks_of_another_shape_or_type_are_named(sinks: object, message: str) -> None:
    q, k, v, _ = (one.detach() for one in leaves())
    with pytest.raises(ProblemError, match=message):
        warploom.attention(q, k, v, sinks=sinks)  # type: ignore[arg-type]


def test_the_kernels_are_those_of_sinks_and_of_their_gradient_where_it_is_wanted() -> None:
    q, k, v, sinks = leaves()
    gpu = {"gpu": "NVIDIA H200"}
    plain = warploom.explain(q, k, v, **gpu)
    given = warploom.explain(q, k, v, sinks=sinks, **gpu)
    kept = warploom.explain(q, k, v, sinks=sinks.detach(), **gpu)
    assert "_sinks_fp32" in given.kernel
    assert "_sinks_fp32" in str(given.backward)
    assert "_sinks_fp32" in kept.kernel
    assert kept.backward == plain.backward


def test_few_rows_by_many_keys_take_sinks_too() -> None:
    q = torch.empty(1, 8, 1, 128, dtype=BF16, device="meta")
    k = torch.empty(1, 2, 8192, 128, dtype=BF16, device="meta")
    sinks = torch.empty(8, dtype=BF16, device="meta")
    kernel = warploom.explain(q, k, k, sinks=sinks, gpu="NVIDIA H200").kernel
    assert kernel.startswith("attention_decode")
    assert "_sinks_same" in kernel
