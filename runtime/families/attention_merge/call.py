"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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
from warploom.runtime.families.attention_merge import reference
from warploom.runtime.families.attention_merge.reference import Results
from warploom.runtime.operands import refuse_overlap, refuse_repeated
from warploom.runtime.tensors import (
    Named,
    refuse_dual,
    require_memory,
    require_one_device,
    require_tensors,
    shown,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AXES = 3  # that rows have at most
_LOAD = 16  # bytes of a load: rows begin at a multiple
_EIGHTS = 8  # elements that a thread moves at once
_LONGEST = 512  # elements of a row


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

    def _tensors(self) -> tuple[tuple[str, torch.Tensor | None], ...]:
        return (
            ("out_a", self.out_a),
            ("lse_a", self.lse_a),
            ("out_b", self.out_b),
            ("lse_b", self.lse_b),
            ("out", self.out),
            ("lse", self.lse),
        )

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        return self._tensors()

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        operands = ("out_a", "lse_a", "out_b", "lse_b")
        require_tensors("attention_merge", self.named(), operands)

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
        refuse_dual("attention_merge", [one for _, one in self._tensors()])

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self._tensors() if one is not None])
        self._check_shapes()
        dtype = self._result_type()
        self._check_results(dtype)
        a, b, dim = self.out_a, self.out_b, self.out_a.shape[-1]
        operation = AttentionMergeOperation(NAMES[a.dtype], NAMES[b.dtype], NAMES[dtype], dim)  # type: ignore[arg-type]
        rows = a.shape[:-1].numel()
        choice = dispatch.choose(
            operation, AttentionMergeShape(rows), spec=self.spec, device=target
        )
        copies = tuple(name for name, one in (("out_a", a), ("out_b", b)) if not _loadable(one))
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

    def _check_shapes(self) -> None:
        out_a, lse_a = self.out_a, self.lse_a
        if not 1 <= out_a.dim() <= _AXES + 1:
            raise ProblemError(
                f"out_a {list(out_a.shape)}",
                rule=f"must be [.., dim] with at most {_AXES} dimensions before the last",
                fix="flatten some of them",
            )
        dim = out_a.shape[-1]
        if dim % _EIGHTS or not dim or dim > _LONGEST:
            raise ProblemError(
                f"out_a {list(out_a.shape)}",
                rule=f"must have rows of a multiple of {_EIGHTS} elements, at most {_LONGEST}",
                fix="split or pad the last dimension",
            )
        rows = out_a.shape[:-1]
        for name, one in self._tensors():
            wanted = rows if name.startswith("lse") else out_a.shape
            if one is not None and one.shape != wanted:
                raise ProblemError(
                    f"{name} {list(one.shape)}, out_a {list(out_a.shape)}",
                    rule=f"{name} must be {list(wanted)}: nothing is broadcast",
                    fix=f"expand or transpose {name}",
                )
        for name, one in (("lse_a", lse_a), ("lse_b", self.lse_b), ("lse", self.lse)):
            if one is not None and one.dtype != torch.float32:
                raise ProblemError(
                    f"{name} {one.dtype}", rule="must be float32", fix=f"use {name}.float()"
                )

    def _result_type(self) -> torch.dtype:
        """The type of out, once those of all are known to be right."""
        out = self.out
        dtype = self.out_dtype or (self.out_a.dtype if out is None else out.dtype)
        for name, one in (
            ("out_a", self.out_a.dtype),
            ("out_b", self.out_b.dtype),
            ("out", dtype if out is None else out.dtype),
            ("out_dtype", dtype),
        ):
            if one not in _FLOATS:
                raise ProblemError(
                    f"{name} {shown(one)}",
                    rule="must be float16, bfloat16 or float32",
                    fix="convert it",
                )
        return dtype

    def _check_results(self, dtype: torch.dtype) -> None:
        """What was given for results can be written."""
        for name, one in (("out", self.out), ("lse", self.lse)):
            if one is not None:
                refuse_repeated(name, one)
        if self.out is not None and (self.out.dtype != dtype or not _loadable(self.out)):
            raise ProblemError(
                f"out {self.out.dtype} with strides {list(self.out.stride())}",
                rule=f"must be {dtype}, with a contiguous last dimension, at an address and with "
                f"other strides that are multiples of {_LOAD} bytes",
                fix="leave it out to have it made",
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
        found = {}
        for name in details.copies:
            found[name] = getattr(self, name).clone(memory_format=torch.contiguous_format)
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
    return (one.shape, one.stride(), one.dtype, one.get_device(), one.data_ptr() % _LOAD)


def _loadable(one: torch.Tensor) -> bool:
    """Whether kernels can move 16 bytes of its rows at once."""
    size = one.element_size()
    steps = zip(one.shape[:-1], one.stride()[:-1], strict=True)
    return (
        one.stride(-1) == 1
        and (one.is_meta or one.data_ptr() % _LOAD == 0)
        and all(step * size % _LOAD == 0 for extent, step in steps if extent > 1)
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
    return [*([filled] * (_AXES - len(values))), *values]


def _steps(strides: tuple[int, ...]) -> Steps:
    first, second, third = _padded(strides, 0)
    return first, second, third
