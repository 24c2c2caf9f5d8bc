"""`gemm(precision=...)`: errors beside those of SIMT fp32, and every way in which it is called."""

from __future__ import annotations

from collections.abc import Callable

import gemm_spans
import mutants
import pytest
import torch
from processes import Note

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = pytest.mark.gpu
ROWS = 128  # of D, that are held against float64
MATRICES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda n, k: torch.randn(n, k, device="cuda"),
    "positive": lambda n, k: torch.rand(n, k, device="cuda"),
    "graded": lambda n, k: (  # the largest products are within fp32's range
        torch.randn(n, k, device="cuda")
        / 16
        * torch.exp2(torch.randint(-60, 61, (n, 1), device="cuda").float())
    ),
    "hilbert": lambda n, k: (
        1 / (torch.arange(n, device="cuda")[:, None] + torch.arange(k, device="cuda")[None] + 1.0)
    ),
    "lognormal": lambda n, k: (3 * torch.randn(n, k, device="cuda")).exp(),
}
OCTAVES = {"columns 2^-20 to 2^20, inversely": 20, "columns 2^-60 to 2^60, inversely": 60}


def drawn(kind: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and a weight, of one kind; small values of graded columns count as much."""
    torch.manual_seed(size)
    if kind not in OCTAVES:
        return MATRICES[kind](size, size), MATRICES[kind](size, size)
    octaves = torch.linspace(-OCTAVES[kind], OCTAVES[kind], size, device="cuda").round()
    a, weight = MATRICES["normal"](size, size), MATRICES["normal"](size, size)
    return a * torch.exp2(octaves), weight / torch.exp2(octaves)


def errors(d: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """The error by the Frobenius norm, and the largest share of |a| |b|, of the first rows."""
    a, weight = a[:ROWS].double(), weight.double()
    exact, sizes = a @ weight.t(), a.abs() @ weight.abs().t()
    wrong = (d[:ROWS].double() - exact).abs()
    return float(wrong.norm() / exact.norm()), float((wrong / sizes).max())


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("kind", [*MATRICES, *OCTAVES])
def test_errors_are_at_most_those_of_simt(kind: str, size: int) -> None:
    a, weight = drawn(kind, size)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {"cuBLAS fp32": errors(a @ weight.t(), a, weight)}
    for precision in ("fp32", "bf16x6", "bf16x3", "tf32"):
        found[precision] = errors(warploom.gemm(a, weight.t(), precision=precision), a, weight)
    print(size, kind, *(f"{name} {one:.1e}, {most:.1e};" for name, (one, most) in found.items()))
    (norm, share), bounds = found["cuBLAS fp32"], {"bf16x3": 2e-5, "tf32": 1e-3}
    for precision in ("fp32", "bf16x6"):
        assert found[precision][0] <= norm and found[precision][1] <= share, (precision, found)
    assert all(found[precision][0] < bound for precision, bound in bounds.items())


def test_denormal_rows_are_as_exact_as_others() -> None:
    torch.manual_seed(0)
    a, weight = torch.randn(256, 4096, device="cuda") * 2.0**-135, MATRICES["normal"](512, 4096)
    weight *= 2.0**20
    assert errors(warploom.gemm(a, weight.t(), precision="fp32"), a, weight)[0] < 5e-7


@pytest.mark.parametrize(
    "extents",
    [(1, 1, 1), (7, 9, 13), (130, 257, 65), (1000, 520, 4097), (33, 4096, 300), (4096, 4096, 4096)],
    ids=str,
)
@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 2.0**-20), ("bf16x3", 2.0**-15), ("tf32", 2.0**-10)]
)
def test_weights_of_bf16_and_tf32(
    extents: tuple[int, int, int], precision: str, bound: float
) -> None:
    """Of every layout; what is stored behind the last row of a weight must not count."""
    torch.manual_seed(sum(extents))
    m, n, k = extents
    dtype = torch.float32 if precision == "tf32" else torch.bfloat16
    room = torch.full((n * k + 64,), torch.nan, dtype=dtype, device="cuda")
    weight = room[: n * k].view(n, k).normal_()
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    for left in (torch.randn(m, k, device="cuda"), torch.randn(k, m, device="cuda").t()):
        exact = left.double() @ weight.double().t() + bias + residual
        sizes = left.double().abs() @ weight.double().abs().t() + bias.abs() + residual.abs()
        for right in (weight.t(), weight.t().contiguous()):
            for _ in range(3):  # the last time as a call that is known
                d = warploom.gemm(left, right, bias=bias, residual=residual, precision=precision)
            assert ((d - exact).abs() <= bound * sizes).all()


def test_gradients_with_weights_of_bf16_and_of_tf32() -> None:
    torch.manual_seed(7)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    for weight, precision, bound in (
        (torch.randn(384, 256, device="cuda").bfloat16(), "fp32", 5e-7),
        (torch.randn(384, 256, device="cuda"), "tf32", 1e-3),
    ):
        parameter = torch.nn.Parameter(weight)
        y = warploom.gemm(x, parameter.t(), precision=precision)
        dy = torch.randn_like(y)
        dx, dw = torch.autograd.grad(y, (x, parameter), dy)
        assert errors(dx, dy, weight.t())[0] < bound
        assert errors(dw.float(), dy.t(), x.detach().t())[0] < max(bound, 2.0**-8)


def test_values_that_are_not_finite_spoil_their_rows_and_columns_alone() -> None:
    a, weight = drawn("normal", 1024)
    a[5, 7], a[9, 3], weight[11, 2] = torch.inf, torch.nan, -torch.inf
    d, expected = warploom.gemm(a, weight.t(), precision="fp32"), a @ weight.t()
    assert torch.equal(d.isfinite(), expected.isfinite())
    a, weight, d, expected = a[10:], weight[12:], d[10:, 12:], expected[10:, 12:]
    assert errors(d, a, weight)[0] <= max(errors(expected, a, weight)[0], 3e-7)


def test_a_graph_chooses_the_pieces_at_each_replay() -> None:
    """Also where values come back that fp16 pieces hold: nothing of the time between stays."""
    a, weight = drawn("normal", 1024)
    warploom.gemm(a, weight.t(), precision="fp32")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = warploom.gemm(a, weight.t(), precision="fp32")
    for kind in ("normal", *OCTAVES, "normal", "lognormal", "hilbert"):
        for one, value in zip((a, weight), drawn(kind, 1024), strict=True):
            one.copy_(value)
        graph.replay()
        assert errors(d, a, weight)[0] < 1e-6, kind
        d.fill_(torch.nan)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extents", [(130, 257, 65), (33, 4096, 300), (1000, 513, 4097)], ids=str)
def test_graded_values_of_ragged_extents(extents: tuple[int, int, int], transposed: bool) -> None:
    torch.manual_seed(sum(extents))
    m, n, k = extents
    octaves = torch.exp2(torch.linspace(-30, 30, k, device="cuda").round())
    a, weight = torch.randn(m, k, device="cuda") * octaves, torch.randn(n, k, device="cuda")
    weight /= octaves
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    read = a.t().contiguous().t() if transposed else a
    for _ in range(3):  # the last time as a call that is known
        d = warploom.gemm(read, weight.t(), bias=bias, residual=residual, precision="fp32")
    exact = a.double() @ weight.double().t() + bias + residual
    sizes = a.double().abs() @ weight.double().abs().t() + bias.abs() + residual.abs()
    assert ((d - exact).abs() <= 2.0**-20 * sizes).all()


@pytest.mark.parametrize("kernel", gemm_spans.EVERY, ids=lambda one: one.name)
def test_one_of_two_launches_computes(kernel: KernelSpec) -> None:
    gemm_spans.verify(kernel, 0)


@pytest.mark.parametrize("name", gemm_spans.MUTANTS)
def test_a_kernel_that_computes_in_the_others_place_is_caught(name: str, note: Note) -> None:
    found = mutants.outcome(gemm_spans.MUTANTS[name])
    note(f"mutants.{name}", found)
    assert found == "caught"


@pytest.mark.parametrize("precision", ["fp32", "bf16x3", "bf16x6"])
@pytest.mark.parametrize(
    "extents",
    [(1, 1, 1), (7, 9, 13), (64, 64, 64), (130, 257, 65), (1000, 513, 4097), (33, 4096, 300)],
    ids=str,
)
def test_ragged_extents_and_epilogues(extents: tuple[int, int, int], precision: str) -> None:
    torch.manual_seed(sum(extents))
    m, n, k = extents
    a, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    room = torch.full((m, n + 4), torch.nan, device="cuda")
    out = room[:, :n]
    warploom.gemm(
        a,
        weight.t(),
        bias=bias,
        activation="relu",
        residual=residual,
        precision=precision,
        out=out,
    )
    exact = torch.relu(a.double() @ weight.double().t() + bias) + residual
    sizes = a.double().abs() @ weight.double().abs().t() + bias.abs() + residual.abs()
    bound = 2.0**-15 if precision == "bf16x3" else 2.0**-20
    assert ((out - exact).abs() <= bound * sizes).all()
    assert room[:, n:].isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_batches_and_layouts(transposed: bool) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(3, 2, 70, 90, device="cuda"), torch.randn(2, 90, 50, device="cuda")
    if transposed:
        b = b.mT.contiguous().mT
    d = warploom.gemm(a, b, precision="fp32")
    assert ((d - a.double() @ b.double()).abs() <= 2.0**-20 * (a.abs() @ b.abs())).all()
    left, right = torch.randn(300, 130, device="cuda").t(), torch.randn(300, 70, device="cuda")
    d = warploom.gemm(left, right, precision="fp32")
    sizes = left.abs() @ right.abs()
    assert ((d - left.double() @ right.double()).abs() <= 2.0**-20 * sizes).all()


def test_gradients_a_stream_and_a_graph() -> None:
    torch.manual_seed(3)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(384, 256, device="cuda"))
    y = warploom.gemm(x, weight.t(), precision="fp32")
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert errors(dx, dy, weight.detach().t())[0] < 5e-7
    assert errors(dw, dy.t(), x.detach().t())[0] < 5e-7
    with torch.no_grad():
        stream, out = torch.cuda.Stream(), torch.empty_like(y)
        with torch.cuda.stream(stream):
            warploom.gemm(x, weight.t(), out=out, precision="fp32")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            warploom.gemm(x, weight.t(), out=out, precision="fp32")
        weight.mul_(2)  # what was kept is of the weight before
        graph.replay()
        assert errors(out, x, weight)[0] < 5e-7


def test_torchs_products_run_by_pieces() -> None:
    torch.manual_seed(4)
    layer = torch.nn.Linear(1024, 2048, device="cuda")
    x = torch.randn(4, 512, 1024, device="cuda", requires_grad=True)
    with warploom.fp32.activate() as activation:
        layer(x).sum().backward()
    ran = {precision for _, precision in activation.ran}
    assert "fp32" in ran
    assert x.grad is not None
    exact = layer.weight.double().sum(0).expand_as(x)
    assert float((x.grad - exact).norm() / exact.norm()) < 1e-6
