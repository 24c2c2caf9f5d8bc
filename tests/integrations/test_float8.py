"""Linear layers in fp8: what recipes quantise, and gradients of the products that were computed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from linear_bounds import ACTIVATIONS, within
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.integrations import float8
from warploom.integrations.float8 import Quantised, operands, quantised, with_transpose
from warploom.integrations.recipes import E4M3, E5M2, RECIPES, SCHEMES, Quantization
from warploom.integrations.scaling import HISTORY, ParameterCache
from warploom.runtime.families.cast.call import CastCall

IN, OUT, ROWS = 48, 32, 20
# Recipes whose gradients may be multiplied beside the operands of the forward product.
REUSING = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CURRENT = [recipe for recipe, scheme in SCHEMES.items() if not scheme.delayed]


def layer(recipe: str, **options: Any) -> warploom.nn.Linear:
    torch.manual_seed(0)
    given = {"dtype": torch.bfloat16, "recipe": recipe, **options}
    return warploom.nn.Linear(IN, OUT, **given)


def rows(*shape: int) -> torch.Tensor:
    """Rows whose magnitudes are far apart, which one scale for all would round to nothing."""
    return (torch.randn(*shape, IN) * torch.logspace(-3, 3, shape[-1]).unsqueeze(-1)).bfloat16()


def exact(found: Quantised) -> torch.Tensor:
    """What quantised values stand for."""
    values, scale = found.values.double(), found.scale.double()
    if scale.dim() == 2:  # of blocks
        block = 128 if scale.shape[0] < values.shape[0] else 1
        scale = scale.repeat_interleave(block, 0).repeat_interleave(128, 1)
        return values * scale[: values.shape[0], : values.shape[1]]
    return values * (scale if scale.numel() == 1 else scale.unsqueeze(-1))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_how_often_a_weight_is_quantized(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts that the page of fp8 states: of four calls, eager, compiled, and with freezing."""
    compute, casts = CastCall.compute, list[tuple[int, ...]]()

    def counting(self: CastCall, *given: Any) -> None:
        casts.append(tuple(self.x.shape))
        compute(self, *given)

    monkeypatch.setattr(CastCall, "compute", counting)
    module, x = layer(recipe, bias=False).requires_grad_(False), rows(ROWS)
    found = []
    for freezing in (None, False, True):
        torch._dynamo.reset()
        call = module if freezing is None else torch.compile(module, fullgraph=True)
        with torch.no_grad(), torch._inductor.config.patch(freezing=bool(freezing)):
            call(x)
            casts.clear()
            for _ in range(4):
                call(x)
        found.append((casts.count((OUT, IN)), casts.count((ROWS, IN))))
    assert found == [(0, 4), (4, 4), (0, 4)]


# ---- Quantising ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rowwise", [True, False])
def test_the_largest_magnitude_fits_and_others_are_rounded_once(
    dtype: torch.dtype, rowwise: bool
) -> None:
    """A scale that is too small cuts off the largest values, which decide a sum."""
    x = rows(ROWS)
    x[3] = 0
    how = Quantization(dtype, "row" if rowwise else "tensor", powers_of_two=rowwise)
    found = quantised(x, how)
    assert found.values.dtype == dtype
    assert found.values.float().isfinite().all()
    assert found.scale.shape == ((ROWS,) if rowwise else (1,))
    scale = found.scale.double().unsqueeze(-1) if rowwise else found.scale.double()
    spacing = {E4M3: 2**-3, E5M2: 2**-2}[dtype]
    smallest = torch.finfo(dtype).smallest_normal * spacing
    error = (exact(found) - x.double()).abs()
    assert (error <= x.double().abs() * spacing * 0.5001 + scale * smallest * 0.5001).all()
    largest = found.values.double().abs().amax(-1)
    if rowwise:
        assert torch.equal(torch.frexp(found.scale).mantissa, torch.full((ROWS,), 0.5))
        assert (largest[x.abs().amax(-1) > 0] > torch.finfo(dtype).max * 0.45).all()
    else:
        assert largest.max() == torch.finfo(dtype).max


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_input_of_another_layer_is_told_before_anything_is_seen_of_it(recipe: str) -> None:
    """Rows had elements of several, whose largest went into the scales of later steps."""
    one = layer(recipe)
    with pytest.raises(ProblemError, match=r"of a layer with \d+ inputs: must be \[\.\., \d+\]"):
        one(torch.ones(4, 2 * one.in_features).bfloat16())
    assert one.scaling is None or not one.scaling.amax.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_seen_in_the_result(recipe: str, value: float) -> None:
    """A loss that is NaN must show, not train on."""
    x = torch.randn(ROWS, IN).bfloat16()
    x[5, 7] = value
    with torch.no_grad():
        y = layer(recipe)(x)
    assert not y[5].isfinite().any()
    assert recipe not in ("rowwise", "rowwise_with_gw_hp") or y[:5].isfinite().all()


