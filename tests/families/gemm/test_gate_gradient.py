"""The step that takes a gradient past a gate: what it stores, passes on and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import (
    EpilogueStep,
    Gate,
    GateFunction,
    GateGradient,
    GateLayout,
    Quantize,
)
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._product.epilogue import bind
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps import flatten, step_of, unflatten
from warploom.runtime.families._product.steps.gate import GATES, LAYOUTS, kind_of
from warploom.runtime.families._product.steps.gate_gradient import TorchGateGradient, gradient_kind
from warploom.runtime.families._product.steps.step import Given

BF16 = torch.bfloat16
M, K, N = 11, 24, 16
OVER_GATES = pytest.mark.parametrize("function", GATES)
OVER_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


A, B = drawn(M, K, seed=1), drawn(K, N, seed=2)


def exact(
    z: torch.Tensor, dh: torch.Tensor, function: GateFunction, layout: GateLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate's result and the gradient of z, by torch's autograd in float64."""
    z = z.double().requires_grad_()
    h = apply(z, [(kind_of(layout), function)])
    h.backward(dh.double().reshape(h.shape))
    assert z.grad is not None
    return h.detach(), z.grad


@OVER_LAYOUTS
@OVER_GATES
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("batches", [(), (2, 3)], ids=str)
def test_the_gradient_is_what_autograd_has(
    function: GateFunction, layout: GateLayout, dtype: torch.dtype, batches: tuple[int, ...]
) -> None:
    a, z = drawn(*batches, M, K, seed=1), drawn(*batches, M, 2 * N, seed=3, dtype=dtype)
    dz = torch.full_like(z, torch.nan)
    listed = [("scale", 0.5), (gradient_kind(function, layout), z, dz)]
    d = warploom.gemm(a, B, epilogue=listed, out_dtype=torch.float32)
    h, of_z = exact(z, (a.double() @ B.double()) / 2, function, layout)
    torch.testing.assert_close(d.double(), h, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dz.double(), of_z, rtol=2**-7, atol=1e-3)


@OVER_LAYOUTS
@OVER_GATES
def test_bounds_hold_of_fp32_and_fail_of_a_neighbour(
    function: GateFunction, layout: GateLayout
) -> None:
    """What GPU tests hold kernels against, of the reference in fp32, and of columns in turn."""
    z = drawn(M, 2 * N, seed=3)
    item = (gradient_kind(function, layout), z, torch.empty_like(z))
    x, step = drawn(M, N, seed=4, dtype=torch.float64), TorchGateGradient()
    error = torch.zeros_like(x)
    right, bound = step.written_bound(x, error, item)
    torch.testing.assert_close(right, exact(z, x, function, layout)[1])
    dz = torch.empty(M, 2 * N)
    step.write(x.float(), (item[0], z, dz))
    bound = bound + 2**-22 * right.abs()
    assert ((dz.double() - right).abs() <= bound).all()
    assert not ((dz.double().roll(1, -1) - right).abs() <= bound).all()
    h = step.apply(x, item)
    off = step.error(item, x, h, error) + 2**-22 * h.abs()
    assert ((step.apply(x.float(), item).double() - h).abs() <= off).all()


def test_the_limits_of_swiglu_oai_have_torchs_derivatives() -> None:
    values = torch.tensor([-9.0, -7.0, -6.0, 0.0, 6.0, 7.0, 9.0, 30.0], dtype=BF16)
    z = torch.cat((values.repeat_interleave(8), values.repeat(8)))[None]
    dz, dh = torch.empty_like(z), torch.ones(1, 1, dtype=BF16)
    warploom.gemm(dh, torch.ones(1, 64, dtype=BF16), epilogue=[("swiglu_oai_gate_gradient", z, dz)])
    _, of_z = exact(z, torch.ones(1, 64), "swiglu_oai", "halves")
    torch.testing.assert_close(dz.double(), of_z, rtol=2**-7, atol=1e-6)
    assert ((dz == 0) == (of_z == 0)).all()


def test_slices_of_wider_buffers_are_read_and_stored_in_place() -> None:
    rooms = [torch.full((M + 2, 2 * N + 6), 7.0, dtype=BF16) for _ in range(2)]
    z, dz = (room[1:-1, 3 : 3 + 2 * N] for room in rooms)
    z.copy_(drawn(M, 2 * N, seed=3))
    warploom.gemm(A, B, epilogue=[("silu_gate_gradient", z, dz)])
    torch.testing.assert_close(
        dz.double(), exact(z, A.double() @ B.double(), "silu", "halves")[1], rtol=2**-7, atol=1e-2
    )
    dz.fill_(7)
    assert (rooms[1] == 7).all()


def test_an_operator_takes_z_and_writes_dz() -> None:
    z, dz = drawn(M, 2 * N), drawn(M, 2 * N)
    item = ("gelu_gate_gradient_interleaved", z, dz)
    flat = flatten([item])
    assert (flat.words, flat.numbers) == ([item[0]], [])
    assert flat.tensors[0] is z and flat.written == [(item[0], dz)]
    (again,) = unflatten(flat.words, Given(iter(flat.tensors), iter(()), dict(flat.written)))
    assert again[0] == item[0] and again[1] is z and again[2] is dz


