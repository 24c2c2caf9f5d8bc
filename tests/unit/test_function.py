"""Functions whose arguments are declared once: what users see is what is declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import pytest
import torch
from launched_plans import launched_plans

import warploom
from warploom.generator.specification import KernelSpec
from warploom.renamed import KEYWORDS
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_decode.api import _Keywords
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.cast.call import CastCall
from warploom.runtime.families.route.call import RouteCall
from warploom.runtime.plan import Plan

FUNCTIONS: dict[Callable[..., object], type[Arguments[Any, Any]]] = {
    activation_backward: ActivationBackwardCall,
    warploom.append_kv_cache: AttentionAppendCall,
    warploom.attention_decode: AttentionDecodeCall,
    warploom.merge_state: AttentionMergeCall,
    warploom.cast: CastCall,
    warploom.route: RouteCall,
}
SHAPING = {"return_lse", "offsets"}  # arguments that say what of the results is returned


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_the_signature_that_users_see_is_the_declaration(function: Callable[..., object]) -> None:
    """Names, order, defaults and types."""
    kind = FUNCTIONS[function]
    every = inspect.signature(function).parameters
    seen = {name: one for name, one in every.items() if one.kind is not one.VAR_KEYWORD}
    hints, types = get_type_hints(function), get_type_hints(kind)
    public = [one for one in fields(kind) if one.name in kind.declaration.names]
    assert [name for name in seen if name not in SHAPING] == [one.name for one in public]
    for one in public:
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        assert seen[one.name].default is default, one.name
        assert hints[one.name] == types[one.name], one.name
    assert [one.name for one in fields(kind)][: len(public)] == [one.name for one in public]


def test_overloads_take_the_keywords_that_the_function_takes() -> None:
    keywords = AttentionDecodeCall.declaration.names[3:]
    types = get_type_hints(AttentionDecodeCall)
    older = {old: types[new.name] for old, new in KEYWORDS["attention_decode"].items()}
    assert get_type_hints(_Keywords) == {**older, **{name: types[name] for name in keywords}}


class _Details:
    copies = ()


@declared
class _Call(Arguments[Any, tuple[torch.Tensor]]):
    """The sum of one tensor or two, times a count."""

    function = "warploom.sums"
    outputs = ("out",)
    no_gradient = ("operands that require grad", "must not", "detach them")

    a: torch.Tensor = tensor(kernel="left")
    b: torch.Tensor | None = tensor(default=None, aligned=False, null=True)
    count: int = option(default=1, schema="SymInt")
    pair: tuple[int | None, int | None] | None = option(
        default=None, schema="SymInt? first, SymInt? second"
    )
    out: torch.Tensor | None = result(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    def draft(self, target: Any) -> Draft[Any]:  # noqa: ANN401
        raise NotImplementedError

    def results(self, details: object) -> tuple[torch.Tensor]:
        return (torch.empty_like(self.a) if self.out is None else self.out,)

    def fake(self) -> tuple[torch.Tensor]:
        return self.results(None)

    def check(self, details: object, results: tuple[torch.Tensor]) -> None:
        raise NotImplementedError

    def compute(self, details: object, results: tuple[torch.Tensor]) -> None:
        raise NotImplementedError


def test_what_follows_from_a_declaration() -> None:
    a, b, out = (torch.zeros(4) for _ in range(3))
    call = _Call(a, b, 2, (3, None), out)
    assert _Call.declaration.schema == (
        "Tensor a, Tensor? b, SymInt count, SymInt? first, SymInt? second, str? spec"
    )
    assert call.crossing() == ([a, b, 2, 3, None, None], {})
    again = _Call.crossed(a, None, 2, None, None, None)
    assert (again.b, again.pair, again.out) == (None, None, None)
    assert call.addressed() == ("left", "b", "out")
    assert call.arguments(_Details, (out,)) == ((a.data_ptr(), b.data_ptr(), out.data_ptr()), ())
    assert again.addressed() == ("left", "out", "b")
    assert again.arguments(_Details, (out,)) == ((a.data_ptr(), out.data_ptr(), 0), ())


def test_the_alignment_of_an_address_decides_a_plan_where_it_is_declared() -> None:
    memory = torch.zeros(9)
    here, beside = memory[:8], memory[1:]
    assert _Call(here).signature() != _Call(beside).signature()
    assert _Call(here, here).signature() == _Call(here, beside).signature()
    assert _Call(here, count=2).signature() != _Call(here).signature()


# ---- Warm calls ----------------------------------------------------------------------------------

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    return launched_plans(monkeypatch, attempts=True)


def parts(dtype: torch.dtype = torch.float32) -> Parts:
    a, b = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    return a, torch.randn(5), b, torch.randn(5)


def test_a_call_like_the_last_is_launched_on_addresses(launches: list[Plan[Any, Any]]) -> None:
    for expected in (0, 1, 2):
        warploom.merge_state(*parts())
        assert len(launches) == expected


def test_results_that_are_operands_are_recognised(launches: list[Plan[Any, Any]]) -> None:
    """A tensor that comes twice, in some calls and not in others, which have the same types."""
    for in_place in (True, True, False, False, True, True):
        a, lse_a, b, lse_b = given = parts()
        out, lse = (a, lse_a) if in_place else (torch.empty_like(a), torch.empty_like(lse_a))
        expected = warploom.merge_state(*[one.clone() for one in given])
        launches.clear()
        warploom.merge_state(a, lse_a, b, lse_b, out=out, lse=lse)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_call_with_no_tensor_twice_is_not_like_one_that_has(
    launches: list[Plan[Any, Any]],
) -> None:
    """Of results in place, guards compare the operands alone."""
    out, lse, *other = parts()
    for _ in range(2):
        warploom.merge_state(out, lse, *other, out=out, lse=lse)
    launches.clear()
    warploom.merge_state(out, lse, *other, out=out.clone(), lse=lse.clone())
    assert launches == []


def test_options_decide_which_calls_are_alike(launches: list[Plan[Any, Any]]) -> None:
    """At addresses that came up before, a GPU would launch the kernel of the other option."""
    operands = parts()
    for launched in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            warploom.merge_state(*operands, out_dtype=dtype)
        assert len({plan.number for plan in launches}) == 2 * launched


def test_kinds_of_calls_that_alternate_are_recognised(launches: list[Plan[Any, Any]]) -> None:
    made = [parts(), parts(torch.bfloat16), (*parts(torch.bfloat16), torch.float32)]
    for turn in range(3):
        launches.clear()
        for a, lse_a, b, lse_b, *rest in made:
            out, _ = warploom.merge_state(a, lse_a, b, lse_b, out_dtype=rest[0] if rest else None)
            assert out.dtype == (rest[0] if rest else a.dtype)
        assert len(launches) == (3 if turn else 0)


@pytest.mark.parametrize("place", range(4))
def test_tensors_that_guards_cannot_compare_are_refused(place: int) -> None:
    """A nested tensor ends the process there."""
    given: list[Any] = [*parts()]
    for _ in range(2):
        warploom.merge_state(*given)
    given[place] = torch.nested.nested_tensor([torch.zeros(5, 64)])
    with pytest.raises(warploom.ProblemError, match="nested"):
        warploom.merge_state(*given)
