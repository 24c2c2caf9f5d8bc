"""Old names and keywords of public functions do what the new ones do, and say which these are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.renamed import KEYWORDS, NAMES
from warploom.runtime.plan import Plan, heard

BF16 = torch.bfloat16
DRAW = torch.Generator().manual_seed(0)
Q, K = torch.randn(2, 4, 2, 64, generator=DRAW), torch.randn(2, 2, 16, 64, generator=DRAW)
DECODE = [Q.to(BF16), K.to(BF16), K.flip(0).to(BF16)]
A, B = (torch.randn(16, 16, generator=DRAW).to(BF16) for _ in range(2))
INT32, E4M3 = torch.int32, torch.float8_e4m3fn
FP8 = [A.to(E4M3), B.to(E4M3).t()]
Operands = list[torch.Tensor]
# Of each old keyword: a call's operands, and what makes a value that changes what the call does.
CALLS: dict[tuple[str, str], tuple[Operands, Callable[[], Any]]] = {
    ("attention_decode", "lengths"): (DECODE, lambda: torch.tensor([3, 9], dtype=INT32)),
    ("attention_decode", "starts"): (DECODE, lambda: torch.tensor([2, 5], dtype=INT32)),
    ("gemm", "accumulation"): (FP8, lambda: "promoted"),
    ("gemm", "accumulate_into"): ([A, B.clone().requires_grad_()], lambda: torch.ones(16, 16)),
    ("plan", "accumulation"): (FP8, lambda: "promoted"),
}
CASES = [(name, keyword) for name, keywords in KEYWORDS.items() for keyword in keywords]


def outcome(call: Callable[..., Any], *operands: torch.Tensor, **keywords: Any) -> list[Any]:
    """What a call and the backward pass of its result do: kernels, the result, what was written."""
    kernels = set[str]()
    with heard(lambda plan: kernels.add(plan.choice.spec.name)):
        result = call(*operands, **keywords)
        if isinstance(result, Plan):
            return [result.choice.spec.name]
        if result.requires_grad:
            result.float().sum().backward()
    written = [one for one in keywords.values() if isinstance(one, torch.Tensor)]
    return [kernels, *[one.detach().tolist() for one in (result, *written)]]


def quiet(call: Callable[..., Any], *operands: torch.Tensor, **keywords: Any) -> list[Any]:
    """The outcome of a call which warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        return outcome(call, *operands, **keywords)


@pytest.mark.parametrize(("name", "old"), CASES)
def test_an_old_keyword_is_the_new_one_and_warns_the_caller(name: str, old: str) -> None:
    function, keyword = getattr(warploom, name), KEYWORDS[name][old]
    operands, value = CALLS[name, old]
    expected = quiet(function, *operands, **{keyword.name: keyword.value_of(value())})
    assert expected != quiet(function, *operands), "this value changes nothing"
    with pytest.warns(DeprecationWarning, match=f"{old} is now {keyword.name}") as caught:
        result = outcome(function, *operands, **{old: value()})
    assert caught[0].filename == __file__
    assert result == expected


@pytest.mark.parametrize(("name", "old"), CASES)
def test_every_value_of_an_old_keyword_is_one_of_the_new(name: str, old: str) -> None:
    function, keyword = getattr(warploom, name), KEYWORDS[name][old]
    operands, _ = CALLS[name, old]
    for before, today in keyword.values.items():
        with pytest.warns(DeprecationWarning):
            result = outcome(function, *operands, **{old: before})
        assert result == quiet(function, *operands, **{keyword.name: today})


def test_an_old_keyword_is_explained() -> None:
    with pytest.warns(DeprecationWarning, match="accumulation is now use_fast_accum"):
        explanation = warploom.explain(warploom.gemm, *FP8, accumulation="promoted")
    assert "_promoted_" in explanation.kernel


@pytest.mark.parametrize(("name", "old"), CASES)
def test_an_old_keyword_and_the_new_one_are_refused_together(name: str, old: str) -> None:
    function, new = getattr(warploom, name), KEYWORDS[name][old].name
    operands, value = CALLS[name, old]
    with pytest.raises(TypeError, match=rf"{name}\(\) got both {new} and {old}"):
        function(*operands, **{old: value(), new: value()})


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_that_never_was_is_refused_as_python_refuses_it(name: str) -> None:
    operands, _ = CALLS[name, next(iter(KEYWORDS[name]))]
    told = rf"{name}\(\) got an unexpected keyword argument 'nonsense'"
    with pytest.raises(TypeError, match=told):
        getattr(warploom, name)(*operands, nonsense=1)


@pytest.mark.parametrize(("name", "old"), [case for case in CASES if case[0] != "plan"])
def test_an_old_keyword_is_traced_without_a_graph_break(name: str, old: str) -> None:
    function, (operands, made) = getattr(warploom, name), CALLS[name, old]
    value = made()

    def call(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*given, **{old: value})
        return result

    traced = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.warns(DeprecationWarning):
        expected = call(*operands)
    assert torch.equal(traced(*operands), expected)


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_old_name_is_the_function_of_the_new_one(old: str, new: str) -> None:
    vars(warploom).pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"warploom.{old} is now warploom.{new}") as caught:
        function = getattr(warploom, old)
    assert function is getattr(warploom, new)
    assert caught[0].filename == __file__
    assert old not in dir(warploom) and new in dir(warploom)