# ---- The layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS), (1,), ()])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("recipe", CURRENT)
def test_a_layer_multiplies_what_was_quantised(
    recipe: str, activation: str | None, shape: tuple[int, ...]
) -> None:
    module = layer(recipe, activation=activation)
    x = rows(*shape) if shape else torch.randn(IN).bfloat16()
    residual = torch.randn(*shape, OUT)
    of_x, of_weight = operands(x.reshape(-1, IN), module.weight.detach(), module.recipe)
    product = exact(of_x) @ exact(of_weight).t() + module.bias.detach().double()
    expected = ACTIVATIONS[activation](product).reshape(*shape, OUT) + residual.double()
    magnitude = exact(of_x).abs() @ exact(of_weight).abs().t() + 4
    for context in (torch.no_grad(), torch.enable_grad()):  # all in the kernel, and not
        with context:
            y = module(x, residual)
        assert (y.shape, y.dtype) == (residual.shape, torch.float32)
        assert within(y.detach(), expected, magnitude.reshape(*shape, OUT))


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, E5M2])
@pytest.mark.parametrize("recipe", REUSING)
def test_gradients_are_of_the_product_that_was_computed(
    recipe: str, gradient_dtype: torch.dtype
) -> None:
    """Straight through: float64's of the quantised operands, dy in the type that was asked for."""
    module = layer(recipe, gradient_dtype=gradient_dtype)
    x, dy = rows(ROWS).requires_grad_(), rows(ROWS)[:, :OUT]
    module(x).backward(dy)
    of_x, of_weight = map(exact, operands(x.detach(), module.weight.detach(), module.recipe))
    if recipe == "rowwise_with_gw_hp":
        of_x = x.detach().double()
    unit = 2**-3 if gradient_dtype == E5M2 else 2**-7
    size = dy.double().abs()
    assert within(x.grad, dy.double() @ of_weight, size @ of_weight.abs(), unit)
    if recipe == "rowwise_with_gw_hp":
        unit = 2**-7  # in bf16 whatever dx is multiplied in
    assert within(module.weight.grad, dy.double().t() @ of_x, size.t() @ of_x.abs(), unit)
    assert within(module.bias.grad, dy.double().sum(0), dy.double().abs().sum(0))


@pytest.mark.parametrize("wanted", ["both", "x", "weight"])
@pytest.mark.parametrize("recipe", SCHEMES)
def test_gradients_are_of_operands_that_the_recipe_quantises(recipe: str, wanted: str) -> None:
    """Each product has its own: along what it sums, in the type and by the scales of the recipe."""
    module, scheme = layer(recipe), SCHEMES[recipe]
    module.weight.requires_grad_(wanted != "x")
    x, dy = rows(ROWS).requires_grad_(wanted != "weight"), rows(ROWS)[:, :OUT].contiguous()
    if scheme.delayed:  # the scales are of the call before
        module(x).backward(dy)
        module.zero_grad()
        x.grad = None
    module(x).backward(dy)
    of_dy, transposed_dy = with_transpose(
        dy, scheme.grad_output, scheme.grad_output_for_grad_weight
    )
    _, transposed_x = with_transpose(x.detach(), None, scheme.input_for_grad_weight)
    _, weight = with_transpose(module.weight.detach(), None, scheme.weight_for_grad_input)
    if wanted != "weight":
        a, b = exact(of_dy), exact(weight)
        assert within(x.grad, a @ b.t(), a.abs() @ b.t().abs())
    if wanted != "x":
        a, b = (
            (dy.double().t(), x.detach().double().t())
            if transposed_x is None
            else (
                exact(transposed_dy),
                exact(transposed_x),
            )
        )
        assert within(module.weight.grad, a @ b.t(), a.abs() @ b.t().abs())
    assert within(module.bias.grad, dy.double().sum(0), dy.double().abs().sum(0))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("recipe", REUSING)
