"""Steps of transformers' models by caches of a fixed size: lengths on the device, and no mask.

Here Warploom computes by its reference on CPU tensors: no tensor is `elsewhere`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model
from transformers import CompileConfig, StaticCache
from transformers.masking_utils import sliding_window_causal_mask_function

from warploom.integrations import transformers_steps
from warploom.integrations.bounds import Bounds
from warploom.integrations.torch_attention import Arguments
from warploom.integrations.transformers_attention import step_refusal
from warploom.integrations.transformers_masks import BoundedMask, mask

ROWS, LAYERS = 13, 2
IDS = torch.randint(2, VOCABULARY, (2, ROWS), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0
MODELS = ["Llama", "Mistral", "Gemma2", "GptOss"]


def speaking(name: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:  # noqa: ANN401
    """A model with heads that there are kernels for."""
    return model(name, attention, dtype, head_dim=64)


def by_steps(made: Any, prompt: int, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
    """What a model says of IDS token by token; rows of the cache that are not filled are NaN."""
    cache = StaticCache(config=made.config, max_cache_len=ROWS + 7)
    said = []
    with torch.no_grad():
        for last in range(prompt, ROWS + 1):
            ids = IDS[:, :last] if last == prompt else IDS[:, last - 1 : last]
            seen = {name: value[:, :last] for name, value in keywords.items()}
            said.append(made(ids, past_key_values=cache, **seen).logits[:, -1].float())
            for layer in cache.layers:
                if last < layer.keys.shape[2]:
                    layer.keys[:, :, last:] = layer.values[:, :, last:] = torch.nan
    return torch.stack(said, 1)


@pytest.mark.parametrize(
    "given", [{}, {"attention_mask": torch.ones_like(IDS)}], ids=["none", "ones"]
)
@pytest.mark.parametrize("name", MODELS)
def test_steps_by_a_fixed_cache_are_computed_by_warploom(
    name: str, given: dict[str, torch.Tensor], paths: Counter[str]
) -> None:
    """A key too few, or one that is not filled yet, changes what the model says."""
    prompt = 6
    with torch.no_grad():
        exact = speaking(name, "eager", torch.float32)(IDS).logits[:, prompt - 1 :]
        rough = speaking(name, "eager")(IDS).logits[:, prompt - 1 :].float()
    found = by_steps(speaking(name, "warploom"), prompt, **given)
    steps = ROWS - prompt + 1  # the prompt among them
    assert paths == {"by_kernels": LAYERS * steps}
    assert float((found - exact).abs().max()) < 2 * float((rough - exact).abs().max()) + 0.05


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_generate_says_what_it_says_with_eager_attention(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled steps are one graph for all lengths: one for each would compile while serving."""
    from warploom.integrations import devices, transformers_attention

    transformers_attention.register()
    monkeypatch.setattr(transformers_attention, "elsewhere", lambda tensor: None)
    monkeypatch.setitem(devices.reasons, -1, None)
    keywords: dict[str, Any] = {"disable_compile": True}
    if compiled:
        keywords = {"compile_config": CompileConfig(fullgraph=True, backend="aot_eager")}
        keywords["compile_config"]._compile_all_devices = True
    asked = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    exact = speaking(name, "eager").generate(IDS, **asked, disable_compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = speaking(name, "warploom").generate(IDS, **asked, **keywords)
    for step, (one, other) in enumerate(zip(found.logits, exact.logits, strict=True)):
        assert float((one - other).abs().max()) < 0.2
        if not torch.equal(found.sequences[:, ROWS + step], exact.sequences[:, ROWS + step]):
            break  # as likely a token: from there on they speak of other things
    assert step > 0
    # A window's cache becomes full, which is another graph of transformers' own.
    graphs = {"Llama": 1, "Gemma2": 2}[name] if compiled else 0
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) <= graphs
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("padding", ["left", "inside"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_steps_of_a_padded_batch_see_no_padding(
    name: str, padding: str, paths: Counter[str]
) -> None:
    """At the left, it is before the first key that counts; elsewhere, it is a mask.

    With that torch computes single rows, but for a softcap, for which it has no kernel.
    """
    visible = LEFT if padding == "left" else LEFT.roll(3, 1)
    cache = {"max_new_tokens": 4, "cache_implementation": "static", "disable_compile": True}
    tokens = [
        speaking(name, attention, torch.float32).generate(IDS, attention_mask=visible, **cache)
        for attention in ("eager", "warploom")
    ]
    assert torch.equal(*tokens)
    said = []
    for attention in ("eager", "warploom"):
        paths.clear()
        asked = {**cache, "output_logits": True, "return_dict_in_generate": True}
        made = speaking(name, attention)
        said.append(made.generate(IDS, attention_mask=visible, **asked).logits[:2])
    steps = "by_torch" if (padding, name) == ("inside", "Llama") else "by_kernels"
    assert paths[steps] >= 3 * LAYERS and sum(paths.values()) == 4 * LAYERS
    for one, other in zip(*said, strict=True):
        assert float((one - other).abs().max()) < 0.2


# ---- Masks ---------------------------------------------------------------------------------------


def step_mask(first: torch.Tensor | int, **keywords: Any) -> Any:  # noqa: ANN401
    """The mask of one row behind 5 keys of a cache of 9, as transformers asks for it."""
    config = speaking("Llama", "warploom").config
    told = {"dtype": torch.bfloat16, "config": config, "allow_is_causal_skip": False}
    return mask(2, 1, 9, first, **{**told, **keywords})


def test_the_mask_of_a_step_is_the_tensor_for_whoever_looks_at_it(paths: Counter[str]) -> None:
    """It is made late, when the cache has already counted the row."""
    for first in (torch.tensor(5), 5):
        found = step_mask(first, mask_function=sliding_window_causal_mask_function(4))
        assert isinstance(found, BoundedMask)
        assert found.bounds.window == 3
        assert found.bounds.lengths.tolist() == [6, 6] and found.bounds.lengths.dtype == torch.int32
        if isinstance(first, torch.Tensor):
            first.add_(1)
        wanted = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0]).bool()
        assert torch.equal(found.tensor(), wanted.expand(2, 1, 1, 9))


