"""A few tiny calls, checked on the CPU: what compute-sanitizer watches.

Everything that is not a Warploom kernel happens on the CPU, so that little else is instrumented.
"""

from __future__ import annotations

import activation_backward_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.activation_backward import ActivationBackwardOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.family import FAMILY as RUNTIME

M, N = 259, 203  # several parts, whose rows no 16 bytes divide
KERNELS = [cases.spec("gelu_tanh"), cases.spec("relu", cases.NARROW), cases.spec("none")]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on rows that are aligned, and on some that are not."""
    operation: ActivationBackwardOperation = kernel.operation  # type: ignore[assignment]
    for pitch in (N, 208):
        dy, z = (torch.randn(M, pitch).to(TORCH[operation.dy])[:, :N] for _ in range(2))
        alone = operation.function == "none"
        call = ActivationBackwardCall(
            dy, None if alone else z, None if alone else operation.function, True
        )
        there = ActivationBackwardCall(
            *(one if one is None else _placed(one, pitch) for one in (call.dy, call.z)),  # type: ignore[arg-type]
            call.activation,
            True,
            spec=kernel,
        )
        for found, (exact, bound) in zip(plan.run(there), RUNTIME.expected(call), strict=True):
            assert found is None or ((found.cpu().double() - exact).abs() <= bound).all()


def _placed(one: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same on the GPU, with rows as far apart."""
    whole = one.as_strided((one.shape[0], pitch), (pitch, 1))
    return whole.cuda()[:, : one.shape[1]]


if __name__ == "__main__":
    verify_each(verify, KERNELS)
