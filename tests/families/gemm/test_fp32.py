"""`gemm(precision=...)` on the CPU, where the reference adds up the same products of pieces.

torch's own fp32 matmul adds up in an order that depends on the CPU's instruction set, and its error
with it. Errors of a scheme are therefore checked with `exact_sums`, where only the split into
pieces, the terms that a scheme leaves out and the last rounding count. One test leaves the sums to
torch, and checks them by a bound that holds for any order of the additions.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from pretended_gpu import PretendedGpu, gpu
from torch.utils._python_dispatch import TorchDispatchMode

import warploom
from warploom.errors import ProblemError
from warploom.runtime import driver
from warploom.runtime.families import every
from warploom.runtime.families.gemm import pieces
from warploom.runtime.families.gemm.fp32 import SCHEMES
from warploom.runtime.families.gemm.tf32 import rounded_to_tf32

__all__ = ["gpu"]  # a fixture

M, N, K = 33, 40, 300


def graded(x: torch.Tensor) -> torch.Tensor:
    """Rows that are 2^-60 to 2^60 times as large."""
    return x * torch.exp2(torch.randint(-60, 61, (len(x), 1)).float())


def hilbert(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    return 1 / (torch.arange(rows)[:, None] + torch.arange(columns)[None] + 1.0)


MATRICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "positive": lambda x: x.abs(),
    "graded": graded,
    "hilbert": hilbert,
}


def drawn(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(len(kind))
    return MATRICES[kind](torch.randn(M, K)), MATRICES[kind](torch.randn(N, K))


def errors(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The error of d = a b.T by the Frobenius norm, and its largest share of |a| |b|.T."""
    exact, sizes = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    wrong = (d.double() - exact).abs()
    return float(wrong.norm() / exact.norm()), float((wrong / sizes).max())


def in_turn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b.T with fp32 sums, one product after the other."""
    total = torch.zeros(len(a), len(b))
    for column in range(a.shape[1]):
        total += torch.outer(a[:, column], b[:, column])
    return total


@pytest.fixture
def exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply pieces and add up in float64, and round the sum to fp32 once."""
    in_fp32 = pieces.sum_of_products

    def exact(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, **how: Any) -> torch.Tensor:
        return in_fp32(a, b, torch.float64, **how).to(dtype)

    monkeypatch.setattr(pieces, "sum_of_products", exact)


# The largest error of exact sums, as a share of |a| |b|: what pieces miss of two operands, the
# terms that are left out, and half a unit in the last place of fp32.
SPLIT = {
    "fp32": 2 * 2.0**-23 + 2.0**-22 + 2.0**-24,
    "bf16x6": 0 + 2.0**-24 + 2.0**-24,
    "bf16x3": 2 * 2.0**-17 + 2.0**-16 + 2.0**-24,
}


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("precision", SPLIT)
def test_errors_are_those_of_fp32(precision: str, kind: str) -> None:
    """Splitting costs less than rounding each sum to fp32, which `in_turn` does on any CPU alike.

    A scheme that loses a piece or a term exceeds these bounds, as does a wrong scale.
    """
    a, b = drawn(kind)
    norm, share = errors(warploom.gemm(a, b.t(), precision=precision), a, b)
    assert share <= SPLIT[precision]
    if precision != "bf16x3":
        own = errors(in_turn(a, b), a, b)
        assert norm <= own[0] and share <= own[1]


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("precision", SPLIT)
def test_sums_are_fp32(precision: str, kind: str) -> None:
    """torch adds up K products for each of a scheme's terms, and the terms, in any order.

    Each addition rounds by at most 2^-24 of what it adds up, which exceeds |a| |b| by what pieces
    exceed their value, less than 2%. Sums of TF32, bf16 or fp16, or those of an operand that is
    read in 16 bits, exceed this bound.
    """
    a, b = drawn(kind)
    additions = K + SCHEMES[precision].terms
    _, share = errors(warploom.gemm(a, b.t(), precision=precision), a, b)
    assert share <= SPLIT[precision] + 1.02 * 2.0**-24 * additions


