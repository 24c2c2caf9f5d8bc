"""`explain(..., gpu=)` says on any machine what calls on a GPU would run, and builds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError, UnknownNameError
from warploom.generator import build
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import parse_name
from warploom.generator.store import Store, key, source_digest
from warploom.runtime import explanation, plan, targets

H200 = DeviceLimits(132, "NVIDIA H200")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans of other tests, and no driver: whoever asks for one fails."""
    plan.forget()
    monkeypatch.setattr(targets.driver, "limits", lambda device: pytest.fail("asked the driver"))
    monkeypatch.setattr(build, "build", lambda *_, **__: pytest.fail("built"))


def on(device: str, *extents: int) -> torch.Tensor:
    return torch.empty(*extents, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_packages_records_decide_and_not_the_table(device: str) -> None:
    """`explain` of a recorded shape gave the table's choice wherever there was no H200."""
    a, b = on(device, 512, 4096), on(device, 6144, 4096).t()
    told = warploom.explain(a, b, gpu="NVIDIA H200")
    assert told.reason.startswith("recorded 20") and told.seconds and told.runners_up
    assert told.grid > 0 and told.copies == () and str(told).startswith("GPU      NVIDIA H200\n")
    assert warploom.explain(on("cpu", 512, 4096), on("cpu", 6144, 4096).t()).gpu == ""
    part = warploom.explain(a, b, gpu="H200:66")
    assert "stale: multiprocessors 132, here 66" in part.reason and 0 < part.grid <= 66 < told.grid


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_attention_is_told_with_its_gradients(device: str) -> None:
    q, k = on(device, 4, 32, 2048, 128), on(device, 4, 8, 2048, 128)
    told = warploom.explain(q, k, k, causal=True, gpu="h200")
    assert "_causal_" in told.kernel and told.reason.startswith("recorded 20")
    assert told.gradients and told.gradients.reason.startswith("recorded 20")
    deterministic = warploom.explain(q, k, k, causal=True, gpu="h200", deterministic=True)
    assert "deterministic" in str(deterministic.backward) and deterministic.grid > 0


def test_it_is_what_a_plan_on_that_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    operands: tuple[Any, ...] = on("cpu", 3, 33, 72), on("cpu", 72, 100)
    given: dict[str, Any] = {"bias": on("cpu", 100), "activation": "gelu", "out_dtype": None}
    told = warploom.explain(*operands, **given, gpu="h200")
    planned = warploom.explain(warploom.plan(*operands, **given))
    assert (told.kernel, told.reason, told.copies) == (
        *(planned.kernel, planned.reason, planned.copies),
    )
    q, offsets = on("cpu", 300, 4, 64), torch.tensor([0, 100, 300], dtype=torch.int32)
    packed: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
    packed |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 200)
    told = warploom.explain(q, q, q, causal=True, **packed, gpu="h200")
    planned = warploom.explain(warploom.plan_attention(q, q, q, causal=True, **packed))
    assert (told.kernel, told.reason, told.gradients) == (
        *(planned.kernel, planned.reason, planned.gradients),
    )


def test_what_no_view_can_read_is_copied_on_meta_tensors_too() -> None:
    """All their addresses are 0: a copy was taken for the operand itself."""
    for device in ("cpu", "meta"):
        across = on(device, 8, 64, 40).transpose(0, 1)[
            :, :5
        ]  # [64, 5, 40], rows not one pitch apart
        assert warploom.explain(across, on(device, 40, 96), gpu="h200").copies == ("a",)
        assert warploom.explain(on(device, 8, 40), on(device, 40, 97), gpu="h200").copies == ("b",)


def test_a_product_of_nothing_launches_nothing() -> None:
    assert warploom.explain(on("meta", 0, 64), on("meta", 64, 32), gpu="h200").grid == 0
    q = on("meta", 1, 2, 0, 64)
    assert warploom.explain(q, q, q, gpu="h200").grid == 0


def test_what_calls_refuse_is_refused_and_so_is_an_unknown_gpu() -> None:
    with pytest.raises(ProblemError, match="with one K"):
        warploom.explain(on("meta", 8, 16), on("meta", 17, 8), gpu="h200")
    with pytest.raises(UnknownNameError, match="GPU 'h300'"):
        warploom.explain(on("meta", 8, 16), on("meta", 16, 8), gpu="h300")


def test_stored_says_whether_the_kernel_lies_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(explanation, "store", lambda: store)
    a, b = on("meta", 8, 16), on("meta", 16, 8)
    told = warploom.explain(a, b, gpu="h200")
    assert not told.stored
    source = render(parse_name(told.kernel))
    one = Resources(168, 0, 0)
    artifact = Artifact(
        told.kernel, "sm_90a", b"cubin", source_digest(source), "any", (), {"k": one}, (), 1.0
    )
    store.put(key(source, (), "sm_90a", "any"), artifact)
    assert warploom.explain(a, b, gpu="h200").stored
