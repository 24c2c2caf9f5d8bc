"""Operators on torch's distributed tensors: what runs shard by shard, and what is moved before.

A family says by which rules the tensors of an operator may lie over one dimension of a mesh. Each
dimension gets the rule that moves the fewest bytes; tensors are moved to it, the operator runs on
what each process has, and its results are distributed tensors again. torch asks this below
autograd, so that the gradients of operators find their own rules.

This imports torch.distributed: `operator.is_distributed` says when there is a reason to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from warploom.errors import ProblemError

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way in which the tensors of a call lie over a dimension of a mesh.

    inputs    of each tensor that is given, in order, those of lists one after another; None: any.
              Partial() stands for terms of a sum: what is whole goes to the first process alone
    outputs   of each result
    written   how many of the last inputs the operator writes to: these are never moved
    """

    inputs: tuple[Placement | None, ...]
    outputs: Placements
    written: int = 0

    @classmethod
    def replicated(cls, inputs: int, outputs: int, written: int = 0) -> Rule:
        """Every process computes everything, which is right for every operator."""
        whole = Replicate()
        return cls((whole,) * inputs, (whole,) * outputs, written)


Rules = Callable[..., Sequence[Rule]]
"""From the number of processes that share a dimension, and the operator's arguments."""


def split(axes: Sequence[int | None], axis: int) -> Placement:
    """How a tensor whose dimensions go along these axes lies where `axis` is shared out."""
    return Shard(axes.index(axis)) if axis in axes else Replicate()


def register(name: str, rules: Rules) -> None:
    """Let `warploom::name` take distributed tensors, by `rules`. Of equals the first is taken."""
    torch.library.register_torch_dispatch(
        f"warploom::{name}",
        DTensor,
        partial(_run, rules),
    )


