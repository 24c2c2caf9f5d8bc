"""`warploom.patch(model, weights=...)`: what it quantises and what it leaves, and that it stays."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from test_patch import places
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.nn import Linear, QuantizedLinear

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
IN_GROUPS: dict[str, Any] = {"format": "int8", "group": 32}  # which the tiny models' extents take
LINEAR_OF_LAYERS = 2 * 7


def of(found: torch.nn.Module, kind: type[torch.nn.Module]) -> list[str]:
    return [name for name, module in found.named_modules() if isinstance(module, kind)]


@torch.no_grad()  # a graph keeps weights
def test_all_but_the_head_is_quantised_and_runs() -> None:
    """The head decides among thousands of words by small differences; it stays as it was."""
    speaking = model("Llama", "eager")
    told, before = speaking(IDS).logits, weakref.ref(speaking.model.layers[0].mlp.up_proj.weight)
    head = speaking.lm_head.weight
    patch = warploom.patch(speaking, weights=IN_GROUPS)
    assert len(of(speaking, QuantizedLinear)) == LINEAR_OF_LAYERS
    assert of(speaking, Linear) == ["lm_head"]
    assert speaking.lm_head.weight is head
    assert before() is None, "what was quantised is still in memory"
    assert (speaking(IDS).logits - told).abs().max() < 2**-4 * told.abs().max()
    table = repr(patch)
    assert "warploom.nn.QuantizedLinear, int8 in groups of 32" in table
    assert "the output head" in table and "-> warploom" in table


def test_what_was_dropped_is_not_brought_back() -> None:
    """Undoing half of a patch, or giving back other weights, would be another model in silence."""
    speaking = model("Llama", "eager")
    patch = warploom.patch(speaking, weights=IN_GROUPS)
    after = places(speaking)
    for undo in (patch.undo, patch.__enter__):
        with pytest.raises(
            ProblemError, match=r"cannot be undone: .*dropped: load the model again"
        ):
            undo()
    assert places(speaking) == after
    assert speaking.config._attn_implementation == "warploom"
    with pytest.raises(ProblemError, match=r"patched already.*or load the model again"):
        warploom.patch(speaking)


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["lm_head", "layers.1"], ["lm_head", *(["model.layers.1"] * 7)]),
        (["*.down_proj", "q_proj"], ["down_proj", "q_proj"] * 2),
        ([], []),
    ],
)
def test_names_say_what_is_left(skip: list[str], left: list[str]) -> None:
    """A name stands for what is in it; "q_proj" is no "xq_proj", and "layers.1" no "layers.10"."""
    speaking = model("Llama", "eager", num_hidden_layers=2)
    speaking.model.layers[0].mlp.xq_proj = torch.nn.Linear(64, 8)
    patch = warploom.patch(speaking, weights={**IN_GROUPS, "skip": skip})
    found = of(speaking, Linear)
    assert len(found) == len(left)
    assert all(any(f".{part}." in f".{name}." for part in left) for name in found)
    assert ("skipped" in repr(patch)) is bool(left)
    assert type(speaking.model.layers[0].mlp.xq_proj) is QuantizedLinear


def test_a_head_is_known_by_the_table_that_it_shares() -> None:
    """A model that nobody knows: its head's weight is the embedding's, by whatever name."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(64, 32)
            self.mix = Linear(32, 32, activation="gelu")
            self.out = torch.nn.Linear(32, 64, bias=False)
            self.out.weight = self.words.weight

    plain = Plain()
    patch = warploom.patch(plain, weights=IN_GROUPS)
    assert type(plain.out) is Linear and plain.out.weight is plain.words.weight
    assert type(plain.mix) is QuantizedLinear and plain.mix.activation == "gelu"
    rows = {row.what: row for row in patch.rows}
    assert rows["torch.nn.Linear"].because.startswith("the output head; float32 weights")
    assert "inputs of float32 are torch's" in rows["warploom.nn.Linear"].because


