"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warploom.arguments import require_boolean
from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeProblem,
    AttentionQuantizeShape,
)
from warploom.generator.families.attention_quantize.schedule import TILE, Strides
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families.attention_forward.values import dim_major
from warploom.runtime.families.attention_quantize import checks, reference
from warploom.runtime.families.attention_quantize.checks import PACKED_AXES
from warploom.runtime.families.attention_quantize.reference import E4M3, Results
from warploom.runtime.operands import loadable, refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # of q, k and v, those whose rows 16 bytes do not reach


@declared
class AttentionQuantizeCall(Arguments[Details, Results]):
    """The arguments of `attention_quantize`, which says what they mean; without q and k, v alone.

    cu_seqlens              where sequences of v alone begin in [total, kv_heads, dim], and the end
    q_out, .. score_shift   where results go; None: they are made
    """

    function = "attention_quantize"
    outputs = (
        *("q_out", "k_out", "v_out", "q_descale", "k_descale", "v_descale"),
        *("k_mean", "score_shift"),
    )
    no_gradient = (
        "q, k or v that requires grad",
        "attention_quantize is not differentiable",
        "call it under torch.no_grad()",
    )

    v: torch.Tensor = tensor()
    q: torch.Tensor | None = tensor(default=None)
    k: torch.Tensor | None = tensor(default=None)
    scores: str = option(default="int8", schema="str")
    smooth: bool = option(default=True, schema="bool")
    spec: KernelSpec | str | None = named_spec(default=None)
    cu_seqlens: torch.Tensor | None = tensor(default=None, schema="Tensor?=None", aligned=False)
    q_out: torch.Tensor | None = result(default=None, public=False)
    k_out: torch.Tensor | None = result(default=None, public=False)
    v_out: torch.Tensor | None = result(default=None, public=False)
    q_descale: torch.Tensor | None = result(default=None, public=False)
    k_descale: torch.Tensor | None = result(default=None, public=False)
    v_descale: torch.Tensor | None = result(default=None, public=False)
    k_mean: torch.Tensor | None = result(default=None, public=False)
    score_shift: torch.Tensor | None = result(default=None, public=False)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_boolean("smooth", self.smooth)
        checks.require_words(self)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check(self)
        q, v = self.q, self.v
        (batch, kv_heads, seq_k), (heads, seq_q) = self._sizes, (0, 0)
        if q is not None:
            heads, seq_q = q.shape[1:3]
        alone, packed = q is None, self.sequences is not None
        sequences = batch if self.sequences is None else self.sequences
        operation = AttentionQuantizeOperation(
            NAMES[v.dtype],  # type: ignore[arg-type]
            v.shape[-1],
            "none" if alone else self.scores,  # type: ignore[arg-type]
            smooth=self.smooth and not alone,
            lengths="packed" if packed else "fixed",
        )
        each = -(-batch * seq_k // max(1, sequences))
        shape = AttentionQuantizeShape(sequences, heads, kv_heads, seq_q, each)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        operands = [(name, one) for name, one in self.read() if name != "cu_seqlens"]
        copies = tuple(name for name, one in operands if not loadable(one))
        problem = self._problem(copies) if sequences * kv_heads * seq_k else None
        return Draft(choice, problem, self.addressed(), (), copies, Details(copies))

    def _problem(self, copies: tuple[str, ...]) -> AttentionQuantizeProblem:
        """Where rows are: of what is copied or made, as they will be."""
        nowhere = torch.device("meta")
        read = {
            name: one.new_empty(one.shape, device=nowhere) if name in copies else one
            for name, one in self.read()
            if name != "cu_seqlens"
        }
        q_out, k_out, *_ = self._results(nowhere)
        laid_out = {**read, "q_out": q_out, "k_out": k_out}
        strides: dict[str, Any] = {
            f"strides_{name}": _strides(one) for name, one in laid_out.items() if one is not None
        }
        (batch, kv_heads, seq_k), (heads, seq_q) = self._sizes, (0, 0)
        if self.q is not None:
            heads, seq_q = self.q.shape[1:3]
        sizes = batch, heads, kv_heads, seq_q, seq_k
        return AttentionQuantizeProblem(*sizes, **strides, sequences=self.sequences or 0)

    @property
    def sequences(self) -> int | None:
        """How many sequences are packed; None where lengths are fixed."""
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Batches, heads and keys of v; packed: one batch of all keys."""
        if self.cu_seqlens is None:
            batch, kv_heads, keys, _ = self.v.shape
            return batch, kv_heads, keys
        keys, kv_heads, _ = self.v.shape
        return 1, kv_heads, keys

    def _results(self, device: torch.device) -> Results:
        """What is computed: tensors that were given for it, or new ones on a device."""
        q, k, v = self.q, self.k, self.v
        (batch, kv_heads, keys), dim = self._sizes, v.shape[-1]
        tiles = -(-keys // TILE)

        def room(out: torch.Tensor | None, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device=device) if out is None else out

        if self.sequences is None:
            v_out = room(self.v_out, batch, kv_heads, dim, tiles * TILE, dtype=E4M3)
        else:
            padded = padded_total(keys, self.sequences)
            v_out = room(self.v_out, kv_heads, dim, padded, dtype=E4M3)
        if q is None or k is None:
            return None, None, v_out, None, None, None, None, None
        heads, rows = q.shape[1:3]
        dtype, single = checks.SCORES[self.scores], torch.float32
        k_mean = shift = None
        if self.smooth:
            k_mean = room(self.k_mean, batch, kv_heads, dim, dtype=single)
            shift = room(self.score_shift, batch, heads, rows, dtype=single)
        return (
            like(q, dtype, device) if self.q_out is None else self.q_out,
            like(k, dtype, device) if self.k_out is None else self.k_out,
            v_out,
            room(self.q_descale, batch, heads, rows, dtype=single),
            room(self.k_descale, batch, kv_heads, tiles, dtype=single),
            room(self.v_descale, batch, kv_heads, dtype=single),
            k_mean,
            shift,
        )

    def results(self, details: Details) -> Results:
        """Where results go: as they were given, or new; None where one is not computed."""
        return self._results(self.v.device)

    def computed(self) -> tuple[bool, ...]:
        """Of q and k, where they are there; of smoothing, where k is smoothed."""
        scores = self.q is not None
        smooth = scores and self.smooth
        return scores, scores, True, scores, scores, scores, smooth, smooth

    def fake(self) -> Results:
        """Those that are computed."""
        checks.require_words(self)
        return self._results(self.v.device)

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        written = list(zip(self.outputs, results, strict=True))
        require_memory([*self.named(), *written])
        seen: list[tuple[str, torch.Tensor]] = self.read()
        for name, one in written:
            if one is not None:
                refuse_overlap(one, seen, "do not overlap", name)
                seen.append((name, one))

    def compute(self, details: Details, results: Results) -> None:
        """Compute all by plain torch operations."""
        with torch.no_grad(), torch.autocast(self.v.device.type, enabled=False):
            for made, one in zip(results, self.computed_by_torch(), strict=True):
                if made is not None and one is not None:
                    made.copy_(one)

    def computed_by_torch(self, mean: torch.Tensor | None = None) -> Results:
        """Results of plain torch operations; of this mean of k, where one is given."""
        q, k, v = self.q, self.k, self.v
        if q is None or k is None:
            return None, None, dim_major(v, self.cu_seqlens), None, None, None, None, None
        if self.smooth and mean is None:
            mean = reference.mean_of(k)
        return reference.quantized(q, k, v, checks.SCORES[self.scores], mean)


def like(one: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor in 8 bits with a tensor's order of dimensions, as far as kernels write it."""
    made: Any = torch.empty_like(one, dtype=dtype, device=device)
    return made if made.stride(-1) == 1 else made.new_empty(made.shape)  # type: ignore[no-any-return]


def _strides(one: torch.Tensor) -> Strides:
    if one.dim() == PACKED_AXES:
        row, head, _ = one.stride()
        return 0, head, row
    first, second, third, _ = one.stride()
    return first, second, third
