"""What is compiled ahead of time for a GPU is what calls there run, and nothing is missing."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from stand_ins import build_many, no_compiler

import warploom
from warploom.cli import main
from warploom.errors import KernelMissingError
from warploom.generator import build
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import parse_name
from warploom.generator.store import Store
from warploom.runtime import driver, plan, records, targets
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.families.gemm.api import GemmPlan

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
Call = Callable[..., Any]  # of an operation, given its extents: a plan of it


def empty(*extents: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*extents, dtype=dtype)


def linear(dtype: torch.dtype, **keywords: Any) -> Call:
    return lambda m, n, k: warploom.plan(
        empty(m, k, dtype=dtype), empty(n, k, dtype=dtype).t(), **keywords
    )


def fused(m: int, n: int, k: int) -> GemmPlan:
    keywords: dict[str, Any] = {"bias": empty(n), "activation": "gelu_tanh"}
    return warploom.plan(empty(m, k), empty(n, k).t(), **keywords, residual=empty(m, n))


def scaled(m: int, n: int, k: int) -> GemmPlan:
    a, b = empty(m, k, dtype=E4M3), empty(n, k, dtype=E4M3).t()
    return warploom.plan(a, b, scale_a=torch.empty(m), scale_b=torch.empty(n))


GEMMS: dict[str, Call] = {
    "a: bf16, b: bf16, d: bf16": linear(BF16),
    "a: bf16, b: bf16, d: fp32": linear(BF16, out_dtype=torch.float32),
    "a: bf16, b: bf16, d: bf16, layout_b: row": lambda m, n, k: warploom.plan(
        empty(m, k), empty(k, n)
    ),
    "a: bf16, b: bf16, d: bf16, layout_a: col, layout_b: row": lambda m, n, k: warploom.plan(
        empty(k, m).t(), empty(k, n)
    ),
    "a: bf16, b: bf16, d: bf16, epilogue: [{step: bias, element: bf16}, {step: activation, "
    "function: gelu_tanh}, {step: residual, element: bf16}]": fused,
    "a: e4m3, b: e4m3, d: bf16": linear(E4M3),
    "a: e4m3, b: e4m3, d: bf16, accumulation: promoted": linear(E4M3, accumulation="promoted"),
    "a: e4m3, b: e4m3, d: bf16, epilogue: [{step: scale, by: row}, {step: scale, by: column}]": (
        scaled
    ),
    "a: int8, b: int8, d: int32": linear(INT8),
}


def attend(**keywords: Any) -> Call:
    """A plan of an attention over fixed lengths, of tensors that lie as a model's."""

    def call(batch: int, heads: int, kv_heads: int, seq: int, dim: int) -> AttentionPlan:
        q, k, v = (empty(batch, seq, h, dim).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
        return warploom.plan_attention(q, k, v, **keywords)

    return call


def packed(batch: int, heads: int, kv_heads: int, seq: int, dim: int) -> AttentionPlan:
    total = batch * seq // 2 + seq // 2
    ends = torch.full((batch + 1,), total, dtype=torch.int32)
    given: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    given |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), seq)
    q, k = empty(total, heads, dim), empty(total, kv_heads, dim)
    return warploom.plan_attention(q, k, k, causal=True, **given)


ATTENTIONS: dict[str, tuple[Call, str]] = {
    "": (attend(), ""),
    ", mask: causal": (attend(causal=True), ""),
    ", mask: causal, softcap: true": (attend(causal=True, softcap=20.0), ""),
    ", mask: window": (attend(window=(99, 0)), ":window=100"),
    ", mask: causal, lengths: packed": (packed, ":total={total}"),
}


@pytest.fixture(autouse=True)
def as_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are planned for as if they were on an H200 where nothing may be compiled."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    records.forget()
    at_hand = targets.at_hand
    monkeypatch.setattr(driver, "limits", lambda device: DeviceLimits(132, "NVIDIA H200"))
    monkeypatch.setattr(targets, "at_hand", lambda device: at_hand(0))
    monkeypatch.setattr(build, "build_many", build_many)
    plan.forget()
    yield
    plan.forget()
    records.forget()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compile", *map(str, arguments)])


