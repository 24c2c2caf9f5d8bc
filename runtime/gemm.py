"""D = epilogue(A B) on torch tensors: checks, placement, plan, launch.

A call first looks up its plan by everything but addresses and scalar values; only a miss checks,
chooses a kernel and copies what TMA cannot read. Nothing here waits for the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Unpack, cast

import torch

from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation, GemmProblem
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES, readable
from warploom.runtime import dispatch, driver, epilogue, reference
from warploom.runtime.alike import alike
from warploom.runtime.counters import counters
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.epilogue import BoundEpilogue, Item, Keywords
from warploom.runtime.operands import (
    Placement,
    extent_bytes,
    overlap,
    padded_copy,
    place,
    refuse_grad,
)
from warploom.runtime.plan import Launches, LaunchPlan, plan_launches, remember

Launch = Callable[[], tuple[object, ...]]  # returns the driver's status first, 0 being success

_BOUND = 4096  # problems remembered
_plans: dict[tuple[object, ...], GemmPlan] = {}

os.register_at_fork(after_in_child=_plans.clear)  # a forked call is planned anew, and so refused

os.register_at_fork(after_in_child=_plans.clear)  # what they launch is the parent's


@dataclass
class GemmPlan:
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(a, b, out, ...)` runs it for tensors of the planned shapes, strides and types; it is what
    `warploom.gemm` itself runs after looking the plan up.
    """

    key: tuple[object, ...]
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    launch: LaunchPlan | None  # None on the CPU, and where an extent is 0
    copy_a: str | None  # the layout that A is copied to, where TMA cannot read it
    copy_b: str | None
    choice: dispatch.Choice
    _device: int = -1
    _ready: dict[tuple[int, ...], tuple[Callable[..., bool], Launch]] = field(
        default_factory=dict, repr=False
    )

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        **keywords: Unpack[Keywords],
    ) -> torch.Tensor:
        """Run the plan with the keywords that it was made with, and tensors like those."""
        key = None
        if out is not None and self._device >= 0 and not keywords:
            stream = driver.current_stream(self._device)
            key = (a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
            ready = self._ready.get(key)
            if ready is not None and ready[0](a, b, out) and not ready[1]()[0]:
                counters.launches += 1
                return out
        listed = epilogue.items(**keywords)
        self._require(a, b, out, listed)
        if out is None:
            out = a.new_empty(self.out_shape, dtype=self.out_dtype)
        launches = self.run(a, b, out, listed)
        if key is not None and self._repeatable and not launches[0].roams:
            remember(self._ready, key, (alike(a, b, out), launches[0].launch), _BOUND)
        return out

    @property
    def copies(self) -> tuple[str, ...]:
        """The operands that are copied first, since TMA cannot read them."""
        return tuple(name for name, layout in (("a", self.copy_a), ("b", self.copy_b)) if layout)

    @property
    def _repeatable(self) -> bool:
        """True when a call is one launch and nothing else: no copies, no workspaces."""
        launch = self.launch
        alone = launch is not None and len(launch.launches) == 1 and not launch.workspaces
        return alone and not (self.copy_a or self.copy_b)

    def _require(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
    ) -> None:
        asked, spec = self.key[-2:]
        if signature(a, b, out, listed, asked, spec) != self.key:  # type: ignore[arg-type]
            raise ProblemError(
                f"a {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}",
                rule="a plan runs only what it was made for: shapes, strides, types, alignment",
                fix="call warploom.plan again, or warploom.gemm",
            )

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, listed: Sequence[Item]
    ) -> Launches:
        """Launch on tensors that are known to fit; on the CPU, and without products, compute."""

        def check() -> None:
            refuse_overlap(out, a, b, listed)
            epilogue.check_finite(listed)

        if self.launch is None:
            check()
            out.copy_(reference.gemm(a, b, listed, self.out_dtype))
            return ()
        read_a = padded_copy(matrix(a), self.copy_a) if self.copy_a else a
        read_b = padded_copy(b, self.copy_b) if self.copy_b else b
        addresses = (read_a.data_ptr(), read_b.data_ptr(), out.data_ptr())
        if not listed:
            return self.launch.run(addresses, (), check)
        addresses_listed = (*addresses, *epilogue.addresses(listed))
        return self.launch.run(addresses_listed, epilogue.scalars(listed), check)


