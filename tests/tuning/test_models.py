"""`warploom compile --serving --model CONFIG.json`: any Llama-like model by its own file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from stand_ins import build_many

from warploom.cli import main
from warploom.errors import ConfigurationError
from warploom.generator import build, models
from warploom.generator.models import Layer
from warploom.generator.targets import target
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.gemm.call import GemmCall

LLAMA: dict[str, Any] = {  # Llama 3.2 1B
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a configuration: a Llama's with other fields, without those that are None."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setattr(build, "build_many", build_many)
    models.read.cache_clear()

    def written(**fields: object) -> str:
        told = {name: value for name, value in {**LLAMA, **fields}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(told))
        models.read.cache_clear()
        return str(tmp_path / "config.json")

    return written


def run(model: str, *more: str) -> Result:
    command = ["compile", "--serving", "--model", model, "--gpu", "h200", "--json", *more]
    return CliRunner().invoke(main, command)


def problems(model: str, *more: str) -> list[str]:
    result = run(model, *more)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {row["kernel"] for row in told["problems"]} == {row["name"] for row in told["kernels"]}
    return [row["problem"] for row in told["problems"]]


def test_layers_are_those_of_engines_and_of_transformers(write: Write) -> None:
    found = models.read(write())
    assert (found.heads, found.kv_heads, found.dim, found.element) == (32, 8, 64, "bf16")
    assert found.weights() == [
        (3072, 2048),  # q, k and v
        (2048, 2048),  # q; o
        (512, 2048),  # k; v
        (16384, 2048),  # gate and up
        (8192, 2048),
        (2048, 8192),
        (128256, 2048),  # the head, whose weight may be that of the embedding
    ]
    assert found.weights(biased=True) == [] and found.window == 0


def test_a_directory_stands_for_the_file_in_it(write: Write) -> None:
    path = write()
    assert models.read(str(Path(path).parent)) == models.read(path)


def test_what_a_file_leaves_out_follows_from_the_rest(write: Write) -> None:
    found = models.read(write(num_key_value_heads=None, head_dim=None, torch_dtype=None))
    assert (found.heads, found.kv_heads, found.dim, found.element) == (32, 32, 64, "bf16")
    nested = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    path = write(**dict.fromkeys(LLAMA, None), text_config=nested, dtype="float16")
    assert models.read(path).element == "fp16"


def test_biases_are_those_that_a_file_tells_and_those_of_a_qwen2(write: Write) -> None:
    assert models.read(write(attention_bias=True)).weights(biased=True) == [
        (3072, 2048),
        (2048, 2048),
        (512, 2048),
    ]
    qwen = models.read(write(model_type="qwen2", use_sliding_window=False, sliding_window=4096))
    assert Layer(3072, 2048, bias=True) in qwen.layers
    assert Layer(2048, 2048) in qwen.layers and qwen.window == 0  # o has none
    mlp = models.read(write(mlp_bias=True))
    assert mlp.weights(biased=True) == [(16384, 2048), (8192, 2048), (2048, 8192)]
    told = problems(write(attention_bias=True), "--m", "4")
    assert any("bias_bf16 4x3072x2048" in one for one in told)
    assert not any("bias_bf16 4x16384x2048" in one for one in told)


@pytest.mark.parametrize(
    "fields",
    [{"model_type": "qwen2_5_vl_text"}, {"model_type": "internlm3", "qkv_bias": True}],
)
def test_biases_that_other_files_tell_in_other_words_are_found(
    fields: dict[str, object], write: Write
) -> None:
    """The kernels with a bias of a qwen2_5_vl were not compiled."""
    assert (3072, 2048) in models.read(write(**fields)).weights(biased=True)


def test_fields_of_a_language_model_go_over_those_around_it_where_it_tells_them(
    write: Write,
) -> None:
    """A type of None hid the model's, and a hidden_size outside hid all that was inside."""
    bare: dict[str, Any] = dict.fromkeys(LLAMA, None)
    inner: dict[str, Any] = {**LLAMA, "torch_dtype": None}
    for around in ({"torch_dtype": "float16"}, {"torch_dtype": "float16", "hidden_size": 64}):
        found = models.read(write(**{**bare, **around}, text_config=inner))
        assert found.element == "fp16" and (2048, 8192) in found.weights()
    inner["dtype"] = "float16"
    assert models.read(write(**bare | {"torch_dtype": "bfloat16"}, text_config=inner)).element == (
        "fp16"
    )


