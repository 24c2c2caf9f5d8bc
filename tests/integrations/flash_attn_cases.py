"""Calls of FlashAttention's functions, and the check that both their tests make: `verify`.

What is right is computed here from the definition, in float64, sequence by sequence; how far off
a kernel may be is what the families' references say of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import warploom.flash_attn
from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families.attention_backward import reference as backward
from warploom.runtime.families.attention_backward.call import BackwardCall

Lengths = tuple[tuple[int, int], ...]  # queries and keys of each sequence
Packing = Literal["", "kvpacked", "qkvpacked"]
NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class Case:
    """One call; without `varlen` all sequences are as long as the first."""

    lengths: Lengths
    packing: Packing = ""
    varlen: bool = False
    heads: int = 4
    heads_k: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    past: int = 0  # rows past the last sequence
    slopes: Literal["", "heads", "batches"] = ""  # for whom scores lose a slope by distance
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function that it is a call of."""
        return "_".join(filter(None, ("flash_attn", "varlen" * self.varlen, self.packing, "func")))

    def operands(self, device: str, seed: int = 0) -> list[torch.Tensor]:
        """Fresh q, k and v, each [total, heads, dim]; rows past the last sequence are NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        totals = [sum(lengths) for lengths in zip(*self.lengths, strict=True)]
        made = []
        for total, heads in zip(
            (*totals, totals[1]), (self.heads, *[self.heads_k] * 2), strict=True
        ):
            shape = (total + self.past, heads, self.dim)
            one = torch.randn(shape, generator=generator, device=device).to(self.dtype)
            one[total:] = torch.nan
            made.append(one)
        return made

    def given(self, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the function takes, with the values of q, k and v."""
        q, k, v = (self.laid(tensor) for tensor in operands)
        if self.packing == "qkvpacked":
            return [torch.stack((q, k, v), -3)]
        return [q, torch.stack((k, v), -3)] if self.packing == "kvpacked" else [q, k, v]

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """[total, ..] as the function has it: with a batch, unless lengths vary."""
        return tensor.clone() if self.varlen else tensor.unflatten(0, (len(self.lengths), -1))

    def offsets(self, device: str) -> list[torch.Tensor]:
        """cu_seqlens of queries and keys; one tensor where these lie in one."""
        ends = [torch.tensor([0, *one]).cumsum(0).int() for one in zip(*self.lengths, strict=True)]
        queries, keys = (starts.to(device) for starts in ends)
        return [queries, queries if self.packing == "qkvpacked" else keys]

    def slopes_on(self, device: str) -> torch.Tensor | None:
        """alibi_slopes [heads] or [batch, heads]."""
        if not self.slopes:
            return None
        of_heads = 2.0 ** -torch.arange(1, self.heads + 1, device=device)
        batch = torch.arange(1, len(self.lengths) + 1, device=device)
        return of_heads if self.slopes == "heads" else of_heads / batch[:, None]

    def call(self, *given: torch.Tensor, **others: Any) -> Any:  # noqa: ANN401
        """Call the function, lengths as it takes them."""
        function = getattr(warploom.flash_attn, self.name)
        slopes = self.slopes_on(str(given[0].device))
        if slopes is not None:
            others["alibi_slopes"] = slopes
        lengths: list[Any] = []
        if self.varlen:
            longest = [max(one) for one in zip(*self.lengths, strict=True)]
            lengths = [*self.offsets(str(given[0].device)), *longest]
        if self.varlen and self.packing == "qkvpacked":
            lengths = [lengths[0], longest[0]]
        return function(*given, *lengths, **self.keywords, **others)


def _case(packing: Packing, varlen: bool, lengths: Lengths, **others: Any) -> Case:
    fields = {name: others.pop(name) for name in (*others,) if name in Case.__dataclass_fields__}
    if packing == "qkvpacked":
        fields["heads_k"] = fields.setdefault("heads", 3)
    return Case(lengths, packing, varlen, **fields, keywords=others)


UNEQUAL: Lengths = ((33, 70), (33, 70))
FEW_KEYS: Lengths = ((70, 33), (70, 33))
EQUAL: Lengths = ((65, 65), (65, 65))
RAGGED: Lengths = ((33, 70), (1, 40), (0, 7), (50, 3), (65, 65))
SAME: Lengths = ((33, 33), (1, 1), (0, 0), (65, 65))
FUNCTIONS: dict[str, tuple[Packing, bool, Lengths]] = {
    "fixed": ("", False, UNEQUAL),
    "kvpacked": ("kvpacked", False, FEW_KEYS),
    "qkvpacked": ("qkvpacked", False, EQUAL),
    "varlen": ("", True, RAGGED),
    "varlen kvpacked": ("kvpacked", True, RAGGED),
    "varlen qkvpacked": ("qkvpacked", True, SAME),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "left": {"window_size": (9, -1), "dtype": torch.float16},
    "right": {"window_size": (-1, 3)},
    "causal window": {"causal": True, "window_size": (17, 30)},
    "softcap": {"causal": True, "softcap": 3.0},
    "scale": {"softmax_scale": 0.3, "deterministic": True},
    "one head of keys": {"causal": True, "heads": 4, "heads_k": 1},
    "dim 59": {"causal": True, "dim": 59},
    "slopes": {"slopes": "heads", "dtype": torch.float16},
    "slopes of batches": {"slopes": "batches", "causal": True, "window_size": (40, -1)},
    "dim 128": {"dim": 128, "dtype": torch.float16},
}
CASES = {
    f"{function}, {variant}": _case(*FUNCTIONS[function], **VARIANTS[variant])
    for function in FUNCTIONS
    for variant in VARIANTS
} | {
    f"{function}, rows past the last": _case(*FUNCTIONS[function], causal=True, past=5)
    for function in FUNCTIONS
    if "varlen" in function
}


