"""The front door's functions: gemm, attention, their plans, load, warmup, explain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
from torch.autograd import forward_ad

from warploom.errors import DeviceError, ProblemError, WarploomError
from warploom.generator.build import build_many
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.runtime import kernel as kernels
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import named
from warploom.runtime.explanation import Explanation, attention_on, gemm_on
from warploom.runtime.families._attention import problem as attention_problems
from warploom.runtime.families._attention.problem import Alignment, Window
from warploom.runtime.families.attention_forward import operators as attention_operators
from warploom.runtime.families.attention_forward import plan as attentions
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.families.gemm import epilogue as epilogues
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm import plan as gemms
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.epilogue import Item, Keywords
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.families.gemm.problem import PlanKeywords
from warploom.runtime.tensors import WithoutMemoryError, explained, refuse_dual, shown

__all__ = [
    "Explanation",
    "attention",
    "counters",
    "explain",
    "gemm",
    "load",
    "plan",
    "plan_attention",
    "warmup",
]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    epilogue: Sequence[Item] | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Return scale_d (activation(scale_a scale_b (a b) + bias) + beta residual).

    a is [.., M, K] and b [.., K, N] (a torch weight [N, K] is b after .t()), of one type: fp16,
    bf16, e4m3, e5m2 or int8; e4m3 and e5m2 also mix. Batches broadcast. Products accumulate in
    fp32, for int8 in int32; sums of fp8 keep about 14 bits, with `accumulation="promoted"` only
    those over 128 of k, at the cost of some speed. The result [.., M, N] has `out_dtype`: by
    default that of 16-bit operands, int32 for int8 without epilogue, else bf16. 8-bit results
    saturate, round to nearest even and keep NaN (int8: 0).

    scale_a is a number, a one-element tensor, [M] or [M, 1]; scale_b likewise, [N] or [1, N];
    tensors are fp32. bias is [N], residual [M, N]; both fp16, bf16 or fp32. beta = 0 does not read
    the residual. All of these may have the batches of the result before the dimensions given here.
    activation is relu, gelu, gelu_tanh or silu. amax, an fp32 tensor of one element, is raised to
    the largest magnitude before scale_d, a number or a one-element fp32 tensor. `epilogue` gives
    any other order, as a list of items (see `runtime/families/gemm/steps`). `out` may be
    exactly the residual. `spec` names the kernel.

    Under autocast, a and b of 16 or 32 bits are converted as torch converts those of torch.mm.
    Runs on the current stream without waiting. On CPU tensors the reference computes the same.
    Raises ProblemError before anything is launched.
    """
    listed: Sequence[Item] = ()
    if (
        scale_a is not None
        or scale_b is not None
        or bias is not None
        or activation is not None
        or residual is not None
        or amax is not None
        or scale_d is not None
        or epilogue is not None
        or beta != 1
    ):
        listed = epilogues.items(
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            activation=activation,
            residual=residual,
            beta=beta,
            amax=amax,
            scale_d=scale_d,
            epilogue=epilogue,
        )
    if torch._C._is_any_autocast_enabled():
        a, b = _lowered(a), _lowered(b)
    if forward_ad._current_level >= 0:
        GemmCall(a, b, listed, out).refuse_tangents()
    # Compilers, and modes that decide by operator (selective checkpoints, fake tensors), see these.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return operators.call(a, b, listed, out, out_dtype, accumulation, spec)
    found = None if spec is None else named(spec)
    call = GemmCall(a, b, listed, out, out_dtype, accumulation, found)
    try:
        return gemms.gemm(call)
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return operators.call(a, b, listed, out, out_dtype, accumulation, found)
    except Exception as error:
        raise explained(error, call.require) from error.__cause__


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> GemmPlan:
    """Plan a call: build and load its kernel now, and return what runs it with least overhead.

    Arguments are those of `gemm`. `plan(a, b, out, ...)` then runs tensors of the same shapes,
    strides, types and alignment, with the same keywords; pass `out` here if it is passed there.
    """
    listed = epilogues.items(**keywords)
    call = GemmCall(a, b, listed, out, out_dtype, accumulation, named(spec))
    call.require()
    return gemms.plan(call)


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[attention_problems.Keywords],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[attention_problems.Keywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    deterministic: bool | None = None,
    backward_spec: KernelSpec | str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q k^T) v, exactly, without the scores in memory.

    q is [batch, heads, seq_q, dim], k and v [batch, kv_heads, seq_k, dim], fp16 or bf16: any views
    with a contiguous last dimension. heads is a multiple of kv_heads, dim a multiple of 8 up to
    256. The result has the shape of q and its order of strides. `scale` is dim ** -0.5 by default.

    causal    True (equal lengths), "bottom_right" (the last row attends to every column, as in
              FlashAttention) or "top_left" (row 0 to column 0 only, as in torch)
    window    (left, right): a row attends to so many columns on each side of the diagonal, None
              being no bound. The diagonal is `causal`'s; without it, it ends at the bottom right.
              Together with causal, both apply
    softcap   scores become softcap tanh(score / softcap)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
              packed sequences: q [total_q, heads, dim], k and v [total_k, kv_heads, dim]; sequence
              i has the rows cu_seqlens[i] to cu_seqlens[i + 1] (int32 [batch + 1] on the device of
              q), at most max_seqlen of them. Rows past the last sequence are not written
    return_lse  also return the log-sum-exp of each row's scores: natural, fp32
              [batch, heads, seq_q], packed [heads, total_q]
    out, spec   where the result goes, and the kernel to run
    deterministic  whether gradients are bit-equal from run to run, which takes longer; None
              follows torch.are_deterministic_algorithms_enabled() as it is in the backward pass.
              Results are bit-equal in any case
    backward_spec  the kernel that computes the gradients

    A row that attends to nothing gives 0, and -inf as its log-sum-exp. Both results are
    differentiable, once, in q, k and v; q, k, v, the result and its log-sum-exp are kept for that.
    `out` takes no part in gradients. Under autocast, q, k and v are converted as torch converts
    those of its own attention. Runs on the current stream without waiting. On CPU tensors the
    reference computes the same. Raises ProblemError before anything is launched.
    """
    if return_lse is not True and return_lse is not False:
        raise ProblemError(
            f"return_lse {shown(return_lse)}", rule="must be True or False", fix="use bool(...)"
        )
    if torch._C._is_any_autocast_enabled():
        q, k, v = (_lowered(tensor) for tensor in (q, k, v))
    call = AttentionCall(
        q,
        k,
        v,
        causal,
        window,
        softcap,
        scale,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        out,
        spec,
        deterministic,
        backward_spec,
    )
    if forward_ad._current_level >= 0:
        refuse_dual("warploom.attention", (q, k, v, out))
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        result = attention_operators.attention(call)
    else:
        try:
            result = attentions.attention(call)
        except WithoutMemoryError:
            result = attention_operators.attention(call)
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
    return result if return_lse else result[0]


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor where autocast is on for its device, as torch does those of its products."""
    device = tensor.device.type
    eligible = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not (eligible and device in ("cuda", "cpu") and torch.is_autocast_enabled(device)):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **keywords: Unpack[attention_problems.Keywords],
) -> AttentionPlan:
    """Plan an attention: build and load its kernel now, and return what runs it.

    Arguments are those of `attention`. `plan(q, k, v, ...)` then runs tensors of the same shapes,
    strides, types and alignment with the same keywords, and returns out and lse.
    """
    call = AttentionCall(q, k, v, **keywords)
    call.require()
    return attentions.plan(call)


