"""Kernels that walk lists of blocks: what counts, what is read, how much is walked."""

from __future__ import annotations

from functools import partial

import attention_arena as arena
import attention_block_cases as blocks
import attention_cases as cases
import mutants
import pytest
import torch
from attention_block_cases import EXTENTS, FORWARD, MASKS
from attention_cases import SHAPES, Shape

import warploom
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import WorkerPool
from warploom.runtime import kernel as kernels
from warploom.runtime import plan
from warploom.runtime.families._attention import block_lists

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_kernels = pytest.mark.parametrize("kernel", FORWARD, ids=cases.short)

TAKEN = "    c.columns = work.sequence.columns(p);\n"
COUNTED = (  # steps of a piece of work, in the place of lse
    ("  int masks;   ", "  int steps = 0;\n  int masks;   "),
    ("    const Shown shown(c, n,", "    ++c.steps;\n    const Shown shown(c, n,"),
    (TAKEN, TAKEN + "    c.steps = 0;\n"),
    ("(rows.maximum[r] * c.scaling.exponent + fast_log2(sum)) * kLn2", "c.steps"),
)
EDITED = [(FORWARD[index], COUNTED) for index in (0, 2, 4)]


@pytest.mark.parametrize("mask", MASKS)
@over_kernels
def test_no_score_is_lost_that_counts_and_none_counts_that_should_not(
    kernel: KernelSpec, mask: str
) -> None:
    for index, shape in enumerate(EXTENTS.values()):
        made = arena.call(kernel, shape, turned=index % 2 == 1, block_mask=MASKS[mask](shape))
        arena.verify(made)


@over_kernels
def test_tiles_that_are_not_listed_are_not_read(kernel: KernelSpec) -> None:
    verify_unread(kernel)


def verify_unread(kernel: KernelSpec) -> None:
    """Keys that no block names are NaN; a weight of 0 times NaN would be NaN, too."""
    shape = SHAPES["1000"]
    mask = blocks.lists(shape, 2.0, own=False)
    mask.places[..., 2:4] = 0  # columns 256 to 511
    made = arena.call(kernel, shape, block_mask=mask)
    made.k.view[:, :, 256:512] = made.v.view[:, :, 256:512] = torch.nan
    out, lse = made.run()
    assert out.isfinite().all()
    assert lse[:, :, :128].isfinite().all()


def test_as_many_tiles_are_walked_as_are_listed() -> None:
    for kernel, _ in EDITED:
        verify_counted(kernel)


def verify_counted(kernel: KernelSpec) -> None:
    """The kernel counts its steps in the place of lse."""
    shape = Shape(2, 6, 3, 1000, 777)
    mask = MASKS["lists"](shape)
    counted = kernels._kernels.get(kernel)
    text = mutants.edited(render(kernel), COUNTED)
    with WorkerPool(1) as pool:
        artifact = pool.submit(partial(mutants.compile_text, kernel, text)).result()
    try:
        plan.forget()
        kernels._kernels[kernel] = kernels.Kernel(kernel, artifact)
        _, steps = arena.call(kernel, shape, block_mask=mask).run()
    finally:
        plan.forget()
        kernels._kernels.pop(kernel, None)
        if counted is not None:
            kernels._kernels[kernel] = counted
    q_tile = kernel.schedule.tile[0]
    counts, *_, of_tile = block_lists.of_rows(mask, kernel.schedule.tile).lists.unbind(-1)
    found = counts.gather(-1, of_tile.argsort(-1))
    wanted = found.repeat_interleave(q_tile, -1)[:, :, : shape.seq_q].float()
    assert torch.equal(steps, wanted)


def test_a_captured_graph_has_the_lists_of_the_call_before() -> None:
    shape = SHAPES["1000"]
    made = arena.call(None, shape, dim=64, block_mask=MASKS["documents"](shape))
    q, k, v = made.given
    mask = made.keywords["block_mask"]
    wanted = warploom.attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention(q, k, v, block_mask=mask)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    fresh = MASKS["documents"](shape)
    new = pytest.raises(warploom.ProblemError, match="while a CUDA graph is captured")
    with new, torch.cuda.graph(torch.cuda.CUDAGraph()):
        warploom.attention(q, k, v, block_mask=fresh)


def test_a_compiled_call_and_its_gradients_are_those_of_an_eager_one() -> None:
    shape = SHAPES["1000"]
    mask = MASKS["documents"](shape)
    q, k, v = (one.requires_grad_() for one in arena.call(None, shape, dim=64).given)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, v, block_mask=mask, deterministic=True)

    compiled = torch.compile(function, fullgraph=True)
    found, wanted = compiled(q, k, v), function(q, k, v)
    assert torch.equal(found, wanted)
    dout = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), dout),
        torch.autograd.grad(wanted, (q, k, v), dout),
        strict=True,
    ):
        assert torch.equal(one, other)