@torch.no_grad()
def _run(
    rules: Rules,
    cls: type,
    operator: Callable[..., object],
    types: tuple[type, ...],
    given: tuple[object, ...],
    keywords: dict[str, object],
) -> object:
    """Run an operator on the shards of its tensors: what torch calls in its stead."""
    tensors = [one for value in (*given, *keywords.values()) for one in _tensors(value)]
    layout = Layout.of(tensors, lambda size: rules(size, *given, **keywords))
    results = _called(operator, given, keywords, layout.moved())
    wholes = _called(operator, given, keywords, map(_without_data, layout.tensors))
    return layout.joined(results, wholes)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a call, and the rule that each dimension of their mesh gets."""

    tensors: Sequence[DTensor]
    mesh: DeviceMesh
    rules: Sequence[Rule]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], rules: Callable[[int], Sequence[Rule]]) -> Layout:
        """The cheapest rules; ProblemError where there is none, or no mesh that all share."""
        mesh = _mesh(tensors)
        found = cast("Sequence[DTensor]", tensors)
        chosen = [_cheapest(rules(mesh.size(i)), found, i) for i in range(mesh.ndim)]
        return cls(found, mesh, chosen)

    @property
    def outputs(self) -> list[Placements]:
        """How each result lies."""
        return list(zip(*(rule.outputs for rule in self.rules), strict=True))

    def moved(self) -> Iterator[torch.Tensor]:
        """What this process has of each tensor, once that lies as it should."""
        wanted = zip(*(rule.inputs for rule in self.rules), strict=True)
        return map(_moved, self.tensors, wanted)

    def part(self, shape: Sequence[int], places: Placements) -> tuple[int, ...]:
        """The shape of what this process has of a tensor."""
        own = list(shape)
        for dimension, place in enumerate(places):
            if isinstance(place, Shard):
                most = -(-own[place.dim] // self.mesh.size(dimension))
                before = most * self.mesh.get_local_rank(dimension)
                own[place.dim] = max(0, min(most, own[place.dim] - before))
        return tuple(own)

    def joined(self, results: Any, wholes: Any) -> Any:  # noqa: ANN401 (a tensor, several, none)
        """Results of this process as parts of `wholes`, whose data is not read."""
        return _joined(results, wholes, self.mesh, self.outputs)


def _tensors(value: object) -> list[DTensor]:
    if isinstance(value, torch.Tensor):
        return [cast("DTensor", value)]
    listed = value if isinstance(value, list | tuple) else ()
    return [cast("DTensor", one) for one in listed if isinstance(one, torch.Tensor)]


def _mesh(tensors: Sequence[torch.Tensor]) -> DeviceMesh:
    """The mesh of all tensors; ProblemError where they do not share one."""
    meshes = {one.device_mesh: one for one in tensors if isinstance(one, DTensor)}
    for one in tensors:
        if not isinstance(one, DTensor):
            raise ProblemError(
                f"a tensor {list(one.shape)} of one process with distributed tensors",
                rule="must all be distributed over one mesh",
                fix="torch.distributed.tensor.distribute_tensor(tensor, mesh), or .to_local()",
            )
    if len(meshes) > 1:
        raise ProblemError(
            f"tensors on the meshes {', '.join(map(str, meshes))}",
            rule="must all be distributed over one mesh",
            fix="redistribute them to one",
        )
    return next(iter(meshes))


# ---- Which rule ----------------------------------------------------------------------------------


def _cheapest(rules: Sequence[Rule], tensors: Sequence[DTensor], dimension: int) -> Rule:
    """The rule that moves the fewest bytes over a dimension of the mesh."""
    found = min(rules, key=lambda rule: _bytes(rule, tensors, dimension))
    if _bytes(found, tensors, dimension) < inf:
        return found
    places = [one.placements[dimension] for one in tensors]
    count = found.written
    raise ProblemError(
        f"tensors with placements {places} over a dimension of the mesh, the last {count} written "
        "to",
        rule="tensors that are written must have the placement of the result: they are never "
        "redistributed",
        fix="leave it out and take the result, or redistribute it first",
    )


def _bytes(rule: Rule, tensors: Sequence[DTensor], dimension: int) -> float:
    fixed = len(tensors) - rule.written
    total = 0.0
    for index, (one, wanted) in enumerate(zip(tensors, rule.inputs, strict=True)):
        now = one.placements[dimension]
        if wanted is None or now == wanted:
            continue
        if index >= fixed:
            return inf
        if now.is_replicate():
            total += 1  # each process has it already, but had it for a reason
        else:
            total += one.numel() * one.element_size() * (2 if now.is_partial() else 1)
    return total


# ---- Moving, calling -----------------------------------------------------------------------------


def _moved(tensor: DTensor, wanted: Sequence[Placement | None]) -> torch.Tensor:
    """What this process has of a tensor that lies as it is wanted."""
    now = tensor.placements
    asked = [old if new is None else new for old, new in zip(now, wanted, strict=True)]
    terms = [new.is_partial() and old != new for old, new in zip(now, asked, strict=True)]
    reached = [Replicate() if term else new for term, new in zip(terms, asked, strict=True)]
    # Below autograd: a result that requires grad would be detached in place, which 2.11 cannot do.
    alone = cast("DTensor", tensor.detach())
    local = alone.redistribute(placements=reached).to_local()
    mesh = tensor.device_mesh
    first = not any(term and mesh.get_local_rank(i) for i, term in enumerate(terms))
    return local if first else torch.zeros_like(local)


def _without_data(tensor: DTensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _called(
    operator: Callable[..., object],
    given: Sequence[object],
    keywords: dict[str, object],
    tensors: Iterator[torch.Tensor],
) -> object:
    """The results of an operator on other tensors in the place of those that are given."""

    def other(value: Any) -> object:  # noqa: ANN401 (any argument of an operator)
        if isinstance(value, torch.Tensor):
            return next(tensors)
        return [other(one) for one in value] if isinstance(value, list | tuple) else value

    others = list(map(other, given))  # tensors are taken in order: before those of keywords
    return operator(*others, **{key: other(one) for key, one in keywords.items()})


def _joined(
    results: Any,  # noqa: ANN401
    wholes: Any,  # noqa: ANN401
    mesh: DeviceMesh,
    places: Sequence[Placements],
) -> object:
    if results is None:
        return None
    if isinstance(results, torch.Tensor):
        shape, stride = wholes.shape, wholes.stride()
        return DTensor.from_local(
            results, mesh, places[0], run_check=False, shape=shape, stride=stride
        )
    parts = zip(results, wholes, places, strict=True)
    return type(results)(_joined(one, whole, mesh, (place,)) for one, whole, place in parts)