def kernels(path: Path, shapes: Sequence[str], *arguments: str) -> list[str]:
    """What the command says that calls of each shape run."""
    result = run(path, "--shapes", ",".join(shapes), "--gpu", "h200", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [row["kernel"] for row in json.loads(result.stdout)["problems"]]


def configuration(folder: Path, operation: str, schedule: str) -> Path:
    path = folder / "called.yaml"
    path.write_text(
        "version: 1\narch: sm_90a\nkernels:\n"
        f"  - operations: [{{{operation}}}]\n    schedules: [{{{schedule}}}]\n"
    )
    return path


def drawn(seed: str, *extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes that nobody chose."""
    source = random.Random(seed)
    return list(dict.fromkeys(tuple(map(source.choice, extents)) for _ in range(12)))


ROWS = (1, 2, 7, 16, 33, 100, 128, 250, 512, 777, 1000, 2048, 5000)
COLUMNS = (64, 96, 100, 256, 1000, 1027, 1280, 2112, 4096, 6144, 28672)
DEPTHS = (1, 64, 96, 500, 1024, 2048, 4096, 7168, 14336)


@pytest.mark.parametrize("operation", GEMMS)
def test_products_run_what_was_compiled_for_them(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes were compiled by what a file named, and calls ran other kernels."""
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    eight = "e4m3" in operation or "int8" in operation
    tile = f"tile: [128, 128, {128 if eight else 64}], store: direct"
    path = configuration(tmp_path, f"family: gemm, {operation}", tile)
    extents = drawn(operation, ROWS, COLUMNS, DEPTHS)
    named = kernels(path, ["x".join(map(str, shape)) for shape in extents])
    called = [GEMMS[operation](*shape).choice.spec.name for shape in extents]
    if "by: row" in operation:  # of one row, there are two
        assert set(called) <= set(named)
    else:
        assert named == called
    assert len(set(named)) > 3
    assert_found_without_a_compiler(named, monkeypatch)


def test_one_row_is_compiled_with_its_scale_as_a_vector_and_as_a_number(tmp_path: Path) -> None:
    """What a keyword of one element says is a number: the kernel for that was missing."""
    (operation,) = (text for text in GEMMS if "by: row" in text)
    path = configuration(tmp_path, f"family: gemm, {operation}", "tile: [128, 128, 128]")
    by_keyword, by_list = kernels(path, ["1x4096x4096"])
    assert scaled(1, 4096, 4096).choice.spec.name == by_keyword
    a, b = empty(1, 4096, dtype=E4M3), empty(4096, 4096, dtype=E4M3).t()
    items = [("scale_row", torch.empty(1)), ("scale_column", torch.empty(4096))]
    assert warploom.plan(a, b, epilogue=items).choice.spec.name == by_list


@pytest.mark.parametrize("operation", ATTENTIONS)
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_attentions_and_their_gradients_run_what_was_compiled_for_them(
    operation: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    call, more = ATTENTIONS[operation]
    extents = drawn(f"{operation} {dim}", (1, 2, 5), (8, 16), (1, 2, 8), (100, 512, 1500, 4096))
    shapes = []
    for batch, heads, kv_heads, seq in extents:
        total = batch * seq // 2 + seq // 2
        shapes.append(f"{batch}x{heads}x{kv_heads}x{seq}" + more.format(total=total))
    schedules = {"forward": "q_tile: 64, kv_tile: 64", "backward": "q_tile: 64, kv_tile: 64"}
    plans = [call(*shape, dim) for shape in extents]
    expected = {
        "forward": [plan.choice for plan in plans],
        "backward": [plan.backward_choice(False, None) for plan in plans],
    }
    for which, schedule in schedules.items():
        entry = f"family: attention_{which}, element: bf16, dim: {dim}{operation}"
        named = kernels(configuration(tmp_path, entry, schedule), shapes)
        assert named == [choice.spec.name for choice in expected[which]]
        assert_found_without_a_compiler(named, monkeypatch)


def assert_found_without_a_compiler(named: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVRTC has every kernel from the store alone, and no other."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "find", no_compiler)
        for name in set(named):
            assert build.build(parse_name(name)).name == name
        with pytest.raises(KernelMissingError):
            build.build(parse_name(named[0]), Store(None))


def test_another_compiler_at_the_calls_changes_nothing_where_compiling_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded shape was hinted at instead of decided by where NVRTC was of another version."""
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    monkeypatch.setattr(records, "nvrtc", lambda: "13.9")
    path = configuration(tmp_path, "family: gemm, a: bf16, b: bf16, d: bf16", "tile: [64, 64, 64]")
    (named,) = kernels(path, ["512x6144x4096"])
    planned = linear(BF16)(512, 6144, 4096)
    assert planned.choice.spec.name == named and planned.choice.reason.startswith("recorded")


def test_without_a_name_it_is_the_gpu_of_this_machine_if_kernels_are_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    here = run("gemm", "--shapes", "512x6144x4096", "--json")
    named = run("gemm", "--shapes", "512x6144x4096", "--gpu", "NVIDIA H200", "--json")
    assert json.loads(here.stdout)["problems"] == json.loads(named.stdout)["problems"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "no Hopper GPU here" in run("gemm", "--shapes", "512x6144x4096").stderr


def test_a_model_is_compiled_at_its_tuned_rows_or_those_that_are_asked_for() -> None:
    told = json.loads(run("gemm", "--model", "llama3-8b", "--gpu", "h200", "--json").stdout)
    assert told["GPU"] == "NVIDIA H200" and len(told["problems"]) == 4 * 9
    assert all(row["because"].startswith("recorded") for row in told["problems"])
    names = [row["name"] for row in told["kernels"]]
    assert len(set(names)) == len(names) and set(names) == {x["kernel"] for x in told["problems"]}
    few = run("gemm", "--model", "llama3-8b", "--m", "1,512", "--gpu", "h200", "--json")
    assert len(json.loads(few.stdout)["problems"]) == 4 * 2


def test_serving_is_all_that_a_model_runs_at_so_many_sequences() -> None:
    """What is left out would be compiled by the first call that needs it, while others wait."""
    asked = ["--serving", "--model", "llama3-8b", "--gpu", "h200", "--json"]
    told = json.loads(run(*asked).stdout)
    problems = [row["problem"] for row in told["problems"]]
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        assert [x for x in problems if f" 1x{n}x{k}" in x and "gemm" in x], (n, k)
        assert [x for x in problems if f" 256x{n}x{k}" in x and "gemm" in x], (n, k)
    assert {row["kernel"] for row in told["problems"]} == {row["name"] for row in told["kernels"]}
    few = json.loads(run(*asked, "--m", "4").stdout)["problems"]
    assert 0 < len(few) < len(problems)


def steps(batch: int, keys: int, page: int) -> Iterator[Any]:
    """Calls of a step of a Llama 3 8B, as engines and transformers make them; memory of none."""
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    q = torch.empty(batch, 32, 1, 128, dtype=BF16, device="meta")
    new = torch.empty(batch, 8, 1, 128, dtype=BF16, device="meta")
    angles = torch.empty(keys, 64, device="meta")
    table = torch.empty(batch, -(-keys // page), dtype=torch.int32, device="meta")
    for dtype, pages in itertools.product((BF16, E4M3), (None, table)):
        entries, rows = (batch, keys) if pages is None else (batch * table.shape[1], page)
        cache = torch.empty(entries, rows, 8, 128, dtype=dtype, device="meta").transpose(1, 2)
        yield AttentionDecodeCall(q, cache, cache, cache_seqlens=lengths, page_table=pages)
        yield AttentionAppendCall(cache, cache, new, new, lengths, page_table=pages)
        if dtype == E4M3:
            scales = dict.fromkeys(("scale_k", "scale_v"), torch.empty(8, device="meta"))
            yield AttentionDecodeCall(
                q, cache, cache, cache_seqlens=lengths, page_table=pages, **scales
            )
            yield AttentionAppendCall(cache, cache, new, new, lengths, page_table=pages, **scales)
            continue
        if pages is None:
            yield AttentionDecodeCall(q, cache, cache, cache_seqlens=lengths, cache_leftpad=lengths)
        for cos, interleaved in itertools.product((angles, angles.bfloat16()), (False, True)):
            turned = {"q": q, "cos": cos, "sin": cos, "interleaved": interleaved}
            yield AttentionAppendCall(cache, cache, new, new, lengths, page_table=pages, **turned)


def test_no_length_of_a_cache_asks_for_a_kernel_that_serving_did_not_build() -> None:
    """Tables of schedules have classes of lengths: one of them that was left out compiles late."""
    told = json.loads(run("--serving", "--model", "llama3-8b", "--gpu", "h200", "--json").stdout)
    built = {row["name"] for row in told["kernels"]}
    drawn, target = random.Random(0), targets.ahead_of_time("h200")
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for keys in (2048, int(2 ** drawn.uniform(5, 17))):
            for call in steps(batch, keys, drawn.choice((16, 32, 64, 128, 256))):
                assert call.draft(target).choice.spec.name in built, (batch, keys, call)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu", "h200"], "no FILE: must be a FILE, or --serving and the --model"),
        (["--model", "llama3-8b", "--gpu", "h200"], "no FILE: must be a FILE, or --serving"),
        (["gemm", "--serving", "--model", "llama3-8b"], "--serving with FILE"),
        (["--serving", "--gpu", "h200"], "must be a FILE, or --serving and the --model"),
        (["--serving", "--model", "gpt", "--gpu", "h200"], "model 'gpt'"),
        (["gemm"], "gemm without shapes: must be a file"),
        (["{file}", "--gpu", "h200"], "--gpu without shapes"),
        (["{file}", "--m", "16"], "--m without shapes"),
        (["gemm", "--shapes", "64x64x64"], "no Hopper GPU here: .*must be named: .*, NVIDIA H200"),
        (["gemm", "--shapes", "64x64x64", "--gpu", "h300"], "GPU 'h300': must be one"),
        (["gemm", "--shapes", "64x64", "--gpu", "h200"], "shape '64x64'"),
        (["gemm", "--shapes", "1x1x1", "--cells", "--gpu", "h200"], "must be given by one of"),
        (["gemm", "--model", "gpt", "--gpu", "h200"], "model 'gpt'"),
        (["gemm", "--shapes", "1x1x1", "--gpu", "h200", "--arch", "sm_90a"], "--arch sm_90a with"),
    ],
)
def test_what_cannot_be_compiled_ahead_is_said_before_anything_is(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(build, "build_many", lambda *_, **__: pytest.fail("built"))
    path = configuration(tmp_path, "family: gemm, a: bf16, b: bf16, d: bf16", "tile: [64, 64, 64]")
    result = run(*(argument.replace("{file}", str(path)) for argument in arguments))
    assert result.exit_code == 1
    assert re.search(told, result.stderr), result.stderr
