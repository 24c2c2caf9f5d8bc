"""Contenders of a product: Warploom, cuBLAS as torch calls it, QuACK, Triton as torch writes it.

One whose package is missing, or that does not compute this type, says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

import warploom
from benchmarks.peers._triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.elements import element
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.reference import error_share
from warploom.runtime.families.gemm.samples import GemmData, Operands
from warploom.runtime.measure import Call
from warploom.runtime.trial import wrong

Shape = tuple[int, int, int]  # m, n, k
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


def floor(operation: GemmOperation, shape: Shape, batches: int = 1) -> Floor:
    """The floor of products D[m, n] = A[m, k] B[k, n], each matrix moved once."""
    m, n, k = shape
    work, size = 2 * m * n * k * batches, batches * moved(operation, shape)
    return Floor.of(work, size, element(operation.a).bits)


def ours(
    operation: GemmOperation,
    given: Sequence[Operands],
    name: str = "warploom",
    spec: KernelSpec | None = None,
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel."""
    outs = [wrong(one.out) for one in given]
    options: Any = {"accumulation": operation.accumulation, "spec": spec}
    calls = [
        partial(warploom.gemm, one.a, one.b, out=out, epilogue=one.listed, **options)
        for one, out in zip(given, outs, strict=True)
    ]

    def told() -> tuple[str, str]:
        one = given[0]
        found = warploom.explain(one.a, one.b, out=outs[0], epilogue=one.listed, **options)
        return found.kernel, found.reason

    return Contender(name, calls, partial(worst, operation, given, outs), told)


def torchs(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """torch.mm, torch._scaled_mm with fast sums, or torch._int_mm: cuBLAS."""
    name = {"e4m3": "torch._scaled_mm", "int8": "torch._int_mm"}.get(operation.a, "torch.mm")
    outs = [wrong(one.out) for one in given]

    def call(one: Operands, out: torch.Tensor) -> object:
        if name == "torch._scaled_mm":
            scales = [tensor for _, tensor in one.listed]
            if operation.epilogue[0] == Scale("row"):
                scales = [scales[0][:, None], scales[1][None]]
            kinds: Any = {"out_dtype": out.dtype, "use_fast_accum": True}
            return torch._scaled_mm(
                one.a, one.b, scale_a=scales[0], scale_b=scales[1], out=out, **kinds
            )
        return (torch._int_mm if name == "torch._int_mm" else torch.mm)(one.a, one.b, out=out)

    calls = [partial(call, one, out) for one, out in zip(given, outs, strict=True)]
    return Contender(name, calls, partial(worst, operation, given, outs), peer=True)


def quack(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """QuACK's GEMM, tuned by itself."""
    outs = [wrong(one.out) for one in given]

    def call(one: Operands, out: torch.Tensor) -> None:
        _require_bf16("quack", operation)
        try:
            interface: Any = import_module("quack.gemm_interface")
        except Exception as error:  # a release for another CUTLASS DSL fails in its own ways
            raise RuntimeError(f"quack: {type(error).__name__}: {error}") from error
        interface.gemm(one.a, one.b, out=out, tuned=True)

    calls = [partial(call, one, out) for one, out in zip(given, outs, strict=True)]
    return Contender("quack", calls, partial(worst, operation, given[:1], outs[:1]), peer=True)


def triton(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """A product in Triton, tuned by torch's compiler."""
    product = compiled(lambda: torch.mm, tuned=True)

    def call(one: Operands) -> torch.Tensor:
        _require_bf16("triton", operation)
        return product(one.a, one.b)

    calls: list[Call] = [partial(call, one) for one in given]
    first = given[0]
    return Contender("triton", calls, lambda: error_share(call(first), first.a, first.b), peer=True)


def _require_bf16(name: str, operation: GemmOperation) -> None:
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


PEERS: dict[str, Peer] = {"cublas": torchs, "triton": triton, "quack": quack}
