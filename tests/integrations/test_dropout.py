"""Dropout as torch's function and transformers' models ask for it: drawn, and in both passes.

Kernels run on a GPU only; here their reference does, where a test lets it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import dropped
import pytest
import torch
from sdpa_bounds import differentiated, dout_of, draw
from tiny_models import VOCABULARY, model
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.generator.families._attention.family import AttentionFamily
from warploom.integrations import dropout_rules, sdpa_rules, transformers_attention

Q, K, V = draw(2, 4, 19, 32), *(draw(2, 2, 37, 32, seed=i) for i in (1, 2))
GROUPED: dict[str, Any] = {"enable_gqa": True}
IDS = torch.randint(2, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Warploom compute on the CPU what it would on a GPU."""
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)


@pytest.fixture
def lawful(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why no kernel has an operation, in place of what the families say."""
    reasons: list[str] = []
    monkeypatch.setattr(AttentionFamily, "operation_reasons", lambda self, operation: reasons)
    monkeypatch.setattr(dropout_rules, "_forbidden", dropout_rules._forbidden.__wrapped__)
    return reasons


# ---- warploom.sdpa -------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients_are_of_the_weights_that_are_kept(causal: bool) -> None:
    """Guards against another mask in the gradients, and one that no seed repeats."""
    state = dropped.state_of(3, "cpu")
    keywords = {**GROUPED, "dropout_p": 0.3, "is_causal": causal}
    out, gradients = differentiated(warploom.sdpa, (Q, K, V), **keywords)
    shown = torch.ones(19, 37, dtype=torch.bool).tril() if causal else None
    wide = tuple(one.double() for one in (Q, K, V))
    factors = dropped.kept(state, 0.3, Q, K)
    right, wanted = differentiated(dropped.attention, wide, factors=factors, shown=shown)
    dropped.close((*out, *gradients), (*right, *wanted))


@pytest.mark.usefixtures("here")
def test_any_number_of_batches_is_one() -> None:
    q = torch.randn(3, 2, 4, 9, 16).half()
    state = dropped.state_of(1, "cpu")
    out = warploom.sdpa(q, q, q, dropout_p=0.5)
    one = q.flatten(0, 1).double()
    right = dropped.attention(one, one, one, dropped.kept(state, 0.5, one, one))
    dropped.close((out.flatten(0, 1),), (right,))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_when_it_computes_again(reentrant: bool) -> None:
    def layer(*given: torch.Tensor) -> torch.Tensor:
        return warploom.sdpa(*given, dropout_p=0.4, **GROUPED)

    given = [one.detach().requires_grad_() for one in (Q, K, V)]
    torch.manual_seed(3)
    out = checkpoint(layer, *given, use_reentrant=reentrant)
    out.backward(dout_of(out))
    torch.manual_seed(3)
    _, wanted = differentiated(layer, (Q, K, V))
    assert all(map(torch.equal, [one.grad for one in given], wanted))  # type: ignore[arg-type]


@pytest.mark.usefixtures("here")
def test_compiled_calls_draw_anew_and_both_passes_the_same() -> None:
    def layer(*given: torch.Tensor, p: float = 0.5) -> torch.Tensor:
        return warploom.sdpa(*given, dropout_p=p, **GROUPED) * 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outs = []
    for p in (0.5, 0.5, 0.25, 0.125):
        (out,), (_, _, dv) = differentiated(compiled, (Q, K, V), p=p)
        dropped.agree(out, dout_of(out), V, dv)
        outs.append(out)
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.usefixtures("here")
def test_a_state_is_drawn_by_numbers_of_32_bits() -> None:
    """Guards against bounds that inductor's kernels have no constants for, on a GPU."""
    graphs: list[torch.fx.Graph] = []

    def backend(graph: torch.fx.GraphModule, given: list[torch.Tensor]) -> Any:  # noqa: ANN401
        graphs.append(graph.graph)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda q: warploom.sdpa(q, q, q, dropout_p=0.5), backend=backend)(Q)
    (drawing,) = [node for node in graphs[0].nodes if "randint" in str(node.target)]
    bounds = [one for one in drawing.args if isinstance(one, int)]
    assert bounds
    assert all(-(1 << 31) <= one < 1 << 31 for one in bounds)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("p", [1.0, True])
def test_where_all_is_dropped_torch_computes(p: float) -> None:
    found = warploom.explain(warploom.sdpa, Q, K, V, dropout_p=p, **GROUPED)
    assert found.torch
    assert f"dropout_p is {p}" in found.reason
    assert not warploom.sdpa(Q, K, V, dropout_p=p, **GROUPED).any()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("p", [1.5, -0.1])
def test_errors_are_torchs(p: float) -> None:
    with pytest.raises(RuntimeError) as theirs:
        scaled_dot_product_attention(Q, Q, Q, dropout_p=p)
    with pytest.raises(RuntimeError) as ours:
        warploom.sdpa(Q, Q, Q, dropout_p=p)
    assert str(ours.value) == str(theirs.value)


