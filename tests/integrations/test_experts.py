"""`warploom.experts` on the CPU: results and gradients against a loop over experts, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

import warploom
from warploom.errors import ProblemError
from warploom.integrations import experts as module
from warploom.integrations.experts import Function

TOKENS, K, EXPERTS, H, INNER = 37, 3, 6, 64, 48


def loop(
    given: dict[str, torch.Tensor], ids: torch.Tensor, gate: Function, biases: bool = False
) -> torch.Tensor:
    """The layer as transformers' eager experts compute it."""
    hidden, weights = given["hidden"], given["weights"]
    out = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        token, choice = torch.where(ids == expert)
        both = hidden[token] @ given["gate_up"][expert].mT
        if biases:
            both = both + given["gate_up_bias"][expert]
        rows = gate(both) @ given["down"][expert].mT
        if biases:
            rows = rows + given["down_bias"][expert]
        out = out.index_add(0, token, rows * weights[token, choice, None])
    return out


def drawn(dtype: torch.dtype = torch.float32, biases: bool = False) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {
        "hidden": (TOKENS, H),
        "weights": (TOKENS, K),
        "gate_up": (EXPERTS, 2 * INNER, H),
        "down": (EXPERTS, H, INNER),
    }
    if biases:
        shapes |= {"gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, H)}
    made = {name: torch.randn(shape, generator=random) / 4 for name, shape in shapes.items()}
    return {
        name: one.to(dtype if name != "weights" else torch.float32).requires_grad_()
        for name, one in made.items()
    }


def chosen(extra: int = 2) -> torch.Tensor:
    """Ids of which some are no expert's here."""
    random = torch.Generator().manual_seed(4)
    ids = torch.rand(TOKENS, EXPERTS + extra, generator=random).topk(K).indices
    return ids.where(ids < EXPERTS, -1)


def oai(both: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def halves(function: Function) -> Function:
    return lambda both: function(both[..., :INNER]) * both[..., INNER:]


GATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (halves(functional.silu), {}),
    "gelu": (halves(functional.gelu), {"gate": "gelu"}),
    "gelu_tanh": (
        halves(lambda x: functional.gelu(x, approximate="tanh")),
        {"gate": "gelu_tanh"},
    ),
    "relu": (halves(functional.relu), {"gate": "relu"}),
    "swiglu_oai": (oai, {"gate": "swiglu_oai", "gate_layout": "interleaved"}),
    "another limit": (
        lambda both: oai(both, 1.0, 0.25),
        {"gate": "swiglu_oai", "gate_layout": "interleaved", "alpha": 1.0, "limit": 0.25},
    ),
    "a function": (
        lambda both: both[..., :INNER].sin(),
        {"gate": lambda both: both[..., :INNER].sin()},
    ),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_results_and_gradients_are_those_of_a_loop(
    name: str, transposed: bool, biases: bool
) -> None:
    gate, keywords = GATES[name]
    given, ids = drawn(biases=biases), chosen()
    wanted = loop({key: one.double() for key, one in given.items()}, ids, gate, biases)
    called = dict(given)
    if transposed:
        for key in ("gate_up", "down"):
            called[key] = given[key].mT.contiguous()
    found = warploom.experts(ids=ids, **called, **keywords, transposed=transposed)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    leaves = [*given.values()]
    expected = torch.autograd.grad(wanted, leaves, gradient.double())
    for one, held in zip(torch.autograd.grad(found, leaves, gradient), expected, strict=True):
        torch.testing.assert_close(one, held, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["silu", "swiglu_oai", "another limit"])
def test_a_fused_gate_is_as_exact_as_one_by_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, keywords = GATES[name]
    given, ids = drawn(torch.bfloat16), chosen()
    wanted = loop({key: one.double() for key, one in given.items()}, ids, gate)
    trained = warploom.experts(ids=ids, **given, **keywords)
    first, calls = module.grouped_gemm, list[dict[str, Any]]()

    def grouped_gemm(*given: Any, **keywords: Any) -> torch.Tensor:
        calls.append(keywords)
        return first(*given, **keywords)

    monkeypatch.setattr(module, "grouped_gemm", grouped_gemm)
    with torch.no_grad():
        fused = warploom.experts(ids=ids, **given, **keywords)
    assert calls[0]["gate"] == keywords.get("gate", "silu")
    for found in (trained, fused):
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).abs().max() < 2**-6 * wanted.abs().max()


def test_the_ids_of_a_rank_begin_at_its_first_expert() -> None:
    given, ids = drawn(), chosen()
    whole = warploom.experts(ids=ids, **given)
    parts = [
        warploom.experts(
            given["hidden"],
            ids,
            given["weights"],
            given["gate_up"][first : first + 2],
            given["down"][first : first + 2],
            first_expert=first,
        )
        for first in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


def test_what_is_no_tokens_row_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the last offset are undefined: here they are NaN, whatever computed them."""
    own = module.grouped_linear

    def poisoned(
        rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        found = own(rows, weight, offsets, *others)
        behind = torch.arange(len(rows))[:, None] >= offsets[-1]
        return torch.where(behind, torch.nan, found)

    given, ids = drawn(), chosen(extra=6)
    norm = torch.nn.RMSNorm(H)
    scale = torch.ones(INNER, requires_grad=True)

    def layer() -> list[torch.Tensor]:
        gate = lambda both: both[..., :INNER] * scale  # noqa: E731
        out = warploom.experts(ids=ids, **given, gate=gate, norm=norm)
        leaves = [*given.values(), scale, norm.weight]
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    wanted = layer()
    monkeypatch.setattr(module, "grouped_linear", poisoned)
    for found, held in zip(layer(), wanted, strict=True):
        assert found.isfinite().all() and torch.equal(found, held)


def test_leading_dimensions_are_tokens() -> None:
    given, ids = drawn(), chosen()
    flat = warploom.experts(ids=ids[:36], **{**given, **_rows(given, 36)})
    shaped = {key: one.reshape(4, 9, -1) for key, one in _rows(given, 36).items()}
    found = warploom.experts(ids=ids[:36].reshape(4, 9, K), **{**given, **shaped})
    assert torch.equal(found.reshape(36, H), flat)


def _rows(given: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    return {key: given[key][:count] for key in ("hidden", "weights")}


def test_no_token_has_no_result() -> None:
    given = drawn()
    none = warploom.experts(ids=chosen()[:0], **{**given, **_rows(given, 0)})
    assert none.shape == (0, H)


def test_autocast_converts_as_it_does_for_linear_layers() -> None:
    given, ids = drawn(), chosen()
    exact = warploom.experts(ids=ids, **given)
    with torch.autocast("cpu", torch.bfloat16):
        low = warploom.experts(ids=ids, **given)
    assert low.dtype == torch.float32 and not torch.equal(low, exact)
    assert (low - exact).abs().max() < 2**-5 * exact.abs().max()


def test_compiled_code_has_the_same_results_and_gradients() -> None:
    given, ids = drawn(torch.bfloat16, biases=True), chosen()

    def layer(**tensors: torch.Tensor) -> torch.Tensor:
        return warploom.experts(ids=ids, **tensors)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(**given), layer(**given)
    assert torch.equal(found, wanted)
    leaves = [*given.values()]
    pairs = [torch.autograd.grad(one.float().sum(), leaves) for one in (found, wanted)]
    assert all(torch.equal(one, held) for one, held in zip(*pairs, strict=True))


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"gate_up": torch.zeros(EXPERTS, H, 2 * INNER)}, "transposed=True"),
        ({"down": torch.zeros(EXPERTS - 1, H, INNER)}, "as many experts"),
        ({"gate_up": torch.zeros(EXPERTS, INNER, H)}, "gate and up"),
        ({"gate": "softmax"}, "must be one of relu, gelu, gelu_tanh, silu, swiglu_oai"),
        ({"down": torch.zeros(EXPERTS, H, INNER).half()}, "must be of one type"),
        ({"weights": torch.zeros(TOKENS, 1)}, r"must both be \[tokens, k\]"),
        ({"ids": torch.zeros(TOKENS, K)}, "must be int64 or int32"),
        # Each of these was computed, or torch's error: columns of gate and up took turns, and one
        # bias of all experts was added to rows in place of columns where there are as many.
        ({"gate_layout": "half"}, "gate_layout 'half': must be one of halves, interleaved"),
        ({"gate_up_bias": torch.zeros(2 * INNER)}, r"gate_up_bias \[.*a row for each expert"),
        ({"down_bias": torch.zeros(EXPERTS, 1)}, r"down_bias \[.*a row for each expert"),
        ({"down_bias": torch.zeros(EXPERTS + 3, H)}, r"down_bias \[.*a row for each expert"),
        ({"hidden": torch.zeros(H)}, "a row for each token"),
        ({"hidden": torch.zeros(TOKENS, H, dtype=torch.int32)}, "must be floating-point"),
        ({"hidden": [0.0]}, "must be a torch tensor"),
        ({"gate": "swiglu_oai", "alpha": "1.7"}, "alpha '1.7': must be a number"),
        ({"gate": "swiglu_oai", "alpha": math.nan}, "alpha nan: must be a number, finite in fp32"),
        # Each of these was an error of torch's.
        ({"gate": "swiglu_oai", "limit": 1e39}, "limit 1e.39: must be a number, finite in fp32"),
        ({"limit": torch.ones(2)}, r"limit <tensor \[2\]>: must be a number"),
        ({"gate_up": torch.zeros(8)}, r"gate_up \[8\], down .* must be \[E, 2 I, H\]"),
        ({"gate_up": torch.zeros(EXPERTS, 2 * INNER, H).int()}, "must be of one type"),
        ({"ids": chosen() + 7}, f"ids with .*must be from 0 to {EXPERTS - 1}.*pass first_expert"),
        ({"norm": 3}, "norm 3 of type int: must be a function"),
        ({"norm": lambda rows: rows[:, :8]}, r"norm that returned <tensor .*: must be a function"),
        ({"gate": lambda both: None}, rf"gate that returned None: must .*, {INNER}\]: a row for"),
        ({"transposed": torch.ones(2)}, r"transposed <tensor \[2\]>: must be True or False"),
    ],
)
def test_what_is_wrong_with_a_layer_is_told(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ProblemError, match=rule):
        warploom.experts(**{**drawn(), "ids": chosen(), **wrong})


@pytest.mark.parametrize("inner", [64, 48])  # kernels have a gate of whole blocks alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@torch.no_grad()
def test_fp8_weights_have_block_scales(dtype: torch.dtype, inner: int) -> None:
    """What had no scale, or another expert's, would be far off."""
    given, ids = drawn(torch.bfloat16), chosen()
    random = torch.Generator().manual_seed(6)
    weights, called = dict(given), dict(given)
    shapes = {"gate_up": (EXPERTS, 2 * inner, H), "down": (EXPERTS, H, inner)}
    for name, (count, n, k) in shapes.items():
        called[name] = torch.randn(count, n, k, generator=random).to(torch.float8_e4m3fn)
        powers = torch.randint(-6, 2, (count, -(-n // 128), -(-k // 128)), generator=random)
        called[f"{name}_scale"] = (2.0**powers).to(dtype)
        weights[name] = called[name].double() * 2.0**powers  # of one block each
    exact = {key: one.double() for key, one in weights.items()}
    silu = lambda both: functional.silu(both[..., :inner]) * both[..., inner:]  # noqa: E731
    found, wanted = warploom.experts(ids=ids, **called), loop(exact, ids, silu)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).abs().max() < 2**-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"gate_up_scale": None}, r"gate_up_scale None .* \[6, 1, 1\]: one for each 128x128"),
        ({"down_scale": torch.ones(EXPERTS)}, r"down_scale \[6\] of .*must be float32 or"),
        ({"down": torch.zeros(EXPERTS, H, INNER)}, "down of torch.float32 with scales"),
        ({"hidden": torch.zeros(TOKENS, H)}, "tokens of torch.float32 with gate_up"),
    ],
)
def test_what_is_wrong_with_fp8_weights_is_told(change: dict[str, Any], rule: str) -> None:
    given = {name: one.detach() for name, one in drawn(torch.bfloat16).items()}
    for name in ("gate_up", "down"):
        given[name] = given[name].to(torch.float8_e4m3fn)
        given[f"{name}_scale"] = torch.ones(EXPERTS, 1, 1)
    with pytest.raises(ProblemError, match=rule):
        warploom.experts(ids=chosen(), **{**given, **change})


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_fp32_weights_may_lie_anyhow(name: str) -> None:
    """torch's function refuses rows that do not begin at 16 bytes, and those that repeat.

    The order in which torch adds up may follow strides; rows of other addresses differ throughout.
    """
    given = {**drawn(), "ids": chosen()}
    weight = given[name]
    apart = weight.new_empty(*weight.shape[:2], weight.shape[2] + 1)[..., 1:].copy_(weight)
    for view in (apart, weight[:, :1].expand_as(weight), weight[:1].expand_as(weight)):
        found = warploom.experts(**{**given, name: view})
        expected = warploom.experts(**{**given, name: view.contiguous()})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_no_16_bytes_and_too_many_experts_are_refused() -> None:
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ProblemError, match="must be multiples of 8"):
        warploom.experts(
            torch.zeros(2, 12), ids, weights, torch.zeros(1, 16, 12), torch.zeros(1, 12, 8)
        )
    given = torch.zeros(1025, 16, 8), torch.zeros(1025, 8, 8)
    with pytest.raises(ProblemError, match="must be 1 to 1024"):
        warploom.experts(torch.zeros(2, 8), ids, weights, *given)
