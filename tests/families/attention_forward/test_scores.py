"""What changes scores, on the CPU: ALiBi, a bias with its gradient, a mask of truth values."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError

BF16 = torch.bfloat16
BATCH, HEADS, ROWS, COLUMNS = 2, 4, 9, 7
H200: Any = {"gpu": "NVIDIA H200"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bias(*shape: int, kind: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"bias": random(*shape, seed=5).to(kind)}


def mask(*shape: int) -> dict[str, torch.Tensor]:
    return {"mask": random(*shape, seed=6) > -0.3}


SLOPES = {"alibi_slopes": random(HEADS).abs()}
CALLS: dict[str, dict[str, Any]] = {
    "slopes of heads": SLOPES,
    "slopes of batches, causal": {
        "alibi_slopes": random(BATCH, HEADS).abs(),
        "causal": "bottom_right",
    },
    "slopes after a softcap": {**SLOPES, "softcap": 1.5},
    "bias of every score": bias(BATCH, HEADS, ROWS, COLUMNS),
    "bias of heads, fp16, window": {
        **bias(1, HEADS, ROWS, COLUMNS, kind=torch.float16),
        "window": (3, 1),
    },
    "bias of rows and columns alone, bf16": bias(ROWS, COLUMNS, kind=BF16),
    "bias of columns": bias(BATCH, 1, 1, COLUMNS),
    "bias of rows": bias(HEADS, ROWS, 1),
    "bias of one number": bias(1),
    "mask of columns": mask(BATCH, 1, 1, COLUMNS),
    "mask of every score, causal": {
        **mask(BATCH, HEADS, ROWS, COLUMNS),
        "causal": "top_left",
    },
    "mask of rows and columns, softcap": {**mask(ROWS, COLUMNS), "softcap": 1.5},
    "all": {
        **SLOPES,
        **bias(1, HEADS, ROWS, COLUMNS),
        **mask(BATCH, 1, ROWS, COLUMNS),
        "causal": "bottom_right",
        "sinks": random(HEADS),
    },
}
LEAVES = ("bias", "sinks")


def operands(dim: int = 40) -> list[torch.Tensor]:
    """q, k and v: four query heads over two."""
    shapes = ((BATCH, HEADS, ROWS, dim), *((BATCH, 2, COLUMNS, dim),) * 2)
    return [random(*one, seed=i).to(BF16).requires_grad_() for i, one in enumerate(shapes)]


def given_of(name: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and what else has a gradient; the keywords, these among them."""
    keywords = dict(CALLS[name])
    if "softcap" in keywords:
        return operands(), keywords
    for leaf in LEAVES:
        if leaf in keywords:
            keywords[leaf] = keywords[leaf].clone().requires_grad_()
    return [*operands(), *(keywords[leaf] for leaf in LEAVES if leaf in keywords)], keywords


def shown(keywords: dict[str, Any]) -> torch.Tensor:
    """Which of 9 rows attends to which of 7 columns, by the words of the documentation."""
    row, column = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    diagonal = row if keywords.get("causal") == "top_left" else row + COLUMNS - ROWS
    left, right = keywords.get("window", (99, 0 if "causal" in keywords else 99))
    whole = torch.ones(BATCH, HEADS, ROWS, COLUMNS, dtype=torch.bool)
    seen = whole & (column >= diagonal - left) & (column <= diagonal + right)
    return seen & keywords.get("mask", seen)


def expected(given: list[torch.Tensor], keywords: dict[str, Any]) -> list[torch.Tensor]:
    """Out and lse in the type of what is given, by torch's softmax of scores written out."""
    q, k, v, *others = given
    leaves = {**keywords, **dict(zip((n for n in LEAVES if n in keywords), others, strict=False))}
    s = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    if cap := keywords.get("softcap"):
        s = cap * torch.tanh(s / cap)
    if "alibi_slopes" in keywords:
        row, column = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
        distance = (row + COLUMNS - ROWS - column).abs()
        s = s - keywords["alibi_slopes"].double()[..., None, None] * distance
    if "bias" in leaves:
        s = s + leaves["bias"]
    s = s.masked_fill(~shown(keywords), -torch.inf)
    if "sinks" in leaves:
        sinks = leaves["sinks"][None, :, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, sinks], -1)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])[..., :COLUMNS]
    return [p @ v.repeat_interleave(2, 1), lse]


