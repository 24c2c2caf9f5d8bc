"""GEMMs to be measured: operands, the calls of Warploom and of a library, and their check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.protocol import rotated
from warploom.generator.elements import element
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.reference import error_share
from warploom.runtime.families.gemm.samples import GemmData, Operands
from warploom.runtime.trial import wrong

Shape = tuple[int, int, int]  # m, n, k
Product = Callable[[GemmOperation, Operands, torch.Tensor], object]  # into the last
Peer = Callable[[GemmOperation, Sequence[Operands]], Contender]

TYPES = {
    "bf16": GemmOperation("bf16", "bf16", "bf16"),
    "e4m3": GemmOperation("e4m3", "e4m3", "bf16", epilogue=(Scale("device"), Scale("device"))),
    "e4m3_row_column": GemmOperation(
        "e4m3", "e4m3", "bf16", epilogue=(Scale("row"), Scale("column"))
    ),
    "int8": GemmOperation("int8", "int8", "int32"),
}


def sets(operation: GemmOperation, shape: Shape, device: str, batches: int = 1) -> list[Operands]:
    """Random operands, as many sets as outlast the GPU's L2 cache when used in turn."""
    data = GemmData(operation, GemmShape(*shape, batches), device, 0)
    return rotated(data.operands, batches * moved(operation, shape), device)


def moved(operation: GemmOperation, shape: Shape) -> int:
    """The bytes of A, B and D of one product."""
    m, n, k = shape
    return (m + n) * k * element(operation.a).bytes + m * n * element(operation.d).bytes


def floor(operation: GemmOperation, shape: Shape, batches: int = 1, further: int = 0) -> Floor:
    """The floor of products D[m, n] = A[m, k] B[k, n]; each matrix is moved once, as `further`."""
    m, n, k = shape
    work, size = 2 * m * n * k * batches, batches * moved(operation, shape) + further
    return Floor.of(work, size, element(operation.a).bits)


def ours(
    operation: GemmOperation,
    given: Sequence[Operands],
    name: str = "warploom",
    spec: KernelSpec | None = None,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    outs = [wrong(one.out) for one in given]
    options: Any = {"use_fast_accum": operation.accumulation == "fast", "spec": spec}
    calls = [
        partial(warploom.gemm, one.a, one.b, out=out, epilogue=one.listed, **options)
        for one, out in zip(given, outs, strict=True)
    ]

    def told() -> tuple[str, str]:
        one = given[0]
        found = warploom.explain(one.a, one.b, out=outs[0], epilogue=one.listed, **options)
        return found.kernel, found.reason

    return Contender(name, calls, partial(worst, operation, given, outs), told)


def baseline(
    name: str,
    call: Product,
    operation: GemmOperation,
    given: Sequence[Operands],
    *,
    checked: int | None = None,
) -> Contender:
    """A library on each set of operands; the results of the first `checked` are held, or of all."""
    outs = [wrong(one.out) for one in given]
    calls = [partial(call, operation, one, out) for one, out in zip(given, outs, strict=True)]
    share = partial(worst, operation, given[:checked], outs[:checked])
    return Contender(name, calls, share, peer=True)


def prepared_baseline(
    name: str,
    operation: GemmOperation,
    given: Sequence[Operands],
    prepare: Callable[[Operands, torch.Tensor], Callable[[], object]],
    outs: Sequence[torch.Tensor],
) -> Contender:
    """A library that lays operands out as it wants them when it is first called, untimed.

    `prepare` returns what is timed of a set of operands and its output, or says why it cannot.
    """
    ready: dict[int, Callable[[], object]] = {}

    def call(index: int) -> None:
        if index not in ready:
            ready[index] = prepare(given[index], outs[index])
        ready[index]()

    shown = [out[: one.out.shape[0]] for one, out in zip(given, outs, strict=True)]
    calls = [partial(call, index) for index in range(len(given))]
    return Contender(name, calls, lambda: worst(operation, given, shown), peer=True)


def require_bf16(name: str, operation: GemmOperation) -> None:
    """Raise RuntimeError for another type, which a library is not measured with."""
    if operation.a != "bf16":
        raise RuntimeError(f"{name}: not for {operation.a} here")


def worst(
    operation: GemmOperation, given: Sequence[Operands], outs: Sequence[torch.Tensor]
) -> float:
    """The largest error of the outputs of all sets, as a share of its bound."""
    return max(
        error_share(out, one.a, one.b, one.listed, operation.accumulation)
        for one, out in zip(given, outs, strict=True)
    )
