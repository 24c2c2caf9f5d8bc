"""`warploom bench --shapes` on a GPU: what is timed is verified, and torch's ways are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from warploom.cli import main

pytestmark = pytest.mark.gpu
# Scores and weights of torch's math backend are rounded to 16 bits, which the bounds do not allow;
# cuDNN's gradients pass them in some draws.
LESS_EXACT = {"sdpa, eager (math)"}
LESS_EXACT_GRADIENTS = {*LESS_EXACT, "sdpa, cuDNN"}


def cell(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "result.json"
    result = CliRunner().invoke(main, ["bench", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["machine"]["gpu"] == torch.cuda.get_device_name()
    for one in document["cells"]:  # a space may have several operations
        kernel, *baselines = one["entries"]
        assert kernel["error_share"] <= 1
        wrong = {each["contender"] for each in baselines if (each["error_share"] or 0) > 1}
        assert wrong <= (LESS_EXACT_GRADIENTS if "attention_backward" in arguments else LESS_EXACT)
    found = document["cells"][-1]
    return {one["contender"]: one for one in found["entries"]}


def test_a_gemm_with_an_epilogue_is_beside_cublas_and_torchs_compiler(tmp_path: Path) -> None:
    how = ["--epilogue", "bias,gelu_tanh,residual"]
    found = cell(tmp_path, "gemm", "--shapes", "777x1024x520", *how)
    cublas = found["torch.mm (cuBLAS), then its epilogue in eager torch"]
    assert cublas["absent"] is None and found["torch.compile"]["absent"] is None
    assert found["torch.mm (cuBLAS), without the epilogue"]["absent"] is None


@pytest.mark.parametrize(
    ("fields", "epilogue", "name"),
    [
        ("a=e4m3,b=e4m3", "scale:device,scale:device", "torch._scaled_mm (cuBLAS)"),
        ("a=e4m3,b=e4m3", "scale:row,scale:column", "torch._scaled_mm (cuBLAS)"),
        ("a=e4m3,b=e4m3", "", "torch._scaled_mm (cuBLAS)"),
        ("a=int8,b=int8,d=int32", "", "torch._int_mm (cuBLAS)"),
        ("batched=true", "", None),
    ],
)
def test_cublas_has_the_types_that_torch_has(
    fields: str, epilogue: str, name: str | None, tmp_path: Path
) -> None:
    shape = "512x1024x768" if name else "3x512x1024x768"
    more = ["--epilogue", epilogue] if epilogue else []
    found = cell(tmp_path, "gemm", "--shapes", shape, "--set", fields, *more)
    assert found[name or "torch.bmm (cuBLAS)"]["absent"] is None


@pytest.mark.parametrize("family", ["attention_forward", "attention_backward"])
def test_an_attention_is_beside_every_backend_of_torch(family: str, tmp_path: Path) -> None:
    arguments = ["--set", "dim=128,mask=causal", "--shapes", "1x8x2x1024"]
    found = cell(tmp_path, family, *arguments)
    for name in ("sdpa, cuDNN", "sdpa, FlashAttention-2"):
        assert found[name]["absent"] is None, found[name]


def test_a_window_and_a_cache_of_8_bits_are_measured_too(tmp_path: Path) -> None:
    window = ["--set", "dim=64,mask=window", "--shapes", "1x8x8x1000:window=200"]
    found = cell(tmp_path, "attention_forward", *window)
    assert found["sdpa, memory-efficient"]["absent"] is None
    cache = ["--set", "dim=128,cache=e4m3,scales=head,page=64", "--shapes", "8x32x8x1x2000"]
    decoded = cell(tmp_path, "attention_decode", *cache)
    assert any(one["seconds"] for name, one in decoded.items() if "16-bit cache" in name)


def test_a_quantized_weight_is_beside_the_dequantized_one(tmp_path: Path) -> None:
    found = cell(tmp_path, "mixed_gemm", "--shapes", "16x4096x4096")
    assert found["torch.mm (cuBLAS), bfloat16, dequantized weight"]["absent"] is None
