"""Calls of FlashInfer's wrapper, and what they should give: sequence by sequence, in float64.

Written from what FlashInfer's documentation says of page tables, layouts, scales and results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from warploom.flashinfer import BatchDecodeWithPagedKVCacheWrapper

LENGTHS = (1, 37, 0, 64, 130, 16)


@dataclass(frozen=True)
class Case:
    """A batch in pages, in an order of their own; `planned` and `given` go to plan and run."""

    layout: str = "NHD"
    lengths: tuple[int, ...] = LENGTHS
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    page: int = 16
    rows: int = 1
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype | None = None
    together: bool = False  # k and v in one tensor
    planned: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def lists(self) -> list[torch.Tensor]:
        """indptr, indices and last_page_len, on the CPU; the first page of the cache is unused."""
        counts = [-(-length // self.page) for length in self.lengths]
        indptr = torch.tensor([0, *counts]).cumsum(0).int()
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
        last = [
            length - max(0, count - 1) * self.page
            for length, count in zip(self.lengths, counts, strict=True)
        ]
        return [indptr, (order + 1).int(), torch.tensor(last).int()]

    def tensors(self, device: str, seed: int = 0) -> tuple[torch.Tensor, Any]:
        """q and the cache; what no sequence has is NaN, where the type has one."""
        generator = torch.Generator().manual_seed(seed)
        indptr, indices, last = self.lists()
        shape = (len(indices) + 1, 2, self.page, self.kv_heads, self.dim)
        cache = torch.randn(shape, generator=generator)
        cache[0] = torch.nan
        for ends, rest in zip(indptr[1:], last, strict=True):
            if rest:
                cache[indices[ends - 1], :, rest:] = torch.nan
        if self.layout == "HND":
            cache = cache.transpose(2, 3).contiguous()
        cache = cache.to(self.kv or self.dtype).to(device)
        q = torch.randn(len(self.lengths) * self.rows, self.heads, self.dim, generator=generator)
        both = cache if self.together else (cache[:, 0].contiguous(), cache[:, 1].contiguous())
        return q.to(self.dtype).to(device), both

    def plan(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, device: str | None = None) -> None:
        """Plan it, by lists on `device`."""
        lists = [one.to(device or one.device) for one in self.lists()]
        sizes = (self.heads, self.kv_heads, self.dim, self.page)
        rows = {} if self.rows == 1 else {"q_len_per_req": self.rows}
        types = {"q_data_type": self.dtype, "kv_data_type": self.kv}
        wrapper.plan(*lists, *sizes, **types, **rows, **self.planned)


CASES = {
    "NHD": Case(),
    "HND": Case(layout="HND"),
    "one tensor": Case(together=True),
    "one tensor, HND": Case(layout="HND", together=True, page=32),
    "fp16": Case(dtype=torch.float16, dim=128, page=64),
    "window": Case(planned={"window_left": 20}),
    "soft cap": Case(planned={"logits_soft_cap": 2.0, "sm_scale": 0.4}),
    "scales": Case(given={"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.75}),
    "e4m3": Case(kv=torch.float8_e4m3fn, given={"k_scale": 0.5, "v_scale": 2.0}),
    "sinks": Case(given={"sinks": torch.linspace(-2, 2, 8)}),
    "three rows": Case(rows=3, lengths=(3, 37, 64, 130), planned={"window_left": 9}),
    "invariant": Case(planned={"disable_split_kv": True}),
}


def exact(case: Case, q: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """out [batch * rows, heads, dim] and lse [batch * rows, heads] in base 2, in float64."""
    both = cache.unbind(1) if case.together else cache
    k, v = (one.transpose(1, 2) if case.layout == "HND" else one for one in both)
    indptr, indices, _ = case.lists()
    group = case.heads // case.kv_heads
    scale = case.planned.get("sm_scale") or case.dim**-0.5
    scale *= case.given.get("q_scale", 1) * case.given.get("k_scale", 1)
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for item, length in enumerate(case.lengths):
        if not length:
            continue
        own = indices[indptr[item] : indptr[item + 1]].tolist()
        keys, values = (
            torch.cat([one[page].cpu().double() for page in own])[:length].repeat_interleave(
                group, 1
            )
            for one in (k, v)
        )
        for row in range(case.rows):
            at = item * case.rows + row
            last = length - case.rows + row
            first = max(0, last - case.planned.get("window_left", length))
            scores = (
                torch.einsum("hd,khd->hk", q[at].cpu().double(), keys[first : last + 1]) * scale
            )
            if cap := case.planned.get("logits_soft_cap"):
                scores = cap * torch.tanh(scores / cap)
            if (sinks := case.given.get("sinks")) is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = scores.softmax(1)[:, : last + 1 - first]
            out[at] = torch.einsum("hk,khd->hd", weights, values[first : last + 1])
            lse[at] = scores.logsumexp(1) * math.log2(math.e)
    return out * case.given.get("v_scale", 1), lse


def verify(case: Case, device: str) -> None:
    """Hold a call against float64: a lost page, or one too many, is off by tenths."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, device=device), case.layout)
    q, cache = case.tensors(device)
    case.plan(wrapper)
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.given.items()}
    out, lse = wrapper.run(q, cache, return_lse=True, **given)
    close(case, (out, lse), exact(case, q, cache))


def close(case: Case, found: Any, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    """Results are as near as their types are."""
    out, lse = (one.cpu() for one in found)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    seen = torch.tensor(case.lengths).repeat_interleave(case.rows) > 0
    rounding = 2.0**-7 if case.dtype == torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(out.double(), wanted[0], rtol=2 * rounding, atol=2 * rounding)
    torch.testing.assert_close(lse.double()[seen], wanted[1][seen], rtol=1e-3, atol=1e-3)
