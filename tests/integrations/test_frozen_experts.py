"""Tokens get gradients through frozen quantized experts, on the CPU: bounds, memory, transforms."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import frozen_expert_layers as exact
import pytest
import torch
from frozen_expert_layers import Layer, sample
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import GateFunction, GateLayout
from warploom.integrations import frozen_experts as module
from warploom.integrations.frozen_experts import Gate
from warploom.quantization import PackedExperts

BF16, FP16 = torch.bfloat16, torch.float16
E, H, I = 6, 128, 96  # noqa: E741 (as docs call it)
MXFP4: dict[str, Any] = {"format": "mxfp4"}
WEIGHTS: dict[str, dict[str, Any]] = {
    "mxfp4": MXFP4,
    "nvfp4": {"format": "nvfp4"},
    "int4": {"format": "int4", "group": 32},
    "uint4": {"format": "uint4", "group": 32, "symmetric": False},
    "int8": {"format": "int8", "group": None},
    "e4m3": {},  # with block scales
}
OAI = Gate("swiglu_oai", "interleaved")


def keywords(gate: Gate) -> dict[str, Any]:
    """What a call says of its gate."""
    names = ("gate", "gate_layout", "alpha", "limit")
    return dict(zip(names, gate, strict=True))


def step(
    args: dict[str, Any], gate: Gate = OAI, dout: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The result of a call, and the gradients of all that requires one."""
    out = warploom.experts(**args, **keywords(gate))
    dout = gradient(out) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, leaves(args), dout)]


def leaves(args: dict[str, Any]) -> list[torch.Tensor]:
    return [args[name] for name in exact.graded(args)]


def largest(layer: Layer, args: dict[str, Any]) -> dict[str, float]:
    """The largest errors of a call, as shares of what they may be."""
    results = step(args, layer.gate)
    return exact.shares(layer, args, results, gradient(results[0]))


def gradient(out: torch.Tensor) -> torch.Tensor:
    random = torch.Generator().manual_seed(9)
    return torch.randn(out.shape, generator=random).to(out.dtype)


def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_are_near_those_of_autograd_in_fp64(
    name: str, layout: GateLayout, dtype: torch.dtype, biases: bool
) -> None:
    """By bounds for each number, of weights that no tile divides."""
    quantized = WEIGHTS[name]
    inner = I if quantized else 192
    args, weights = sample(E, H, inner, dtype=dtype, biases=biases, **quantized)
    fused = layout == "interleaved" or not quantized
    for gate in (Gate("silu", layout), Gate("swiglu_oai", layout, 1.25, 0.5)):
        layer = Layer(**weights, gate=gate, fused=fused, eight=not quantized)
        for what, share in largest(layer, args).items():
            assert share <= 1, (gate, what)


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_gates_have_their_gradients(function: GateFunction, layout: GateLayout) -> None:
    args, weights = sample(E, H, I, biases=True, **MXFP4)
    gate = Gate(function, layout)
    layer = Layer(**weights, gate=gate, fused=layout == "interleaved")
    assert max(largest(layer, args).values()) <= 1


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_gates_at_their_limit_have_the_gradients_of_clamp(layout: GateLayout) -> None:
    """Rows are columns of weights, some of which are the limit exactly: it is as below."""
    random = torch.Generator().manual_seed(2)
    numbers = torch.tensor([-3, -2, -1, 0.5, 1, 2, 3])
    args, weights = sample(2, 32, 32, tokens=32, k=1, biases=True, dtype=FP16, **MXFP4)
    w = numbers[torch.randint(7, (2, 64, 32), generator=random)]
    w[:, :, 0] = 3  # the largest of a block tells its scale
    args["gate_up"] = PackedExperts.quantize(w.half(), **MXFP4)
    args["hidden"] = torch.eye(32, dtype=FP16).requires_grad_()
    args["ids"], bias = torch.arange(32)[:, None] % 2, torch.zeros(2, 64)
    args["gate_up_bias"] = bias.clone().requires_grad_()
    assert torch.equal(args["gate_up"].dequantize(torch.float32), w)
    gate = Gate("swiglu_oai", layout, 1.25, 2.0)
    layer = Layer(w.double(), weights["down"], bias.double(), weights["down_bias"], gate)
    results = step(args, gate)
    read = (args[name] for name in ("hidden", "ids", "weights"))
    want = layer.by_autograd(*read, gradient(results[0]))
    for name, one in zip(["out", *exact.graded(args)], results, strict=True):
        assert (one - want[name]).norm() <= 2**-8 * want[name].norm(), name


