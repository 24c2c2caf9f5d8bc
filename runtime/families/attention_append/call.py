"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.families.attention_append import AttentionAppendShape
from warploom.generator.families.attention_append.launch import tensors
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.counters import counters
from warploom.runtime.families.attention_append import checks, reference
from warploom.runtime.families.attention_append.problem import copies_of, operation_of, problem_of
from warploom.runtime.operands import dense_copy, refuse_overlap
from warploom.runtime.tensors import Named, refuse_dual, require_memory, require_tensors

REQUIRED = ("k_cache", "v_cache", "k", "v", "lengths")


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    names: tuple[str, ...]  # of the tensors of launches
    copies: tuple[str, ...]  # of what cannot be read where it lies


@dataclass(slots=True)
class AttentionAppendCall:
    """The arguments of `attention_append`, which says what they mean."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    q: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    interleaved: bool = False
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    lengths_after: torch.Tensor | None = None
    out: torch.Tensor | None = None
    spec: KernelSpec | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.k.get_device()

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def signature(self) -> Key:
        """Everything that decides the plan: how each tensor lies, and what is asked for."""
        table, starts, after = self.page_table, self.cu_seqlens, self.lengths_after
        return (
            AttentionAppendCall,
            _lies(self.k_cache),
            _lies(self.v_cache),
            _lies(self.k),
            _lies(self.v),
            _listed(self.lengths),
            None if table is None else _listed(table),
            None if starts is None else _listed(starts),
            None if self.q is None else _lies(self.q),
            None if self.cos is None else _lies(self.cos),
            None if self.sin is None else _lies(self.sin),
            self.interleaved,
            None if self.scale_k is None else _lies(self.scale_k),
            None if self.scale_v is None else _lies(self.scale_v),
            None if after is None else _listed(after),
            None if self.out is None else _lies(self.out),
            self.spec,
        )

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        return [
            (name, getattr(self, name))
            for name in (
                *REQUIRED,
                "page_table",
                "cu_seqlens",
                "q",
                "cos",
                "sin",
                "scale_k",
                "scale_v",
                "lengths_after",
                "out",
            )
        ]

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are given for a kernel to write; of scales, those of each row."""
        given = [("k_cache", self.k_cache), ("v_cache", self.v_cache)]
        if self.scale_k is not None and self.scale_v is not None and self.scale_k.dim() == 3:
            given += [("scale_k", self.scale_k), ("scale_v", self.scale_v)]
        if self.lengths_after is not None:
            given.append(("lengths_after", self.lengths_after))
        return given if self.out is None else [*given, ("out", self.out)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_tensors("attention_append", self.named(), REQUIRED)
        require_boolean("interleaved", self.interleaved)

    def refuse(self) -> None:
        """Raise ProblemError for tensors that autograd expects to see differentiated."""
        if torch.is_grad_enabled() and (
            self.k.requires_grad
            or self.v.requires_grad
            or self.k_cache.requires_grad
            or self.v_cache.requires_grad
            or (self.q is not None and self.q.requires_grad)
        ):
            raise ProblemError(
                "k, v, q or caches that require grad",
                rule="attention_append is not differentiable",
                fix="call it under torch.no_grad()",
            )

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        refuse_dual("attention_append", (self.k, self.v, self.q))

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        checks.check(self)
        operation, problem = operation_of(self), problem_of(self)
        shape = AttentionAppendShape(problem.tokens, problem.kv_heads, problem.heads)
        choice = dispatch.choose(operation, shape, spec=self.spec, device=target)
        copies = copies_of(self)
        names = tensors(operation)
        nothing = not (problem.tokens and problem.rows)
        details = Details(names, copies)
        return Draft(choice, None if nothing else problem, names, (), copies, details)

    def results(self, details: Details) -> torch.Tensor | None:
        """Where q goes, turned: as it was given, or new; None without q."""
        q = self.q
        return q.new_empty(q.shape) if self.out is None and q is not None else self.out

    def copied(self, details: Details) -> AttentionAppendCall:
        """The same call, of contiguous copies of what kernels cannot read."""
        found: dict[str, Any] = {}
        for name in details.copies:
            found[name] = dense_copy(getattr(self, name))
            counters.add("copies")
        return replace(self, **found)

    def arguments(self, details: Details, results: torch.Tensor | None) -> Arguments:
        """The addresses of the tensors, in the order of their names; 0 of what is not asked for."""
        addresses = []
        for name in details.names:
            one = results if name == "out" else getattr(self, name)
            addresses.append(0 if one is None else one.data_ptr())
        return tuple(addresses), ()

    def check(self, details: Details, results: torch.Tensor | None) -> None:
        """Raise ProblemError for memory that is missing or shared.

        q is turned where it is, or elsewhere. Caches may lie between each other's rows.
        """
        require_memory([*self.named(), ("out", results)])
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
        if results is not None:
            # q in its own place may lie beside k and v in one tensor.
            others = written if _is_same(results, self.q) else [*read, *written]
            refuse_overlap(results, others, "do not overlap, but where out is q")

    def compute(self, details: Details, results: torch.Tensor | None) -> None:
        """Write caches, and q, by plain torch operations."""
        with torch.no_grad(), torch.autocast(self.k.device.type, enabled=False):
            q, after = self.q, self.lengths_after
            if q is not None and results is not None:
                heads, places = self._tokens(q)
                found = self._turned(heads, places)
                into = results if self.cu_seqlens is not None else results.transpose(1, 2)
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


def _listed(one: torch.Tensor) -> Key:
    """What of a list of integers decides the plan: not how its address is aligned."""
    return one.shape, one.stride(), one.dtype, one.get_device(), one.is_neg()


def _lies(one: torch.Tensor) -> Key:
    return (
        one.shape,
        one.stride(),
        one.dtype,
        one.get_device(),
        one.data_ptr() % checks.LOAD,
        one.is_neg(),
    )


def _is_same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors are one: they lie alike, at one address."""
    return other is not None and (one.data_ptr(), one.stride()) == (
        other.data_ptr(),
        other.stride(),
    )
