"""`warploom bench FAMILY|FILE --shapes ...`: any shape, verified, beside the same in torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from samplers import constant

from warploom.cli import bench_shapes, main
from warploom.cli.operations import operations_of
from warploom.errors import DeviceError
from warploom.generator import build
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.runtime import baselines, targets, trial
from warploom.runtime.contest import Cell, Entry
from warploom.tuning import bench, worker
from warploom.tuning.bench import chosen, measured
from warploom.tuning.problems import shapes_of

H200 = target("NVIDIA H200")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces functions whole, and has nothing to compile them with."""
    eager: Any = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(baselines.torch, "compile", eager)


CASES: dict[str, tuple[str, str, str, str]] = {
    "plain": ("gemm", "", "", "33x48x64"),
    "fp16": ("gemm", "a=fp16,b=fp16,d=fp16", "bias,silu", "33x48x64"),
    "epilogue": ("gemm", "", "bias,gelu_tanh,residual,scale:device", "33x48x64"),
    "outputs": ("gemm", "", "preactivation,gelu,amax", "33x48x64"),
    "batches": ("gemm", "batched=true,layout_b=row", "", "3x33x48x64"),
    "wide": ("gemm", "d=fp32", "", "33x48x64"),
    "int8": ("gemm", "a=int8,b=int8,d=int32", "", "33x48x64"),
    "int8 scaled": ("gemm", "a=int8,b=int8", "scale:row,scale:column", "33x48x64"),
    "weights": ("mixed_gemm", "", "bias,residual", "5x128x256"),
    "weights per channel": ("mixed_gemm", "b=e4m3,group=0,scale=fp32", "", "5x128x256"),
    "attention": ("attention_forward", "dim=64", "", "2x4x2x40"),
    "window": ("attention_forward", "dim=64,mask=window", "", "2x4x2x40:window=7"),
    "bottom right": ("attention_forward", "dim=64,mask=causal", "", "1x4x2x5x40"),
    "gradients": ("attention_backward", "dim=64", "", "2x4x2x40"),
    "windowed gradients": ("attention_backward", "dim=64,mask=window", "", "2x4x2x40:window=7"),
    "decoding": ("attention_decode", "dim=64,page=0,cache=same,scales=none", "", "3x4x2x1x96"),
    "pages": ("attention_decode", "dim=64,page=16,mask=causal", "", "3x4x2x2x90"),
    "an e4m3 cache": (
        "attention_decode",
        "dim=64,page=64,mask=none,cache=e4m3,scales=head",
        "",
        "3x4x2x1x96",
    ),
    "appending": ("attention_append", "dim=64", "", "8x2x4"),
    "merging": ("attention_merge", "", "", "100"),
    "quantizing": ("attention_quantize", "dim=64,smooth=true", "", "2x4x2x40x150"),
    "activation": ("activation_backward", "", "", "40x64"),
}
RIGHT = {  # what torch computes on a CPU, where it has no cuDNN and no fp8
    "gemm": "cuBLAS",
    "mixed_gemm": "dequantized weight",
    "attention_forward": "math",
    "attention_backward": "math",
    "attention_decode": "math",
    "attention_append": "eager",
    "attention_merge": "torch.compile",
    "attention_quantize": "torch.compile",
    "activation_backward": "torch.compile",
}


def cells(name: str, fields: str, epilogue: str, written: str) -> list[Cell]:
    pairs = [tuple(one.split("=")) for one in fields.split(",") if one]
    found = []
    for operation in operations_of(Path(name), pairs, epilogue):  # type: ignore[arg-type]
        (shape,) = shapes_of(operation, [written], None, ())
        choice = chosen(operation, shape, H200)
        options: dict[str, Any] = {"device": "cpu", "sampler": constant(1e-6), "rounds": 2}
        found.append(measured(operation, shape, choice, **options))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_measured_beside_the_same_in_torch(case: str) -> None:
    """On the CPU, where a reference stands for the kernel: what torch returns is as it is."""
    name, *how = CASES[case]
    for cell in cells(name, *how):
        ours, *others = cell.entries
        assert ours.contender == "warploom" and (ours.error_share or 0) <= 1
        assert cell.verdict in ("won", "tied", "lost"), [one.absent for one in others]
        wrong = [one for one in others if one.seconds is not None and not one.right]
        assert wrong == []
        measured_ones = [one.contender for one in others if one.seconds is not None]
        absent = {one.contender: one.absent for one in others}
        assert any(RIGHT[name] in one for one in measured_ones), absent
        if name in ("gemm", "mixed_gemm"):
            assert "torch.compile" in measured_ones, [one.absent for one in others]


