"""Experts that train in fp8, on the CPU: results and gradients, layouts, errors, what is kept."""

from __future__ import annotations

from typing import Any

import float8_expert_layers as exact
import pytest
import torch
from moe_models import MODELS, model, tokens

import warploom
from warploom.errors import ProblemError
from warploom.integrations import float8_experts
from warploom.integrations.expert_layers import RECIPE, layers_of
from warploom.integrations.float8_experts import float8_grouped_linear
from warploom.integrations.patch_report import Row
from warploom.integrations.recipes import Recipe

E, K, N = 5, 144, 272  # the sizes of no weight are whole blocks
ENDS = (70, 70, 200, 201, 290)  # of 300 rows: the second expert has none, and no expert ten
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(dtype: torch.dtype = torch.bfloat16, n: int = N) -> tuple[torch.Tensor, ...]:
    """Rows, of which those of no expert are NaN, weights, offsets and a gradient."""
    random = torch.Generator().manual_seed(5)

    def values(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=random)
        # Magnitudes of 2^-3 to 2^3, so that blocks have scales of their own.
        return (made * 2.0 ** torch.randint(-3, 4, shape[-1:], generator=random)).to(dtype)

    rows, weight, dy = values(300, K), values(E, n, K) / 16, values(300, n)
    rows[ENDS[-1] :], dy[ENDS[-1] :] = torch.nan, torch.nan
    return rows, weight, torch.tensor(ENDS, dtype=torch.int32), dy


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("n", [N, 256])
def test_results_and_gradients_are_those_of_quantized_operands(
    dtype: torch.dtype, inputs_first: bool, n: int
) -> None:
    rows, weight, offsets, dy = drawn(dtype, n)
    expected = exact.linear(rows, weight, offsets, dy)
    stored = weight.mT.contiguous() if inputs_first else weight
    leaves = rows.requires_grad_(), stored.requires_grad_()
    matrices = stored if inputs_first else stored.mT
    y = float8_grouped_linear(rows, matrices, offsets, None, "blockwise")
    dx, dw = torch.autograd.grad(y, leaves, dy)
    if inputs_first:
        dw = dw.mT
    assert y.dtype == dx.dtype == dw.dtype == dtype
    counted = slice(ENDS[-1])
    assert exact.share(y[counted], *(one[counted] for one in expected[0])) <= 1
    assert exact.share(dx, *expected[1]) <= 1  # zeros in rows of no expert
    assert exact.share(dw, *expected[2]) <= 1  # zeros of an expert without rows
    with torch.no_grad():
        again = float8_grouped_linear(rows, matrices, offsets, None, "blockwise")
    assert torch.equal(again[counted], y[counted])


def test_the_bound_has_teeth() -> None:
    """Another weight than the group's, and a block of k left out, are more than it allows."""
    rows, weight, offsets, dy = drawn()
    expected = exact.linear(rows, weight, offsets, dy)[0]
    counted = slice(ENDS[-1])
    for wrong in (weight.roll(1, 0), torch.cat((weight[..., :128], 0 * weight[..., 128:]), -1)):
        y = float8_grouped_linear(rows, wrong.mT, offsets, None, "blockwise")
        assert exact.share(y[counted], *(one[counted] for one in expected)) > 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_gradient_of_a_bias_is_that_of_its_experts_rows(dtype: torch.dtype) -> None:
    rows, weight, offsets, dy = drawn(dtype)
    bias = torch.randn(E, N).to(dtype).requires_grad_()
    plain = float8_grouped_linear(rows, weight.mT, offsets, None, "blockwise")
    y = float8_grouped_linear(rows, weight.mT, offsets, bias, "blockwise")
    (found,) = torch.autograd.grad(y, bias, dy)
    for expert, (begin, end) in enumerate(exact.ranges(offsets)):
        torch.testing.assert_close(
            y[begin:end].float(),
            plain[begin:end].float() + bias[expert].float(),
            rtol=0.02,
            atol=0.5,
        )
        wanted, size = dy[begin:end].double().sum(0), dy[begin:end].double().abs().sum(0)
        assert bool(((found[expert].double() - wanted).abs() <= 2**-7 * size + 1e-30).all())


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_one_gradient_alone_is_the_same(needed: tuple[bool, bool]) -> None:
    rows, weight, offsets, dy = drawn()
    both = rows.requires_grad_(), weight.requires_grad_()
    y = float8_grouped_linear(rows, weight.mT, offsets, None, "blockwise")
    wanted = torch.autograd.grad(y, both, dy)
    some = [one.detach().requires_grad_(asked) for one, asked in zip(both, needed, strict=True)]
    y = float8_grouped_linear(some[0], some[1].mT, offsets, None, "blockwise")
    place = needed.index(True)
    (found,) = torch.autograd.grad(y, some[place], dy)
    assert torch.equal(found, wanted[place])


