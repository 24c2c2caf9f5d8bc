"""Models whose layers choose keys, drop rows, or add keys, by what transformers' attentions get.

Compared with their own attention in fp32, where both are torch's: only the mask can differ.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import warploom
from warploom.errors import ProblemError

ROWS = 24
IDS = torch.randint(3, 64, (2, ROWS), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, :7] = 0
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 5, "first_k_dense_replace": 1,
}  # fmt: skip
BLOCKS = {
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "num_local_experts": 4,
    "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "rotary_dim": 8,
    "index_topk_blocks": 1, "index_local_blocks": 1, "dense_intermediate_size": 96,
    "shared_intermediate_size": 32, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v32": LATENT,  # `indices` of keys
    "glm_moe_dsa": LATENT,
    "axk2": LATENT,
    "minimax_m3_vl_text": BLOCKS,  # blocks of keys, of each group of heads
    # Keys of compressed blocks are added.
    "deepseek_v4": {**LATENT, "num_key_value_heads": 1, "compress_ratios": [4, 4, 0]},
}


@cache
def _made(kind: str) -> Any:  # noqa: ANN401 (models are called with anything)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS.get(kind, {})})
    return AutoModelForCausalLM.from_config(config).float().eval()


def model(kind: str) -> Any:  # noqa: ANN401
    return copy.deepcopy(_made(kind))


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_attends_to_the_keys_that_it_chose(kind: str, mask: torch.Tensor | None) -> None:
    """Models of DeepSeek-V3.2's kind attended to every key, and DeepSeek-V4's failed."""
    plain, ours = model(kind), model(kind)
    assert warploom.patch(ours, linear=False, experts=False).rows
    seen = slice(None) if mask is None else mask.bool()
    results = []
    for one in (plain, ours):
        logits = one(input_ids=IDS, attention_mask=mask, use_cache=False).logits[seen]
        logits.square().mean().backward()
        results.append(logits.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            scale = float(other.grad.abs().max())
            assert float((one.grad - other.grad).abs().max()) <= 1e-3 * scale + 1e-7, name


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_generated_from_the_chosen_keys(kind: str) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain, ours = model(kind), model(kind)
    warploom.patch(ours, linear=False, experts=False)
    want = plain.generate(IDS, attention_mask=PADDED, **options)
    assert torch.equal(ours.generate(IDS, attention_mask=PADDED, **options), want)


def test_fewer_keys_than_rows_matter_to_the_comparison() -> None:
    """The models of this file would give the same without a choice if it were of all keys."""
    config = copy.deepcopy(_made("deepseek_v32").config)
    config.index_topk = ROWS
    every = AutoModelForCausalLM.from_config(config).float().eval()
    every.load_state_dict(_made("deepseek_v32").state_dict())
    few, all_keys = (
        one(input_ids=IDS, use_cache=False).logits for one in (model("deepseek_v32"), every)
    )
    assert float((few - all_keys).abs().max()) > 0.05 * float(few.abs().max())


def gemma4(global_head_dim: int) -> Any:  # noqa: ANN401
    """A Gemma 4, whose layers without a window may have larger heads."""
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4,
             "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
             "vocab_size_per_layer_input": 64, "global_head_dim": global_head_dim,
             "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gemma4_text"](**{**SIZES, **sizes})
    return AutoModelForCausalLM.from_config(config).float().eval()


def test_the_last_rows_alone_see_every_earlier_key() -> None:
    """Gemma 4 drops rows whose logits nobody asks for, and their rows of a mask, if it has one."""
    plain = gemma4(global_head_dim=16)
    ours = copy.deepcopy(plain)
    warploom.patch(ours, linear=False, experts=False)
    with torch.no_grad():
        want = plain(input_ids=IDS, use_cache=False).logits[:, -3:]
        result = ours(input_ids=IDS, use_cache=False, logits_to_keep=3).logits
    torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def test_layers_with_heads_of_two_sizes_generate_by_a_cache_of_a_fixed_size() -> None:
    """Such a configuration raises for whoever asks it for the heads of all layers."""
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    options |= {"cache_implementation": "static", "disable_compile": True}
    plain = gemma4(global_head_dim=32)
    want = plain.generate(IDS, attention_mask=PADDED, **options)
    warploom.patch(plain, linear=False, experts=False)
    assert torch.equal(plain.generate(IDS, attention_mask=PADDED, **options), want)


def test_a_choice_by_a_name_that_nobody_knows_is_refused() -> None:
    """To ignore it would be to attend to every key."""
    from warploom.integrations.transformers_attention import attention

    layer = model("deepseek_v32").model.layers[0].self_attn
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(ProblemError, match=r"row_indices \[1, 8, 2\].*by which the model selects"):
        attention(layer, q, q, q, None, row_indices=torch.zeros(1, 8, 2, dtype=torch.long))


def test_packed_sequences_of_a_layer_that_chooses_keys_are_separate() -> None:
    """Told by cu_seq_lens alone, layers that choose keys attended from one sequence to another."""
    ours = model("minimax_m3_vl_text")
    warploom.patch(ours, linear=False, experts=False)
    ends = torch.tensor([0, 10, ROWS], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    positions = torch.cat((torch.arange(10), torch.arange(ROWS - 10)))[None]
    with torch.no_grad():
        want = ours(input_ids=IDS[:1], position_ids=positions, use_cache=False).logits
        result = ours(input_ids=IDS[:1], position_ids=positions, use_cache=False, **told).logits
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
        other = IDS[:1].clone()
        other[:, :10] = IDS[1:, :10]
        first, second = (
            ours(input_ids=one, use_cache=False, **told).logits[:, 10:] for one in (IDS[:1], other)
        )
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", [8, 16])
@pytest.mark.parametrize("kind", ["deepseek_v32", "minimax_m3_vl_text"])
def test_without_a_mask_no_row_sees_a_later_key(kind: str, keys: int) -> None:
    """Also of a cache of a fixed size, whose later keys are not filled, and without positions."""
    from warploom.integrations.transformers_attention import attention

    layer, rows = model(kind).model.layers[2].self_attn, 8
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 4, count, 16, generator=random) for count in (rows, keys, keys))
    if kind == "deepseek_v32":  # each twice, and none by -1
        chosen = torch.arange(keys).repeat(2, rows, 2)
        chosen = {"indices": torch.cat((chosen, torch.full((2, rows, 3), -1)), 2)}
    else:
        chosen = {"block_indices": torch.arange(keys // 4).expand(2, 2, rows, -1)}
    result, _ = attention(layer, q, k, v, None, **chosen)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :rows], v[:, :, :rows], is_causal=True
    )
    torch.testing.assert_close(result, want.transpose(1, 2), rtol=1e-5, atol=1e-5)
    last, _ = attention(layer, q[:, :, -1:], k, v, None, **{
        name: one[..., -1:, :] for name, one in chosen.items()
    })  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(last, want.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["deepseek_v32", "minimax_m3_vl_text"])
def test_a_mask_that_is_added_to_scores_hides_keys_that_were_chosen(kind: str) -> None:
    plain, ours = model(kind), model(kind)
    warploom.patch(ours, linear=False, experts=False)
    hidden = torch.ones(2, 1, ROWS, ROWS, dtype=torch.bool).triu(1)
    hidden[1, :, 3:, :3] = True
    for dtype in (torch.float32, torch.bool):
        mask = ~hidden
        if dtype != torch.bool:
            mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(dtype).min)
        with torch.no_grad():
            results = [
                one(input_ids=IDS, attention_mask=mask, use_cache=False).logits
                for one in (plain, ours)
            ]
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
