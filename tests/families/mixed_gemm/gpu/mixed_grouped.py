"""Kernels of grouped GEMMs with quantized weights, their calls, and mutants (`... NAME`).

A mutant is run until a result is wrong. Exit status 0: one was, as it must be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, cast

import gemm_grouped
import gemm_mutants
import mixed_arena
import mixed_cases as cases
import torch
from gemm_grouped import Mutant, Routing, drawn, poison
from product_arena import assert_within, fill, guarded
from rooms import Guarded

import warploom
from warploom.generator.epilogue import Bias, EpilogueStep, Gate, Scale
from warploom.generator.families.mixed_gemm import MixedGemmOperation
from warploom.generator.specification import KernelSpec
from warploom.quantization import Metadata, PackedExperts
from warploom.runtime.elements import TORCH
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall

BIAS, ROW = Bias("bf16"), Scale("row")
OAI, SILU = Gate("swiglu_oai", "interleaved"), Gate("silu", "interleaved")
MXFP4 = {"b": "mxfp4", "group": 32, "scale": "e8m0"}


def spec(
    tile: cases.Tile,
    multiply: str,
    scaled: str,
    epilogue: tuple[EpilogueStep, ...] = (),
    *,
    a: str = "bf16",
    b: str = "int4",
    group: int = 32,
    scale: str = "bf16",
    d: str | None = None,
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel; what is not given is the plainest."""
    kind = d or (a if a in ("bf16", "fp16") else "bf16")
    operation = MixedGemmOperation(
        *(a, b, kind, group, scale, epilogue),  # type: ignore[arg-type]
        groups="rows",
    )
    return cases.spec(tile, multiply, scaled, of=operation, **schedule)


SHARING = {"warp_split_k": 2, "ctas_per_sm": 2}
KERNELS = [
    spec((8, 64, 256), "mma", "weights", (BIAS, OAI), **MXFP4, **SHARING),
    spec((8, 64, 256), "mma", "weights", (BIAS, ROW), **MXFP4, **SHARING),
    spec((8, 128, 128), "mma", "weights", (BIAS, OAI), **MXFP4, ctas_per_sm=2),
    spec((8, 64, 128), "mma", "weights", (BIAS, OAI), **MXFP4, consumers=1, stream_k=True),
    spec((16, 64, 256), "mma", "weights", **MXFP4, warp_split_k=2, stream_k=True),
    spec((16, 64, 256), "mma", "sums", (BIAS, SILU, ROW), **SHARING),
    spec((8, 128, 128), "mma", "sums", a="fp16", ctas_per_sm=2, stream_k=True),
    spec((16, 128, 128), "mma", "sums", b="uint4", group=0),
    spec((16, 64, 128), "mma", "sums", b="int8", group=0, scale="fp32", consumers=1, d="fp32"),
    spec((16, 64, 256), "mma", "weights", b="nvfp4", group=16, scale="e4m3", **SHARING),
    spec((32, 128, 128), "wgmma", "weights", (BIAS, OAI), **MXFP4),
    spec((64, 128, 128), "wgmma", "weights", (BIAS, SILU), a="fp16"),
    spec((64, 128, 256), "wgmma", "sums", swizzle_size=3, stream_k=True),
    spec((128, 128, 128), "wgmma", "weights", (BIAS, OAI), **MXFP4),
    spec((128, 128, 128), "wgmma", "weights", raster="along_m", swizzle_size=2),
    spec((64, 128, 256), "wgmma", "sums", (ROW,), a="e4m3", group=64, lookahead=1),
    spec((16, 64, 512), "wgmma", "sums", a="int8", b="ternary", group=0, scale="fp32", **SHARING),
]
ROUTINGS = {
    **gemm_grouped.ROUTINGS,
    "more tiles than multiprocessors": Routing(3001, 24, "even"),
}
N, K = 336, 480  # no tile divides them; of groups of 32, and of 16 of gate and up


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    kernel: KernelSpec
    a: Guarded
    weight: PackedExperts
    d: Guarded
    offs: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        return warploom.grouped_mixed_gemm(
            *(self.a.view, self.weight),
            offs=self.offs,
            out=self.d.view,
            spec=self.kernel,
            **self.keywords,
        )

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, NaN in rows of no group, and how far a kernel's may be off."""
        call = GroupedMixedCall(
            *(self.a.view, self.weight.slabs, self.offs, self.weight.metadata),
            channel_scales=self.weight.channel_scales,
            channel_zeros=self.weight.channel_zeros,
            out=self.d.view,
            **self.keywords,
        )
        return call.bound(cases.schedule(self.kernel).scaled)


