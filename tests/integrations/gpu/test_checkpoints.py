"""Whole checkpoints on a GPU: loaded there, quantized there, saved, and run by kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import CHECKPOINTS, SIZES, write
from tiny_models import VOCABULARY, model

import warploom
from warploom.nn import QuantizedLinear

pytestmark = pytest.mark.gpu
IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two models have the same state, bit for bit, wherever they are."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[key].dtype == value.dtype and torch.equal(ours[key].cpu(), value.cpu())
        for key, value in theirs.items()
    )


def logits(speaking: Any, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ANN401
    """Of a model; in `dtype` its quantized layers are computed by torch."""
    speaking = speaking if dtype is None else speaking.to(dtype)
    found: torch.Tensor = speaking(IDS.to(speaking.device)).logits.float()
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_loads_generates_and_is_saved_on_a_gpu(tmp_path: Path, name: str) -> None:
    """A layer packed otherwise than on a CPU, read wrong by a kernel, a tensor left behind."""
    from transformers import AutoModelForCausalLM

    write(tmp_path / "given", name)
    found = warploom.load_checkpoint(tmp_path / "given", device="cuda", attn_implementation="eager")
    there = warploom.load_checkpoint(tmp_path / "given", attn_implementation="eager")
    places = {one.device.type for one in (*found.parameters(), *found.buffers())}
    assert places == {"cuda"}
    assert same(found, there)
    layer = next(one for one in found.modules() if isinstance(one, QuantizedLinear))
    x = torch.randn(16, layer.in_features).bfloat16().cuda()
    assert not warploom.explain(layer, x).torch
    tokens = found.generate(IDS.cuda(), max_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 17) and bool((tokens[:, :9].cpu() == IDS).all())
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", device_map="cuda"
    )
    assert same(again, found)
    assert torch.equal(logits(again), logits(found))
    ours, rough = logits(found).cpu(), logits(there)
    exact = logits(there, torch.float32)
    # 16 bits round alike everywhere: the GPU may be as far off as the CPU, and by chance more.
    assert (ours - exact).norm() <= 2 * (rough - exact).norm() + 2**-7 * exact.norm()


@torch.no_grad()
@pytest.mark.parametrize("format", ["int4", "uint4", "int8", "e4m3", "mxfp4", "nvfp4"])
def test_a_model_is_quantized_on_a_gpu_as_on_a_cpu(tmp_path: Path, format: str) -> None:
    from transformers import AutoModelForCausalLM

    model("Llama", "eager", **SIZES).save_pretrained(tmp_path / "given")
    found, there = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "given",
            quantization_config=warploom.WarploomConfig(format),
            attn_implementation="eager",
            device_map=device,
        )
        for device in ("cuda", "cpu")
    )
    assert {one.device.type for one in found.parameters()} == {"cuda"}
    assert same(found, there)
    found.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", device_map="cuda"
    )
    assert same(again, found)
    assert torch.equal(logits(again), logits(found))


def test_adapters_train_on_a_loaded_model(tmp_path: Path) -> None:
    """Forward and backward by kernels: gradients of adapters are near those in fp32 by torch."""
    import peft

    write(tmp_path, "awq")
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        base = warploom.load_checkpoint(
            tmp_path, device="cuda", dtype=dtype, attn_implementation="eager"
        )
        torch.manual_seed(1)
        options = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(base, options)
        adapted(input_ids=IDS.cuda(), labels=IDS.cuda()).loss.backward()
        given = [one.grad.float() for one in adapted.parameters() if one.grad is not None]
        assert len(given) == 2 * 2 * 2
        grads.append(torch.cat([one.flatten() for one in given]))
    assert (grads[0] - grads[1]).norm() <= 2**-3 * grads[1].norm()
