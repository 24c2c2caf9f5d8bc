"""Gates: what a call computes, what it refuses, where a weight's rows go, and what is rendered."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Bias, ColumnSum, Gate, GateLayout, Preactivation, Scale
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmSchedule, complete
from warploom.generator.families.gemm.launch import AtLaunch
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall

H200 = DeviceLimits(132, "NVIDIA H200")
BF16 = torch.bfloat16
GATES = ("relu", "gelu", "gelu_tanh", "silu", "swiglu_oai")
LAYOUTS = ("halves", "interleaved")


def by_hand(
    x: torch.Tensor, gate: str, layout: str, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    """Gates as transformers writes them: LlamaMLP, GptOssExperts."""
    g, up = (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, dim=-1)
    if gate == "swiglu_oai":
        g, up = g.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (g * torch.sigmoid(g * alpha))
    if gate == "gelu_tanh":
        return F.gelu(g, approximate="tanh") * up
    function = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[gate]
    return function(g) * up


def spec(*steps: Any, tile: tuple[int, int, int] = (128, 128, 64), **fields: Any) -> KernelSpec:
    kind = fields.pop("a", "bf16")
    options = {name: fields.pop(name) for name in ("layout_b", "d") if name in fields}
    operation = replace(GemmOperation(kind, kind, "bf16", epilogue=steps), **options)
    schedule = complete("sm_90a", operation, {"tile": tile, "stages": 4, **fields})
    return KernelSpec("sm_90a", operation, schedule)


@pytest.mark.parametrize(("gate", "layout"), [*product(GATES, LAYOUTS)])
def test_a_gate_is_what_models_compute(gate: str, layout: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 64), torch.randn(48, 64), 4 * torch.randn(48)
    x, weight = x.to(BF16), weight.to(BF16)
    keywords: dict[str, Any] = {"gate": gate, "gate_layout": layout, "out_dtype": torch.float32}
    found = warploom.gemm(x, weight.t(), bias=bias, **keywords)
    exact = by_hand(x.double() @ weight.double().t() + bias.double(), gate, layout)
    assert found.shape == (2, 5, 24)
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-4)
    kind = "gate" if layout == "halves" else "gate_interleaved"
    listed = [("bias", bias), (kind, gate)]
    expected, bound = reference.gemm_bound(x, weight.t(), listed, torch.float32)
    torch.testing.assert_close(expected, exact)
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["swiglu_gate", "swiglu_gate_interleaved"])
def test_swiglu_oai_takes_the_alpha_and_the_limit_of_a_model(kind: str) -> None:
    """Calls that are recognised, with the numbers of an earlier one; and 1.702 and 7 for others."""
    torch.manual_seed(0)
    a, weight = torch.randn(5, 64).to(BF16), torch.randn(48, 64).to(BF16)
    layout = "interleaved" if "_interleaved" in kind else "halves"
    x = a.double() @ weight.double().t()
    seen = []
    for alpha, limit in ((1.0, 0.25), (1.0, 0.25), (-0.5, 3), (2.0, math.inf), (1.0, 0.25)):
        listed = [(kind, alpha, limit)]
        found = warploom.gemm(a, weight.t(), epilogue=listed, out_dtype=torch.float32)
        exact = by_hand(x, "swiglu_oai", layout, alpha, limit)
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-4)
        expected, bound = reference.gemm_bound(a, weight.t(), listed, torch.float32)
        torch.testing.assert_close(expected, exact)
        assert ((found.double() - exact).abs() <= bound).all()
        call = GemmCall(a, weight.t(), listed, None, torch.float32, True, None)
        assert torch.equal(operators.call(call), found)
        seen.append(found)
    assert torch.equal(seen[0], seen[4]) and not torch.equal(seen[0], seen[2])
    fraction = warploom.gemm(a, weight.t(), epilogue=[(kind, Fraction(1, 2), 3)])
    assert torch.equal(fraction, warploom.gemm(a, weight.t(), epilogue=[(kind, 0.5, 3.0)]))
    # Of what fp32 cannot hold, the CPU's result was another than a GPU's.
    beyond = ((1e39, 7.0), (1.0, 1e39), (10**400, 7.0))
    for wrong in (("1", 7.0), (1.0, None), (math.nan, 7.0), (math.inf, 7.0), (1.0, 0.0), *beyond):
        with pytest.raises(ProblemError, match=r"must have two numbers, a finite alpha"):
            warploom.gemm(a, weight.t(), epilogue=[(kind, *wrong)])
    with pytest.raises(ProblemError, match=r"a swiglu_gate is \(kind, alpha, limit\)"):
        warploom.gemm(a, weight.t(), epilogue=[(kind, 1.0)])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_pass_a_gate_with_numbers(*, compiled: bool) -> None:
    torch.manual_seed(1)
    torch._dynamo.reset()

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x, weight.t(), epilogue=[("swiglu_gate", 0.5, 1.5)])

    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    given = [one.to(BF16).requires_grad_() for one in (torch.randn(9, 64), torch.randn(32, 64) / 4)]
    run(*given).float().square().sum().backward()
    x, weight = exact = [one.detach().double().requires_grad_() for one in given]
    by_hand(x @ weight.t(), "swiglu_oai", "halves", 0.5, 1.5).square().sum().backward()
    for one, like in zip(given, exact, strict=True):
        assert one.grad is not None and like.grad is not None
        assert (one.grad.double() - like.grad).abs().max() <= 2**-6 * like.grad.abs().max()


@pytest.mark.parametrize("gate", GATES)
def test_the_bound_would_notice_gate_and_up_exchanged_or_a_neighbour(gate: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(40, 64).to(BF16), torch.randn(64, 48).to(BF16)
    listed = [("gate", gate)]
    _, bound = reference.gemm_bound(a, b, listed, BF16)
    right = warploom.gemm(a, b, epilogue=listed).double()
    halves = b.chunk(2, dim=1)
    for wrong in (torch.cat(halves[::-1], 1), torch.cat((halves[0], halves[1].roll(8, 1)), 1)):
        off = (warploom.gemm(a, wrong, epilogue=listed).double() - right).abs()
        assert (off > bound).double().mean() > 0.5


def test_nan_is_kept_and_other_columns_are_not_touched() -> None:
    weight = torch.randn(48, 64).to(BF16)
    weight[24 + 5] = torch.nan
    for gate in GATES:
        d = warploom.gemm(torch.randn(3, 64).to(BF16), weight.t(), gate=gate)
        assert d.isnan().any(0).nonzero().flatten().tolist() == [5]


def test_a_gate_crosses_the_operator_and_vmap() -> None:
    a, b, bias = torch.randn(4, 64).to(BF16), torch.randn(64, 32).to(BF16), torch.randn(32)
    after = torch.randn(16)
    for kind in ("gate", "gate_interleaved"):
        listed = [("bias", bias), (kind, "silu"), ("bias", after)]
        expected = warploom.gemm(a, b, epilogue=listed)
        assert torch.equal(operators.call(GemmCall(a, b, listed, None, None, True, None)), expected)
        out = torch.empty_like(expected)
        operators.call(GemmCall(a, b, listed, out, None, True, None))
        assert torch.equal(out, expected)

        def each(a: torch.Tensor, after: torch.Tensor, kind: str = kind) -> torch.Tensor:
            steps = [("bias", bias), (kind, "silu"), ("bias", after)]
            return warploom.gemm(a, b, epilogue=steps)

        found = torch.vmap(each)(torch.stack([a, 2 * a]), torch.stack([after, after + 1]))
        assert torch.equal(found[0], expected)
        assert torch.equal(found[1], each(2 * a, after + 1))


@pytest.mark.parametrize(
    ("gate", "layout", "compiled"),
    [
        *product(GATES, LAYOUTS, [False]),
        *((gate, LAYOUTS[i % 2], True) for i, gate in enumerate(GATES)),
    ],
)
def test_gradients_are_those_of_torch(gate: str, layout: str, compiled: bool) -> None:
    torch.manual_seed(1)
    torch._dynamo.reset()
    leaves = [torch.randn(9, 64), torch.randn(32, 64) / 4, torch.randn(32)]

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(x, weight.t(), bias=bias, gate=gate, gate_layout=layout)  # type: ignore[arg-type]

    run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    given = [one.to(BF16).requires_grad_() for one in leaves]
    run(*given).float().square().sum().backward()
    exact = [one.to(BF16).double().requires_grad_() for one in leaves]
    x, weight, bias = exact
    by_hand(x @ weight.t() + bias, gate, layout).square().sum().backward()
    for one, like in zip(given, exact, strict=True):
        assert one.grad is not None and like.grad is not None
        assert (one.grad.double() - like.grad).abs().max() <= 2**-6 * like.grad.abs().max()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no gate": ({"gate": "sigmoid"}, "gate 'sigmoid': must be one of relu, gelu"),
    "no name": ({"epilogue": [("gate", 3)]}, "gate 3: must be one of"),
    "no layout": ({"gate": "silu", "gate_layout": "rows"}, "gate_layout 'rows': must be one of"),
    "layout alone": ({"gate_layout": "interleaved"}, "gate_layout interleaved without gate"),
    "both": (
        {"gate": "silu", "activation": "relu"},
        "activation 'relu' with gate 'silu': must be one of them",
    ),
    "list": ({"gate": "silu", "epilogue": [("scale", 2.0)]}, "epilogue= together with scale"),
    "twice": ({"epilogue": [("gate", "silu")] * 2}, "at most one gate"),
    "sums": (
        {"epilogue": [("column_sum", torch.zeros(32)), ("gate", "silu")]},
        "column_sum: a gated epilogue sums no columns",
    ),
    "bias of D": ({"gate": "silu", "bias": torch.zeros(16)}, r"bias of shape \[16\]"),
    "residual of 2 I": (
        {"gate": "silu", "residual": torch.zeros(4, 32)},
        r"residual of shape \[4, 32\].*\[4, 16\] here",
    ),
    "out of 2 I": (
        {"gate": "silu", "out": torch.empty(4, 32, dtype=BF16)},
        r"out \[4, 32\].*must be \[4, 16\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_gated_is_refused(name: str) -> None:
    keywords, message = REFUSED[name]
    with pytest.raises((ProblemError, SpecificationError), match=message):
        warploom.gemm(torch.zeros(4, 64).to(BF16), torch.zeros(64, 32).to(BF16), **keywords)


@pytest.mark.parametrize("n", [8, 24, 40])
def test_widths_that_no_box_has_are_refused(n: int) -> None:
    with pytest.raises(ProblemError, match="gate and up must have a multiple of 8 columns each"):
        warploom.gemm(torch.zeros(4, 64).to(BF16), torch.zeros(64, n).to(BF16), gate="silu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inner", [8, 72, 192])
def test_the_map_alternates_eight_rows_of_gate_and_of_up(inner: int, layout: GateLayout) -> None:
    """The address of each row of a tile, by the map's pitches, is that of its column's factor."""
    pitch = 208
    problem = GemmProblem(40, 2 * inner, 200, 200, pitch, inner)
    for kernel in (spec(Gate("silu", layout)), spec(Gate("silu", layout), cluster=(2, 1))):
        found = AtLaunch(kernel, problem, H200).b_map()
        assert found.extents == (200, 8, 2, inner // 8)
        assert found.box[:3] == (64, 8, 2)
        for column in range(inner):
            for factor in (0, 1):
                at = (column % 8, factor, column // 8)
                address = sum(i * step for i, step in zip(at, found.pitches, strict=True))
                row = column + factor * inner if layout == "halves" else 2 * column + factor
                assert address == row * pitch * 2
        assert AtLaunch(kernel, problem, H200).d_map().extents == (inner, 40)


def test_rules_say_what_a_gate_takes() -> None:
    for fields, message in (
        ({"layout_b": "row"}, "layout_b row with gate_silu_halves: must be col"),
        ({"d": "int32"}, "d int32"),
        ({"tile": (128, 136, 64)}, "tile n with gate_silu_halves 136: must be a positive multiple"),
        ({"tile": (128, 48, 64), "cluster_split_k": 2}, "must be a positive multiple of 32"),
        ({"tile": (128, 256, 64), "consumers": 1}, "registers expected"),
    ):
        with pytest.raises(SpecificationError, match=message):
            spec(Gate("silu"), **fields)
    for steps, message in (
        ((Gate("silu"), Gate("relu")), "at most one gate"),
        ((ColumnSum(), Gate("silu")), "sums no columns"),
    ):
        with pytest.raises(SpecificationError, match=message):
            spec(*steps)


def test_promoted_sums_leave_room_for_a_smaller_tile_only() -> None:
    steps = (Scale("row"), Gate("silu"))
    operation = GemmOperation("e4m3", "e4m3", "bf16", epilogue=steps, accumulation="promoted")
    with pytest.raises(SpecificationError, match="registers expected"):
        KernelSpec("sm_90a", operation, GemmSchedule((128, 256, 128), 4))
    assert KernelSpec("sm_90a", operation, GemmSchedule((128, 128, 128), 4))


def test_what_is_rendered_finds_both_factors_in_one_thread() -> None:
    text = render(spec(Bias("bf16"), Preactivation("bf16"), Gate("silu"), Scale("host")))
    assert "SM90_TMA_LOAD_4D" in text
    assert "k, 0, 0, n / 16" in text
    assert "step_0.apply(of_product[1], operands.step_0[1]);" in text
    assert "step_1.apply(of_product[0], product_columns(at, n, 0), m, n);" in text
    assert "step_2.apply(of_product, x);" in text
    assert "step_3.apply(x);" in text
    swapped = render(spec(Bias("bf16"), Gate("silu"), swap_ab=True, tile=(32, 128, 64)))
    assert "step_0.apply(x, block.step_0);" in swapped
    assert "stmatrix.sync.aligned.m8n8.x2.trans" in swapped
    assert "of_product" not in render(spec(Bias("bf16")))
