"""Problems that calls meet are tuned on the GPU: right results, kept records, graphs untouched."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import warploom
from warploom.generator import records_file
from warploom.quantization import quantize
from warploom.runtime import plan, records
from warploom.tuning.autotune import engine, helper
from warploom.tuning.autotune.report import Tuned

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records of this test's own, without what came with the package, and an engine that is new."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    monkeypatch.delenv("WARPLOOM_RECORDS", raising=False)
    monkeypatch.setattr(records_file, "shipped", lambda gpu: None)
    monkeypatch.setattr(helper, "jobs", lambda: len(os.sched_getaffinity(0)))  # nobody else is here
    records.forget()
    plan.forget()
    yield tmp_path
    engine.ENGINE.fresh()
    records.forget()
    plan.forget()


def until(
    tuning: warploom.tuning.autotune.api.Autotune, call: Callable[[], object], status: str
) -> list[Tuned]:
    """Call until every problem that was met has this status; how they stand."""
    end = time.monotonic() + 120
    while True:
        call()
        found = tuning.problems
        if found and all(one.status == status for one in found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_a_product_is_tuned_between_its_calls_and_stays_right(folder: Path) -> None:
    x = torch.randn(200, 1024, device="cuda").bfloat16()
    weight = torch.randn(776, 1024, device="cuda").bfloat16()
    exact = x.double() @ weight.t().double()

    def call() -> None:
        found = warploom.gemm(x, weight.t())
        assert (found.double() - exact).abs().max() < 2**-7 * exact.abs().max()

    call()
    torch.cuda.synchronize()
    plan.forget()
    gc.collect()  # of tests before, whose garbage would be given back meanwhile
    before = torch.cuda.memory_allocated()
    with warploom.autotune() as tuning:
        (told,) = until(tuning, call, "tuned")
        call()
        call()
        assert warploom.explain(x, weight.t()).kernel == told.after
    (record,) = records_file.read(next(folder.glob("*.json")))
    assert record.autotuned and record.default
    assert 1e-6 < record.best.seconds < 1e-3
    assert told.gpu_seconds < 0.1
    assert torch.cuda.memory_allocated() == before
    assert not any(one.choice.asked is None for one in plan.known.values())


def test_a_graph_that_is_captured_meanwhile_keeps_its_kernel_and_measures_nothing() -> None:
    x = torch.randn(136, 512, device="cuda").bfloat16()
    weight = torch.randn(392, 512, device="cuda").bfloat16()
    out = torch.empty(136, 392, device="cuda", dtype=torch.bfloat16)
    right = (x.double() @ weight.t().double()).bfloat16()

    def call() -> None:
        warploom.gemm(x, weight.t(), out=out)

    with warploom.autotune() as tuning:
        call()
        end = time.monotonic() + 120
        while tuning.problems[:1] == [] or not tuning.problems[0].status.startswith("waiting"):
            assert time.monotonic() < end, tuning.problems
            time.sleep(0.05)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        assert tuning.problems[0].status.startswith("waiting")
        until(tuning, call, "tuned")
        call()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (out.double() - right.double()).abs().max() < 2**-7 * right.double().abs().max()


def test_attention_and_its_gradients_are_tuned_by_the_interface_of_families() -> None:
    q, k, v = (
        torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def call() -> None:
        torch.autograd.grad(warploom.attention(q, k, v, causal=True).sum(), (q, k, v))

    with warploom.autotune() as tuning:
        call()
        end = time.monotonic() + 240
        while len(tuning.problems) < 2 or any(
            one.status not in ("tuned",) for one in tuning.problems
        ):
            call()
            assert time.monotonic() < end, tuning.problems
            time.sleep(0.05)
    call()


def _calls() -> dict[str, Callable[[], object]]:
    """Calls by each way that a warm one takes to its plan."""
    x = torch.randn(120, 512, device="cuda").bfloat16()
    weight = torch.randn(384, 512, device="cuda").bfloat16()
    out = torch.empty(120, 384, device="cuda", dtype=torch.bfloat16)
    plan = warploom.plan(x, weight.t(), out=out)
    layer = warploom.nn.Linear(512, 392, device="cuda", dtype=torch.bfloat16)
    packed = warploom.nn.QuantizedLinear.from_packed(quantize(weight, "int4"))
    q, k, v = (torch.randn(2, 4, 136, 64, device="cuda").bfloat16() for _ in range(3))
    keys, values = (torch.randn(2, 4, 520, 64, device="cuda").bfloat16() for _ in range(2))
    rows = torch.randn(2, 4, 1, 64, device="cuda").bfloat16()
    lengths = torch.full((2,), 500, device="cuda", dtype=torch.int32)
    compiled = torch.compile(lambda: warploom.gemm(x[:96], weight.t()))

    def trained() -> None:
        layer(x[:112]).sum().backward()

    def without_gradient() -> None:
        with torch.no_grad():
            layer(x)

    def quantized() -> None:
        with torch.no_grad():
            packed(x)

    return {
        "gemm": lambda: warploom.gemm(x[:64], weight.t()),
        "a plan that the user has": lambda: plan(x, weight.t(), out),
        "linear": without_gradient,
        "linear and its gradients": trained,
        "quantized linear": quantized,
        "attention": lambda: warploom.attention(q, k, v, causal=True),
        "decode": lambda: warploom.attention_decode(rows, keys, values, cache_seqlens=lengths),
        "compiled": compiled,
    }


def test_calls_that_were_warm_before_it_began_are_tuned() -> None:
    """A context that began after the first calls met none of them: 0 problems, in silence."""
    calls = _calls()
    for call in calls.values():
        for _ in range(3):
            call()
    for name, call in calls.items():
        with warploom.autotune() as tuning:
            call()
            assert tuning.report.counts.get("not finished", 0) >= 1, name
            end = time.monotonic() + 120
            while "not finished" in tuning.report.counts:
                call()
                assert time.monotonic() < end, str(tuning.report)
                time.sleep(0.05)
            assert {"improved", "default kept"} & tuning.report.counts.keys(), str(tuning.report)
        call()
