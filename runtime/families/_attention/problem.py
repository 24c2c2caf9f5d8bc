"""What a call of `warploom.attention` asks for: its arguments and their sizes, checked.

Tensors are [batch, heads, seq, dim] views, or packed [total, heads, dim] with `cu_seqlens` of their
sequences. Nothing here reads a tensor's contents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention import DIMS
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.elements import name_of
from warploom.runtime.families._attention import dropout
from warploom.runtime.families._attention.further import check_further
from warploom.runtime.families._attention.given_blocks import converted
from warploom.runtime.tensors import require_one_device, require_tensors, shown

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


class Keywords(TypedDict, total=False):
    """What a call may be given beside q, k and v (see `warploom.attention`)."""

    causal: bool | Alignment
    window: Window | None
    softcap: float | None
    scale: float | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    out: torch.Tensor | None
    spec: KernelSpec | str | None
    deterministic: bool | None
    backward_spec: KernelSpec | str | None
    sinks: torch.Tensor | None
    block_mask: object
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    dropout_p: float
    dropout_state: torch.Tensor | None


@dataclass(slots=True)
class Arguments:
    """The arguments of one call of `warploom.attention`, which says what they mean."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool | Alignment = False
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    out: torch.Tensor | None = None
    spec: KernelSpec | str | None = None
    deterministic: bool | None = None
    backward_spec: KernelSpec | str | None = None
    sinks: torch.Tensor | None = None
    block_mask: Any = None  # a BlockMask, or torch's, which becomes one
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_state: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it; a state that lacks is drawn."""
        if self.block_mask is not None:
            self.block_mask = converted(self.block_mask)
        softcap = self.softcap  # None in most calls, which ask no more
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None
        if self.deterministic is not None and type(self.deterministic) is not bool:
            raise ProblemError(
                f"deterministic {shown(self.deterministic)}",
                rule="must be True, False or None",
                fix="None follows torch.are_deterministic_algorithms_enabled()",
            )
        if self.dropout_p != 0:
            self.dropout_p, self.dropout_state = dropout.settled(self)

    def named(self) -> list[tuple[str, object]]:
        """The tensors of the call, by the names that messages have for them."""
        return [
            ("q", self.q),
            ("k", self.k),
            ("v", self.v),
            ("out", self.out),
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("cu_seqlens_k", self.cu_seqlens_k),
            *self.further.items(),
            ("block_mask", None if self.block_mask is None else self.block_mask.places),
        ]

    @property
    def further(self) -> dict[str, torch.Tensor]:
        """The tensors that results depend on beside q, k and v, as launches take them."""
        names = ("sinks", "alibi_slopes", "bias", "mask", "dropout_state")
        state = self.dropout_state if self.dropout_p else None
        given = (self.sinks, self.alibi_slopes, self.bias, self.mask, state)
        named = zip(names, given, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that kernels of both passes are told."""
        softcap, keep = ("softcap",) * (self.softcap is not None), ("keep",) * bool(self.dropout_p)
        return ("scale", *softcap, *keep)

    def told(self, scale: float) -> tuple[float, ...]:
        """These numbers, with a scale where the call has none."""
        found: tuple[float, ...] = (scale if self.scale is None else self.scale,)
        if self.softcap is not None:
            found += (self.softcap,)
        return (*found, dropout.keep_of(self.dropout_p)) if self.dropout_p else found

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.q.get_device()

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_kinds(self)

    @property
    def kernel(self) -> KernelSpec | None:
        """The spec that was asked for, by itself or by name."""
        return dispatch.named(self.spec)

    @property
    def scaling(self) -> float:
        """The factor of the products before the softmax."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def offsets(self) -> tuple[torch.Tensor, ...]:
        """cu_seqlens of queries and of keys; none where lengths are fixed."""
        queries, keys = self.cu_seqlens_q, self.cu_seqlens_k
        if queries is None and keys is None:
            return ()
        return tuple(tensor for tensor in (queries, keys) if tensor is not None)

    def signature(self) -> tuple[object, ...]:
        """Everything that decides the plan: all but addresses (their alignment counts) and numbers.

        Whether both cu_seqlens are one tensor counts, since causal=True takes equal lengths; what
        is said of the gradients does not.
        """
        q, k, v, out = self.q, self.k, self.v, self.out
        return (
            Arguments,
            q.shape,
            q.stride(),
            q.dtype,
            q.data_ptr() & 15,
            q.get_device(),
            k.shape,
            k.stride(),
            k.dtype,
            k.data_ptr() & 15,
            k.get_device(),
            v.shape,
            v.stride(),
            v.dtype,
            v.data_ptr() & 15,
            v.get_device(),
            self.causal,
            None if self.window is None else tuple(self.window),
            self.softcap is None,
            None
            if self.cu_seqlens_q is None
            and self.cu_seqlens_k is None
            and self.max_seqlen_q is None
            and self.max_seqlen_k is None
            else self._lengths,
            None
            if out is None
            else (out.shape, out.stride(), out.dtype, out.data_ptr() & 15, out.get_device()),
            self.spec,
            self._further if self._changed else None,
            None if self.block_mask is None else self.block_mask.kind,
        )

    @property
    def _changed(self) -> bool:
        given = self.sinks, self.alibi_slopes, self.bias, self.mask
        return bool(self.dropout_p) or any(one is not None for one in given)

    @property
    def _lengths(self) -> object:
        """What of packed lengths decides the plan."""
        longest = (self.max_seqlen_q, self.max_seqlen_k)
        offsets = self.offsets
        one = len(offsets) == 2 and offsets[0].data_ptr() == offsets[1].data_ptr()
        described = tuple((t.shape, t.stride(), t.dtype, t.get_device()) for t in offsets)
        return described, one, longest

    @property
    def _further(self) -> object:
        """What of further tensors decides the plan, and that of the gradients."""
        return tuple(
            (name, t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device(), t.requires_grad)
            for name, t in self.further.items()
        )


def require_kinds(call: Arguments) -> None:
    """Raise ProblemError for arguments that are of no type that they may have."""
    require_tensors(
        "warploom.attention",
        call.named(),
        ("q", "k", "v"),
        nested=", or packed sequences (cu_seqlens_q, cu_seqlens_k)",
        gradients="; for gradients, use torch.autograd",
    )
    dispatch.named(call.spec)
    dispatch.named(call.backward_spec)
    if call.window is not None and not isinstance(call.window, tuple | list):
        raise ProblemError(
            f"window {shown(call.window)}",
            rule="must be (left, right): how many columns beside the diagonal",
            fix="(128, 0) with causal, (128, 128) without: None is no bound",
        )
    if not isinstance(call.causal, bool | str):
        raise ProblemError(
            f"causal {shown(call.causal)}",
            rule="must be False, True, 'top_left' or 'bottom_right'",
            fix="write one of them",
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = getattr(call, name)
        if longest is not None and type(longest) is not int:
            raise ProblemError(
                f"{name} {shown(longest)}",
                rule="must be an int, so that no call waits for the GPU to learn it",
                fix="use int(...)",
            )


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of a call; packed: `batch` counts sequences, `seq_q` and `seq_k` the longest."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    total_q: int
    total_k: int
    packed: bool

    @property
    def sharing(self) -> int:
        """Query heads of one kv head."""
        return self.heads // max(1, self.kv_heads)

    @property
    def empty(self) -> bool:
        """True when no product is left to compute."""
        totals = self.total_q and self.total_k
        return not (self.batch and self.heads and self.seq_q and self.seq_k and totals)

    @property
    def kernel_dim(self) -> int:
        """The head dimension of the kernel: the next there is, the rest is filled with zeros."""
        return next(dim for dim in DIMS if dim >= self.dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp: one number for each query and head."""
        lead = (self.heads,) if self.packed else (self.batch, self.heads)
        return (*lead, self.total_q if self.packed else self.seq_q)


