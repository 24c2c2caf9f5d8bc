"""Checkpoints of mixtures whose experts were quantized one by one: Qwen's and Mixtral's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import EXPERTS, change, configure, write

import warploom
from warploom.errors import ProblemError
from warploom.integrations.checkpoints.experts import QuantizedExperts
from warploom.integrations.checkpoints.shards import Shards
from warploom.integrations.experts import experts
from warploom.nn import QuantizedLinear

IDS = torch.tensor([[3, 9, 27, 5, 15, 45]])
EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")


def part_of(model: Any, layer: str) -> torch.Tensor:  # noqa: ANN401
    """What a model has as the weight of an expert's layer, by its name in the checkpoint."""
    match = EXPERT.fullmatch(layer)
    assert match is not None
    inside, down = model.get_submodule(f"{match[1]}.mlp.experts"), match[3] in ("down_proj", "w2")
    up, expert = match[3] in ("up_proj", "w3"), int(match[2])
    if isinstance(inside, QuantizedExperts):
        both = (inside.down_proj if down else inside.gate_up_proj)[expert].weight
        whole = both.dequantize(torch.float32)
        return whole if down else whole[up::2]
    joined: torch.Tensor = (inside.down_proj if down else inside.gate_up_proj)[expert]
    return joined if down else joined.chunk(2)[up]


@torch.no_grad()
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_mixture_loads_whole_generates_and_is_saved(
    tmp_path: Path, name: str, shards: int
) -> None:
    """Gate in the place of up, an expert in the place of another, or one that stays random; and
    experts in 16 bits, which take four times the memory.
    """
    from transformers import AutoModelForCausalLM

    weights = write(tmp_path / "given", name, shards)
    found = warploom.load_checkpoint(
        tmp_path / "given", attn_implementation="eager", dtype=torch.float32
    )
    classes: Any = AutoModelForCausalLM
    other = classes.from_config(found.config, attn_implementation="eager", dtype=torch.float32)
    other.eval()
    other.load_state_dict(found.state_dict(), strict=False)  # what is in 16 bits
    count = 0
    for layer, weight in weights.items():
        if EXPERT.fullmatch(layer):
            part = part_of(found, layer)
            assert torch.equal(part, weight.float()), layer
            part_of(other, layer).copy_(part)
            count += 1
        else:
            assert isinstance(found.get_submodule(layer), QuantizedLinear)
            other.get_submodule(layer).weight.copy_(weight)
    assert count == 2 * 4 * 3  # of layers, experts and parts
    mixtures = [one for one in found.modules() if isinstance(one, QuantizedExperts)]
    assert len(mixtures) == 2
    ours, theirs = found(IDS).logits, other(IDS).logits
    assert (ours - theirs).norm() <= 2**-16 * theirs.norm()
    assert found.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 10)
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    expected, state = found.state_dict(), again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], one) for key, one in expected.items())
    assert torch.equal(again(IDS).logits, found(IDS).logits)


