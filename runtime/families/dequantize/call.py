"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.dequantize import (
    DequantizeOperation,
    DequantizeProblem,
    DequantizeShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.quantization import Metadata, PackedWeight
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.operands import LOAD, refuse_overlap, refuse_repeated
from warploom.runtime.tensors import require_memory, require_one_device

DTYPES = (torch.bfloat16, torch.float16)
Packing = tuple[str, int | None, str, str, int, int]
"""The fields of `Metadata` that a call may differ in, in their order."""


def packing(metadata: Metadata) -> Packing:
    """What a call has of the metadata of a weight."""
    of = metadata
    return of.format, of.group, of.scale, of.activations, of.n, of.k


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...] = ()  # tensors of the weight that kernels cannot read in place


@declared
class DequantizeCall(Arguments[Details, tuple[torch.Tensor]]):
    """The arguments of `dequantize`, with the tensors of a weight, or of several experts."""

    function = "dequantize"
    outputs = ("w",)
    no_gradient = (
        "a quantized weight that requires grad",
        "must not require grad: a quantized weight is fixed, and has no gradient",
        "detach its tensors",
    )

    data: torch.Tensor = tensor()
    packing: Packing = option(
        schema="str format, int? group, str scale, str activations, int n, int k"
    )
    channel_scales: torch.Tensor | None = tensor(default=None)
    channel_zeros: torch.Tensor | None = tensor(default=None)
    dtype: torch.dtype = option(default=torch.bfloat16, schema="ScalarType")
    spec: KernelSpec | str | None = named_spec(default=None)
    out: torch.Tensor | None = result(default=None)

    @property
    def metadata(self) -> Metadata:
        """What one expert is."""
        return Metadata(*self.packing)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] of experts."""
        return (*self.data.shape[:-3], *self.packing[-2:])

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_dtype("dtype", self.dtype, DTYPES)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        self._require_parts()
        format_, group, scale, activations, n, k = self.packing
        experts = self.data.shape[:-3].numel()
        operation = DequantizeOperation(
            NAMES[self.dtype],  # type: ignore[arg-type]
            format_,  # type: ignore[arg-type]
            group or 0,  # type: ignore[arg-type]
            scale,  # type: ignore[arg-type]
            activations,  # type: ignore[arg-type]
        )
        shape = DequantizeShape(experts, n, k)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        pitches = (n * k, k)
        if self.out is not None:
            pitches = (self.out.stride(0) if self.out.dim() > 2 else 0, self.out.stride(-2))
        problem = DequantizeProblem(experts, n, k, pitches[1], pitches[0])
        copies = tuple(name for name, one in self.read() if not _readable(one))
        return Draft(
            choice, problem if experts else None, self.addressed(), (), copies, Details(copies)
        )

    def _require_parts(self) -> None:
        """Raise ProblemError for tensors that are not those of such a weight, and a bad `out`."""
        experts = self.data.shape[:-3]
        given = dict(self.read())
        for name, (shape, dtype) in self.metadata.tensors().items():
            one = given.pop(name, None)
            told = None if one is None else (tuple(one.shape), one.dtype)
            if len(experts) > 1 or told != ((*experts, *shape), dtype):
                raise ProblemError(
                    f"{name} of {told}",
                    rule=f"must be {[*experts[:1], *shape]} of {dtype}, as {self.metadata} says",
                    fix="pass a PackedWeight or PackedExperts as it was made",
                )
        out = self.out
        if out is None:
            return
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise ProblemError(
                f"out {list(out.shape)} of {out.dtype}",
                rule=f"must be {list(self.shape)} of {self.dtype}",
                fix="leave it out, or allocate it so",
            )
        if out.shape[-1] > 1 and out.stride(-1) != 1:
            raise ProblemError(
                f"out with strides {list(out.stride())}",
                rule="must be contiguous along K, its last dimension",
                fix="use a row-major tensor; rows may be any number of elements apart",
            )
        refuse_repeated("out", out)

    def results(self, details: Details) -> tuple[torch.Tensor]:
        """The result: as it was given, or new."""
        if self.out is not None:
            return (self.out,)
        return (self.data.new_empty(self.shape, dtype=self.dtype),)

    def fake(self) -> tuple[torch.Tensor]:
        """A new one."""
        self.require()
        return self.results(Details())

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results[0])])
        refuse_overlap(results[0], self.read(), "must not overlap the quantized weight")

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute it by plain torch operations, expert by expert."""
        parts = [self.data, self.channel_scales, self.channel_zeros]
        if self.data.dim() == 3:
            parts = [None if one is None else one[None] for one in parts]
        found = results[0] if self.data.dim() > 3 else results[0][None]
        with torch.no_grad():
            for expert, into in enumerate(found):
                data, scales, zeros = (None if one is None else one[expert] for one in parts)
                assert data is not None  # noqa: S101 (for type checkers)
                weight = PackedWeight(data, self.metadata, scales, zeros)
                into.copy_(weight.dequantize(self.dtype))


def _readable(one: torch.Tensor) -> bool:
    """Whether kernels can read a weight's tensor in place."""
    return one.is_contiguous() and (one.is_meta or one.data_ptr() % LOAD == 0)
