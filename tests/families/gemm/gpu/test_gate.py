"""Gated products as users call them: whatever kernel is chosen, in graphs, with gradients."""

from __future__ import annotations

from typing import Any

import gemm_arena as arena
import pytest
import torch

import warploom
from warploom.runtime.families.gemm import reference

pytestmark = pytest.mark.gpu

GATES = ("relu", "gelu", "gelu_tanh", "silu", "swiglu_oai")
LAYOUTS = ("halves", "interleaved")
BF16 = torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype = BF16, limit: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * limit).to(dtype)


def items(gate: str, layout: str, *before: Any) -> list[Any]:
    return [*before, ("gate" if layout == "halves" else "gate_interleaved", gate)]


def verify(a: torch.Tensor, b: torch.Tensor, listed: list[Any], **keywords: Any) -> torch.Tensor:
    copies = warploom.counters.copies
    d = warploom.gemm(a, b, epilogue=listed, **keywords)
    assert warploom.counters.copies == copies
    exact, bound = reference.gemm_bound(a, b, listed, d.dtype)
    arena.assert_within(d, exact.reshape(d.shape), bound.reshape(d.shape))
    return d


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("m", [1, 16, 61, 257, 4096])
def test_the_chosen_kernel_is_right_at_any_number_of_rows(m: int, gate: str, layout: str) -> None:
    torch.manual_seed(m)
    a, weight = drawn(m, 1032), drawn(1424, 1032, limit=0.1)
    verify(a, weight.t(), items(gate, layout, ("bias", drawn(1424))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 16, 61, 257, 4096])
