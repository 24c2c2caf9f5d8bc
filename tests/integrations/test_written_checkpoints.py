"""Whole checkpoints as the packages themselves wrote them: checkpoints/README.md lists which.

tools/write_checkpoints.py wrote them, and what each package says the weights are.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from warploom.integrations.checkpoints.experts import QuantizedExperts
from warploom.nn import QuantizedLinear

FOLDER = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/weights.json"))
IDS = torch.randint(3, 16, (2, 9), generator=torch.Generator().manual_seed(0))
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")


def weight_of(model: Any, name: str, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
    """A weight, dequantized, by its name in the checkpoint."""
    if (match := EXPERT.fullmatch(name)) is None:
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLinear), name
        found: Tensor = layer.weight.dequantize(dtype)
        return found
    experts, part = model.get_submodule(match[1]), match[3]
    assert isinstance(experts, QuantizedExperts), name
    if part in ("down_proj", "w2"):
        down: Tensor = experts.down_proj[int(match[2])].weight.dequantize(dtype)
        return down
    both: Tensor = experts.gate_up_proj[int(match[2])].weight.dequantize(dtype)
    return both[part in ("up_proj", "w3") :: 2]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_written_checkpoint_loads_whole_generates_and_is_saved(tmp_path: Path, name: str) -> None:
    """A name, a layout or a setting that a package writes, and our own writers of tests do not."""
    from transformers import AutoModelForCausalLM

    about = json.loads((FOLDER / name / "weights.json").read_text())
    found: Any = warploom.load_checkpoint(FOLDER / name, attn_implementation="eager")
    for layer, (dtype, digest) in about["weights"].items():
        weight = weight_of(found, layer, getattr(torch, dtype)) + 0  # -0 is 0
        weight = weight.contiguous()
        own = hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
        assert own == digest, layer
    quantized = sum(isinstance(one, QuantizedLinear) for one in found.modules())
    joined = sum(EXPERT.fullmatch(layer) is not None for layer in about["weights"]) // 3
    assert quantized == len(about["weights"]) - joined
    assert found.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 13)
    found.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected, state = found.state_dict(), again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], one) for key, one in expected.items())
    assert torch.equal(again(IDS).logits, found(IDS).logits)


def test_checkpoints_of_every_package_are_there() -> None:
    writers = {
        json.loads((FOLDER / name / "weights.json").read_text())["written by"][0].split()[0]
        for name in NAMES
    }
    assert writers == {"llmcompressor", "auto-round", "gptqmodel", "autoawq", "transformers"}
