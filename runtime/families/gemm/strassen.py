"""Strassen's algorithm, in Winograd's variant, on top of `warploom.gemm`: 7 products in place of 8.

With A and B in quarters, and sums S of A's and T of B's,

    S1 = A21 + A22         T1 = B12 - B11         P1 = A11 B11    P5 = S1 T1
    S2 = A21 + A22 - A11   T2 = B22 - B12 + B11   P2 = A12 B21    P6 = S2 T2
    S3 = A11 - A21         T3 = B22 - B12         P3 = S4 B22     P7 = S3 T3
    S4 = A12 - S2          T4 = B21 - T2          P4 = A22 T4

    C11 = P1 + P2          C12 = P1 + P6 + P5 + P3
    C21 = P1 + P6 + P7 + P4                       C22 = P1 + P6 + P7 + P5

S and T are computed in fp32 and rounded once to the type of A and B: one elementwise launch for
each operand reads its quarters once. The sums of products have no launch: each is a residual of the
next product's epilogue, in fp32, and the last product of a quarter of C applies the epilogue of the
call. Two levels do the same to each of the 7 products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import (
    MOST_CHARACTERS,
    MOST_STEPS,
    Preactivation,
    Residual,
    legal,
)
from warploom.generator.targets import target
from warploom.runtime.accumulation import accumulated
from warploom.runtime.arguments import schema_of
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.explanation import Explanation
from warploom.runtime.families._product.call import Checked
from warploom.runtime.families._product.operands import result_type
from warploom.runtime.families._product.steps import STEPS, step_of
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import ROUNDOFF, Item
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.call import GRADIENT, PRODUCT, GemmCall
from warploom.runtime.families.gemm.operators import WIDTH
from warploom.runtime.measure import largest_share
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import draft, planned
from warploom.runtime.tensors import shown

LEVELS = {"strassen": 1, "strassen2": 2}
"""How often the products of an algorithm are divided, by the name that calls have for it."""

_INPUTS = (torch.bfloat16, torch.float16)
_RESULTS = (*_INPUTS, torch.float32)
_STEPS = ("scale", "bias", "activation", "residual")
_ALIGNED = 8  # elements: quarters begin where TMA can read them


def levels_of(algorithm: object) -> int:
    """Return how often an algorithm divides its products; ProblemError for an unknown one."""
    if isinstance(algorithm, str) and algorithm in LEVELS:
        return LEVELS[algorithm]
    raise ProblemError(
        f"algorithm {shown(algorithm)}",
        rule=f"must be {' or '.join(LEVELS)}",
        fix="leave it out for the ordinary product",
    )


def multiply(call: GemmCall, algorithm: str) -> torch.Tensor:
    """Return D of a call by an algorithm of `LEVELS`, differentiable like that of `warploom.gemm`.

    Its gradients are ordinary GEMMs, and an activation's input is computed again by one.
    """
    levels = levels_of(algorithm)
    compiling = torch.compiler.is_dynamo_compiling()
    if is_distributed(call.a) or is_distributed(call.b):
        raise ProblemError(
            "a distributed tensor with algorithm strassen",
            rule="must be a matrix of this process",
            fix="leave algorithm out",
        )
    if not compiling:
        call.require()
        call.refuse()
    _check_steps(call.listed)  # whose outputs would not cross to the operator
    if call.main_grad is not None and compiling:
        operators.keep_in_place(call.main_grad)
    call.out_dtype = result_type(call.a, call.out, call.out_dtype, len(call.listed) > 0)
    values = call.encoded(PRODUCT)
    if call.out is not None:
        torch.ops.warploom.gemm_strassen_out(*values, levels, out=call.out)
        return call.out
    options = ("recompute", call.main_grad, call.gradient_dtype)
    d: torch.Tensor = torch.ops.warploom.gemm_strassen(*values, *options, levels)
    return d


# ---- What it takes -------------------------------------------------------------------------------


def check(call: GemmCall, levels: int) -> Checked:
    """Check a call before anything is launched.

    Raises ProblemError for what `warploom.gemm` refuses, and for what this algorithm does not take.
    """
    a, b = call.a, call.b
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() != 2:
            raise ProblemError(
                f"{name} {list(operand.shape)} with algorithm strassen",
                rule="must be a matrix: batches are not divided",
                fix="flatten rows of one matrix with a.flatten(0, -2), or leave algorithm out",
            )
        if operand.dtype not in _INPUTS:
            raise ProblemError(
                f"{name} of {operand.dtype} with algorithm strassen",
                rule="must be bf16 or fp16: 8 bits do not hold sums of quarters",
                fix="leave algorithm out, or convert a and b to torch.bfloat16",
            )
    if call.spec is not None:
        raise ProblemError(
            f"spec {call.spec.name} with algorithm strassen",
            rule="must be left out: the GEMMs of an algorithm choose their own kernels",
            fix="leave out one of them",
        )
    if not call.use_fast_accum:
        raise ProblemError(
            "use_fast_accum False with algorithm strassen",
            rule="must be True: products of 16 bits are accumulated in fp32",
            fix="leave it out",
        )
    checked = call.checked()
    if checked.out_dtype not in _RESULTS:
        raise ProblemError(
            f"out_dtype {checked.out_dtype} with algorithm strassen",
            rule="must be bf16, fp16 or fp32",
            fix="pass out_dtype=torch.bfloat16, or leave algorithm out",
        )
    _check_steps(call.listed)
    longest = (Residual("fp32"), Preactivation("fp32"), Residual("fp32"))  # of P7
    if legal(longest * levels + checked.epilogue.steps) is not None:
        tokens = ", ".join(step.token for step in checked.epilogue.steps)
        raise ProblemError(
            f"an epilogue of {tokens} with {levels} level{'s'[: levels - 1]} of algorithm strassen",
            rule=f"must leave {3 * levels} steps to the algorithm: a kernel has at most "
            f"{MOST_STEPS}, of "
            f"{MOST_CHARACTERS} characters",
            fix="apply some of them in a call of their own, or use fewer levels",
        )
    least = _ALIGNED << levels
    for name, extent in zip("MNK", (a.shape[0], b.shape[1], a.shape[1]), strict=True):
        if extent < least:
            raise ProblemError(
                f"{name} {extent} with {levels} level{'s'[: levels - 1]} of algorithm strassen",
                rule=f"must be at least {least}, and pays only from thousands on",
                fix="leave algorithm out",
            )
    return checked


def _check_steps(listed: Sequence[Item]) -> None:
    """Raise ProblemError for items of other steps than those that apply to any part of D alone."""
    taken = [STEPS[word] for word in _STEPS]
    for item in listed:
        if step_of(item) not in taken:
            raise ProblemError(
                f"{item[0]} with algorithm strassen",
                rule=f"must be one of the steps {', '.join(_STEPS)}",
                fix="apply it in a call of its own, or leave algorithm out",
            )


# ---- The algorithm -------------------------------------------------------------------------------


def _compute(call: GemmCall, checked: Checked, levels: int, out: torch.Tensor) -> None:
    """Write D of a call that was checked to `out`.

    Rows and columns beyond a multiple of 8 in each part are ordinary products; K is filled up with
    zeros, in a copy, as an operand is copied which TMA cannot read.
    """
    least = _ALIGNED << levels
    call.check(checked, out)
    (m, k), n = call.a.shape, call.b.shape[1]
    a = _readable(call.a, k + -k % least)
    b = _readable(call.b.t(), k + -k % least).t()
    at = Extents((), m, n, k)
    rows, columns = m - m % least, n - n % least

    def part(top: int, bottom: int, left: int, right: int, levels: int) -> None:
        listed = _part(call.listed, at, top, bottom, left, right)
        _product(a[top:bottom], b[:, left:right], listed, out[top:bottom, left:right], levels)

    part(0, rows, 0, columns, levels)
    if columns < n:
        part(0, m, columns, n, 0)
    if rows < m:
        part(rows, m, 0, columns, 0)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor,
    levels: int,
) -> None:
    """Write epilogue(a b) to `out`, dividing the product `levels` times."""
    if levels == 0:
        call = GemmCall(a, b, listed, out)
        planned(call).run(call)
        return
    (m, n), k = out.shape, a.shape[1]
    m2, n2, k2 = m // 2, n // 2, k // 2
    (a11, a12), (a21, a22) = _quarters(a, m2, k2)
    (b11, b12), (b21, b22) = _quarters(b, k2, n2)
    (c11, c12), (c21, c22) = _quarters(out, m2, n2)
    s1, s2, s3, s4 = sums("strassen_a", (a11, a12, a21, a22))
    t1, t2, t3, t4 = sums("strassen_b", (b22, b21, b12, b11))
    x, y, z = (a.new_empty(m2, n2, dtype=torch.float32) for _ in range(3))
    at = Extents((), m, n, k)

    def of(i: int, j: int) -> list[Item]:
        return _part(listed, at, i * m2, (i + 1) * m2, j * n2, (j + 1) * n2)

    plus_x, plus_y, plus_z = (("residual", one, 1.0) for one in (x, y, z))
    products: tuple[tuple[torch.Tensor, torch.Tensor, list[Item], torch.Tensor], ...] = (
        (a11, b11, [], x),  # P1
        (a12, b21, [plus_x, *of(0, 0)], c11),
        (s2, t2, [plus_x], y),  # P1 + P6; not in place: tiles would write lines that others read
        (s1, t1, [], z),  # P5
        (s3, t3, [plus_y, ("preactivation", x), plus_z, *of(1, 1)], c22),  # x: P1 + P6 + P7
        (s4, b22, [plus_y, plus_z, *of(0, 1)], c12),
        (a22, t4, [plus_x, *of(1, 0)], c21),
    )
    for left, right, items, result in products:
        _product(left, right, items, result, levels - 1)


def _quarters(
    x: torch.Tensor, rows: int, columns: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    top, bottom = x[:rows], x[rows:]
    return (top[:, :columns], top[:, columns:]), (bottom[:, :columns], bottom[:, columns:])


def _part(
    listed: Sequence[Item], at: Extents, top: int, bottom: int, left: int, right: int
) -> list[Item]:
    """The items of a part of D, whose tensors have its rows and columns."""
    parts: list[Item] = []
    for item in listed:
        reads = step_of(item).reads(item)
        if reads in ("row", "column", "fragment"):
            value = natural(reads, item[1], at)
            assert value is not None  # noqa: S101 (it was checked)
            if reads != "column":
                value = value[top:bottom]
            if reads != "row":
                value = value[..., left:right]
            item = (item[0], value, *item[2:])
        parts.append(item)
    return parts


def _readable(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return x [rows, k] where TMA can read each quarter, else a copy; k may be more than x has."""
    rows, own = x.shape
    pitch = x.stride(0) if x.stride(1) == 1 else x.stride(1) if x.stride(0) == 1 else 1
    if own == k and pitch % _ALIGNED == 0 and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_empty(rows, k)
    copy[:, :own] = x
    copy[:, own:] = 0
    return copy