@pytest.mark.parametrize("sizes", [(64, 8, 1), (72, 40, 3), (200, 104, 5)])
def test_sizes_may_be_any_that_experts_take(sizes: tuple[int, int, int]) -> None:
    """Rows of quantized weights are stored by 64, and k by 128."""
    hidden, inner, experts = sizes
    how = {"format": "int8", "group": None}
    args, weights = sample(experts, hidden, inner, tokens=9, k=1, biases=True, **how)
    assert max(largest(Layer(**weights, gate=OAI), args).values()) <= 1


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
@pytest.mark.parametrize("wrong", ["another expert's", "fewer k"])
def test_the_bounds_have_teeth(name: str, wrong: str) -> None:
    args, weights = sample(E, H, 192, biases=True, dtype=FP16, **WEIGHTS[name])
    results = step(args)
    for part, told in (("gate_up", "hidden"), ("down", "gate_up_bias")):
        changed = weights[part].clone()
        if wrong == "fewer k":
            changed[:, :16] = 0  # of what the gradient's GEMM adds up
        else:
            changed[0] = changed[1]
        layer = Layer(**{**weights, part: changed}, gate=OAI, eight=name == "e4m3")
        assert exact.shares(layer, args, results, gradient(results[0]))[told] > 2


@pytest.mark.parametrize("name", WEIGHTS)
def test_results_are_those_without_gradients(name: str) -> None:
    """The same kernels run, of which the first has the gate."""
    args, _ = sample(E, H, 192, biases=True, **WEIGHTS[name])
    with torch.no_grad():
        expected = warploom.experts(**args, **keywords(OAI))
    assert torch.equal(step(args)[0], expected)


@pytest.mark.parametrize("name", ["int4", "e4m3"])
@pytest.mark.parametrize("alone", ["hidden", "weights", "gate_up_bias", "down_bias"])
def test_one_gradient_alone_is_the_same(name: str, alone: str) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    graded = [key for key, one in args.items() if getattr(one, "requires_grad", False)]
    expected = dict(zip(graded, step(args)[1:], strict=True))
    for key in graded:
        args[key].requires_grad_(key == alone)
    (results,) = step(args)[1:]
    assert torch.equal(results, expected[alone])