def test_explaining_draws_nothing() -> None:
    """Guards against a model that trains otherwise once it was asked about."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = warploom.explain(warploom.sdpa, Q, Q, Q, dropout_p=0.1, gpu="NVIDIA H200")
    assert "_dropout" in found.kernel
    assert "_dropout" in str(found.backward)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", dropped.MASKS)
def test_masks_and_biases_go_with_it(kind: str, compiled: bool) -> None:
    """Guards against a mask that is lost beside dropout, or dropout beside a mask."""
    run = warploom.sdpa
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(warploom.sdpa.__call__, fullgraph=True, backend="aot_eager")
    dropped.verify_beside(kind, run, Q, K, V)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_what_goes_with_dropout_is_what_the_families_say(kind: str, lawful: list[str]) -> None:
    """Guards against a list of its own, which says otherwise than kernels there are."""
    mask = dropped.mask_of(kind, Q, K)
    keywords = {**GROUPED, "dropout_p": 0.3}
    assert not warploom.explain(warploom.sdpa, Q, K, V, mask, **keywords, gpu="NVIDIA H200").torch
    lawful.append("dropout with anything: for the sake of this test")
    found = warploom.explain(warploom.sdpa, Q, K, V, mask, **keywords)
    assert found.torch
    assert "for the sake of this test" in found.reason


# ---- transformers --------------------------------------------------------------------------------


def test_models_in_training_drop_by_kernels(paths: Counter[str]) -> None:
    """A kernel without dropout would train another model; evaluated, there is none."""
    learning = model("Llama", "warploom", attention_dropout=0.5)
    outcomes = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outcomes.append(learning.train()(IDS).logits)
    assert paths == {"by_kernels": 6}
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])
    evaluated = learning.eval()(IDS).logits
    assert paths == {"by_kernels": 8}
    assert torch.equal(evaluated, model("Llama", "warploom")(IDS).logits)


@pytest.mark.parametrize(
    ("softcap", "mask", "bias"),
    [(None, False, False), (2.0, False, False), (None, True, False), (2.0, True, True)],
)
def test_a_layer_drops_what_the_mask_says(
    softcap: float | None, mask: bool, bias: bool, paths: Counter[str]
) -> None:
    """Guards against a probability that is lost on its way, or is that of what is kept."""
    given = [one.detach().requires_grad_() for one in (Q, K[:, :, :19], V[:, :, :19])]
    triangle = torch.ones(19, 19, dtype=torch.bool).tril()
    holes = triangle & (torch.arange(19) % 5 != 3).expand(2, 1, 19, 19)
    shown, position = holes if mask else triangle, random(1, 4, 19, 19) * bias
    told: dict[str, Any] = {"position_bias": position} if bias else {}
    state = dropped.state_of(5, "cpu")
    out, _ = transformers_attention.attention(
        torch.nn.Module(),
        *given,
        holes if mask else None,
        dropout=0.3,
        is_causal=not mask,
        softcap=softcap,
        **told,
    )
    found = torch.autograd.grad(out, given, dout_of(out))
    assert paths == {"by_kernels": 1}
    wide = [one.detach().double().requires_grad_() for one in given]
    q, k, v = wide[0], *(one.repeat_interleave(2, 1) for one in wide[1:])
    scores = q @ k.mT * 32**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.softmax((scores + position).masked_fill(~shown, -torch.inf), -1)
    right = (weights * dropped.kept(state, 0.3, q, k) @ v).transpose(1, 2)
    wanted = torch.autograd.grad(right, wide, dout_of(out).double())
    dropped.close((out, *found), (right, *wanted))


@pytest.mark.parametrize("case", ["whole", "left"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_checkpoints_drop_the_same_when_they_compute_again(
    name: str, case: str, paths: Counter[str]
) -> None:
    """Padded batches too, which are packed sequences to kernels."""
    visible = LEFT if case == "left" else torch.ones_like(IDS)
    gradients = []
    for again in (False, True):
        learning = model(name, "warploom", attention_dropout=0.3).train()
        if again:
            learning.gradient_checkpointing_enable()  # activation_checkpointing_enable, later
        torch.manual_seed(2)
        logits = learning(IDS, attention_mask=visible, use_cache=False).logits
        logits[visible.bool()].float().square().mean().backward()
        gradients.append([parameter.grad for parameter in learning.parameters()])
    assert paths == {"by_kernels": 2 + 4}
    assert all(map(torch.equal, *gradients))


def test_layers_that_are_compiled_drop(paths: Counter[str]) -> None:
    # One layer: the second is compiled as the first is.
    learning = model("Mistral", "warploom", attention_dropout=0.5, num_hidden_layers=1).train()
    torch._dynamo.reset()
    learning.model.layers[0].compile(fullgraph=True, backend="aot_eager")
    first, second = (learning(IDS, attention_mask=LEFT, use_cache=False).logits for _ in range(2))
    assert not torch.equal(first, second)
    second.float().square().mean().backward()
    assert all(one.grad is not None for one in learning.parameters())


def test_a_mask_that_does_not_go_with_dropout_is_torchs(
    paths: Counter[str], lawful: list[str]
) -> None:
    mask = torch.ones(1, 1, 19, 37, dtype=torch.bool)
    for reason in ("", "dropout with masked: for the sake of this test"):
        lawful += [reason] * bool(reason)
        transformers_attention.attention(torch.nn.Module(), Q, K, V, mask, dropout=0.3)
    assert paths == {"by_kernels": 1, "by_torch": 1}