def test_an_activation_is_differentiated_at_what_it_was_given(recipe: str, activation: str) -> None:
    """At the product of the quantised operands and its bias: not at the result, or without it."""
    module = layer(recipe, activation=activation, gradient_dtype=torch.bfloat16)
    x, dy = torch.randn(ROWS, IN).bfloat16().requires_grad_(), torch.randn(ROWS, OUT).bfloat16()
    residual = torch.randn(ROWS, OUT).requires_grad_()
    module(x, residual).backward(dy.float())
    of_x, of_weight = map(exact, operands(x.detach(), module.weight.detach(), module.recipe))
    z = (of_x @ of_weight.t() + module.bias.detach().double()).requires_grad_()
    (dz,) = torch.autograd.grad(ACTIVATIONS[activation](z), z, dy.double())
    size = dy.double().abs()
    assert within(x.grad, dz @ of_weight, size @ of_weight.abs())
    assert within(module.bias.grad, dz.sum(0), size.sum(0))
    assert torch.equal(residual.grad, dy.float())


@pytest.mark.parametrize("recipe", REUSING)
def test_an_e5m2_gradient_is_exact_where_it_fits(recipe: str) -> None:
    """Powers of two, with factors of such: a scale that is lost is a factor of the result."""
    module = layer(recipe, gradient_dtype=E5M2, bias=False)
    with torch.no_grad():
        module.weight.copy_(2.0 ** torch.randint(-3, 3, (OUT, IN)))
    x = (2.0 ** torch.randint(-3, 3, (ROWS, IN))).bfloat16().requires_grad_()
    dy = (2.0 ** torch.randint(-2, 2, (ROWS, OUT))).bfloat16()
    module(x).backward(dy)
    unit = 2**-3 if recipe == "tensorwise" else 2**-7
    for found, of in (
        (x.grad, dy.double() @ module.weight.detach().double()),
        (module.weight.grad, dy.double().t() @ x.detach().double()),
    ):
        assert within(found, of, of.abs(), unit)


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_has_the_weights_gradient(recipe: str) -> None:
    module, plain = layer(recipe, accumulate_into_main_grad=True), layer(recipe)
    module.weight.main_grad = torch.ones(OUT, IN)
    x = torch.randn(ROWS, IN).bfloat16()
    for one in (module, plain):
        one(x).float().square().sum().backward()
    assert module.weight.grad is None
    assert within(module.weight.main_grad - 1, plain.weight.grad.double(), plain.weight.grad.abs())


