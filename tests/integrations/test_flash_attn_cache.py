"""`flash_attn_with_kvcache`: caches that are read and appended to, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import flash_attn_cache_cases as cases
import pytest
import torch
from flash_attn_cache_cases import CASES, Case

from warploom.errors import ProblemError
from warploom.flash_attn import flash_attn_with_kvcache
from warploom.integrations import flash_attn_cache


def test_arguments_are_those_of_flash_attention_in_its_order() -> None:
    """A model gives some of them by position."""
    found = inspect.signature(flash_attn_with_kvcache).parameters
    none = ["k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"]
    wanted = dict.fromkeys(("q", "k_cache", "v_cache"), inspect.Parameter.empty)
    wanted |= dict.fromkeys([*none, "cache_leftpad", "block_table", "softmax_scale"])
    wanted |= {"causal": False, "window_size": (-1, -1), "softcap": 0.0}
    wanted |= {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0}
    wanted |= {"return_softmax_lse": False}
    assert {name: one.default for name, one in found.items()} == wanted
    assert list(found) == list(wanted)


@pytest.mark.parametrize("name", CASES)
def test_results_and_caches_are_within_their_bounds_of_float64(name: str) -> None:
    cases.verify(CASES[name], "cpu")


def test_lengths_may_be_one_number_or_all_of_the_cache() -> None:
    given = Case(lengths=(64, 64)).arguments("cpu")
    wanted = flash_attn_with_kvcache(**given)
    for lengths in (64, None):
        assert torch.equal(flash_attn_with_kvcache(**{**given, "cache_seqlens": lengths}), wanted)


@pytest.mark.parametrize("name", ["fixed, rotary", "indexed, rotary", "large pages, rotary"])
def test_no_cache_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be read in place of what other steps write, and takes longer than the step."""
    read: list[torch.Tensor] = []

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:  # noqa: ANN401
        read.extend((k, v))
        return q, q

    monkeypatch.setattr(flash_attn_cache, "attention_decode", decode)
    given = CASES[name].arguments("cpu")
    flash_attn_with_kvcache(**given)
    assert [one.data_ptr() for one in read] == [
        given[name].data_ptr() for name in ("k_cache", "v_cache")
    ]


def test_torch_compile_takes_it_without_a_graph_break() -> None:
    torch._dynamo.reset()
    case = CASES["paged, rotary"]
    given, again = case.arguments("cpu"), case.arguments("cpu")
    found = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(found, flash_attn_with_kvcache(**again))
    assert torch.equal(given["k_cache"].nan_to_num(), again["k_cache"].nan_to_num())


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (Case(slopes=1, page=16), {}, "block_table with alibi_slopes"),
        (Case(slopes=1, indexed=True, keys=48), {}, "cache_batch_idx with alibi_slopes"),
        (Case(), {"q": torch.zeros(3, 6, 64)}, r"q \[3, 6, 64\]: must be \[batch, seq_q, heads"),
        (Case(), {"v_cache": None}, "v_cache None .* must be a torch tensor"),
        (Case(), {"cache_seqlens": torch.ones(2).int()}, r"cache_seqlens \[2\] .* int32 \[3\]"),
        (Case(), {"cache_seqlens": 1.5}, "cache_seqlens 1.5 of type float"),
        (Case(new=1), {"v": None}, "v None"),
        (Case(new=1), {"k": torch.zeros(3, 1, 2, 64)}, r"k \[3, 1, 2, 64\]: must be \[3, new, 3"),
        (Case(new=1), {"cache_seqlens": None}, "k and v without cache_seqlens"),
        (Case(new=1), {"rotary_cos": torch.ones(64, 16)}, "rotary_sin None"),
        (Case(), {"rotary_cos": torch.ones(64, 16)}, "rotary_sin without k and v"),
        (Case(page=16), {"cache_batch_idx": torch.ones(3).int()}, "block_table together"),
        (Case(indexed=True, keys=43), {}, r"cache_batch_idx with .*: must be of a multiple of 16"),
        (Case(page=16, rows=130), {}, "block_table with 130 rows of 2 heads"),
        (Case(page=16, dim=80, new=1), {}, "dim 80: .*, and dim one of 64, 96, 128, 256"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_its_name(
    case: Case, change: dict[str, Any], told: str
) -> None:
    """What was dropped silently would be another model's attention; the cache stays as it was."""
    given = case.arguments("cpu") | change
    before = given["k_cache"].clone()
    with pytest.raises(ProblemError, match=told):
        flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"].nan_to_num(), before.nan_to_num())


def test_a_gradient_is_refused() -> None:
    given = Case().arguments("cpu")
    given["q"].requires_grad_()
    with pytest.raises(ProblemError, match="flash_attn_with_kvcache has none"):
        flash_attn_with_kvcache(**given)
    with torch.no_grad():
        flash_attn_with_kvcache(**given)
