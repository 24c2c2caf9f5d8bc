"""Experts with quantized weights: as grouped GEMMs, one by one, in patched models, and saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import moe_models
import pytest
import torch
from transformers import AutoModelForCausalLM

import warploom
from warploom.errors import ProblemError
from warploom.integrations import transformers_experts as rules
from warploom.integrations.checkpoints import experts as module
from warploom.integrations.checkpoints import records
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts
from warploom.integrations.expert_layers import layers_of
from warploom.integrations.patch_report import AS_IT_WAS
from warploom.integrations.patch_weights import Weights
from warploom.quantization import PackedExperts

BF16 = torch.bfloat16
IDS = torch.arange(14).reshape(2, 7)
NAMES = ("mixtral", "gpt_oss", "qwen3_moe")
INNER = {"gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}


def model(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """One whose experts have whole groups."""
    if name in INNER:
        sizes = {**moe_models.MODELS[name], INNER[name]: 64}
        monkeypatch.setitem(moe_models.MODELS, name, sizes)
    return moe_models.model(name).to(BF16).eval()


def layers(made: torch.nn.Module) -> list[QuantizedExperts]:
    return [one for one in made.modules() if isinstance(one, QuantizedExperts)]


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU that has kernels runs here too."""
    monkeypatch.setattr(module, "refusal", lambda *given: None)