@pytest.mark.usefixtures("exact_sums")
def test_denormal_rows_are_as_exact_as_others_by_fp16_pieces() -> None:
    a, b = drawn("normal")
    a, b = a * 2.0**-140, b * 2.0**100
    assert errors(warploom.gemm(a, b.t(), precision="fp32"), a, b)[0] < 1e-6


@pytest.mark.usefixtures("exact_sums")
def test_scales_do_not_overflow_where_results_do_not() -> None:
    a, b = drawn("normal")
    a, b = a * 2.0**122, b * 2.0**-120
    for left, right in ((a, b), (b, a)):
        assert errors(warploom.gemm(left, right.t(), precision="fp32"), left, right)[0] < 1e-6


def test_values_that_are_not_finite_stay_in_their_rows_and_columns() -> None:
    a, b = drawn("normal")
    a[3, 5], a[7, 0], b[9, 1] = torch.inf, torch.nan, -torch.inf
    d, expected = warploom.gemm(a, b.t(), precision="fp32"), a @ b.t()
    assert torch.equal(d.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert torch.allclose(d[finite], expected[finite], rtol=1e-4, atol=1e-4)


def test_zero_rows_are_zeros() -> None:
    a, b = drawn("normal")
    a[4] = 0
    assert not warploom.gemm(a, b.t(), precision="fp32")[4].any()


@pytest.mark.parametrize("precision", ["fp32", "bf16x3", "bf16x6", "tf32"])
def test_epilogues_batches_and_layouts(precision: str) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(2, 3, 5, 70), torch.randn(3, 70, 9)
    bias, residual = torch.randn(9), torch.randn(2, 3, 5, 9)
    bound = 0.05 if precision == "tf32" else 1e-3
    d = warploom.gemm(
        a, b, bias=bias, activation="relu", residual=residual, beta=0.5, precision=precision
    )
    assert torch.allclose(d, torch.relu(a @ b + bias) + 0.5 * residual, atol=bound)
    left, right = torch.randn(70, 33).t(), torch.randn(70, 20)
    assert torch.allclose(warploom.gemm(left, right, precision=precision), left @ right, atol=bound)
    out = torch.empty(33, 20, dtype=torch.bfloat16)
    assert warploom.gemm(left, right, out=out, precision=precision) is out
    assert torch.allclose(out.float(), left @ right, atol=0.2)


@pytest.mark.parametrize("extents", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_empty_products_are_what_epilogues_make_of_zeros(extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    bias = torch.ones(n)
    d = warploom.gemm(torch.empty(m, k), torch.empty(k, n), bias=bias, precision="fp32")
    assert d.shape == (m, n) and torch.equal(d, bias.expand(m, n))


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("kind", ["columns", "columns and sizes", "denormal"])
def test_rows_that_fp16_pieces_do_not_hold_are_split_otherwise(kind: str) -> None:
    """Columns of A are graded and rows of B inversely, so that small values count as large ones.

    Two fp16 pieces miss small values altogether: their errors are far above those of fp32 sums.
    """
    a, b = drawn("normal")
    octaves = torch.exp2(torch.linspace(-60, 60, K).round())
    if kind == "denormal":
        octaves, a, b = octaves.sqrt(), a * 2.0**-100, b * 2.0**90
    if kind == "columns and sizes":
        a = graded(a)
    a, b = a * octaves, b / octaves
    found, own = (
        errors(warploom.gemm(a, b.t(), precision="fp32"), a, b),
        errors(in_turn(a, b), a, b),
    )
    assert found[0] <= own[0] and found[1] <= own[1]


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-7), ("bf16x3", 1e-5)])
def test_a_matrix_of_bf16_is_multiplied_as_it_is(precision: str, bound: float) -> None:
    torch.manual_seed(6)
    x, dy = torch.randn(2, 25, 300, requires_grad=True), torch.randn(2, 25, 40)
    weight = torch.nn.Parameter(torch.randn(40, 300).bfloat16())
    bias = torch.randn(40)
    y = warploom.gemm(x, weight.t(), bias=bias, precision=precision)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    with torch.no_grad():
        left, right = x.double(), weight.double()
        rows = dy.double().flatten(0, 1)
        for found, exact in ((y - bias, left @ right.t()), (dx, dy.double() @ right)):
            assert (found - exact).norm() <= bound * exact.norm()
        exact = rows.t() @ left.flatten(0, 1)
        assert dw.dtype == torch.bfloat16 and (dw - exact).norm() <= 2.0**-8 * exact.norm()
        batches = torch.randn(2, 40, 300).bfloat16().mT  # and rows of one that is not K-major
        for b in (batches, batches[0].contiguous()):
            d = warploom.gemm(x, b, precision=precision)
            assert torch.allclose(d.double(), left @ b.double(), atol=1e-3)
    told = warploom.explain(
        warploom.gemm, x.to("meta"), weight.to("meta").t(), precision=precision, gpu="h200"
    )
    assert "_whole_b_" in told.kernel and "bf16 pieces of a by b" in told.reason


