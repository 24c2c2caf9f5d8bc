"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.families.attention_append import AttentionAppendShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.families.attention_append import checks, reference
from warploom.runtime.families.attention_append.problem import copies_of, operation_of, problem_of
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory

Results = tuple[torch.Tensor | None]  # q, turned


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # of what cannot be read where it lies


@declared
class AttentionAppendCall(Arguments[Details, Results]):
    """The arguments of `attention_append`, which says what they mean."""

    function = "attention_append"
    outputs = ("out",)
    no_gradient = (
        "k, v, q or caches that require grad",
        "attention_append is not differentiable",
        "call it under torch.no_grad()",
    )

    k_cache: torch.Tensor = tensor(schema="Tensor(a!)")
    v_cache: torch.Tensor = tensor(schema="Tensor(b!)")
    k: torch.Tensor = tensor()
    v: torch.Tensor = tensor()
    lengths: torch.Tensor = tensor(aligned=False)
    page_table: torch.Tensor | None = tensor(default=None, aligned=False)
    cu_seqlens: torch.Tensor | None = tensor(default=None, aligned=False)
    q: torch.Tensor | None = tensor(default=None)
    cos: torch.Tensor | None = tensor(default=None)
    sin: torch.Tensor | None = tensor(default=None)
    interleaved: bool = option(default=False, schema="bool")
    scale_k: torch.Tensor | None = tensor(default=None)
    scale_v: torch.Tensor | None = tensor(default=None)
    lengths_after: torch.Tensor | None = tensor(default=None, schema="", aligned=False, null=True)
    out: torch.Tensor | None = result(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def scales_tokens(self) -> bool:
        """Whether scales are those of each row, which are written."""
        return self.scale_k is not None and self.scale_k.dim() == 3

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are given for a kernel to write; of scales, those of each row."""
        names = ("k_cache", "v_cache", "scale_k", "scale_v", "lengths_after", "out")
        scales = () if self.scales_tokens else ("scale_k", "scale_v")
        given = [(name, getattr(self, name)) for name in names if name not in scales]
        return [(name, one) for name, one in given if one is not None]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_boolean("interleaved", self.interleaved)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        checks.check(self)
        operation, problem = operation_of(self), problem_of(self)
        shape = AttentionAppendShape(problem.tokens, problem.kv_heads, problem.heads)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        copies = copies_of(self)
        laid_out = problem if problem.tokens and problem.rows else None
        return Draft(choice, laid_out, self.addressed(), (), copies, Details(copies))

    def results(self, details: Details) -> Results:
        """Where q goes, turned: as it was given, or new; None without q."""
        q = self.q
        return (q.new_empty(q.shape) if self.out is None and q is not None else self.out,)

    def computed(self) -> tuple[bool]:
        """Without q there is nothing to return."""
        return (self.q is not None,)

    def fake(self) -> Results:
        """q, turned."""
        return self.results(Details(()))

    def crossing(self) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
        """What the operator is handed: scales of rows as keywords of their own, to be written."""
        values, written = Arguments.crossing(self)
        written["lengths_after"] = self.lengths_after
        if self.scales_tokens:
            written |= {"scales_k": self.scale_k, "scales_v": self.scale_v}
            values[SCALES] = (None, None)
        return values, written

    @classmethod
    def keywords(cls, written: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """The arguments that the operator was handed by keyword."""
        handed = {"lengths_after": written.get("lengths_after")}
        if written.get("scales_k") is not None:
            handed |= {"scale_k": written["scales_k"], "scale_v": written["scales_v"]}
        return handed

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared.

        q is turned where it is, or elsewhere. Caches may lie between each other's rows.
        """
        (out,) = results
        require_memory([*self.named(), ("out", out)])
        read = [("k", self.k), ("v", self.v), ("lengths", self.lengths)]
        read += [("q", self.q)] if self.q is not None else []
        written = [one for one in self.written() if one[0] != "out"]
        for name, one in written:
            refuse_overlap(one, read, "do not overlap", name)
        if self.k_cache.data_ptr() == self.v_cache.data_ptr() and self.k_cache.numel():
            raise ProblemError(
                "k_cache and v_cache at one address",
                rule="must not be one tensor",
                fix="allocate one for each",
            )
        if out is not None:
            # q in its own place may lie beside k and v in one tensor.
            others = written if _is_same(out, self.q) else [*read, *written]
            refuse_overlap(out, others, "do not overlap, but where out is q")

    def compute(self, details: Details, results: Results) -> None:
        """Write caches, and q, by plain torch operations."""
        with torch.no_grad(), torch.autocast(self.k.device.type, enabled=False):
            (out,), q, after = results, self.q, self.lengths_after
            if q is not None and out is not None:
                heads, places = self._tokens(q)
                found = self._turned(heads, places)
                into = out if self.cu_seqlens is not None else out.transpose(1, 2)
                into.copy_(found.view(into.shape))
            for cache, scale, one in (
                (self.k_cache, self.scale_k, self.k),
                (self.v_cache, self.scale_v, self.v),
            ):
                heads, places = self._tokens(one)
                found = self._turned(heads, places) if one is self.k else heads.float()
                positions = places.positions(self.lengths)
                reference.write(cache, scale, found, places, positions, self.page_table)
            if after is not None:
                starts = self.cu_seqlens
                new = self.k.shape[2] if starts is None else starts[1:] - starts[:-1]
                after.copy_(torch.where(self.lengths < 0, self.lengths, self.lengths + new))

    def _tokens(self, one: torch.Tensor) -> tuple[torch.Tensor, reference.Places]:
        """Rows [tokens, heads, dim], and their places."""
        if self.cu_seqlens is not None:
            return one, reference.packed(self.cu_seqlens, one.shape[0])
        places = reference.fixed(one.shape[0], one.shape[2], one.device)
        return one.transpose(1, 2).flatten(0, 1), places

    def _turned(self, rows: torch.Tensor, places: reference.Places) -> torch.Tensor:
        cos, sin = self.cos, self.sin
        if cos is None or sin is None:
            return rows.float()
        positions = places.positions(self.lengths)
        return reference.turned(rows, positions, cos, sin, interleaved=self.interleaved)


_SCHEMA = [name for name, _ in AttentionAppendCall.declaration.crossing]
SCALES = slice(_SCHEMA.index("scale_k"), _SCHEMA.index("scale_v") + 1)  # places, as they cross
WRITTEN = {
    "scales_k": "Tensor(c!)?",  # of rows; those that are only read are `scale_k`
    "scales_v": "Tensor(d!)?",
    "lengths_after": "Tensor(e!)?",
}


def _is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors are one: they lie alike, at one address."""
    return other is not None and (one.data_ptr(), one.stride()) == (
        other.data_ptr(),
        other.stride(),
    )
