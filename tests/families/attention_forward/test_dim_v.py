"""v of another head dimension than q and k, in both passes on the CPU, and which kernels it has."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator import names
from warploom.generator.families import family
from warploom.generator.families._attention import (
    DIMS,
    GRADIENT_DIMS,
    UNLIKE_DIMS,
    AttentionShape,
)
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.launches import NO_GPU
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime.dispatch import choose
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_backward.call import plan as plan_backward
from warploom.runtime.families.attention_forward.call import AttentionCall

ARCH = "sm_90a"
over_families = pytest.mark.parametrize("name", ["attention_forward", "attention_backward"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def operands(dim: int, dim_v: int, heads: int = 4) -> tuple[torch.Tensor, ...]:
    """q, k and v of 2 batches, of 37 rows and columns, that require grad."""
    shapes = ((heads, dim), (2, dim), (2, dim_v))
    return tuple(random(2, h, 37, d, seed=at).requires_grad_() for at, (h, d) in enumerate(shapes))


@pytest.mark.parametrize(("dim", "dim_v"), [*UNLIKE_DIMS, (40, 64), (160, 24), (256, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_is_torchs_and_lies_as_q_does(dim: int, dim_v: int, causal: bool) -> None:
    q, k, v = (one.detach() for one in operands(dim, dim_v))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = warploom.attention(q, k, v, causal=causal, return_lse=True)
    expected = scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)
    assert lse.shape == (2, 4, 37)
    assert out.transpose(1, 2).is_contiguous()
    plan = warploom.plan_attention(q, k, v, causal=causal)
    for _ in range(2):  # warm, too
        assert torch.equal(plan(q, k, v, causal=causal)[0], out)
        assert torch.equal(warploom.attention(q, k, v, causal=causal), out)
    room = torch.empty_like(out)
    assert warploom.attention(q, k, v, causal=causal, out=room) is room
    assert torch.equal(room, out)


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"window": (5, 2), "softcap": 3.0}])
@pytest.mark.parametrize(("dim", "dim_v"), [(192, 128), (96, 64), (24, 16)])
def test_gradients_are_those_of_padded_tensors(
    dim: int, dim_v: int, keywords: dict[str, Any]
) -> None:
    tensors = operands(dim, dim_v)
    sinks = random(4, seed=9).requires_grad_()
    whole = [pad(one.detach(), (0, dim - one.shape[-1])).requires_grad_() for one in tensors]
    out = warploom.attention(*tensors, sinks=sinks, **keywords)
    wide = warploom.attention(*whole, sinks=sinks, **keywords)
    assert torch.equal(out, wide[..., :dim_v])
    dout = random(*out.shape, seed=5)
    found = torch.autograd.grad(out, (*tensors, sinks), dout)
    expected = torch.autograd.grad(wide, (*whole, sinks), pad(dout, (0, dim - dim_v)))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted[..., : got.shape[-1]], atol=1e-2, rtol=1e-2)


def test_packed_sequences_have_gradients_of_their_shapes() -> None:
    shapes = ((4, 192), (2, 192), (2, 128))
    q, k, v = (random(33, h, d, seed=h + d).requires_grad_() for h, d in shapes)
    ends = torch.tensor([0, 10, 10, 33], dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 23, "max_seqlen_k": 23}
    out = warploom.attention(q, k, v, causal=True, **lengths)  # type: ignore[arg-type]
    assert out.shape == (33, 4, 128)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert [one.shape for one in found] == [q.shape, k.shape, v.shape]
    alone = warploom.attention(*(t[10:].transpose(0, 1)[None] for t in (q, k, v)), causal=True)
    torch.testing.assert_close(out[10:], alone[0].transpose(0, 1))


def test_compiled_graphs_know_the_shapes_of_results_and_gradients() -> None:
    tensors = operands(96, 64)

    def layer(*given: torch.Tensor) -> torch.Tensor:
        return warploom.attention(*given, causal=True) * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(function(*tensors).float().square().sum(), tensors)
        for function in (compiled, layer)
    )
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "dim of v": ((random(1, 2, 5, 64), random(1, 2, 5, 64), random(1, 2, 5, 12)), {}, "12 of v"),
    "dim of k": ((random(1, 2, 5, 64), random(1, 2, 5, 32), random(1, 2, 5, 64)), {}, "of q"),
    "out": (
        (random(1, 2, 5, 96), random(1, 2, 5, 96), random(1, 2, 5, 64)),
        {"out": random(1, 2, 5, 96)},
        r"must be \[1, 2, 5, 64\]",
    ),
    "8 bits": (
        (*[random(1, 2, 5, 96).to(torch.float8_e4m3fn)] * 2, random(1, 2, 5, 64)),
        {"q_descale": torch.ones(1, 2), "k_descale": torch.ones(1, 2)},
        "no kernel of 8 bits has v of another dimension",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(name: str) -> None:
    tensors, keywords, words = REFUSED[name]
    with pytest.raises(ProblemError, match=words):
        warploom.attention(*tensors, **keywords)


@pytest.mark.parametrize(("dim", "dim_v"), [(256, 128), (64, 128), (192, 136)])
def test_gradients_without_a_kernel_are_refused_by_the_forward_pass(dim: int, dim_v: int) -> None:
    tensors = operands(dim, dim_v)
    for _ in range(2):
        with pytest.raises(ProblemError, match=r"where the dimensions differ.*192 and 128"):
            warploom.attention(*tensors)
    with torch.no_grad():
        assert warploom.attention(*tensors).shape[-1] == dim_v
        plan = warploom.plan_attention(*tensors)
    # What is told of such a call has no kernel of gradients.
    assert warploom.explain(plan).gradients is None
    assert warploom.explain(*tensors, gpu="h200").gradients is None


def test_a_plan_tells_v_by_its_dimension() -> None:
    q, k, v = (one.detach() for one in operands(128, 64))
    plan = warploom.plan_attention(q, k, v)
    with pytest.raises(ProblemError, match="that the plan was made for"):
        plan(q, k, k)


# ---- Kernels -------------------------------------------------------------------------------------


@over_families
@pytest.mark.parametrize("dim", [64, 128])
def test_the_dimension_of_all_tensors_is_no_other_operation(name: str, dim: int) -> None:
    kind = family(name).operation
    plain, written = kind("bf16", dim), kind("bf16", dim, dim_v=dim)
    assert plain == written
    assert choose(plain, AttentionShape(1, 2, 2, 64, 64, dim)).spec.digest == (
        choose(written, AttentionShape(1, 2, 2, 64, 64, dim)).spec.digest
    )


@pytest.mark.parametrize(
    ("name", "dims", "pairs"),
    [
        ("attention_forward", (64, 128), UNLIKE_DIMS),
        ("attention_backward", (128,), GRADIENT_DIMS),
    ],
)
def test_other_pairs_are_refused_by_name(
    name: str, dims: tuple[int, ...], pairs: tuple[tuple[int, int], ...]
) -> None:
    described = family(name)
    for dim, dim_v in product(DIMS, dims):
        reasons = described.operation_faults(described.operation("bf16", dim, dim_v=dim_v))
        assert (reasons == []) == (dim == dim_v or (dim, dim_v) in pairs)
        assert all(f"dim {dim} with dim_v {dim_v}" in reason for reason in reasons)
    assert described.operation_faults(described.operation("bf16", 192, dim_v=96))


def test_no_kernel_of_8_bits_has_another_dimension_of_v() -> None:
    wanted = AttentionOperation("bf16", 128, dim_v=64, scores="e4m3", weights="e4m3")
    (reason,) = family("attention_forward").operation_faults(wanted)
    assert reason == "dim_v 64 with scores e4m3: no kernel has both"


def test_blocks_that_sum_gradients_together_are_of_one_dimension() -> None:
    described = family("attention_backward")
    wanted = described.operation("bf16", 192, dim_v=128)
    schedule = described.schedule(64, 64, stages=1, overlap=False, cluster=4)
    with pytest.raises(SpecificationError, match="cluster 4 with dim_v 128"):
        KernelSpec(ARCH, wanted, schedule)


@over_families
def test_names_are_read_back(name: str) -> None:
    kind = family(name).operation
    wanted = kind("fp16", 192, "causal", dim_v=128)
    spec = choose(wanted, AttentionShape(1, 2, 2, 64, 64, 192)).spec
    assert "_dim192_causal_v128_" in spec.name
    arch, operation, schedule = (
        names.read(spec.name, wanted.family, kind, type(spec.schedule)) or ()
    )
    assert KernelSpec(arch, operation, schedule) == spec


def test_shared_memory_and_maps_are_of_each_tensors_dimension() -> None:
    q, k, v = (one.detach() for one in operands(176, 120))
    call = AttentionCall(q, k, v, causal=True)
    plan = warploom.plan_attention(q, k, v, causal=True)
    problem = cast("Any", call.draft(NO_GPU)).problem
    assert (problem.dim, problem.dim_v) == (176, 120)
    spec = plan.choice.spec
    assert (spec.operation.dim, spec.operation.dim_v) == (192, 128)  # type: ignore[attr-defined]
    layout: Any = family("attention_forward").layout(spec)
    assert (layout.kv_bytes, layout.v_bytes) == (128 * 192 * 2, 128 * 128 * 2)
    (launch,) = family("attention_forward").launches(spec, problem, NO_GPU)
    maps = {one.tensor: one for one in launch.parameters.values() if isinstance(one, TensorMap)}
    assert {name: one.extents[0] for name, one in maps.items()} == {"q": 176, "k": 176, "v": 120}
    out, lse = warploom.attention(q, k, v, causal=True, return_lse=True)
    backward = plan_backward(BackwardCall(call, out, lse, torch.zeros_like(out)))
    assert backward.choice.spec.operation.dim_v == 128  # type: ignore[attr-defined]
