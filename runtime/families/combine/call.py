"""Calls in both directions: what their arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.generator.families.combine import CombineOperation, CombineProblem, CombineShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    Arguments,
    declared,
    named_spec,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product.groups import ends_of
from warploom.runtime.families.combine import checks, reference
from warploom.runtime.operands import loadable, refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...] = ()  # of tokens and rows, those that cannot be read where they lie


@declared
class CombineCall(Arguments[Details, tuple[torch.Tensor]]):
    """The arguments of `combine`, which says what they mean."""

    function = "combine"
    outputs = ("tokens",)
    no_gradient = (
        "rows or weights that require grad",
        "the gradient of combine has none itself",
        "do not ask for a graph of the gradient (create_graph=True)",
    )

    rows: torch.Tensor = tensor()
    inverse: torch.Tensor = tensor()
    weights: torch.Tensor | None = tensor(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)
    out: torch.Tensor | None = result(default=None, public=False)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check("rows", self.rows, self.inverse, self.weights)
        (tokens, k), (rows, columns) = self.inverse.shape, self.rows.shape
        operation = CombineOperation(
            NAMES[self.rows.dtype],  # type: ignore[arg-type]
            weights="none" if self.weights is None else NAMES[self.weights.dtype],  # type: ignore[arg-type]
        )
        choice = dispatch.choose(
            operation, CombineShape(tokens, k, columns), spec=self.kernel, device=target
        )
        copies = _copies(rows=self.rows, inverse=self.inverse)
        problem = CombineProblem(
            tokens,
            k,
            columns,
            rows,
            columns if self.out is None else self.out.stride(0),
            columns if "rows" in copies else self.rows.stride(0),
            _steps(self.weights),
        )
        there = problem if tokens and k and columns and rows else None
        return Draft(choice, there, self.addressed(), (), copies, Details(copies))

    def results(self, details: Details) -> tuple[torch.Tensor]:
        """The result: as it was given, or new."""
        if self.out is not None:
            return (self.out,)
        return (self.rows.new_empty(self.inverse.shape[0], self.rows.shape[1]),)

    def fake(self) -> tuple[torch.Tensor]:
        """A new one."""
        return self.results(Details())

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results[0])])
        refuse_overlap(results[0], self.read(), "do not overlap")

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute it by plain torch operations, in fp32."""
        with torch.no_grad(), torch.autocast(self.rows.device.type, enabled=False):
            weights = None if self.weights is None else self.weights.float()
            results[0].copy_(reference.combine(self.rows.float(), self.inverse, weights))


@declared
class PermuteCall(Arguments[Details, tuple[torch.Tensor, torch.Tensor | None]]):
    """The arguments of `permute`, and those of the gradient of `combine`.

    weights    rows are multiplied by them
    combined   the rows that were combined: weights get a gradient, the second result
    count      how many rows there are, tokens * k if None; pairs of other rows are left out
    """

    function = "permute"
    outputs = ("rows", "gradient")
    no_gradient = (
        "hidden that requires grad",
        "the gradient of permute has none itself",
        "do not ask for a graph of the gradient (create_graph=True)",
    )

    hidden: torch.Tensor = tensor(kernel="tokens")
    inverse: torch.Tensor = tensor()
    weights: torch.Tensor | None = tensor(default=None)
    combined: torch.Tensor | None = tensor(default=None)
    offsets: torch.Tensor | None = tensor(default=None, null=True)
    spec: KernelSpec | str | None = named_spec(default=None)
    count: int | None = option(default=None, schema="SymInt?=None")
    out: torch.Tensor | None = result(default=None, public=False)
    gradient_out: torch.Tensor | None = result(default=None, public=False)

    @property
    def row_count(self) -> int:
        """The rows of the result."""
        return self.inverse.numel() if self.count is None else self.count

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check("hidden", self.hidden, self.inverse, self.weights)
        checks.check_tokens(self)
        (tokens, k), columns = self.inverse.shape, self.hidden.shape[1]
        operation = CombineOperation(
            NAMES[self.hidden.dtype],  # type: ignore[arg-type]
            "permute",
            "none" if self.weights is None else NAMES[self.weights.dtype],  # type: ignore[arg-type]
            dot=self.combined is not None,
        )
        choice = dispatch.choose(
            operation, CombineShape(tokens, k, columns), spec=self.kernel, device=target
        )
        copies = _copies(hidden=self.hidden, inverse=self.inverse, combined=self.combined)
        copies += _copies(offsets=self.offsets)
        combined = 0 if self.combined is None else self.combined.stride(0)
        problem = CombineProblem(
            tokens,
            k,
            columns,
            self.row_count,
            columns if "hidden" in copies else self.hidden.stride(0),
            columns if self.out is None else self.out.stride(0),
            _steps(self.weights),
            columns if "combined" in copies else combined,
            0 if self.offsets is None else self.offsets.numel(),
        )
        there = problem if tokens and k and columns else None
        return Draft(choice, there, self.addressed(), (), copies, Details(copies))

    def results(self, details: Details) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both: as they were given, or new."""
        rows, gradient = self.out, self.gradient_out
        if rows is None:
            rows = self.hidden.new_empty(self.row_count, self.hidden.shape[1])
        if gradient is None and self.combined is not None and self.weights is not None:
            gradient = self.weights.new_empty(self.inverse.shape)
        return rows, gradient

    def computed(self) -> tuple[bool, ...]:
        """The gradient where there are rows that were combined."""
        return True, self.combined is not None

    def fake(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """New ones."""
        return self.results(Details())

    def check(self, details: Details, results: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        rows, gradient = results
        require_memory([*self.named(), ("rows", rows), ("gradient", gradient)])
        refuse_overlap(rows, self.read(), "do not overlap")

    def compute(self, details: Details, results: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Compute both by plain torch operations, in fp32; rows of no pair are zeros."""
        rows, gradient = results
        if self.offsets is not None and self.device < 0:
            # Pairs may have rows that are not there.
            most = max(self.row_count, self.inverse.numel())
            ends_of("offsets", self.offsets, most)
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            weights = None if self.weights is None else self.weights.float()
            hidden = self.hidden.float()
            rows.copy_(reference.permute(hidden, self.inverse, weights, self.row_count))
            if gradient is not None and self.combined is not None:
                combined = self.combined.float()
                gradient.copy_(reference.weight_gradient(hidden, self.inverse, combined))


def _copies(**tensors: torch.Tensor | None) -> tuple[str, ...]:
    """Those that kernels cannot read where they lie."""
    return tuple(
        name
        for name, one in tensors.items()
        if one is not None
        and not (one.is_contiguous() if name in ("inverse", "offsets") else loadable(one))
    )


def _steps(weights: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if weights is None else (weights.stride(0), weights.stride(1))