@pytest.mark.parametrize("name", ["int4", "e4m3"])
def test_weights_that_no_gradient_needs_are_not_given_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of biases alone, only the gradient of gate_up's goes through a weight, which is down."""
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    given, kind = list[int](), module._Packed if WEIGHTS[name] else module._Scaled
    own = kind.dequantized

    def noting(self: Any, *read: Any) -> torch.Tensor:  # noqa: ANN401
        given.append(self.sizes[2])
        return own(self, *read)

    monkeypatch.setattr(kind, "dequantized", noting)
    for trained, inputs in ((("gate_up_bias", "down_bias"), [I]), (("down_bias",), [])):
        for key in ("hidden", "weights", "gate_up_bias", "down_bias"):
            args[key].requires_grad_(key in trained)
        given.clear()
        step(args)
        assert given == inputs


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WEIGHTS, "int2", "ternary", "mxfp8", "e4m3 by groups"])
def test_weights_are_given_back_as_they_are_dequantized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in ranges that end anywhere; rows between experts are of none."""
    others = {"int2": 32, "ternary": None, "mxfp8": 32}
    how = {"format": name, "group": others[name]} if name in others else WEIGHTS.get(name)
    how = {"format": "e4m3", "group": 64} if how is None else how
    args, weights = sample(5, 192, 72 if how.get("group", 0) is None else 64, **how)
    parts: Any = args["gate_up"]
    if isinstance(parts, PackedExperts):
        channels = parts.channel_scales, parts.channel_zeros
        own = module._weights(parts.metadata, (parts.slabs, *channels))
    else:
        own = module._weights(None, (parts.mT, args["gate_up_scale"]))
    for size in (1 << 25, 192 * 192, 1):
        monkeypatch.setattr(module, "RANGE", size)
        for dtype in (BF16, FP16):
            results = own.dequantized(1, 4, dtype)
            assert torch.equal(results, weights["gate_up"][1:4].float().to(dtype))


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
@pytest.mark.parametrize("experts", [1, 2, 4])
def test_some_experts_at_a_time_have_the_same_gradients(
    name: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others than the first some, rows are copied to where a GEMM has its first ones."""
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    expected = step(args)
    monkeypatch.setattr(module, "LARGEST", experts * 2 * I * H)
    assert same(step(args), expected)
    for ids in (torch.full_like(args["ids"], 4), torch.full_like(args["ids"], E - 1)):
        args["ids"] = ids  # the last row of all is of the last expert, or of none
        ids[1:9] = -1 if ids[0, 0] == 4 else 0
        monkeypatch.setattr(module, "LARGEST", experts * 2 * I * H)
        results = step(args)
        monkeypatch.setattr(module, "LARGEST", 1 << 29)
        assert same(results, step(args))


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
@pytest.mark.parametrize("rows", [1, 10, 110])
def test_some_rows_at_a_time_are_computed_again(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what comes before the gate. Ranges end within groups, and behind the last."""
    args, weights = sample(E, H, 192, biases=True, **WEIGHTS[name])
    monkeypatch.setattr(module, "RANGE", rows * 2 * 192)
    layer = Layer(**weights, gate=OAI, eight=name == "e4m3")
    assert max(largest(layer, args).values()) <= 1


def test_the_weights_of_few_experts_are_in_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[Any] = []
    own = module._Packed.dequantized

    def noting(self: Any, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
        assert not any(one() is not None for one in alive), "the ones before are not freed"
        made = own(self, first, end, dtype)
        assert made.numel() <= module.LARGEST
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module._Packed, "dequantized", noting)
    monkeypatch.setattr(module, "LARGEST", 2 * 2 * I * H)
    step(sample(E, H, I, **MXFP4)[0])
    assert len(alive) == 3 + 2  # of gate_up, then of down, which is stored by 64 rows


def test_what_comes_before_the_gate_is_in_memory_for_some_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[Any] = []
    own = module._Packed.multiply

    def noting(self: Any, *read: Any) -> torch.Tensor:  # noqa: ANN401
        assert not any(one() is not None for one in alive), "the rows before are not freed"
        made = own(self, *read)
        if made.dtype == torch.float32:  # it is computed again
            alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(module._Packed, "multiply", noting)
    monkeypatch.setattr(module, "RANGE", 40 * 2 * I)
    step(sample(E, H, I, **MXFP4)[0])
    assert len(alive) == 3  # of 111 rows


def test_sizes_of_large_models_are_a_few_ranges() -> None:
    """gpt-oss-120b and Qwen3-30B-A3B: 1 GiB at most, and as even as can be."""
    for experts, n, k, parts in ((128, 5760, 2880, 4), (128, 1536, 2048, 1), (256, 4096, 7168, 15)):
        ranges = [*module._some_at_a_time(experts, n * k)]
        assert len(ranges) == parts and ranges[0][0] == 0 and ranges[-1][1] == experts
        assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
        sizes = {end - begin for begin, end in ranges}
        assert max(sizes) * n * k <= module.LARGEST and max(sizes) - min(sizes) <= 1
    assert [*module._some_at_a_time(3, 1 << 30)] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_only_rows_of_tokens_are_kept_for_the_backward_pass(name: str) -> None:
    """Nothing of [rows, 2 I] or [rows, I]: it is computed again."""
    args, _ = sample(E, H, 192, biases=True, **WEIGHTS[name])
    args["weights"] = args["weights"].detach()
    rows, kept = args["ids"].numel(), list[torch.Size]()

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one.shape)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        warploom.experts(**args, **keywords(OAI))
    assert [one for one in kept if one[:1] == (rows,)] == [(rows, H)]


# ---- What the host knows -------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    """The names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WEIGHTS)
def test_nothing_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes run on tensors without contents, and no operator copies from the host's memory:
    that of a table would wait, and a CUDA graph would not take it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(module, "LARGEST", 2 * 2 * I * H)
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    with FakeTensorMode() as mode, _Operators() as seen:
        tree: Any = torch.utils._pytree
        there = tree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        out = warploom.experts(**there, **keywords(OAI), first_expert=0)
        out.backward(torch.empty_like(out))
        assert all(one.grad is not None for one in leaves(there))
    assert {"warploom::route", "warploom::combine"} <= seen.names
    reading = ("lift_fresh", "_local_scalar", "item", "nonzero", "unique", "equal")
    assert not [one for one in seen.names if any(word in one for word in reading)]