@torch.no_grad()
def test_quantized_experts_of_a_checkpoint_run_as_grouped_gemms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, each expert costs two launches, and the host waits for the device."""
    write(tmp_path, "awq, Qwen")
    found = warploom.load_checkpoint(tmp_path, attn_implementation="eager")
    exact = found(IDS).logits
    called = []

    def grouped(*args: Any, **options: Any) -> torch.Tensor:
        called.append(args[3].shape)
        return experts(*args, **options)

    monkeypatch.setattr("warploom.integrations.checkpoints.experts.refusal", lambda *_: None)
    monkeypatch.setattr("warploom.integrations.checkpoints.experts.experts", grouped)
    ours = found(IDS).logits
    assert called == [(4, 256, 128)] * 2
    assert (ours - exact).float().norm() <= 2**-5 * exact.float().norm()


@torch.no_grad()
@pytest.mark.parametrize("gate", ["silu", "quick_gelu"])
def test_scales_of_all_experts_at_once_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """transformers saves fp8 so. Read for each expert, they take as many times the reading."""
    write(tmp_path, "fp8 in blocks, Qwen", hidden_act=gate)
    expected = warploom.load_checkpoint(tmp_path).state_dict()

    def join(tensors: dict[str, torch.Tensor]) -> None:
        keys = [key for key in tensors if ".experts." in key and key.endswith("_scale_inv")]
        own = {key: tensors.pop(key) for key in keys}
        for layers in {key.rpartition(".experts.")[0] for key in keys}:
            of = [
                [own[f"{layers}.experts.{i}.{part}_proj.weight_scale_inv"] for i in range(4)]
                for part in ("gate", "up", "down")
            ]
            both = torch.cat((torch.stack(of[0]), torch.stack(of[1])), 1)
            tensors[f"{layers}.experts.gate_up_proj_scale_inv"] = both
            tensors[f"{layers}.experts.down_proj_scale_inv"] = torch.stack(of[2])

    change(tmp_path, join)
    read: list[str] = []
    get = Shards.__getitem__

    def noting(shards: Shards, key: str) -> torch.Tensor:
        read.append(key)
        return get(shards, key)

    monkeypatch.setattr(Shards, "__getitem__", noting)
    found = warploom.load_checkpoint(tmp_path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], one) for key, one in expected.items())
    joined = [key for key in read if key.endswith("_proj_scale_inv")]
    assert len(joined) == len({*joined}) == 2 * 2  # of layers and parts


@torch.no_grad()
@pytest.mark.parametrize("why", ["a gate without a kernel", "gate and up of two formats"])
def test_experts_that_cannot_stay_quantized_are_dequantized(tmp_path: Path, why: str) -> None:
    """Refused, such checkpoints would not load; quantized, they would have another gate."""
    if why == "a gate without a kernel":
        weights = write(tmp_path, "compressed-tensors, Mixtral", hidden_act="quick_gelu")
    else:
        weights = write(tmp_path, "compressed-tensors, Mixtral")

        def widen(tensors: dict[str, torch.Tensor]) -> None:
            for key in [key for key in tensors if ".experts.1.w3." in key]:
                layer, _, own = key.rpartition(".")
                scales = tensors.pop(key)
                if own == "weight_scale":
                    tensors[f"{layer}.weight"] = torch.ones(256, 128, dtype=torch.int8)
                    tensors[f"{layer}.weight_scale"] = scales
                    weights[layer] = scales.double().repeat_interleave(64, 1)

        change(tmp_path, widen)
        configure(tmp_path, format="mixed-precision", config_groups=_two_formats())
    found = warploom.load_checkpoint(tmp_path, dtype=torch.float32)
    assert not any(isinstance(one, QuantizedExperts) for one in found.modules())
    for layer, weight in weights.items():
        if EXPERT.fullmatch(layer):
            assert torch.equal(part_of(found, layer), weight.float()), layer


def _two_formats() -> dict[str, Any]:
    """A scheme for most layers, and another for one half of what becomes one."""
    (group,) = EXPERTS["compressed-tensors, Mixtral"].config["config_groups"].values()
    wide = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}
    other = {"targets": [r"re:.*block_sparse_moe\.experts\.1\.w3$"], "weights": wide}
    return {"group_0": group, "group_1": other}


@pytest.mark.parametrize("lost", ["down_proj", "3"])
def test_experts_that_are_not_whole_are_refused_by_name(tmp_path: Path, lost: str) -> None:
    write(tmp_path, "awq, Qwen")
    inside = re.compile(rf"layers\.1\.mlp\.experts\.{'3' if lost == '3' else '2'}\.")
    part = "" if lost == "3" else f".{lost}."

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if inside.search(key) and part in key]:
            del tensors[key]

    change(tmp_path, drop)
    told = "3 experts up to 2 .*must be the model's 4" if lost == "3" else r"experts\.2\.down_proj"
    with pytest.raises(ProblemError, match=f"(?s)layers.1.mlp.*{told}"):
        warploom.load_checkpoint(tmp_path)


def test_what_is_wrong_in_up_is_not_told_of_gate_alone(tmp_path: Path) -> None:
    write(tmp_path, "awq, Qwen")
    up = "model.layers.1.mlp.experts.2.up_proj"
    change(tmp_path, lambda tensors: tensors[f"{up}.scales"].fill_(float("nan")))
    told = rf"gate_proj and {re.escape(up)}, whose rows take turns: scale nan of row 1"
    with pytest.raises(ProblemError, match=told):
        warploom.load_checkpoint(tmp_path)


def test_experts_of_another_kind_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, "awq, Qwen")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".experts." in key]:
            tensors[key.replace("up_proj", "fc1")] = tensors.pop(key)

    change(tmp_path, rename)
    with pytest.raises(ProblemError, match="quantized experts with down_proj, fc1, gate_proj"):
        warploom.load_checkpoint(tmp_path)


def test_what_a_model_keeps_in_fp32_is_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of DeepSeek-V3 choose other experts by a bias in bf16."""
    from transformers import Qwen3MoePreTrainedModel

    write(tmp_path, "awq, Qwen")
    key = "model.layers.1.mlp.gate.weight"
    wanted = torch.rand(4, 128)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = wanted[: len(tensors[key]), : tensors[key].shape[1]].clone()

    change(tmp_path, widen)
    found = warploom.load_checkpoint(tmp_path, dtype=torch.bfloat16).get_parameter(key)
    assert found.dtype == torch.bfloat16
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_keep_in_fp32_modules_strict", ["gate.weight"])
    model = warploom.load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.get_parameter(key), wanted)
    assert model.lm_head.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_ids_of_no_expert_are_skipped_whatever_weights_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, weights of all experts were read behind the last: a context that is lost."""

    def layers(n: int, k: int) -> list[QuantizedLinear]:
        weights = (
            warploom.quantize(torch.randn(n, k).bfloat16(), "int4", group=32) for _ in "1234"
        )
        return [QuantizedLinear.from_packed(one) for one in weights]

    torch.manual_seed(0)
    mixture = QuantizedExperts(layers(128, 64), layers(64, 64), alpha=1.25, limit=0.5)
    ids = torch.tensor([[0, 4], [1, 2], [4, 4], [-1, 3], [2, 0]])
    hidden, weights = torch.randn(5, 64).bfloat16(), torch.rand(5, 4)
    alone = mixture(hidden, ids, weights)  # on a CPU one by one
    monkeypatch.setattr("warploom.integrations.checkpoints.experts.refusal", lambda *_: None)
    listed = weights.gather(1, ids.clamp(0, 3))
    results = mixture(hidden, ids, weights)
    assert torch.equal(results, mixture(hidden, ids, listed)) and not results[2].any()
    assert (results - alone).float().norm() <= 2**-6 * alone.float().norm()
