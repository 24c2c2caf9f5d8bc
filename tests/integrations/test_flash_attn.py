"""FlashAttention's functions: their arguments, values and gradients, and what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import cycle
from typing import Any

import flash_attn_cases as cases
import pytest
import torch
from flash_attn_cases import CASES, FUNCTIONS

import warploom.flash_attn as flash
from warploom.errors import ProblemError
from warploom.runtime import plan as plans
from warploom.runtime.families.attention_forward.api import attention

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
PACKED = [name for name in FUNCTIONS if "packed" in name]
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


def one(name: str, variant: str = "causal") -> cases.Case:
    return CASES[f"{name}, {variant}"]


def leaves(case: cases.Case, **others: Any) -> list[torch.Tensor]:
    given = case.given(case.operands("cpu"))
    return [tensor.to(**others).requires_grad_() for tensor in given]


@pytest.mark.parametrize(
    ("function", "required"),
    [
        (flash.flash_attn_func, ["q", "k", "v"]),
        (flash.flash_attn_kvpacked_func, ["q", "kv"]),
        (flash.flash_attn_qkvpacked_func, ["qkv"]),
        (flash.flash_attn_varlen_func, ["q", "k", "v", *LENGTHS]),
        (flash.flash_attn_varlen_kvpacked_func, ["q", "kv", *LENGTHS]),
        (flash.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"]),
    ],
)
def test_arguments_are_those_of_flash_attention_in_its_order(
    function: Callable[..., object], required: list[str]
) -> None:
    """A model gives some of them by position."""
    wanted = dict.fromkeys(required, inspect.Parameter.empty) | OPTIONS
    if function is flash.flash_attn_varlen_func:
        wanted["block_table"] = None
    found = inspect.signature(function).parameters
    assert {name: one.default for name, one in found.items()} == wanted
    assert list(found) == list(wanted)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_within_their_bounds_of_float64(name: str) -> None:
    cases.verify(CASES[name], "cpu")


# ---- Gradients of packed tensors -----------------------------------------------------------------


def nodes(out: torch.Tensor) -> set[str]:
    """The names of what differentiates a tensor."""
    found, ahead = set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            found.add(re.split("[.:]", node.name())[-1])
            ahead += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("variant", ["causal", "slopes"])
def test_the_gradient_of_a_packed_tensor_is_written_in_one_piece(name: str, variant: str) -> None:
    """torch stacks the gradients of views: a copy as large as the tensor."""
    given = leaves(one(name, variant))
    out = one(name, variant).call(*given)
    own = {"_FlashBackward", "AccumulateGrad"}
    assert nodes(out) - {"TransposeBackward0"} == own
    assert all(found.is_contiguous() for found in torch.autograd.grad(out.sum(), given))


def test_only_the_packed_tensor_the_results_and_offsets_are_saved() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    (qkv,) = leaves(one("varlen qkvpacked"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, lse, _ = one("varlen qkvpacked").call(qkv, return_attn_probs=True)
    assert [t.data_ptr() for t in saved[:3]] == [t.data_ptr() for t in (qkv, out, lse)]
    assert [t.dtype for t in saved[3:]] == [torch.int32] * 2


@pytest.mark.parametrize("name", ["kvpacked", "varlen kvpacked"])
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_of_two_tensors_may_want_a_gradient(name: str, wanted: int) -> None:
    both = leaves(one(name))
    dout = torch.randn_like(one(name).call(*both))
    expected = torch.autograd.grad(one(name).call(*both), both, dout)[wanted]
    alone = [tensor.detach().requires_grad_(i == wanted) for i, tensor in enumerate(both)]
    one(name).call(*alone).backward(dout)
    assert torch.equal(alone[wanted].grad, expected)
    assert alone[1 - wanted].grad is None


@pytest.mark.parametrize("name", PACKED)
def test_a_second_derivative_is_refused_when_it_is_asked_for(name: str) -> None:
    given = leaves(one(name))
    out = one(name).call(*given)
    found = torch.autograd.grad(out.sum(), given, create_graph=True)
    for first, plain in zip(found, torch.autograd.grad(out.sum(), given), strict=True):
        assert torch.equal(first, plain)
    with pytest.raises(ProblemError, match="second derivative"):
        torch.autograd.grad(found[0].sum(), given)


@over_functions
def test_autocast_takes_fp32_tensors_whose_gradients_are_fp32(name: str) -> None:
    given = leaves(one(name), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = one(name).call(*given)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    narrow = leaves(one(name))
    one(name).call(*narrow).float().sum().backward()
    for wide, like in zip(given, narrow, strict=True):
        assert wide.grad is not None and wide.grad.dtype == torch.float32
        assert torch.equal(wide.grad, like.grad.float())


@over_functions
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_gradients_are_asked_for(name: str, deterministic: bool) -> None:
    plans.forget()
    given = leaves(one(name))
    one(name).call(*given, deterministic=deterministic).sum().backward()
    chosen = [plan.choice.spec.operation for plan in plans.known.values()]
    found = [spec.deterministic for spec in chosen if spec.family == "attention_backward"]
    assert found == [deterministic]


# ---- Compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *zip(FUNCTIONS, cycle(("causal window", "slopes")), strict=False),
        ("varlen qkvpacked", "dim 59"),
    ],
)
def test_torch_compile_takes_each_without_a_graph_break(name: str, variant: str) -> None:
    torch._dynamo.reset()
    case = one(name, variant)
    given = leaves(case)

    def layer(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = case.call(*tensors, return_attn_probs=True)
        return out * 2, lse

    expected = layer(*given)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    gradients = [
        torch.autograd.grad(result[0].float().sum(), given) for result in (found, expected)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


# ---- What is taken and what is refused -----------------------------------------------------------


def test_bounds_of_a_window_may_be_tensors_of_one_number() -> None:
    given = case_given("fixed")
    found = flash.flash_attn_func(*given, window_size=torch.tensor([7, 2]))  # type: ignore[arg-type]
    assert torch.equal(found, flash.flash_attn_func(*given, window_size=(7, 2)))  # type: ignore[arg-type]


def test_slopes_of_a_batch_may_be_one_row_repeated() -> None:
    given, slopes = case_given("fixed"), torch.tensor([0.5, 0.25, 0.125, 0.1])
    found = flash.flash_attn_func(*given, alibi_slopes=slopes.expand(2, 4))  # type: ignore[arg-type]
    assert torch.equal(found, flash.flash_attn_func(*given, alibi_slopes=slopes))  # type: ignore[arg-type]


def case_given(name: str) -> list[torch.Tensor]:
    return one(name).given(one(name).operands("cpu"))


@over_functions
@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"dropout_p": 1.0}, r"dropout_p 1\.0: must be"),
        ({"alibi_slopes": torch.ones(7)}, r"alibi_slopes \[7\] torch\.float32 .* must be \[[34]\]"),
        ({"alibi_slopes": 0.5}, r"alibi_slopes 0\.5 of type float: must be a torch tensor"),
        ({"softmax_scale": -1.0}, r"softmax_scale -1\.0: must be a number greater than 0"),
        ({"window_size": 5}, r"window_size 5: must be \(left, right\)"),
        ({"window_size": (1.5, 2)}, r"window_size 1\.5 of type float: must be an int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_its_name(
    name: str, keywords: dict[str, Any], told: str
) -> None:
    """Dropout or slopes that were dropped silently would train another model."""
    with pytest.raises(ProblemError, match=told):
        getattr(flash, one(name).name)(*positional(name), **keywords)


def positional(name: str) -> list[Any]:
    """What the function takes before its options."""
    given: list[Any] = case_given(name)
    if one(name).varlen:
        starts = one(name).offsets("cpu")
        given += [starts[0], 70] if "qkv" in name else [*starts, 70, 70]
    return given


def test_pages_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"block_table <tensor \[2, 3\]>: must be None"):
        flash.flash_attn_varlen_func(
            *positional("varlen"), block_table=torch.zeros(2, 3, dtype=torch.int32)
        )


@over_functions
def test_tensors_of_another_layout_are_refused_in_flash_attentions_words(name: str) -> None:
    given = positional(name)
    first = next(iter(inspect.signature(getattr(flash, one(name).name)).parameters))
    lead = "total" if one(name).varlen else "batch, seq"
    with pytest.raises(ProblemError, match=rf"{first} \[.*\]: must be \[{lead}, "):
        getattr(flash, one(name).name)(given[0][0], *given[1:])
    with pytest.raises(
        ProblemError, match=f"{first} None of type NoneType: must be a torch tensor"
    ):
        getattr(flash, one(name).name)(None, *given[1:])


def test_keys_and_values_of_different_shapes_are_refused() -> None:
    q, k, v = case_given("fixed")
    with pytest.raises(ProblemError, match="keys and values must have one shape"):
        flash.flash_attn_func(q, k, v[:, 1:])
    with pytest.raises(ProblemError, match="keys and values must have one shape"):
        flash.flash_attn_func(q[:1], k, v)
    with pytest.raises(ProblemError, match=r"kv \[2, 70, 3, 2, 64\]: must be \[batch, seq, 2,"):
        flash.flash_attn_kvpacked_func(q, torch.stack((k, k, v), 2))


def test_lengths_that_are_no_numbers_are_refused() -> None:
    q, k, v, starts_q, starts_k, *_ = positional("varlen")
    with pytest.raises(ProblemError, match=r"max_seqlen_q 70\.0 of type float: must be an int"):
        flash.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 70.0, 70)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="cu_seqlens_k None of type NoneType"):
        flash.flash_attn_varlen_func(q, k, v, starts_q, None, 70, 70)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_the_weights_that_are_dropped_are_those_of_attention(packed: bool) -> None:
    """A gradient of other weights than the result's, or of none dropped, would train on noise."""
    qkv = torch.randn(2, 33, 3, 2, 64).bfloat16().requires_grad_()
    own = qkv.detach().clone().requires_grad_()
    torch.manual_seed(5)
    if packed:
        found = flash.flash_attn_qkvpacked_func(qkv, 0.25, causal=True)
    else:
        found = flash.flash_attn_func(*qkv.unbind(2), 0.25, causal=True)
    torch.manual_seed(5)
    q, k, v = (tensor.transpose(1, 2) for tensor in own.unbind(2))
    wanted = attention(q, k, v, causal=True, dropout_p=0.25).transpose(1, 2)
    dout = torch.randn_like(found)
    found.backward(dout)
    wanted.backward(dout)
    assert torch.equal(found, wanted)
    assert qkv.grad is not None
    assert own.grad is not None
    assert torch.equal(qkv.grad, own.grad)
    plain = flash.flash_attn_qkvpacked_func(qkv, causal=True)
    assert not torch.equal(found, plain)
