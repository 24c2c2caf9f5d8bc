"""Tensors that torch has negated lazily: kernels get the addresses of resolved copies.

Memory of `torch._neg_view(x)`, and of the imaginary part of a conjugate, holds the values with the
other sign. Every address passes a plan, so that these tests pretend a GPU and look at addresses.
"""

from __future__ import annotations

import pytest
import torch
from negated_calls import CASES, READ, WRITTEN, K, M, N, quantized, random
from pretended_gpu import PretendedGpu, gpu

import warploom
from warploom.errors import ProblemError
from warploom.quantization import PackedWeight
from warploom.runtime.counters import counters

__all__ = ["gpu"]


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.as_strided((tensor.numel(),), (1,))  # as it is stored
    return dense.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("case", "name"), READ)
@pytest.mark.parametrize("first", ["negated", "plain"])
def test_kernels_read_a_resolved_copy(gpu: PretendedGpu, case: str, name: str, first: str) -> None:
    """Kernels read memory of the wrong sign, in warm calls too: at the addresses of plain ones."""
    one, given = CASES[case], CASES[case].made()
    plain = given[name]
    address, negated = plain.data_ptr(), torch._neg_view(plain)
    assert negated.data_ptr() == address
    if first == "plain":
        one.call(**given)
    launches = gpu.launches
    for _ in range(3):
        del launches[:]
        before = counters.copies
        one.call(**{**given, name: negated})
        assert launches
        assert not any(address in at.values() for at in launches)
        assert counters.copies > before
        del launches[:]
        one.call(**given)
        places = {kernel for at in launches for kernel, found in at.items() if found == address}
        assert places, "the operand itself is read where it is plain"
    gpu.sizes = dict.fromkeys(places, plain.numel() * plain.element_size())
    del gpu.read[:]
    one.call(**{**given, name: negated})
    found = {read for at in gpu.read for read in at.values()}
    assert bytes_of(negated.resolve_neg()) in found


@pytest.mark.parametrize(("case", "name"), WRITTEN)
def test_what_is_written_must_not_be_negated(gpu: PretendedGpu, case: str, name: str) -> None:
    """What a kernel writes there would be read by torch with the other sign."""
    one, given = CASES[case], CASES[case].made()
    one.call(**given)
    del gpu.launches[:]
    with pytest.raises(ProblemError, match=rf"^{name} .*negated lazily.*resolve_neg"):
        one.call(**{**given, name: torch._neg_view(given[name])})
    assert not gpu.launches


def test_gradients_are_not_added_to_a_negated_tensor() -> None:
    """The same of main gradients, which are written in the backward pass."""
    a, b = random(M, K).requires_grad_(), random(K, N).requires_grad_()
    into = torch._neg_view(torch.zeros(K, N))
    with pytest.raises(ProblemError, match=r"^main_grad .*negated lazily"):
        warploom.gemm(a, b, main_grad=into)


def test_a_type_that_torch_cannot_negate_is_refused(gpu: PretendedGpu) -> None:
    """torch raises NotImplementedError for 8-bit floats, of which it makes such views."""
    fp8 = random(M, K).to(torch.float8_e4m3fn)
    with pytest.raises(ProblemError, match=r"^a of torch.float8_e4m3fn .*torch negates"):
        warploom.gemm(torch._neg_view(fp8), random(N, K).to(torch.float8_e4m3fn).t())


def test_a_negated_quantized_weight_is_refused() -> None:
    """It is read as it is stored."""
    weight = quantized(torch.device("cpu"))
    negated = PackedWeight(torch._neg_view(weight.data), weight.metadata)
    warploom.mixed_gemm(random(M, K), weight)
    with pytest.raises(ProblemError, match=r"^weight.data .*negated lazily"):
        warploom.mixed_gemm(random(M, K), negated)


def test_the_imaginary_part_of_a_conjugate_is_resolved(gpu: PretendedGpu) -> None:
    """The view that users have, whose strides are 2: one copy serves both."""
    values = torch.randn(M, K, dtype=torch.complex64)
    residual = values[:, :N].conj().imag
    assert residual.is_neg() and residual.stride(-1) == 2
    before = counters.copies
    warploom.gemm(random(M, K), random(K, N), residual=residual)
    assert counters.copies == before + 1


def test_an_explanation_tells_of_the_copy() -> None:
    """`copies` lists what is resolved, here and for a GPU that is named."""
    a, b = random(M, K), random(N, K).t()
    assert warploom.explain(a, b).copies == ()
    for keywords in ({}, {"gpu": "NVIDIA H200"}):
        assert warploom.explain(torch._neg_view(a), b, **keywords).copies == ("a",)
