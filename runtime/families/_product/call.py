"""What the calls of all GEMMs have in common: an epilogue, one result, and how they are planned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Self

import torch

from warploom.arguments import require_dtype
from warploom.generator.families._product import Store
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import remember
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec
from warploom.runtime import call as calls
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import ITEMS, BoundEpilogue
from warploom.runtime.families._product.operands import Operand
from warploom.runtime.families._product.steps import KINDS, LOADING, step_of
from warploom.runtime.families._product.steps.scatter import index_of, written
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.function import WarmCalls
from warploom.runtime.tensors import require_memory

_address = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True)
class Checked:
    """A call that kernels can run: what it computes, on which extents and pitches, and how.

    shape      what of the problem decides its time
    empty      whether D has no element, or no product is left to compute
    store      how D can be stored where it lies
    operands   those that TMA reads, by the names of the arguments
    scales     what launches call block scales, which come first among the items' tensors
    """

    operation: Any
    problem: Any
    shape: Shape
    empty: bool
    epilogue: BoundEpilogue
    store: Store
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    operands: Mapping[str, Operand]
    scales: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[str, ...]:
        """The operands that are copied first, since TMA cannot read them in place."""
        return tuple([name for name, one in self.operands.items() if one.copy is not None])


class ProductCall(Arguments[Checked, torch.Tensor]):
    """A call of a function that multiplies matrices; `listed` are the items of its epilogue."""

    __slots__ = ()
    outputs = ("d",)
    a: torch.Tensor
    listed: Sequence[Item]
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    spec: KernelSpec | None

    @classmethod
    def asked(cls, *operands: Any, **keywords: Any) -> Self:
        """The call that the function makes of these operands and keywords, but for autograd's."""
        names = {*cls.declaration.results, *cls.declaration.options}
        own = {name: keywords.pop(name) for name in names & keywords.keys()}
        own["spec"] = dispatch.named(own.get("spec"))
        return cls(*operands, listed=epilogue.items(**keywords), **own)  # type: ignore[call-arg]

    @abstractmethod
    def checked(self) -> Checked:
        """Check the tensors of the call and place its operands, in the layouts of its spec if any.

        Raises ProblemError naming the tensor, the rule and the fix.
        """

    @abstractmethod
    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D of a type by plain torch operations."""

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        for item in self.listed:
            step_of(item)
        Arguments.require(self)
        if self.out_dtype is not None:  # which no key of a plan can be made with
            require_dtype("out_dtype", self.out_dtype, NAMES)

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        for item in self.listed:
            step_of(item)
        Arguments.refuse_tangents(self)

    def draft(self, target: DeviceLimits) -> Draft[Checked]:
        """Check the call, place its operands, and choose its kernel for a GPU."""
        checked = self.checked()
        for item in self.listed:
            KINDS[item[0]].check_finite(item)
        choice = dispatch.choose(
            checked.operation,
            checked.shape,
            spec=self.spec,
            device=target,
            requires=checked.store,
        )
        return Draft(
            choice,
            None if checked.empty else checked.problem,
            (*self.addressed(), *checked.scales, *checked.epilogue.tensors),
            checked.epilogue.scalars,
            checked.copies,
            checked,
        )

    def results(self, details: Checked) -> torch.Tensor:
        """D, as it was given, or new."""
        if self.out is not None:
            return self.out
        return self.a.new_empty(details.out_shape, dtype=details.out_dtype)

    def copied(self, details: Checked) -> Self:
        """The same call, with what TMA cannot read copied to where it can."""
        copies: dict[str, Any] = {
            name: one.copy(getattr(self, name))
            for name, one in details.operands.items()
            if one.copy is not None
        }
        return replace(self, **copies)  # type: ignore[type-var]

    def arguments(self, details: Checked, results: torch.Tensor) -> calls.Arguments:
        """The addresses of what is read, of D and of the items' tensors, and the items' numbers."""
        declaration, listed = self.declaration, self.listed
        addresses = (*map(_address, declaration.read_of(self)),)
        for name, parts in declaration.inner:
            addresses += parts.addresses(getattr(self, name))
        addresses += (results.data_ptr(),)
        if not listed:
            return addresses, ()
        return addresses + ITEMS.addresses(listed), ITEMS.numbers(listed)

    def numbered(self, draft: Draft[Checked]) -> tuple[str, ...]:
        """The names that keywords have for the items' numbers."""
        return ITEMS.numbered(self.listed)

    def check(self, details: Checked, results: torch.Tensor) -> None:
        """Raise ProblemError for memory that is missing or shared, and for numbers not finite."""
        require_memory(self.named())  # results that are new have some, which is apart
        if self.out is not None or self.listed:
            epilogue.check_apart(results, self.read(), self.listed)
        for item in self.listed:
            KINDS[item[0]].check_finite(item)

    def compute(self, details: Checked, results: torch.Tensor) -> None:
        """Compute D by plain torch operations."""
        index = index_of(self.listed)
        with torch.no_grad(), torch.autocast(results.device.type, enabled=False):
            if index is None:
                results.copy_(self.reference(details.out_dtype))
                return
            plain: Any = replace(self, listed=self.listed[:-1])  # type: ignore[type-var]
            results.copy_(written(results, plain.reference(details.out_dtype), index))

    @classmethod
    def crossed(cls, *values: Any, **written: torch.Tensor | None) -> Self:
        """The call of what an operator was handed, which names a kernel by its name."""
        call: Any = super().crossed(*values, **written)
        call.spec = dispatch.named(call.spec)
        return call  # type: ignore[no-any-return]

    @classmethod
    def keywords(cls, written: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """Where D goes: outputs of steps are among the items."""
        return {"out": written.get("out")}


def written_keywords() -> dict[str, str]:
    """What operators write by keyword, with their types: `out`, and outputs of steps."""
    kinds = [kind for kind, one in KINDS.items() if one.step.auxiliary]
    return {
        "out": "Tensor(a!)",
        **{kind: f"Tensor({chr(ord('b') + i)}!)?" for i, kind in enumerate(kinds)},
    }


# ---- Calls like an earlier one -------------------------------------------------------------------

_LISTS = 256  # kinds of lists whose calls are recognised, of each function
_KINDS = {"rounding_state": "stochastic_rounding", "preactivation": "way of gradients"}
"""Keywords that items of theirs have another kind than, or that have the name of another kind."""

CallOf = Callable[[tuple[Any, ...]], ProductCall]


class WarmProducts:
    """The calls of a function that ran before, with an epilogue of keywords or a list of items.

    call        the class of its calls
    operands    the names of what it multiplies: `product` makes these of what comes first
    keywords    those of an epilogue, with their defaults
    options     names of what decides a call beside; in a call's arguments operands come first,
                then `out`, keywords and options
    """

    def __init__(
        self,
        call: type[ProductCall],
        operands: Sequence[str],
        keywords: Mapping[str, Any],
        options: Sequence[str],
        product: Callable[..., tuple[Any, ...]],
    ) -> None:
        self._call, self._product = call, product
        self._first, self._others = (*operands, "out"), (*keywords, *options)
        self._options, self._plain = tuple(options), tuple(keywords.values())
        self._types = (*map(type, self._plain),)
        self._lists: dict[tuple[tuple[str, int], ...], WarmCalls[torch.Tensor] | None] = {}
        self.keywords = self.of_keywords(self.made)

    def of_keywords(self, call_of: CallOf) -> WarmCalls[torch.Tensor]:
        """No calls yet, of those with keywords, of which `call_of` makes calls."""
        return self._calls((*self._first, *_apart(self._others)), call_of)

    def of_list(
        self, values: tuple[Any, ...], epilogue: Sequence[Item]
    ) -> tuple[WarmCalls[torch.Tensor] | None, tuple[Any, ...]]:
        """The calls with a list of these kinds of items, and the arguments with all that is in it.

        None where a call is not recognised: kinds come twice, one has two tensors, or there are
        keywords beside the list.
        """
        own, options = len(self._first), len(self._options)
        if not isinstance(epilogue, list | tuple):  # the call says so
            return None, values
        try:
            forms = tuple([(item[0], len(item)) for item in epilogue])
            flat = (*chain.from_iterable(epilogue),)
            known = self._lists.get(forms, self.keywords)
        except Exception:  # no list of items: the call says so
            return None, values
        if known is self.keywords:
            kinds, lengths = zip(*forms, strict=True) if forms else ((), ())
            known = self._of_kinds(kinds, lengths)
            remember(self._lists, forms, known, _LISTS)
        keywords = values[own : len(values) - options]
        # Types come first: a tensor is compared with nothing, for which the host would wait.
        if known is None or (*map(type, keywords),) != self._types or keywords != self._plain:
            return None, values
        return known, values[:own] + values[len(values) - options :] + flat

    def made(self, values: tuple[Any, ...]) -> ProductCall:
        """The call of the arguments of one with keywords."""
        return self._made(values, self._others)

    def _made(
        self, values: tuple[Any, ...], names: Sequence[str], **keywords: Sequence[Item]
    ) -> ProductCall:
        own = len(self._first)
        others = dict(zip(names, values[own:], strict=False))
        operands = self._product(*values[: own - 1])
        return self._call.asked(*operands, out=values[own - 1], **others, **keywords)

    def _of_kinds(
        self, kinds: tuple[str, ...], lengths: Sequence[int]
    ) -> WarmCalls[torch.Tensor] | None:
        names = [*self._first, *_apart(self._options)]
        count = len(names)
        for index, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
            number = KINDS[kind].number if kind in KINDS else ""
            names += [f"kind {index}", kind, number][:length]
        if len({*names}) < len(names) or not LOADING.isdisjoint(kinds):
            return None

        def call_of(values: tuple[Any, ...]) -> ProductCall:
            flat = iter(values[count:])
            listed = [(*islice(flat, length),) for length in lengths]
            return self._made(values[:count], self._options, epilogue=listed)

        return self._calls(names, call_of)

    def _calls(self, names: Sequence[str], call_of: CallOf) -> WarmCalls[torch.Tensor]:
        return WarmCalls(names, self._call.declaration, call_of, at_second=True)


def _apart(keywords: Sequence[str]) -> list[str]:
    """The names of keywords, apart from those of kinds of items that are not theirs."""
    return [_KINDS.get(name, name) for name in keywords]