# ---- Sums of quarters ----------------------------------------------------------------------------

_SUMS = {
    "strassen_a": "c + d, second = first - a",  # S1 and S2, of A11, A12, A21, A22
    "strassen_b": "c - d, second = a - first",  # T1 and T2, of B22, B21, B12, B11
}
_KERNEL = """
template <typename T> void NAME(T x, T y, T z, T w, T& s1, T& s2, T& s3, T& s4) {
  const float a = x, b = y, c = z, d = w;
  const float first = SUMS;
  s1 = T(first);
  s2 = T(second);
  s3 = T(a - c);
  s4 = T(b - second);
}
"""

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def sums(name: str, quarters: Four) -> Four:
    """Return four sums of quarters by an entry of `_SUMS`, in fp32, rounded once to their type.

    On a GPU this is one launch, whose results lie as the quarters do: K-major or not.
    """
    if quarters[0].stride(0) != 1:
        return _row_major(name, quarters)
    x, y, z, w = (one.t() for one in quarters)
    x, y, z, w = (one.t() for one in _row_major(name, (x, y, z, w)))
    return x, y, z, w


def _row_major(name: str, quarters: Four) -> Four:
    if quarters[0].is_cuda:
        s1, s2, s3, s4 = _kernel(name)(*quarters)
        return s1, s2, s3, s4
    a, b, c, d = (one.float() for one in quarters)
    first = c + d if name == "strassen_a" else c - d
    second = first - a if name == "strassen_a" else a - first
    dtype = quarters[0].dtype
    return first.to(dtype), second.to(dtype), (a - c).to(dtype), (b - second).to(dtype)


