"""One call of `warploom.attention_decode`: what it asks for, and what is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.families.attention_decode import (
    DecodeOperation,
    DecodeProblem,
    DecodeShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    Arguments,
    declared,
    named_spec,
    number,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.modifiers import MODIFIERS
from warploom.runtime.families._attention.operands import (
    Strides,
    check_out,
    in_place,
    ordered_strides,
    placed,
    strides,
)
from warploom.runtime.families._attention.problem import Arguments as Plain
from warploom.runtime.families._attention.problem import Extents as AttentionExtents
from warploom.runtime.families._attention.problem import Window, check_numbers
from warploom.runtime.families.attention_decode import reference
from warploom.runtime.families.attention_decode.extents import (
    Extents,
    check_contents,
    check_places,
    extents,
    kind_of,
)
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, shown

Pair = tuple[torch.Tensor, torch.Tensor]
INVARIANT = (64, 4096)  # sequences, and keys of each, that batch_invariant kernels are chosen for


def result_like(q: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that lies as a result for q does: as empty_like makes such tensors.

    Of extents of 1, as of one row, that may not be the strides that q has.
    """
    strides = ordered_strides(q)
    return torch.empty_like(torch.empty_strided(q.shape, strides, dtype=q.dtype, device="meta"))


@dataclass(frozen=True, slots=True)
class Details:
    """What a kind of call has in common: its sizes and mask, and where its results go."""

    sizes: Extents
    band: Band
    out_strides: tuple[int, ...]
    scale: float  # where a call gives none
    copies: tuple[str, ...]


