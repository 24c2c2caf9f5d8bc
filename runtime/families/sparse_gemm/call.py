"""One call of `sparse_gemm`: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import Function
from warploom.generator.families.sparse_gemm import (
    SparseGemmOperation,
    SparseGemmProblem,
    SparseGemmShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    Arguments,
    declared,
    dtype,
    named_spec,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product.operands import Operand, check_out
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.sparse_gemm import reference
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device, shown

FUNCTIONS: tuple[str, ...] = get_args(Function)
OUTPUTS = (torch.bfloat16, torch.float16)  # of y and bias; x of these has results of its own type


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # x, where TMA cannot read its rows in place


@declared
class SparseGemmCall(Arguments[Details, tuple[torch.Tensor]]):
    """The arguments of `sparse_gemm`, which says what they mean.

    values, metadata   the tensors of the packed weight
    """

    function = "sparse_gemm"
    outputs = ("y",)
    no_gradient = (
        "a tensor that requires grad",
        "sparse_gemm is differentiable in x and bias of 16 bits, and without out",
        "call it under torch.no_grad(), or multiply by weight.dense()",
    )

    x: torch.Tensor = tensor()
    values: torch.Tensor = tensor()
    metadata: torch.Tensor = tensor()
    bias: torch.Tensor | None = tensor(default=None, aligned=False)
    activation: str | None = option(default=None, schema="str?")
    out: torch.Tensor | None = result(default=None, aligned=False)
    spec: KernelSpec | str | None = named_spec(default=None)
    scale_x: torch.Tensor | None = tensor(default=None, aligned=False)
    scale_weight: torch.Tensor | None = tensor(default=None, aligned=False)
    out_dtype: torch.dtype | None = dtype(default=None)

    @property
    def of_y(self) -> torch.dtype:
        """The type of y and bias."""
        given = self.out.dtype if self.out is not None else None
        own = self.x.dtype if self.x.dtype in OUTPUTS else torch.bfloat16
        return self.out_dtype or given or own

    @property
    def weight(self) -> SparseWeight:
        """The packed weight."""
        return SparseWeight(self.values, self.metadata)

    @property
    def items(self) -> list[Item]:
        """What is done to sums, as items of an epilogue."""
        return reference.items(self.bias, self.activation, self.scale_x, self.scale_weight)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.activation is not None and self.activation not in FUNCTIONS:
            raise ProblemError(
                f"activation {shown(self.activation)}",
                rule=f"must be one of {', '.join(FUNCTIONS)}, or None",
                fix="use one of them",
            )

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        self._check()
        n, k = self.weight.shape
        m = self.x.shape[:-1].numel()
        operation = SparseGemmOperation(
            NAMES[self.x.dtype],  # type: ignore[arg-type]
            bias=self.bias is not None,
            activation=self.activation or "none",  # type: ignore[arg-type]
            output="like_x" if self.x.dtype in OUTPUTS else NAMES[self.of_y],  # type: ignore[arg-type]
            scaled=self.scale_x is not None,
        )
        choice = dispatch.choose(
            operation, SparseGemmShape(m, n, k), spec=self.kernel, device=target
        )
        rows, out = _rows(self.x), None if self.out is None else _rows(self.out)
        x = Operand.of(rows, ("row",), None)
        shape = (*rows.shape[:-1], n)
        y_pitch, _ = check_out(out, shape, self.of_y, rows.get_device(), None)
        copies = () if x.copy is None else ("x",)
        scales = [0 if one is None else one.numel() for one in (self.scale_x, self.scale_weight)]
        problem = SparseGemmProblem(m, n, k, x.matrix.pitch, y_pitch, *scales) if m else None
        return Draft(choice, problem, self.addressed(), (), copies, Details(copies))

    def _check(self) -> None:
        SparseWeight.from_tensors({"values": self.values, "metadata": self.metadata})
        x, bias, out = self.x, self.bias, self.out
        n, k = self.weight.shape
        if x.dim() == 0 or x.shape[-1] != k:
            raise ProblemError(
                f"x {list(x.shape)} by a sparse weight {[n, k]}",
                rule=f"x must be [.., M, K], K being the weight's {k}",
                fix="reshape x, or pack the weight [N, K], as torch's are",
            )
        of_x, of_y = self.values.dtype, self.of_y
        if x.dtype != of_x:
            raise ProblemError(
                f"x of {x.dtype} with a weight of {of_x}",
                rule="must be of the weight's type",
                fix=f"convert with x.to({of_x}), or quantize it for a weight of 8 bits",
            )
        if of_y not in OUTPUTS or (of_x in OUTPUTS and of_y != of_x):
            raise ProblemError(
                f"a result of {of_y} with x of {of_x}",
                rule=f"must be {of_x}" if of_x in OUTPUTS else "must be bfloat16 or float16",
                fix="leave out_dtype and out to their defaults",
            )
        for name, one in (("bias", bias), ("out", out)):
            if one is not None and one.dtype != of_y:
                raise ProblemError(
                    f"{name} of {one.dtype} with a result of {of_y}",
                    rule="must be of the result's type",
                    fix=f"convert with {name}.to({of_y})",
                )
        self._check_scales()
        if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
            raise ProblemError(
                f"bias {list(bias.shape)} with strides {list(bias.stride())}",
                rule=f"must be contiguous [{n}], an element for each row of the weight",
                fix="pass bias.contiguous() of that length",
            )
        if out is not None and out.shape != (*x.shape[:-1], n):
            raise ProblemError(
                f"out {list(out.shape)} with strides {list(out.stride())}",
                rule=f"must be {[*x.shape[:-1], n]}",
                fix="leave it out to have it made",
            )

    def _check_scales(self) -> None:
        given = {"scale_x": self.scale_x, "scale_weight": self.scale_weight}
        if all(one is None for one in given.values()):
            return
        if self.x.dtype in OUTPUTS:
            raise ProblemError(
                f"scales with x of {self.x.dtype}",
                rule="are for x and weights of 8 bits",
                fix="multiply the weight by its scales before it is packed",
            )
        rows = {"scale_x": self.x.shape[:-1].numel(), "scale_weight": self.values.shape[0]}
        for name, scales in given.items():
            if scales is None:
                raise ProblemError(
                    f"{name} None with a scale of the other operand",
                    rule="scale_x and scale_weight must be passed together",
                    fix=f"pass torch.ones(1) for {name}, on the device of x",
                )
            if (
                scales.dtype != torch.float32
                or scales.numel() not in (1, rows[name])
                or not scales.is_contiguous()
            ):
                raise ProblemError(
                    f"{name} {scales.dtype} {list(scales.shape)} with strides "
                    f"{list(scales.stride())}",
                    rule=f"must be contiguous float32 of one element or of {rows[name]}, one for "
                    "each row",
                    fix=f"pass {name}.float().contiguous() of that length",
                )

    def results(self, details: Details) -> tuple[torch.Tensor]:
        """y, as it was given, or new."""
        out = self.out
        return self.fake() if out is None else (out,)

    def fake(self) -> tuple[torch.Tensor]:
        """y of an unchecked call, without contents."""
        shape = (*self.x.shape[:-1], self.values.shape[0])
        return (self.x.new_empty(shape, dtype=self.of_y),)

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing, shared, or not where TMA can read it."""
        require_memory([*self.named(), ("out", results[0])])
        refuse_overlap(results[0], self.read(), "do not overlap")
        for name in ("values", "metadata"):
            address = getattr(self, name).data_ptr()
            if address % PITCH_BYTES:
                raise ProblemError(
                    f"weight.{name} at the address {address:#x}",
                    rule=f"must begin at a multiple of {PITCH_BYTES} bytes: TMA reads it",
                    fix="clone it, where it is a part of a larger tensor",
                )

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute y by plain torch operations, in fp32."""
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            sums = torch.float64 if self.x.dtype == torch.int8 else torch.float32
            y = reference.sparse_gemm(self.x, self.weight, self.items, sums)
            results[0].copy_(y.reshape(results[0].shape))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one that is a single row as a matrix."""
    return tensor if tensor.dim() > 1 else tensor[None]