def matrix(a: torch.Tensor) -> torch.Tensor:
    """Return A or D [.., M, K] as one matrix; a copy where its strides do not allow a view."""
    return a if a.dim() == 2 else a.flatten(0, -2)


def signature(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    listed: Sequence[Item],
    out_dtype: torch.dtype | None,
    spec: object,
) -> tuple[object, ...]:
    """Everything that decides the plan: all but addresses (their alignment counts) and scalars."""
    return (
        a.shape,
        a.stride(),
        a.dtype,
        a.data_ptr() & 15,
        a.get_device(),
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() & 15,
        b.get_device(),
        None
        if out is None
        else (out.shape, out.stride(), out.dtype, out.data_ptr() & 15, out.get_device()),
        epilogue.signature(listed) if listed else (),
        out_dtype,
        spec,
    )


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None,
) -> torch.Tensor:
    """Run the planned call, planning it first when it is new."""
    if torch.is_grad_enabled():
        refuse_grad("warploom.gemm", a, b, out, *(value for item in listed for value in item[1:2]))
    key = signature(a, b, out, listed, out_dtype, spec)
    planned = _plans.get(key)
    if planned is None:
        planned = plan(a, b, listed, out, out_dtype, spec)
    if out is None:
        out = a.new_empty(planned.out_shape, dtype=planned.out_dtype)
    planned.run(a, b, out, listed)
    return out


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None,
) -> GemmPlan:
    """Check a call, choose its kernel, load it, and remember the plan."""
    if torch.is_grad_enabled():
        refuse_grad("warploom.gemm", a, b, out, *(value for item in listed for value in item[1:2]))
    key = signature(a, b, out, listed, out_dtype, spec)
    planned = _make(key, a, b, listed, out, out_dtype, spec)
    counters.add("plans")
    remember(_plans, key, planned, _BOUND)
    return planned


def _make(
    key: tuple[object, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None,
) -> GemmPlan:
    m, n, k = _extents(a, b)
    device = a.get_device()
    bound = epilogue.bind(listed, m, n, device)
    d_type = result_type(a, out, out_dtype, len(listed) > 0)
    shape = (*a.shape[:-1], n)
    d = _check_out(out, shape, d_type, device)
    allowed_a, allowed_b = _layouts(a, spec)
    place_a, place_b = place(matrix(a), allowed_a), place(b, allowed_b)
    if a.dim() > 2 and matrix(a).data_ptr() != a.data_ptr():
        place_a = None  # flattening copies: copy once, to where TMA reads
    at_a = place_a or _padded(k if allowed_a[0] == "row" else m, allowed_a[0], a)
    at_b = place_b or _padded(n if allowed_b[0] == "row" else k, allowed_b[0], b)
    pitch_d = n if d is None else d.stride(0) if m > 1 else -(-n // 16) * 16  # of one row: any
    problem = GemmProblem(m, n, k, at_a.pitch, at_b.pitch, pitch_d, bound.pitch_c)
    operation = GemmOperation(
        a=name_of(a.dtype, "a"),  # type: ignore[arg-type]
        b=name_of(b.dtype, "b"),  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        layout_a=at_a.layout,  # type: ignore[arg-type]
        layout_b=at_b.layout,  # type: ignore[arg-type]
        epilogue=bound.steps,
    )
    store = _store(d, n, pitch_d, d_type, bound)
    limits = driver.limits(device) if device >= 0 else DeviceLimits(multiprocessors=132)
    choice = dispatch.choose(operation, problem, store, spec, limits)
    launch = None
    if device >= 0 and m and n and k:
        tensors, scalars = ("a", "b", "d", *bound.tensors), bound.scalars
        launch = plan_launches(choice.spec, problem, device, tensors, scalars)
    copy_a = None if place_a else at_a.layout
    copy_b = None if place_b else at_b.layout
    return GemmPlan(key, shape, d_type, launch, copy_a, copy_b, choice, device)


def _extents(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)}",
            rule="a is [.., M, K] and b is [K, N], with one K",
            fix="a torch weight [N, K] is b after .t()",
        )
    mixed = a.dtype != b.dtype
    if mixed and not all(element(name_of(t.dtype, "an operand")).is_fp8 for t in (a, b)):
        raise ProblemError(
            f"a {a.dtype} by b {b.dtype}",
            rule="have one type, or are both fp8",
            fix="convert one",
        )
    if a.device != b.device:
        raise ProblemError(
            f"a on {a.device}, b on {b.device}", rule="are on one device", fix="move one"
        )
    m = a.shape[:-1].numel()
    return m, b.shape[1], b.shape[0]


