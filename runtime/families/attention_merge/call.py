"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.arguments import require_dtype
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeProblem,
    AttentionMergeShape,
)
from warploom.generator.families.attention_merge.schedule import Steps
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, dtype, named_spec, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families.attention_merge import checks, reference
from warploom.runtime.families.attention_merge.reference import Results
from warploom.runtime.operands import loadable, refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    dtype: torch.dtype  # of out
    copies: tuple[str, ...]  # of out_a and out_b, those that cannot be read where they lie


@declared
class AttentionMergeCall(Arguments[Details, Results]):
    """The arguments of `attention_merge`, which says what they mean."""

    function = "attention_merge"
    outputs = ("out", "lse")
    no_gradient = (
        "partial results that require grad",
        "attention_merge is not differentiable",
        "call it under torch.no_grad()",
    )

    out_a: torch.Tensor = tensor(kernel="a")
    lse_a: torch.Tensor = tensor()
    out_b: torch.Tensor = tensor(kernel="b")
    lse_b: torch.Tensor = tensor()
    out: torch.Tensor | None = result(default=None)
    lse: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, checks.FLOATS)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check_shapes(self)
        element = checks.result_type(self)
        checks.check_results(self, element)
        a, b, dim = self.out_a, self.out_b, self.out_a.shape[-1]
        operation = AttentionMergeOperation(NAMES[a.dtype], NAMES[b.dtype], NAMES[element], dim)  # type: ignore[arg-type]
        rows = a.shape[:-1].numel()
        choice = dispatch.choose(
            operation, AttentionMergeShape(rows), spec=self.kernel, device=target
        )
        copies = tuple(name for name, one in (("out_a", a), ("out_b", b)) if not loadable(one))
        details = Details(element, copies)
        problem = self._problem(details) if rows else None
        return Draft(choice, problem, self.addressed(), (), copies, details)

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

    def fake(self) -> Results:
        """Both, as they lie by default."""
        return self.results(Details(self.out_dtype or self.out_a.dtype, ()))

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
