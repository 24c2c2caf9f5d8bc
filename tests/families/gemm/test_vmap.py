"""torch.func.vmap of gemm, eager and compiled: one product of all examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gemm_gradients import FP32, K, M, N, leaf, random, scales

import warploom
from warploom.errors import ProblemError

V = 3
Dims = tuple[int | None, ...]


def items(bias: torch.Tensor, row: torch.Tensor, c: torch.Tensor, one: torch.Tensor) -> list[Any]:
    return [
        ("scale_a", row),
        ("bias", bias),
        ("activation", "silu"),
        ("residual", c, 0.5),
        ("scale_d", one),
    ]


def layer(a: torch.Tensor, b: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    return warploom.gemm(a, b, epilogue=items(*given) if given else [], out_dtype=FP32)


OPERANDS: dict[str, tuple[Dims, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "a": ((0, None), lambda: (random(V, M, K), random(K, N))),
    "a, last": ((2, None), lambda: (random(M, K, V), random(K, N))),
    "b": ((None, 0), lambda: (random(M, K), random(V, N, K).mT)),
    "both": ((1, 0), lambda: (random(M, V, K), random(V, K, N))),
    "batches": ((0, 0), lambda: (random(V, 2, M, K), random(V, K, N))),
    "batches of b": ((0, None), lambda: (random(V, M, K), random(2, K, N))),
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("case", OPERANDS)
def test_examples_are_batches(case: str, backend: str | None) -> None:
    dims, operands = OPERANDS[case]
    given = [leaf(one) for one in operands()]
    mapped = torch.func.vmap(layer, in_dims=dims)
    if backend is not None:
        torch._dynamo.reset()
        mapped = torch.compile(mapped, backend=backend, fullgraph=True)
    found = mapped(*given)
    expected = torch.stack(
        [
            layer(*(t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)))
            for i in range(V)
        ]
    )
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    dd = torch.randn(found.shape)
    for one, other in zip(
        torch.autograd.grad(found, given, dd), torch.autograd.grad(expected, given, dd), strict=True
    ):
        difference = (one.float() - other.float()).norm()  # sums of examples round otherwise
        assert difference <= 0.01 * other.float().norm()


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("batches", [(), (2,)])
def test_any_tensor_of_the_epilogue_may_have_the_dimension(
    which: int, batches: tuple[int, ...]
) -> None:
    shapes = [(*batches, M, K), (K, N), (N,), (M,), (*batches, M, N), (1,)]
    given = [random(*shape) for shape in shapes]
    given[3], given[5] = scales(M), scales(1)
    dims: list[int | None] = [None] * 6
    dims[which] = 0
    dtype = FP32 if which in (3, 5) else torch.bfloat16
    given[which] = random(V, *shapes[which], dtype=dtype).abs()
    found = torch.func.vmap(layer, in_dims=tuple(dims))(*given)
    for i in range(V):
        one = [t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)]
        assert torch.allclose(found[i], layer(*one), rtol=1e-5, atol=1e-5)


def test_vmaps_nest() -> None:
    a, b = random(2, V, M, K), random(V, K, N)
    found = torch.func.vmap(torch.func.vmap(layer), in_dims=(0, None))(a, b)
    assert torch.allclose(found, layer(a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["amax", "main_grad"])
def test_what_all_examples_would_write_to_is_refused(name: str) -> None:
    keywords = {name: torch.zeros(K, N) if name == "main_grad" else torch.zeros(1)}
    b = leaf(random(K, N))
    with pytest.raises(ProblemError, match=f"{name} inside of torch.func's vmap"):
        torch.func.vmap(lambda a: warploom.gemm(a, b, **keywords))(random(V, M, K))


def test_torch_funcs_gradients_are_refused_by_name() -> None:
    with pytest.raises(ProblemError, match="func's grad"):
        torch.func.grad(lambda a: warploom.gemm(a, random(K, N)).sum())(random(M, K))
