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

Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # q, scale, span
_NAMES: dict[torch.dtype, PieceElement] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # x, where its rows are not one stride apart


@declared
class Fp32PiecesCall(Arguments[Details, Results]):
    """The arguments of `fp32_pieces`, which says what they mean.

    scale, span_a, span_b   scales of the fp16 pieces of x, and what A and B span: x is split only
                            if fp16 pieces do not hold these
    out, scale_out, span_out   where results go; None: they are made
    """

    function = "fp32_pieces"
    outputs = ("q", "scale", "span")
    no_gradient = (
        "x that requires grad",
        "fp32_pieces is not differentiable",
        "call it under torch.no_grad()",
    )

    x: torch.Tensor = tensor(aligned=False)
    dtype: torch.dtype = option(default=torch.float16, schema="ScalarType")
    count: int = option(default=2, schema="int")
    spec: KernelSpec | str | None = named_spec(default=None)
    scale: torch.Tensor | None = tensor(default=None, aligned=False)
    span_a: torch.Tensor | None = tensor(default=None)
    span_b: torch.Tensor | None = tensor(default=None)
    out: torch.Tensor | None = result(default=None, public=False)
    scale_out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    span_out: torch.Tensor | None = result(default=None, aligned=False, public=False)

    @property
    def extents(self) -> tuple[int, int]:
        """The rows of x, through all leading dimensions, and its columns."""
        return self.x.shape[:-1].numel(), self.x.shape[-1]

    @property
    def scaled(self) -> bool:
        """Whether scales of rows are found."""
        return self.dtype == torch.float16

    @property
    def is_wide(self) -> bool:
        """Whether the rows are split only if fp16 pieces do not hold them."""
        return self.scale is not None

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
        given = {name: getattr(self, name) for name in ("scale", "span_a", "span_b")}
        if self.is_wide != all(one is not None for one in given.values()):
            missing = ", ".join(name for name, one in given.items() if one is None)
            raise ProblemError(
                f"fp32_pieces without {missing}",
                rule="scale, span_a and span_b must be passed together, or none of them",
                fix="pass those that warploom.fp32_pieces returned with the fp16 pieces of A and B",
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
        operation = Fp32PiecesOperation(
            _NAMES[self.dtype],
            self.count,  # type: ignore[arg-type]
            layout or "row",
            spans="wide" if self.is_wide else "any",
        )
        shape = Fp32PiecesShape(m, k)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        pitch = self.x.stride(1) if layout == "col" else self._pitch()
        problem = Fp32PiecesProblem(m, k, k if pitch is None else pitch, reference.place(k))
        copies = ("x",) if layout is None else ()
        return Draft(
            choice, problem if m and k else None, self.addressed(), (), copies, Details(copies)
        )

    def results(self, details: Details) -> Results:
        """Where results go: as they were given, or new; no scale and span of bf16 pieces."""
        *rows, k = self.x.shape
        q, scale, span = self.out, self.scale_out, self.span_out
        if q is None:
            q = self.x.new_empty((*rows, self.count * reference.place(k)), dtype=self.dtype)
        if scale is None and self.scaled:
            scale = self.x.new_empty((3, *rows))
        if span is None and self.scaled:
            span = self.x.new_empty(reference.SPAN, dtype=torch.int32)
        return q, scale, span

    def computed(self) -> tuple[bool, bool, bool]:
        """q always; scales and span of fp16 pieces."""
        return True, self.scaled, self.scaled

    def fake(self) -> Results:
        """Those that are computed."""
        self.require()
        return self.results(Details(()))

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        names = ("out", "scale_out", "span_out")
        given = [*zip(names, results, strict=True)]
        read = self.read()
        require_memory([*read, *given])
        seen = [*read]
        for name, one in given:
            if one is not None:
                refuse_overlap(one, seen, "do not overlap", name)
                seen.append((name, one))

    def compute(self, details: Details, results: Results) -> None:
        """Compute them by plain torch operations."""
        m, k = self.extents
        spans = [one for one in (self.span_a, self.span_b) if one is not None]
        if spans and reference.pieces_hold(*spans):
            return
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            x = self.x.reshape(m, k)
            if self.scale is not None:
                x = x * (1 / self.scale[2].reshape(m, 1))
            across = self.layout() == "col"
            found = reference.pieces(x, self.dtype, self.count, across=across)
            for one, value in zip(results, found, strict=True):
                if one is not None:
                    one.copy_(value.reshape(one.shape))