def extents(call: Arguments) -> Extents:
    """Return the sizes of a call, or raise ProblemError for tensors that do not go together."""
    require_kinds(call)
    q, k, v = call.q, call.k, call.v
    if call.dropout_p:
        dropout.check_state(call.dropout_state, q.device)
    packed = _is_packed(call)
    rank = 3 if packed else 4
    layout = "[total, heads, dim]" if packed else "[batch, heads, seq, dim]"
    if any(t.dim() != rank for t in (q, k, v)):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule=f"each must be {layout}",
            fix="packed tensors come with cu_seqlens and max_seqlen, others without",
        )
    _check_elements(call)
    heads_at, seq_at = (1, 0) if packed else (1, 2)
    heads, kv_heads, dim = q.shape[heads_at], k.shape[heads_at], q.shape[-1]
    if k.shape != v.shape or k.shape[-1] != dim or (not packed and k.shape[0] != q.shape[0]):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule="k and v must have one shape, and the batch and dim of q",
            fix=f"give {layout} tensors; to swap heads and seq, use .transpose(1, 2)",
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(
            f"{heads} heads of q over {kv_heads} of k and v",
            rule="the heads of q must be a multiple of those of k and v",
            fix="consecutive heads of q share one of k and v",
        )
    if dim % 8 or not 8 <= dim <= DIMS[-1]:
        raise ProblemError(
            f"dim {dim}",
            rule=f"a head dimension must be a multiple of 8 up to {DIMS[-1]}",
            fix="pad q, k and v with zeros, and pass the scale of the true dimension",
        )
    total_q, total_k = q.shape[seq_at], k.shape[seq_at]
    batch, seq_q, seq_k = q.shape[0], total_q, total_k
    if packed:
        batch = call.offsets[0].shape[0] - 1
        seq_q, seq_k = min(call.max_seqlen_q or 0, total_q), min(call.max_seqlen_k or 0, total_k)
    found = Extents(batch, heads, kv_heads, seq_q, seq_k, dim, total_q, total_k, packed)
    if further := call.further:
        require_one_device((("q", q), *further.items()))
        scores = (call.max_seqlen_q or 0, call.max_seqlen_k or 0) if packed else (seq_q, seq_k)
        check_further(call, (batch, heads, *scores))
    return found