def test_tf32_rounds_operands_to_nearest() -> None:
    a, b = drawn("normal")
    exact = rounded_to_tf32(a).double() @ rounded_to_tf32(b).double().t()
    d = warploom.gemm(a, b.t(), precision="tf32")
    assert torch.allclose(d.double(), exact, atol=1e-4)
    values = torch.tensor(
        [1.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-10, torch.inf, torch.nan]
    )
    expected = torch.tensor([1.0, 1.0, 1 + 2.0**-9, -1 - 2.0**-10, torch.inf, torch.nan])
    assert torch.equal(rounded_to_tf32(values).nan_to_num(7), expected.nan_to_num(7))
    told = warploom.explain(
        warploom.gemm, a.to("meta"), b.to("meta").t(), precision="tf32", gpu="h200"
    )
    assert "tf32" in told.kernel and not told.copies


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 3e-7), ("bf16x6", 3e-7), ("bf16x3", 2e-5), ("tf32", 1e-3)]
)
@pytest.mark.parametrize("batches", [(), (2, 3)], ids=str)
def test_gradients_are_as_exact_as_results(
    precision: str, bound: float, batches: tuple[int, ...]
) -> None:
    torch.manual_seed(5)
    x = torch.randn(*batches, 50, 40, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(24, 40))
    dy = torch.randn(*batches, 50, 24)
    dx, dw = torch.autograd.grad(warploom.gemm(x, weight.t(), precision=precision), (x, weight), dy)
    with torch.no_grad():
        rows, of_x = dy.double().flatten(0, -2), x.double().flatten(0, -2)
        for found, exact in ((dx, dy.double() @ weight.double()), (dw, rows.t() @ of_x)):
            assert (found - exact).norm() <= bound * exact.norm()


