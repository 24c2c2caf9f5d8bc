"""Gated layers with quantized weights: one GEMM for gate and up, and states that do not tell."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_checkpoints_quantized import load, saved
from test_peft import adapted
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.generator.formats import FORMATS
from warploom.integrations import devices, quantized_gate
from warploom.integrations.quantized_gate import InterleavedLinear
from warploom.nn import GatedMLP, QuantizedLinear
from warploom.quantization import interleave

BF16 = torch.bfloat16
IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The epilogues of GEMMs of gate and up, which run as they would on a GPU."""
    seen: list[Any] = []

    def mixed_gemm(x: torch.Tensor, weight: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
        seen.append(keywords["epilogue"])
        return warploom.mixed_gemm(x, weight, **keywords)

    monkeypatch.setitem(devices.reasons, -1, None)
    monkeypatch.setattr(quantized_gate, "mixed_gemm", mixed_gemm)
    return seen


def quantized(format: str = "int8", group: int | None = 32, name: str = "Llama") -> Any:  # noqa: ANN401
    """A model of transformers whose linear layers are quantized, and not gated."""
    speaking = model(name, "eager", BF16)
    for _, layer in [*speaking.named_modules()]:
        for part, child in [*layer.named_children()]:
            if type(child) is torch.nn.Linear and part != "lm_head":
                setattr(layer, part, QuantizedLinear.from_linear(child, format, group))
    return speaking


def of_one(speaking: Any) -> Any:  # noqa: ANN401
    return speaking.model.layers[0].mlp


def same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether states have the same names in the same order, and the same bytes."""
    return list(state) == list(expected) and all(
        torch.equal(state[key].view(torch.uint8), one.view(torch.uint8))
        for key, one in expected.items()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "gate"), [("Llama", "silu"), ("Qwen3", "silu"), ("Gemma2", "gelu_tanh")]
)
def test_a_patch_gates_quantized_models_and_their_states_do_not_tell(
    name: str, gate: str, gated: list[Any]
) -> None:
    """Bytes that moved, keys of the joined weight, or layers that an undo left without one."""
    speaking = quantized(name=name)
    expected = {key: one.clone() for key, one in speaking.state_dict().items()}
    kept = of_one(speaking).gate_proj
    said = speaking(IDS).logits.float()
    with warploom.patch(speaking) as patch:
        assert next(row for row in patch.rows if row.now == "warploom.nn.GatedMLP").count == 2
        heard = speaking(IDS).logits.float()
        assert gated == [[("gate_interleaved", gate)]] * 2
        assert (heard - said).abs().max() <= 0.05 * said.abs().max()
        assert of_one(speaking).gate_proj is kept and type(kept) is InterleavedLinear
        assert same(speaking.state_dict(), expected)
    assert type(kept) is QuantizedLinear and of_one(speaking).gate_proj is kept
    assert same(speaking.state_dict(), expected)
    assert torch.equal(speaking(IDS).logits.float(), said)


@torch.no_grad()
@pytest.mark.parametrize(
    ("format", "group"), [(row.name, group) for row in FORMATS.values() for group in row.groups]
)
def test_weights_that_take_turns_are_taken_apart_bit_for_bit(
    format: str, group: int | None, gated: list[Any]
) -> None:
    """Of every format, with scales of groups and of rows, and rows that fill no slab."""
    torch.manual_seed(0)
    mlp = GatedMLP(256, 72, dtype=BF16)
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, QuantizedLinear.from_linear(getattr(mlp, name), format, group))
    x = torch.randn(5, 256).to(BF16)
    expected = {key: one.clone() for key, one in mlp.state_dict().items()}
    one_by_one = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    mlp.join()
    assert type(mlp.up_proj) is InterleavedLinear
    torch.testing.assert_close(mlp(x), one_by_one, rtol=2**-5, atol=2**-8)
    assert len(gated) == 1 and same(mlp.state_dict(), expected)
    assert mlp.up_proj.weight.dequantize().shape == (72, 256)  # asks for a weight of its own
    assert type(mlp.gate_proj) is QuantizedLinear and same(mlp.state_dict(), expected)
    # Every format has a kernel with the gate, on a GPU.
    weight = warploom.quantize(torch.randn(144, 256), format, group)
    steps = [("gate_interleaved", "silu")]
    said = warploom.explain(warploom.mixed_gemm, x, weight, epilogue=steps, gpu="NVIDIA H200")
    assert "gate" in said.kernel


@torch.no_grad()
def test_a_layer_is_joined_again_where_its_state_is_loaded_and_follows_conversions(
    gated: list[Any],
) -> None:
    speaking, other = quantized(), quantized(group=None)
    warploom.patch(speaking, attention=False)
    mlp = of_one(speaking)
    state = {key: one.clone() for key, one in speaking.state_dict().items()}
    expected = mlp(torch.ones(2, 64, dtype=BF16))
    mlp.gate_proj.reset_parameters()  # which separates them
    mlp.up_proj.data.zero_()
    assert not mlp(torch.ones(2, 64, dtype=BF16)).any()
    speaking.load_state_dict(state)
    assert type(mlp.gate_proj) is InterleavedLinear
    assert torch.equal(mlp(torch.ones(2, 64, dtype=BF16)), expected)
    with pytest.raises(RuntimeError, match=r"layers.0.mlp.gate_proj: a weight of"):
        speaking.load_state_dict(other.state_dict())
    assert same(speaking.state_dict(), state)  # as a quantized layer refuses a part of it
    speaking.to(torch.float16)
    assert same(
        mlp.state_dict(), {key: state[f"model.layers.0.mlp.{key}"] for key in mlp.state_dict()}
    )
    assert mlp.gate_proj.dtype == torch.float16 and type(mlp.gate_proj) is InterleavedLinear
    assert mlp(torch.ones(2, 64, dtype=torch.float16)).dtype == torch.float16
    count = len(gated)
    single = mlp(torch.ones(64, dtype=torch.float16))
    assert len(gated) == count + 1 and single.shape == (64,)


@torch.no_grad()
def test_a_copy_is_gated_apart_from_what_it_is_of(gated: list[Any]) -> None:
    """A copy whose layers still had the weight of what it was copied from."""
    speaking = quantized()
    warploom.patch(speaking, attention=False)
    mlp, x = of_one(speaking), torch.ones(2, 64, dtype=BF16)
    expected, state, copied = mlp(x), mlp.state_dict(), copy.deepcopy(mlp)
    count = len(gated)
    assert torch.equal(copied(x), expected) and len(gated) == count + 1
    copied.gate_proj.reset_parameters()
    assert not copied(x).any()
    assert type(mlp.gate_proj) is InterleavedLinear and same(mlp.state_dict(), state)


@torch.no_grad()
def test_a_model_is_saved_and_loaded_bit_for_bit(tmp_path: Path, gated: list[Any]) -> None:
    """Files of a model with gated layers are those of one without."""
    saved(tmp_path / "given", "Llama")
    found = load(tmp_path / "given", warploom.WarploomConfig("int4", 128))
    found.save_pretrained(tmp_path / "plain")
    warploom.patch(found, attention=False)
    found(IDS)
    assert gated and type(of_one(found).gate_proj) is InterleavedLinear
    found.save_pretrained(tmp_path / "gated")
    for file in ("config.json", "model.safetensors"):
        plain, again = ((tmp_path / name / file).read_bytes() for name in ("plain", "gated"))
        assert again == plain
    assert same(load(tmp_path / "gated").state_dict(), found.state_dict())


def test_adapters_get_layers_with_weights_of_their_own(gated: list[Any]) -> None:
    """An adapter of the gate alone: its layer has no weight but the joined one."""
    speaking = model("Llama", "eager", BF16)
    warploom.patch(speaking, weights={"format": "int8", "group": 32}, attention=False)
    with torch.no_grad():
        expected = speaking(IDS).logits
    assert len(gated) == 2
    trained = adapted(speaking, target_modules=["gate_proj"])
    base = of_one(trained.base_model.model).gate_proj.base_layer
    assert type(base) is QuantizedLinear
    trained(input_ids=IDS, labels=IDS).loss.backward()
    grads = [one.grad for name, one in trained.named_parameters() if "lora_B" in name]
    assert len(grads) == 2 and all(one is not None and one.any() for one in grads)
    with torch.no_grad():
        heard = trained(IDS).logits
    assert (heard - expected).abs().max() <= 0.05 * expected.abs().max()
    assert len(gated) == 2


def test_gradients_of_the_input_and_compiled_layers_are_those_of_the_layers(
    gated: list[Any],
) -> None:
    speaking = quantized()
    plain = copy.deepcopy(of_one(speaking))
    warploom.patch(speaking, attention=False)
    mlp, x = of_one(speaking), torch.randn(5, 64).to(BF16).requires_grad_()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    of_layers = torch.autograd.grad(plain(x).float().square().sum(), x)[0]
    for call in (mlp, compiled):
        grad = torch.autograd.grad(call(x).float().square().sum(), x)[0]
        torch.testing.assert_close(
            grad, of_layers, rtol=2**-4, atol=2**-4 * of_layers.abs().max().item()
        )
    assert type(mlp.gate_proj) is InterleavedLinear


@torch.no_grad()
def test_layers_that_cannot_be_one_stay_three(gated: list[Any]) -> None:
    """Hooks, which no longer ran; biases; weights of two kinds; and where linear=False asks so."""
    hooked = quantized()
    warploom.patch(hooked, attention=False)
    calls: list[int] = []
    of_one(hooked).up_proj.register_forward_hook(lambda *_: calls.append(1))
    hooked(IDS)
    assert calls == [1] and len(gated) == 1  # of the other layer
    for change in ("bias", "format"):
        odd = quantized()
        up = of_one(odd).up_proj
        if change == "bias":
            up.bias = torch.nn.Parameter(torch.zeros(up.out_features, dtype=BF16))
        else:
            of_one(odd).up_proj = QuantizedLinear(
                64, up.out_features, False, format="int4", group=32
            )
        (row,) = [one for one in warploom.patch(odd).rows if one.now == "warploom.nn.GatedMLP"]
        assert row.count == 1
    assert not [one for one in warploom.patch(quantized(), linear=False).rows if "Gated" in one.now]


def test_a_sharded_layer_says_how_its_state_can_be_read(
    gated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking = quantized()
    warploom.patch(speaking, attention=False)
    monkeypatch.setattr(quantized_gate, "is_distributed", lambda _: True)
    with pytest.raises(ProblemError, match=r"sharded.*separate\(\)"):
        of_one(speaking).state_dict()


@torch.no_grad()
def test_a_shallow_copy_of_a_layer_has_its_weight(gated: list[Any]) -> None:
    """One of before or after the weights were joined, which is not among the layers."""
    speaking = quantized()
    mlp, x = of_one(speaking), torch.ones(2, 64, dtype=BF16)
    before, expected = copy.copy(mlp.gate_proj), mlp.up_proj(x)
    of_gate, state = before(x), {key: one.clone() for key, one in mlp.up_proj.state_dict().items()}
    warploom.patch(speaking, attention=False)
    mlp = of_one(speaking)
    assert type(mlp.gate_proj) is InterleavedLinear and torch.equal(before(x), of_gate)
    calls, saved, moved = (copy.copy(mlp.up_proj) for _ in range(3))
    assert torch.equal(calls(x), expected) and type(mlp.up_proj) is QuantizedLinear
    mlp.join()
    assert same(saved.state_dict(), state) and type(moved.half()) is QuantizedLinear
    assert torch.equal(mlp.up_proj(x), expected)


@torch.no_grad()
def test_two_threads_that_ask_for_weights_both_get_them(
    gated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had found the layers joined, and each separated them."""
    speaking = quantized()
    warploom.patch(speaking, attention=False)
    mlp, meeting = of_one(speaking), threading.Barrier(2)

    def every_other(*given: Any) -> Any:  # noqa: ANN401
        with suppress(threading.BrokenBarrierError):  # as it is where only one is let in
            meeting.wait(0.5)
        return interleave.every_other(*given)

    monkeypatch.setattr(quantized_gate, "every_other", every_other)
    with ThreadPoolExecutor(2) as pool:
        layers = (mlp.gate_proj, mlp.up_proj)
        found = [*pool.map(lambda layer: layer.weight.dequantize(), layers)]
    assert [one.shape for one in found] == [(mlp.gate_proj.out_features, 64)] * 2


def joined(seed: int = 0) -> GatedMLP:
    torch.manual_seed(seed)
    mlp = GatedMLP(64, 96, dtype=BF16)
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, QuantizedLinear.from_linear(getattr(mlp, name), "int8", 32))
    mlp.join()
    return mlp


