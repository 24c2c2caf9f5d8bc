"""transformers' models under torch.jit.trace: torch computes, and records what eager models say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, VOCABULARY, model

IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0
OTHER = torch.ones_like(IDS)
OTHER[1, :2] = 0


class Logits(torch.nn.Module):
    """A model's first result, of tensors alone."""

    def __init__(self, model: Any, **keywords: bool) -> None:  # noqa: ANN401
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(*given, **self.keywords)[0]
        return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mask", ["whole", "left"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss", "Bert"])
def test_a_traced_model_says_what_it_says_eagerly(
    name: str, mask: str, paths: Counter[str]
) -> None:
    """Sizes are tensors there, which torch refused as the flag of grouped heads."""
    head = "ForCausalLM" if name in DECODERS else "Model"
    made = model(name, "warploom", torch.float32, head)
    keywords = {"use_cache": False} if name in DECODERS else {}
    given = (IDS,) if mask == "whole" else (IDS, LEFT)

    with torch.no_grad():
        traced = torch.jit.trace(Logits(made, **keywords), given, check_trace=False)
        assert not paths["by_kernels"]
        for ids, padding in ((IDS, LEFT), (IDS.flip(1), OTHER)):  # other tokens, other padding
            given = (ids,) if mask == "whole" else (ids, padding)
            seen = torch.ones_like(ids) if mask == "whole" else padding
            exact = model(name, "eager", torch.float32, head)(*given)[0]
            torch.testing.assert_close(traced(*given)[seen.bool()], exact[seen.bool()])
