"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warploom.errors import ProblemError
from warploom.generator.families.axpy import AxpyOperation, AxpyShape
from warploom.generator.families.axpy.rules import LOAD_BYTES
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.elements import name_of
from warploom.runtime.families.axpy import reference
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import Named, require_memory, require_one_device, require_tensors

Copied = tuple[str, ...]  # the operands that are copied to where kernels can read them


@dataclass(slots=True)
class AxpyCall:
    """The arguments of `axpy`."""

    x: torch.Tensor
    y: torch.Tensor
    alpha: float = 1.0
    relu: bool = False
    out: torch.Tensor | None = None
    spec: KernelSpec | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.x.get_device()

    def signature(self) -> Key:
        """Everything that decides the plan: how each tensor lies, and what is asked for."""
        given = (None if one is None else _placed(one) for one in (self.x, self.y, self.out))
        return (AxpyCall, *given, self.relu, self.spec)

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        return [("x", self.x), ("y", self.y), ("out", self.out)]

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are no tensors."""
        require_tensors("axpy", self.named(), ("x", "y"))

    def refuse(self) -> None:
        """Raise ProblemError for tensors that autograd expects to see differentiated."""
        if torch.is_grad_enabled() and (self.x.requires_grad or self.y.requires_grad):
            raise ProblemError(
                "x or y that requires grad",
                rule="axpy is not differentiable",
                fix="call it under torch.no_grad()",
            )

    def draft(self, target: DeviceLimits) -> Draft[Copied]:
        """Check the call and choose its kernel."""
        given = [(name, one) for name, one in self.named() if isinstance(one, torch.Tensor)]
        require_one_device(given)
        for name, one in given:
            if (one.shape, one.dtype) != (self.x.shape, self.x.dtype):
                raise ProblemError(
                    f"{name} {list(one.shape)} {one.dtype}, x {list(self.x.shape)} {self.x.dtype}",
                    rule="must be of one shape and type",
                    fix=f"convert or expand {name}",
                )
        if self.out is not None and not _loadable(self.out):
            raise ProblemError(
                f"out with strides {list(self.out.stride())}",
                rule=f"must be contiguous, at an address that is a multiple of {LOAD_BYTES}",
                fix="leave out out",
            )
        operation = AxpyOperation(name_of(self.x.dtype, "x"), self.relu)  # type: ignore[arg-type]
        shape = AxpyShape(self.x.numel())
        choice = dispatch.choose(operation, shape, spec=self.spec, device=target)
        copies = tuple(name for name, one in given if not _loadable(one))
        return Draft(
            choice, shape if shape.n else None, ("x", "y", "d"), ("alpha",), copies, copies
        )

    def results(self, details: Copied) -> torch.Tensor:
        """d, as it was given, or new."""
        return self.x.new_empty(self.x.shape) if self.out is None else self.out

    def copied(self, details: Copied) -> AxpyCall:
        """The same call, of copies of what kernels cannot read."""
        dense = torch.contiguous_format
        found = {name: getattr(self, name).clone(memory_format=dense) for name in details}
        return replace(self, **found)

    def arguments(self, details: Copied, results: torch.Tensor) -> Arguments:
        """What launches are given: addresses and numbers."""
        addresses = (self.x.data_ptr(), self.y.data_ptr(), results.data_ptr())
        return addresses, (float(self.alpha),)

    def check(self, details: Copied, results: torch.Tensor) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results)])
        refuse_overlap(results, (("x", self.x), ("y", self.y)), "do not overlap")

    def compute(self, details: Copied, results: torch.Tensor) -> None:
        """Compute d by plain torch operations, in fp32."""
        x, y = self.x.float(), self.y.float()
        results.copy_(reference.axpy(x, y, self.alpha, relu=self.relu))


def _placed(one: torch.Tensor) -> Key:
    lies = (one.shape, one.stride(), one.dtype, one.get_device(), one.is_neg())
    return *lies, one.data_ptr() % LOAD_BYTES


def _loadable(one: torch.Tensor) -> bool:
    """Whether kernels can read and write the elements where they are."""
    return one.is_contiguous() and (one.is_meta or one.data_ptr() % LOAD_BYTES == 0)