@torch.no_grad()
def test_a_state_is_loaded_to_where_kernels_read_the_weight(gated: list[Any]) -> None:
    """A CUDA graph that was captured before would read memory that is another's by now."""
    mlp, other, x = joined(), joined(1), torch.ones(2, 64, dtype=BF16)
    places = {name: one.data_ptr() for name, one in mlp.named_parameters()}
    before, state = mlp.state_dict(), other.state_dict()
    mlp.load_state_dict({key: one for key, one in state.items() if "gate" in key}, strict=False)
    assert {key for key, one in mlp.state_dict().items() if not torch.equal(one, before[key])} == {
        "gate_proj.data"
    }
    mlp.load_state_dict(state)
    assert {name: one.data_ptr() for name, one in mlp.named_parameters()} == places
    assert same(mlp.state_dict(), state) and torch.equal(mlp(x), other(x))
    mlp.load_state_dict(before, assign=True)
    assert same(mlp.state_dict(), before) and type(mlp.gate_proj) is InterleavedLinear
    assert len(gated) == 2


@torch.no_grad()
def test_one_of_the_layers_moves_alone(gated: list[Any]) -> None:
    """The other lost its weight: to no memory, or to that of `to_empty`."""
    for move in (lambda one: one.to("meta"), lambda one: one.to_empty(device="cpu")):
        mlp, expected = joined(), joined().up_proj.weight.dequantize()
        move(mlp.gate_proj)
        assert torch.equal(mlp.up_proj.weight.dequantize(), expected)
    mlp = joined()
    state = {key: one.clone() for key, one in mlp.state_dict().items()}
    mlp.to("meta")
    assert type(mlp.gate_proj) is InterleavedLinear
    mlp.to_empty(device="cpu").load_state_dict(state)
    assert same(mlp.state_dict(), state)


