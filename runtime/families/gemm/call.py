"""One call of `warploom.gemm`: its arguments, what they ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from warploom.arguments import require_dtype
from warploom.generator.families.gemm import Accumulation
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families._product.operands import check_apart
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.gradient_rule import GradientOptions, Preactivation
from warploom.runtime.families.gemm.operands import named, refuse_grad
from warploom.runtime.families.gemm.problem import (
    CheckedCall,
    Options,
    check_call,
    require_accumulation,
)
from warploom.runtime.tensors import Named, refuse_dual, require_memory, require_tensors


@dataclass(slots=True)
class GemmCall:
    """The arguments of one call of `warploom.gemm`, which says what they mean.

    listed    the items of the epilogue, in order

    The last three are of its gradients, and decide no plan.
    """

    a: torch.Tensor
    b: torch.Tensor
    listed: Sequence[Item] = ()
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    accumulation: Accumulation = "fast"
    spec: KernelSpec | None = None
    preactivation: Preactivation = "save"
    accumulate_into: torch.Tensor | None = None
    gradient_dtype: torch.dtype | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.a.get_device()

    @property
    def options(self) -> Options:
        """What the call asks for beside its tensors."""
        return Options(self.out_dtype, self.accumulation, self.spec)

    @property
    def gradient_options(self) -> GradientOptions:
        """What the call asks of its gradients."""
        dtype = self.gradient_dtype or torch.bfloat16
        return GradientOptions(self.accumulation, dtype, self.accumulate_into)

    def signature(self) -> Key:
        """Everything that decides the plan; every call builds it, so nothing here is a loop."""
        a, b, out, listed = self.a, self.b, self.out, self.listed
        return (
            GemmCall,
            a.shape,
            a.stride(),
            a.dtype,
            a.data_ptr() & 15,
            a.get_device(),
            a.is_neg(),
            b.shape,
            b.stride(),
            b.dtype,
            b.data_ptr() & 15,
            b.get_device(),
            b.is_neg(),
            None
            if out is None
            else (
                out.shape,
                out.stride(),
                out.dtype,
                out.data_ptr() & 15,
                out.get_device(),
                out.is_neg(),
            ),
            epilogue.signature(listed) if listed else (),
            self.out_dtype,
            self.accumulation,
            self.spec,
        )

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        return named(self.a, self.b, self.out, self.listed)

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out), *epilogue.outputs(self.listed)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        epilogue.check_items(self.listed)
        require_tensors("warploom.gemm", self.named(), ("a", "b"))
        require_accumulation(self.accumulation)
        if self.out_dtype is not None:  # which no key of a plan can be made with
            require_dtype("out_dtype", self.out_dtype, NAMES)

    def refuse(self) -> None:
        """Raise ProblemError for what the call would write and autograd is to know of."""
        if torch.is_grad_enabled():
            refuse_grad(self.a, self.b, self.out, self.listed)

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        epilogue.check_items(self.listed)
        values = (item[1] for item in self.listed)
        refuse_dual("warploom.gemm", (self.a, self.b, self.out, *values))

    def draft(self, target: DeviceLimits) -> Draft[CheckedCall]:
        """Check the call, place its operands, and choose its kernel for a GPU."""
        checked = check_call(self.a, self.b, self.listed, self.out, self.options)
        epilogue.check_finite(self.listed)
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
            ("a", "b", "d", *checked.epilogue.tensors),
            checked.epilogue.scalars,
            tuple(name for name, copy in (("a", checked.copy_a), ("b", checked.copy_b)) if copy),
            checked,
        )

    def results(self, details: CheckedCall) -> torch.Tensor:
        """D, as it was given, or new."""
        if self.out is not None:
            return self.out
        return self.a.new_empty(details.out_shape, dtype=details.out_dtype)

    def copied(self, details: CheckedCall) -> GemmCall:
        """The same call, with what TMA cannot read copied to where it can."""
        a = details.copy_a(self.a) if details.copy_a else self.a
        b = details.copy_b(self.b) if details.copy_b else self.b
        return replace(self, a=a, b=b)

    def arguments(self, details: CheckedCall, results: torch.Tensor) -> Arguments:
        """The addresses of A, B, D and the items' tensors, and the items' numbers."""
        addresses = (self.a.data_ptr(), self.b.data_ptr(), results.data_ptr())
        listed = self.listed
        if not listed:
            return addresses, ()
        return (*addresses, *epilogue.addresses(listed)), epilogue.scalars(listed)

    def check(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Raise ProblemError for memory that is missing or shared, and for numbers not finite."""
        a, b, listed = self.a, self.b, self.listed
        require_memory(named(a, b, results, listed))
        check_apart(results, (("a", a), ("b", b)), listed)
        epilogue.check_finite(listed)

    def compute(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Compute D by plain torch operations."""
        with torch.no_grad(), torch.autocast(results.device.type, enabled=False):
            results.copy_(reference.gemm(self.a, self.b, self.listed, details.out_dtype))
