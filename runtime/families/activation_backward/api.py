"""The gradient of an activation: what backward passes of products call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import named
from warploom.runtime.families.activation_backward import operators
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall, Results
from warploom.runtime.plan import run
from warploom.runtime.tensors import WithoutMemoryError


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
    if forward_ad._current_level >= 0:
        ActivationBackwardCall(dy, z, out=out).refuse_tangents()
    # Compilers, and modes that decide by operator, see the operator.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return operators.call(dy, z, activation, sums, out, out_dtype, spec)
    found = None if spec is None else named(spec)
    try:
        return run(ActivationBackwardCall(dy, z, activation, sums, out, out_dtype, None, found))
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return operators.call(dy, z, activation, sums, out, out_dtype, found)
