"""GEMMs of fp32 matrices on tensor cores of 16 bits, by pieces of their values.

    fp32      two fp16 pieces of each value, rows of A and columns of B scaled by powers of two;
              three products. Where these do not hold what the rows and columns span, three bf16
              pieces of the scaled values, six products: the device decides, see `_compute`
    bf16x3    two bf16 pieces, three products
    bf16x6    three bf16 pieces, six products
    fp32 a by bf16 b: three bf16 pieces of a, of "bf16x3" two, and as many products
    tf32      values rounded to TF32 while they are loaded, one product: see tf32.py

A kernel splits each operand, and one GEMM loads all pieces of a k tile once, adds their products
up, smallest first, and adds the sum to fp32 accumulators. Gradients are GEMMs of the same
precision. Pieces of parameters are kept until they change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from warploom.errors import ProblemError
from warploom.generator.epilogue import GATES
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.launches import DeviceLimits
from warploom.generator.targets import target
from warploom.runtime import driver, targets
from warploom.runtime.arguments import schema_of
from warploom.runtime.elements import NAMES
from warploom.runtime.explanation import Explanation
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import ITEMS
from warploom.runtime.families._product.operands import (
    broadcast,
    check_out,
    padded_copy,
    padded_room,
)
from warploom.runtime.families._product.reference import apply, rounded, write_outputs
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.scatter import index_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.fp32_pieces.api import Pieces, split
from warploom.runtime.families.fp32_pieces.call import Fp32PiecesCall
from warploom.runtime.families.gemm import fp32_warm, reference
from warploom.runtime.families.gemm.call import PRODUCT, GemmCall
from warploom.runtime.families.gemm.fp32_warm import RanCall
from warploom.runtime.families.gemm.operators import WIDTH
from warploom.runtime.families.gemm.pieces import PiecesCall, SpannedPiecesCall, UnsplitBCall
from warploom.runtime.families.gemm.tf32 import Tf32Call
from warploom.runtime.kept import Key as Stream
from warploom.runtime.kept import identity
from warploom.runtime.kernel import kernel
from warploom.runtime.operands import LOAD, extent_bytes
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import draft, planned, run
from warploom.runtime.tensors import WithoutMemoryError, require_one_device, shown


class Scheme(NamedTuple):
    """How values are split: the type and number of pieces.

    is_spanned   those of WIDE take over where these pieces do not hold the values
    """

    dtype: torch.dtype
    pieces: int
    is_spanned: bool = False

    @property
    def terms(self) -> int:
        """The products that are added up: of pieces that count as one, two and so on together."""
        return self.pieces * (self.pieces + 1) // 2


SCHEMES = {
    "fp32": Scheme(torch.float16, 2, is_spanned=True),
    "bf16x3": Scheme(torch.bfloat16, 2),
    "bf16x6": Scheme(torch.bfloat16, 3),
}
"""The schemes that split values, by the name that calls have for them."""

WIDE = SCHEMES["bf16x6"]
"""What takes over from fp16 pieces, and how A is split where B is bf16."""

TF32 = "tf32"
"""The precision whose operands are read as they are."""

_RESULTS = (torch.float32, torch.bfloat16, torch.float16)


def require_known(precision: object) -> None:
    """Raise ProblemError for an unknown precision."""
    if isinstance(precision, str) and (precision in SCHEMES or precision == TF32):
        return
    raise ProblemError(
        f"precision {shown(precision)}",
        rule=f"must be one of {', '.join((*SCHEMES, TF32))}",
        fix='use "fp32"; leave precision out for operands of 8 and 16 bits',
    )


def refuse_algorithm(algorithm: object, precision: object) -> None:
    """Raise ProblemError for an algorithm that is asked for beside a precision."""
    if algorithm is not None:
        raise ProblemError(
            f"algorithm {shown(algorithm)} with precision {shown(precision)}",
            rule="must be without one of them",
            fix="leave algorithm out",
        )


def check(call: GemmCall, precision: object) -> None:
    """Check a call before anything is launched.

    Raises ProblemError for operands that are not fp32, and for what these GEMMs do not take.
    """
    require_known(precision)
    if not torch.compiler.is_dynamo_compiling():
        call.require()
    a, b = call.a, call.b
    told = f"precision {precision!r}"
    for name, one in (("a", a), ("b", b)):
        is_whole = name == "b" and one.dtype == torch.bfloat16 and precision != TF32
        if one.dtype != torch.float32 and not is_whole:
            also = ", or torch.bfloat16, multiplied by pieces of a" if name == "b" else ""
            raise ProblemError(
                f"{name} of {one.dtype} with {told}",
                rule=f"must be torch.float32{also}",
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
        (
            precision != TF32 and any(step_of(item).step in GATES for item in call.listed),
            "a gate",
            "must be computed by torch: columns of B are split alone, not in pairs",
        ),
        (
            index_of(call.listed) is not None,
            "scatter",
            "must be left out: write the result to out[index] afterwards",
        ),
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


def _result_type(call: GemmCall) -> torch.dtype:
    if call.out_dtype is not None:
        return call.out_dtype
    return torch.float32 if call.out is None else call.out.dtype


def multiply(call: GemmCall, precision: str) -> torch.Tensor:
    """Return D of a call on fp32 matrices by a precision.

    It is differentiable in a, b and what the epilogue reads; then torch computes the epilogue.
    """
    again = None if torch.is_grad_enabled() else _again(call, precision)
    if again is not None:
        return again
    check(call, precision)
    if torch.is_grad_enabled() and call.requiring_grad() is not None:
        call.refuse()
        outputs = call.listed and ITEMS.written(call.listed)
        if outputs and traced():
            raise _compiled([name for name, _ in outputs], precision)
        if call.listed and not torch.compiler.is_dynamo_compiling():
            _check_epilogue(call)
        d: torch.Tensor = torch.ops.warploom.matmul_fp32(call.a, call.b, precision)
        if not call.listed:
            return d.to(_result_type(call))
        if outputs:
            with torch.no_grad():
                write_outputs(d, call.listed)
        return _rounded(apply(d, call.listed), _result_type(call), call.listed)
    call.out_dtype = _result_type(call)
    if not traced():
        try:
            with torch.no_grad():
                return _compute(call, precision)
        except WithoutMemoryError:  # torch knows which code is to see these tensors
            pass
    values, written = call.crossing()
    if call.out is None and not written:
        found: torch.Tensor = torch.ops.warploom.gemm_fp32(*values, precision)
        return found
    if written:
        raise _compiled([*written], precision)
    torch.ops.warploom.gemm_fp32_out(*values, precision, out=call.out)
    assert call.out is not None  # noqa: S101 (for type checkers)
    return call.out


def _compiled(written: Sequence[str], precision: str) -> ProblemError:
    return ProblemError(
        f"{', '.join(written)} with precision {shown(precision)}, compiled",
        rule="must be of an eager call",
        fix="compute it by torch",
    )


def _check_epilogue(call: GemmCall) -> None:
    """Raise ProblemError for what a plan refuses, of a call that runs none.

    That is one whose epilogue torch computes, or of no products.
    """
    _check_steps(call)
    call.check(None, call.a.new_empty(0) if call.out is None else call.out)  # type: ignore[arg-type]


def _check_steps(call: GemmCall) -> None:
    """The same, but for memory."""
    (*lead, m, k), n, device = call.a.shape, call.b.shape[-1], call.a.get_device()
    batched = call.b.dim() > 2
    batches = broadcast(call.a, call.b) if batched else tuple(lead)
    bound = epilogue.bind(call.listed, batches, m, n, device, batched=batched, k=k)
    shape, shared = (*batches, m, bound.columns), batches if bound.batched else None
    check_out(call.out, shape, _result_type(call), device, shared)
    d: Any = NAMES[_result_type(call)]  # which no kernel may have these steps before
    options: Any = {"batched": bound.batched, "epilogue": bound.steps}
    family("gemm").require_legal(GemmOperation("bf16", "bf16", d, layout_b="col", **options))


def _rounded(x: torch.Tensor, dtype: torch.dtype, listed: Sequence[Item]) -> torch.Tensor:
    """D of what the epilogue made of sums, rounded as kernels do; gradients ignore how."""
    d = x.to(dtype)
    if listed[-1][0] == "stochastic_rounding":
        with torch.no_grad():
            d.copy_(rounded(x, dtype, listed))
    return d


# ---- The pieces ----------------------------------------------------------------------------------


class _Version(NamedTuple):
    """Which contents of a parameter pieces are of; those that share memory may count alone.

    parameter   its serial number: the next one of the same memory may have the id of one that is
                gone, and a weak reference would keep torch from swapping it
    """

    parameter: int
    writes: int
    address: int
    trained: bool


class _Kept(NamedTuple):
    """Pieces of a parameter, and which contents of it they are of."""

    version: _Version
    pieces: Pieces


class _Part(NamedTuple):
    """Which pieces, of a parameter that begins there in its storage: their type and number, of a
    view, for a stream.
    """

    begin: object
    dtype: torch.dtype
    pieces: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: object
    stream: Stream


# By storage, which torch keeps one object of: torch.utils.swap_tensors, and so `to` and `to_empty`
# where torch.__future__ has them swap, takes no parameter with a weak reference.
_kept: WeakKeyDictionary[torch.UntypedStorage, dict[_Part, _Kept]] = WeakKeyDictionary()
_SERIAL = "_warploom_serial"  # an attribute of parameters with pieces: a number, which pickles
_serials = itertools.count()
_TIMES = 4  # as many values as a parameter has are kept in pieces: of its transpose, and of views
_STREAMS = 8  # that have pieces of a parameter; those that are gone are not heard of


def _forget_trained(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Keep no pieces of what a step of an optimizer may have changed: fused ones count no version,
    nor does FSDP, which gathers what they changed. Its own parameters may have been frozen before.
    """
    refs = _kept.keyrefs()  # a copy: other threads may keep pieces meanwhile
    groups = optimizer.param_groups if refs else []
    changed = {one.untyped_storage() for group in groups for one in group["params"]}
    for weak in refs:
        storage = weak()
        known = {} if storage is None else _kept.get(storage, {})
        for part, one in [*known.items()]:
            if one.version.trained or storage in changed:
                known.pop(part, None)


