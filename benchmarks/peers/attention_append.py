"""New keys and values into paged caches, beside torch's operations that leave the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from warploom.generator.configurations import cells
from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendShape,
)
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_append import reference
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import FAMILY as RUNTIME
from warploom.runtime.families.attention_append.family import LEAST_SET, expected
from warploom.runtime.plan import run


def operations() -> dict[str, AttentionAppendOperation]:
    """By name: all turn k and q, and write pages."""
    plain = AttentionAppendOperation(
        "bf16", cells()["attention_append"]["dim"], rotary="halves", queries=True, paged=True
    )
    return {"bf16": plain, "e4m3": replace(plain, cache="e4m3", scales="token")}


def cases(_asked: Asked) -> Iterator[Case]:
    """Each type of cache, with each number of new tokens."""
    heads, kv_heads = cells()["attention_append"]["heads"]
    for name, operation in operations().items():
        for tokens in cells()["attention_append"]["tokens"]:
            floor = Floor.of(0.0, tokens * operation.token_bytes(kv_heads, heads))
            about = {"m": tokens, "heads": heads, "kv_heads": kv_heads, "dim": operation.dim}
            about |= {"type": "bf16", "operation": name}
            shape = AttentionAppendShape(tokens, kv_heads, heads)
            make = partial(contenders, operation, shape)
            yield Case(f"{name} {tokens} tokens", about, floor, make)


def contenders(
    operation: AttentionAppendOperation, shape: AttentionAppendShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, torch, and each kernel that competes and computes the same."""
    moved = shape.tokens * operation.token_bytes(shape.kv_heads, shape.heads)
    make = partial(RUNTIME.draw, operation, shape, asked.device, None)
    size = max(moved, LEAST_SET)
    return moving(make, size, operation, asked, ours=run, torchs=torchs, error_share=wrong)


def wrong(one: AttentionAppendCall, call: Callable[[], object]) -> float:
    """0 where a call leaves what the reference does."""
    right = expected(one)
    call()
    return RUNTIME.share(RUNTIME.results(one), right)


def torchs(given: Sequence[AttentionAppendCall]) -> Contender:
    """Tables looked up by position, products and sums, and rows copied by their index.

    Where each row goes is known before, as servers have it.
    """
    calls = [partial(_torch, one, *_places(one)) for one in given]
    return Contender("torch", calls, lambda: wrong(given[0], calls[0]), peer=True)


def _places(one: AttentionAppendCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The position of every token, and its row of a cache, all pages in a row."""
    batch, _, seq, _ = one.k.shape
    places = reference.fixed(batch, seq, one.k.device)
    positions, page = places.positions(one.lengths), one.k_cache.shape[2]
    if one.page_table is None:
        return positions, places.sequence * page + positions
    pages = one.page_table.long()[places.sequence, positions // page]
    return positions, pages * page + positions % page


def _torch(one: AttentionAppendCall, positions: torch.Tensor, rows: torch.Tensor) -> None:
    if one.cos is None or one.sin is None or one.q is None or one.out is None:
        raise ValueError("a cell without rotary")
    cos, sin = one.cos[positions][:, None], one.sin[positions][:, None]
    k, v, q = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (one.k, one.v, one.q))
    one.out.transpose(1, 2).view(q.shape).copy_(_turned(q, cos, sin))
    for cache, scale, new in (
        (one.k_cache, one.scale_k, _turned(k, cos, sin)),
        (one.v_cache, one.scale_v, v),
    ):
        found = new
        if scale is not None:
            scales = reference.row_scales(new.float(), cache.dtype)
            scale.transpose(1, 2).flatten(0, 1).index_copy_(0, rows, scales)
            found = (new.float() * (1 / scales)[..., None]).clamp(-448, 448)
        found = found.to(cache.dtype)
        flat = cache.transpose(1, 2).flatten(0, 1)
        if cache.dtype.itemsize == 1:
            flat, found = flat.view(torch.uint8), found.view(torch.uint8)
        flat.index_copy_(0, rows, found)


def _turned(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rows whose numbers half a row apart are turned, in fp32."""
    x, y = rows.float().chunk(2, -1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)


class Appending(Family):
    """New keys and values written into caches."""

    def subject(self, problem: Problem) -> str:
        """The type of caches, and heads."""
        heads = f"{problem['heads']} and {problem['kv_heads']} heads of {problem['dim']}"
        return f"{problem['operation']} caches, {heads}"


FAMILY = Appending(
    name="attention_append",
    groups={"appends": Group("{kind}", cases, "{kind}")},
    grid=("appends",),
    kinds={"bf16": "New keys and values in caches, bf16"},
    peers={"torch": "torch"},
    called={"torch": "torch's operations"},
    axis=("tokens", "new tokens"),
    divided="cache",
)
