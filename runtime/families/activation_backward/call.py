"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from warploom.arguments import require_boolean, require_dtype
from warploom.errors import ProblemError
from warploom.generator.epilogue import Function
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardProblem,
    ActivationBackwardShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
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
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.families.activation_backward import reference
from warploom.runtime.operands import refuse_overlap, refuse_repeated
from warploom.runtime.tensors import require_memory, require_one_device, shown

Results = tuple[torch.Tensor | None, torch.Tensor | None]  # dz, sums

FUNCTIONS: tuple[Function, ...] = get_args(Function)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    dz_dtype: torch.dtype
    copies: tuple[str, ...]  # of dy and z, those whose rows are not one pitch apart


@declared
class ActivationBackwardCall(Arguments[Details, Results]):
    """The arguments of `activation_backward`, which says what they mean.

    Kernels see for themselves how addresses align.
    sums_out    [n], fp32, contiguous: where the sums go; None: they are made
    """

    function = "activation_backward"
    outputs = ("dz", "sums")
    no_gradient = (
        "dy, z or out that requires grad",
        "activation_backward is not differentiable",
        "call it under torch.no_grad()",
    )

    dy: torch.Tensor = tensor(aligned=False)
    z: torch.Tensor | None = tensor(default=None, aligned=False)
    activation: str | None = option(default=None, schema="str?")
    sums: bool = option(default=False, schema="bool")
    out: torch.Tensor | None = result(default=None, aligned=False)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)
    sums_out: torch.Tensor | None = result(default=None, aligned=False, public=False)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_boolean("sums", self.sums)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, _FLOATS)
        if self.activation is not None and self.activation not in FUNCTIONS:
            raise ProblemError(
                f"activation {shown(self.activation)}",
                rule=f"must be one of {', '.join(FUNCTIONS)}, or None",
                fix="use one of them",
            )

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        self._check_extents()
        dz_dtype = self._result_type()
        dy_type = name_of(self.dy.dtype, "dy")
        z_type = dy_type if self.z is None else name_of(self.z.dtype, "z")
        fields: dict[str, Any] = {"dy": dy_type, "z": z_type, "dz": NAMES[dz_dtype]}
        operation = ActivationBackwardOperation(
            **fields,
            function=self.activation or "none",  # type: ignore[arg-type]
            sums=self.sums,
        )
        m, n = _extents(self.dy)
        shape = ActivationBackwardShape(m, n)
        choice = dispatch.choose(operation, shape, spec=self.kernel, device=target)
        read = [(name, one) for name, one in (("dy", self.dy), ("z", self.z)) if one is not None]
        copies = tuple(name for name, one in read if _pitch(one) is None)
        lying = [one for _, one in read]
        if self.out is not None:
            lying.append(self.out)
        # What is copied, or made, has rows that follow each other.
        pitches = [n if (pitch := _pitch(one)) is None else pitch for one in lying]
        if self.z is not None and self.out is None:
            pitches.append(n)
        problem = ActivationBackwardProblem(m, n, *pitches) if m and n else None
        return Draft(choice, problem, self.addressed(), (), copies, Details(dz_dtype, copies))

    def _check_extents(self) -> None:
        given = [(name, one) for name, one in self.named() if isinstance(one, torch.Tensor)]
        require_one_device(given)
        dy, z = self.dy, self.z
        if (z is None) != (self.activation is None):
            raise ProblemError(
                f"activation {self.activation} {'without' if z is None else 'with'} z",
                rule="must be None without z; with z, the input of the activation, it must be one "
                f"of {', '.join(FUNCTIONS)}",
                fix="pass both or neither",
            )
        if z is None and not self.sums:
            raise ProblemError(
                "no activation, and no sums",
                rule="must have something to compute: dz of an activation, or sums",
                fix="pass z and activation, or sums=True",
            )
        if dy.dim() == 0:
            raise ProblemError(
                "dy of no dimensions", rule="must be [.., m, n] or [n]", fix="give it a dimension"
            )
        for name, one in (("z", z), ("out", self.out)):
            if one is not None and one.shape != dy.shape:
                raise ProblemError(
                    f"{name} {list(one.shape)}, dy {list(dy.shape)}",
                    rule="must be of one shape",
                    fix=f"expand or reshape {name}",
                )

    def _result_type(self) -> torch.dtype:
        """The type of dz, once those of all tensors are known to be right."""
        dy, out, sums_out = self.dy, self.out, self.sums_out
        if self.z is None and (out is not None or self.out_dtype is not None):
            raise ProblemError(
                "out or out_dtype without an activation",
                rule="must be left out: dz is dy",
                fix="leave it out",
            )
        element = self.out_dtype or (dy.dtype if out is None else out.dtype)
        for name, one in (
            ("dy", dy.dtype),
            ("z", None if self.z is None else self.z.dtype),
            ("out_dtype", element),
        ):
            if one is not None and one not in _FLOATS:
                raise ProblemError(
                    f"{name} {shown(one)}",
                    rule="must be float16, bfloat16 or float32",
                    fix="convert it",
                )
        if out is not None:
            refuse_repeated("out", out)
            if out.dtype != element or (out.numel() and _pitch(out) is None):
                raise ProblemError(
                    f"out {out.dtype} with strides {list(out.stride())}",
                    rule=f"must be {element}, with a contiguous last dimension and one stride "
                    "through all rows",
                    fix="leave it out to have it made",
                )
        if sums_out is not None:
            wanted = (dy.shape[-1:], torch.float32, True, True)
            lies = (sums_out.shape, sums_out.dtype, sums_out.is_contiguous(), self.sums)
            if lies != wanted:
                raise ProblemError(
                    f"sums_out {list(sums_out.shape)} {sums_out.dtype}, sums {self.sums}",
                    rule=f"must be contiguous, [{dy.shape[-1]}] of torch.float32, with sums=True",
                    fix="leave it out to have it made",
                )
        return element

    def results(self, details: Details) -> Results:
        """dz and the sums: as they were given, or new; None where they are not computed."""
        dy, dz, sums = self.dy, self.out, self.sums_out
        if dz is None and self.z is not None:
            dz = dy.new_empty(dy.shape, dtype=details.dz_dtype)
        if sums is None and self.sums:
            sums = dy.new_empty(dy.shape[-1], dtype=torch.float32)
        return dz, sums

    def computed(self) -> tuple[bool, bool]:
        """Of dz, where there is an activation; of the sums, where they are asked for."""
        return self.z is not None, self.sums

    def fake(self) -> Results:
        """Both, where they are computed."""
        return self.results(Details(self.out_dtype or self.dy.dtype, ()))

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        dz, sums = results
        require_memory([("dy", self.dy), ("z", self.z), ("out", dz), ("sums_out", sums)])
        read = [("dy", self.dy)] if self.z is None else [("dy", self.dy), ("z", self.z)]
        if dz is not None:
            refuse_overlap(dz, read, "do not overlap")
            read.append(("out", dz))
        if sums is not None:
            refuse_overlap(sums, read, "do not overlap")

    def compute(self, details: Details, results: Results) -> None:
        """Compute both by plain torch operations, in fp32; sums of no rows are 0."""
        dz, sums = results
        with torch.no_grad(), torch.autocast(self.dy.device.type, enabled=False):
            z = None if self.z is None else self.z.float()
            found = reference.activation_backward(self.dy.float(), z, self.activation)
            if dz is not None:
                dz.copy_(found)
            if sums is not None:
                sums.copy_(reference.column_sums(found))


def _extents(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def _pitch(tensor: torch.Tensor) -> int | None:
    """Elements from row to row through all leading dimensions; None where kernels cannot go."""
    m, n = _extents(tensor)
    if n > 1 and tensor.stride(-1) != 1:
        return None
    try:
        pitch = tensor.view(m, n).stride(0)
    except RuntimeError:  # the rows are not one pitch apart
        return None
    return pitch if m > 1 else n
