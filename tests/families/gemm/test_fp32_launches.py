"""What `gemm(precision=)` launches on a GPU that is pretended, at first and when it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cold_calls import launched  # noqa: F401 (a fixture)

import warploom
from warploom.errors import ProblemError, UnknownNameError
from warploom.runtime.families.gemm import fp32_warm
from warploom.runtime.launch_plan import LaunchPlan

M, N, K = 130, 96, 200
Noted = list[tuple[str, tuple[int, ...]]]


@pytest.fixture
def noted(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> Noted:  # noqa: F811
    """The kernels of launches, and the addresses that they were handed."""
    found: Noted = []
    run = LaunchPlan.run

    def noting(self: LaunchPlan, addresses: tuple[int, ...], *given: object) -> object:
        found.append((self.spec.name, addresses))
        return run(self, addresses, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(LaunchPlan, "run", noting)
    monkeypatch.setattr(LaunchPlan, "_room", lambda self, stream: torch.empty(self._room_bytes))
    return found


def told(noted: Noted, tensors: list[torch.Tensor]) -> list[tuple[str, tuple[object, ...]]]:
    """The launches, with the tensors of a call by their numbers and all else by when it came."""
    names: dict[int, object] = {one.data_ptr(): index for index, one in enumerate(tensors)}
    found = []
    for name, addresses in noted:
        for address in addresses:
            names.setdefault(address, f"between {len(names)}")
        found.append((name, tuple(names[address] for address in addresses)))
    return found


@pytest.mark.parametrize("kept", [False, True], ids=["both split", "weight kept"])
@pytest.mark.parametrize(
    ("precision", "launches"), [("fp32", 6), ("bf16x6", 3), ("bf16x3", 3), ("tf32", 1)]
)
def test_a_known_call_launches_the_same_on_its_own_tensors(
    noted: Noted, precision: str, launches: int, kept: bool
) -> None:
    bias, residual = torch.randn(N), torch.randn(M, N)
    weight = torch.nn.Parameter(torch.randn(N, K))

    def call(x: torch.Tensor) -> list[tuple[str, tuple[object, ...]]]:
        own = weight if kept else torch.randn(N, K)
        noted.clear()
        keywords = {"bias": bias, "residual": residual, "activation": "relu"}
        with torch.no_grad():
            d = warploom.gemm(x, own.t(), precision=precision, **keywords)  # type: ignore[arg-type]
        return told(noted, [x, own, bias, residual, d])

    made, find = list[object](), fp32_warm.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp32_warm, "find", lambda *given: made.append(find(*given)) or made[-1])
        call(torch.randn(M, K))  # pieces of a parameter are made once
        first = call(torch.randn(M, K))
        again = call(torch.randn(M, K))
    assert made[-1] is not None
    splits = kept and precision != "tf32"
    assert len(first) == launches - splits
    assert again == first


def test_views_of_one_matrix_are_not_taken_for_two(noted: Noted) -> None:
    """A recipe that took b for a would multiply the wrong matrix in the next call."""
    x, other = torch.randn(M, K), torch.randn(M, K)
    with torch.no_grad():
        for _ in range(3):
            warploom.gemm(x, x.t(), precision="fp32")
        noted.clear()
        warploom.gemm(x, other.t(), precision="fp32")
    read = {address for name, addresses in noted if "pieces" in name for address in addresses[:1]}
    assert read == {x.data_ptr(), other.data_ptr()}


def test_what_is_not_aligned_as_before_is_checked(noted: Noted) -> None:
    room, b = torch.randn(M * K + 1), torch.randn(N, K)
    calls: list[Callable[[], torch.Tensor]] = [lambda: room[:-1].view(M, K)] * 2
    with torch.no_grad():
        for made in (*calls, lambda: room[1:].view(M, K)):
            noted.clear()
            warploom.gemm(made(), b.t(), precision="tf32")
    (_, addresses), *_ = noted
    assert addresses[0] % 16 == 0  # a copy's, which TMA reads


def test_gradients_launch_by_the_same_precision(noted: Noted) -> None:
    x = torch.randn(M, K, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(N, K))
    y = warploom.gemm(x, weight.t(), precision="fp32")
    noted.clear()
    torch.autograd.grad(y, (x, weight), torch.randn(M, N))
    names = [name for name, _ in noted]
    assert sum("terms3_narrow" in name for name in names) == 2
    assert sum("terms6_wide" in name for name in names) == 2
    assert sum("fp16x2" in name for name in names) == 4
    assert sum("bf16x3" in name and "wide" in name for name in names) == 4


# ---- Calls that are like a known one, but for what must be refused -------------------------------


def known(x: torch.Tensor, own: torch.Tensor, **keywords: Any) -> torch.Tensor:
    with torch.no_grad():
        return warploom.gemm(x, own.t(), precision="fp32", **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"use_fast_accum": False},
        {"spec": "gemm_of_no_kernel"},
        {"main_grad": torch.zeros(K, N)},
        {"gradient_dtype": torch.bfloat16},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_known_call_refuses_what_a_first_one_does(noted: Noted, keywords: dict[str, Any]) -> None:
    x, own = torch.randn(M, K), torch.randn(N, K)
    known(x, own)
    with pytest.raises(
        (ProblemError, UnknownNameError), match="|".join([*keywords, "kernel name"])
    ):
        known(x, own, **keywords)


@pytest.mark.parametrize("freed", [0, 2], ids=["a", "bias"])
def test_memory_that_was_freed_is_not_launched_on(noted: Noted, freed: int) -> None:
    """Kernels would read address 0, which ends the process's use of the GPU."""
    tensors = [torch.randn(M, K), torch.randn(N, K), torch.randn(N)]
    for _ in range(2):
        known(tensors[0], tensors[1], bias=tensors[2])
    noted.clear()
    tensors[freed].untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="must have memory"):
        known(tensors[0], tensors[1], bias=tensors[2])
    assert not any(name.startswith("gemm") for name, _ in noted[:-1])


def test_outputs_of_a_known_call_are_apart_from_what_it_reads(noted: Noted) -> None:
    x, own, room = torch.randn(M, K), torch.randn(N, K), torch.randn(M * N + 4)
    residual = room[: M * N].view(M, N)
    for stored in (torch.empty(M, N), torch.empty(M, N), room[4:].view(M, N)):
        items = [("preactivation", stored), ("activation", "relu"), ("residual", residual, 1.0)]
        if stored.data_ptr() == room[4:].data_ptr():
            with pytest.raises(ProblemError, match="do not overlap"):
                known(x, own, epilogue=items)
        else:
            known(x, own, epilogue=items)


def test_nested_tensors_are_refused_after_a_known_call(noted: Noted) -> None:
    """Torch's guards end the process of who asks them about one."""
    x, own = torch.randn(M, K), torch.randn(N, K)
    known(x, own)
    with pytest.raises(ProblemError, match="nested"):
        known(torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]), own)