def test_parameters_of_fp32_are_quantised_from_all_their_digits() -> None:
    module, x = layer("rowwise", dtype=torch.float32), torch.randn(ROWS, IN, requires_grad=True)
    y = module(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert (x.grad.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = module(x)
        again.sum().backward()
    assert again.dtype == torch.bfloat16
    assert torch.equal(again, y.bfloat16())


def test_without_anything_to_multiply_torch_adds_the_bias() -> None:
    module = layer("tensorwise")
    assert module(torch.empty(0, IN).bfloat16()).shape == (0, OUT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_compile_trains_it(recipe: str) -> None:
    plain, module = layer(recipe, activation="silu"), layer(recipe, activation="silu")
    torch.compiler.reset()  # of all layers compiled before, which share one forward
    whole = recipe != "delayed"  # whose layers are called between graphs
    compiled = torch.compile(module, fullgraph=whole, backend="aot_eager")
    for step in range(3):  # of scales of earlier steps, each has its own
        x, grads = (torch.randn(ROWS, IN) * 4**step).bfloat16(), []
        for call, own in ((plain, plain), (compiled, module)):
            own.zero_grad()
            y = call(x)
            y.float().square().sum().backward()
            grads.append([y.detach(), *(one.grad for one in own.parameters())])
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


def test_one_graph_with_scales_of_earlier_steps_is_refused_by_name() -> None:
    torch.compiler.reset()
    compiled = torch.compile(layer("delayed"), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="recipe 'delayed'"):
        compiled(torch.randn(ROWS, IN).bfloat16())


def test_explain_tells_the_kernel_of_fp8() -> None:
    module = layer("rowwise", device="meta", activation="silu")
    x = torch.empty(512, IN, dtype=torch.bfloat16, device="meta")
    told = warploom.explain(module, x, gpu="NVIDIA H200")
    assert "e4m3" in told.kernel
    assert "silu" in told.kernel
    assert "recipe='rowwise'" in repr(module)


def test_recipes_that_there_are_not_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"recipe 'blocks'.*tensorwise, rowwise"):
        layer("blocks")
    with pytest.raises(ProblemError, match=r"gradient_dtype torch\.float16"):
        layer("rowwise", gradient_dtype=torch.float16)
    with pytest.raises(ProblemError, match=r"bfloat16 with recipe 'blockwise'"):
        layer("blockwise", gradient_dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match="without a recipe"):
        warploom.nn.Linear(IN, OUT, gradient_dtype=torch.bfloat16)


# ---- What is kept --------------------------------------------------------------------------------


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is quantised."""
    noted: list[tuple[int, ...]] = []
    original = float8.cast

    def cast(x: torch.Tensor, *given: Any, **keywords: Any) -> object:
        noted.append(tuple(x.shape))
        return original(x, *given, **keywords)

    monkeypatch.setattr(float8, "cast", cast)
    return noted


def change_in_place(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def change_beside_torch(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As some optimizers do: no version counts it, but that of a step."""
    module.weight.data.mul_(2)
    optimizer.step()


def change_memory(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.weight = torch.nn.Parameter(module.weight.detach() * 2)


def change_data(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No version counts it, and the new memory may be where the old one was."""
    values = (module.weight.detach() * 2).tolist()
    module.weight.data = torch.empty(0, dtype=torch.bfloat16)
    module.weight.data = torch.tensor(values, dtype=torch.bfloat16)


def load_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.load_state_dict({name: 2 * one for name, one in module.state_dict().items()})


def assign_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {name: 2 * one for name, one in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def change_type_there_and_back(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.float()
    with torch.no_grad():
        module.weight.mul_(2)
    module.bfloat16()


CHANGES = [
    change_in_place,
    change_beside_torch,
    change_memory,
    change_data,
    load_state,
    assign_state,
    change_type_there_and_back,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_is_quantised_once_until_it_changes(
    casts: list[tuple[int, ...]], change: Callable[..., None]
) -> None:
    module = layer("rowwise_with_gw_hp", bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    x = torch.randn(ROWS, IN).bfloat16().requires_grad_()
    y = module(x)
    first = casts.count((OUT, IN)) + casts.count((IN, OUT))
    assert first == 2  # along both dimensions
    for _ in range(2):
        assert torch.equal(module(x), y)
    assert casts.count((OUT, IN)) + casts.count((IN, OUT)) == first
    change(module, optimizer)
    assert torch.equal(module(x), 2 * y)  # a power of two
    assert casts.count((OUT, IN)) + casts.count((IN, OUT)) == 2 * first


@pytest.mark.parametrize("recipe", CURRENT)
def test_micro_batches_quantise_the_weight_once(casts: list[tuple[int, ...]], recipe: str) -> None:
    """Between two steps of an optimizer, in all orientations that the recipe multiplies by."""
    module = layer(recipe, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheme, seen = SCHEMES[recipe], []
    own = {"": scheme.weight, "t": scheme.weight_for_grad_input}
    once = own[""] == own["t"]  # both by one call
    for _ in range(2):
        casts.clear()
        for _ in range(3):
            x = torch.randn(ROWS, IN).bfloat16().requires_grad_()
            module(x).float().square().sum().backward()
        seen.append(sum(shape in ((OUT, IN), (IN, OUT)) for shape in casts))
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [1 if once else 2] * 2


def test_a_compiled_step_quantises_the_weight_as_it_is_then() -> None:
    """A graph has the cast in it: it must not have the values of the call that was traced."""
    module, x = layer("rowwise", bias=False), torch.randn(ROWS, IN).bfloat16()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(compiled(x), 2 * y) and torch.equal(module(x), 2 * y)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpoints_change_no_gradient(recipe: str, reentrant: bool) -> None:
    """What is computed twice has the scales of the first time: those of earlier steps too."""
    module, plain = layer(recipe, activation="gelu"), layer(recipe, activation="gelu")
    for step in range(3):
        x = (torch.randn(ROWS, IN) * 4**step).bfloat16().requires_grad_()
        again = x.detach().clone().requires_grad_()
        y, other = checkpoint(module, x, use_reentrant=reentrant), plain(again)
        assert torch.equal(y, other)
        y.float().square().sum().backward()
        other.float().square().sum().backward()
        assert torch.equal(x.grad, again.grad)
        for one, same in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, same.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_decides_the_type_of_each_recipe(recipe: str) -> None:
    module, x = layer(recipe, dtype=torch.float32), torch.randn(ROWS, IN, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32


def test_other_memory_at_the_same_address_is_another_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20))
    cache: ParameterCache[float] = ParameterCache()
    addresses = set()
    for value in range(1, 9):
        parameter.data = torch.empty(0)
        parameter.data = torch.full((1 << 20,), float(value))
        addresses.add(parameter.data_ptr())
        assert cache.get(parameter, lambda: parameter[0].item()) == value
    assert len(addresses) < 8  # some were one


def test_a_copy_of_a_layer_has_the_weight_that_it_gets() -> None:
    module, x = layer("rowwise"), torch.randn(ROWS, IN).bfloat16()
    module(x)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(x).any()
    assert module(x).any()


def test_delayed_scales_follow_the_largest_magnitude_of_the_steps_before() -> None:
    module = layer("delayed", bias=False)
    for step, size in enumerate((4.0, 64.0, 2.0, 1.0)):
        x = torch.full((ROWS, IN), size, dtype=torch.bfloat16)
        module(x).sum().backward()
        assert module.scaling is not None
        before = 1.0 if step == 0 else max((4.0, 64.0, 2.0)[:step]) / 448
        assert module.scaling.scale[0].item() == pytest.approx(before)
    for _ in range(HISTORY):
        module.scaling.advance()
    assert module.scaling.scale[0].item() == pytest.approx(1 / 448)
    assert "scaling.scale" not in module.state_dict()


@pytest.mark.parametrize("move", [torch.nn.Module.bfloat16, lambda module: module.to(torch.half)])
def test_scales_of_earlier_steps_stay_fp32_in_a_model_that_is_cast(
    move: Callable[..., Any],
) -> None:
    module = layer("delayed", dtype=torch.float32)
    module(torch.randn(ROWS, IN)).sum().backward()
    moved = move(module)
    assert {one.dtype for one in moved.scaling.buffers()} == {torch.float32}
    moved(torch.randn(ROWS, IN).to(moved.weight.dtype)).sum().backward()


@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_trains_after_a_call_in_inference_mode(
    recipe: str, gradient_dtype: torch.dtype | None
) -> None:
    """Autograd cannot save what was quantised there, nor may a step write to it."""
    own = gradient_dtype if recipe in REUSING else None
    module, x = layer(recipe, gradient_dtype=own), torch.randn(ROWS, IN).bfloat16()
    with torch.inference_mode():
        module(x)
    for _ in range(2):
        module(x.requires_grad_()).float().square().sum().backward()
    assert module.weight.grad.isfinite().all()


def test_a_weight_made_in_inference_mode_has_no_versions_and_is_quantised_anew() -> None:
    with torch.inference_mode():
        module, x = layer("rowwise", bias=False), torch.randn(ROWS, IN).bfloat16()
        y = module(x)
        module.weight.mul_(2)
        assert torch.equal(module(x), 2 * y)


def test_torchs_layer_has_no_scales_of_earlier_steps() -> None:
    module = layer("delayed")
    module(torch.randn(ROWS, IN).bfloat16())
    theirs = module.to_torch()
    assert list(theirs.modules()) == [theirs]
    assert not hasattr(theirs, "scaling")


def test_loss_scaling_skips_a_step_whose_gradients_overflow() -> None:
    """torch.amp.GradScaler sees Inf in a gradient of fp16, halves its scale, and goes on."""
    torch.manual_seed(0)
    module = layer("rowwise", dtype=torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    x = torch.randn(ROWS, IN)
    before = module.weight.detach().clone()
    scales, changed = [], []
    for _ in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = module(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed.append(not torch.equal(module.weight, before))
        before = module.weight.detach().clone()
        assert before.isfinite().all()
    assert scales[0] == 2.0**23 and not changed[0]
    assert any(changed)
    assert any(one < other for one, other in itertools.pairwise(scales))
