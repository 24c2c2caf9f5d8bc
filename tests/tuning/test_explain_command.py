"""`warploom explain` says on the command line what `warploom.explain` says of the same calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import warploom
from warploom.cli import main
from warploom.generator import families
from warploom.generator.configurations import smoke
from warploom.generator.space import operations
from warploom.generator.targets import target
from warploom.runtime import records
from warploom.runtime.families import family

BF16, GPU = torch.bfloat16, "NVIDIA H200"


@pytest.fixture(autouse=True)
def no_records_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    records.forget()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def explained(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--gpu", GPU, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["explanations"]
    return found


def meta(*extents: int) -> torch.Tensor:
    return torch.empty(extents, dtype=BF16, device="meta")


def test_a_gemm_is_explained_as_its_call_is() -> None:
    how = ["--epilogue", "bias,gelu_tanh,residual"]
    (found,) = explained("gemm", "--shapes", "4096x6144x4096", *how)
    keywords: dict[str, Any] = {"bias": meta(6144), "activation": "gelu_tanh"}
    keywords["residual"] = meta(4096, 6144)
    told = warploom.explain(meta(4096, 4096), meta(6144, 4096).t(), gpu=GPU, **keywords)
    for name in ("kernel", "reason", "grid", "stored", "seconds", "gpu"):
        assert found[name] == getattr(told, name), name
    kernels = [one.spec.name for one in told.runners_up]
    assert [one["kernel"] for one in found["runners_up"]] == kernels
    text = run("gemm", "--shapes", "4096x6144x4096", *how, "--gpu", GPU).stdout
    assert str(told) in text and text.startswith("problem  gemm_bf16")


def test_an_attention_is_explained_with_its_gradients() -> None:
    fields = ["--set", "dim=128,mask=causal", "--shapes", "1x32x8x4096"]
    (forward,) = explained("attention_forward", *fields)
    (backward,) = explained("attention_backward", *fields)
    q, k = (meta(1, 4096, heads, 128).transpose(1, 2) for heads in (32, 8))
    told = warploom.explain(q, k, k, causal=True, gpu=GPU)
    assert forward["kernel"] == told.kernel
    assert forward["gradients"]["kernel"] == told.backward == backward["kernel"]
    assert backward["grid"] > 0


@pytest.mark.parametrize("name", families.names())
def test_calls_of_every_operation_are_of_that_operation(name: str) -> None:
    """What is explained, chosen ahead of time and recorded is one and the same call."""
    shapes = {"attention_backward": "1x4x4x256", "attention_forward": "1x4x4x256"}
    shapes |= {"mixed_gemm": "64x128x256", "dequantize": "1x64x128"}
    shapes["gemm"] = "64x64x256"  # of one block along k, block scales would be those of rows
    (path,) = (path for path in smoke() if path.parent.name == name)
    seen = 0
    for operation in operations(path):
        try:
            shape = families.family(name).parse_shape(operation, shapes.get(name, "64x64x64"))
        except warploom.ProblemError:
            continue
        for call in family(name).calls(operation, shape):
            chosen = call.draft(target(GPU)).choice
            assert chosen.spec.operation.family in (name, "attention_decode")
            assert chosen.asked is not None
            if chosen.spec.operation.family == name:
                assert chosen.asked.operation == operation
            seen += 1
    assert seen or name not in (*shapes, "gemm", "mixed_gemm")


@pytest.mark.parametrize(
    ("name", "fields", "shape"),
    [
        ("gemm", "batched=true", "2x64x128x256"),
        ("attention_forward", "dim=64,mask=window", "1x4x2x256:window=64"),
    ],
)
def test_the_problem_that_a_command_prints_is_taken_by_shapes(
    name: str, fields: str, shape: str
) -> None:
    """ "2 of 64x128x256" and "batch1 heads4 ..." were refused: no shape."""
    (found,) = explained(name, "--set", fields, "--shapes", shape)
    _, _, printed = found["problem"].partition(" ")
    for text in (printed, found["problem"]):
        assert explained(name, "--set", fields, "--shapes", f" {text},") == [found]


def test_a_vector_of_one_scale_is_explained_in_both_ways() -> None:
    how = ["--set", "a=e4m3,b=e4m3", "--epilogue", "scale:row,scale:column"]
    assert len(explained("gemm", "--shapes", "1x4096x4096", *how)) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gemm"], "what to explain: must be given by one of --shapes, --model and --cells"),
        (["gemm", "--shapes", "64x64"], "shape '64x64'"),
        (["gemm", "--shapes", "64x64x64", "--gpu", "h300"], "GPU 'h300'"),
        (["nothing", "--shapes", "1x1x1"], "nothing: no such file"),
        (["gemm", "--shapes", "1x1x1", "--m", "4"], "--m with --shapes: chooses among the shapes"),
        (["gemm", "--model", "llama3-8b", "--m", "9" * 40], "must be positive numbers"),
        (["gemm", "--model", "llama3-8b", "--m", "9" * 5000], "must be positive numbers"),
        (["gemm", "--model", "llama3-8b", "--m", "\u0967"], "must be positive numbers"),
        (["gemm", "--shapes", "1x1x1", "--set", f"terms={'9' * 5000}"], "must be a plain value"),
        (["gemm", "--shapes", "1x1x1", "--set", "terms=2026-99-99"], "must be a plain value"),
        (["gemm", "--shapes", "1x1x1", "--set", "a=e4m3,a=bf16"], "a must be given once"),
        (["gemm", "--model", ""], "--model '': must be a model of"),  # was all of them
        (["gemm", "--shapes", ","], "',': must have a shape"),
        (["gemm", "--shapes", ""], "'': must have a shape"),
        (["gemm", "--shapes", "2147483647x2147483647x1"], "must have tensors of fewer than 2.63"),
        (["attention_merge", "--model", "llama3-8b"], "attention_merge: no shapes: .*--shapes"),
        (["gemm", "--shapes", "1x1x1", "--set", "layout_b=diagonal"], "'diagonal': must be one of"),
    ],
)
def test_what_cannot_be_explained_is_said(arguments: list[str], told: str) -> None:
    named = [] if "--gpu" in arguments else ["--gpu", GPU]
    result = run(*arguments, *named)
    assert result.exit_code == 1 and re.search(told, result.stderr), result.stderr
