"""transformers' models on Warploom's attention: masks, caches, packing, generation.

Here Warploom computes by its reference on CPU tensors: `has_kernels` says so of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, ENCODERS, VOCABULARY, WINDOW, model
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from warploom.errors import ProblemError
from warploom.integrations import transformers_attention
from warploom.integrations.transformers_masks import BoundedMask, mask, recognised

ROWS = 13
IDS = torch.randint(2, VOCABULARY, (2, ROWS), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0
RIGHT = torch.ones_like(IDS)
RIGHT[0, 9:] = 0
HOLES = torch.ones_like(IDS)
HOLES[0, 3:5] = 0
POSITIONS = torch.tensor([[*range(7), *range(6)], [*range(3), *range(10)]])
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "left": {"attention_mask": LEFT},
    "right": {"attention_mask": RIGHT},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Warploom has kernels for every device; count how often they and torch's computed."""
    transformers_attention.register()
    counted: Counter[str] = Counter()
    monkeypatch.setattr(transformers_attention, "has_kernels", lambda device: True)
    for name in ("by_kernels", "by_torch"):
        computes = getattr(transformers_attention, f"_{name}")

        def counting(
            *arguments: Any,
            _computes: Any = computes,  # noqa: ANN401
            _name: str = name,
        ) -> torch.Tensor:
            counted[_name] += 1
            computed: torch.Tensor = _computes(*arguments)
            return computed

        monkeypatch.setattr(transformers_attention, f"_{name}", counting)
    yield counted


def said(
    name: str, attention: str, dtype: torch.dtype, case: dict[str, Any], head: str = "ForCausalLM"
) -> torch.Tensor:
    """What a model says to IDS, of the tokens that are no padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(name, attention, dtype, head)(IDS, **case)[0].float()
    return logits[case.get("attention_mask", torch.ones_like(IDS)).bool()]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; NaN is infinitely far."""
    return float((a - b).abs().nan_to_num(nan=torch.inf).max())


def check(name: str, case: str, paths: Counter[str], head: str) -> None:
    """Warploom is about as far from fp32 as eager attention in bf16; a mask lost is further."""
    keywords = CASES[case]
    exact = said(name, "eager", torch.float32, keywords, head)
    allowed = 2 * off(said(name, "eager", torch.bfloat16, keywords, head), exact) + 0.05
    found = said(name, "warploom", torch.bfloat16, keywords, head)
    assert paths == {"by_kernels": 2}, "a layer was not computed by Warploom"
    assert off(found, exact) < allowed
    if case == "packed" or case == "left" or (case == "right" and head == "Model"):
        assert off(said(name, "eager", torch.float32, {}, head)[: len(exact)], exact) > 2 * allowed
    by_torch = said(name, "warploom", torch.float32, keywords, head)
    assert paths["by_torch"] == 2
    assert off(by_torch, exact) < 1e-4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_say_what_they_say_with_eager_attention(
    name: str, case: str, paths: Counter[str]
) -> None:
    """A mask that is lost, shifted by one or aligned at the other end changes what models say."""
    check(name, case, paths, "ForCausalLM")


