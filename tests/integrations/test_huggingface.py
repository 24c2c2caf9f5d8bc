"""transformers' models on Warploom's attention: masks, caches, packing, generation.

Here Warploom computes by its reference on CPU tensors: no tensor is `elsewhere`.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import huggingface_layers as layers
import pytest
import torch
import transformers
from tiny_models import DECODERS, ENCODERS, VOCABULARY, model
from transformers import DynamicCache, StaticCache

from warploom.errors import ProblemError
from warploom.integrations import transformers_attention

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


ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "Bart": {"d_model": 32, "init_std": 0.3, "encoder_layers": 2, "decoder_layers": 2},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_decoders_attend_to_encoders(name: str, paths: Counter[str]) -> None:
    """Rows of one text and keys of another that is padded, and a position bias.

    An encoder's padding has nothing to do with a decoder's rows, of which there are as many.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **ENCODER_DECODERS[name],
        vocab_size=VOCABULARY,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        pad_token_id=0,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_start_token_id=0,
    )
    made = getattr(transformers, f"{name}ForConditionalGeneration")(config).bfloat16().eval()

    def says(attention: str, dtype: torch.dtype, visible: torch.Tensor) -> torch.Tensor:
        speaking = copy.deepcopy(made).to(dtype)
        for part in (speaking, speaking.get_encoder(), speaking.get_decoder()):
            part.set_attn_implementation(attention)  # not all versions set it in all parts
        with torch.no_grad():
            logits: torch.Tensor = speaking(
                IDS, attention_mask=visible, decoder_input_ids=IDS.flip(1)
            ).logits
        return logits.float()

    for visible in (RIGHT, LEFT):
        paths.clear()
        exact = says("eager", torch.float32, visible)
        allowed = 2 * off(says("eager", torch.bfloat16, visible), exact) + 0.02
        assert off(says("warploom", torch.bfloat16, visible), exact) < allowed
        assert paths == {"by_kernels": 6}
        assert off(says("warploom", torch.float32, visible), exact) < 1e-4
        assert off(says("eager", torch.float32, torch.ones_like(IDS)), exact) > allowed


def test_checkpoints_compute_again_with_the_same_bounds(paths: Counter[str]) -> None:
    """Layers that are computed again in the backward pass get the mask that they got before."""
    gradients = []
    for again in (False, True):
        learning = model("Mistral", "warploom").train()
        if again:
            learning.gradient_checkpointing_enable()  # activation_checkpointing_enable, later
        logits = learning(IDS, attention_mask=LEFT, use_cache=False).logits
        logits[LEFT.bool()].float().square().mean().backward()
        gradients.append([parameter.grad for parameter in learning.parameters()])
    assert paths == {"by_kernels": 2 + 4}
    assert all(map(torch.equal, *gradients))


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
        return layers.gradients(learning)

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


def test_padding_inside_a_sequence_is_a_mask(paths: Counter[str]) -> None:
    """Keys that are hidden between others are told by no bounds: kernels get the mask."""
    holes = {"attention_mask": HOLES}
    exact = said("Mistral", "eager", torch.float32, holes)
    allowed = 2 * off(said("Mistral", "eager", torch.bfloat16, holes), exact) + 0.05
    assert off(said("Mistral", "warploom", torch.float32, holes), exact) < 1e-4
    assert paths == {"by_torch": 2}
    assert off(said("Mistral", "warploom", torch.bfloat16, holes), exact) < allowed
    assert paths == {"by_torch": 2, "by_kernels": 2}
    whole = said("Mistral", "eager", torch.float32, {})[HOLES.bool().flatten()]
    assert off(whole, exact) > 2 * allowed


# ---- Masks and biases as tensors -----------------------------------------------------------------