def experts(metadata: Metadata, count: int, generator: torch.Generator) -> PackedExperts:
    """Random weights of all codes and scales of either sign; no more than a few differ."""
    few = [mixed_arena.draw(metadata, generator) for _ in range(min(count, 7))]
    packed = PackedExperts.empty(count, metadata, "cuda")
    for expert in range(count):
        packed.put(expert, few[expert * 3 % len(few)])
    return packed


def call(kernel: KernelSpec, routing: Routing, *, seed: int = 0, n: int = N, k: int = K) -> Call:
    """Make a call on random data; rows of no group are poisoned."""
    generator = torch.Generator("cuda").manual_seed(seed)
    of = cast("MixedGemmOperation", kernel.operation)
    k += -k % (of.group or 1)
    metadata = Metadata(of.b, of.group or None, of.scale, of.activations, n, k)
    gated = any(isinstance(step, Gate) for step in of.epilogue)
    a = guarded(routing.size, k, TORCH[of.a])
    d = guarded(routing.size, n // 2 if gated else n, TORCH[of.d], odd=True)
    offs = routing.offsets(generator)
    fill(a.view, generator, limit=8)
    poison(a.view[int(offs[-1]) :])
    keywords: dict[str, Any] = {}
    for index, step in enumerate(of.epilogue):
        if isinstance(step, Gate):
            keywords["gate"] = step.function
        elif isinstance(step, Bias):
            bias = torch.randn(routing.groups, n, generator=generator, device="cuda")
            keywords["bias"] = bias.to(TORCH[step.element])
        else:
            keywords["scale_a" if index == 0 else "row_scale"] = drawn(generator, routing.size)
    return Call(kernel, a, experts(metadata, routing.groups, generator), d, offs, keywords)


def verify(made: Call) -> None:
    """Run a call: D is right in every row of a group, and nothing is written beside these."""
    made.d.room.fill_(-1)
    d = made.run()
    assert made.d.untouched_outside()
    exact, bound = made.exact()
    last = int(made.offs[-1])
    rest = d[last:]
    integers = {2: torch.int16, 4: torch.int32}[rest.dtype.itemsize]
    assert (rest.view(integers) == -1).all(), "a row of no group was written"
    assert_within(d[:last], exact[:last], bound[:last])


_SHAPE = (1, 1, 1)  # a routing says it
MUTANTS = {
    "rows of the neighbour are stored": Mutant(
        KERNELS[1], r"place\.row\[i\] >= at\.end", _SHAPE, "place.row[i] >= p.m"
    ),
    "a group has the weight of the first": Mutant(
        KERNELS[4], r"int64_t\(loads\.at\.batch\) \* p\.row_blocks", _SHAPE, "int64_t(0)"
    ),
    "a group has the channel scales of the first": Mutant(
        KERNELS[7], r"batch \* p\.row_blocks \+", _SHAPE, "0 * batch +"
    ),
    "a group has the bias of the first": Mutant(
        KERNELS[0], r"batch \* p\.bias_0_batch", _SHAPE, "0 * p.bias_0_batch"
    ),
    "gate and up are of the same row": Mutant(
        KERNELS[2], r"__shfl_xor_sync\(~0u, (odd .*), 4\)", _SHAPE, r"\1"
    ),
    "columns of gates are in the order of rows": Mutant(
        KERNELS[10], r"lane / 8 \+ lane / 4 % 2 \* 4", _SHAPE, "lane / 4"
    ),
    "tiles that are cut begin behind the first": Mutant(
        KERNELS[4], r"whole\(cut \+ cluster\)", _SHAPE, "whole(cut + cluster + 1)",
        ROUTINGS["more tiles than multiprocessors"],
    ),
}  # fmt: skip


if __name__ == "__main__":
    chosen = MUTANTS[sys.argv[1]]
    gemm_mutants.judge(chosen, lambda seed: verify(call(chosen.kernel, chosen.routing, seed=seed)))