@pytest.mark.parametrize("case", ["whole", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_say_what_they_say_with_eager_attention(
    name: str, case: str, paths: Counter[str]
) -> None:
    """Encoders attend to both sides: causal attention, or to padding, would be another result."""
    check(name, case, paths, "Model")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_gradients_are_those_of_eager_attention(name: str, case: str, paths: Counter[str]) -> None:
    """Gradients of every weight, sinks and those before a softcap among them, and none of padding.

    Held against fp32 by what eager attention in bf16 is off, as norms.
    """
    keywords = CASES[case]
    counts = keywords.get("attention_mask", torch.ones_like(IDS)).bool()

    def gradients(attention: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        learning = model(name, attention, dtype)
        logits = learning(IDS, **keywords).logits[:, :-1][counts[:, 1:] & counts[:, :-1]]
        wanted = IDS[:, 1:][counts[:, 1:] & counts[:, :-1]]
        torch.nn.functional.cross_entropy(logits.float(), wanted).backward()
        return {key: p.grad.float() for key, p in learning.named_parameters() if p.grad is not None}

    exact, rough = gradients("eager", torch.float32), gradients("eager", torch.bfloat16)
    found = gradients("warploom", torch.bfloat16)
    assert paths == {"by_kernels": 2}
    assert found.keys() == exact.keys()
    for key, value in exact.items():
        error = float((found[key] - value).norm())
        allowed = 4 * float((rough[key] - value).norm()) + 0.1 * float(value.norm())
        assert error <= allowed, (key, error, allowed)


@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_tokens_may_come_in_pieces(
    name: str, fixed: bool, padding: str, paths: Counter[str]
) -> None:
    """A cache that is longer than what is filled: nobody may attend to the rest of it.

    Pieces of 6, 5, 1 and 1 tokens, in caches that grow and in caches of a fixed size.
    """
    visible = CASES[padding].get("attention_mask")

    def in_pieces(attention: str, dtype: torch.dtype) -> torch.Tensor:
        speaking = model(name, attention, dtype)
        config = speaking.config
        cache: Any = DynamicCache(config=config)
        if fixed:
            cache = StaticCache(config=config, max_cache_len=ROWS + 7)
        pieces = []
        for first, last in ((0, 6), (6, 11), (11, 12), (12, 13)):
            seen = None if visible is None else visible[:, :last]
            with torch.no_grad():
                answer = speaking(IDS[:, first:last], attention_mask=seen, past_key_values=cache)
            pieces.append(answer.logits.float())
        whole = torch.cat(pieces, 1)
        return whole if visible is None else whole[visible.bool()]

    exact = said(name, "eager", torch.float32, CASES[padding]).reshape(-1, VOCABULARY)
    found = in_pieces("warploom", torch.bfloat16).reshape(-1, VOCABULARY)
    assert paths["by_kernels"] >= 4, "no piece of several rows was computed by Warploom"
    allowed = 2 * off(said(name, "eager", torch.bfloat16, CASES[padding]), exact) + 0.1
    assert off(found, exact) < allowed
    by_torch = in_pieces("warploom", torch.float32).reshape(-1, VOCABULARY)
    assert off(by_torch, exact) < 1e-4


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "fixed cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 5},
}


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_generation_gives_the_tokens_of_eager_attention(
    name: str, how: str, paths: Counter[str]
) -> None:
    """In fp32, where both are torch's: every mask of generation, in a batch padded at the left."""
    tokens = {}
    for attention in ("eager", "warploom"):
        torch.manual_seed(1)
        tokens[attention] = model(name, attention, torch.float32).generate(
            IDS, attention_mask=LEFT, max_new_tokens=9, disable_compile=True, **GENERATIONS[how]
        )
    assert paths["by_torch"] > 0
    assert torch.equal(tokens["eager"], tokens["warploom"])


@pytest.mark.parametrize("how", ["greedy", "fixed cache"])
def test_prompts_of_generation_are_computed_by_warploom(how: str, paths: Counter[str]) -> None:
    """The mask that `generate` makes ahead for a cache of a fixed size keeps its bounds."""
    speaking = model("Mistral", "warploom")
    keywords = {**GENERATIONS[how], "disable_compile": True, "max_new_tokens": 3}
    speaking.generate(IDS, attention_mask=LEFT, **keywords)
    assert paths == {"by_kernels": 2, "by_torch": 4}


def test_cu_seq_lens_separate_sequences(paths: Counter[str]) -> None:
    """Collators without padding tell sequences by keywords; nobody may attend across their ends."""
    flat, ends = IDS.reshape(1, -1), torch.tensor([0, 7, 13, 16, 26], dtype=torch.int32)
    positions = POSITIONS.reshape(1, -1)
    keywords = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 10,
        "max_length_k": 10,
        "use_cache": False,
    }
    with torch.no_grad():
        exact = model("Llama", "eager", torch.float32)(
            flat, position_ids=positions, use_cache=False
        )
        rough = model("Llama", "eager")(flat, position_ids=positions, use_cache=False)
        # Rotations depend on distances alone, so that positions need not begin anew.
        found = model("Llama", "warploom")(flat, **keywords)
        by_torch = model("Llama", "warploom", torch.float32)(flat, **keywords)
    assert paths == {"by_kernels": 2, "by_torch": 2}
    allowed = 2 * off(rough.logits.float(), exact.logits) + 0.05
    assert off(found.logits.float(), exact.logits) < allowed
    assert off(by_torch.logits, exact.logits) < 1e-4


# ---- Masks by themselves -------------------------------------------------------------------------

FUNCTIONS: dict[str, Any] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(WINDOW),
    "around": sliding_window_bidirectional_mask_function(WINDOW),
    "chunks": chunked_causal_mask_function(WINDOW, torch.zeros(2, dtype=torch.int64)),
}