def differentiated(
    results: tuple[torch.Tensor, ...] | list[torch.Tensor], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    arriving = [random(*one.shape).to(BF16).to(one.dtype) for one in results]
    return list(torch.autograd.grad(results, given, arriving))


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_scores_written_out(name: str) -> None:
    given, keywords = given_of(name)
    bias_of = keywords.get("bias")
    results = warploom.attention(*given[:3], return_lse=True, **keywords)
    found = [*results, *differentiated(results, given)]
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = expected(wide, keywords)
    gradients = differentiated(exact, wide)
    for one, wanted, like in zip(found, [*exact, *gradients], [*exact, *given], strict=True):
        assert one.shape == like.shape
        finite = wanted.isfinite()
        assert torch.equal(one.isfinite(), finite)
        # One number of a bias for many rows has the sum of what out, in bf16, is off in each.
        rows = max(1, BATCH * HEADS * ROWS // wanted[..., :1].numel()) if like is bias_of else 1
        assert torch.allclose(
            one.double()[finite], wanted[finite], rtol=2e-2, atol=2e-2 * rows**0.5
        )
    for leaf, gradient in zip(given, found[2:], strict=True):
        assert gradient.dtype == leaf.dtype


def test_packed_sequences_have_the_first_rows_and_columns_of_theirs() -> None:
    lengths = ((4, 3), (0, 2), (5, 7))  # of rows, of columns
    longest = (3, HEADS, 5, 7)
    rows, columns = (sum(one) for one in zip(*lengths, strict=True))
    shapes = ((rows, HEADS, 40), (columns, 2, 40), (columns, 2, 40))
    given = [random(*one, seed=i).to(BF16).requires_grad_() for i, one in enumerate(shapes)]
    others = {**bias(*longest), **mask(*longest), "alibi_slopes": random(3, HEADS).abs()}
    others["bias"].requires_grad_()
    offsets = [torch.tensor([0, *one]).cumsum(0).int() for one in zip(*lengths, strict=True)]
    out, lse = warploom.attention(
        *given,
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        max_seqlen_q=5,
        max_seqlen_k=7,
        return_lse=True,
        **others,
    )
    arriving = random(*out.shape).to(BF16)
    found = torch.autograd.grad(out, [*given, others["bias"]], arriving, retain_graph=True)
    for index, (q_rows, k_rows) in enumerate(lengths):
        at_q, at_k = (slice(int(one[index]), int(one[index + 1])) for one in offsets)
        own = {
            "bias": others["bias"].detach()[index : index + 1, :, :q_rows, :k_rows].clone(),
            "mask": others["mask"][index : index + 1, :, :q_rows, :k_rows],
            "alibi_slopes": others["alibi_slopes"][index],
        }
        own["bias"].requires_grad_()
        alone = [
            one.detach()[at].transpose(0, 1)[None].clone().requires_grad_()
            for one, at in zip(given, (at_q, at_k, at_k), strict=True)
        ]
        single, single_lse = warploom.attention(*alone, return_lse=True, **own)
        assert torch.equal(out[at_q].transpose(0, 1)[None], single)
        assert torch.equal(lse[:, at_q][None], single_lse)
        gradients = torch.autograd.grad(
            single, [*alone, own["bias"]], arriving[at_q].transpose(0, 1)[None]
        )
        for one, at, wanted in zip(found, (at_q, at_k, at_k), gradients, strict=False):
            assert torch.equal(one[at].transpose(0, 1)[None], wanted)
        assert torch.equal(found[3][index : index + 1, :, :q_rows, :k_rows], gradients[3])
        assert (found[3][index, :, q_rows:] == 0).all()
        assert (found[3][index, :, :, k_rows:] == 0).all()


@pytest.mark.parametrize("hidden", ["mask", "bias"])
def test_rows_that_a_mask_or_a_bias_of_minus_infinity_hides_give_nothing(hidden: str) -> None:
    q, k, v = operands()
    keeps = torch.ones(1, 1, ROWS, COLUMNS, dtype=torch.bool)
    keeps[:, :, 3:5] = False
    added = torch.zeros(keeps.shape).masked_fill(~keeps, -torch.inf).requires_grad_()
    told: dict[str, Any] = {"mask": keeps} if hidden == "mask" else {"bias": added}
    out, lse = warploom.attention(q, k, v, return_lse=True, **told)
    assert (out[:, :, 3:5] == 0).all()
    assert (lse[:, :, 3:5] == -torch.inf).all()
    leaves = [q, k, v, *([added] if hidden == "bias" else [])]
    found = torch.autograd.grad(out, leaves, random(*out.shape).to(BF16))
    assert all(one.isfinite().all() for one in found)
    assert (found[0][:, :, 3:5] == 0).all()
    assert hidden == "mask" or (found[3][:, :, 3:5] == 0).all()


# ---- Under torch's machinery ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_and_differentiates_them(name: str) -> None:
    given, keywords = given_of(name)
    names = [leaf for leaf in LEAVES if leaf in keywords] if len(given) > 3 else []

    def layer(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        told = {**keywords, **dict(zip(names, given[3:], strict=True))}
        out, lse = warploom.attention(*given[:3], return_lse=True, **told)
        return out * 2, lse

    torch.compiler.reset()  # one function of few calls is what it expects
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    both = []
    for run in (layer, compiled):
        results = run(*given)
        both.append([*results, *differentiated(results, given)])
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("wanted", [(0,), (3,), (4,), (0, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_each_gradient_is_there_where_it_is_wanted(wanted: tuple[int, ...], compiled: bool) -> None:
    keywords = CALLS["all"]
    every = given_of("all")[0]
    given = [one.detach().clone() for one in every]
    for index in wanted:
        given[index].requires_grad_()

    def loss(*given: torch.Tensor) -> torch.Tensor:
        told = {**keywords, **dict(zip(LEAVES, given[3:], strict=True))}
        return warploom.attention(*given[:3], **told).float().square().sum()

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    run(*given).backward()
    loss(*every).backward()
    for index, (one, whole) in enumerate(zip(given, every, strict=True)):
        assert (one.grad is not None) == (index in wanted)
        assert one.grad is None or torch.equal(one.grad, whole.grad)  # type: ignore[arg-type]


def test_torch_finds_no_fault_with_the_operators() -> None:
    from warploom.runtime.families.attention_forward import operators  # noqa: F401 (registers)

    given, keywords = given_of("all")
    q, k, v, added, sinks = given
    function = ("bottom_right", *(None,) * 8)
    others = (sinks, keywords["alibi_slopes"], added, keywords["mask"])
    arguments = (q, k, v, *function, None, None, None, *others)
    torch.library.opcheck(torch.ops.warploom.attention.default, arguments)
    out, lse = torch.ops.warploom.attention(*arguments)
    results = [one.detach() for one in (torch.randn_like(out), q, k, v, out, lse)]
    held = [one.detach() for one in others]
    for wanted in product((False, True), repeat=2):
        backward = (results[0], None, *results[1:], *function, False, None, *held, None, None)
        named = (wanted[0], False, wanted[1], False, False)
        operator = torch.ops.warploom.attention_backward_further.default
        torch.library.opcheck(operator, (*backward, *named))


def test_a_checkpoint_gives_the_same_gradients() -> None:
    given, keywords = given_of("all")

    def layer(*given: torch.Tensor) -> torch.Tensor:
        told = {**keywords, **dict(zip(LEAVES, given[3:], strict=True))}
        return warploom.attention(*given[:3], **told)

    both = [layer(*given), checkpoint(layer, *given, use_reentrant=False)]
    found = [torch.autograd.grad(out.float().square().sum(), given) for out in both]
    assert all(map(torch.equal, *found))


# ---- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes \[2\].*must be \[4\] or \[2, 4\]"),
        ({"alibi_slopes": torch.zeros(4).half()}, r"torch.float16.*of torch.float32"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "slopes have no gradient"),
        ({"bias": torch.zeros(8, 7)}, r"bias \[8, 7\].*must be \[2, 4, 9, 7\]"),
        ({"bias": torch.zeros(1, 2, 4, 9, 7)}, r"bias \[1, 2, 4, 9, 7\].*must be \[2, 4, 9, 7\]"),
        ({"bias": torch.zeros(2, 2, 9, 7)}, r"bias \[2, 2, 9, 7\].*unsqueeze"),
        ({"bias": torch.zeros(9, 7).double()}, r"bias of torch.float64"),
        ({"bias": torch.zeros(9, 7).bool()}, r"bias of torch.bool.*as mask="),
        ({"bias": torch.zeros(9, 7, requires_grad=True), "softcap": 1.0}, "without softcap only"),
        ({"bias": torch.zeros(9, 7, device="meta")}, "device"),
        ({"mask": torch.zeros(7, 9).bool()}, r"mask \[7, 9\].*must be \[2, 4, 9, 7\]"),
        ({"mask": torch.zeros(9, 7)}, r"mask of torch.float32.*as bias="),
        (
            {"mask": torch.zeros(9, 7).to(torch.uint8)},
            r"mask of torch.uint8.*must be of torch.bool",
        ),
        ({"mask": True}, "mask True"),
        ({"bias": 1.0}, "bias 1.0"),
        ({"alibi_slopes": [1.0]}, r"alibi_slopes \[1.0\]"),
    ],
    ids=str,
)
def test_what_scores_cannot_be_changed_by_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        warploom.attention(*(one.detach() for one in operands()), **keywords)