def test_a_table_of_the_hosts_would_be_seen() -> None:
    with _Operators() as seen:
        torch.tensor([1.0, 2.0])
    assert any("lift_fresh" in one for one in seen.names)


# ---- Rows of no expert ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_memory_that_nothing_wrote_reaches_nothing(name: str, layout: GateLayout) -> None:
    """Rows of no expert are left as the allocator has them: here NaN, as torch fills them."""
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    gate = Gate("silu", layout)
    expected = step(args, gate)
    torch.use_deterministic_algorithms(True)
    try:
        results = step(args, gate)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(results, expected) and all(one.isfinite().all() for one in results)


@pytest.mark.parametrize("name", ["int4", "e4m3"])
def test_ids_of_no_expert_and_no_tokens_have_zeros(name: str) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    of_tokens = step(args)[1:3]
    skipped = args["ids"] < 0
    assert not of_tokens[1][skipped].any() and of_tokens[1][~skipped].all()
    assert not of_tokens[0][skipped.all(1)].any()
    none = {**args, "ids": torch.full_like(args["ids"], -1)}
    assert not any(one.any() for one in step(none))
    few = {key: args[key].detach()[:0] for key in ("hidden", "ids", "weights")}
    few = {**args, **few, "hidden": few["hidden"].requires_grad_()}
    out, of_hidden, *of_biases = step(few)
    assert out.shape == of_hidden.shape == (0, H)
    assert [one.shape for one in of_biases] == [(E, 2 * I), (E, H)]
    assert not any(one.any() for one in of_biases)


def test_the_experts_of_ranks_add_up() -> None:
    args, _ = sample(E, H, I, biases=True, **MXFP4)
    expected = step(args)
    total = [torch.zeros_like(one) for one in expected[:3]]
    for first in (0, 3):
        ours = slice(first, first + 3)
        part = dict(args)
        for name in ("gate_up", "down"):
            kept = {key: one[ours] for key, one in args[name].tensors().items()}
            part[name] = PackedExperts.from_tensors(kept, args[name].metadata)
        for name in ("gate_up_bias", "down_bias"):
            part[name] = args[name].detach()[ours].requires_grad_()
        results = step({**part, "first_expert": first})
        for one, other in zip(total, results[:3], strict=True):
            one += other
        for one, other in zip(expected[3:], results[3:], strict=True):
            assert torch.equal(one[ours], other)
    for one, other in zip(total, expected[:3], strict=True):  # each a sum that was rounded twice
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * float(other.abs().max()))


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_tokens_and_gradients_may_be_laid_out_anyhow(name: str) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    out = warploom.experts(**args, **keywords(OAI))
    dout = torch.ones((), dtype=BF16).expand(out.shape)  # as that of a sum
    expected = step(args, dout=dout.contiguous())
    assert same(step(args, dout=dout), expected)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "hidden": lambda one: torch.cat((one, one), 1)[:, :H],
        "weights": lambda one: one.T.contiguous().T,
        "gate_up_bias": lambda one: torch.cat((one, one), 1)[:, : 2 * I],
        "down_bias": lambda one: one.double().float().repeat_interleave(2, 0)[::2],
    }
    laid = {key: view(args[key].detach()).requires_grad_() for key, view in views.items()}
    assert same(step({**args, **laid}, dout=dout.T.contiguous().T), expected)
    shaped = dict(args)
    for key in ("hidden", "weights", "ids"):
        shaped[key] = args[key].detach()[:36].reshape(2, 18, -1)
    shaped["hidden"].requires_grad_()
    out, of_hidden = step(shaped)[:2]
    assert out.shape == of_hidden.shape == (2, 18, H)