def attended(made: torch.Tensor | BoundedMask | None, rows: int, keys: int) -> torch.Tensor:
    """Which keys each row attends to, read off a softmax that `attention` computes of equal scores.

    A value is the power of two of its key, so that the sum tells the keys.
    """
    module = torch.nn.Module()
    q, k = torch.zeros(2, 1, rows, 8), torch.zeros(2, 1, keys, 8)
    shown = []
    for key in range(keys):
        v = torch.zeros(2, 1, keys, 8)
        v[:, :, key] = 1
        operands = (tensor.bfloat16() for tensor in (q, k, v))
        shown.append(transformers_attention.attention(module, *operands, made)[0][:, :, 0, 0] > 0)
    return torch.stack(shown, -1)[:, None]


@pytest.mark.parametrize("padded", ["none", "left", "right", "both"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("rows", "keys", "row_offset", "key_offset"),
    [(9, 9, 0, 0), (9, 14, 0, 0), (4, 9, 5, 0), (4, 14, 5, 0), (4, 8, 5, 1)],
    ids=["whole", "fixed", "continued", "fixed-continued", "rolled"],
)
def test_bounds_are_the_mask(
    function: str,
    padded: str,
    rows: int,
    keys: int,
    row_offset: int,
    key_offset: int,
    paths: Counter[str],
) -> None:
    """Row by row the keys of transformers' own mask, wherever rows and keys of a cache begin."""
    padding = None
    if padded != "none":
        padding = torch.ones(2, row_offset + rows, dtype=torch.bool)
        padding[0, : 2 * (padded != "right")] = False
        padding[1, padding.shape[1] - 3 * (padded != "left") :] = False
    bidirectional = function == "around"
    if bidirectional and (row_offset or keys != rows):
        pytest.skip("encoders have no caches")
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": rows,
        "kv_length": keys,
        "q_offset": row_offset,
        "kv_offset": key_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": padding,
    }
    flags = {
        "allow_is_causal_skip": not bidirectional,
        "allow_is_bidirectional_skip": bidirectional,
    }
    exact = sdpa_mask(**arguments, allow_is_causal_skip=False)
    if function != "causal":
        flags["local_size"] = WINDOW
    made = mask(**arguments, **flags)
    shown = attended(made, rows, keys)
    if padding is not None:  # rows that are padding are nobody's
        own = padding[:, row_offset : row_offset + rows]
        exact, shown = (tensor & own[:, None, :, None] for tensor in (exact, shown))
    assert torch.equal(shown, exact)
    chunked = function == "chunks" and not (padded == "none" and rows == keys)
    assert (paths["by_kernels"] > 0) is not chunked


def test_padding_inside_a_sequence_is_a_mask(paths: Counter[str]) -> None:
    """Keys that are hidden between others are told by no bounds: torch gets the mask."""
    exact = said("Mistral", "eager", torch.float32, {"attention_mask": HOLES})
    found = said("Mistral", "warploom", torch.float32, {"attention_mask": HOLES})
    assert off(found, exact) < 1e-4
    said("Mistral", "warploom", torch.bfloat16, {"attention_mask": HOLES})
    assert paths == {"by_torch": 4}


def test_functions_that_are_not_recognised_are_masks() -> None:
    """Whatever a model adds to a mask, or composes in another way, has to reach the attention."""
    assert recognised(or_masks(causal_mask_function, causal_mask_function)) is None
    assert recognised(sliding_window_overlay(3)) is None, "one side of a window, without causality"
    assert recognised(lambda batch, head, row, key: key <= row) is None
    made = mask(2, 4, 4, mask_function=lambda batch, head, row, key: key == row)
    assert made is None or isinstance(made, torch.Tensor)
    made = mask(
        2, 4, 4, mask_function=lambda b, h, row, key: key == row, allow_is_causal_skip=False
    )
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made[0, 0], torch.eye(4, dtype=torch.bool))


def test_a_bounded_mask_is_a_tensor_for_who_computes_with_it() -> None:
    """Models that cut, invert or add up their mask get transformers' own."""
    padding = LEFT.bool()
    made = mask(2, ROWS, ROWS, attention_mask=padding)
    exact = sdpa_mask(2, ROWS, ROWS, attention_mask=padding, allow_is_causal_skip=False)
    assert isinstance(made, BoundedMask)
    assert torch.equal(made[:, :, :5], exact[:, :, :5])
    assert torch.equal(~made, ~exact)
    assert torch.equal(torch.cat([made, made], -1), torch.cat([exact, exact], -1))
    assert torch.equal(torch.where(made, 1.0, 0.0), exact.float())
    assert made.dtype == torch.bool
    assert made.shape == exact.shape


def test_a_paged_cache_is_refused() -> None:
    """Continuous batching hands a cache over; keys of this step alone would be a wrong result."""
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ProblemError, match="paged cache"):
        transformers_attention.attention(torch.nn.Module(), q, q, q, None, cache=object())
