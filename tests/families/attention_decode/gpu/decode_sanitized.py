"""A few tiny decodes, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
Stages are few, so that each is used again, and blocks many more than the keys of one.
"""

from __future__ import annotations

from dataclasses import replace

import decode_arena as arena
import decode_cases as cases
import decode_operands as operands
import torch
from decode_cases import SIMPLE, Shape
from processes import verify_each

import warploom
from warploom.generator.specification import KernelSpec

CHOSEN = ("small", "pages", "causal", "tokens", "packed", "invariant")
KERNELS = [
    replace(SIMPLE[name], schedule=replace(cases.by(SIMPLE[name]), stages=2)) for name in CHOSEN
]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on the GPU and compare with the reference on the CPU."""
    shape = cases.fitting(kernel, Shape(3, 1, 3, 2, 700))
    made = arena.call(kernel, shape, lengths=[700, 65, 3])
    wanted = arena.expected(made)
    keywords = {
        name: one.cuda() if isinstance(one, torch.Tensor) else one
        for name, one in made.keywords.items()
    }
    tensors = [one.cuda() for one in made.tensors]
    out, lse = warploom.attention_decode(*tensors, return_lse=True, spec=kernel, **keywords)
    arena.assert_right(made, (out.cpu(), lse.cpu()), wanted)


if __name__ == "__main__":
    operands.DEVICE = arena.DEVICE = "cpu"
    verify_each(verify, KERNELS)
