"""Calls with a mask of blocks, on the CPU: results, gradients, operators, what is refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

import warploom
from warploom import BlockMask, ProblemError
from warploom.errors import SpecificationError
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.block_mask import of_dense

SEQ_Q, SEQ_K = 130, 200


def operands(seq_q: int = SEQ_Q, seq_k: int = SEQ_K) -> list[torch.Tensor]:
    """q of four heads, k and v of two."""
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, seq, 64, generator=random).bfloat16().requires_grad_()
        for heads, seq in ((4, seq_q), (2, seq_k), (2, seq_k))
    ]


def shown(batch: int = 2, heads: int = 4) -> torch.Tensor:
    """Scores of blocks of 32 that count, with rows that attend to nothing."""
    random = torch.Generator().manual_seed(2)
    blocks = torch.rand(batch, heads, 5, 7, generator=random) < 0.5
    wide = blocks.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :SEQ_Q, :SEQ_K]
    wide = wide & (torch.rand(wide.shape, generator=random) < 0.7)
    wide[:, :, 40:50] = False
    return wide


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention in fp32 by plain torch, 0 for rows that attend to nothing."""
    k, v = (tensor.float().repeat_interleave(2, 1) for tensor in (k, v))
    s = (q.float() @ k.mT * 64**-0.5).masked_fill(~mask, -1e30)
    return (s.softmax(-1) * mask.any(-1, keepdim=True)) @ v


@pytest.mark.parametrize(("batch", "heads"), [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_only_scores_that_count_do_in_results_and_gradients(batch: int, heads: int) -> None:
    mask = shown(batch, heads)
    q, k, v = operands()
    out, lse = warploom.attention(q, k, v, block_mask=of_dense(mask, (32, 32)), return_lse=True)
    wanted = plain(q, k, v, mask)
    assert (out - wanted).abs().max() < 0.02
    assert not out[:, :, 40:50].any()
    assert (lse[:, :, 40:50] == -torch.inf).all()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    for one, other in zip(found, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        assert (one - other).abs().max() < 0.05
    assert not found[0][:, :, 40:50].any()


def test_a_compiled_call_is_an_eager_one_and_so_are_its_gradients() -> None:
    mask = of_dense(shown(), (32, 32))
    q, k, v = operands()

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, v, block_mask=mask, softcap=3.0)

    compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(q, k, v), function(q, k, v)
    assert torch.equal(found, wanted)
    dout = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, (q, k, v), dout)
    for one, other in zip(torch.autograd.grad(found, (q, k, v), dout), theirs, strict=True):
        assert torch.equal(one, other)


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    mask = of_dense(shown(), (32, 32))
    given = (*operands(), mask.places, mask.bits, 32, 32, None, None, None, None, None)
    torch.library.opcheck(torch.ops.warploom.attention_blocks.default, given)


def test_a_plan_runs_the_mask_that_a_call_has() -> None:
    q, k, v = (tensor.detach() for tensor in operands())
    one, other = (of_dense(mask, (32, 32)) for mask in (shown(), ~shown()))
    plan = warploom.plan_attention(q, k, v, block_mask=one)
    assert torch.equal(
        plan(q, k, v, block_mask=one)[0], warploom.attention(q, k, v, block_mask=one)
    )
    found = plan(q, k, v, block_mask=other)[0]
    assert torch.equal(found, warploom.attention(q, k, v, block_mask=other))
    assert plan.choice.spec.operation.blocks


def call(mask: object, seq_q: int = SEQ_Q, **keywords: Any) -> torch.Tensor:
    return warploom.attention(*operands(seq_q), block_mask=mask, **keywords)


def test_a_mask_of_another_size_or_beside_bounds_is_refused() -> None:
    mask: BlockMask = of_dense(shown(), (32, 32))
    with pytest.raises(
        ProblemError, match="causal with block_mask: must be left out: a block_mask alone"
    ):
        call(mask, causal="top_left")
    with pytest.raises(ProblemError, match="window with block_mask"):
        call(mask, window=(1, 1))
    with pytest.raises(ProblemError, match="must be of 131 rows and 200 columns, of 2 batches"):
        call(mask, seq_q=131)
    with pytest.raises(ProblemError, match=r"block_mask \[3, 4, 130, 200\]"):
        call(of_dense(shown(3), (32, 32)))
    with pytest.raises(ProblemError, match="block_mask on meta"):
        call(mask.to("meta"))


def test_kernels_with_lists_have_no_bounds_and_tiles_that_masks_are_read_for() -> None:
    for fields, reason in (
        ({"mask": "causal"}, "mask causal with blocks"),
        ({"lengths": "packed"}, "lengths packed with blocks"),
    ):
        with pytest.raises(SpecificationError, match=reason):
            spec(AttentionOperation("bf16", 64, blocks=True, **fields), 128, 128)  # type: ignore[arg-type]
    listed = AttentionOperation("bf16", 64, blocks=True)
    with pytest.raises(SpecificationError, match="kv_tile 112 with blocks"):
        spec(listed, 128, 112)
    with pytest.raises(SpecificationError, match="q_tile 192 with blocks"):
        spec(listed, 192, 128)


def spec(operation: AttentionOperation, q_tile: Literal[128, 192], kv_tile: int) -> KernelSpec:
    return KernelSpec("sm_90a", operation, AttentionSchedule(q_tile, kv_tile))


def test_names_and_digests_of_kernels_without_lists_stay_what_they_were() -> None:
    assert AttentionBackwardOperation("bf16", 64, "none", False, "fixed", True).deterministic
    assert "blocks" not in spec(AttentionOperation("bf16", 64), 128, 128).name
