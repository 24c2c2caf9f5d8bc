"""Recorded calls are compiled for a GPU without the model, and no kernel is missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from stand_ins import build_many

import warploom
from warploom.cli import main
from warploom.errors import KernelMissingError
from warploom.generator import build
from warploom.generator.targets import target
from warploom.runtime import launch_plan, plan, records, targets

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    records.forget()
    plan.forget()
    yield tmp_path
    plan.forget()
    records.forget()


def product(m: int, n: int = 64, k: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(m, k, dtype=BF16), torch.ones(n, k, dtype=BF16).t()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compile", *map(str, arguments)])


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_many", build_many)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("gpu", ["h200", "h20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb:16"])
def test_recorded_calls_compile_what_they_run_on_the_gpu_that_is_named(
    gpu: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recorded on a CPU, and held against the plans of the same calls on that GPU."""
    path = folder / "calls.json"
    q = torch.ones(2, 8, 40, 128, dtype=BF16)
    k = torch.ones(2, 2, 300, 128, dtype=BF16)
    eight = torch.ones(48, 64).to(torch.float8_e4m3fn)
    packed = warploom.quantize(torch.ones(256, 512).bfloat16(), "int4", group=128)
    pages = torch.ones(40, 16, 2, 128, dtype=BF16).transpose(1, 2)
    table = torch.arange(40, dtype=torch.int32).reshape(2, 20)
    lengths = torch.tensor([300, 17], dtype=torch.int32)

    def model() -> None:
        warploom.gemm(*product(8, 1027, 96))  # of rows that TMA cannot store
        warploom.gemm(*product(512, 6144, 4096), bias=torch.ones(6144, dtype=BF16))
        warploom.gemm(eight, eight.t(), scale_a=torch.ones(48), scale_b=torch.ones(48))
        warploom.attention(q, k, k, causal="bottom_right")
        warploom.attention(q[:, :, :1], k, k)  # few rows: a kernel of decoding
        warploom.mixed_gemm(torch.ones(9, 512, dtype=BF16), packed, activation="silu")
        warploom.attention_decode(
            q[:, :, :1], pages, pages, cache_seqlens=lengths, page_table=table
        )
        new = torch.ones(2, 2, 1, 128, dtype=BF16)
        warploom.append_kv_cache(pages.clone(), pages.clone(), new, new, lengths, page_table=table)
        leaf = q.clone().requires_grad_()
        warploom.attention(leaf, k, k, deterministic=True).sum().backward()

    with warploom.recording(path) as found:
        model()
    told = json.loads(run(path, "--gpu", gpu, "--json").stdout)
    named = [row["kernel"] for row in told["problems"]]
    assert len(named) == len(found.calls) == 10
    assert told["GPU"] == target(gpu).gpu and len(told["kernels"]) == len(set(named))
    plan.forget()
    monkeypatch.setattr(targets, "at_hand", lambda device: target(gpu))
    with warploom.recording(folder / "there.json"):
        model()
    chosen = [one.choice.spec.name for one in plan.known.values()]
    assert named == chosen


@pytest.mark.usefixtures("stored")
def test_a_kernel_that_the_call_named_is_compiled_as_it_is(folder: Path) -> None:
    path = folder / "calls.json"
    spec = warploom.plan(*product(8)).choice.spec
    with warploom.recording(path):
        warploom.gemm(*product(8), spec=spec)
    told = json.loads(run(path, "--gpu", "h200", "--json").stdout)
    assert [row["kernel"] for row in told["problems"]] == [spec.name]
    assert told["problems"][0]["because"] == "the spec that was given"


