"""A call in FlashAttention's words: what its tensors and keywords ask of `warploom.attention`.

Its tensors are [batch, seq, heads, dim], or with cu_seqlens [total, heads, dim]; packed ones have
3 or 2 of them before heads. Nothing is copied but where a head dimension is no multiple of 8.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.bounds import Sequences
from warploom.integrations.flash_attn_gradient import Tensors, Warm, attend
from warploom.runtime.tensors import shown

Window = tuple[int, int]
Probabilities = tuple[torch.Tensor, torch.Tensor, None]  # out, softmax_lse, S_dmask
_NAMES = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}
_EXTENTS = {  # behind the first, and how many are packed
    "q": ("heads, dim", None),
    "k": ("heads_k, dim", None),
    "v": ("heads_k, dim", None),
    "kv": ("2, heads_k, dim", 2),
    "qkv": ("3, heads, dim", 3),
}
_EACH_MULTIPLE = 8  # of a head dimension


@dataclass(frozen=True, slots=True)
class Options:
    """What every function of FlashAttention's is told of the attention, by its names."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool

    def keywords(self) -> dict[str, Any]:
        """Those of `warploom.attention`; ProblemError for what it does not compute."""
        if type(self.causal) is not bool or type(self.deterministic) is not bool:
            require_boolean("causal", self.causal)
            require_boolean("deterministic", self.deterministic)
        scale = self.softmax_scale
        if scale is not None and not (_is_number(scale) and scale > 0):
            raise ProblemError(
                f"softmax_scale {shown(scale)}",
                rule="must be a number greater than 0, or None: the head dimension ** -0.5",
                fix="to change the sign of the scores, negate q",
            )
        if not (_is_number(self.softcap) and math.isfinite(self.softcap)):
            raise ProblemError(
                f"softcap {shown(self.softcap)}", rule="must be a number; 0 is none", fix="use 0.0"
            )
        found: dict[str, Any] = {
            "causal": "bottom_right" if self.causal else False,
            "window": _window(self.window_size),
            "softcap": self.softcap if self.softcap > 0 else None,
            "scale": scale,
            "deterministic": True if self.deterministic else None,
        }
        if not (_is_number(self.dropout_p) and self.dropout_p == 0):
            found["dropout_p"] = self.dropout_p
        if self.alibi_slopes is not None:  # those of a batch may be one row, repeated
            slopes = named_tensor("alibi_slopes", self.alibi_slopes)
            found["alibi_slopes"] = slopes.contiguous()
        return found


def attended(
    options: Options,
    tensors: Tensors,
    sequences: Sequences | None = None,
    keep: Callable[..., None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and its log-sum-exp, of [batch, seq, .., heads, dim] tensors or of `sequences`.

    `keep` is told of a call that is launched as it stands.
    """
    keywords = {**options.keywords(), **_lengths(sequences)}
    _check(tensors, "batch, seq" if sequences is None else "total")
    dim = tensors[0].shape[-1]
    if missing := -dim % _EACH_MULTIPLE:
        keywords["scale"] = keywords["scale"] or dim**-0.5
        tensors = tuple(pad(tensor, (0, missing)) for tensor in tensors)
    out, lse = attend(tensors, keywords, keep)
    return out[..., :dim] if missing else out, lse


def packed(
    options: Options,
    tensors: Tensors,
    return_attn_probs: bool,
    sequences: Sequences | None = None,
) -> torch.Tensor | Probabilities:
    """What a function of FlashAttention's returns of tensors of which some lie in one."""
    if type(return_attn_probs) is not bool:
        require_boolean("return_attn_probs", return_attn_probs)
    results = attended(options, tensors, sequences)
    return (*results, None) if return_attn_probs else results[0]


def _lengths(sequences: Sequences | None) -> dict[str, Any]:
    """Those of `warploom.attention`, checked."""
    if sequences is None:
        return {}
    offsets = ("cu_seqlens_q", "cu_seqlens_k")
    longest = ("max_seqlen_q", "max_seqlen_k")
    return {
        **{name: named_tensor(name, getattr(sequences, name)) for name in offsets},
        **{name: _integer(name, getattr(sequences, name)) for name in longest},
    }


# ---- Calls like an earlier one -------------------------------------------------------------------

_OPTIONS = ("dropout_p", "scale", "causal", "window", "softcap", "alibi_slopes", "deterministic")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


FIXED = Warm(("q", "k", "v", *_OPTIONS), lambda *options: Options(*options).keywords())
VARLEN = Warm(
    ("q", "k", "v", *_LENGTHS, *_OPTIONS),
    lambda *values: {**Options(*values[4:]).keywords(), **_lengths(Sequences(*values[:4]))},
)


# ---- Arguments -----------------------------------------------------------------------------------


def _check(tensors: Tensors, lead: str) -> None:
    """Raise ProblemError for tensors of another layout than FlashAttention's."""
    names = _NAMES[len(tensors)]
    leading = lead.count(",") + 1
    for name, tensor in zip(names, tensors, strict=True):
        extents, packed = _EXTENTS[name]
        rank = leading + (2 if packed is None else 3)
        shape = named_tensor(name, tensor).shape
        if len(shape) != rank or (packed is not None and shape[-3] != packed):
            raise ProblemError(
                f"{name} {list(shape)}",
                rule=f"must be [{lead}, {extents}]",
                fix="the functions with `varlen` take [total, ..] tensors and cu_seqlens, "
                "the others [batch, seq, ..]",
            )
    q, last = tensors[0], tensors[-1]
    apart = last.shape[-1] != q.shape[-1] or (lead != "total" and last.shape[0] != q.shape[0])
    if apart or (len(tensors) == 3 and tensors[1].shape != last.shape):
        raise ProblemError(
            ", ".join(f"{n} {list(t.shape)}" for n, t in zip(names, tensors, strict=True)),
            rule="keys and values must have one shape, and the batch and dim of q",
            fix=f"give [{lead}, heads, dim] tensors",
        )


def _is_number(given: object) -> bool:
    return isinstance(given, float | int) and not isinstance(given, bool)


def named_tensor(name: str, given: object) -> torch.Tensor:
    """Return what is given by this name; ProblemError where it is no tensor."""
    if not isinstance(given, torch.Tensor):
        raise ProblemError(
            f"{name} {shown(given)} of type {type(given).__name__}",
            rule="must be a torch tensor",
            fix="torch.as_tensor makes one of numbers, lists and numpy arrays",
        )
    return given


def _window(given: Window) -> tuple[int | None, int | None] | None:
    """The columns on each side, None for those that FlashAttention has a negative number for."""
    try:
        left, right = given
    except (TypeError, ValueError):
        raise ProblemError(
            f"window_size {shown(given)}",
            rule="must be (left, right): columns on each side of the diagonal; -1 is no bound",
            fix="(-1, -1) is no window",
        ) from None
    left, right = _integer("window_size", left), _integer("window_size", right)
    if left < 0 and right < 0:
        return None
    return left if left >= 0 else None, right if right >= 0 else None


def _integer(name: str, given: object) -> int:
    """An int, also of a tensor of one on the CPU."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, torch.Tensor) and not given.is_cpu:
        raise ProblemError(
            f"{name}, a tensor on {given.device}",
            rule="must be an int, which no call has to wait for",
            fix="call .item() on it once, where the lengths are made",
        )
    try:
        if not isinstance(given, bool):
            return operator.index(given)  # type: ignore[arg-type]
        raise TypeError
    except TypeError:
        raise ProblemError(
            f"{name} {shown(given)} of type {type(given).__name__}",
            rule="must be an int",
            fix="use int(...)",
        ) from None