# ---- What is right -------------------------------------------------------------------------------


def exact(case: Case, operands: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """out [total, heads, dim] and lse [heads, total] of float64 operands; 0 where nothing is."""
    q, k, v = operands
    out, lse = torch.zeros_like(q), q.new_full((case.heads, len(q)), -torch.inf)
    first_q = first_k = 0
    slopes = case.slopes_on(str(q.device))
    for index, (queries, keys) in enumerate(case.lengths):
        rows, columns = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
        first_q, first_k = rows.stop, columns.stop
        shown = _shown(case, queries, keys, q.device)
        some = shown.any(-1)
        group = case.heads // case.heads_k
        each_k, each_v = (t[columns].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows][some], each_k)
        scores = scores * (case.keywords.get("softmax_scale") or case.dim**-0.5)
        if softcap := case.keywords.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            of_heads = slopes if slopes.dim() == 1 else slopes[index]
            distance = _from_diagonal(queries, keys, q.device)[some].abs()
            scores = scores - of_heads.double()[:, None, None] * distance
        scores = scores.masked_fill(~shown[some], -torch.inf)
        values = torch.einsum("hqk,khd->qhd", scores.softmax(-1), each_v)
        at = torch.arange(rows.start, rows.stop, device=q.device)[some]
        out = out.index_copy(0, at, values)
        lse = lse.index_copy(1, at, scores.logsumexp(-1))
    return out, lse


def _shown(case: Case, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys each query attends to: those around the diagonal that ends at both last ones."""
    left, right = case.keywords.get("window_size", (-1, -1))
    if case.keywords.get("causal"):
        right = 0
    beside = _from_diagonal(queries, keys, device)
    shown = torch.ones_like(beside, dtype=torch.bool)
    if left >= 0:
        shown &= beside >= -left
    if right >= 0:
        shown &= beside <= right
    return shown


def _from_diagonal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """How far right of the diagonal, which ends at both last ones, each score is."""
    row = torch.arange(queries, device=device)[:, None] + keys - queries
    return torch.arange(keys, device=device) - row


def _arguments(case: Case, operands: list[torch.Tensor], device: str) -> Arguments:
    """The call in the words of the families' references, with the dim that kernels see."""
    keywords = case.keywords
    padded = [torch.nn.functional.pad(tensor, (0, -case.dim % 8)) for tensor in operands]
    left, right = (None if n < 0 else n for n in keywords.get("window_size", (-1, -1)))
    return Arguments(
        *padded,
        "bottom_right" if keywords.get("causal") else False,
        (left, right),
        keywords.get("softcap"),
        keywords.get("softmax_scale") or case.dim**-0.5,
        *case.offsets(device),
        *(max(one) for one in zip(*case.lengths, strict=True)),
        alibi_slopes=case.slopes_on(device),
    )


# ---- The check -----------------------------------------------------------------------------------


def verify(case: Case, device: str) -> list[torch.Tensor]:
    """Assert out, lse and all gradients within their bounds of float64; return the gradients."""
    operands = case.operands(device)
    leaves = [tensor.requires_grad_() for tensor in case.given(operands)]
    out, lse, probabilities = case.call(*leaves, return_attn_probs=True)
    assert probabilities is None and lse.dtype == torch.float32 and out.dtype == case.dtype
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = list(torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    assert [one.shape for one in found] == [leaf.shape for leaf in leaves]

    flat = out.detach() if case.varlen else out.detach().flatten(0, 1)
    rows = lse.detach() if case.varlen else lse.detach().transpose(0, 1).flatten(1)
    flat_dout = dout if case.varlen else dout.flatten(0, 1)
    flat_dlse = dlse if case.varlen else dlse.transpose(0, 1).flatten(1)
    last = [sum(one) for one in zip(*case.lengths, strict=True)]
    exact_leaves = [tensor.nan_to_num().double().requires_grad_() for tensor in operands]
    wanted = exact(case, exact_leaves)
    reached = (
        wanted[0][: last[0]],
        wanted[1][:, : last[0]].masked_fill(~wanted[1][:, : last[0]].isfinite(), 0),
    )
    arriving = (flat_dout[: last[0]].double(), flat_dlse[:, : last[0]].double())
    gradients = torch.autograd.grad(reached, exact_leaves, arriving)

    call = _arguments(case, operands, device)
    function_band = band(call, extents(call))
    bounds = forward.of_call(call, function_band, forward.bound)
    dim = case.dim
    _assert_within("out", flat[: last[0]], wanted[0][: last[0]], bounds[0][: last[0], :, :dim])
    _assert_within("lse", rows[:, : last[0]], wanted[1][:, : last[0]], bounds[1][:, : last[0]])
    padded = [torch.nn.functional.pad(tensor, (0, -dim % 8)) for tensor in (flat, flat_dout)]
    of_gradients = BackwardCall(call, padded[0], rows, padded[1], flat_dlse)
    allowed = backward.of_call(of_gradients, function_band, backward.bound)
    parts = [one for t in found for one in (t.unbind(-3) if t.dim() > out.dim() else (t,))]
    for name, part, right, bound in zip(NAMES, parts, gradients, allowed, strict=True):
        one = part if case.varlen else part.flatten(0, 1)
        _assert_within(f"d{name}", one, right, bound[..., :dim])
    return found


def _assert_within(
    name: str, found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor
) -> None:
    wide, wanted = found.double(), wanted.detach()
    wrong = ~((wide == wanted) | ((wide - wanted).abs() <= bound))
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {found.numel()} elements of {name} are wrong; first "
            f"{list(first)}: {wide[first]} is not {wanted[first]} +- {bound[first]}"
        )