@declared
class AttentionDecodeCall(Arguments[Details, Pair]):
    """The arguments of `warploom.attention_decode`, which says what they mean."""

    function = "warploom.attention_decode"
    outputs = ("o", "lse")
    nested = ", or packed queries (cu_seqlens_q) and cache_seqlens"
    gradients = "; for gradients, use warploom.attention with torch.autograd"
    no_gradient = (
        "warploom.attention_decode of tensors that require grad",
        "must be called without: it has no gradient",
        "call it under torch.no_grad(), or warploom.attention, which is differentiable",
    )

    q: torch.Tensor = tensor()
    k: torch.Tensor = tensor()
    v: torch.Tensor = tensor()
    cache_seqlens: torch.Tensor | None = tensor(
        default=None, schema="Tensor? lengths", kernel="lengths"
    )
    cache_leftpad: torch.Tensor | None = tensor(
        default=None, schema="Tensor? starts", kernel="starts"
    )
    page_table: torch.Tensor | None = tensor(default=None)
    causal: bool = option(default=True, schema="bool")
    window: Window | None = option(default=None, schema="SymInt? left, SymInt? right")
    softcap: float | None = number(default=None)
    scale: float | None = number(default=None, planned=False)
    sinks: torch.Tensor | None = tensor(default=None)
    scale_k: torch.Tensor | None = tensor(default=None)
    scale_v: torch.Tensor | None = tensor(default=None)
    cu_seqlens_q: torch.Tensor | None = tensor(default=None)
    cu_seqlens_k: torch.Tensor | None = tensor(default=None)
    max_seqlen_q: int | None = option(default=None, schema="SymInt?")
    max_seqlen_k: int | None = option(default=None, schema="SymInt?")
    batch_invariant: bool = option(default=False, schema="bool")
    out: torch.Tensor | None = result(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it; a list of two bounds is a window."""
        softcap, window = self.softcap, self.window
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None
        if isinstance(window, list):
            self.window = tuple(window)

    @property
    def scaling(self) -> float:
        """The factor of the products before the softmax."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def plain(self) -> Plain:
        """The call as the checks see it that are those of `warploom.attention`."""
        aligned = "bottom_right" if self.causal else False
        plain = Plain(self.q, self.k, self.v, aligned, self.window)  # type: ignore[arg-type]
        for name in _SHARED:
            setattr(plain, name, getattr(self, name))
        return plain

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.window is not None and not isinstance(self.window, tuple):
            raise ProblemError(
                f"window {shown(self.window)}",
                rule="must be (left, right): how many keys left and right of the diagonal",
                fix="(128, 0) for the last 129 keys: None is no bound",
            )
        fix = "pass a boolean: the diagonal always ends at the last key"
        require_boolean("causal", self.causal, fix=fix)
        require_boolean("batch_invariant", self.batch_invariant)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            longest = getattr(self, name)
            if longest is not None and (type(longest) is not int or longest < 0):
                raise ProblemError(
                    f"{name} {shown(longest)}",
                    rule="must be an int of at least 0, so that no call waits for the GPU to "
                    "learn it",
                    fix="use int(...)",
                )

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel for a GPU."""
        sizes, plain = extents(self), self.plain
        masked = band(plain, sizes)
        check_out(plain)
        check_numbers(plain)
        check_places(self)
        copies = () if in_place(self.q) else ("q",)
        wanted = self._operation(sizes, masked)
        at = shape(sizes, batch_invariant=self.batch_invariant)
        choice = dispatch.choose(wanted, at, spec=self.kernel, device=target)
        details = Details(sizes, masked, result_like(self.q).stride(), sizes.dim**-0.5, copies)
        return Draft(
            choice,
            None if sizes.empty else self._problem(details),
            self.addressed(),
            plain.numbers,
            copies,
            details,
        )

    def _operation(self, sizes: Extents, band: Band) -> DecodeOperation:
        """The operation that computes a call with the least work."""
        plain = self.plain
        return DecodeOperation(
            element=NAMES[self.q.dtype],
            dim=sizes.dim,
            cache="same" if self.k.dtype == self.q.dtype else NAMES[self.k.dtype],
            scales=_scales(self),
            page=sizes.page,
            keys="packed" if sizes.keys == "packed" else "fixed",
            queries="packed" if sizes.packed else "fixed",
            lengths=self.cache_seqlens is not None,
            starts=self.cache_leftpad is not None,
            mask=band.mask,
            batch_invariant=self.batch_invariant,
            **plain.modifier_fields,
        )

    def _problem(self, details: Details) -> DecodeProblem:
        sizes, band, copies, out = details.sizes, details.band, details.copies, self.out
        if out is None:
            out = torch.empty_strided(self.q.shape, details.out_strides, device="meta")
        packed_keys, table = sizes.keys == "packed", self.page_table
        by_token = _scales(self) == "token"
        return DecodeProblem(
            sizes.batch,
            sizes.heads,
            sizes.kv_heads,
            sizes.seq_q,
            sizes.seq_k,
            entries=1 if packed_keys else sizes.pages if sizes.page else sizes.batch,
            entry_rows=sizes.page or sizes.total_k,
            strides_q=placed("q", self.q, copies, packed=sizes.packed),
            strides_o=strides(out, packed=sizes.packed),
            strides_k=strides(self.k, packed=packed_keys),
            strides_v=strides(self.v, packed=packed_keys),
            total_q=sizes.total_q if sizes.packed else 0,
            table_stride=0 if table is None else table.stride(0),
            strides_scale_k=_steps(self.scale_k, self.k) if by_token else (0, 0, 0),
            strides_scale_v=_steps(self.scale_v, self.k) if by_token else (0, 0, 0),
            head_scale_stride=_steps(self.scale_k, self.k)[1],
            left=band.left,
            right=band.right,
        )

    def results(self, details: Details) -> Pair:
        """Out, as it was given or new, and a new lse."""
        q, out = self.q, self.out
        if out is None:
            out = q.new_empty_strided(q.shape, details.out_strides)
        return out, q.new_empty(details.sizes.lse_shape, dtype=torch.float32)

    def fake(self) -> Pair:
        """Both, of a call whose tensors fit each other."""
        q = self.q
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
        out = torch.empty_like(result_like(q), device=q.device)
        return out, q.new_empty(shape, dtype=torch.float32)

    def scalars(self, details: Details) -> tuple[float, ...]:
        """The scale, and a softcap where there is one."""
        return self.plain.told(details.scale)

    def check(self, details: Details, results: Pair) -> None:
        """Raise ProblemError for missing memory, bad numbers or lists, and a shared out."""
        require_memory(self.named())
        check_numbers(self.plain)
        rule = "out does not overlap what is read"
        refuse_overlap(results[0], self.read(), rule)
        if self.q.is_cpu:
            check_contents(self, details.sizes)

    def compute(self, details: Details, results: Pair) -> None:
        """Without a key, rows have what modifiers give them; else this is a call on CPU tensors.

        Of packed queries, rows past the last sequence are nobody's.
        """
        out, lse = results
        sizes = details.sizes
        if sizes.empty:
            out.zero_()
            lse.fill_(-torch.inf)
            for one in self.plain.modifiers:
                one.fill_empty(lse)
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = reference.of_call(self, sizes, details.band, reference.attention)
        last = int(self.cu_seqlens_q[-1]) if self.cu_seqlens_q is not None else sizes.total_q
        rows = (slice(last),) if sizes.packed else ()
        out[rows] = found[0][rows].to(out.dtype)
        lse[..., :last] = found[1][..., :last]


_NAMES = AttentionDecodeCall.declaration.names
# What of a call is as `warploom.attention` has it.
_SHARED = ("scale", "out", *(kind.argument for kind in MODIFIERS if kind.argument in _NAMES))


# ---- What kernels are chosen by ------------------------------------------------------------------


def shape(sizes: AttentionExtents, *, batch_invariant: bool = False) -> DecodeShape:
    """Return what of a call decides its time.

    Where results must not depend on the batch, no kernel is chosen by it either, nor by its longest
    sequence: all batches are taken for one.
    """
    batch, seq_k = INVARIANT if batch_invariant else (sizes.batch, sizes.seq_k)
    return DecodeShape(batch, sizes.heads, sizes.kv_heads, sizes.seq_q, seq_k)


def _scales(call: AttentionDecodeCall) -> str:
    """Scales of k and v as a kernel has them: where they lie apart, as those of tokens."""
    if call.scale_k is None:
        return "none"
    kinds = [kind_of(scale, call.k) for scale in (call.scale_k, call.scale_v)]
    alike = _steps(call.scale_k, call.k) == _steps(call.scale_v, call.k)
    return "head" if alike and "token" not in kinds else "token"


def _steps(scale: torch.Tensor | None, k: torch.Tensor) -> Strides:
    """The strides of a scale over entries, heads and rows of the cache."""
    if scale is None or kind_of(scale, k) == "tensor":
        return (0, 0, 0)
    if scale.dim() == 1:
        return (0, scale.stride(0), 0)
    if scale.dim() == 2:  # of packed keys
        return (0, scale.stride(1), scale.stride(0))
    return (scale.stride(0), scale.stride(1), scale.stride(2))