register_optimizer_step_post_hook(_forget_trained)


def _pieces(x: torch.Tensor, scheme: Scheme) -> Pieces:
    """Pieces of rows of x along its last dimension; those of a parameter as they were kept.

    Each stream has pieces of its own: those of another might not be written yet.
    """
    parameter = _parameter(x)
    if parameter is None:
        return split(x.resolve_neg().detach(), scheme.dtype, scheme.pieces)
    device = x.get_device()
    stream = identity(driver.current_stream(device)) if device >= 0 else ()
    lies = x.shape, x.stride(), x.storage_offset()
    part = _Part(parameter.storage_offset(), scheme.dtype, scheme.pieces, *lies, stream)
    serial: int = vars(parameter).setdefault(_SERIAL, next(_serials))
    version = _Version(serial, parameter._version, x.data_ptr(), parameter.requires_grad)
    known = _kept.setdefault(parameter.untyped_storage(), {})
    found = known.get(part)
    if found is None or found.version != version:
        known.pop(part, None)  # what is kept anew is the newest
        found = known[part] = _Kept(version, split(x.detach(), scheme.dtype, scheme.pieces))
        _drop_older(known, part, version, _TIMES * parameter.numel())
    return found.pieces


def _drop_older(known: dict[_Part, _Kept], newest: _Part, version: _Version, most: int) -> None:
    """Drop pieces of earlier versions; of views and streams, which may be any, the oldest go first
    where a stream has those of more than `most` values, or more than `_STREAMS` have some.
    """
    values = dict[Stream, int]()
    for part, one in reversed([*known.items()]):
        if part.begin != newest.begin:  # another parameter's, which has versions of its own
            continue
        is_full = part.stream not in values and len(values) == _STREAMS
        if not is_full:
            values[part.stream] = values.get(part.stream, 0) + part.shape.numel()
            is_full = values[part.stream] > most
        is_older = one.version.writes != version.writes or one.version.trained != version.trained
        if part != newest and (is_full or is_older):
            known.pop(part, None)


