"""`warploom.nn.GatedMLP`: parameters that stay what they are, and when one kernel computes both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, model

import warploom
from warploom.errors import ProblemError
from warploom.integrations import gated_mlp
from warploom.nn import GatedMLP, Linear

BF16 = torch.bfloat16
IDS = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of gemm's calls of gated layers, which run as they would on a GPU."""
    seen: list[dict[str, Any]] = []

    def gemm(x: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
        seen.append(keywords)
        return warploom.gemm(x, b, **keywords)

    monkeypatch.setattr(gated_mlp, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(gated_mlp, "gemm", gemm)
    return seen


def layer(gate: str = "silu", bias: bool = True) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(64, 96, bias, dtype=BF16, gate=gate)


def by_hand(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    function = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[mlp.gate]
    return F.linear(
        function(F.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias))
        * F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias),
        mlp.down_proj.weight,
        mlp.down_proj.bias,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["silu", "gelu", "relu"])
def test_one_product_computes_gate_and_up(
    gate: str, products: list[dict[str, Any]], *, bias: bool
) -> None:
    mlp, x = layer(gate, bias), torch.randn(2, 5, 64).to(BF16)
    with torch.no_grad():
        found = mlp(x)
    assert [one["gate"] for one in products] == [gate]
    torch.testing.assert_close(found, by_hand(mlp, x), rtol=2**-5, atol=2**-8)


def test_the_layers_compute_where_one_product_would_not_serve(
    products: list[dict[str, Any]],
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    expected = by_hand(mlp, x)
    assert torch.allclose(mlp(x), expected, rtol=2**-5, atol=2**-8)  # whose weights train
    with torch.no_grad():
        hook = mlp.up_proj.register_forward_hook(lambda *_: None)
        mlp(x)
        hook.remove()
        mlp(x[0])
        apart = copy.deepcopy(mlp)
        apart.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.clone())
        apart(x)
        other = layer()
        other.up_proj.bias = None
        other(x)
        compiled = torch.compile(mlp, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), expected, rtol=2**-5, atol=2**-8)
    assert products == []
    with torch.no_grad():
        mlp(x)
    assert len(products) == 1


def test_parameters_stay_what_they_are_and_follow_the_model(
    products: list[dict[str, Any]],
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    parameters = dict(mlp.named_parameters())
    names = [
        f"{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")
    ]
    assert list(mlp.state_dict()) == names
    with torch.no_grad():
        before = mlp(x)
        mlp.gate_proj.weight.mul_(2)  # as an optimizer would
        mlp.up_proj.bias.add_(1)
        after = mlp(x)
        torch.testing.assert_close(after, by_hand(mlp, x), rtol=2**-5, atol=2**-8)
        assert not torch.equal(before, after)
        mlp.to(torch.float32).to(BF16)  # memory is joined again
        assert {name: id(one) for name, one in mlp.named_parameters()} == {
            name: id(one) for name, one in parameters.items()
        }
        assert torch.equal(mlp(x), after)
        loaded = layer()
        loaded.load_state_dict(mlp.state_dict())
        assert torch.equal(loaded(x), after)
    assert len(products) == 4


def test_copies_and_files_have_what_the_layer_has(
    tmp_path: Path, products: list[dict[str, Any]]
) -> None:
    mlp, x = layer(), torch.randn(5, 64).to(BF16)
    with torch.no_grad():
        expected = mlp(x)
        twin = copy.deepcopy(mlp)
        twin.gate_proj.weight.zero_()
        assert torch.equal(mlp(x), expected)
        assert not torch.equal(twin(x), expected)
        save_file(mlp.state_dict(), tmp_path / "mlp.safetensors")
        loaded = layer()
        loaded.load_state_dict(load_file(tmp_path / "mlp.safetensors"))
        assert torch.equal(loaded(x), expected)


@pytest.mark.parametrize(
    ("name", "gate"), [("Llama", "silu"), ("Qwen3", "silu"), ("Gemma2", "gelu_tanh")]
)
def test_patch_gates_the_layers_of_models(
    name: str, gate: str, products: list[dict[str, Any]]
) -> None:
    speaking = model(name, "eager", BF16)
    kind = type(speaking.model.layers[0].mlp).__name__
    names, parameters = list(speaking.state_dict()), [id(one) for one in speaking.parameters()]
    with torch.no_grad():
        said = speaking(IDS).logits.float()
        with warploom.patch(speaking) as patch:
            row = next(row for row in patch.rows if row.now == "warploom.nn.GatedMLP")
            assert (row.what, row.count) == (kind, 2)
            mlp = speaking.model.layers[0].mlp
            assert type(mlp) is GatedMLP and type(mlp.gate_proj) is Linear
            assert list(speaking.state_dict()) == names
            assert [id(one) for one in speaking.parameters()] == parameters
            gated = speaking(IDS).logits.float()
            assert [one["gate"] for one in products] == [gate] * 2
            assert (gated - said).abs().max() <= 0.05 * said.abs().max()
        assert type(speaking.model.layers[0].mlp).__name__ == kind
        assert [id(one) for one in speaking.parameters()] == parameters
        assert torch.equal(speaking(IDS).logits.float(), said)


def test_patch_leaves_what_kernels_would_not_gate() -> None:
    for dtype in (torch.float32,):
        patch = warploom.patch(model("Llama", "eager", dtype))
        assert all(row.now != "warploom.nn.GatedMLP" for row in patch.rows)
    hooked = model("Llama", "eager", BF16)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    (row,) = [row for row in warploom.patch(hooked).rows if row.now == "warploom.nn.GatedMLP"]
    assert row.count == 1


def test_a_layer_that_computes_something_else_is_refused() -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.down_proj, self.act_fn = torch.nn.Linear(8, 8), torch.nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
            return hidden

    with pytest.raises(ProblemError, match="a Other: must compute"):
        GatedMLP.from_torch(Other())
    with pytest.raises(ProblemError, match="gate 'swish': must be one of relu"):
        GatedMLP(8, 8, gate="swish")
