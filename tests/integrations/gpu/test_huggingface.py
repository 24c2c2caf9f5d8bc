"""transformers' models, patched, on a GPU: what they say, learn and generate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import huggingface_layers as layers
import pytest
import torch
from tiny_models import VOCABULARY, model

import warploom
from warploom.integrations import transformers_attention

pytestmark = pytest.mark.gpu
ROWS = 300
MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": MEDIUM | {"head_dim": 128},
    "Mistral": MEDIUM | {"sliding_window": 100},
    "Gemma2": MEDIUM | {"sliding_window": 100, "query_pre_attn_scalar": 64},
    "GptOss": MEDIUM | {"sliding_window": 100},
}
SERVED = [*MODELS]  # by caches of a fixed size as well
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
MODELS["DeepseekV3"] = MEDIUM | LATENT | {"v_head_dim": 128, "num_key_value_heads": 8}


def inputs(case: str) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """Tokens, keywords of a call, and which tokens are no padding."""
    tokens = torch.randint(2, VOCABULARY, (3, ROWS), generator=torch.Generator().manual_seed(0))
    visible = torch.ones_like(tokens)
    keywords: dict[str, Any] = {}
    if case == "packed":
        positions = torch.cat([torch.arange(130), torch.arange(1), torch.arange(ROWS - 131)])
        keywords = {"position_ids": positions.expand(3, -1).cuda(), "use_cache": False}
    elif case != "whole":
        hidden = {"left": slice(0, 77), "right": slice(200, None), "inside": slice(100, 150)}
        visible[0, hidden[case]] = 0
        keywords = {"attention_mask": visible.cuda()}
    return tokens.cuda(), keywords, visible.bool().cuda()


def made(name: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:  # noqa: ANN401
    """A model on the GPU."""
    return model(name, attention, dtype, **MODELS[name]).cuda()


@pytest.mark.parametrize("case", ["whole", "left", "right", "inside", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_says_and_learns_the_same(
    name: str, case: str, computed: Counter[str]
) -> None:
    """Logits and every gradient, as far from fp32 as eager attention in bf16; no mask is lost."""
    tokens, keywords, visible = inputs(case)
    counts = visible[:, 1:] & visible[:, :-1]

    def learned(learning: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # noqa: ANN401
        logits = learning(tokens, **keywords).logits
        predicted = logits[:, :-1][counts].float()
        torch.nn.functional.cross_entropy(predicted, tokens[:, 1:][counts]).backward()
        return logits[visible].detach().float(), layers.gradients(learning)

    torch.backends.cuda.matmul.allow_tf32 = False
    exact, exact_gradients = learned(made(name, "eager", torch.float32))
    rough, rough_gradients = learned(made(name, "eager"))
    patched = made(name, "eager")
    warploom.patch(patched)
    found, gradients = learned(patched)
    assert computed == {"by_kernels": 2}
    assert found.isfinite().all()
    assert float((found - exact).abs().max()) < 2 * float((rough - exact).abs().max()) + 0.02
    assert gradients.keys() == exact_gradients.keys()
    for key, value in exact_gradients.items():
        error = float((gradients[key] - value).norm())
        allowed = 4 * float((rough_gradients[key] - value).norm()) + 0.1 * float(value.norm())
        assert error <= allowed, (key, error, allowed)


@pytest.mark.parametrize("rows", [256, 301])
@pytest.mark.parametrize("name", layers.LAYERS)
def test_masks_and_biases_of_a_layer_are_computed_by_kernels(
    name: str, rows: int, computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers.verify(name, rows, "cuda", monkeypatch)
    assert computed == {"by_kernels": 1, "by_torch": 1}


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in MODELS), *((name, "static") for name in SERVED)],
)
def test_a_patched_model_generates(name: str, cache: str, computed: Counter[str]) -> None:
    """Each token is, to bf16, the likeliest of an fp32 model that is given the tokens before.

    With a cache of a fixed size transformers compiles the steps after the prompt. The batch is
    padded at the left.
    """
    tokens, keywords, visible = inputs("left")
    patched = made(name, "eager")
    warploom.patch(patched)
    torch._dynamo.reset()
    said = patched.generate(
        tokens,
        **keywords,
        max_new_tokens=12,
        do_sample=False,
        cache_implementation=None if cache == "dynamic" else cache,
    )
    assert said.shape == (3, ROWS + 12)
    assert computed["by_kernels"] >= 2, "the prompt was not computed by Warploom"
    seen = torch.nn.functional.pad(visible.long(), (0, 12), value=1)
    with torch.no_grad():
        exact = made(name, "eager", torch.float32)(said, attention_mask=seen).logits
        rough = made(name, "eager")(said, attention_mask=seen).logits.float()
    exact, rough = exact[:, ROWS - 1 : -1], rough[:, ROWS - 1 : -1]
    chosen = exact.gather(-1, said[:, ROWS:, None]).squeeze(-1)
    allowed = 4 * float((rough - exact).abs().max()) + 0.02
    assert float((exact.amax(-1) - chosen).max()) < allowed


@pytest.mark.parametrize("padding", ["whole", "left"])
@pytest.mark.parametrize("name", SERVED)
def test_steps_by_a_static_cache_are_warplooms(name: str, padding: str) -> None:
    """Compiled, in CUDA graphs, for all lengths: what is said again is said without compiling.

    Tokens are compared with those of an fp32 model as above.
    """
    tokens, keywords, visible = inputs(padding)
    patched = made(name, "eager")
    warploom.patch(patched, linear=False)
    torch._dynamo.reset()
    asked = {**keywords, "do_sample": False, "cache_implementation": "static"}
    patched.generate(tokens, max_new_tokens=8, **asked)
    before = warploom.counters.compiles
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        said = patched.generate(tokens, max_new_tokens=8, **asked)
    assert warploom.counters.compiles == before
    launched = [event.name for event in profile.events()]
    decoded = sum("attention_decode" in one and "sm90a" in one for one in launched)
    assert decoded == 7 * patched.config.num_hidden_layers
    seen = torch.nn.functional.pad(visible.long(), (0, 8), value=1)
    with torch.no_grad():
        exact = made(name, "eager", torch.float32)(said, attention_mask=seen).logits
        rough = made(name, "eager")(said, attention_mask=seen).logits.float()
    exact, rough = exact[:, ROWS - 1 : -1], rough[:, ROWS - 1 : -1]
    chosen = exact.gather(-1, said[:, ROWS:, None]).squeeze(-1)
    allowed = 4 * float((rough - exact).abs().max()) + 0.02
    assert float((exact.amax(-1) - chosen).max()) < allowed


def test_compiled_layers_run_kernels() -> None:
    """Layer by layer, with a mask that is told by bounds, to the result of the eager layers."""
    tokens, keywords, visible = inputs("left")
    patched = made("Mistral", "eager")
    warploom.patch(patched, linear=False)
    torch._dynamo.reset()
    with torch.no_grad():
        eager = patched(tokens, **keywords, use_cache=False).logits
        for layer in patched.model.layers:
            layer.compile(fullgraph=True)
        patched(tokens, **keywords, use_cache=False)
        before = warploom.counters.launches
        compiled = patched(tokens, **keywords, use_cache=False).logits
    assert warploom.counters.launches == before + len(patched.model.layers)
    error = (compiled - eager)[visible].abs().max()
    assert float(error) < 0.05 * float(eager[visible].abs().max())


def test_deepseek_v3_is_trained_with_192_and_128(
    computed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the head dimensions that it has: values that are padded would be 192 long."""
    seen, attend = [], transformers_attention.api.attention

    def noted(*given: torch.Tensor, **told: Any) -> Any:  # noqa: ANN401
        seen.append(tuple(one.shape[-1] for one in given))
        return attend(*given, **told)

    monkeypatch.setattr(transformers_attention.api, "attention", noted)
    taught = made("DeepseekV3", "eager")
    warploom.patch(taught)
    tokens, _, _ = inputs("whole")
    optimizer, losses = torch.optim.SGD(taught.parameters(), lr=0.1), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(taught(tokens, labels=tokens, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
    assert computed == {"by_kernels": 16} and set(seen) == {(192, 192, 128)}
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("kind", ["bool", "added", "none"])
def test_rows_attend_to_the_keys_that_their_layer_chose(kind: str, computed: Counter[str]) -> None:
    """As layers of DeepSeek-V3.2 hand a choice to attentions that are not transformers' own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, ROWS, 128, device="cuda").bfloat16() for _ in range(3))
    rows = torch.arange(ROWS, device="cuda")
    indices = torch.rand(2, ROWS, ROWS, device="cuda").argsort(-1)[..., :40]
    indices[..., 0] = rows  # no row is without a key
    kept = torch.zeros(2, 1, ROWS, ROWS, dtype=torch.bool, device="cuda")
    kept = kept.scatter(-1, indices[:, None], True).tril()
    mask: torch.Tensor | None = torch.ones_like(kept).tril()
    if kind == "added":
        mask = torch.zeros_like(kept, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    elif kind == "none":
        mask = None
    layer = torch.nn.Module()
    out, _ = transformers_attention.attention(layer, q, k, v, mask, indices=indices)
    assert computed == {"by_kernels": 1}
    scores = q.double() @ k.double().mT / 128**0.5
    exact = scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v.double()
    assert float((out.transpose(1, 2) - exact).abs().max()) < 2**-5