def load(spec: KernelSpec | str) -> kernels.Kernel:
    """Return the loaded kernel of a spec or name, building it when the store lacks it.

    Raises DeviceError where there is no GPU to load it on.
    """
    found = named(spec)
    if found is None:
        raise ProblemError("spec None", rule="must be a KernelSpec or a kernel's name", fix="")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device here",
            rule="kernels are loaded on a GPU",
            fix="build them with `warploom compile`, or load them where there is a GPU",
        )
    loaded = kernels.kernel(found, torch.cuda.current_device())
    for entry in loaded.artifact.resources:
        loaded.load(entry, torch.cuda.current_device())
    return loaded


def warmup(path: str | Path, *, jobs: int | None = None) -> int:
    """Build every kernel of a configuration, in parallel, and load them on the current device.

    Returns their number. Raises the first CompilationError, after all have been tried.
    """
    if not isinstance(path, str | Path):
        raise ProblemError(
            f"path {shown(path)} of type {type(path).__name__}",
            rule="must be the path of a configuration",
            fix='for example "linear.yaml"',
        )
    from warploom.generator.space import expand_file  # brings pydantic, which no call needs

    specs = expand_file(Path(path)).specs
    for result in build_many(specs, kernels.store(), jobs):
        if isinstance(result, WarploomError):
            raise result
    if torch.cuda.is_available():
        for spec in specs:
            load(spec)
    return len(specs)


@overload
def explain(a: GemmPlan | AttentionPlan) -> Explanation: ...


@overload
def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    gpu: str | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Explanation: ...


@overload
def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    v: torch.Tensor,
    *,
    gpu: str | None = None,
    **keywords: Unpack[attention_problems.Keywords],
) -> Explanation: ...


def explain(
    a: torch.Tensor | GemmPlan | AttentionPlan,
    b: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    gpu: str | None = None,
    **keywords: Any,
) -> Explanation:
    """Say which kernel a call runs, why, and what it would copy.

    `explain(a, b, ...)` is about a gemm, `explain(q, k, v, ...)` about an attention and its
    gradients, with their keywords; `explain(plan)` about either. Nothing is launched, but the
    kernel is built and loaded. With `gpu`, such as "NVIDIA H200", it says what that GPU would run,
    on any machine and of tensors on any device, also `meta`; then nothing is built.
    UnknownNameError for a GPU that nothing is known of.
    """
    if isinstance(a, GemmPlan | AttentionPlan):
        return Explanation.of(a)
    if b is None:
        raise ProblemError(
            f"explain of {shown(a)} alone",
            rule="must be of a plan, of a and b, or of q, k and v",
            fix="pass the operands of the call",
        )
    if v is not None:
        call = AttentionCall(a, b, v, **keywords)
        return attention_on(target(gpu), call) if gpu else Explanation.of(attentions.plan(call))
    if gpu is None:
        return Explanation.of(plan(a, b, **keywords))
    return gemm_on(target(gpu), a, b, **keywords)
