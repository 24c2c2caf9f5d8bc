"""What wider operations of products cost: epilogues, promoted sums, 8-bit outputs, batches.

Each cell holds one beside what it would replace: the product without its epilogue, fast sums, an
output in bf16, torch.bmm, torch.mm with an addition after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._products import TYPES, Shape, floor, ours, sets
from benchmarks.peers.libraries.torch_kernels import cublas
from warploom.generator.configurations import cells
from warploom.generator.epilogue import Activation, Amax, Bias, Residual, Scale
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.reference import error_share
from warploom.runtime.trial import wrong

Contenders = Callable[[GemmOperation, Shape, Asked], list[Contender]]


def fused(_asked: Asked) -> Iterator[Case]:
    """A layer with scale, bias, gelu and residual."""
    steps = (Scale("device"), Bias("bf16"), Activation("gelu_tanh"), Residual("bf16"))
    operation = replace(TYPES["bf16"], epilogue=steps)
    told = "scale, bias, gelu_tanh, residual"
    yield _case("fused epilogue", operation, _trained(), _fused, type="bf16", epilogue=told)


def operations(_asked: Asked) -> Iterator[Case]:
    """Every cell of the wider operations."""
    listed = cells()["gemm"]
    squares: list[Shape] = [(m, n, k) for m, n, k in listed["squares"]]
    fast = TYPES["e4m3"]
    for shape in squares:
        yield _case(
            f"promoted {_text(shape)}", replace(fast, accumulation="promoted"), shape, _promoted
        )
    steps = (Scale("device"), Amax(), Scale("device"))
    for kind in ("bf16", "e4m3"):
        operation = replace(TYPES[kind], d="e4m3", epilogue=steps)
        for shape in (_trained(), *squares):
            yield _case(f"quantised {kind} {_text(shape)}", operation, shape, _quantised)
    for batch, m, n, k in listed["batched"]:
        operation = replace(TYPES["bf16"], layout_b="row", batched=True)
        name = f"batch {batch} {m}x{n}x{k}"
        yield _case(name, operation, (m, n, k), partial(_batched, batch), batch=batch)
    m, n, k = _trained()
    operation = GemmOperation("bf16", "bf16", "fp32", "col", "row")
    yield _case(f"in place {_text((n, k, m))}", operation, (n, k, m), _in_place)


def _case(
    name: str, operation: GemmOperation, shape: Shape, contenders: Contenders, **about: object
) -> Case:
    batches = int(str(about.get("batch", 1)))
    problem = {**dict(zip("mnk", shape, strict=True)), **about}
    return Case(
        name, problem, floor(operation, shape, batches), partial(contenders, operation, shape)
    )


def _trained() -> Shape:
    m, n, k = cells()["gemm"]["trained"]
    return m, n, k


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _fused(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    small = ("scale", torch.tensor([0.02], device=asked.device))
    given = [
        replace(one, listed=(small, *one.listed[1:]))
        for one in sets(operation, shape, asked.device)
    ]
    plain, bare = TYPES["bf16"], [replace(one, listed=()) for one in given]
    peer = replace(cublas(plain, bare), peer=False)
    return [ours(operation, given, "fused"), ours(plain, bare, "plain"), peer]


def _promoted(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    given = sets(operation, shape, asked.device)
    return [ours(operation, given, "promoted"), ours(TYPES["e4m3"], given, "fast")]


def _quantised(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    given = sets(operation, shape, asked.device)
    plain = replace(operation, d="bf16", epilogue=operation.epilogue[:1])
    scaled = [replace(one, listed=one.listed[:1], out=one.out.bfloat16()) for one in given]
    return [ours(operation, given, "e4m3 with amax"), ours(plain, scaled, "bf16")]


def _batched(batch: int, operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    one = sets(operation, shape, asked.device, batch)[0]

    def contender(name: str, function: Callable[..., object]) -> Contender:
        out = wrong(one.out)
        calls = [lambda: function(one.a, one.b, out=out)]
        return Contender(name, calls, lambda: error_share(out, one.a, one.b))

    return [contender("warploom", warploom.gemm), contender("torch.bmm", torch.bmm)]


def _in_place(operation: GemmOperation, shape: Shape, asked: Asked) -> list[Contender]:
    """The gradient of a weight, added to fp32 memory: in the kernel, and after torch.mm."""
    one = sets(operation, shape, asked.device)[0]
    sums = torch.zeros_like(one.out)
    peers_sums, gradient = torch.zeros_like(sums), torch.empty_like(sums, dtype=torch.bfloat16)

    def ours_in_place() -> None:
        warploom.gemm(one.a, one.b, out=sums, residual=sums, out_dtype=sums.dtype)

    def after() -> None:
        torch.mm(one.a, one.b, out=gradient)
        peers_sums.add_(gradient)

    def share() -> float:
        before = torch.ones_like(sums)
        sums.copy_(before)
        ours_in_place()
        return error_share(sums, one.a, one.b, (("residual", before, 1.0),))

    return [
        Contender("in place", [ours_in_place], share),
        Contender("torch.mm and add_", [after], lambda: error_share(gradient, one.a, one.b)),
    ]