def test_gradients_are_those_of_fp32() -> None:
    torch.manual_seed(2)
    x, bias = torch.randn(3, 5, 40, requires_grad=True), torch.randn(24, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(24, 40))
    y = warploom.gemm(x, weight.t(), bias=bias, activation="gelu", precision="fp32")
    usual = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    dy = torch.randn_like(y)
    read = (x, weight, bias)
    for one, other in zip(
        torch.autograd.grad(y, read, dy), torch.autograd.grad(usual, read, dy), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_torch_compile_sees_operators() -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(6, 40, requires_grad=True), torch.randn(24, 40), torch.randn(24)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x, weight.t(), bias=bias, precision="fp32")

    y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(y, torch.nn.functional.linear(x, weight, bias), atol=1e-4)
    assert torch.allclose(dx, weight.sum(0).expand(6, 40), atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(layer(x), y)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of what is split, in order."""
    from warploom.runtime.families.gemm import fp32

    found: list[int] = []
    make = fp32.split

    def counted(x: torch.Tensor, *how: Any) -> Any:  # noqa: ANN401 (as it does)
        found.append(x.shape[0])
        return make(x, *how)

    monkeypatch.setattr(fp32, "split", counted)
    return found


def test_pieces_of_a_parameter_are_kept_until_it_changes(split: list[int]) -> None:
    x, weight = torch.randn(6, 40), torch.nn.Parameter(torch.randn(24, 40))
    with torch.no_grad():
        first = warploom.gemm(x, weight.t(), precision="fp32")
        again = warploom.gemm(x, weight.t(), precision="fp32")
        weight.mul_(2)
        twice = warploom.gemm(x, weight.t(), precision="fp32")
    assert split == [6, 24, 6, 6, 24]
    assert torch.equal(first, again) and torch.equal(2 * first, twice)


@pytest.mark.parametrize("keywords", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_what_an_optimizer_changes_is_split_anew(keywords: dict[str, Any]) -> None:
    """Fused optimizers count no version of what they write."""
    x, weight = torch.randn(6, 40), torch.nn.Parameter(torch.randn(24, 40))
    optimizer = torch.optim.SGD([weight], lr=1.0, **keywords)
    weight.grad = torch.randn(24, 40)
    with torch.no_grad():
        warploom.gemm(x, weight.t(), precision="fp32")
        optimizer.step()
        y = warploom.gemm(x, weight.t(), precision="fp32")
        assert torch.allclose(y, x @ weight.t(), atol=1e-4)


def test_what_was_frozen_and_is_trained_meanwhile_is_split_anew() -> None:
    """As one of two models that are trained in turns: its pieces were kept while it was frozen."""
    x, weight = torch.randn(6, 40), torch.nn.Parameter(torch.randn(24, 40))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    for _ in range(2):
        weight.requires_grad_(False)
        y = warploom.gemm(x, weight.t(), precision="fp32")
        assert torch.allclose(y, x @ weight.t(), atol=1e-4)
        weight.requires_grad_(True)
        (x @ weight.t()).sum().backward()
        optimizer.step()


def test_parameters_with_pieces_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weak reference to a parameter kept torch from swapping it, as `to` and `to_empty` may."""
    from warploom.runtime.families.gemm import fp32

    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    x, layer, before = torch.randn(6, 40), torch.nn.Linear(40, 24, bias=False), len(fp32._kept)
    other = torch.nn.Parameter(torch.randn(24, 40))
    for change in (
        lambda: torch.utils.swap_tensors(layer.weight, other),
        lambda: torch.nn.init.ones_(layer.to_empty(device="cpu").weight),
        lambda: layer.load_state_dict({"weight": torch.randn(24, 40)}),
        lambda: layer.double().float(),
    ):
        for _ in range(2):
            with torch.no_grad():
                y = warploom.gemm(x, layer.weight.t(), precision="fp32")
            assert torch.allclose(y, x @ layer.weight.t(), atol=1e-4)
            assert len(fp32._kept) <= before + 2  # what is kept goes with its memory
            change()


def test_pieces_go_with_the_memory_they_are_of() -> None:
    from warploom.runtime.families.gemm import fp32

    x, weight = torch.randn(6, 40), torch.nn.Parameter(torch.randn(24, 40))
    before = len(fp32._kept)
    with torch.no_grad():
        warploom.gemm(x, weight.t(), precision="fp32")
        assert len(fp32._kept) == before + 1
        weight.data = torch.randn(24, 40)
        assert len(fp32._kept) == before
        weight.alias = weight.detach()  # type: ignore[attr-defined]
        warploom.gemm(x, weight.t(), precision="fp32")
        del weight
        gc.collect()
        assert len(fp32._kept) == before


def test_parameters_of_one_storage_keep_their_own_pieces(split: list[int]) -> None:
    """Gate and up of a layer may share memory, and count their own versions."""
    x, both = torch.randn(6, 40), torch.randn(48, 40)
    pair = [torch.nn.Parameter(both.data[at : at + 24]) for at in (0, 24)]
    with torch.no_grad():
        pair[1].mul_(2)
        for _ in range(3):
            for weight in pair:
                y = warploom.gemm(x, weight.t(), precision="fp32")
                assert torch.allclose(y, x @ weight.t(), atol=1e-4)
    assert split.count(24) == 2


def test_a_parameter_made_anew_of_the_same_memory_is_split_anew() -> None:
    """It often has the id of the one before it, and counts its versions from 0 again."""
    x, memory = torch.randn(6, 40), torch.randn(24, 40)

    def of_new_parameter() -> int:
        weight = torch.nn.Parameter(memory.data)
        with torch.no_grad():
            y = warploom.gemm(x, weight.t(), precision="fp32")
        assert torch.allclose(y, x @ memory.t(), atol=1e-4)
        return id(weight)

    ids = set()
    for _ in range(64):
        ids.add(of_new_parameter())
        memory.data.neg_()
    assert len(ids) < 64


def test_pieces_of_views_do_not_pile_up() -> None:
    """Rows of a table of positions, as many as a batch is long, would fill the memory."""
    from warploom.runtime.families.gemm import fp32

    x, table = torch.randn(6, 40), torch.nn.Parameter(torch.randn(50, 40), requires_grad=False)
    for rows in (*range(1, 51), 50):
        y = warploom.gemm(x, table[:rows].t(), precision="fp32")
        assert torch.allclose(y, x @ table[:rows].t(), atol=1e-4)
    held = [one.pieces.q.shape[0] for one in fp32._kept[table.untyped_storage()].values()]
    assert held[-1] == 50 and sum(held) <= 4 * 50
    table.mul_(2)
    warploom.gemm(x, table[:3].t(), precision="fp32")
    assert len(fp32._kept[table.untyped_storage()]) == 1  # the others are of the earlier version


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16x3", "bf16x6", "tf32"])
def test_outputs_of_steps_are_written(precision: str, grad: bool) -> None:
    a, b = drawn("normal")
    z, amax = torch.empty(M, N), torch.zeros(1)
    items = [("preactivation", z), ("activation", "relu"), ("amax", amax)]
    d = warploom.gemm(a.requires_grad_(grad), b.t(), epilogue=items, precision=precision)
    assert d.requires_grad == grad
    assert torch.allclose(z, (a @ b.t()).detach(), atol=0.1) and torch.allclose(z.relu(), d)
    assert torch.allclose(amax, d.max())
    if precision != "tf32":
        amax.zero_()
        warploom.gemm(a, b.bfloat16().t(), amax=amax, precision=precision)
        assert amax > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_result_that_is_differentiated_is_rounded_as_others(compiled: bool) -> None:
    """It was rounded to nearest where a gradient was wanted, with a state that nothing read."""
    torch.manual_seed(7)
    a, b, state = torch.randn(9, 40), torch.randn(24, 40).t(), torch.tensor([7, 11])

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(
            a,
            b,
            activation="relu",
            out_dtype=torch.bfloat16,
            rounding="stochastic",
            rounding_state=state,
            precision="fp32",
        )

    expected, nearest = call(a, b), torch.relu(a @ b).bfloat16()
    a, b = a.requires_grad_(), b.requires_grad_()
    d = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(a, b)
    assert torch.equal(d, expected) and not torch.equal(d, nearest)
    dd = torch.randn(9, 24).bfloat16()
    found = torch.autograd.grad(d, (a, b), dd)
    usual = torch.autograd.grad(torch.relu(a @ b), (a, b), dd.float())
    for one, other in zip(found, usual, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["grad", "empty"])
@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        (
            {"rounding": "stochastic"},
            "d behind stochastic_rounding 'fp32': must be one of fp16, bf16",
        ),
        ({"bias": torch.ones(9)}, "bias of shape"),
        ({"bias": torch.ones(8).int()}, "bias of torch.int32"),
        ({"residual": torch.ones(3, 8)}, "residual of shape"),
        ({"activation": "tanhh"}, "activation 'tanhh'"),
    ],
    ids=["rounding", "bias", "type", "residual", "activation"],
)
def test_bad_epilogues_are_named_where_torch_computes_them(
    form: str, keywords: dict[str, Any], problem: str
) -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    with pytest.raises(ProblemError, match=problem):
        if form == "grad":
            warploom.gemm(a.requires_grad_(), b, precision="fp32", **keywords)
        else:
            warploom.gemm(a[:, :0], b[:0], precision="fp32", **keywords)


