"""Checkpoints of mixtures whose experts were quantized one by one: Qwen's and Mixtral's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import EXPERTS, change, write

import warploom
from warploom.errors import ProblemError
from warploom.nn import QuantizedLinear

IDS = torch.tensor([[3, 9, 27, 5, 15, 45]])
EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)")


@torch.no_grad()
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_mixture_loads_whole_generates_and_is_saved(
    tmp_path: Path, name: str, shards: int
) -> None:
    """Gate in the place of up, an expert in the place of another, or one that stays random."""
    from transformers import AutoModelForCausalLM

    weights = write(tmp_path / "given", name, shards)
    found = warploom.load_checkpoint(
        tmp_path / "given", attn_implementation="eager", dtype=torch.float32
    )
    classes: Any = AutoModelForCausalLM
    other = classes.from_config(found.config, attn_implementation="eager", dtype=torch.float32)
    other.eval()
    other.load_state_dict(found.state_dict(), strict=False)  # what is in 16 bits
    experts = 0
    for layer, weight in weights.items():
        if match := EXPERT.fullmatch(layer):
            inside = found.get_submodule(f"{match[1]}.mlp.experts")
            joined = inside.down_proj if match[3] in ("down_proj", "w2") else inside.gate_up_proj
            part = joined[int(match[2])]
            if match[3] in ("gate_proj", "w1"):
                part = part[: len(part) // 2]
            elif match[3] in ("up_proj", "w3"):
                part = part[len(part) // 2 :]
            assert torch.equal(part, weight.float()), layer
            experts += 1
        else:
            assert isinstance(found.get_submodule(layer), QuantizedLinear)
            other.get_submodule(layer).weight.copy_(weight)
    assert experts == 2 * 4 * 3  # of layers, experts and parts
    ours, theirs = found(IDS).logits, other(IDS).logits
    assert (ours - theirs).norm() <= 2**-16 * theirs.norm()
    assert found.generate(IDS, max_new_tokens=4, do_sample=False).shape == (1, 10)
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(again(IDS).logits, found(IDS).logits)


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
