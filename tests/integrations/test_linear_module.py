"""`warploom.nn.Linear` is a module like torch's: its states and copies, the way there and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from linear_layers import IN, OUT, Layer, expected, layer

from warploom.errors import ProblemError

# ---- A module like torch's -----------------------------------------------------------------------


def test_state_dicts_load_both_ways() -> None:
    ours, theirs = layer(torch.float32, activation="relu"), torch.nn.Linear(IN, OUT)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), theirs(x).relu())
    again = Layer(IN, OUT)
    again.load_state_dict(torch.nn.Linear(IN, OUT).state_dict(), strict=True)
    torch.manual_seed(3)
    first = Layer(IN, OUT)
    torch.manual_seed(3)
    assert torch.equal(first.weight, torch.nn.Linear(IN, OUT).weight)


def test_a_layer_is_shown_with_its_activation() -> None:
    assert repr(layer()) == "Linear(in_features=24, out_features=16, bias=True, kernels=warploom)"
    assert "bias=True, activation='silu', kernels=warploom)" in repr(layer(activation="silu"))


def test_copies_compute_the_same() -> None:
    module, x = layer(activation="silu"), torch.randn(5, IN).bfloat16()
    for other in (copy.deepcopy(module), copy.deepcopy(torch.nn.ModuleList([module]))[0]):
        assert other.weight is not module.weight
        assert torch.equal(other(x), module(x))


def test_tied_pruned_and_parametrized_weights_are_used(kernels: list[dict[str, Any]]) -> None:
    module, x = layer(), torch.randn(5, IN).bfloat16()
    with torch.no_grad():
        torch.nn.utils.parametrizations.weight_norm(module)
        module.parametrizations.weight.original0.mul_(2)
        exact = expected(module, x)
        assert ((module(x).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
        tied = layer()
        tied.weight = torch.nn.Embedding(OUT, IN).bfloat16().weight
        exact = expected(tied, x)
        assert ((tied(x).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
        replica = tied._replicate_for_data_parallel()  # whose parameters are plain tensors
        replica.weight, replica.bias = tied.weight * 2, tied.bias * 2
        exact = expected(replica, x)
        assert ((replica(x).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()
    assert len(kernels) == 3


@pytest.mark.parametrize("kernel", [True, False])
def test_torch_compile_takes_it_whole(request: pytest.FixtureRequest, kernel: bool) -> None:
    calls = request.getfixturevalue("kernels") if kernel else []
    module = layer(activation="gelu")
    torch.compiler.reset()  # of all layers compiled before, which share one forward
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (5, 7, 9):
            x, residual = torch.randn(rows, IN).bfloat16(), torch.randn(rows, OUT)
            assert torch.equal(compiled(x, residual), module(x, residual))
    assert bool(calls) is kernel


# ---- From torch's layer, and back ----------------------------------------------------------------


def test_a_layer_from_torchs_shares_what_it_has() -> None:
    """An optimizer holds the parameters: with copies it would train what nobody calls."""
    theirs = torch.nn.Linear(IN, OUT).eval()
    theirs.bias.requires_grad_(False)
    ran = []
    handle = theirs.register_forward_hook(lambda *_: ran.append(1))
    ours = Layer.from_torch(theirs, activation="relu")
    assert (ours.weight is theirs.weight) and (ours.bias is theirs.bias)
    assert (ours.training, ours.bias.requires_grad, ours.activation) == (False, False, "relu")
    assert repr(ours) == repr(Layer(IN, OUT, activation="relu"))
    x = torch.randn(5, IN)
    assert torch.equal(ours(x), theirs(x).relu())
    handle.remove()
    ours(x)
    assert len(ran) == 2
    ours.weight = torch.nn.Parameter(torch.zeros(OUT, IN))
    assert theirs.weight is not ours.weight
    assert Layer.from_torch(torch.nn.Linear(IN, OUT, bias=False)).bias is None


def test_a_layer_goes_back_to_torchs() -> None:
    ours = layer(torch.float32)
    theirs = ours.to_torch()
    assert type(theirs) is torch.nn.Linear
    assert theirs.weight is ours.weight
    assert vars(theirs).keys() == vars(torch.nn.Linear(IN, OUT)).keys()
    with pytest.raises(ProblemError, match=r"torch\.nn\.Linear has none"):
        layer(activation="relu").to_torch()


class _Other(torch.nn.Linear):
    pass


def _mixed() -> torch.nn.Linear:
    module = torch.nn.Linear(IN, OUT)
    module.bias = torch.nn.Parameter(torch.empty(OUT, device="meta"))
    return module


def _wrapped() -> torch.nn.Linear:
    module = torch.nn.Linear(IN, OUT)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (torch.nn.Linear(IN, OUT, device="meta"), "weight on meta.*must be in memory"),
        (_mixed(), "weight on cpu, bias on meta"),
        (_Other(IN, OUT), "a _Other.*torch.nn.Linear itself"),
        (torch.nn.Conv1d(4, 4, 1), "a Conv1d"),
        (torch.nn.LazyLinear(OUT), "a LazyLinear"),
        (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(IN, OUT)), "Parametrized"),
        (_wrapped(), "forward was replaced"),
    ],
)
def test_what_is_not_torchs_layer_in_memory_is_refused(module: torch.nn.Linear, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        Layer.from_torch(module)


def test_an_activation_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(ProblemError, match=r"activation 'swish'.*relu, gelu, gelu_tanh, silu"):
        layer(activation="swish")
