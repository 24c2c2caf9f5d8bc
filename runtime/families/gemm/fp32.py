"""GEMMs of fp32 matrices on tensor cores of 16 bits, by pieces of their values.

    fp32      two fp16 pieces of each value, rows of A and columns of B scaled by powers of two;
              three products
    bf16x3    two bf16 pieces, three products
    bf16x6    three bf16 pieces, six products

A kernel splits each operand, and one GEMM loads all pieces of a k tile once, adds their products
up, smallest first, and adds the sum to fp32 accumulators. Gradients are GEMMs of the same
precision. Pieces of parameters are kept until they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.runtime import driver
from warploom.runtime.arguments import schema_of
from warploom.runtime.explanation import Explanation
from warploom.runtime.families._product.operands import broadcast
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.fp32_pieces.api import fp32_pieces
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.call import PRODUCT, GemmCall
from warploom.runtime.families.gemm.operators import WIDTH
from warploom.runtime.families.gemm.pieces import PiecesCall
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import draft, planned
from warploom.runtime.tensors import require_one_device, shown


class Scheme(NamedTuple):
    """How values are split: the type and number of pieces, and the products that are added up."""

    dtype: torch.dtype
    pieces: int
    terms: int


SCHEMES = {
    "fp32": Scheme(torch.float16, 2, 3),
    "bf16x3": Scheme(torch.bfloat16, 2, 3),
    "bf16x6": Scheme(torch.bfloat16, 3, 6),
}
"""The schemes, by the name that calls have for them."""

_RESULTS = (torch.float32, torch.bfloat16, torch.float16)


def scheme_of(precision: object) -> Scheme:
    """Return the scheme of a precision; ProblemError for an unknown one."""
    if isinstance(precision, str) and precision in SCHEMES:
        return SCHEMES[precision]
    raise ProblemError(
        f"precision {shown(precision)}",
        rule=f"must be one of {', '.join(SCHEMES)}",
        fix='use "fp32"; leave precision out for operands of 8 and 16 bits',
    )


def check(call: GemmCall, precision: object) -> Scheme:
    """Check a call before anything is launched, and return its scheme.

    Raises ProblemError for operands that are not fp32, and for what these GEMMs do not take.
    """
    scheme = scheme_of(precision)
    if not torch.compiler.is_dynamo_compiling():
        call.require()
    a, b = call.a, call.b
    told = f"precision {precision!r}"
    for name, one in (("a", a), ("b", b)):
        if one.dtype != torch.float32:
            raise ProblemError(
                f"{name} of {one.dtype} with {told}",
                rule="must be torch.float32, whose values are split",
                fix=f"use {name}.float(), or leave precision out",
            )
        if is_distributed(one):
            raise ProblemError(
                f"{name}, a distributed tensor, with {told}",
                rule="must be a matrix of this process",
                fix=f"use {name}.to_local()",
            )
    try:
        if min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-2]:
            raise RuntimeError
        if a.dim() > 2 or b.dim() > 2:
            broadcast(a, b)
    except RuntimeError:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)}",
            rule="a is [.., M, K] and b is [.., K, N], with one K, and batches that broadcast",
            fix="a torch weight [N, K] is b after .t()",
        ) from None
    if a.device != b.device:
        require_one_device((("a", a), ("b", b)))
    refused = (
        (call.spec is not None, "spec", "must be left out: the GEMM of pieces has another name"),
        (not call.use_fast_accum, "use_fast_accum False", "must be True: sums are fp32 anyway"),
        (call.main_grad is not None, "main_grad", "must be left out"),
        (call.gradient_dtype is not None, "gradient_dtype", "must be left out: gradients are fp32"),
    )
    for is_given, name, rule in refused:
        if is_given:
            raise ProblemError(f"{name} with {told}", rule=rule, fix="leave it out")
    if _result_type(call) not in _RESULTS:
        raise ProblemError(
            f"out_dtype {_result_type(call)} with {told}",
            rule="must be fp32, bf16 or fp16",
            fix="leave it out for fp32",
        )
    return scheme


def _result_type(call: GemmCall) -> torch.dtype:
    if call.out_dtype is not None:
        return call.out_dtype
    return torch.float32 if call.out is None else call.out.dtype


def multiply(call: GemmCall, precision: str) -> torch.Tensor:
    """Return D of a call on fp32 matrices by a scheme of `SCHEMES`.

    It is differentiable in a, b and what the epilogue reads; then torch computes the epilogue.
    """
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    check(call, precision)
    if torch.is_grad_enabled() and call.requiring_grad() is not None:
        call.refuse()
        d: torch.Tensor = torch.ops.warploom.matmul_fp32(call.a, call.b, precision)
        return (apply(d, call.listed) if call.listed else d).to(_result_type(call))
    call.out_dtype = _result_type(call)
    if not traced:
        with torch.no_grad():
            return _compute(call, SCHEMES[precision])
    values, written = call.crossing()
    if call.out is None and not written:
        found: torch.Tensor = torch.ops.warploom.gemm_fp32(*values, precision)
        return found
    if written:
        raise ProblemError(
            f"{', '.join(written)} with precision {shown(precision)}, compiled",
            rule="must be of an eager call",
            fix="compute it by torch",
        )
    torch.ops.warploom.gemm_fp32_out(*values, precision, out=call.out)
    assert call.out is not None  # noqa: S101 (for type checkers)
    return call.out


# ---- The pieces ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """Pieces of a parameter, and what of it they are: a part, its type of pieces, its version."""

    key: tuple[Any, ...]
    version: tuple[int, int]
    pieces: tuple[torch.Tensor, torch.Tensor | None]


_kept: Any = WeakTensorKeyDictionary()  # by parameter


def _pieces(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pieces of rows of x along its last dimension; those of a parameter as they were kept.

    A CUDA graph splits whatever it reads, since parameters may change between its replays. Each
    stream has pieces of its own: those of another might not be written yet.
    """
    x = x.resolve_neg()
    parameter = x if x._base is None else x._base
    tracing = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    kept = isinstance(parameter, torch.nn.Parameter) and not tracing and not x.is_inference()
    if kept and x.is_cuda and torch.cuda.is_current_stream_capturing():
        kept = False
    if not kept:
        return fp32_pieces(x.detach(), scheme.dtype, scheme.pieces)
    device = x.get_device()
    stream = driver.current_stream(device) if device >= 0 else 0
    key = (scheme.dtype, scheme.pieces, x.shape, x.stride(), x.storage_offset(), stream)
    version = parameter._version, x.data_ptr()
    known: dict[Any, _Kept] = _kept.setdefault(parameter, {})
    found = known.get(key)
    if found is None or found.version != version:
        pieces = fp32_pieces(x.detach(), scheme.dtype, scheme.pieces)
        found = known[key] = _Kept(key, version, pieces)
    return found.pieces


