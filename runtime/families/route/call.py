"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.arguments import shown as brief
from warploom.errors import ProblemError
from warploom.generator.families.route import RouteOperation, RouteProblem, RouteShape
from warploom.generator.families.route.schedule import EXPERTS
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.reference import Results
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device, shown

_IDS = {torch.int64: "int64", torch.int32: "int32"}
_REACH = 2**62  # of ids, from either side
_FIX = "pass the number of the experts whose weights are here, and the id of the first of them"


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common: nothing is copied."""

    copies: tuple[str, ...] = ()


@declared
class RouteCall(Arguments[Details, Results]):
    """The arguments of `route`, which says what they mean.

    offsets, order, inverse   where results go; None: they are made
    """

    function = "route"
    outputs = ("offsets", "order", "inverse")
    no_gradient = ("ids that require grad", "route has no gradient", "detach them")

    ids: torch.Tensor = tensor(aligned=False)
    experts: int = option(schema="int")
    first_expert: int | None = option(default=None, schema="int?")
    spec: KernelSpec | str | None = named_spec(default=None)
    offsets: torch.Tensor | None = result(default=None, aligned=False, public=False)
    order: torch.Tensor | None = result(default=None, aligned=False, public=False)
    inverse: torch.Tensor | None = result(default=None, aligned=False, public=False)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        bounds = (
            ("experts", self.experts, 1, EXPERTS),
            ("first_expert", self.first, -_REACH, _REACH),
        )
        for name, value, least, most in bounds:
            if type(value) is not int or not least <= value <= most:
                raise ProblemError(
                    f"{name} {brief(value)}", rule=f"must be an int, {least} to {most}", fix=_FIX
                )

    @property
    def first(self) -> int:
        """The id of the first expert."""
        return 0 if self.first_expert is None else self.first_expert

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        _check(self.ids)
        tokens, k = self.ids.shape
        operation = RouteOperation(_IDS[self.ids.dtype])  # type: ignore[arg-type]
        shape = RouteShape(tokens, k, self.experts)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        first, second = self.ids.stride()
        problem = RouteProblem(tokens, k, self.experts, self.first, (first, second))
        there = problem if problem.pairs else None
        return Draft(choice, there, self.addressed(), (), (), Details())

    def results(self, details: Details) -> Results:
        """Where results go: as they were given, or new."""
        tokens, k = self.ids.shape
        made = (self.offsets, self.order, self.inverse)
        shapes = (self.experts,), (tokens * k,), (tokens, k)
        offsets, order, inverse = (
            self.ids.new_empty(shape, dtype=torch.int32) if one is None else one
            for one, shape in zip(made, shapes, strict=True)
        )
        return offsets, order, inverse

    def fake(self) -> Results:
        """New ones."""
        return self.results(Details())

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        seen = [("ids", self.ids)]
        made = [*zip(self.outputs, results, strict=True)]
        require_memory([*seen, *made])
        for name, one in made:
            refuse_overlap(one, seen, "do not overlap", name)
            seen.append((name, one))

    def compute(self, details: Details, results: Results) -> None:
        """Compute all by plain torch operations."""
        if self.first_expert is None and self.ids.numel():
            _check_values(self.ids, self.experts)
        with torch.no_grad():
            found = reference.route(self.ids, self.experts, self.first)
            for into, one in zip(results, found, strict=True):
                into.copy_(one)


def _check_values(ids: torch.Tensor, experts: int) -> None:
    """Raise ProblemError for ids on the CPU that are no expert's, where there are no others."""
    wrong = ids[(ids < -1) | (ids >= experts)]
    if wrong.numel():
        raise ProblemError(
            f"ids with {wrong[0].item()}",
            rule=f"must be from 0 to {experts - 1}, or -1 for no expert",
            fix="pass first_expert where ids may be of other ranks' experts, which are skipped",
        )


def _check(ids: torch.Tensor) -> None:
    if ids.dtype not in _IDS:
        raise ProblemError(
            f"ids of {shown(ids.dtype)}", rule="must be int64 or int32", fix="use ids.long()"
        )
    if ids.dim() != 2:
        raise ProblemError(
            f"ids {list(ids.shape)}",
            rule="must be [tokens, k], the experts that each token chose",
            fix="flatten leading dimensions: ids.flatten(0, -2)",
        )
