"""A step that joins: one class in the generator, one with torch and a C++ part, known nowhere else.

One joins here, and is bound, computed, drawn and rendered: it clamps to a number of the call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

import warploom
from warploom import templates
from warploom.errors import ProblemError, SpecificationError
from warploom.generator import epilogue as algebra
from warploom.generator.epilogue import Bias, Gate, Step
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.knob import frozen, knob
from warploom.generator.parameters import Field, scalar
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps import KINDS, STEPS
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Flat, Given, Item, TorchStep
from warploom.runtime.families.gemm import operators, reference
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.samples import GemmData

BF16 = torch.bfloat16
A, B = torch.randn(6, 16).to(BF16), torch.randn(16, 8).to(BF16)
PART = """// Brings values to [-limit, limit].
struct Clamp {
  float limit;
  __device__ __forceinline__ void apply(float (&x)[2][2]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = fminf(fmaxf(x[i / 2][i % 2], -limit), limit);
  }
};
"""


@frozen
class Clamp(Step):
    """To [-limit, limit]."""

    sides: Literal["both"] = knob(default="both", name="clamp_{}", doc="which of them")
    step: Literal["clamp"] = "clamp"
    arguments: ClassVar[tuple[str, ...]] = ("clamp",)
    results: ClassVar[tuple[str, ...]] = ("bf16", "fp32")
    token: ClassVar[str] = "clamp_both"
    parts: ClassVar[tuple[str, ...]] = ("clamp.cuh",)
    cpp: ClassVar[str] = "Clamp"

    def fields(self, index: int) -> tuple[Field[Any], ...]:
        return (scalar(f"clamp_{index}", "limit"),)


class TorchClamp(TorchStep[Clamp]):
    step = Clamp

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Clamp, None]:
        return Clamp(), None

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x.clamp(-item[1], item[1])

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return error

    def sample(self, step: Clamp, draws: Draws, at: Extents) -> Item:
        return ("clamp", 1.0)

    def flatten(self, item: Item, into: Flat) -> None:
        into.words.append("clamp")
        into.numbers.append(item[1])

    def unflatten(self, word: str, given: Given) -> Item:
        return ("clamp", next(given.numbers))


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step, in the tables that name steps; and its part, where parts are found."""
    monkeypatch.setattr(algebra, "STEPS", (*algebra.STEPS, Clamp()))
    one = TorchClamp()
    monkeypatch.setitem(STEPS, "clamp", one)
    monkeypatch.setitem(KINDS, "clamp", one)
    monkeypatch.setattr(templates, "__path__", [*templates.__path__, str(tmp_path)])
    (tmp_path / "_product" / "epilogue").mkdir(parents=True)
    (tmp_path / "_product" / "epilogue" / "clamp.cuh").write_text(PART)


def operation(*steps: Any, **options: Any) -> GemmOperation:
    return GemmOperation("bf16", "bf16", options.pop("d", "bf16"), epilogue=steps, **options)


def test_each_step_has_its_class_with_torch_and_kinds_of_its_own() -> None:
    assert {word: one.step for word, one in STEPS.items()} == {
        step.step: type(step) for step in algebra.STEPS
    }
    kinds = [kind for one in STEPS.values() for kind in one.step.arguments]
    assert kinds == list(KINDS)


@pytest.mark.parametrize(
    ("methods", "missing"),
    [
        ((), "apply and error"),
        (("apply",), "error"),
        (("error",), "apply"),
        (("apply", "write"), "error"),
        (("rounded", "error"), "apply"),
        (("apply", "error"), None),
        (("write",), None),
        (("rounded",), None),
    ],
)
def test_a_step_says_what_it_does_to_values(methods: tuple[str, ...], missing: str | None) -> None:
    """One that forgot to had its kernel compared with values that it left as they were."""
    own = {name: getattr(TorchClamp, name) for name in ("bind", "sample")}
    own |= {name: lambda *_: None for name in methods}
    if missing is None:
        type("TorchForgetful", (TorchStep,), {**own, "step": Clamp})
        return
    with pytest.raises(TypeError, match=f"TorchForgetful without {missing}: a step must have"):
        type("TorchForgetful", (TorchStep,), {**own, "step": Clamp})
    type("Shared", (TorchStep,), own)  # what several steps have in common is none


def test_a_step_that_joins_is_called_like_any_other() -> None:
    listed = [("bias", torch.ones(8)), ("clamp", 0.5), ("scale", 2.0)]
    found = warploom.gemm(A, B, epilogue=listed)
    exact = 2 * (A.double() @ B.double() + 1).clamp(-0.5, 0.5)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)
    assert (found.abs() == 1).any()
    assert epilogue.ITEMS.numbers(listed) == (0.5, 2.0)
    bound = epilogue.bind(listed, (), 6, 8, -1, batched=False)
    assert bound.steps[1].token == "clamp_both"
    assert bound.scalars == ("clamp_1", "scale_2")


def test_a_step_that_joins_crosses_the_operator() -> None:
    listed = [("clamp", 0.5), ("activation", "relu")]
    expected = warploom.gemm(A, B, epilogue=listed)
    assert torch.equal(operators.call(GemmCall(A, B, listed, None, None, True, None)), expected)


def test_a_step_that_joins_is_tried_on_random_data() -> None:
    made = operation(Bias("bf16"), Clamp())
    one = GemmData(made, GemmShape(6, 8, 16), "cpu", 0).operands()
    exact, bound = reference.gemm_bound(one.a, one.b, one.listed, BF16)
    found = warploom.gemm(one.a, one.b, epilogue=one.listed)
    assert ((found.double() - exact).abs() <= bound).all()
    assert exact.abs().max() == 1


def test_a_step_that_joins_is_rendered_with_its_part() -> None:
    spec = KernelSpec("sm_90a", operation(Clamp()), GemmSchedule((128, 128, 64), 4))
    text = render(spec)
    assert "clamp_both" in spec.name
    assert PART in text
    assert "step_0{p.clamp_0}" in text
    assert "step_0.apply(x)" in text
    assert "float clamp_0;" in text


def test_a_step_says_which_types_d_may_have() -> None:
    with pytest.raises(
        SpecificationError, match="d behind clamp_both 'fp16': must be one of bf16, fp32"
    ):
        KernelSpec("sm_90a", operation(Clamp(), d="fp16"), GemmSchedule((128, 128, 64), 4))


def test_what_follows_a_step_that_halves_the_columns_lies_beside_the_half() -> None:
    listed = [("bias", torch.ones(32)), ("gate", "relu"), ("bias", torch.ones(16))]
    bound = epilogue.bind(listed, (), 6, 32, -1, batched=False)
    assert bound.columns == 16
    x = torch.randn(6, 32)
    first, second = (x + 1).chunk(2, dim=-1)
    assert torch.equal(apply(x, listed), first.relu() * second + 1)
    with pytest.raises(ProblemError, match=r"bias of shape \[32\].*\[16\] here"):
        epilogue.bind([listed[1], listed[0]], (), 6, 32, -1, batched=False)
    gated = operation(Bias("bf16"), Gate("silu"), Bias("bf16"))
    drawn = GemmData(gated, GemmShape(6, 32, 16), "cpu", 0).operands()
    assert drawn.out.shape == (6, 16)
    assert [item[1].shape[-1] for item in drawn.listed if item[0] == "bias"] == [32, 16]