def pieces_call(call: GemmCall, scheme: Scheme) -> PiecesCall:
    """The GEMM of the pieces of a call's operands, whose epilogue undoes their scales first."""
    a, scale_a = _pieces(call.a, scheme)
    b, scale_b = _pieces(call.b.mT, scheme)
    items: list[Item] = []
    if scale_a is not None and scale_b is not None:
        items = [("scale_row", scale_a[0]), ("scale_column", scale_b[2]), ("scale_row", scale_a[1])]
        if call.b.dim() > 2:  # vectors have the batches of the result
            batches = broadcast(call.a, call.b)
            items = [(kind, _expanded(one, batches)) for kind, one in items]
    dtype = _result_type(call)
    return PiecesCall(a, b.mT, [*items, *call.listed], call.out, dtype, terms=scheme.terms)


def _expanded(vector: torch.Tensor, batches: Sequence[int]) -> torch.Tensor:
    return vector.expand(*batches, vector.shape[-1]).contiguous()


def _compute(call: GemmCall, scheme: Scheme) -> torch.Tensor:
    """D of a call that was checked. A sum of no products is what the epilogue makes of zeros."""
    if 0 in (*call.a.shape, *call.b.shape):
        d = reference.gemm(call.a, call.b, call.listed, _result_type(call))
        return d if call.out is None else call.out.copy_(d)
    made = pieces_call(call, scheme)
    return planned(made).run(made)


# ---- Explained -----------------------------------------------------------------------------------


def explanation(call: GemmCall, precision: object, gpu: str | None) -> Explanation:
    """Say what a call does by a precision, here or on a GPU: its kernel is that of the pieces."""
    scheme = check(call, precision)
    made = pieces_call(call, scheme)
    if gpu is None:
        told = Explanation.of(planned(made))
    else:
        there = target(gpu)
        told = Explanation.on(there, draft(made, there))
    name = str(scheme.dtype).removeprefix("torch.")
    reason = (
        f"precision {precision}: {scheme.terms} products of {scheme.pieces} {name} pieces, after a "
        f"launch for each operand that splits it; {told.reason}"
    )
    return replace(told, reason=reason)


# ---- Operators -----------------------------------------------------------------------------------


def _run(*values: Any) -> torch.Tensor:
    call = GemmCall.crossed(*values[:WIDTH])
    with torch.no_grad():
        return _compute(call, SCHEMES[values[-1]])


def _run_out(*values: Any, out: torch.Tensor) -> None:
    call = GemmCall.crossed(*values[:WIDTH], out=out)
    with torch.no_grad():
        _compute(call, SCHEMES[values[-1]])


def _fake(*values: Any) -> torch.Tensor:
    return GemmCall.crossed(*values[:WIDTH]).fake()


def _fake_out(*values: Any, out: torch.Tensor) -> None:
    return None


def _refuse(*values: Any, **written: torch.Tensor) -> None:
    GemmCall.crossed(*values[:WIDTH], **written).refuse()


def _matmul(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    with torch.no_grad():
        return _compute(GemmCall(a, b, out_dtype=torch.float32), SCHEMES[precision])


def _fake_matmul(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    return GemmCall(a, b, out_dtype=torch.float32).fake()


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
    a, b, ctx.precision = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # noqa: ANN401
    a, b = ctx.saved_tensors
    matmul, da, db = torch.ops.warploom.matmul_fp32, None, None
    if ctx.needs_input_grad[0]:
        da = matmul(d, b.mT, ctx.precision).sum_to_size(a.shape)
    if ctx.needs_input_grad[1]:
        if b.dim() == 2 and a.dim() > 2:  # rows of all batches are summed
            a, d = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
        # The transpose of the gradient, where b is the transpose of a weight.
        turned = b.stride(-2) == 1 and b.stride(-1) != 1
        db = matmul(d.mT, a, ctx.precision).mT if turned else matmul(a.mT, d, ctx.precision)
        db = db.sum_to_size(b.shape)
    return da, db, None


register(
    "gemm_fp32",
    f"{schema_of(PRODUCT)}, str precision",
    returns="Tensor",
    run=_run,
    fake=_fake,
    refuse=_refuse,
)
register(
    "gemm_fp32_out",
    f"{schema_of(PRODUCT)}, str precision",
    returns="()",
    run=_run_out,
    fake=_fake_out,
    written={"out": "Tensor(a!)"},
    refuse=_refuse,
)
register(
    "matmul_fp32",
    "Tensor a, Tensor b, str precision",
    returns="Tensor",
    run=_matmul,
    fake=_fake_matmul,
    backward=_backward,
    save=_save,
)