@pytest.mark.usefixtures("grouped")
@torch.no_grad()
@pytest.mark.parametrize("weights", ["mxfp4", {"format": "int4", "group": 32}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_patched_models_compute_as_their_experts_with_these_weights(
    name: str, weights: Weights | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of gate and up that are taken for each other would be another layer."""
    made = model(name, monkeypatch)
    before = [one for one in made.modules() if hasattr(one, "is_concatenated")]
    given = [copy.deepcopy(one) for one in before]
    patch = warploom.patch(made, weights=weights, attention=False)
    (row,) = [row for row in patch.rows if row.what.startswith("experts of")]
    assert row.count == len(before) == len(layers(made)) and "quantized experts" in row.now
    assert made(IDS).logits.isfinite().all()
    hidden = torch.randn(9, before[0].config.hidden_size).to(BF16)
    chosen, ids = torch.randn(9, 4).softmax(-1).topk(2)
    for own, layer in zip(layers(made), given, strict=True):
        _, layout = rules.gate_of(layer)
        for part in PARTS:
            values = torch.stack([one.weight.dequantize(BF16) for one in getattr(own, part)])
            if part == PARTS[0] and layout == "halves":
                values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
            parameter = getattr(layer, part)
            parameter.copy_(values.mT if layer.is_transposed else values)
        wanted = type(layer).forward.__wrapped__(layer, hidden, ids, chosen.to(BF16)).float()
        for found in (
            own(hidden, ids, chosen.to(BF16)),
            own._one_by_one(hidden, ids, chosen, True),
        ):
            assert (found.float() - wanted).norm() <= 2**-6 * wanted.norm()


@pytest.mark.usefixtures("grouped")
@torch.no_grad()
def test_layers_share_one_memory_whatever_moves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that is not renewed computes with the weights that there were."""
    made = model("gpt_oss", monkeypatch)
    other = model("gpt_oss", monkeypatch)
    for parameter in other.parameters():
        parameter.mul_(-0.5)
    for one in (made, other):
        warploom.patch(one, weights="mxfp4", attention=False)
    own, another = layers(made)[0], layers(other)[0]
    hidden, ids = (
        torch.randn(5, 64).to(BF16),
        torch.tensor([[0, 1], [2, 3], [1, 0], [3, 0], [2, 1]]),
    )
    chosen = torch.rand(5, 2).to(BF16)
    first, wanted = own(hidden, ids, chosen), another(hidden, ids, chosen)
    assert not torch.equal(first, wanted)
    (stack,) = {one.weight.slabs.untyped_storage().data_ptr() for one in own.down_proj}
    assert stack == own._stacks["down_proj"].of(own.down_proj)[0].slabs.data_ptr()
    copied = copy.deepcopy(own)
    own.load_state_dict(another.state_dict())
    assert torch.equal(own(hidden, ids, chosen), wanted)
    assert torch.equal(copied(hidden, ids, chosen), first)
    copied.load_state_dict(another.state_dict(), assign=True)
    assert torch.equal(copied(hidden, ids, chosen), wanted)
    every = torch.zeros(5, 4, dtype=BF16).scatter(1, ids, chosen)
    assert torch.equal(own(hidden, ids, every), wanted)


@torch.no_grad()
def test_what_is_not_quantized_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = moe_models.model("qwen3_moe")  # whose inner extent is 48
    rows = warploom.patch(made, weights="mxfp4", attention=False).rows
    (row,) = [row for row in rows if row.what == "weights of Qwen3MoeExperts"]
    assert row.now == AS_IT_WAS and "must divide k, which is 48" in row.because
    made = model("mixtral", monkeypatch)
    warploom.patch(made, weights={"format": "mxfp4", "skip": ["experts"]}, attention=False)
    assert not layers(made)
    rows = warploom.patch(moe_models.model("nemotron_h"), weights="int4").rows
    assert any("without a gate" in row.because for row in rows)


@torch.no_grad()
@pytest.mark.parametrize("skip", [[], ["layers.1"]])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_a_patched_mixture_is_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, skip: list[str]
) -> None:
    """Others than GPT-OSS were refused: transformers split the weights of each expert."""
    made = model(name, monkeypatch)
    warploom.patch(made, weights={"format": "mxfp4", "skip": skip}, attention=False)
    assert layers(made) or name == "deepseek_v3"  # whose first layer has no experts
    for folder in ("first", "again"):
        made.save_pretrained(tmp_path / folder)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")
        assert [one.gate for one in layers(again)] == [one.gate for one in layers(made)]
        state = again.state_dict()
        assert state.keys() == made.state_dict().keys()
        for key, one in made.state_dict().items():
            if ".experts." in key:
                assert torch.equal(state[key].view(torch.uint8), one.view(torch.uint8)), key
        made = again


@pytest.mark.parametrize("change", ["norm", "forward"])
def test_a_checkpoint_says_no_more_than_a_patch(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its quantized experts took the place of a layer whose norm or forward they have not."""
    made = model("mixtral", monkeypatch)
    warploom.patch(made, weights="mxfp4", attention=False)
    kinds = records.records(made)
    other = model("mixtral", monkeypatch)
    layer: Any = next(layers_of(other))
    if change == "norm":
        layer.has_post_expert_norm, layer.post_expert_norm = True, torch.nn.RMSNorm(64)
    else:
        layer.forward = lambda *given: given[0]
    with pytest.raises(ProblemError, match=r"must be a torch.nn.Linear, or one of its experts"):
        records.place(other, kinds)
    assert not layers(other)


def test_quantized_experts_are_refused_beside_others() -> None:
    hidden, ids = torch.randn(6, 64).to(BF16), torch.zeros(6, 2, dtype=torch.int64)
    weights = torch.ones(6, 2)
    gate_up, down = torch.randn(4, 128, 64).to(BF16), torch.randn(4, 64, 64).to(BF16)
    packed = PackedExperts.quantize(gate_up, "mxfp4"), PackedExperts.quantize(down, "mxfp4")
    for change, told in (
        ({"down": down}, "must both be PackedExperts"),
        ({"hidden": hidden.float()}, "must be bfloat16 or float16"),
        ({"transposed": True}, "outputs first"),
    ):
        call: dict[str, Any] = {"hidden": hidden, "gate_up": packed[0], "down": packed[1]}
        call |= {"ids": ids, "weights": weights, **change}
        with pytest.raises(ProblemError, match=told):
            warploom.experts(**call)


@pytest.mark.usefixtures("grouped")
@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        *("bias", "layer", "hook", "compiled"),
        *("memory", "one bias", "activation", "format", "one more"),
    ],
)
def test_experts_that_are_changed_compute_with_what_they_have_now(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack that was made before has the weights that there were, and calls no layer."""
    made = model("gpt_oss", monkeypatch)
    warploom.patch(made, weights="mxfp4", attention=False)
    own, another = layers(made)
    hidden, ids = torch.randn(5, 64).to(BF16), torch.arange(10).view(5, 2) % 4
    chosen, heard = torch.rand(5, 2).to(BF16), list[int]()
    with torch.inference_mode():
        own(hidden, ids, chosen)
    assert not any(one.is_inference() for one in own.parameters())
    call: Any = own
    if change == "bias":
        own.down_proj[1].bias = torch.nn.Parameter(own.down_proj[1].bias + 9)
    elif change == "layer":
        own.gate_up_proj[1] = another.gate_up_proj[1]
    elif change == "hook":
        own.down_proj[1].register_forward_hook(lambda *_: heard.append(1))
    elif change == "memory":  # of one that is neither the first nor the last
        packed = own.down_proj[1].data
        packed.data = another.down_proj[1].data.detach().clone()
    elif change == "one bias":
        own.gate_up_proj[2].bias.fill_(9)
        own.gate_up_proj[0].bias = None
    elif change == "activation":
        own.gate_up_proj[1].activation = "relu"
    elif change == "format":
        linear = torch.nn.Linear(64, 64, dtype=BF16)
        own.down_proj[1] = warploom.nn.QuantizedLinear.from_linear(linear, "int8", 32)
    elif change == "one more":
        own.gate_up_proj.append(another.gate_up_proj[1])
        own.down_proj.append(another.down_proj[1])
        ids = ids % 4 + 1
    else:
        call = torch.compile(own, backend="aot_eager")
        call(hidden, ids, chosen)
        own.load_state_dict(copy.deepcopy(another.state_dict()), assign=True)
    found, wanted = call(hidden, ids, chosen), own._one_by_one(hidden, ids, chosen, True)
    assert (found - wanted).float().norm() <= 2**-6 * wanted.float().norm()
    assert len(heard) == 2 * (change == "hook")


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("listed", [True, False])
def test_tokens_and_biases_get_gradients_by_grouped_gemms(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer has the gradient of its own bias, which is a part of what all experts share."""
    made = model("gpt_oss", monkeypatch).requires_grad_(False)
    warploom.patch(made, weights="mxfp4", attention=False)
    own = layers(made)[0]
    monkeypatch.setattr(own, "_one_by_one", None)
    assert not any(one.requires_grad for one in own.parameters())
    biases = [own.down_proj[2].bias.requires_grad_(), own.gate_up_proj[1].bias.requires_grad_()]
    hidden, ids = torch.randn(5, 64).to(BF16), torch.arange(10).view(5, 2) % 4
    chosen = torch.rand(5, 2).to(BF16)
    if not listed:
        chosen = torch.zeros(5, 4, dtype=BF16).scatter(1, ids, chosen)
    leaves = [hidden.requires_grad_(), chosen.requires_grad_(), *biases]
    found = torch.autograd.grad(own(hidden, ids, chosen).float().square().sum(), leaves)
    monkeypatch.undo()
    alone = own._one_by_one(hidden, ids, chosen, listed).float().square().sum()
    for one, other in zip(found, torch.autograd.grad(alone, leaves), strict=True):
        assert other.any() and (one - other).float().norm() <= 2**-6 * other.float().norm()
    with torch.no_grad():
        first = own(hidden, ids, chosen)
    own._stacks["down_proj"]._made[1].add_(1)  # what all share is still what layers have
    assert not torch.equal(own(hidden, ids, chosen), first)


@torch.no_grad()
def test_experts_that_train_or_were_wrapped_stay_and_hooks_go_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model("mixtral", monkeypatch).requires_grad_(False)
    first, second = (one.mlp.experts for one in made.model.layers)
    first.requires_grad_(True)
    heard: list[object] = []
    second.register_forward_pre_hook(lambda _, given, __: heard.append(given), with_kwargs=True)
    rows = warploom.patch(made, weights="mxfp4", attention=False).rows
    assert any("it trains" in row.because for row in rows if "MixtralExperts" in row.what)
    assert len(layers(made)) == 1 and made(IDS).logits.isfinite().all() and heard
    made = model("mixtral", monkeypatch)
    block = made.model.layers[0].mlp
    block.experts.forward = lambda hidden, *_: hidden
    rows = warploom.patch(block, weights="mxfp4", attention=False).rows
    assert any("replaced on the instance" in row.because for row in rows)
    rows = warploom.patch(made.model.layers[1].mlp.experts, weights="mxfp4", attention=False).rows
    assert any("the model itself" in row.because for row in rows)
