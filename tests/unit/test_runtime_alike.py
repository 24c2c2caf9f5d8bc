"""A plan that fires without looking never takes a tensor for one that it was not made for."""

from __future__ import annotations

import pytest
import torch

from warploom.runtime.kinds import alike

ROOM = torch.zeros(64, 64, dtype=torch.bfloat16)
A, B = ROOM[:5, :16], ROOM[:16, :8]
OTHERS = {
    "shape": (ROOM[:4, :16], B),
    "stride": (A.contiguous(), B),
    "transposed": (A, ROOM.t()[:16, :8]),
    "type": (ROOM.view(torch.float16)[:5, :16], B),
    "dimensions": (A[None], B),
    "device": (A.to("meta"), B),
    "order": (B, A),
    "negative bit": (torch._neg_view(A), B),
}


@pytest.fixture(params=["with torch's guards", "without"])
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")


@pytest.mark.usefixtures("check")
def test_other_tensors_of_the_same_kind_are_recognised() -> None:
    same = alike(A, B)
    assert same(A, B) is True
    assert same(ROOM[7:12, 16:32], ROOM[40:56, 3:11]) is True
    with torch.no_grad():
        assert same(A, B) is True


@pytest.mark.usefixtures("check")
@pytest.mark.parametrize("what", OTHERS)
def test_a_tensor_that_differs_in_anything_is_not_recognised(what: str) -> None:
    assert alike(A, B)(*OTHERS[what]) is False


@pytest.mark.usefixtures("check")
def test_a_tensor_that_requires_grad_is_recognised_where_grad_mode_is_off_only() -> None:
    asking = B.clone().requires_grad_()
    for same in (alike(A, asking), torch.no_grad()(alike)(A, asking)):
        assert same(A, asking) is False
        with torch.no_grad():
            assert same(A, asking) is True
            assert same(A, asking.detach()) is False
    assert alike(A, asking.detach())(A, asking) is False
