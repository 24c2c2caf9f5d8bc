"""`experts_implementation="warploom"`: models of transformers compute what they do by eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import MODELS, model, tokens
from transformers.integrations import moe

import warploom
from warploom.integrations import experts, frozen_experts
from warploom.integrations import transformers_experts as rules
from warploom.integrations.checkpoints import experts as checkpoint_experts
from warploom.integrations.expert_layers import layers_of
from warploom.integrations.patch_report import AS_IT_WAS
from warploom.integrations.patch_weights import Weights


def computed(
    made: torch.nn.Module, implementation: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of every parameter."""
    warploom.register_transformers()
    made.set_experts_implementation(implementation)  # type: ignore[operator]
    made.zero_grad()
    torch.manual_seed(0)  # some routers draw random numbers where they train
    ids = tokens(2, 11)
    out = made(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {
        name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was left to transformers would be right, and show nothing."""
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", None)
    made = model(name)
    assert any(layers_of(made))
    logits, gradients = computed(made, "eager")
    found, own = computed(made, "warploom")
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
    assert own.keys() == gradients.keys() and any("experts" in one for one in own)
    for key, one in own.items():
        largest = gradients[key].abs().max()
        assert (one - gradients[key]).abs().max() <= 1e-5 * largest + 1e-9, key


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_weights_of_16_bits_are_multiplied_by_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", None)
    exact = computed(model(name), "eager")[0]
    low = computed(model(name, torch.bfloat16), "warploom")[0]
    eager = computed(model(name, torch.bfloat16), "eager")[0]
    error, allowed = (low - exact).abs().max(), (eager - exact).abs().max()
    assert error <= 2 * allowed


def test_the_gate_of_a_model_is_found_by_what_it_computes() -> None:
    gates = {"qwen3_moe": ("silu", "halves"), "gpt_oss": ("swiglu_oai", "interleaved")}
    for name, wanted in gates.items():
        assert rules.gate_of(next(layers_of(model(name)))) == wanted
    layer = next(layers_of(model("nemotron_h")))
    assert rules.gate_of(layer) == (layer.act_fn, "halves")


@torch.no_grad()
@pytest.mark.parametrize("weights", [None, {"format": "int4", "group": 32}])
def test_a_patched_model_has_the_limits_of_its_configuration(
    weights: Weights | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS with another swiglu_alpha and swiglu_limit: 1.702 and 7 would be another model."""
    own = {"swiglu_alpha": 0.5, "swiglu_limit": 0.02, "intermediate_size": 64}
    monkeypatch.setitem(MODELS, "gpt_oss", {**MODELS["gpt_oss"], **own})
    monkeypatch.setattr(checkpoint_experts, "refusal", lambda *given: None)
    made = model("gpt_oss", torch.bfloat16)
    ids = tokens(2, 11)
    wanted = made(ids).logits
    calls: list[dict[str, Any]] = []
    for place, name in ((experts, "grouped_gemm"), (frozen_experts, "grouped_mixed_gemm")):
        run = getattr(place, name)

        def noting(*given: Any, run: Any = run, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
            calls.append(keywords)
            return run(*given, **keywords)  # type: ignore[no-any-return]

        monkeypatch.setattr(place, name, noting)
    warploom.patch(made, attention=False, weights=weights)
    found = made(ids).logits
    numbers = [(one.get("gate_alpha"), one.get("gate_limit")) for one in calls if one.get("gate")]
    assert numbers == ([(0.5, 0.02)] * 2 if weights else [])  # other weights are [E, K, N]
    assert (found - wanted).norm() <= (0.2 if weights else 2**-6) * wanted.norm()


def test_ids_of_other_ranks_add_nothing() -> None:
    """Ids are those of the rank's own experts; all others' are one more than the last."""
    layer = next(layers_of(model("mixtral")))
    layer._is_expert_parallel = True
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 5, (20, 2), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(20, 2).masked_fill(ids == 4, 0)
    found = rules.experts_forward(layer, hidden, ids, weights)
    wanted = moe.batched_mm_experts_forward(layer, hidden, ids, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_norm_behind_experts_is_the_layers_own() -> None:
    layer = next(layers_of(model("mixtral")))
    layer.has_post_expert_norm, layer.post_expert_norm = True, torch.nn.RMSNorm(64)
    hidden, ids = torch.randn(20, 64), torch.randint(0, 4, (20, 2))
    weights = torch.rand(20, 2)
    found = rules.experts_forward(layer, hidden, ids, weights)
    wanted = moe.batched_mm_experts_forward(layer, hidden, ids, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_no_kernel_computes_is_transformers_own() -> None:
    layer = next(layers_of(model("mixtral")))
    assert rules.refusal(layer, torch.zeros(2, 64)) is None
    layer.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 2 * 95, 64))
    layer.down_proj = torch.nn.Parameter(torch.zeros(4, 64, 95))
    assert "multiples of 8" in str(rules.refusal(layer, torch.zeros(2, 64)))
    out = rules.experts_forward(
        layer, torch.ones(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    )
    assert (out == 0).all()
    del layer.down_proj  # as of quantizers that have parameters of their own
    assert "are not gate_up_proj and down_proj" in str(rules.refusal(layer, torch.zeros(2, 64)))
    double = next(layers_of(model("mixtral", torch.float64)))
    assert "float64" in str(rules.refusal(double, torch.zeros(2, 64).double()))


def test_generate_writes_what_eager_writes() -> None:
    warploom.register_transformers()
    made = model("qwen3_moe").eval()
    texts = []
    for implementation in ("eager", "warploom"):
        made.set_experts_implementation(implementation)
        texts.append(made.generate(tokens(2, 5), max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts)


def test_a_model_compiles_to_one_graph() -> None:
    warploom.register_transformers()
    made = model("qwen3_moe", torch.bfloat16).eval()
    made.set_experts_implementation("warploom")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for shape in ((2, 7), (1, 9)):
            found = compiled(tokens(*shape), use_cache=False).logits
            assert torch.equal(found, made(tokens(*shape), use_cache=False).logits)


# ---- warploom.patch ------------------------------------------------------------------------------


def test_patch_sets_experts_says_so_and_takes_it_back() -> None:
    made = model("qwen3_moe", torch.bfloat16)
    made.set_experts_implementation("eager")
    with warploom.patch(made) as patch:
        assert made.config._experts_implementation == "warploom"
        (row,) = [row for row in patch.rows if row.what.startswith("experts of")]
        assert (row.what, row.count) == ("experts of Qwen3MoeExperts", 2)
        assert (row.now, row.because) == ("eager -> warploom", "")
        assert not any("Experts" in one.what for one in patch.rows if one is not row)
    assert made.config._experts_implementation == "eager"


@pytest.mark.parametrize(
    ("name", "because"),
    [("nemotron_h", "torch computes its activation"), ("gpt_oss", "")],
)
def test_patch_names_what_it_leaves(name: str, because: str) -> None:
    made = model(name, torch.bfloat16)
    rows = [row for row in warploom.patch(made).rows if row.what.startswith("experts of")]
    assert [row.because for row in rows] == [because]
    single = [row for row in warploom.patch(model(name)).rows if row.what.startswith("experts of")]
    assert "float32 products are torch's" in single[0].because


def test_patch_without_experts_leaves_them() -> None:
    made = model("mixtral", torch.bfloat16)
    before = made.config._experts_implementation
    rows = warploom.patch(made, experts=False).rows
    assert made.config._experts_implementation == before
    assert any(row.what == "MixtralExperts" and row.now == AS_IT_WAS for row in rows)
    with pytest.raises(warploom.ProblemError, match="experts"):
        warploom.patch(model("mixtral"), experts="yes")  # type: ignore[arg-type]
