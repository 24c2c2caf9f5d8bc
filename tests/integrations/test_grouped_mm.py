"""`warploom.grouped_mm`: torch's function, and its operator where it is activated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import warploom
from warploom.errors import ProblemError
from warploom.integrations import devices, grouped_mm

BF16 = torch.bfloat16
ENDS = torch.tensor([16, 16, 40], dtype=torch.int32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls that Warploom computes, of tensors on the CPU as on a GPU."""
    noted: list[str] = []
    computes = grouped_mm.grouped_gemm

    def noting(*operands: torch.Tensor, **keywords: Any) -> torch.Tensor:
        noted.append(f"{operands[0].dim()}d x {operands[1].dim()}d")
        return computes(*operands, **keywords)

    monkeypatch.setitem(devices.reasons, -1, None)
    monkeypatch.setattr(grouped_mm, "_KEY", "CPU")
    monkeypatch.setattr(grouped_mm, "grouped_gemm", noting)
    yield noted
    warploom.grouped_mm.deactivate()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    a = torch.randn(40, 64, dtype=BF16, requires_grad=True)
    return a, torch.randn(3, 32, 64, dtype=BF16, requires_grad=True)


def test_torchs_function_runs_warplooms_kernels_both_ways(calls: list[str]) -> None:
    a, w = operands()
    exact = functional.grouped_mm(a, w.mT, offs=ENDS)
    dd = torch.randn_like(exact)
    wanted = (exact, *torch.autograd.grad(exact, (a, w), dd))
    assert not calls
    with warploom.grouped_mm.activate():
        d = functional.grouped_mm(a, w.mT, offs=ENDS)
        found = (d, *torch.autograd.grad(d, (a, w), dd))
        assert sorted(calls) == ["2d x 2d", "2d x 3d", "2d x 3d"]
        compiled = torch.compile(functional.grouped_mm, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(a, w.mT, offs=ENDS), d)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    count = len(calls)
    functional.grouped_mm(a, w.mT, offs=ENDS)
    assert len(calls) == count


def test_results_are_laid_out_as_torchs(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end between multiples of 16 bytes have a pitch, which compilers count on."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # of builds whose operator pads
    a, _ = operands()
    w = torch.randn(3, 33, 64, dtype=BF16)
    for given in ((a, w.mT, ENDS), (a.t(), torch.randn(40, 72, dtype=BF16), ENDS), (w, w.mT, None)):
        exact = functional.grouped_mm(*given[:2], offs=given[2])
        with warploom.grouped_mm.activate():
            found = functional.grouped_mm(*given[:2], offs=given[2])
        assert found.shape == exact.shape
        meta = functional.grouped_mm(
            *(one.to("meta") for one in given[:2]),
            offs=None if given[2] is None else given[2].to("meta"),
        )
        assert found.stride() == meta.stride()


@pytest.mark.parametrize(
    "change",
    [
        {"mat_a": torch.ones(40, 64), "mat_b": torch.ones(3, 64, 32)},
        {"mat_a": torch.ones(3, 32, 64, dtype=BF16), "mat_b": torch.ones(64, 40, dtype=BF16)},
    ],
    ids=["fp32", "groups of columns"],
)
def test_what_kernels_do_not_compute_stays_torchs(
    calls: list[str], change: dict[str, torch.Tensor]
) -> None:
    given: dict[str, Any] = {"offs": ENDS, **change}
    exact = functional.grouped_mm(given.pop("mat_a"), given.pop("mat_b"), **given)
    given = {"offs": ENDS, **change}
    with warploom.grouped_mm.activate():
        found = functional.grouped_mm(given.pop("mat_a"), given.pop("mat_b"), **given)
    given = {"offs": ENDS, **change}
    direct = warploom.grouped_mm(given.pop("mat_a"), given.pop("mat_b"), **given)
    assert torch.equal(found, exact) and torch.equal(direct, exact) and not calls


def test_the_function_itself_takes_torchs_arguments(calls: list[str]) -> None:
    a, w = operands()
    d = warploom.grouped_mm(a, w.mT, offs=ENDS, out_dtype=torch.float32)
    assert d.dtype == torch.float32 and calls == ["2d x 3d"]
    with pytest.raises((RuntimeError, ValueError)):  # torch's own
        warploom.grouped_mm(a, w.mT)
    no_tensors: tuple[dict[str, Any], ...] = ({"mat_a": [1.0]}, {"offs": [3, 8]})
    for wrong in no_tensors:
        with pytest.raises(TypeError, match="must be Tensor, not list"):
            warploom.grouped_mm(**{"mat_a": a, "mat_b": w.mT, "offs": ENDS, **wrong})
    with pytest.raises(RuntimeError, match="batched dimension"):  # batches were broadcast
        warploom.grouped_mm(w[:1], w.mT)


def test_autocast_leaves_types_alone_as_it_does_torchs(calls: list[str]) -> None:
    """fp16 operands were rounded to the 8 bits of autocast's bf16."""
    a, w = (one.detach().half() for one in operands())
    a = a + 2**-9
    exact = functional.grouped_mm(a, w.mT, offs=ENDS)
    with torch.autocast("cpu", torch.bfloat16), warploom.grouped_mm.activate():
        found = functional.grouped_mm(a, w.mT, offs=ENDS)
        direct = warploom.grouped_mm(a, w.mT, offs=ENDS)
    assert calls == ["2d x 3d"] * 2
    for one in (found, direct):
        torch.testing.assert_close(one, exact, rtol=2**-9, atol=2**-8)


def test_it_is_activated_once_and_undone(calls: list[str]) -> None:
    active = warploom.grouped_mm.activate()
    with pytest.raises(ProblemError, match="must be activated once"):
        warploom.grouped_mm.activate()
    active.remove()
    active.remove()
    warploom.grouped_mm.activate()
    warploom.grouped_mm.deactivate()
    warploom.grouped_mm.deactivate()
    a, w = operands()
    functional.grouped_mm(a, w.mT, offs=ENDS)
    assert not calls