def test_what_the_model_calls_was_compiled_for_it(write: Write) -> None:
    path = write(torch_dtype="float16", sliding_window=1024)
    result = run(path, "--m", "1,24")
    built = {row["kernel"] for row in json.loads(result.stdout)["problems"]}
    where = target("h200")
    for rows in (1, 24):
        for n, k in models.read(path).weights():
            a = torch.empty(rows, k, dtype=torch.float16, device="meta")
            b = torch.empty(n, k, dtype=torch.float16, device="meta").t()
            assert GemmCall(a, b).draft(where).choice.spec.name in built
        q = torch.empty(rows, 32, 1, 64, dtype=torch.float16, device="meta")
        lengths = torch.empty(rows, dtype=torch.int32, device="meta")
        for keys in (500, 8192, 100_000):
            cache = torch.empty(rows, keys, 8, 64, dtype=torch.float16, device="meta")
            k = cache.transpose(1, 2)
            plain = AttentionDecodeCall(q, k, k, cache_seqlens=lengths)
            assert plain.draft(where).choice.spec.name in built
            seen = AttentionDecodeCall(
                q, k, k, cache_seqlens=lengths, causal=True, window=(1023, None)
            )
            assert seen.draft(where).choice.spec.name in built


def test_a_window_adds_kernels_and_a_softcap_changes_them(write: Write) -> None:
    assert not any("window" in one for one in problems(write(), "--m", "4"))
    window = problems(write(sliding_window=1024), "--m", "4")
    assert any("_window" in one for one in window) and any("window" not in one for one in window)
    full = write(sliding_window=1024, layer_types=["full_attention"] * 2)
    assert models.read(full).window == 0
    capped = problems(write(attn_logit_softcapping=50.0), "--m", "4")
    assert all("softcap" in one for one in capped if one.startswith("attention_decode"))


def test_a_configuration_names_shapes_for_other_commands_too(write: Write) -> None:
    command = ["explain", "gemm", "--model", write(), "--m", "16", "--gpu", "h200", "--json"]
    told = json.loads(CliRunner().invoke(main, command).stdout)["explanations"]
    assert len(told) == 7 and told[0]["problem"].endswith("16x3072x2048")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"intermediate_size": None}, "'llama' without intermediate_size: must be Llama-like"),
        (dict.fromkeys(LLAMA), "a model without hidden_size, intermediate_size, num_att"),
        ({"model_type": "bert", "rms_norm_eps": None}, "'bert' without rms_norm_eps"),
        ({"num_local_experts": 8}, "with num_local_experts: it has experts"),
        ({"cross_attention_layers": [3, 8]}, "with cross_attention_layers: it has cross"),
        ({"torch_dtype": None, "dtype": "float64"}, "json: dtype float64: must be bfloat16 or"),
        ({"kv_lora_rank": 512}, "with kv_lora_rank: it has latent attention"),
        ({"quantization_config": {"bits": 4}}, "with quantization_config: it has quantized"),
        ({"mamba_d_state": 16}, "with mamba_d_state: it has layers of another kind"),
        ({"layer_types": ["linear_attention"]}, "with layer_types of 'linear_attention'"),
        ({"layer_types": 3}, "with layer_types of 3"),
        ({"torch_dtype": "float32"}, "torch_dtype float32: must be bfloat16 or float16"),
        ({"hidden_size": "2048"}, "hidden_size '2048': must be a positive integer"),
        ({"hidden_size": True}, "hidden_size True: must be a positive integer"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5: must divide num_attention_heads, 32"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33, "head_dim": None}, "must divide"),
        ({"head_dim": 72}, "for attention_append: dim 72: must be"),
    ],
)
def test_a_model_that_is_not_llama_like_is_refused_with_what_is_wrong(
    fields: dict[str, object], told: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_many", lambda *_, **__: pytest.fail("built"))
    result = run(write(**fields))
    assert result.exit_code == 1
    assert re.search(
        told, json.loads(result.stderr)["value"] + ": " + json.loads(result.stderr)["rule"]
    )


def test_a_path_without_a_file_is_refused_and_a_name_is_looked_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        models.read(str(tmp_path / "config.json"))
    with pytest.raises(ConfigurationError, match=r"config.json: No such file"):
        models.read(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    models.read.cache_clear()
    with pytest.raises(ConfigurationError, match="must be JSON"):
        models.read(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    models.read.cache_clear()
    with pytest.raises(ConfigurationError, match="list: must be a JSON object: give the config"):
        models.read(str(tmp_path))
    for name in ("llama9", ""):
        assert "give the path of a config.json" in run(name).stderr


def test_serving_without_a_model_and_a_model_in_the_place_of_a_file_are_told(write: Write) -> None:
    """The first was `--serving with FILE`, and the second had a fix that could not help."""
    told = CliRunner().invoke(main, ["compile", "--serving", "--gpu", "h200"]).stderr
    assert "--serving without --model: must be a FILE, or --serving and" in told
    told = CliRunner().invoke(main, ["compile", write(), "--gpu", "h200"]).stderr
    assert "`--serving --model` its path" in told