def result_type(
    a: torch.Tensor, out: torch.Tensor | None, asked: torch.dtype | None, has_epilogue: bool
) -> torch.dtype:
    """The type of D: as asked, else out's, else the default for the operands."""
    if asked is not None:
        return asked
    if out is not None:
        return out.dtype
    if name_of(a.dtype, "a") == "int8" and not has_epilogue:
        return torch.int32
    return a.dtype if element(name_of(a.dtype, "a")).bits == 16 else torch.bfloat16


def _check_out(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: int
) -> torch.Tensor | None:
    name_of(dtype, "out")
    if out is None:
        return None
    if tuple(out.shape) != shape or out.dtype != dtype or out.get_device() != device:
        raise ProblemError(
            f"out {list(out.shape)} {out.dtype} on {out.device}",
            rule=f"is {list(shape)} of {dtype} on the device of a",
            fix="leave out=None to have it made",
        )
    flat = matrix(out) if out.dim() == 2 or out.is_contiguous() else None
    if flat is None or (out.numel() and out.shape[-1] > 1 and out.stride(-1) != 1):
        raise ProblemError(
            f"out with strides {list(out.stride())}",
            rule="has a contiguous last dimension and one pitch between rows",
            fix="use a row-major out",
        )
    if out.numel() and out.shape[-2] > 1 and flat.stride(0) < flat.shape[1]:
        raise ProblemError(
            f"out with strides {list(out.stride())}",
            rule="has no two elements in one place",
            fix="do not pass an expanded tensor as out",
        )
    return flat


def _layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if element(name_of(a.dtype, "a")).bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


def _padded(extent: int, layout: str, of: torch.Tensor) -> Placement:
    size = of.element_size()
    return Placement(layout, -(-extent * size // 16) * 16 // size)


def _store(
    d: torch.Tensor | None, n: int, pitch_d: int, d_type: torch.dtype, bound: BoundEpilogue
) -> str:
    """TMA stores 16 bytes at a time: rows must end, as well as begin, at a multiple of them."""
    size = element(NAMES[d_type]).bytes
    base = 0 if d is None else d.data_ptr()
    whole = n * size % PITCH_BYTES == 0 and readable(base, pitch_d * size)
    return "tma" if whole and bound.paired else "direct"


def refuse_overlap(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item]
) -> None:
    """Raise ProblemError when `out` shares memory with an operand, unless it is the residual."""
    operands = [("a", a), ("b", b)]
    operands += [(item[0], item[1]) for item in listed if isinstance(item[1], torch.Tensor)]
    for name, operand in operands:
        same = (
            name == "residual"
            and operand.data_ptr() == out.data_ptr()
            and operand.dtype == out.dtype
            and matrix(operand).stride() == matrix(out).stride()
        )
        if overlap(out, operand) and not same:
            raise ProblemError(
                "out at {:#x}..{:#x}".format(*extent_bytes(out))
                + " and {} at {:#x}..{:#x}".format(name, *extent_bytes(operand)),
                rule="do not overlap; out may be exactly the residual",
                fix="use another out",
            )
