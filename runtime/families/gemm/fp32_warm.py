"""GEMMs of fp32 matrices like earlier ones: their launches follow each other with no call made.

The launches of one GEMM, up to six, are known by their plans, and where each address that they are
handed comes from: a tensor of the call, pieces that are kept, D, or the memory of all that is only
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warploom.runtime import plan as plans
from warploom.runtime.arguments import Arguments
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker, without_memory
from warploom.runtime.plan import Plan, increment_versions, planned

_ALIGN = 256  # bytes, of what is between launches
_KINDS = 1024  # kinds of calls remembered

Options = tuple[object, ...]
Source = tuple[int, int]  # which of the tensors, and bytes into it


@dataclass(frozen=True, slots=True, eq=False)
class RanCall:
    """A call that was run: its plan, itself, and where its results went."""

    plan: Plan[Any, Any]
    call: Arguments[Any, Any]
    results: Any

    @classmethod
    def of(cls, call: Arguments[Any, Any], results: Any) -> RanCall:  # noqa: ANN401 (as plans have them)
        """What is kept of a call that ran."""
        return cls(planned(call), call, results)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchSequence:
    """What the GEMMs of a kind launch.

    aligned   addresses of the call's tensors, modulo 16
    launches  plans, the sources of the addresses that they are handed, and numbers
    """

    aligned: tuple[int, ...]
    launches: tuple[tuple[Plan[Any, Any], tuple[Source, ...], tuple[float, ...]], ...]
    make_between: Callable[[], torch.Tensor]
    make_d: Callable[[], torch.Tensor]

    def run(
        self, call: GemmCall, tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """D of a call on these tensors; None where they are not aligned as those before.

        Args:
            call: It is asked whether its memory is there and apart, where addresses are new.
            tensors: Those of the call.
            kept: Those of pieces that are kept, as `keep` was told them.
        """
        bases = [one.data_ptr() for one in tensors]
        if self.aligned != tuple([base & 15 for base in bases]):
            return None
        between, d = self.make_between(), self.make_d()
        bases += [one.data_ptr() for one in (*kept, between, d)]
        for plan, sources, scalars in self.launches:
            launch = plan.launch
            assert launch is not None  # noqa: S101 (of such plans there are no sequences)
            addresses = tuple([bases[at] + by for at, by in sources])
            launch.run(addresses, scalars, call.check, None, d)
        if call.listed:
            increment_versions([one for _, one in call.written()])
        return d


_sequences: Kinds[LaunchSequence] = Kinds(_KINDS)


def known_by(call: GemmCall, *options: object) -> tuple[list[torch.Tensor], Options]:
    """The tensors of a call, and with these options all else that decides what is launched."""
    tensors, others = [call.a, call.b], [*options]
    for item in call.listed:
        for part in item:
            if isinstance(part, torch.Tensor):
                tensors.append(part)
                others.append(torch.Tensor)
            else:
                others += (type(part), part)
    return tensors, tuple(others)


def find(tensors: Sequence[torch.Tensor], options: Options) -> LaunchSequence | None:
    """What is kept of a call like this one."""
    if plans._listeners:  # who hears of plans does of each that is run
        return None
    for one in tensors:
        if one.is_nested:  # of which guards ask what ends the process
            return None
    return _sequences.find(options, *tensors)


def keep(
    tensors: Sequence[torch.Tensor],
    options: Options,
    kept: Sequence[torch.Tensor],
    ran: Sequence[RanCall],
    d: torch.Tensor,
) -> None:
    """Keep what a call launched, for others like it; nothing of one that copies, or on the CPU."""
    known = [*tensors, *kept]
    own = {one.data_ptr(): (at, 0) for at, one in enumerate(tensors)}
    if len(own) < len(tensors):  # two begin in one place, but those of another call may not
        return
    own[d.data_ptr()] = len(known) + 1, 0
    parts, size = [(one, (at, 0)) for at, one in enumerate(known)][len(tensors) :], 0
    for one in _between([one for call in ran for one in _written(call)], (*known, d)):
        parts.append((one, (len(known), size)))
        size += -(-one.nbytes // _ALIGN) * _ALIGN
    laid_out = []
    for each in ran:
        plan = each.plan
        if plan.launch is None or plan.copies or not each.call.repeats:
            return
        addresses, scalars = each.call.arguments(plan.details, each.results)
        found = [own.get(address) or _part(address, parts) for address in addresses]
        if None in found:
            return
        laid_out.append((plan, tuple(one for one in found if one is not None), scalars))
    aligned = tuple([one.data_ptr() & 15 for one in tensors])
    make_between = maker(without_memory((size,), torch.uint8, d.device))
    _sequences.keep(
        LaunchSequence(aligned, tuple(laid_out), make_between, maker(d)), options, *tensors
    )


def _written(call: RanCall) -> list[torch.Tensor]:
    results = (call.results,) if isinstance(call.results, torch.Tensor) else call.results
    return [one for one in results if one is not None]


def _between(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is written and is none of the others, each once."""
    seen = {one.data_ptr() for one in others}
    found = list[torch.Tensor]()
    for one in written:
        if one.data_ptr() not in seen:
            seen.add(one.data_ptr())
            found.append(one)
    return found


def _part(address: int, tensors: Sequence[tuple[torch.Tensor, Source]]) -> Source | None:
    """Where the address of a part of one of these tensors comes from."""
    for one, (at, by) in tensors:
        inside = address - one.data_ptr()
        if 0 <= inside < one.nbytes:
            return at, by + inside
    return None
