"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.fp32_pieces import (
    Fp32PiecesOperation,
    Fp32PiecesProblem,
    Fp32PiecesShape,
)
from warploom.generator.families.fp32_pieces.schedule import Layout, PieceElement
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.families.fp32_pieces import reference
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device, shown

Results = tuple[torch.Tensor | None, torch.Tensor | None]  # q, scale
_NAMES: dict[torch.dtype, PieceElement] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # x, where its rows are not one stride apart


@declared
class Fp32PiecesCall(Arguments[Details, Results]):
    """The arguments of `fp32_pieces`, which says what they mean.

    out, scale_out   where results go; None: they are made
    """

    function = "fp32_pieces"
    outputs = ("q", "scale")
    no_gradient = (
        "x that requires grad",
        "fp32_pieces is not differentiable",
        "call it under torch.no_grad()",
    )

    x: torch.Tensor = tensor(aligned=False)
    dtype: torch.dtype = option(default=torch.float16, schema="ScalarType")
    count: int = option(default=2, schema="int")
    spec: KernelSpec | str | None = named_spec(default=None)
    out: torch.Tensor | None = result(default=None, public=False)
    scale_out: torch.Tensor | None = result(default=None, aligned=False, public=False)

    @property
    def extents(self) -> tuple[int, int]:
        """The rows of x, through all leading dimensions, and its columns."""
        return self.x.shape[:-1].numel(), self.x.shape[-1]

    @property
    def scaled(self) -> bool:
        """Whether rows have scales."""
        return self.dtype == torch.float16

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_dtype("dtype", self.dtype, (*_NAMES,))
        counts = (2,) if self.scaled else (2, 3)
        if type(self.count) is not int or self.count not in counts:
            raise ProblemError(
                f"count {shown(self.count)} of pieces of {self.dtype}",
                rule=f"must be {' or '.join(map(str, counts))}",
                fix="use it, or dtype torch.bfloat16 for three pieces",
            )
        if self.x.dtype != torch.float32 or self.x.dim() < 2:
            raise ProblemError(
                f"x {list(self.x.shape)} {self.x.dtype}",
                rule="must be [.., m, k] of torch.float32",
                fix="convert it with x.float()",
            )

    def layout(self) -> Layout | None:
        """How kernels read x where it is stored; None where they cannot."""
        if self._pitch() is not None:
            return "row"
        x = self.x
        return "col" if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) >= x.shape[0] else None

    def _pitch(self) -> int | None:
        """Elements from row to row through all leading dimensions; None where that varies."""
        (m, k), x = self.extents, self.x
        if k > 1 and x.stride(-1) != 1:
            return None
        try:
            pitch: int = x.view(m, k).stride(0)
        except RuntimeError:  # the rows are not one stride apart
            return None
        return pitch if m > 1 else k

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        m, k = self.extents
        layout = self.layout()
        operation = Fp32PiecesOperation(_NAMES[self.dtype], self.count, layout or "row")  # type: ignore[arg-type]
        shape = Fp32PiecesShape(m, k)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        pitch = self.x.stride(1) if layout == "col" else self._pitch()
        problem = Fp32PiecesProblem(m, k, k if pitch is None else pitch, reference.place(k))
        copies = ("x",) if layout is None else ()
        return Draft(
            choice, problem if m and k else None, self.addressed(), (), copies, Details(copies)
        )

    def results(self, details: Details) -> Results:
        """Where results go: as they were given, or new; no scale of bf16 pieces."""
        *rows, k = self.x.shape
        q, scale = self.out, self.scale_out
        if q is None:
            q = self.x.new_empty((*rows, self.count * reference.place(k)), dtype=self.dtype)
        if scale is None and self.scaled:
            scale = self.x.new_empty((3, *rows))
        return q, scale

    def computed(self) -> tuple[bool, bool]:
        """q always; scales of fp16 pieces."""
        return True, self.scaled

    def fake(self) -> Results:
        """Those that are computed."""
        self.require()
        return self.results(Details(()))

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        q, scale = results
        require_memory([("x", self.x), ("out", q), ("scale_out", scale)])
        seen = [("x", self.x)]
        for name, one in (("out", q), ("scale_out", scale)):
            if one is not None:
                refuse_overlap(one, seen, "do not overlap", name)
                seen.append((name, one))

    def compute(self, details: Details, results: Results) -> None:
        """Compute both by plain torch operations."""
        m, k = self.extents
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            found = reference.pieces(self.x.reshape(m, k), self.dtype, self.count)
            for one, value in zip(results, found, strict=True):
                if one is not None:
                    one.copy_(value.reshape(one.shape))
