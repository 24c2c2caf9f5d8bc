"""An attention in torch: scaled_dot_product_attention by each of its backends, and flex_attention.

What torch has no argument for is refused, in words that a table can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.baselines import Baseline, Results, compiled
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.modifiers import Modifier
from warploom.runtime.families._attention.problem import Arguments, extents

BACKENDS = {
    "sdpa, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "sdpa, FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "sdpa, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa, eager (math)": SDPBackend.MATH,
}
FLEX = "flex_attention, torch.compile"
LARGEST = 1 << 30  # bytes of scores, of which eager torch keeps several for each set of operands


@dataclass(frozen=True, slots=True)
class Scores:
    """What of q k^T counts: row r sees the columns from r - left to r + right.

    causal     it is the mask that torch has a flag for
    modifiers  what changes scores, which flex_attention alone has
    refused    what torch's functions have no argument for; "" where there is nothing
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    causal: bool = False
    modifiers: tuple[Modifier, ...] = ()
    refused: str = ""

    @property
    def masked(self) -> bool:
        """Whether some columns do not count for some rows."""
        return min(self.left, self.right) < UNBOUNDED

    def visible(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Which columns count for which rows."""
        return (columns >= rows - self.left) & (columns <= rows + self.right)


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [batch, heads, seq, dim]


def scores_of(call: Arguments, keywords: Iterable[str]) -> Scores:
    """What of q k^T counts in calls with these keywords."""
    modifiers = tuple(one for one in call.modifiers if one.flex)
    taken = {"causal", "window", *(one.argument for one in modifiers)}
    if further := sorted({*keywords} - taken):
        return Scores(refused=f"not measured with {', '.join(further)}")
    sizes = extents(call)
    if sizes.packed:
        return Scores(refused="torch's sdpa takes no varlen sequences")
    left, right = band(call, sizes).shifted(sizes)
    return Scores(left, right, call.causal is True, modifiers)


def baselines(
    scores: Scores, sets: Sequence[Operands], douts: Sequence[torch.Tensor] = ()
) -> list[Baseline]:
    """Every backend, and flex_attention by torch.compile; their gradients where `douts` has those.

    Gradients are of a forward pass that ran before, whose graph is kept.
    """
    found = []
    names = " and ".join(one.argument for one in scores.modifiers)
    shown = names and f"torch's sdpa has no {names}"
    mask = _mask(scores, *sets[0]) if not (scores.refused or shown) else None
    for name, backend in BACKENDS.items():
        why = scores.refused or shown
        if backend is SDPBackend.MATH and not why and _bytes(*sets[0]) > LARGEST:
            why = f"its scores take {_bytes(*sets[0]) >> 30} GiB"
        attend = _refusing(why) if why else partial(_by_backend, backend, scores, mask)
        found.append(_baseline(name, attend, sets, douts))
    attend = _refusing(scores.refused) if scores.refused else _flex(scores)
    return [*found, _baseline(FLEX, attend, sets, douts)]


def _baseline(
    name: str,
    attend: Callable[..., torch.Tensor],
    sets: Sequence[Operands],
    douts: Sequence[torch.Tensor],
) -> Baseline:
    if not douts:
        return Baseline(name, [partial(attend, *one) for one in sets])
    passes = [_backward(attend, one, dout) for one, dout in zip(sets, douts, strict=True)]
    return Baseline(name, passes, gradients=True)


def _backward(
    attend: Callable[..., torch.Tensor], one: Operands, dout: torch.Tensor
) -> Callable[[], Results]:
    """dq, dk and dv; the forward pass runs in the first call."""
    graph: list[Any] = []

    def call() -> Sequence[torch.Tensor]:
        if not graph:
            leaves = [tensor.detach().requires_grad_() for tensor in one]
            graph.extend((attend(*leaves), leaves))
        out, leaves = graph
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return found

    return call


def _by_backend(
    backend: SDPBackend,
    scores: Scores,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=scores.causal, enable_gqa=grouped
        )


def _flex(scores: Scores) -> Callable[..., torch.Tensor]:
    """flex_attention, whose mask is made by the first call."""
    attend: Callable[..., Any] = compiled(flex_attention.flex_attention)
    masks: list[Any] = []

    def seen(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return scores.visible(row, column)

    caps = [one.capped for one in scores.modifiers]

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        for cap in caps:
            score = cap(score)
        return score

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not masks:
            extents = (q.shape[2], k.shape[2])
            make = partial(flex_attention.create_block_mask, seen, None, None, *extents)
            masks.append(make(device=str(q.device)) if scores.masked else None)
        grouped = q.shape[1] != k.shape[1]
        score = capped if caps else None
        found: torch.Tensor = attend(q, k, v, score, masks[0], None, grouped)
        return found

    return call


def _mask(
    scores: Scores, q: torch.Tensor, k: torch.Tensor, _v: torch.Tensor
) -> torch.Tensor | None:
    """The mask as a tensor, where torch has no flag for it."""
    if scores.causal or not scores.masked:
        return None
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    return scores.visible(rows, torch.arange(k.shape[2], device=q.device))


def _bytes(q: torch.Tensor, k: torch.Tensor, _v: torch.Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.element_size()


def _refusing(words: str) -> Callable[..., torch.Tensor]:
    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(words)

    return refuse