@torch.no_grad()
@pytest.mark.parametrize("name", ["activation", "forward", "metadata"])
def test_what_a_layer_gets_after_it_was_joined_is_what_it_computes_with(
    name: str, gated: list[Any]
) -> None:
    mlp, x = joined(), torch.randn(3, 64).to(BF16)
    gate = mlp.gate_proj
    given = {"activation": "relu", "forward": lambda x: x.new_ones(3, 96)}
    setattr(gate, name, given.get(name, gate.metadata))
    assert type(gate) is QuantizedLinear
    assert torch.equal(mlp(x), mlp.down_proj(F.silu(gate(x)) * mlp.up_proj(x))) and not gated
    mlp = joined()
    with pytest.raises(TypeError, match="cannot assign"):  # as a parameter
        mlp.up_proj.data = torch.zeros(3)


@torch.no_grad()
def test_a_layer_that_is_asked_has_parameters_and_its_model_has_them_once(
    gated: list[Any],
) -> None:
    mlp = joined()
    assert [*dict(mlp.named_parameters())] == ["down_proj.weight", "gate_up.data"]
    assert not [*mlp.gate_proj.named_parameters(recurse=False)]
    assert next(mlp.gate_proj.parameters()).dtype == torch.uint8
    assert [*dict(mlp.named_parameters())] == [
        *("gate_proj.data", "up_proj.data", "down_proj.weight")
    ]


@torch.no_grad()
def test_layers_are_compiled_whole_where_they_compute_one_by_one(gated: list[Any]) -> None:
    """No compiler traces how layers get a weight of their own, under a lock."""
    torch.compiler.reset()
    mlp, x = joined(), torch.randn(3, 64).to(BF16)
    mlp.gate_proj.register_forward_hook(lambda *_: None)
    expected = mlp.down_proj(F.silu(joined().gate_proj(x)) * joined().up_proj(x))
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=2**-5, atol=2**-8)
    assert type(mlp.gate_proj) is InterleavedLinear and not gated


def test_a_state_that_is_read_while_layers_are_separated_has_both(
    gated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = joined()
    state, whole = mlp.state_dict(), quantized_gate.GateUp.weight_of

    def weight_of(both: quantized_gate.GateUp, index: int) -> Any:  # noqa: ANN401
        both.separate()  # as another thread may
        return whole(both, index)

    monkeypatch.setattr(quantized_gate.GateUp, "weight_of", weight_of)
    assert same(mlp.state_dict(), state)
