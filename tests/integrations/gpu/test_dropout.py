"""Dropout as torch's function and transformers' models ask for it, on a GPU.

What both passes drop is held against `warploom.dropout_mask`, where the state is known; else the
gradient of v tells, since the result is linear in it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import dropped
import pytest
import torch
from sdpa_bounds import differentiated, dout_of
from sdpa_on_gpu import BF16, HALF, Tensors, launching, operands
from tiny_models import VOCABULARY, model
from torch.utils.checkpoint import checkpoint

import warploom

pytestmark = pytest.mark.gpu
ROWS = 300
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "attention_dropout": 0.25,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"head_dim": 128},
    "Mistral": SIZES | {"sliding_window": 100},
    "Gemma2": SIZES | {"sliding_window": 100, "query_pre_attn_scalar": 64},
    "GptOss": SIZES | {"sliding_window": 100},
}


def attend(*given: torch.Tensor) -> torch.Tensor:
    """The attention of most tests, which is multiplied so that a compiler has work."""
    return warploom.sdpa(*given, dropout_p=0.25, is_causal=True, enable_gqa=True) * 2


def passes(step: Any, leaves: list[torch.Tensor]) -> Tensors:  # noqa: ANN401
    """The result of a call and its gradients, which are of the same weights."""
    out = step(*leaves)
    dout = dout_of(out)
    found = torch.autograd.grad(out, leaves, dout)
    dropped.agree(out.detach(), dout, leaves[2].detach(), found[2])
    return out.detach().clone(), *(one.clone() for one in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(4, 4, 256, 256, 64, BF16), (8, 2, 129, 300, 128, HALF), (4, 2, 200, 100, 256, BF16)],
    ids=str,
)
def test_results_and_gradients_are_of_the_weights_that_are_kept(shape: Any, causal: bool) -> None:  # noqa: ANN401
    given = operands(*shape)
    state = dropped.state_of(3, "cuda")
    told = {"dropout_p": 0.3, "is_causal": causal, "enable_gqa": True}
    with launching(expected=True):
        out, gradients = differentiated(warploom.sdpa, given, **told)
    shown = torch.ones(shape[2:4], dtype=torch.bool, device="cuda").tril() if causal else None
    factors = dropped.kept(state, 0.3, *given[:2])
    wide = tuple(one.double() for one in given)
    right, wanted = differentiated(dropped.attention, wide, factors=factors, shown=shown)
    dropped.close((*out, *gradients), (*right, *wanted))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", dropped.MASKS)
@pytest.mark.parametrize(
    "shape", [(4, 2, 129, 304, 64, BF16), (4, 4, 256, 256, 128, HALF)], ids=str
)
def test_masks_and_biases_go_with_it(shape: Any, kind: str, compiled: bool) -> None:  # noqa: ANN401
    run = warploom.sdpa
    if compiled:
        torch._dynamo.reset()
        # States are then drawn as calls that are not compiled draw them.
        options = {"fallback_random": True}
        run = torch.compile(warploom.sdpa.__call__, fullgraph=True, options=options)
    with launching(expected=True):
        dropped.verify_beside(kind, run, *operands(*shape))


def test_the_mean_is_the_attention_without_dropout() -> None:
    given = operands(4, 4, 256, 256, 64, HALF)
    plain = warploom.sdpa(*given).double()
    drawn = [warploom.sdpa(*given, dropout_p=0.25).double() for _ in range(100)]
    mean = torch.stack(drawn).mean(0)
    assert abs(float((mean * plain).sum() / plain.square().sum()) - 1) < 0.01
    assert float((drawn[0] - plain).norm()) > 0.3 * float(plain.norm())
    assert float((mean - plain).norm()) < 0.1 * float(plain.norm())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpoint"])
def test_compiled_calls_draw_anew_and_both_passes_the_same(mode: str, again: bool) -> None:
    def step(*given: torch.Tensor) -> torch.Tensor:
        if not again:
            return attend(*given)
        out: torch.Tensor = checkpoint(attend, *given, use_reentrant=False)
        return out

    leaves = [one.requires_grad_() for one in operands(4, 2, 200, 200, 64)]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    with launching(expected=True):
        outs = [passes(compiled, leaves)[0] for _ in range(4)]  # warms up, records, replays
    for one, other in pairwise(outs):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_when_it_computes_again(reentrant: bool) -> None:
    given = operands(4, 2, 200, 200, 64)
    leaves = [one.requires_grad_() for one in given]
    torch.manual_seed(3)
    out = checkpoint(attend, *leaves, use_reentrant=reentrant)
    out.backward(dout_of(out))
    torch.manual_seed(3)
    right, wanted = differentiated(attend, given)
    assert torch.equal(out, *right)
    dropped.close(tuple(one.grad for one in leaves), wanted)  # type: ignore[misc]


def test_replays_of_a_graph_drop_others_and_both_passes_the_same() -> None:
    leaves = [one.requires_grad_() for one in operands(4, 2, 200, 200, 64)]
    dout = dout_of(leaves[0])

    def step() -> Tensors:
        out = attend(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, dout)[2]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with launching(expected=True), torch.cuda.graph(graph):
        out, dv = step()
    before = torch.zeros_like(out)
    for _ in range(3):
        graph.replay()
        dropped.agree(out, dout, leaves[2].detach(), dv)
        assert not torch.equal(out, before)
        before.copy_(out)


# ---- transformers --------------------------------------------------------------------------------


def learned(learning: Any, padded: bool, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:  # noqa: ANN401
    """Logits of what is no padding, and the gradients of all parameters."""
    tokens = torch.randint(2, VOCABULARY, (3, ROWS), generator=torch.Generator().manual_seed(0))
    visible = torch.ones_like(tokens)
    visible[0, : 77 * padded] = 0
    learning.zero_grad()
    torch.manual_seed(seed)
    given = {"attention_mask": visible.cuda(), "use_cache": False}
    logits = learning(tokens.cuda(), **given).logits[visible.bool().cuda()]
    logits.float().square().mean().backward()
    return logits.detach(), [one.grad.clone() for one in learning.parameters()]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_patched_models_in_training_drop_by_kernels(
    name: str, padded: bool, computed: Counter[str]
) -> None:
    """Seeds decide what is dropped, checkpoints repeat it, and evaluated nothing is.

    What is dropped is noise about what a model says without: other models say something else.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        learning = model(name, "eager", torch.bfloat16, **MODELS[name]).cuda().train()
        warploom.patch(learning, linear=False)
        first, gradients = learned(learning, padded, 1)
        same, again = learned(learning, padded, 1)
        other, _ = learned(learning, padded, 2)
        learning.gradient_checkpointing_enable()
        third, recomputed = learned(learning, padded, 1)
        learning.gradient_checkpointing_disable()
        assert computed == {"by_kernels": 3 * 2 + 2 * 2}
        assert torch.equal(first, same)
        assert torch.equal(first, third)
        assert not torch.equal(first, other)
        dropped.close(tuple(again), tuple(gradients))
        dropped.close(tuple(recomputed), tuple(gradients))
        plain, _ = learned(learning.eval(), padded, 1)
        said = torch.stack([learned(learning.train(), padded, n)[0].float() for n in range(16)])
    finally:
        torch.use_deterministic_algorithms(False)
    off = float((said[0] - plain).norm())
    assert 0 < off < float(plain.float().norm())
    assert float((said.mean(0) - plain).norm()) < 0.6 * off