@cache
def _kernel(name: str) -> Callable[..., Any]:
    """The launch of an entry of `_SUMS`, which torch compiles for each type and device."""
    code = _KERNEL.replace("NAME", name).replace("SUMS", _SUMS[name])
    function: Callable[..., Any] = torch.cuda.jiterator._create_multi_output_jit_fn(code, 4)
    return function


# ---- How far off it may be -----------------------------------------------------------------------


def strassen_exact(
    a: torch.Tensor, b: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a b as the algorithm has it, in float64 but for the rounding of S and T.

    Also returns what errors of accumulation are relative to, as |a| |b| is of an ordinary product.
    For sizes that are multiples of 8 in each part.
    """
    if levels == 0:
        wide, other = a.double(), b.double()
        return wide @ other, wide.abs() @ other.abs()
    (m, k), n = a.shape, b.shape[1]
    (a11, a12), (a21, a22) = _quarters(a, m // 2, k // 2)
    (b11, b12), (b21, b22) = _quarters(b, k // 2, n // 2)
    s1, s2, s3, s4 = _row_major("strassen_a", (a11, a12, a21, a22))
    t1, t2, t3, t4 = _row_major("strassen_b", (b22, b21, b12, b11))
    factors = (a11, b11), (a12, b21), (s4, b22), (a22, t4), (s1, t1), (s2, t2), (s3, t3)
    parts = [strassen_exact(left, right, levels - 1) for left, right in factors]

    def combined(p: list[torch.Tensor]) -> torch.Tensor:
        p1, p2, p3, p4, p5, p6, p7 = p
        top = torch.cat([p1 + p2, p1 + p6 + p5 + p3], dim=1)
        return torch.cat([top, torch.cat([p1 + p6 + p7 + p4, p1 + p6 + p7 + p5], dim=1)])

    exact, magnitude = (combined([pair[i] for pair in parts]) for i in range(2))
    return exact, magnitude


def error_share(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, levels: int) -> float:
    """Return the largest error of d = a b by the algorithm, each as a share of its own bound.

    The bound is that of accumulation in fp32 around what the algorithm has, whose S and T are
    rounded, and around a b where rows and columns are left over. No level: the ordinary product.
    """
    least = _ALIGNED << levels
    (m, n), k = d.shape, a.shape[1]
    m, n, fill = m - m % least, n - n % least, (0, -k % least)
    exact, error = strassen_exact(a, b, 0)
    error *= accumulated(a.dtype, k)
    left = torch.nn.functional.pad(a[:m], fill)
    right = torch.nn.functional.pad(b[:, :n].t(), fill).t()
    inner, magnitude = strassen_exact(left, right, levels)
    additions = 4 * levels * ROUNDOFF
    exact[:m, :n] = inner
    error[:m, :n] = (accumulated(a.dtype, left.shape[1] >> levels) + additions) * magnitude
    unit = unit_roundoff(d.dtype)
    smallest = torch.finfo(d.dtype).tiny if unit else 0.0
    return largest_share(d, exact, error + unit * (exact.abs() + error + smallest))


def normwise_error(dtype: torch.dtype, k: int, levels: int) -> float:
    """Return c of the bound max |D - a b| <= c k max |a| max |b|, before D is rounded.

    A level rounds S and T to `dtype`, with unit roundoff u: c(L) = 9 (1 + u)^2 c(L - 1) + 17 u +
    8.5 u^2, where c(0) is that of the tensor core's accumulation and of additions in fp32.
    """
    unit = unit_roundoff(dtype)
    error = accumulated(dtype, k >> levels) + 4 * ROUNDOFF
    for _ in range(levels):
        error = 9 * (1 + unit) ** 2 * error + 17 * unit + 8.5 * unit**2
    return error


# ---- Explained -----------------------------------------------------------------------------------

CROSSOVERS = {
    (
        "NVIDIA H200",
        "strassen",
    ): "its speed over that of the ordinary product is 0.81 at "
    "M = N = K = 8192, 1.04 at 16384, 1.10 at 32768",
    (
        "NVIDIA H200",
        "strassen2",
    ): "its speed over that of the ordinary product is 0.51 at "
    "M = N = K = 8192, 0.86 at 16384, 1.12 at 32768",
}
"""What was measured beside the ordinary product, by GPU kind and algorithm."""


def explanation(call: GemmCall, algorithm: object, gpu: str | None) -> Explanation:
    """Say what a call does by an algorithm, here or on a GPU: its kernel is the first product's."""
    levels = levels_of(algorithm)
    call.require()
    check(call, levels)
    parts = [extent >> levels for extent in (call.a.shape[0], call.b.shape[1], call.a.shape[1])]
    m, n, k = (extent - extent % _ALIGNED for extent in parts)
    first = GemmCall(call.a[:m, :k], call.b[:k, :n], (), None, torch.float32)
    if gpu is None:
        told = Explanation.of(planned(first))
        name = torch.cuda.get_device_name(call.device) if call.device >= 0 else ""
    else:
        there = target(gpu)
        told, name = Explanation.on(there, draft(first, there)), there.gpu
    saved = 100 * (1 - (7 / 8) ** levels)
    unknown = "its crossover with the ordinary product was not measured here"
    measured = CROSSOVERS.get((name, str(algorithm)), unknown)
    reason = (
        f"{algorithm}: {7**levels} products of {m}x{n}x{k}, {saved:.1f} % fewer multiplications; "
        f"{measured}; its first product: {told.reason}"
    )
    return replace(told, reason=reason)


# ---- Operators -----------------------------------------------------------------------------------

_OPTIONS = 4  # what follows the product's arguments: those of gradients, and levels


def _run(*values: Any) -> torch.Tensor:
    call, levels = GemmCall.crossed(*values[:WIDTH]), values[-1]
    checked = check(call, levels)
    out = call.a.new_empty(checked.out_shape, dtype=checked.out_dtype)
    _compute(call, checked, levels, out)
    return out


def _run_out(*values: Any, out: torch.Tensor) -> None:
    call, levels = GemmCall.crossed(*values[:WIDTH], out=out), values[-1]
    _compute(call, check(call, levels), levels, out)


def _fake(*values: Any) -> torch.Tensor:
    return GemmCall.crossed(*values[:WIDTH]).fake()


def _fake_out(*values: Any, out: torch.Tensor) -> None:
    return None


def _refuse_grad(*values: Any, out: torch.Tensor) -> None:
    GemmCall.crossed(*values[:WIDTH], out=out).refuse()


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
    product, options = inputs[:WIDTH], inputs[WIDTH:-1]
    operators.save(ctx, (*product, [], [], *options), output)


def _backward(ctx: Any, *arriving: Any) -> tuple[object, ...]:  # noqa: ANN401
    return (*operators.backward(ctx, *arriving)[:WIDTH], *[None] * _OPTIONS)


def _refuse_vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> NoReturn:  # noqa: ANN401
    raise ProblemError(
        "algorithm strassen inside of torch.func's vmap",
        rule="must be of matrices: batches are not divided",
        fix="leave algorithm out",
    )


_PRODUCT = schema_of(PRODUCT)
register(
    "gemm_strassen",
    f"{_PRODUCT}, {schema_of(GRADIENT)}, int levels",
    returns="Tensor",
    run=_run,
    fake=_fake,
    backward=_backward,
    save=_save,
    vmap=_refuse_vmap,
)
register(
    "gemm_strassen_out",
    f"{_PRODUCT}, int levels",
    returns="()",
    run=_run_out,
    fake=_fake_out,
    written={"out": "Tensor(a!)"},
    refuse=_refuse_grad,
)