@pytest.mark.usefixtures("stored")
def test_several_files_of_calls_are_compiled_together(folder: Path) -> None:
    paths = [folder / "one.json", folder / "two.json"]
    for path, m in zip(paths, (8, 600), strict=True):
        with warploom.recording(path):
            warploom.gemm(*product(m))
    told = json.loads(run(*paths, "--gpu", "h200", "--json").stdout)
    assert len(told["problems"]) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"calls": []}', "schema None: must be a list of calls of schema 1"),
        ('{"schema": 2, "calls": []}', "schema 2: must be a list"),
        ('{"schema": 1, "calls": [{}]}', "call 1: no 'operation'"),
        ('{"schema": 1}', "no calls: must be a list of calls"),
        ('{"schema": 1, "calls": [{"oper', "must be JSON"),
        ("", "must be JSON"),
        ('{"schema": 1, "calls": [3]}', "call 1: 3 must be a JSON object"),
        ('{"schema": 1, "calls": [null]}', "call 1: None must be a JSON object"),
        ('{"schema": 1, "calls": [{"kernel": 3}]}', "call 1: kernel 3 must be a word"),
        ('{"schema": 1, "calls": [{"operation": "gemm"}]}', "operation 'gemm' must be a JSON ob"),
        ('{"schema": 1, "calls": [{"operation": {"family": [1]}}]}', "family [1] must be a word"),
        ('{"schema": 1, "calls": [{"kernel": "gemm_sm90a_x"}]}', "call 1: kernel name"),
        ('{"schema": 1, "calls": [{"operation": {"family": "x"}, "shape": {}}]}', "call 1: family"),
    ],
)
def test_a_file_of_calls_that_is_damaged_is_refused_with_the_place(
    content: str, told: str, folder: Path
) -> None:
    path = folder / "calls.json"
    path.write_text(content)
    result = run(path, "--gpu", "h200")
    assert result.exit_code == 1 and told in result.stderr, result.stderr
    assert "warploom.recording" in result.stderr


def test_a_call_that_breaks_a_rule_of_its_family_is_refused_with_its_place(folder: Path) -> None:
    """A type of a that b has not was told without the file and the call."""
    path = folder / "calls.json"
    with warploom.recording(path):
        warploom.gemm(*product(8))
    path.write_text(path.read_text().replace('"a": "bf16"', '"a": "fp16"'))
    told = run(path, "--gpu", "h200").stderr
    assert "calls.json: call 1: b bf16: must be of the type of a, fp16" in told


def test_a_file_of_calls_that_is_not_there_is_named(folder: Path) -> None:
    told = run(folder / "calls.json", "--gpu", "h200").stderr
    assert "calls.json: No such file or directory: must be a file that warploom.recording" in told


def test_recorded_calls_take_no_shapes_of_the_command(folder: Path) -> None:
    path = folder / "calls.json"
    with warploom.recording(path):
        warploom.gemm(*product(8))
    for more in (["--shapes", "1x1x1"], ["--m", "4"], ["gemm"]):
        assert "recorded calls have their shapes" in run(path, *more, "--gpu", "h200").stderr
    assert "no Hopper GPU here" in run(path).stderr or torch.cuda.is_available()


# ---- Where nothing may be compiled ---------------------------------------------------------------


def test_every_kernel_that_recorded_calls_lack_is_named_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    path = folder / "calls.json"
    with warploom.recording(path) as found:
        for m in (8, 600):
            warploom.gemm(*product(m))
    result = run(path, "--gpu", "h200")
    assert result.exit_code == 1
    for one in found.calls:
        assert result.stderr.count(one.choice(target("h200")).spec.name) == 2  # told, and to copy


def test_a_call_names_the_kernels_of_both_passes_and_what_brings_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of training was stopped twice: by its forward pass, and then by the other."""
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(targets, "at_hand", lambda device: target("h200"))
    monkeypatch.setattr(launch_plan.driver, "limits", lambda device: target("h200"))
    monkeypatch.setattr("warploom.runtime.kernel._require", lambda spec, device: None)
    q = torch.ones(1, 4, 256, 64, dtype=BF16)
    with pytest.raises(KernelMissingError) as alone:
        warploom.plan_attention(q, q, q, causal=True)
    assert len(alone.value.kernels) == 1
    leaf = torch.ones(1, 4, 256, 64, dtype=BF16, requires_grad=True)
    found = warploom.recording(folder / "calls.json")
    with pytest.raises(KernelMissingError) as both, found:
        warploom.plan_attention(leaf, leaf, leaf, causal=True)
    forward, backward = both.value.kernels
    assert forward == alone.value.kernels[0] and backward.startswith("attention_backward")
    assert f"`warploom compile {forward} {backward}`" in str(both.value)
    monkeypatch.setattr(build, "build_many", build_many)
    told = json.loads(run(forward, backward, "--json").stdout)
    assert [row["name"] for row in told["kernels"]] == [forward, backward]
    assert len(found.calls) == 1  # the call that could not be made is not missed
