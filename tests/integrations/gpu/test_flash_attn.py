"""FlashAttention's functions on a GPU: every case of the CPU, more tiles, no copy, and streams."""

from __future__ import annotations

from dataclasses import replace

import flash_attn_cases as cases
import pytest
import torch
from flash_attn_cases import CASES, FUNCTIONS, Lengths

import warploom
import warploom.flash_attn as flash
from warploom.errors import ProblemError

pytestmark = pytest.mark.gpu
over_functions = pytest.mark.parametrize("name", FUNCTIONS)
LONG: dict[str, Lengths] = {
    "": ((257, 513), (257, 513)),
    "kvpacked": ((513, 257), (513, 257)),
    "qkvpacked": ((389, 389), (389, 389)),
}
PACKED_LONG: dict[str, Lengths] = {
    "": ((1, 300), (257, 513), (130, 70)),
    "kvpacked": ((513, 1), (0, 5), (129, 640)),
    "qkvpacked": ((389, 389), (1, 1), (256, 256)),
}


def one(name: str, variant: str = "causal") -> cases.Case:
    return CASES[f"{name}, {variant}"]


def leaves(case: cases.Case) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in case.given(case.operands("cuda"))]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_within_their_bounds_of_float64(name: str) -> None:
    cases.verify(CASES[name], "cuda")


@over_functions
@pytest.mark.parametrize("dim", [40, 64, 111, 128, 256])
@pytest.mark.parametrize(
    "variant", ["plain", "causal", "window", "softcap", "slopes", "slopes of batches"]
)
def test_no_tile_is_lost_of_longer_sequences(name: str, dim: int, variant: str) -> None:
    case = one(name, variant)
    lengths = (PACKED_LONG if case.varlen else LONG)[case.packing]
    cases.verify(replace(case, lengths=lengths, dim=dim), "cuda")


@over_functions
@pytest.mark.parametrize("variant", ["causal", "slopes"])
def test_nothing_is_copied(name: str, variant: str) -> None:
    """What lies together is read and written where it lies."""
    case = one(name, variant)
    given = leaves(case)
    copies = warploom.counters.copies
    out = case.call(*given)
    torch.autograd.grad(out, given, torch.randn_like(out))
    assert warploom.counters.copies == copies


@over_functions
def test_a_gradient_that_arrives_in_another_order_is_read_as_it_lies(name: str) -> None:
    case = one(name)
    given = leaves(case)
    out = case.call(*given, deterministic=True)
    dense = torch.randn_like(out)
    other = torch.empty(2, *out.shape[::-1], dtype=out.dtype, device="cuda")[0].permute(
        *reversed(range(out.dim()))
    )
    other.copy_(dense)
    found = torch.autograd.grad(out, given, other, retain_graph=True)
    wanted = torch.autograd.grad(out, given, dense)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@over_functions
def test_deterministic_gradients_are_bit_equal(name: str) -> None:
    case = one(name)
    lengths = (PACKED_LONG if case.varlen else LONG)[case.packing]
    case = replace(case, lengths=lengths, heads=9, heads_k=9 if "qkv" in name else 3)
    given = leaves(case)
    out = case.call(*given, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, given, dout, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, given, dout, retain_graph=True)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@over_functions
def test_both_passes_run_on_the_stream_of_the_call(name: str) -> None:
    case = one(name)
    given = leaves(case)
    stream = torch.cuda.Stream()

    def gradients(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = case.call(*tensors, deterministic=True)
        return torch.autograd.grad(out.float().sum(), tensors)

    wanted = gradients(given)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = [(tensor.detach() * 1).requires_grad_() for tensor in given]
        found = gradients(late)
    stream.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@over_functions
def test_a_compiled_model_computes_the_same(name: str) -> None:
    torch._dynamo.reset()
    case = one(name, "causal window")
    given = leaves(case)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = case.call(*tensors, deterministic=True)
        return result

    wanted, found = layer(*given), torch.compile(layer, fullgraph=True)(*given)
    assert torch.equal(found, wanted)
    dout = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(o, given, dout) for o in (found, wanted)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_lengths_that_only_the_gpu_knows_are_refused() -> None:
    """Reading them would wait for the GPU in every layer."""
    case = one("varlen")
    given = case.given(case.operands("cuda"))
    starts = case.offsets("cuda")
    longest = torch.tensor(70, device="cuda")
    with pytest.raises(ProblemError, match="max_seqlen_q, a tensor on cuda:0: must be an int"):
        flash.flash_attn_varlen_func(*given, *starts, longest, 70)  # type: ignore[arg-type]
