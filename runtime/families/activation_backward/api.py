"""The gradient of an activation: what backward passes of products call."""

from __future__ import annotations

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall, Results
from warploom.runtime.function import Function


def _sharding() -> None:
    """Import what registers its rules: torch's distributed tensors take long to import."""
    from warploom.runtime.families.activation_backward import sharding  # noqa: F401


_backward = Function("activation_backward", ActivationBackwardCall, sharding=_sharding)


def activation_backward(
    dy: torch.Tensor,
    z: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    sums: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    spec: KernelSpec | str | None = None,
) -> Results:
    """Return dz = dy * f'(z), and the sums of its columns over all rows.

    dy and z are [.., m, n] or [n], of fp16, bf16 or fp32 each, and activation is f: relu, gelu,
    gelu_tanh or silu. dz is of dy's type, or of `out_dtype`. With `sums`, dz is also summed, before
    it is rounded, over all dimensions but the last: fp32 [n], the gradient of a bias that was added
    to z; without, the second result is None. Without z and activation dz is dy: only its sums are
    computed, and the first result is None. Sums are the same in every run.

    f' of -inf is 0, of inf 1, of NaN NaN; relu's of 0 is 0. What is multiplied is fp32, so that an
    infinite dy where f' is 0 gives NaN.

    Rows are read where they lie if one pitch leads through them and the last dimension is
    contiguous; else they are copied. `out` is laid out so too, and shares no memory with dy and z.
    Runs on the current stream without waiting. On CPU tensors the reference computes the same.
    Raises ProblemError before anything is launched; also for tensors that require grad.
    """
    return _backward(dy, z, activation, sums, out, out_dtype, spec)