def _parameter(x: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter that x is, or is a view of, if its pieces are kept.

    A CUDA graph splits whatever it reads, since parameters may change between its replays.
    """
    parameter = x if x._base is None else x._base
    if not isinstance(parameter, torch.nn.Parameter) or x.is_neg() or x.is_inference():
        return None
    if traced() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return parameter


def pieces_call(call: GemmCall, scheme: Scheme, a: Pieces, b: Pieces) -> PiecesCall:
    """The GEMM of the pieces of a call's operands, whose epilogue undoes their scales first."""
    items: list[Item] = []
    if a.scale is not None and b.scale is not None:
        items = [("scale_row", a.scale[0]), ("scale_column", b.scale[2]), ("scale_row", a.scale[1])]
        if call.b.dim() > 2:  # vectors have the batches of the result
            batches = broadcast(call.a, call.b)
            items = [(kind, _expanded(one, batches)) for kind, one in items]
    given = a.q, b.q.mT, [*items, *call.listed], call.out, _result_type(call)
    if not scheme.is_spanned:
        return PiecesCall(*given, terms=scheme.terms)
    return SpannedPiecesCall(*given, terms=scheme.terms, span_a=a.span, span_b=b.span)


def wide_call(
    narrow: SpannedPiecesCall, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor | None
) -> SpannedPiecesCall:
    """The GEMM of three bf16 pieces of what two fp16 pieces may not hold, into the same D."""
    return replace(narrow, a=a, b=b.mT, out=d, terms=WIDE.terms, spans="wide")


def _expanded(vector: torch.Tensor, batches: Sequence[int]) -> torch.Tensor:
    return vector.expand(*batches, vector.shape[-1]).contiguous()


def _compute(call: GemmCall, precision: str) -> torch.Tensor:
    """D of a call that was checked. A sum of no products is what the epilogue makes of zeros.

    Of a scheme that is spanned both GEMMs are launched, by two fp16 pieces and by three bf16 pieces
    of what is scaled alike, with the launches that make the latter. The launches that made the
    fp16 pieces left on the device what the rows span: all that are not to compute D read these
    words and leave at once. The host waits for nothing, and a captured graph decides each time.
    """
    if 0 in (*call.a.shape, *call.b.shape):
        _check_epilogue(call)
        d = reference.gemm(call.a, call.b, call.listed, _result_type(call))
        return d if call.out is None else call.out.copy_(d)
    again = _again(call, precision)
    if again is not None:
        return again
    scheme, scheme_b = _schemes(call, precision)
    if scheme is None:
        single = tf32_call(call)
        d = planned(single).run(single)
        _keep(call, precision, (), [RanCall.of(single, d)], d)
        return d
    if scheme_b is None:
        return _compute_by_unsplit_b(call, precision, scheme)
    kept = _parameter(call.a), _parameter(call.b)
    sides = call.a.resolve_neg().detach(), call.b.mT.resolve_neg().detach()
    a, b = _pieces(call.a, scheme), _pieces(call.b.mT, scheme_b)
    made = pieces_call(call, scheme, a, b)
    d = planned(made).run(made)
    ran = [
        RanCall.of(Fp32PiecesCall(x, scheme.dtype, scheme.pieces), one)
        for x, one, parameter in zip(sides, (a, b), kept, strict=True)
        if parameter is None
    ]
    ran.append(RanCall.of(made, d))
    if isinstance(made, SpannedPiecesCall):
        spans = made.span_a, made.span_b
        splits = [
            Fp32PiecesCall(x, WIDE.dtype, WIDE.pieces, None, one.scale, *spans)
            for x, one in zip(sides, (a, b), strict=True)
        ]
        found = [run(one) for one in splits]
        ran += [RanCall.of(*one) for one in zip(splits, found, strict=True)]
        (wide_a, *_), (wide_b, *_) = found
        assert wide_a is not None and wide_b is not None  # noqa: S101 (for type checkers)
        wide = wide_call(made, wide_a, wide_b, d)
        ran.append(RanCall.of(wide, planned(wide).run(wide)))
    held = [one for one, parameter in zip((a, b), kept, strict=True) if parameter is not None]
    _keep(call, precision, held, ran, d)
    return d


def _compute_by_unsplit_b(call: GemmCall, precision: str, scheme: Scheme) -> torch.Tensor:
    """D of a bf16 b, which is copied unless it is K-major."""
    a, b = _pieces(call.a, scheme), call.b.detach()
    made = unsplit_b_call(call, scheme, a, padded_copy(b, "col") if _is_copied(b) else b)
    d = planned(made).run(made)
    x = call.a.resolve_neg().detach()
    splits = [RanCall.of(Fp32PiecesCall(x, scheme.dtype, scheme.pieces), a)]
    held = [] if _parameter(call.a) is None else [a]
    _keep(call, precision, held, [*splits[len(held) :], RanCall.of(made, d)], d)
    return d


def tf32_call(call: GemmCall) -> Tf32Call:
    """The GEMM that reads the operands of a call as they are."""
    return Tf32Call(call.a, call.b, call.listed, call.out, _result_type(call))


def unsplit_b_call(call: GemmCall, scheme: Scheme, a: Pieces, b: torch.Tensor) -> UnsplitBCall:
    """The GEMM of the pieces of a call's a and of its bf16 b, or of a copy of that."""
    return UnsplitBCall(a.q, b, call.listed, call.out, _result_type(call), terms=scheme.pieces)


def _is_copied(b: torch.Tensor) -> bool:
    """Whether kernels read a copy of a bf16 b: a k of 1 would be read as a row of columns."""
    return b.stride(-2) != 1 or b.shape[-2] == 1


def _keep(
    call: GemmCall, precision: str, held: Sequence[Pieces], ran: Sequence[RanCall], d: torch.Tensor
) -> None:
    """Keep what a call launched, by pieces that are kept, for others like it."""
    if call.out is None and not traced():
        tensors, options = _known_by(call, precision)
        fp32_warm.keep(tensors, options, _tensors(held), ran, d)


def _known_by(call: GemmCall, precision: str) -> tuple[list[torch.Tensor], fp32_warm.Options]:
    """What recognises a call: its tensors, and what else decides what is launched for it."""
    kept = _parameter(call.a) is not None, _parameter(call.b) is not None
    return fp32_warm.known_by(call, precision, _result_type(call), *kept)


def _again(call: GemmCall, precision: str) -> torch.Tensor | None:
    """D of a call like an earlier one; None for others."""
    if call.out is not None or traced():
        return None
    if call.spec is not None or not call.use_fast_accum:  # which `check` refuses, as those below
        return None
    if call.main_grad is not None or call.gradient_dtype is not None:
        return None
    try:
        tensors, options = _known_by(call, precision)
        sequence = fp32_warm.find(tensors, options)
    except Exception:  # for arguments of no type that they may have: checks say so
        return None
    if sequence is None:
        return None
    sides = zip((call.a, call.b.mT), _schemes(call, precision), strict=True)
    held = [_pieces(x, one) for x, one in sides if one is not None and _parameter(x) is not None]
    return sequence.run(call, tensors, _tensors(held))


def _schemes(call: GemmCall, precision: str) -> tuple[Scheme | None, Scheme | None]:
    """How a and b are split; None where they are read as they are."""
    if precision == TF32:
        return None, None
    if call.b.dtype == torch.bfloat16:
        return WIDE if SCHEMES[precision].is_spanned else SCHEMES[precision], None
    return SCHEMES[precision], SCHEMES[precision]


def _tensors(pieces: Sequence[Pieces]) -> list[torch.Tensor]:
    return [one for each in pieces for one in each if one is not None]


def traced() -> bool:
    """Whether a compiler, or a mode that decides by operator, sees what is called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


# ---- Explained -----------------------------------------------------------------------------------


def explanation(call: GemmCall, precision: object, gpu: str | None) -> Explanation:
    """Say what a call does by a precision, here or on a GPU: its kernel is that of the pieces.

    Nothing is launched, and tensors are made without memory alone.
    """
    check(call, precision)
    _check_steps(call)
    scheme, scheme_b = _schemes(call, str(precision))
    copies = [
        name
        for name, x, split_by in (("a", call.a, scheme), ("b", call.b.mT, scheme_b))
        if x.is_neg() or (split_by is not None and Fp32PiecesCall(x).layout() is None)
    ]
    device = call.device if gpu is None else None
    there = targets.at_hand(call.device) if gpu is None else target(gpu)
    call = _without_memory(call)
    if scheme is None:
        told = _explained(tf32_call(call), there, device)
        reason = "operands are rounded while they are loaded"
    elif scheme_b is None:
        b = padded_room(call.b, "col", "meta") if _is_copied(call.b) else call.b
        copies += ["b"] * _is_copied(call.b)
        made = unsplit_b_call(call, scheme, _fake_pieces(call.a, scheme), b)
        told = _explained(made, there, device)
        reason = f"{scheme.pieces} bf16 pieces of a by b"
    else:
        a, b_pieces = _fake_pieces(call.a, scheme), _fake_pieces(call.b.mT, scheme_b)
        narrow = pieces_call(call, scheme, a, b_pieces)
        told = _explained(narrow, there, device)
        reason = f"{_products_told(scheme)}, after a launch for each operand that splits it"
        if isinstance(narrow, SpannedPiecesCall):
            wide_a, wide_b = (_fake_pieces(x, WIDE).q for x in (call.a, call.b.mT))
            wide = _explained(wide_call(narrow, wide_a, wide_b, call.out), there, device)
            told = replace(
                told,
                reason=f"{told.reason}; where these do not hold what rows span, which the device "
                f"finds, {wide.kernel} computes {_products_told(WIDE)} instead",
            )
    return replace(
        told,
        reason=f"precision {precision}: {reason}; {told.reason}",
        copies=tuple(dict.fromkeys((*copies, *told.copies))),
    )


def _products_told(scheme: Scheme) -> str:
    name = str(scheme.dtype).removeprefix("torch.")
    return f"{scheme.terms} products of {scheme.pieces} {name} pieces"


def _without_memory(call: GemmCall) -> GemmCall:
    """The same call of tensors on `meta`, which are stored as its own are."""
    listed = [
        tuple(_on_meta(part) if isinstance(part, torch.Tensor) else part for part in item)
        for item in call.listed
    ]
    out = None if call.out is None else _on_meta(call.out)
    return replace(call, a=_on_meta(call.a), b=_on_meta(call.b), listed=listed, out=out)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    """A tensor without memory of the same strides and alignment."""
    if x.is_meta:
        return x
    first, last = extent_bytes(x)
    offset = first % LOAD // x.itemsize
    room = torch.empty(offset + (last - first) // x.itemsize, dtype=x.dtype, device="meta")
    return room.as_strided(x.shape, x.stride(), offset)


def _fake_pieces(x: torch.Tensor, scheme: Scheme) -> Pieces:
    """Pieces as those of x, which has no memory either."""
    q, scale, span = Fp32PiecesCall(x, scheme.dtype, scheme.pieces).fake()
    assert q is not None  # noqa: S101 (for type checkers)
    return Pieces(q, scale, span)


def _explained(made: GemmCall, there: DeviceLimits, device: int | None) -> Explanation:
    """What a GEMM without memory does on a GPU; its kernel is built for a device that is here."""
    drafted = draft(made, there)
    if device is None:
        return Explanation.on(there, drafted)
    if device >= 0 and drafted.problem is not None:
        kernel(drafted.choice.spec, device)
    return replace(Explanation.on(there, drafted), gpu="", reference=device < 0)


# ---- Operators -----------------------------------------------------------------------------------


def _run(*values: Any) -> torch.Tensor:
    call = GemmCall.crossed(*values[:WIDTH])
    with torch.no_grad():
        return _compute(call, values[-1])


def _run_out(*values: Any, out: torch.Tensor) -> None:
    call = GemmCall.crossed(*values[:WIDTH], out=out)
    with torch.no_grad():
        _compute(call, values[-1])


def _fake(*values: Any) -> torch.Tensor:
    return GemmCall.crossed(*values[:WIDTH]).fake()


def _fake_out(*values: Any, out: torch.Tensor) -> None:
    return None


def _refuse(*values: Any, **written: torch.Tensor) -> None:
    GemmCall.crossed(*values[:WIDTH], **written).refuse()


def _matmul(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    with torch.no_grad():
        return _compute(GemmCall(a, b, out_dtype=torch.float32), precision)


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
        db = db.sum_to_size(b.shape).to(b.dtype)
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