def test_what_is_kept_for_the_backward_pass_is_in_fp8() -> None:
    """Neither the rows nor the weights are kept in 16 bits, for which memory there are others."""
    rows, weight, offsets, _ = drawn()
    rows.requires_grad_(), weight.requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        float8_grouped_linear(rows, weight.mT, offsets, None, "blockwise")
    large = [one.dtype for one in kept if one.numel() > 10_000]
    assert large == [exact.E4M3, exact.E4M3]


# ---- Layers --------------------------------------------------------------------------------------


def layer(**changed: Any) -> dict[str, Any]:
    """A layer of 4 experts that trains in fp8, of which the last has no token."""
    random = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=random) * shape[-1] ** -0.5
        return made.bfloat16().requires_grad_()

    ids = torch.rand(90, 4, generator=random).topk(2).indices
    return {
        "hidden": values(90, 256),
        "ids": ids.where(ids < 3, -1),
        "weights": torch.rand(90, 2, generator=random).requires_grad_(),
        "gate_up": values(4, 256, 256),
        "down": values(4, 256, 128),
        "recipe": "blockwise",
        **changed,
    }


def graded(given: dict[str, Any]) -> list[str]:
    """The names of what requires a gradient."""
    return [name for name, one in given.items() if getattr(one, "requires_grad", False)]


def gradients(out: torch.Tensor, given: dict[str, Any]) -> list[torch.Tensor]:
    leaves = [given[name] for name in graded(given)]
    return [*torch.autograd.grad(out.float().square().sum(), leaves)]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the error, as a share of that of what is wanted."""
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())


OPTIONS: dict[str, dict[str, Any]] = {
    **{gate: {"gate": gate} for gate in ("silu", "gelu", "gelu_tanh", "relu")},
    "interleaved": {"gate": "swiglu_oai", "gate_layout": "interleaved"},
    "a function": {"gate": lambda both: both[:, :128].sigmoid() * both[:, 128:]},
    "biases": {
        "gate_up_bias": torch.linspace(-1, 1, 1024).view(4, 256).requires_grad_(),
        "down_bias": torch.linspace(1, -1, 1024).view(4, 256).requires_grad_(),
    },
    "fp32": {
        "gate_up": (torch.randn(4, 256, 256) / 16).requires_grad_(),
        "down": (torch.randn(4, 256, 128) / 12).requires_grad_(),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_is_near_that_of_16_bits(name: str) -> None:
    given = layer(**OPTIONS[name])
    found = warploom.experts(**given)
    wanted = warploom.experts(**{**given, "recipe": None})
    pairs = [(found, wanted), *zip(gradients(found, given), gradients(wanted, given), strict=True)]
    for one, other in pairs:
        assert one.dtype == other.dtype and not torch.equal(one, other)
        assert difference(one, other) < 0.12
    with torch.no_grad():
        assert difference(warploom.experts(**given), found) < 0.02


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gate_that_casts_compute_is_near_that_of_torch(
    gate: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against halves that are swapped, and gradients of gate and up of another expert."""
    given = layer(gate=gate, down_bias=torch.linspace(1, -1, 1024).view(4, 256).requires_grad_())
    if transposed:
        stored = {name: given[name].detach().mT.contiguous() for name in ("gate_up", "down")}
        given |= {name: one.requires_grad_() for name, one in stored.items()}
        given["transposed"] = True
    found = warploom.experts(**given)
    assert "_Gated" in node_names(found)
    left = gradients(found, given)
    monkeypatch.setattr(float8_experts, "is_gated_by_casts", lambda *_: False)
    wanted = warploom.experts(**given)
    assert "_Gated" not in node_names(wanted)
    for one, other in [(found, wanted), *zip(left, gradients(wanted, given), strict=True)]:
        assert one.stride() == other.stride() and difference(one, other) < 0.03


def node_names(out: torch.Tensor) -> str:
    """The names of the functions of autograd that lead to a result."""
    seen, left = set[Any](), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [one for one, _ in node.next_functions]
    return " ".join(sorted(node.name() for node in seen))


@pytest.mark.parametrize("frozen", ["hidden", "gate_up", "down"])
def test_a_layer_of_which_a_part_is_frozen_has_the_other_gradients(frozen: str) -> None:
    given = layer()
    wanted = dict(zip(graded(given), gradients(warploom.experts(**given), given), strict=True))
    given[frozen] = given[frozen].detach()
    found = gradients(warploom.experts(**given), given)
    assert len(found) == 3
    for name, one in zip(graded(given), found, strict=True):
        assert difference(one, wanted[name]) < 0.04