def test_a_product_of_nothing_does_not_fill_an_out_of_another_shape() -> None:
    a, b = torch.empty(8, 0), torch.empty(0, 8)
    with pytest.raises(ProblemError, match="out"):
        warploom.gemm(a, b, out=torch.ones(2, 8, 8), precision="fp32")


@pytest.mark.parametrize("extents", [(9, 1, 40), (9, 16, 1)], ids=["one column", "one product"])
def test_a_vector_of_bf16_and_its_gradients(extents: tuple[int, int, int]) -> None:
    """As the head of a value function has one: its gradient has a k of 1."""
    m, n, k = extents
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k).bfloat16().requires_grad_()
    y = warploom.gemm(x, weight.t(), precision="fp32")
    dx, dw = torch.autograd.grad(y, (x, weight), torch.ones(m, n))
    assert torch.allclose(y, x @ weight.t().float(), atol=1e-4)
    assert torch.allclose(dx, weight.float().sum(0).expand(m, k), atol=1e-4)
    assert torch.allclose(dw.float(), x.sum(0).expand(n, k), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_tensors_without_memory_have_a_result_without(precision: str) -> None:
    a, b = torch.empty(8, 16, device="meta"), torch.empty(16, 4, device="meta")
    d = warploom.gemm(a, b, precision=precision)
    assert d.is_meta and d.shape == (8, 4) and d.dtype == torch.float32


def test_pieces_of_a_parameter_belong_to_a_stream(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another stream kept might not be written yet, and is freed in that stream's order."""
    x, weight = torch.randn(64, 64), torch.nn.Parameter(torch.randn(64, 64))
    launches = []
    for stream in (7, 8, 8, 7):
        monkeypatch.setattr(driver, "current_stream", lambda device, stream=stream: stream)
        with torch.no_grad():
            warploom.gemm(x, weight.t(), precision="fp32")
        launches.append(len(gpu.launches))
        gpu.launches.clear()
    # Splits of both operands into two and into three pieces, and a GEMM of either.
    assert launches == [6, 6, 5, 5]


def test_pieces_of_a_stream_are_not_those_of_one_that_had_its_handle(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that was destroyed leaves its handle to a later one, which waits for nothing."""
    x, weight = torch.randn(64, 64), torch.nn.Parameter(torch.randn(64, 64))
    launches = []
    for number in (1, 1, 2):
        monkeypatch.setattr(cuda, "cuStreamGetId", lambda stream, number=number: (0, number))
        gpu.launches.clear()
        with torch.no_grad():
            warploom.gemm(x, weight.t(), precision="fp32")
        launches.append(len(gpu.launches))
    assert launches == [6, 5, 6]


def test_pieces_for_streams_that_are_gone_do_not_pile_up(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.runtime.families.gemm import fp32

    x, weight = torch.randn(64, 64), torch.nn.Parameter(torch.randn(64, 64))
    for number in range(3 * fp32._STREAMS):
        monkeypatch.setattr(cuda, "cuStreamGetId", lambda stream, number=number: (0, number))
        with torch.no_grad():
            warploom.gemm(x, weight.t(), precision="fp32")
    streams = [part.stream for part in fp32._kept[weight.untyped_storage()]]
    assert streams == [(number,) for number in range(2 * fp32._STREAMS, 3 * fp32._STREAMS)]


def test_an_optimizer_steps_while_another_thread_keeps_pieces() -> None:
    """Its step ended in "dictionary changed size during iteration"."""
    from warploom.runtime.families.gemm import fp32

    frozen = [torch.zeros(1).untyped_storage() for _ in range(4000)]
    thread = threading.Thread(target=lambda: [fp32._kept.setdefault(one, {}) for one in frozen])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while thread.is_alive():
            fp32._forget_trained(optimizer)
    finally:
        sys.setswitchinterval(before)
        thread.join()


class Made(TorchDispatchMode):
    """Keeps the tensors that operators return, views but for those of memory that was there."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {one.untyped_storage().data_ptr() for one in known}
        self.found = list[torch.Tensor]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        own = isinstance(result, torch.Tensor) and not result.is_meta
        if own and result.untyped_storage().data_ptr() not in self.known:
            self.found.append(result)
        return result


@pytest.mark.parametrize("copies", [(), ("b",)], ids=["k-major", "n-major"])
@pytest.mark.parametrize(
    ("precision", "of_b"),
    [(one, torch.float32) for one in ("fp32", "bf16x3", "bf16x6", "tf32")]
    + [("fp32", torch.bfloat16)],
)
@pytest.mark.parametrize("name", ["h200", None])
def test_explain_launches_nothing_and_takes_no_memory(
    gpu: PretendedGpu,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    precision: str,
    of_b: torch.dtype,
    copies: tuple[str, ...],
) -> None:
    """It split both operands, and kept pieces of weights that nobody multiplied with."""
    from warploom.runtime.families.gemm import fp32

    every()  # a family that is loaded meanwhile may make constants
    built = list[object]()
    monkeypatch.setattr(fp32, "kernel", lambda spec, device: built.append(spec))
    x, bias = torch.randn(64, 96), torch.randn(33)[1:]
    drawn = torch.randn(96, 32) if copies else torch.randn(32, 96).t()
    weight = torch.nn.Parameter(drawn.to(of_b))
    with Made(x, bias, weight) as made:
        told = warploom.explain(
            warploom.gemm, x, weight, bias=bias, activation="relu", precision=precision, gpu=name
        )
    assert not gpu.launches and not made.found and weight.untyped_storage() not in fp32._kept
    assert f"precision {precision}" in told.reason
    is_read = precision == "tf32" or of_b == torch.bfloat16
    assert told.copies == (copies if is_read else ())
    narrow_and_wide = precision == "fp32" and of_b == torch.float32
    if narrow_and_wide:
        assert "_terms3_narrow_" in told.kernel and "_terms6_wide_" in told.reason
        assert "3 products of 2 float16 pieces" in told.reason and "device finds" in told.reason
    assert len(built) == (0 if name else 1 + narrow_and_wide)


def test_explain_tells_of_copies_that_splits_make(gpu: PretendedGpu) -> None:
    a, b = torch.randn(64, 192)[:, ::2], torch.randn(32, 96).t()
    assert warploom.explain(warploom.gemm, a, b, precision="fp32", gpu="h200").copies == ("a",)


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"precision": "fp64"}, "precision 'fp64': must be one of fp32, bf16x3, bf16x6, tf32"),
        ({"algorithm": "strassen"}, "algorithm 'strassen' with precision 'fp32': must be without"),
        ({"gate": "silu"}, "a gate with precision 'fp32': must be computed by torch"),
        ({"use_fast_accum": False}, "use_fast_accum False with precision 'fp32': must be True"),
        ({"out_dtype": torch.int8}, "out_dtype torch.int8 with precision 'fp32': must be fp32, bf"),
    ],
    ids=str,
)
def test_what_it_does_not_take_is_named(keywords: dict[str, Any], problem: str) -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    call: Any
    for call in (warploom.gemm, partial(warploom.explain, warploom.gemm)):
        for left in (a, a.clone().requires_grad_()):  # where torch computes the epilogue
            with pytest.raises(ProblemError, match=problem):
                call(left, b, **{"precision": "fp32", **keywords})


def test_operands_of_other_types_are_named() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    with pytest.raises(ProblemError, match=r"a of torch\.bfloat16 with precision"):
        warploom.gemm(a.bfloat16(), b, precision="fp32")
    with pytest.raises(ProblemError, match='pass precision="fp32"'):
        warploom.gemm(a, b)
    with pytest.raises(ProblemError, match="with one K"):
        warploom.gemm(a, b[:3], precision="fp32")