# ---- With what else torch does -------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_checkpointed_activations_have_the_same_gradients(name: str, reentrant: bool) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    expected = step(args)
    called = lambda hidden: warploom.experts(**{**args, "hidden": hidden}, **keywords(OAI))  # noqa: E731
    out: Any = checkpoint(called, args["hidden"], use_reentrant=reentrant)
    out.backward(gradient(out))
    assert same([out.detach(), *[one.grad for one in leaves(args)]], expected)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "layout"), [("mxfp4", "interleaved"), ("int8", "halves"), ("e4m3", "halves")]
)
def test_compiled_code_has_the_same_results_and_gradients(
    name: str, layout: GateLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 3 * 2 * I * H)
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    gate = Gate("swiglu_oai", layout, 1.25, 3.0)

    def layer(**tensors: Any) -> torch.Tensor:
        return warploom.experts(**tensors, **keywords(gate))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(**args)
    results = [out.detach(), *torch.autograd.grad(out, leaves(args), gradient(out))]
    assert same(results, step(args, gate))


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_autocast_takes_tokens_of_fp32(name: str) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])
    expected = step(args)
    args["hidden"] = args["hidden"].detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = warploom.experts(**args, **keywords(OAI))
    assert out.dtype == torch.float32
    results = torch.autograd.grad(out, leaves(args), gradient(out))
    assert results[0].dtype == torch.float32
    for one, other in zip(results, expected[1:], strict=True):
        assert (one.float() - other.float()).norm() <= 2**-6 * other.float().norm()
    with torch.autocast("cpu", torch.bfloat16):  # also where the backward pass is within it
        out = warploom.experts(**args, **keywords(OAI))
        again = torch.autograd.grad(out, leaves(args), gradient(out))
    assert same([*again], [*results])


def test_a_gate_and_a_norm_of_the_callers_have_their_gradients() -> None:
    args, _ = sample(E, H, I, **MXFP4)
    scale, norm = torch.full((I,), 0.5).requires_grad_(), torch.nn.RMSNorm(H)
    own = lambda both: both[:, :I].sigmoid() * both[:, I:] * scale  # noqa: E731
    dense = {**args}
    for name in ("gate_up", "down"):
        dense[name] = args[name].dequantize(BF16)
    results, expected = (
        torch.autograd.grad(
            warploom.experts(**one, gate=own, norm=norm).float().square().sum(),
            [one["hidden"], one["weights"], scale, norm.weight],
        )
        for one in (args, dense)
    )
    for one, other in zip(results, expected, strict=True):
        assert (one.float() - other.float()).norm() <= 2**-7 * other.float().norm()


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_a_second_derivative_is_refused(name: str) -> None:
    args, _ = sample(E, H, I, **WEIGHTS[name])
    out = warploom.experts(**args, **keywords(OAI))
    with pytest.raises(ProblemError, match="gradient of permute has none itself"):
        torch.autograd.grad(out.float().sum(), args["hidden"], create_graph=True)
    rows, offsets = args["hidden"], torch.tensor([5, 9, 9, 20, 30, 37], dtype=torch.int32)
    weight = args["gate_up"] if name == "mxfp4" else args["gate_up"].mT
    scale = args.get("gate_up_scale")
    y = module.frozen_grouped_linear(rows, weight, offsets, None, scale, OAI)
    (dx,) = torch.autograd.grad(y.float().square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_transforms_of_torch_func_are_refused(name: str) -> None:
    args, _ = sample(E, H, I, biases=True, **WEIGHTS[name])

    def loss(bias: torch.Tensor) -> torch.Tensor:
        return warploom.experts(**{**args, "gate_up_bias": bias}, **keywords(OAI)).float().sum()

    with pytest.raises(ProblemError, match=r"warploom.experts inside of torch.func's grad"):
        torch.func.grad(loss)(args["gate_up_bias"].detach())


@pytest.mark.parametrize("part", ["gate_up", "down", "gate_up_scale", "down_scale"])
def test_weights_in_fp8_that_train_are_refused_by_name(part: str) -> None:
    args, _ = sample(E, H, I)
    args[part].requires_grad_()
    with pytest.raises(ProblemError, match=f"^{part}.* that requires grad: must not require grad"):
        warploom.experts(**args)
    with torch.no_grad():
        warploom.experts(**args)


def test_parts_of_packed_experts_that_train_are_refused_by_name() -> None:
    args, _ = sample(E, H, I, format="int8", group=None)
    args["down"].channel_scales.requires_grad_()
    told = "^channel_scales of down that requires grad: must not require grad"
    with pytest.raises(ProblemError, match=told):
        warploom.experts(**args)
