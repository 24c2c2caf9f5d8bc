"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeProblem,
    AttentionMergeShape,
)
from warploom.generator.families.attention_merge.launch import TENSORS
from warploom.generator.families.attention_merge.shape import Steps
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.counters import counters
from warploom.runtime.elements import NAMES
from warploom.runtime.families.attention_merge import checks, reference
from warploom.runtime.families.attention_merge.reference import Results
from warploom.runtime.operands import dense_copy, refuse_overlap
from warploom.runtime.tensors import (
    Named,
    refuse_dual,
    require_memory,
    require_one_device,
    require_tensors,
)


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    dtype: torch.dtype  # of out
    copies: tuple[str, ...]  # of out_a and out_b, those that cannot be read where they lie


@dataclass(slots=True)
class AttentionMergeCall:
    """The arguments of `attention_merge`, which says what they mean."""

    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    spec: KernelSpec | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.out_a.get_device()

    def signature(self) -> Key:
        """Everything that decides the plan: how each tensor lies, and what is asked for."""
        return (
            AttentionMergeCall,
            _lies(self.out_a),
            _lies(self.lse_a),
            _lies(self.out_b),
            _lies(self.lse_b),
            None if self.out is None else _lies(self.out),
            None if self.lse is None else _lies(self.lse),
            self.out_dtype,
            self.spec,
        )

    def named(self) -> tuple[tuple[str, torch.Tensor | None], ...]:
        """The tensors of the call, by the names that messages have for them."""
        return (
            ("out_a", self.out_a),
            ("lse_a", self.lse_a),
            ("out_b", self.out_b),
            ("lse_b", self.lse_b),
            ("out", self.out),
            ("lse", self.lse),
        )

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out), ("lse", self.lse)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        operands = ("out_a", "lse_a", "out_b", "lse_b")
        require_tensors("attention_merge", self.named(), operands)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, checks.FLOATS)

    def refuse(self) -> None:
        """Raise ProblemError for tensors that autograd expects to see differentiated."""
        if torch.is_grad_enabled() and (
            self.out_a.requires_grad
            or self.lse_a.requires_grad
            or self.out_b.requires_grad
            or self.lse_b.requires_grad
            or (self.out is not None and self.out.requires_grad)
        ):
            raise ProblemError(
                "partial results that require grad",
                rule="attention_merge is not differentiable",
                fix="call it under torch.no_grad()",
            )

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        refuse_dual("attention_merge", [one for _, one in self.named()])

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check_shapes(self)
        dtype = checks.result_type(self)
        checks.check_results(self, dtype)
        a, b, dim = self.out_a, self.out_b, self.out_a.shape[-1]
        operation = AttentionMergeOperation(NAMES[a.dtype], NAMES[b.dtype], NAMES[dtype], dim)  # type: ignore[arg-type]
        rows = a.shape[:-1].numel()
        choice = dispatch.choose(
            operation, AttentionMergeShape(rows), spec=self.spec, device=target
        )
        copies = tuple(
            name for name, one in (("out_a", a), ("out_b", b)) if not checks.loadable(one)
        )
        details = Details(dtype, copies)
        problem = self._problem(details) if rows else None
        return Draft(choice, problem, TENSORS, (), copies, details)

    def _problem(self, details: Details) -> AttentionMergeProblem:
        """Where rows lie: of what is copied or made, as they will."""
        nowhere = torch.device("meta")
        given = {"out_a": self.out_a, "out_b": self.out_b}
        dense = {
            name: given[name].new_empty(self.out_a.shape, device=nowhere) for name in details.copies
        }
        a, b = (given | dense).values()
        out = made(self.out_a, details.dtype, nowhere) if self.out is None else self.out
        lse = torch.empty_like(self.lse_a, device=nowhere) if self.lse is None else self.lse
        first, second, third = _padded(self.lse_a.shape, 1)
        return AttentionMergeProblem(
            (first, second, third),
            *(_steps(one.stride()[:-1]) for one in (a, b, out)),
            *(_steps(one.stride()) for one in (self.lse_a, self.lse_b, lse)),
        )

    def results(self, details: Details) -> Results:
        """Out and lse: as they were given, or new, which lie as those of a."""
        out, lse = self.out, self.lse
        if out is None:
            out = made(self.out_a, details.dtype)
        if lse is None:
            lse = torch.empty_like(self.lse_a)
        return out, lse

    def copied(self, details: Details) -> AttentionMergeCall:
        """The same call, of contiguous copies of what kernels cannot read."""
        found: dict[str, Any] = {}
        for name in details.copies:
            found[name] = dense_copy(getattr(self, name))
            counters.add("copies")
        return replace(self, **found)

    def arguments(self, details: Details, results: Results) -> Arguments:
        """The addresses of the tensors, in the order of TENSORS."""
        out, lse = results
        read = (self.out_a.data_ptr(), self.out_b.data_ptr(), out.data_ptr())
        return (*read, self.lse_a.data_ptr(), self.lse_b.data_ptr(), lse.data_ptr()), ()

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared.

        A row is read whole before it is written: a result may be where an operand of its is.
        """
        out, lse = results
        require_memory([*self.named(), ("out", out), ("lse", lse)])
        read = [("out_a", self.out_a), ("out_b", self.out_b)]
        logs = [("lse_a", self.lse_a), ("lse_b", self.lse_b)]
        rule = "do not overlap, but where they are the same tensor"
        refuse_overlap(out, [one for one in (*read, *logs) if not _same(out, one[1])], rule)
        read.append(("out", out))
        others = [one for one in (*logs, *read) if not _same(lse, one[1])]
        refuse_overlap(lse, others, rule, "lse")

    def compute(self, details: Details, results: Results) -> None:
        """Compute both by plain torch operations, in fp32."""
        out, lse = results
        operands = (self.out_a, self.lse_a, self.out_b, self.lse_b)
        with torch.no_grad(), torch.autocast(self.out_a.device.type, enabled=False):
            found = reference.attention_merge(*(one.float() for one in operands))
            out.copy_(found[0])
            lse.copy_(found[1])


def _lies(one: torch.Tensor) -> Key:
    return (
        one.shape,
        one.stride(),
        one.dtype,
        one.get_device(),
        one.data_ptr() % checks.LOAD,
        one.is_neg(),
    )


def made(
    like: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A new out that lies in memory as one does, as far as kernels can write there."""
    found = torch.empty_like(like, dtype=dtype, device=device)
    return found if found.stride(-1) == 1 else found.new_empty(found.shape)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one: they lie alike, at one address."""
    return (one.data_ptr(), one.stride(), one.dtype) == (
        other.data_ptr(),
        other.stride(),
        other.dtype,
    )


def _padded(values: tuple[int, ...], filled: int) -> list[int]:
    return [*([filled] * (checks.AXES - len(values))), *values]


def _steps(strides: tuple[int, ...]) -> Steps:
    first, second, third = _padded(strides, 0)
    return first, second, third