def test_a_kernel_that_is_wrong_makes_the_cell_wrong_and_so_does_no_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from warploom.runtime.families.gemm import reference

    real: Callable[..., torch.Tensor] = reference.gemm
    monkeypatch.setattr(reference, "gemm", lambda *given: real(*given) + 1)
    (cell,) = cells("gemm", "", "", "33x48x64")
    assert cell.verdict == "wrong"
    monkeypatch.undo()
    plain = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: plain(a, b) + 8)
    (cell,) = cells("gemm", "", "", "33x48x64")
    assert not any(one.right for one in cell.entries if "cuBLAS" in one.contender)
    assert cell.entries[0].right


@pytest.mark.parametrize("case", ["epilogue", "weights", "activation", "merging"])
def test_what_is_compiled_serves_all_sets_of_buffers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond eight compilations torch runs the rest in eager mode, and says nothing of it."""
    from torch._dynamo import config

    monkeypatch.setattr(trial, "sets_for", lambda size, device: 3)
    for name in ("gemm.samples", "attention_forward.trial", "attention_backward.trial"):
        module = f"warploom.runtime.families.{name}.sets_for"
        monkeypatch.setattr(module, lambda size, device: 3)
    monkeypatch.setattr("warploom.runtime.sampled.sets_for", lambda size, device: 3)
    name, *how = CASES[case]
    with config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        measured_ones = cells(name, *how)
    for cell in measured_ones:
        found = {one.contender: one for one in cell.entries}
        assert found["torch.compile"].absent is None


def test_a_problem_that_memory_has_no_room_for_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("warploom.runtime.families.gemm.samples.GemmTrial.operands", full)
    with pytest.raises(DeviceError, match=r"33x48x64: CUDA out of memory.*must fit the GPU's"):
        cells("gemm", "", "", "33x48x64")


def test_what_torch_has_no_argument_for_is_absent_with_the_reason() -> None:
    fields = "dim=64,mask=causal,lengths=packed"
    (cell,) = cells("attention_forward", fields, "", "2x4x2x40:total=60")
    assert {one.absent for one in cell.entries[1:]} == {"torch's sdpa takes no varlen sequences"}
    assert cell.verdict == "absent"
    (capped,) = cells("attention_forward", "dim=64,mask=none,softcap=true", "", "2x4x2x40")
    told = {one.contender: one.absent for one in capped.entries}
    assert told["sdpa, cuDNN"] == "torch's sdpa has no softcap"


# ---- The command ---------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is pretended: calls run on the CPU, and kernels are only named."""
    built: list[str] = []

    def build_many(specs: Sequence[KernelSpec], *, on_done: object) -> list[None]:
        built.extend(spec.name for spec in specs)
        return [None for _ in specs]

    monkeypatch.setattr(worker, "about", lambda: {"gpu": "NVIDIA H200", "multiprocessors": 132})
    monkeypatch.setattr(worker, "warm", lambda ready: None)
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    monkeypatch.setattr(build, "build_many", build_many)
    options: dict[str, Any] = {"device": "cpu", "sampler": constant(2e-6), "rounds": 2}
    monkeypatch.setattr(bench, "measured", partial(measured, **options))
    return built