def test_memory_that_nothing_wrote_reaches_nothing() -> None:
    """Rows of no expert are left as the allocator has them: here NaN, as torch fills them."""
    given = layer()
    wanted = warploom.experts(**given)
    right = gradients(wanted, given)
    torch.use_deterministic_algorithms(True)
    try:
        found = warploom.experts(**given)
        pairs = [(found, wanted), *zip(gradients(found, given), right, strict=True)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_tokens_of_no_expert_and_no_tokens_have_zeros() -> None:
    given = layer()
    given["ids"] = torch.full_like(given["ids"], -1)
    out = warploom.experts(**given)
    assert not out.any() and not any(one.any() for one in gradients(out, given))
    few = {**given, **{name: given[name][:0] for name in ("hidden", "ids", "weights")}}
    out = warploom.experts(**few)
    found = torch.autograd.grad(out.sum(), [given["gate_up"], given["down"]])
    assert out.shape == (0, 256) and not any(one.any() for one in found)


def test_compiled_code_has_the_same_results_and_gradients() -> None:
    given = layer()

    def call(**tensors: torch.Tensor) -> torch.Tensor:
        return warploom.experts(**tensors, recipe="blockwise")

    given.pop("recipe")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(**given), call(**given)
    assert torch.equal(found, wanted)
    pairs = zip(gradients(found, given), gradients(wanted, given), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_second_derivative_is_refused() -> None:
    rows, weight, offsets, _ = drawn()
    rows = rows[: ENDS[-1]].requires_grad_()
    y = float8_grouped_linear(rows, weight.mT, offsets, None, "blockwise")
    (dx,) = torch.autograd.grad(y.float().square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"recipe": "rowwise"}, "recipe 'rowwise': must be blockwise, or None"),
        ({"recipe": 8}, "recipe 8: must be blockwise"),
        (
            {"gate_up": torch.zeros(4, 256, 264), "down": torch.zeros(4, 264, 128)}
            | {"hidden": torch.zeros(90, 264)},
            "must have sizes that are multiples of 16",
        ),
        (
            {
                name: torch.zeros(4, 256, 128 * n).to(exact.E4M3)
                for name, n in (("gate_up", 2), ("down", 1))
            }
            | {"gate_up_scale": torch.ones(4, 2, 2), "down_scale": torch.ones(4, 2, 1)}
            | {"hidden": torch.zeros(90, 256).bfloat16()},
            "gate_up of torch.float8_e4m3fn with recipe 'blockwise': must be bfloat16",
        ),
    ],
)
def test_what_no_experts_train_with_is_told(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ProblemError, match=rule):
        warploom.experts(**layer(**wrong))


# ---- Models of transformers ----------------------------------------------------------------------


def expert_rows(patch: warploom.Patch) -> list[Row]:
    return [row for row in patch.rows if row.what.startswith("experts of")]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_patched_model_trains_its_experts_in_fp8(name: str, dtype: torch.dtype) -> None:
    made, given = model(name, dtype), tokens(2, 17)
    with warploom.patch(made):
        wanted = made(given, labels=given).loss.detach()
    patch = warploom.patch(made, recipe="blockwise")
    (row,) = expert_rows(patch)
    assert row.now.endswith("-> warploom, fp8 blockwise") and row.because == ""
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = made(given, labels=given).loss
        loss.backward()
        assert all(one.down_proj.grad is not None for one in layers_of(made))
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - wanted) < 0.05 * wanted and losses[-1] < 0.9 * losses[0]
    patch.undo()
    assert not any(hasattr(layer, RECIPE) for layer in layers_of(made))


def test_a_compiled_layer_of_a_model_trains_its_experts_in_fp8() -> None:
    made = model("qwen3_moe", num_hidden_layers=1)
    hidden = torch.randn(2, 17, made.config.hidden_size, dtype=made.dtype)
    with warploom.patch(made, recipe="blockwise"):
        layer = made.model.layers[0].mlp
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(hidden), layer(hidden))


def test_a_filter_says_which_experts_train_in_fp8() -> None:
    made = model("qwen3_moe", torch.bfloat16)
    asked: list[str] = []

    def chosen(layer: torch.nn.Module, name: str) -> bool:
        asked.append(name)
        return name.endswith("layers.1.mlp.experts")

    patch = warploom.patch(made, recipe="blockwise", filter=chosen)
    first, second = layers_of(made)
    assert not hasattr(first, RECIPE) and getattr(second, RECIPE) == "blockwise"
    assert sorted(row.now.split(" -> ")[1] for row in expert_rows(patch)) == [
        "warploom",
        "warploom, fp8 blockwise",
    ]


@pytest.mark.parametrize(
    ("recipe", "size", "because"),
    [
        ("rowwise", 48, "experts train in fp8 with blockwise alone"),
        ("blockwise", 40, "its sizes are no multiples of 16"),
    ],
)
def test_a_report_says_why_experts_stay_in_16_bits(
    recipe: Recipe, size: int, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS["qwen3_moe"], "moe_intermediate_size", size)
    made = model("qwen3_moe", torch.bfloat16)
    (row,) = expert_rows(warploom.patch(made, recipe=recipe))
    assert "fp8" not in row.now and row.because.startswith(because)
    assert not any(hasattr(layer, RECIPE) for layer in layers_of(made))
    made(tokens(1, 5)).logits.sum().backward()


def test_experts_that_a_patch_leaves_alone_have_no_recipe() -> None:
    made = model("qwen3_moe", torch.bfloat16)
    warploom.patch(made, recipe="blockwise", experts=False)
    assert not any(hasattr(layer, RECIPE) for layer in layers_of(made))
