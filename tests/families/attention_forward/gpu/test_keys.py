"""Masks of keys: what counts, what is read, how many tiles are worked on and masked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attention_arena as arena
import attention_cases as cases
import attention_key_cases as keys
import mutants
import pytest
import torch
from attention_cases import MASKS, Shape
from attention_key_cases import EXTENTS, FORWARD, PATTERNS
from mutants import Edit

import warploom
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import WorkerPool
from warploom.runtime import kernel as kernels
from warploom.runtime import plan
from warploom.runtime.families._attention.modifiers.score_tensors import room_for

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

PLACE = "  int head, own_row;  // the thread's first row as it is\n"
STEP = "    c.change"
TAKEN = "    c.columns = work.sequence.columns(p);\n"
COUNTED: tuple[Edit, ...] = (  # steps of a piece of work, in the place of lse
    (PLACE, PLACE + "  int steps = 0;\n"),
    (STEP, "    ++c.steps;\n" + STEP),
    (TAKEN, TAKEN + "    c.steps = 0;\n"),
    ("(rows.maximum[r] * c.scaling.exponent + fast_log2(sum)) * kLn2", "c.steps"),
)
MASKED = (COUNTED[0], (STEP, "    c.steps += c.hides(n);\n" + STEP), *COUNTED[2:])
CHOSEN = cases.chosen(128, further=keys.MASKED)  # the kernel for a mask alone at dimension 128
EDITED = [(CHOSEN, COUNTED), (CHOSEN, MASKED)]


def made(kernel: KernelSpec, name: str, shape: Shape, **keywords: Any) -> arena.Call:
    """A call with a mask of keys, of packed lengths if the kernel is for these."""
    if cases.operation(kernel).lengths == "fixed":
        return arena.call(kernel, shape, mask=keys.mask(name, shape), **keywords)
    rows = [shape.seq_q - 31 * i for i in range(shape.batch)]
    columns = [max(1, shape.seq_k - 61 * i) for i in range(shape.batch)]
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    mask = keys.mask(name, shape)
    return arena.packed(kernel, rows, columns, past=5, mask=mask, **heads, **keywords)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kernel", FORWARD, ids=cases.short)
def test_keys_that_a_mask_hides_do_not_count_and_all_others_do(
    kernel: KernelSpec, name: str
) -> None:
    for index, shape in enumerate(EXTENTS.values()):
        if cases.operation(kernel).lengths == "packed" and shape.seq_q < 31 * shape.batch:
            continue
        keywords = MASKS[cases.operation(kernel).mask]
        arena.verify(made(kernel, name, shape, **keywords[index % len(keywords)]))


@pytest.mark.parametrize("kernel", FORWARD[:12], ids=cases.short)
def test_tiles_of_keys_that_are_hidden_are_not_read(kernel: KernelSpec) -> None:
    shape = Shape(2, 4, 2, 300, 1021)
    for name in ("right", "left"):
        call = made(kernel, name, shape)
        if cases.operation(kernel).lengths == "packed":
            continue
        first = [one.clone() for one in call.run()]
        for batch in range(shape.batch):
            shown = call.keywords["mask"][batch, 0, 0].nonzero()[:, 0]
            begin, end = (int(shown[0]), int(shown[-1]) + 1) if len(shown) else (1021, 1021)
            for tensor in (call.k.view, call.v.view):
                tensor[batch, :, : max(0, begin - 192)] = torch.nan
                tensor[batch, :, end + 192 :] = torch.nan
        assert all(map(torch.equal, call.run(), first))


def counted(kernel: KernelSpec, edits: Sequence[Edit], mask: torch.Tensor, shape: Shape) -> Any:  # noqa: ANN401
    """What the kernel counts in the place of lse, of the first head's first row of each batch."""
    before = kernels._kernels.get(kernel)
    text = mutants.edited(render(kernel), tuple(edits))
    with WorkerPool(1) as pool:
        artifact = pool.submit(partial(mutants.compile_text, kernel, text)).result()
    try:
        plan.forget()
        kernels._kernels[kernel] = kernels.Kernel(kernel, artifact)
        _, steps = arena.call(kernel, shape, mask=mask).run()
    finally:
        plan.forget()
        del kernels._kernels[kernel]
        if before is not None:
            kernels._kernels[kernel] = before
    return steps[:, 0, 0].int().tolist()


def test_as_many_tiles_are_worked_on_and_masked_as_the_mask_asks_for() -> None:
    kernel, shape = CHOSEN, Shape(4, 2, 1, 200, 1021)
    tile = kernel.schedule.kv_tile  # type: ignore[attr-defined]
    ends = torch.tensor([5 * tile, 300, 0, 1021], device="cuda")
    place = torch.arange(1021, device="cuda")
    right = room_for(1021, (place < ends[:, None])[:, None, None])
    assert counted(kernel, COUNTED, right, shape) == [-(-int(end) // tile) for end in ends]
    assert counted(kernel, MASKED, right, shape) == [0, 1, 0, 0]
    left = room_for(1021, (place >= 1021 - ends[:, None])[:, None, None])
    tiles = -(-1021 // tile)
    begins = [(1021 - int(end)) // tile if end else tiles for end in ends]
    assert counted(kernel, COUNTED, left, shape) == [tiles - begin for begin in begins]


def test_a_mask_may_change_between_replays_of_a_graph() -> None:
    shape = Shape(3, 4, 2, 300, 777)
    call = made(CHOSEN, "right", shape)
    mask = call.keywords["mask"]
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call.run()
    for name in ("left", "none", "holes", "right"):
        mask.copy_(keys.mask(name, shape))
        call.out.room.fill_(-1)
        graph.replay()
        arena.assert_right(call, out, lse)


def test_a_mask_of_keys_that_is_no_multiple_of_16_bytes_apart_is_copied() -> None:
    q = torch.randn(3, 4, 77, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(3, 1, 1, 77, device="cuda") < 0.5
    copies = warploom.counters.copies
    found = warploom.attention(q, q, q, mask=mask)
    assert warploom.counters.copies == copies + 1
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert torch.allclose(found, right, atol=2e-2, rtol=2e-2)