def test_a_family_alone_is_enough_and_the_result_goes_to_a_file(
    gpu: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    result = run("gemm", "--shapes", "33x48x64, 16x64x32", "--json", path)
    assert result.exit_code == 0, result.output
    assert "GPU: NVIDIA H200" in result.stdout and "torch.mm (cuBLAS)" in result.stdout
    assert len(re.findall("^problem ", result.stdout, re.MULTILINE)) == 2
    assert re.search(r"tied: fastest baseline / Warploom 1\.000", result.stdout)
    document = json.loads(path.read_text())
    assert [cell["problem"]["shape"] for cell in document["cells"]] == ["33x48x64", "16x64x32"]
    assert document["machine"]["gpu"] == "NVIDIA H200"
    assert [cell["entries"][0]["kernel"] for cell in document["cells"]] == gpu


def test_a_file_and_an_epilogue_say_which_operation(gpu: list[str], tmp_path: Path) -> None:
    path = tmp_path / "linear.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: fp16, b: fp16, d: fp16}]\n"
        "    schedules: [{tile: [64, 64, 64]}]\n"
    )
    result = run(path, "--shapes", "33x48x64", "--epilogue", "bias,gelu")
    assert result.exit_code == 0, result.output
    assert "gemm_fp16_fp16_fp16_row_col_fast_bias_fp16_gelu" in result.stdout
    assert "without the epilogue" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gemm", "mixed_gemm"], "must be of one family or configuration"),
        ([], "--shapes with no name"),
        (["gemms"], "gemms: no such file: .*did you mean gemm"),
        (["gemm", "--cells", "llm"], "--cells with --shapes"),
        (["gemm", "--ray"], "--ray with --shapes"),
        (["gemm", "--set", "e=1"], "--set e=1: gemm has the fields a, b, d"),
        (["gemm", "--set", "a"], "'a': must be FIELD=VALUE"),
        (["gemm", "--set", "a=e4m3"], "gemm with a=e4m3: b bf16: must be of the type of a"),
        (["gemm", "--set", "a=bf17"], "a 'bf17': must be one of"),
        (["gemm", "--epilogue", "bais"], "--epilogue 'bais': must be one of .*did you mean bias"),
        (["gemm", "--epilogue", "scale:foo"], "by 'foo': must be one of.*: change --epilogue"),
        (["gemm", "--epilogue", "amax:row"], "'amax:row': amax takes no value"),
        (["gemm", "--epilogue", "gelu:tanh"], "'gelu:tanh': gelu takes no value.*write gelu alone"),
        (["gemm", "--json", "/proc/none/result.json"], "/proc/none"),
        (["attention_forward", "--epilogue", "bias"], "attention_forward has no epilogue"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    arguments: list[str], told: str, gpu: list[str]
) -> None:
    result = run(*arguments, "--shapes", "1x1x1")
    assert result.exit_code == 1 and re.search(told, result.stderr), result.stderr
    assert gpu == []


def test_a_configuration_may_come_from_standard_input(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` was the name of a file that there is not."""
    path = tmp_path / "linear.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        "  - operations: [{family: gemm, a: fp16, b: fp16, d: fp16}]\n"
        "    schedules: [{tile: [64, 64, 64]}]\n"
    )
    monkeypatch.setattr(bench_shapes, "STANDARD_INPUT", path)
    result = run("-", "--shapes", "33x48x64", "--json", tmp_path / "new" / "result.json")
    assert result.exit_code == 0, result.output
    assert "gemm_fp16" in result.stdout and (tmp_path / "new" / "result.json").is_file()


def test_fields_without_shapes_are_refused() -> None:
    assert "--set without --shapes" in run("gemm", "--set", "d=fp32").stderr
    assert "--epilogue without --shapes" in run("gemm", "--epilogue", "bias").stderr


def test_the_time_of_a_wrong_kernel_is_no_part_of_the_mean(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([9.0, 0.5])

    def made(*_: object) -> Cell:
        ours = Entry("warploom", 1e-6, 0.01, "kernel", next(shares))
        return Cell("problem", {}, (ours, Entry("cuBLAS", 2e-6, 0.01)))

    monkeypatch.setattr(bench, "measured", made)
    result = run("gemm", "--shapes", "33x48x64", "-q")
    assert result.exit_code == 3 and "mean" not in result.stdout
    result = run("gemm", "--shapes", "33x48x64", "-q")
    assert result.exit_code == 0 and "Warploom, mean: 2" in result.stdout


def test_a_wrong_kernel_and_one_that_cannot_run_have_exit_codes_of_their_own(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.runtime.families.gemm import reference

    real: Callable[..., torch.Tensor] = reference.gemm
    with monkeypatch.context() as patch:
        patch.setattr(reference, "gemm", lambda *given: real(*given) + 1)
        result = run("gemm", "--shapes", "33x48x64")
        assert result.exit_code == 3 and "verdict  wrong: an error of" in result.stdout

    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(reference, "gemm", failing)
    result = run("gemm", "--shapes", "33x48x64")
    assert result.exit_code == 4 and "absent   Warploom: no memory" in result.stdout