def test_swiglu_oai_takes_other_numbers(m: int, layout: str) -> None:
    """Numbers of an earlier launch, alpha for limit, and a limit of one side of up."""
    torch.manual_seed(m)
    a, weight, bias = drawn(m, 1032), drawn(1424, 1032, limit=0.1), drawn(1424)
    kind = "swiglu_gate" + "_interleaved" * (layout == "interleaved")
    for alpha, limit in ((0.5, 1.5), (0.5, 1.5), (2.0, 0.75), (-1.0, float("inf"))):
        verify(a, weight.t(), [("bias", bias), (kind, alpha, limit)])
    own = verify(a, weight.t(), [("bias", bias), (kind, 1.702, 7.0)])
    plain = verify(a, weight.t(), items("swiglu_oai", layout, ("bias", bias)))
    assert (own.double() - plain.double()).abs().max() <= 2**-7 * plain.double().abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_inside_of_another_is_read_in_place(layout: str) -> None:
    """Rows of gate and up of a larger matrix, with a pitch of their own."""
    room = drawn(400, 264)
    verify(drawn(129, 200), room[16:304, 8:208].t(), items("silu", layout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("m", [5, 300])
def test_every_type_is_gated(dtype: torch.dtype, m: int) -> None:
    if dtype == torch.int8:
        a, b = (torch.randint(-9, 9, (n, 528), dtype=dtype, device="cuda") for n in (m, 608))
    else:
        a, b = drawn(m, 528, dtype=dtype), drawn(608, 528, dtype=dtype)
    rows, columns = torch.rand(m, device="cuda") / 64, torch.rand(608, device="cuda") / 64
    listed = items("silu", "halves", ("scale_row", rows), ("scale_column", columns))
    verify(a, b.t(), listed, out_dtype=BF16)
    if dtype == torch.float8_e4m3fn:
        promoted = warploom.gemm(a, b.t(), epilogue=listed, use_fast_accum=False)
        exact, bound = reference.gemm_bound(a, b.t(), listed, BF16, "promoted")
        arena.assert_within(promoted, exact, bound)


def test_nothing_of_the_other_half_or_beyond_is_read() -> None:
    """NaN in a row of up makes one column of D NaN, and no other."""
    a, weight = drawn(70, 200), drawn(48, 200)
    weight[24 + 5] = torch.nan
    d = warploom.gemm(a, weight.t(), gate="silu")
    assert d[:, 5].isnan().all() and not d[:, [*range(5), *range(6, 24)]].isnan().any()


def test_a_column_of_nan_and_of_infinity_stays_its_own_in_a_graph() -> None:
    a, weight, bias = drawn(33, 264), drawn(320, 264, limit=0.1), drawn(320)
    out = torch.empty(33, 160, dtype=BF16, device="cuda")
    call = {"bias": bias, "gate": "swiglu_oai", "gate_layout": "interleaved", "out": out}
    warploom.gemm(a, weight.t(), **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.gemm(a, weight.t(), **call)
    for _ in range(3):
        a.copy_(drawn(33, 264))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        listed = items("swiglu_oai", "interleaved", ("bias", bias))
        arena.assert_within(out, *reference.gemm_bound(a, weight.t(), listed, BF16))


def test_a_warm_call_and_a_plan_run_the_same_kernel() -> None:
    a, weight = drawn(64, 512), drawn(1024, 512)
    first = warploom.gemm(a, weight.t(), gate="gelu")
    planned = warploom.plan(a, weight.t(), gate="gelu")
    assert torch.equal(planned(a, weight.t(), gate="gelu"), first)
    assert torch.equal(warploom.gemm(a, weight.t(), gate="gelu"), first)


def test_a_weight_that_is_not_k_major_is_copied() -> None:
    a, b = drawn(64, 512), drawn(512, 1024)
    copies = warploom.counters.copies
    d = warploom.gemm(a, b, gate="silu")
    assert warploom.counters.copies == copies + 1
    assert torch.equal(d, warploom.gemm(a, b.t().contiguous().t(), gate="silu"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_torch(gate: str, layout: str, *, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [drawn(257, 200), drawn(304, 200, limit=0.1), drawn(304)]

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x, weight.t(), bias=bias, gate=gate, gate_layout=layout)  # type: ignore[arg-type]

    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    given = [one.detach().clone().requires_grad_() for one in leaves]
    d = run(*given)
    dd = drawn(*d.shape)
    d.backward(dd)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    x, weight, bias = exact
    listed = items(gate, layout, ("bias", bias))
    reference.apply(x @ weight.t(), listed).backward(dd.double())
    for one, like in zip(given, exact, strict=True):
        assert one.grad is not None and like.grad is not None
        off = (one.grad.double() - like.grad).abs().max() / like.grad.abs().max()
        assert off < 2**-6, off


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("m", [1, 16, 61, 257, 4096])
def test_the_chosen_kernel_takes_a_gradient_past_a_gate(m: int, gate: str, layout: str) -> None:
    torch.manual_seed(m)
    dy, weight = drawn(m, 1032), drawn(1032, 712, limit=0.1)
    z = drawn(m, 1424, limit=4)
    dz = torch.full_like(z, torch.nan)
    kind = f"{gate}_gate_gradient" + "_interleaved" * (layout == "interleaved")
    verify(dy, weight, [(kind, z, dz)])
    leaf = z.double().requires_grad_()
    dh = dy.double() @ weight.double()
    reference.apply(leaf, items(gate, layout)).backward(dh)
    assert leaf.grad is not None
    off = (dz.double() - leaf.grad).abs() / (leaf.grad.abs() + 2**-6)
    assert off.max() < 2**-6


def test_the_gradient_past_a_gate_is_replayed_in_a_graph() -> None:
    dy, weight, z = drawn(129, 264), drawn(264, 320), drawn(129, 640)
    dz, h = torch.empty_like(z), torch.empty(129, 320, dtype=BF16, device="cuda")

    def run() -> None:
        warploom.gemm(dy, weight, out=h, epilogue=[("silu_gate_gradient", z, dz)])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        dy.copy_(drawn(129, 264))
        z.copy_(drawn(129, 640))
        dz.fill_(torch.nan)
        h.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = dz.clone(), h.clone()
        run()
        assert torch.equal(dz, replayed[0]) and torch.equal(h, replayed[1])
        assert dz.isfinite().all() and h.isfinite().all()