def test_a_compiled_call_stores_what_an_eager_one_does() -> None:
    z, results = drawn(M, 2 * N), [torch.full((M, 2 * N), torch.nan, dtype=BF16) for _ in range(2)]

    def run(dz: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(A, B, epilogue=[("silu_gate_gradient", z, dz)])

    with torch.no_grad():
        eager = run(results[0])
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(results[1])
    assert torch.equal(eager, compiled) and torch.equal(*results)


def test_pairs_are_read_and_stored_where_both_begin_at_one() -> None:
    rooms = torch.zeros(2, M * 2 * N + 1, dtype=BF16)
    for first, second in ((0, 0), (0, 1), (1, 0)):
        z, dz = (
            room[shift:][: M * 2 * N].view(M, 2 * N)
            for room, shift in zip(rooms, (first, second), strict=True)
        )
        bound = bind([("silu_gate_gradient", z, dz)], (), M, N, -1, batched=False)
        paired = all(one.data_ptr() % 4 == 0 for one in (z, dz))
        assert bound.paired is paired


Z = drawn(M, 2 * N)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no dz": ((Z,), "of length 2: an item is"),
    "a number": ((Z, 1.0), "dz of silu_gate_gradient, 1.0: must be a tensor"),
    "z of half the columns": ((Z[:, :N], Z), r"must have shape \[11, 32\]"),
    "z in fp32": ((Z.float(), Z.float()), "of torch.float32: must be fp16 or bf16"),
    "dz in fp32": ((Z, Z.float()), r"must be as z, \[11, 32\] torch.bfloat16"),
    "dz across": ((Z, Z.t().contiguous().t()), "must be as z, .* with strides"),
    "z itself": ((Z, Z), "do not overlap: one is stored"),
    "z for all rows": ((Z[:1].expand(M, 2 * N), Z), "no two elements at one address"),
    "wanting a gradient": ((Z.clone().requires_grad_(), Z), "it is of a gradient itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    tensors, said = REFUSED[name]
    with pytest.raises(ProblemError, match=said):
        warploom.gemm(A, B, epilogue=[("silu_gate_gradient", *tensors)])


def test_odd_widths_and_calls_that_train_are_refused() -> None:
    z = drawn(M, 24)
    with pytest.raises(ProblemError, match="of 12 columns: must be of a multiple of 8"):
        warploom.gemm(A, B[:, :12], epilogue=[("silu_gate_gradient", z, torch.empty_like(z))])
    a = A.clone().requires_grad_()
    with pytest.raises(ProblemError, match="it is of a gradient itself"):
        warploom.gemm(a, B, epilogue=[("silu_gate_gradient", Z, torch.empty_like(Z))])


# ---- Specifications ------------------------------------------------------------------------------


def spec(*steps: EpilogueStep, a: str = "bf16", batched: bool = False, **fields: Any) -> KernelSpec:
    operation = GemmOperation(a, a, a, "row", "col", steps, batched=batched)  # type: ignore[arg-type]
    fields = {"tile": (128, 128, 64), **fields}
    return KernelSpec("sm_90a", operation, family("gemm").complete("sm_90a", operation, fields))


UNGATED = GateGradient("silu", "bf16")
ILLEGAL: dict[str, tuple[tuple[EpilogueStep, ...], dict[str, Any], str]] = {
    "a gate": ((UNGATED, Gate("silu")), {}, "and gate_silu_halves: must be without the other"),
    "another": (
        (UNGATED, GateGradient("relu", "fp16")),
        {},
        "and relu_gate_gradient_fp16_halves: must be at most one gradient of a gate",
    ),
    "quantize": ((UNGATED, Quantize("exact")), {}, "quantize_exact: must be without the other"),
    "clusters of batched gates": (
        (Gate("gelu", "interleaved"),),
        {"batched": True, "cluster": (2, 1), "a": "fp16"},
        r"cluster \(2, 1\) with batched, gate_gelu_interleaved, 2 consumers: must be \(1, 1\)",
    ),
    "a small producer that cuts": (
        (Gate("silu"),),
        {"stream_k": True, "producer_registers": 24},
        "producer_registers 24 with stream_k and a gate: must be 40",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_has_no_registers_or_no_meaning_is_no_kernel(name: str) -> None:
    steps, fields, said = ILLEGAL[name]
    with pytest.raises(SpecificationError, match=said):
        spec(*steps, **fields)


def test_a_name_tells_the_step() -> None:
    kernel = spec(GateGradient("swiglu_oai", "bf16", "interleaved"))
    assert "_swiglu_oai_gate_gradient_bf16_interleaved_" in kernel.name
    assert step_of(("silu_gate_gradient", Z, Z)).step is GateGradient
