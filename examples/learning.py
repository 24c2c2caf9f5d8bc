"""What programs that train models of transformers share: a step, and what is said of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def advance(
    model: Any,  # noqa: ANN401 (of transformers)
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
) -> torch.Tensor:
    """Do one step on rows of tokens, and return its loss; the host does not wait for the GPU."""
    loss: torch.Tensor = model(input_ids=text, labels=text, use_cache=False).loss
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def summary(losses: Mapping[str, Sequence[float]], seconds: Mapping[str, float]) -> list[str]:
    """A line for each model: its first and last loss, and the time of a step."""
    width = max(map(len, losses))
    return [
        f"{name:{width}}  loss {own[0]:.3f} to {own[-1]:.3f} in {len(own)} steps, "
        f"{seconds[name] * 1e3:.2f} ms a step"
        for name, own in losses.items()
    ]
