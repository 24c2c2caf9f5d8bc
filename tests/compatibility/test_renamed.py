"""Old names and keywords of public functions do what the new ones do, and say which these are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.renamed import KEYWORDS, NAMES

BF16 = torch.bfloat16
DRAW = torch.Generator().manual_seed(0)
Q, K = torch.randn(2, 4, 2, 64, generator=DRAW), torch.randn(2, 2, 16, 64, generator=DRAW)
DECODE = [Q.to(BF16), K.to(BF16), K.flip(0).to(BF16)]
A, B = (torch.randn(16, 16, generator=DRAW).to(BF16) for _ in range(2))
INT32 = torch.int32
# Of each function: a call's operands, and a value of each old keyword that changes the result.
CALLS: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "attention_decode": (
        DECODE,
        {
            "lengths": torch.tensor([3, 9], dtype=INT32),
            "starts": torch.tensor([2, 5], dtype=INT32),
        },
    ),
}
CASES = [(name, keyword) for name, keywords in KEYWORDS.items() for keyword in keywords]


def outcome(call: Callable[..., Any], *operands: torch.Tensor, **keywords: object) -> torch.Tensor:
    """The result of a call, which warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        result: torch.Tensor = call(*operands, **keywords)
    return result


@pytest.mark.parametrize(("name", "old"), CASES)
def test_an_old_keyword_is_the_new_one_and_warns_the_caller(name: str, old: str) -> None:
    function, keyword = getattr(warploom, name), KEYWORDS[name][old]
    operands, values = CALLS[name]
    value = values[old]
    current = keyword.values.get(value, value) if isinstance(value, str) else value
    expected = outcome(function, *operands, **{keyword.name: current})
    assert not torch.equal(expected, outcome(function, *operands)), "this value changes nothing"
    with pytest.warns(DeprecationWarning, match=f"{old} is now {keyword.name}") as caught:
        result = function(*operands, **{old: value})
    assert caught[0].filename == __file__
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("name", "old"), CASES)
def test_an_old_keyword_and_the_new_one_are_refused_together(name: str, old: str) -> None:
    function, new = getattr(warploom, name), KEYWORDS[name][old].name
    operands, values = CALLS[name]
    with pytest.raises(TypeError, match=rf"{name}\(\) got both {new} and {old}"):
        function(*operands, **{old: values[old], new: values[old]})


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_that_never_was_is_refused_as_python_refuses_it(name: str) -> None:
    operands, _ = CALLS[name]
    told = rf"{name}\(\) got an unexpected keyword argument 'nonsense'"
    with pytest.raises(TypeError, match=told):
        getattr(warploom, name)(*operands, nonsense=1)


@pytest.mark.parametrize(("name", "old"), CASES)
def test_an_old_keyword_is_traced_without_a_graph_break(name: str, old: str) -> None:
    function, (operands, values) = getattr(warploom, name), CALLS[name]

    def call(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*given, **{old: values[old]})
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
