"""The plans that calls launch on addresses, which must be those of calls of these plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warploom.runtime import plan as plans
from warploom.runtime.call import Call
from warploom.runtime.plan import Plan


def launched_plans(
    monkeypatch: pytest.MonkeyPatch, *, attempts: bool = False
) -> list[Plan[Any, Any]]:
    """Forget all plans; return those that will be launched, in a list that grows by each.

    With `attempts` it has those too that find an address which shows that they are another call's.
    """
    plans.forget()
    noted: list[Plan[Any, Any]] = []
    run_at: Callable[..., None] = Plan.run_at

    def seen(
        self: Plan[Any, Any],
        arguments: Any,  # noqa: ANN401
        results: Any,  # noqa: ANN401
        call_of: Callable[..., Call[Any, Any]],
        *given: Any,
    ) -> None:
        if attempts:
            noted.append(self)
        run_at(self, arguments, results, call_of, *given)
        call = call_of(*given)
        assert call.signature() == self.key
        assert call.arguments(self.details, results) == arguments
        for made, like in zip(*map(_tensors, (results, call.results(self.details))), strict=True):
            assert made.shape == like.shape
            assert (made.stride(), made.dtype) == (like.stride(), like.dtype)
        if not attempts:
            noted.append(self)

    monkeypatch.setattr(Plan, "run_at", seen)
    return noted


def _tensors(results: Any) -> list[torch.Tensor]:  # noqa: ANN401
    together = results if isinstance(results, tuple) else (results,)
    return [one for one in together if one is not None]
