"""Greedy generation as servers do it: one CUDA graph of a step, replayed for each token.

The cache has a fixed size, and where a step reads and writes it is counted on the GPU, so that the
graph serves all of them. On a CPU steps are calls.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache

WARM = 3  # steps before one is captured: they compile, load and plan


class Steps:
    """A model with a static cache of `keys` tokens for each of `batch` texts."""

    def __init__(self, model: Any, batch: int, keys: int) -> None:  # noqa: ANN401
        self.model, self.keys = model, keys
        self.cache: Any = StaticCache(config=model.config, max_cache_len=keys)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def generate(self, text: torch.Tensor, count: int) -> torch.Tensor:
        """Tokens [batch, length] with `count` more, each the likeliest."""
        if text.shape[1] + count > self.keys:
            raise ValueError(f"a cache of {self.keys} keys for {text.shape[1]} + {count} tokens")
        if self.graph is None and text.is_cuda:
            self._capture(text)
        self.cache.reset()
        self._choose(text)
        tokens = [text, self.token.clone()]
        for _ in range(count - 1):
            if self.graph is None:
                self._choose(self.token)
            else:
                self.graph.replay()
            tokens.append(self.token.clone())
        return torch.cat(tokens, 1)

    def _choose(self, text: torch.Tensor) -> None:
        """Put the likeliest token after `text`, which follows what is in the cache."""
        given = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        logits = self.model(text, **given).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def _capture(self, text: torch.Tensor) -> None:
        self._choose(text)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._choose(self.token)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._choose(self.token)