def test_padding_at_the_left_is_before_the_first_key(paths: Counter[str]) -> None:
    """Keys of a window's cache begin behind the first ones, and padding may be among those."""
    padding = torch.ones(2, 12).bool()
    padding[0, :4] = False
    for first_key, starts in ((0, [4, 0]), (3, [1, 0]), (6, [0, 0])):
        found = step_mask(11, attention_mask=padding, kv_offset=first_key)
        assert found.bounds.starts.tolist() == starts
        assert found.bounds.lengths.tolist() == [12 - first_key] * 2
        seen = torch.nn.functional.pad(padding, (0, 3))[:, first_key : first_key + 9]
        behind = torch.arange(9) < 12 - first_key
        assert torch.equal(found.tensor()[:, 0, 0], seen & behind)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dtype": torch.float32},
        {"attention_mask": torch.ones(2, 5).bool()},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]]).bool()},
        {"mask_function": lambda *at: at[2] >= at[3]},
        {"config": object()},
    ],
    ids=["fp32", "short", "padding", "another function", "no sizes"],
)
def test_what_lengths_do_not_say_is_a_tensor(keywords: dict[str, Any], paths: Counter[str]) -> None:
    assert isinstance(step_mask(torch.tensor(5), **keywords), torch.Tensor)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"query": torch.zeros(2, 8, 1, 64)}, "query is torch.float32"),
        ({"value": torch.zeros(2, 2, 9, 32).bfloat16()}, "heads have 64 and 32 elements"),
        ({"query": torch.zeros(2, 8, 80, 64).bfloat16()}, "more than 256 rows"),
        ({"query": torch.zeros(2, 8, 1, 64).bfloat16().requires_grad_()}, "no gradient"),
        ({"bias": torch.zeros(1, 8, 1, 9)}, "no bias"),
        ({"dropout": 0.1}, "no dropout"),
    ],
    ids=["type", "values", "rows", "gradient", "bias", "dropout"],
)
def test_a_step_without_a_kernel_is_torchs(
    change: dict[str, Any], told: str, paths: Counter[str]
) -> None:
    cache = torch.zeros(2, 2, 9, 64).bfloat16()
    given = {"query": torch.zeros(2, 8, 1, 64).bfloat16(), "key": cache, "value": cache}
    assert step_refusal(Arguments(**given)) is None
    refused = step_refusal(Arguments(**{**given, **change}))
    assert refused is not None and told in refused


def test_sinks_of_another_type_than_q_are_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take them in the type of q or in fp32."""
    given: list[Any] = []

    def attention_decode(q: torch.Tensor, *others: Any, **keywords: Any) -> torch.Tensor:
        given.append(keywords["sinks"].dtype)
        return q

    monkeypatch.setattr(transformers_steps.api, "attention_decode", attention_decode)
    cache = torch.zeros(2, 2, 9, 64).bfloat16()
    bounds = Bounds(9, causal=False, lengths=torch.tensor([6, 6]).int())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = Arguments(cache, cache, cache, sinks=torch.zeros(2, dtype=dtype))
        transformers_steps.attend(call, bounds)
    assert given == [torch.bfloat16, torch.float32, torch.float32]