def test_layers_that_no_group_divides_stay_and_are_told() -> None:
    """Not an error: models have layers of a few columns, as routers, between large ones."""
    shared = torch.nn.Linear(128, 64)
    chain = torch.nn.Sequential(shared, torch.nn.Linear(24, 8), shared, torch.nn.Bilinear(4, 4, 4))
    fp8 = Linear(128, 64, recipe="rowwise")
    patch = warploom.patch(torch.nn.ModuleList([chain, fp8]).bfloat16(), weights="int4")
    assert type(chain[0]) is QuantizedLinear and chain[0] is chain[2]
    assert type(chain[1]) is Linear
    rows = [(row.what, row.count, row.now, row.because) for row in patch.rows]
    kept = "group 128 must divide k, which is 24"
    assert ("torch.nn.Linear", 1, "warploom.nn.Linear", kept) in rows
    assert ("warploom.nn.Linear", 1, "as it was", "its options train a weight") in rows
    told = "warploom.nn.QuantizedLinear, int4 in groups of 128"
    assert ("torch.nn.Linear", 1, told, "") in rows
    again = repr(warploom.patch(torch.nn.ModuleList([QuantizedLinear(32, 8, format="mxfp4")])))
    assert "warploom.nn.QuantizedLinear  as it was" in again


def test_a_layer_that_is_the_model_stays_and_is_told() -> None:
    """A layer that nothing holds cannot be replaced: it was reported as quantized all the same."""
    layer = warploom.nn.Linear(128, 128).bfloat16()
    (row, *_) = warploom.patch(layer, weights="int4").rows
    assert row.because == "it is the model itself" and row.now == "as it was"


def test_hooks_and_modes_of_layers_go_along() -> None:
    chain = torch.nn.Sequential(torch.nn.Linear(128, 64)).eval()
    ran = []
    chain[0].register_forward_pre_hook(lambda *_: ran.append(1))
    bias = chain[0].bias
    warploom.patch(chain, weights="int4")
    chain(torch.randn(2, 128))
    assert ran and not chain[0].training and chain[0].bias is bias


def infinite() -> torch.nn.Module:
    chain = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(128, 64))
    with torch.no_grad():
        chain[1].weight[3, 5] = torch.inf
    return chain


CHAIN = torch.nn.Sequential(torch.nn.Linear(128, 64))
ON_META = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(128, 64, device="meta"))


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        (CHAIN, {"weights": "int5"}, "weight format 'int5'"),
        (CHAIN, {"weights": 4}, "weights 4: must be the name of a format, or a dict"),
        (CHAIN, {"weights": {"grup": 64}}, "weights with 'grup'.*did you mean group"),
        (CHAIN, {"weights": {"group": 48}}, "group 48 of format int4: must be one of 128"),
        (CHAIN, {"weights": {"symmetric": False}}, "symmetric False.*take format uint4"),
        (CHAIN, {"weights": {"skip": "0"}}, r"skip '0': must be a list.*pass \['0'\]"),
        (CHAIN, {"weights": {"skip": ["lm_head"]}}, "skip 'lm_head': must be the name of a mod"),
        (CHAIN, {"weights": "int4", "linear": False}, "weights 'int4' with linear=False"),
        (infinite(), {"weights": "int4"}, "1: weight inf of row 3, k 5: must be finite"),
        (ON_META, {"weights": "int4"}, "1: weight on meta"),
    ],
)
def test_what_cannot_be_is_refused_with_the_model_as_it_was(
    asked: torch.nn.Module, given: dict[str, Any], said: str
) -> None:
    before = places(asked)
    with pytest.raises(ProblemError, match=said):
        warploom.patch(asked, **given)
    assert places(asked) == before


def test_a_patched_model_is_saved_and_loaded() -> None:
    """By its state, into a model that is patched alike."""
    first, second = (model("Llama", "eager") for _ in range(2))
    with torch.no_grad():
        first.model.layers[0].mlp.up_proj.weight.mul_(-1)
    for speaking in (first, second):
        warploom.patch(speaking, weights=IN_GROUPS)
    assert not torch.equal(first(IDS).logits, second(IDS).logits)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(IDS).logits, second(IDS).logits)
