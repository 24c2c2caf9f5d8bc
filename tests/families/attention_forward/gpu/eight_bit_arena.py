"""Calls of attention of 8 bits on operands in rooms of NaN, and the kernels that they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import attention_arena as arena
import attention_cases as cases
import eight_bit_cases
import mutants
import torch
from attention_cases import Shape
from eight_bit_cases import Drawn, Pair
from mutants import Clock, Edit
from rooms import Guarded

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_forward import values

_NAN = 0x7F  # of e4m3; of int8 127
ROOM = 16  # bytes on each side of a row
EIGHT: dict[str, Any] = {"scores": "e4m3", "weights": "e4m3"}
MASKED = ("none", "causal", "window")


def _sums(dim: int) -> dict[str, Any]:
    return {"sums": "fast"} if dim > 128 else {}


FIXED = [
    cases.chosen(
        dim,
        element=("bf16", "fp16")[index % 2],
        mask=mask,
        softcap=index % 4 == 3,
        further={
            **EIGHT,
            "scores": ("e4m3", "int8")[index % 2],
            "scales": ("heads", "blocks")[index // 2 % 2],
            **({"sinks": "fp32"} if index % 5 == 4 else {}),
            **_sums(dim),
        },
    )
    for index, (dim, mask) in enumerate(product((64, 96, 128, 256), MASKED))
]
PACKED = [
    cases.chosen(
        dim,
        mask=mask,
        lengths="packed",
        further={**EIGHT, "scores": ("e4m3", "int8")[index % 2], **_sums(dim)},
    )
    for index, (dim, mask) in enumerate(product((64, 96, 128, 256), MASKED))
]
WIDE = [  # v of 16 bits
    cases.chosen(dim, mask=mask, lengths=lengths, further={"scores": scores})
    for dim, mask, lengths, scores in (
        (64, "causal", "fixed", "int8"),
        (128, "none", "packed", "e4m3"),
        (256, "causal", "fixed", "e4m3"),
    )
]
PLAIN = cases.chosen(128, further=EIGHT)
CAUSAL = cases.chosen(128, mask="causal", further=EIGHT)
FAST = cases.chosen(128, further={**EIGHT, "sums": "fast"})
INT8 = cases.chosen(128, further={**EIGHT, "scores": "int8", "scales": "blocks"})
SCHEDULES = [
    cases.spec(
        q_tile,
        kv_tile,
        dim=dim,
        mask="causal",
        further={**EIGHT, **own},
        overlap=False,
        **schedule,
    )
    for q_tile, kv_tile, dim, own, schedule in (
        (64, 64, 128, {}, {"scheduler": "single"}),
        (128, 128, 128, {}, {"stages": 1}),
        (128, 96, 128, {}, {"stages": 4, "scheduler": "dynamic", "pingpong": False}),
        (128, 128, 128, {"sums": "fast"}, {"rescale": "needed"}),
        (128, 160, 128, {"sums": "fast"}, {}),
        (192, 96, 64, {}, {"stages": 3}),
        (128, 192, 64, {}, {"stages": 3}),
        (128, 64, 256, {"sums": "fast"}, {"rescale": "needed"}),
    )
]
ALL = list(dict.fromkeys([*FIXED, *PACKED, *WIDE, *SCHEDULES, PLAIN, CAUSAL, FAST, INT8]))


@dataclass
class Call:
    """A call of a kernel: q and k in rooms of NaN, v dim-major with NaN past its last 16 keys."""

    kernel: KernelSpec | None
    made: Drawn
    out: Guarded

    def operands(self) -> dict[str, Any]:
        """What the function is given."""
        made = self.made
        laid_out = made.dim_major() if made.v.dtype == eight_bit_cases.E4M3 else {"v": made.v}
        if "v_layout" in laid_out and "cu_seqlens_k" not in made.keywords:
            end = -(-made.k.shape[2] // values.GROUP) * values.GROUP
            laid_out["v"].view(torch.uint8)[..., end:] = _NAN
        return {
            "q": _in_room(made.q),
            "k": _in_room(made.k),
            **made.keywords,
            **laid_out,
            "out": self.out.view,
            "spec": self.kernel,
        }

    def run(self) -> Pair:
        """Run the kernel; return out and lse."""
        return warploom.attention(**self.operands(), return_lse=True)


def call(kernel: KernelSpec, shape: Shape, *, seed: int = 0, **keywords: Any) -> Call:
    """Make a call of fixed lengths on what fits the kernel."""
    operation = cases.operation(kernel)
    made = eight_bit_cases.drawn(
        *(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k, operation.dim),
        **_drawn(kernel),
        blocks=operation.scales == "blocks",
        device="cuda",
        seed=seed,
        **_given(kernel, shape.heads),
        **keywords,
    )
    return _finished(kernel, made)


def packed(
    kernel: KernelSpec,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    past: int = 3,
    seed: int = 0,
    **keywords: Any,
) -> Call:
    """Make a call of packed lengths."""
    made = eight_bit_cases.packed(
        lengths_q,
        lengths_k,
        dim=cases.operation(kernel).dim,
        **_drawn(kernel),
        past=past,
        device="cuda",
        seed=seed,
        **_given(kernel, 4),
        **keywords,
    )
    return _finished(kernel, made)


def verify(made: Call, *, clock: Any = None) -> Pair:  # noqa: ANN401 (a context)
    """Run a call; assert its results right, and nothing else written.

    Beside the bound of each element all errors together are no more than those of exact sums.
    """
    sums = cases.operation(made.kernel).sums if made.kernel is not None else "promoted"
    exact, bound = made.made.exact, made.made.bound(sums)
    rounded = made.made.rounded
    if clock is None:
        out, lse = made.run()
    else:
        with clock:
            out, lse = made.run()
    rows: Any = slice(None)
    offsets = made.made.keywords.get("cu_seqlens_q")
    if offsets is not None:
        rows = slice(int(offsets[-1]))
        out, exact, bound, rounded = (
            out[rows],
            *((one[0][rows], one[1][:, rows]) for one in (exact, bound, rounded)),
        )
        lse = lse[:, rows]
    arena.assert_within("out", out, exact[0], bound[0])
    arena.assert_within("lse", lse, exact[1], bound[1])
    if sums == "promoted" and out.numel():
        ours, theirs = ((one.double() - exact[0]).norm() for one in (out, rounded[0]))
        # Roundings of the output, and of weights whose score is off by a rounding.
        assert ours <= 1.1 * theirs + 2.0**-8 * exact[0].norm(), f"{ours} beside {theirs}"
    assert made.out.untouched_outside()
    return out, lse


def _drawn(kernel: KernelSpec) -> dict[str, Any]:
    return {"kind": TORCH[cases.operation(kernel).scores]}


def _given(kernel: KernelSpec, heads: int) -> dict[str, Any]:
    operation = cases.operation(kernel)
    found: dict[str, Any] = {"out_dtype": TORCH[operation.element]}
    if operation.weights != "same":
        found["sums"] = operation.sums
    if operation.softcap:
        found["softcap"] = 3.0
    if operation.sinks != "none":
        found["sinks"] = torch.linspace(-1, 4, heads, device="cuda")
    return found


def _finished(kernel: KernelSpec, made: Drawn) -> Call:
    operation = cases.operation(kernel)
    dtype = TORCH[operation.element]
    if operation.weights == "same":
        made.v = made.v.float().to(dtype)
        made.keywords["v_descale"] = None
    return Call(kernel, made, arena.guarded(tuple(made.q.shape), dtype, turned=made.q.dim() == 4))


def _in_room(tensor: torch.Tensor) -> torch.Tensor:
    """A copy between rows and bytes of NaN, that lies as a model's does."""
    numbers = tensor.view(torch.uint8)
    lies = numbers.transpose(1, 2) if numbers.dim() == 4 else numbers
    sizes = [*lies.shape[:-1], lies.shape[-1] + 2 * ROOM]
    sizes[-3] += 2
    room = torch.full(sizes, _NAN, dtype=torch.uint8, device=tensor.device)
    inside = room.narrow(-3, 1, lies.shape[-3])[..., ROOM : ROOM + lies.shape[-1]]
    inside.copy_(lies)
    view = inside.transpose(1, 2) if numbers.dim() == 4 else inside
    return view.view(tensor.dtype)


@dataclass(frozen=True)
class Mutant(mutants.Mutant):
    """Attention of 8 bits that is wrong in one place, its extents and its keywords."""

    wrong: tuple[Edit, ...]
    shape: Shape
    pauses: tuple[Edit, ...] = ()
    kernel: KernelSpec = PLAIN
    keywords: dict[str, Any] = field(default_factory=dict)

    def verify(self, seed: int, clock: Clock) -> None:
        """Assert that a call of its kernel, with a clock on it, is right."""
        verify(call(self.kernel, self.shape, seed=seed, **self.keywords), clock=clock())