def _is_packed(call: Arguments) -> bool:
    """Whether lengths vary; ProblemError for half of what that takes."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    missing = [name for name in names if getattr(call, name) is None]
    if len(missing) == len(names):
        return False
    if missing:
        raise ProblemError(
            f"packed lengths without {', '.join(missing)}",
            rule=f"packed lengths take {', '.join(names)}",
            fix="the longest lengths are ints, so that no call waits for the GPU to learn them",
        )
    for name, offsets in zip(names, call.offsets, strict=False):
        if (
            offsets.dtype != torch.int32
            or offsets.dim() != 1
            or not offsets.is_contiguous()
            or offsets.shape != call.offsets[0].shape
            or offsets.shape[0] < 1
            or offsets.device != call.q.device
        ):
            raise ProblemError(
                f"{name} {list(offsets.shape)} {offsets.dtype} on {offsets.device}",
                rule="must be int32 [batch + 1], contiguous, on the device of q, of one length",
                fix="a cumulative sum of lengths that begins with 0",
            )
    for name in names[2:]:
        if getattr(call, name) < 0:
            raise ProblemError(
                f"{name} {getattr(call, name)}",
                rule="the longest length must be at least 0",
                fix="pass the largest length of a sequence",
            )
    return True


def _check_elements(call: Arguments) -> None:
    q, k, v = call.q, call.k, call.v
    if not q.dtype == k.dtype == v.dtype or name_of(q.dtype, "q") not in ("fp16", "bf16"):
        raise ProblemError(
            f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
            rule="must have one type, fp16 or bf16",
            fix="convert with .to(torch.bfloat16)",
        )
    require_one_device((("q", q), ("k", k), ("v", v)))


def check_numbers(call: Arguments) -> None:
    """Raise ProblemError for a scale or softcap that the softmax cannot be taken with."""
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if value is None:
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise ProblemError(
                f"{name} {shown(value)}",
                rule=f"{name} is finite and greater than 0",
                fix="to change the sign of the products, negate q",
            )