@pytest.mark.parametrize("name", layers.LAYERS)
def test_masks_and_biases_of_a_layer_are_computed_by_kernels(
    name: str, paths: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.verify(name, ROWS, "cpu", monkeypatch)
    assert paths == {"by_kernels": 1, "by_torch": 1}


def test_values_of_fewer_elements_than_keys_are_not_padded(
    paths: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3 trains and generates by kernels of two head dimensions."""
    sizes = {"v_head_dim": 16}  # beside 24 of keys
    seen, attend = [], transformers_attention.api.attention

    def noted(*given: torch.Tensor, **told: Any) -> Any:  # noqa: ANN401
        seen.append(given)
        return attend(*given, **told)

    monkeypatch.setattr(transformers_attention.api, "attention", noted)
    losses, gradients = {}, {}
    for attention, dtype in (("warploom", torch.bfloat16), ("eager", torch.float32)):
        taught = model("DeepseekV3", attention, dtype, **sizes)
        loss = taught(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        losses[attention] = float(loss.detach())
        gradients[attention] = taught.model.layers[0].self_attn.kv_b_proj.weight.grad.float()
    assert paths == {"by_kernels": 2}
    assert {tuple(one.shape[-1] for one in given) for given in seen} == {(24, 24, 16)}
    assert abs(losses["warploom"] - losses["eager"]) < 0.02
    difference = (gradients["warploom"] - gradients["eager"]).norm()
    assert difference < 0.05 * gradients["eager"].norm()
    seen.clear()
    speaking = model("DeepseekV3", "warploom", **sizes)
    speaking.generate(IDS, attention_mask=LEFT, max_new_tokens=3, disable_compile=True)
    assert {tuple(one.shape[-1] for one in given) for given in seen} == {(24, 24, 16)}
    assert paths["by_kernels"] == 4


def test_a_bias_with_a_gradient_and_a_softcap_are_torchs(paths: Counter[str]) -> None:
    """Kernels have no gradient of a bias that is added to capped scores."""
    q, position = torch.randn(2, 4, ROWS, 16).bfloat16(), torch.randn(1, 4, ROWS, ROWS)
    for bias in (position, position.clone().requires_grad_()):
        transformers_attention.attention(
            torch.nn.Module(), q, q, q, None, is_causal=False, softcap=2.0, position_bias=bias
        )
    assert paths == {"by_kernels": 1, "by_torch": 1}


def test_a_paged_cache_is_refused() -> None:
    """Continuous batching hands a cache over; keys of this step alone would be a wrong result."""
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ProblemError, match="paged cache"):
        transformers_attention.attention(torch.nn.Module(), q, q, q, None, cache=object())


def test_sinks_of_each_row_are_one_more_score_of_it(paths: Counter[str]) -> None:
    """Inkling 2's, beside a bias; they were refused, so that a patched model raised."""
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, 2, 2))
    sinks, bias = torch.randn(2, 4, 5, 1, requires_grad=True), torch.randn(2, 4, 5, 5)
    found, _ = transformers_attention.attention(
        torch.nn.Module(), q, k, v, None, sinks=sinks, position_bias=bias
    )
    scores = q @ k.repeat_interleave(2, 1).mT / 4 + bias
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    exact = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(found, exact)
    own, expected = (torch.autograd.grad(one.sum(), sinks)[0] for one in (found, exact))
    torch.testing.assert_close(own, expected)
    halves = (one.bfloat16() for one in (q, k, v))
    transformers_attention.attention(torch.nn.Module(), *halves, None, sinks=sinks.bfloat16())
    assert paths == {"by_torch": 2}


def test_values_of_more_heads_than_keys_are_computed_by_torch(paths: Counter[str]) -> None:
    """Kernels refuse them, with an error; torch shares each among the heads of the query."""
    q, k, v = (torch.randn(2, heads, 5, 16).bfloat16() for heads in (4, 2, 4))
    found, _ = transformers_attention.attention(torch.nn.Module(), q, k, v, None)
    operands = (q, k.repeat_interleave(2, 1), v)
    exact = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True)
    torch.testing.assert_close(found, exact.transpose(1, 2), rtol=2e-2, atol=2e-2)
    assert paths == {"by_torch": 1}


@pytest.mark.parametrize("beside", [{}, {"s_aux": torch.zeros(2)}])
def test_other_sinks_are_refused(beside: dict[str, torch.Tensor]) -> None:
    """A keyword that changes scores is not dropped."""
    query = torch.zeros(1, 2, 5, 16)
    sinks = torch.zeros(1, 2, 5 if beside else 4, 1)
    with pytest.raises(ProblemError, match=r"sinks \[1, 2, ., 1\] of a Module.*eager"):
        transformers_attention.attention(
            torch.nn.Module(), query, query, query, None, sinks=sinks, **beside
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_attentions_that_are_asked_for_are_warned_of(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As by "sdpa": once, and with what to do; nothing is returned for them in silence."""
    transformers_attention.register()
    type(logging.getLogger()).warning_once.cache_clear()  # type: ignore[attr-defined]
    torch._dynamo.reset()
    speaking = model("Llama", "warploom")
    call = torch.compile(speaking, backend="eager") if compiled else speaking
    call(IDS)
    assert "output_attentions" not in caplog.text
    for _ in range(2):
        assert not call(IDS, output_attentions=True).attentions
    told = [record.getMessage() for record in caplog.records if "output_att" in record.getMessage()]
    assert len(told) == 1
    assert 'set_attn_implementation("eager")' in told[0]
