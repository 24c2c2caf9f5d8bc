"""Calls of `flash_attn_with_kvcache`, and what they should give: by the definition, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from warploom.flash_attn import flash_attn_with_kvcache


@dataclass(frozen=True)
class Case:
    """One call. The cache has `keys` rows of each sequence, of which `lengths` are filled."""

    lengths: tuple[int, ...] = (5, 40, 0)
    keys: int = 64
    rows: int = 1
    heads: int = 6
    heads_k: int = 3
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    new: int = 0  # keys that are appended
    page: int = 0
    indexed: bool = False  # by cache_batch_idx
    leftpad: tuple[int, ...] | None = None
    rotary: float = 0.0  # the part of dim that is rotated
    slopes: int = 0  # dimensions of slopes by which scores are less with distance
    keywords: dict[str, Any] = field(default_factory=dict)

    def random(self, shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
        """Numbers of a seed, the same on every device."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.dtype).to(device)

    def arguments(self, device: str) -> dict[str, Any]:
        """What the function takes; rows that are not filled are NaN."""
        batch, last = len(self.lengths), (self.heads_k, self.dim)
        held = [self.random((batch, self.keys, *last), device, seed) for seed in (1, 2)]
        for one in held:
            for item, length in enumerate(self.lengths):
                one[item, length:] = torch.nan
                if self.leftpad is not None:
                    one[item, : self.leftpad[item]] = torch.nan
        found: dict[str, Any] = {
            "q": self.random((batch, self.rows, self.heads, self.dim), device, 0),
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=device),
            **self._placed(held, device),
            **self.keywords,
        }
        if self.new:
            for name, seed in (("k", 3), ("v", 4)):
                found[name] = self.random((batch, self.new, *last), device, seed)
        if self.slopes:
            shape = (batch, self.heads)[-self.slopes :]
            found["alibi_slopes"] = self.random(shape, device, 7).float().abs()
        if self.leftpad is not None:
            found["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32, device=device)
        if self.rotary:
            angle = (
                self.random((self.keys, int(self.rotary * self.dim) // 2), device, 5).float() * 3
            )
            found |= {
                "rotary_cos": angle.cos().to(self.dtype),
                "rotary_sin": angle.sin().to(self.dtype),
            }
        return found

    def _placed(self, held: list[torch.Tensor], device: str) -> dict[str, Any]:
        """The caches, in pages or in items in an order of their own."""
        order = torch.Generator().manual_seed(6)
        if self.indexed:
            index = torch.randperm(len(self.lengths) + 2, generator=order)[: len(self.lengths)]
            caches = [torch.full((len(index) + 2, *one.shape[1:]), torch.nan) for one in held]
            table = {"cache_batch_idx": index.int().to(device)}
        elif self.page:
            each = self.keys // self.page
            index = torch.randperm(len(self.lengths) * each + 1, generator=order)
            index = index[: len(self.lengths) * each]
            held = [one.reshape(-1, self.page, *one.shape[2:]) for one in held]
            caches = [torch.full((len(index) + 1, *one.shape[1:]), torch.nan) for one in held]
            table = {"block_table": index.view(-1, each).int().to(device)}
        else:
            return dict(zip(("k_cache", "v_cache"), held, strict=True))
        caches = [one.to(self.dtype).to(device) for one in caches]
        for cache, one in zip(caches, held, strict=True):
            cache[index.to(device)] = one
        return dict(zip(("k_cache", "v_cache"), caches, strict=True)) | table


def _rotated(x: torch.Tensor, given: dict[str, Any], first: int, step: int) -> torch.Tensor:
    """x [rows, heads, dim] turned by the angles of its positions, from `first` on by `step`."""
    if "rotary_cos" not in given:
        return x
    at = first + step * torch.arange(len(x), device=x.device)
    cos, sin = (given[name].double()[at][:, None] for name in ("rotary_cos", "rotary_sin"))
    half = cos.shape[-1]
    found = x.clone()
    if given.get("rotary_interleaved", True):
        one, other = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        one, other = slice(0, half), slice(half, 2 * half)
    found[..., one] = x[..., one] * cos - x[..., other] * sin
    found[..., other] = x[..., one] * sin + x[..., other] * cos
    return found


def _held(case: Case, given: dict[str, Any], name: str, item: int) -> torch.Tensor:
    """The rows [keys, heads_k, dim] of a sequence, wherever they lie."""
    cache = given[name]
    if "cache_batch_idx" in given:
        return cache[given["cache_batch_idx"][item]]
    if "block_table" in given:
        return cache[given["block_table"][item].long()].flatten(0, 1)
    return cache[item]


def exact(case: Case, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """out, lse, and the keys and values that count then, in float64, of a call to come."""
    q, (left, right) = given["q"].double(), given.get("window_size", (-1, -1))
    causal = given.get("causal", False)
    right = 0 if causal else right
    moving = causal or max(left, right) >= 0
    out, lse = torch.zeros_like(q), q.new_full((len(q), case.heads, case.rows), -torch.inf)
    kept = []
    for item, before in enumerate(case.lengths):
        keys, values = (
            _held(case, given, name, item)[:before].double() for name in ("k_cache", "v_cache")
        )
        if case.new:
            turned = _rotated(given["k"][item].double(), given, before, 1)
            keys = torch.cat([keys, turned])
            values = torch.cat([values, given["v"][item].double()])
        kept.append(torch.stack([keys, values]))
        rows = (
            _rotated(q[item], given, before, 1) if moving else _rotated(q[item], given, before, 0)
        )
        column = torch.arange(len(keys), device=q.device)
        own = len(keys) - case.rows + torch.arange(case.rows, device=q.device)[:, None]
        shown = column >= (case.leftpad or [0] * len(q))[item]
        shown = shown.expand(case.rows, -1).clone()
        shown &= column >= own - left if left >= 0 else True
        shown &= column <= own + right if right >= 0 else True
        some = shown.any(1)
        group = case.heads // case.heads_k
        scores = torch.einsum("qhd,khd->hqk", rows, keys.repeat_interleave(group, 1))
        scores = scores * (given.get("softmax_scale") or case.dim**-0.5)
        if softcap := given.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        if case.slopes:
            slopes = given["alibi_slopes"].double().expand(len(q), -1)[item]
            scores = scores - slopes[:, None, None] * (column - own).abs()
        scores = scores.masked_fill(~shown, -torch.inf)[:, some]
        visible = values.masked_fill(~shown.any(0)[:, None, None], 0).repeat_interleave(group, 1)
        out[item, some] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), visible)
        lse[item][:, some] = scores.logsumexp(-1)
    return out, lse, torch.cat(kept, 1)


def verify(case: Case, device: str) -> None:
    """Hold results, and what the cache has now, against float64."""
    given = case.arguments(device)
    out, lse, kept = exact(case, given)
    before = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    found, found_lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    rounding = 2.0**-7 if case.dtype == torch.bfloat16 else 2.0**-10
    wide = {"rtol": 2 * rounding, "atol": 2 * rounding}
    assert found.shape == given["q"].shape and found.dtype == case.dtype
    torch.testing.assert_close(found.double(), out, **wide)
    # A score of rotated numbers is of numbers rounded once more.
    torch.testing.assert_close(found_lse.double(), lse, rtol=rounding, atol=4 * rounding)
    held = []
    for item, length in enumerate(case.lengths):
        pair = [_held(case, given, name, item)[: length + case.new] for name in before]
        held.append(torch.stack(pair).double())
    torch.testing.assert_close(torch.cat(held, 1), kept, **wide, equal_nan=True)
    written = sum(
        int((given[name] != one).logical_and(given[name] == given[name]).sum())
        for name, one in before.items()
    )
    assert written == 2 * len(case.lengths) * case.new * case.heads_k * case.dim


_MODES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "paged": {"page": 16},
    "indexed": {"indexed": True, "keys": 48},
    "large pages": {"page": 512, "keys": 1024, "lengths": (700, 5)},
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "new": {"new": 1},
    "causal": {"rows": 4, "keywords": {"causal": True}},
    "not causal": {"rows": 4, "lengths": (5, 40, 4)},
    "window": {"rows": 3, "keywords": {"window_size": (6, 1)}},
    "causal window": {"rows": 3, "new": 3, "keywords": {"causal": True, "window_size": (9, 4)}},
    "softcap": {"heads_k": 1, "keywords": {"softcap": 2.0, "softmax_scale": 0.3}},
    "rotary": {"new": 2, "rows": 2, "rotary": 0.5, "keywords": {"causal": True}},
    "rotary halves": {"new": 1, "rotary": 1.0, "keywords": {"rotary_interleaved": False}},
    "rotary in place": {"new": 1, "rows": 3, "rotary": 1.0, "dtype": torch.float16},
    "more rows than keys": {"rows": 3, "new": 1, "rotary": 1.0, "keywords": {"causal": True}},
}
CASES = {
    f"{mode}, {variant}": Case(**{**_MODES[mode], **_VARIANTS[variant]})
    for mode in _MODES
    for variant in _VARIANTS
} | {
    "left padding": Case(leftpad=(2, 0, 0), rows=2, new=2, keywords={"causal": True}),
    "left padding, all": Case(leftpad=(5, 11, 0), lengths=(5, 40, 7)),
    "left padding, paged": Case(leftpad=(0, 11, 0), page=16, new=1),
    "left padding, long": Case(leftpad=(3, 0), rows=130, keys=256, lengths=(100, 7), new=130),
    "many rows": Case(rows=130, keys=256, lengths=(100, 7), new=130, keywords={"causal": True}),
    "slopes": Case(slopes=1, new=1, keywords={"causal": True}),
    "slopes of batches": Case(slopes=2, rows=3, leftpad=(2, 0, 0), keywords={"softcap": 2.0}),
    "a head of 80": Case(dim=80, new=1, keywords={"window_size": (7, -1)}),
}
