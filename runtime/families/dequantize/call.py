"""Calls on quantized weights, in slabs and in rows: their arguments, and what is done with them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.dequantize import (
    DequantizeOperation,
    DequantizeProblem,
    DequantizeShape,
)
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.quantization import Metadata, PackedWeight
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families.gemm.block_scales import blocks_of, dequantised
from warploom.runtime.operands import LOAD, refuse_overlap, refuse_repeated
from warploom.runtime.tensors import require_memory, require_one_device

DTYPES = (torch.bfloat16, torch.float16)
SCALES = {torch.float32: "fp32", torch.float8_e8m0fnu: "e8m0"}  # of blocks of rows
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


class _Dequantization(Arguments[Details, tuple[torch.Tensor]]):
    """What both kinds of calls have: the weight in `data`, `dtype` and `out`."""

    __slots__ = ()
    outputs = ("w",)
    no_gradient = (
        "a quantized weight that requires grad",
        "must not require grad: a quantized weight is fixed, and has no gradient",
        "detach its tensors",
    )
    data: torch.Tensor
    dtype: torch.dtype
    out: torch.Tensor | None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] of experts."""

    @abstractmethod
    def require_parts(self) -> None:
        """Raise ProblemError for tensors that are not those of such a weight."""

    @abstractmethod
    def operation(self) -> DequantizeOperation:
        """What is computed."""

    def strides(self, copies: tuple[str, ...]) -> dict[str, Any]:
        """How codes in rows are stored, and their scales, but for those that are copied."""
        return {}

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_dtype("dtype", self.dtype, DTYPES)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        self.require_parts()
        self._require_out()
        (*experts, n, k), out = self.shape, self.out
        shape = DequantizeShape(math.prod(experts), n, k)
        choice = dispatch.choose(self.operation(), shape, spec=self.kernel, device=target)
        strides = (k, n * k)
        if out is not None:
            strides = (out.stride(-2), out.stride(0) if experts else 0)
        copies = self.unreadable()
        problem = DequantizeProblem(shape.experts, n, k, *strides, **self.strides(copies))
        there = problem if shape.experts and n and k else None
        return Draft(choice, there, self.addressed(), (), copies, Details(copies))

    def unreadable(self) -> tuple[str, ...]:
        """The tensors that kernels cannot read in place."""
        return tuple(
            name
            for name, one in self.read()
            if not (one.is_contiguous() and (one.is_meta or one.data_ptr() % LOAD == 0))
        )

    def _require_out(self) -> None:
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

    def each(self, result: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The result of every expert, and its tensors in the order of `read`."""
        tensors = [result, *(one for _, one in self.read())]
        if result.dim() == 2:
            tensors = [one[None] for one in tensors]
        return zip(*tensors, strict=True)


@declared
class DequantizeCall(_Dequantization):
    """The arguments of `dequantize`, with the tensors of a weight, or of several experts."""

    function = "dequantize"

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

    def require_parts(self) -> None:
        """Raise ProblemError for tensors that are not those of such a weight."""
        experts, parts = self.data.shape[:-3], dict(self.read())
        for name, (shape, dtype) in self.metadata.tensors().items():
            one = parts.get(name)
            what = None if one is None else (tuple(one.shape), one.dtype)
            if len(experts) > 1 or what != ((*experts, *shape), dtype):
                raise ProblemError(
                    f"{name} of {what}",
                    rule=f"must be {[*experts[:1], *shape]} of {dtype}, as {self.metadata} says",
                    fix="pass a PackedWeight or PackedExperts as it was made",
                )

    def operation(self) -> DequantizeOperation:
        """What is computed."""
        name, group, scale, activations, _, _ = self.packing
        return DequantizeOperation(NAMES[self.dtype], name, group or 0, scale, activations)  # type: ignore[arg-type]

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute it by plain torch operations, expert by expert."""
        names = [name for name, _ in self.read()]
        with torch.no_grad():
            for into, *parts in self.each(results[0]):
                weight = PackedWeight(
                    metadata=self.metadata, **dict(zip(names, parts, strict=True))
                )
                into.copy_(weight.dequantize(self.dtype))


@declared
class DequantizeRowsCall(_Dequantization):
    """The arguments of `dequantize` with e4m3 rows and the scales of blocks of 128x128."""

    function = "dequantize_rows"

    data: torch.Tensor = tensor()
    scale: torch.Tensor = tensor(aligned=False, kernel="scales")
    dtype: torch.dtype = option(default=torch.bfloat16, schema="ScalarType")
    spec: KernelSpec | str | None = named_spec(default=None)
    out: torch.Tensor | None = result(default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] of experts."""
        return tuple(self.data.shape)

    def require_parts(self) -> None:
        """Raise ProblemError for anything but e4m3 rows and the scales of their blocks."""
        *experts, n, k = (*self.data.shape, 0, 0)[: max(2, self.data.dim())]
        if self.data.dtype != torch.float8_e4m3fn or self.data.dim() not in (2, 3):
            raise ProblemError(
                f"weight {list(self.data.shape)} of {self.data.dtype}",
                rule="must be a quantized weight, or a tensor [N, K] or [E, N, K] of e4m3",
                fix="make a weight with warploom.quantize",
            )
        shape = (*experts, blocks_of(n), blocks_of(k))
        if tuple(self.scale.shape) != shape or self.scale.dtype not in SCALES:
            raise ProblemError(
                f"scale {list(self.scale.shape)} of {self.scale.dtype}",
                rule=f"must be {list(shape)} of {' or '.join(map(str, SCALES))}: a scale for each "
                "128x128",
                fix="pass the scales of the blocks, of which the last of a row may be short",
            )

    def operation(self) -> DequantizeOperation:
        """What is computed."""
        return DequantizeOperation(
            NAMES[self.dtype],  # type: ignore[arg-type]
            "e4m3",
            SCALE_BLOCK,  # type: ignore[arg-type]
            SCALES[self.scale.dtype],  # type: ignore[arg-type]
            layout="rows",
        )

    def unreadable(self) -> tuple[str, ...]:
        """Codes that are not contiguous along K."""
        return ("data",) if self.data.shape[-1] > 1 and self.data.stride(-1) != 1 else ()

    def strides(self, copies: tuple[str, ...]) -> dict[str, Any]:
        """How codes and scales are stored."""
        *experts, n, k = self.shape
        data = (
            (n * k, k) if copies else (self.data.stride(0) if experts else 0, self.data.stride(-2))
        )
        scale = self.scale.stride()
        return {"data_strides": data, "scale_strides": scale if experts else (0, *scale)}

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute it by plain torch operations, expert by expert."""
        with torch.no_grad():
            for into, data, scale in self.each(results[0]):
                into.copy_(dequantised(data, scale, torch.float32))
