"""Masks of blocks that the gpu tests of both passes run: of every kind, over odd extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import attention_cases as cases
import torch
from attention_cases import SHAPES, Shape
from torch.nn.attention.flex_attention import create_block_mask

import warploom
from warploom import BlockMask
from warploom.generator.families import family
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.block_mask import of_dense

Mask = Callable[[Shape], BlockMask]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where a test makes them without kernels


def lists(shape: Shape, share: float, *, block: int = 128, own: bool = True) -> BlockMask:
    """Blocks drawn for each head, all of which count; the second block of rows has none of them."""
    random = torch.Generator(DEVICE).manual_seed(shape.seq_q)
    rows, columns = -(-shape.seq_q // block), -(-shape.seq_k // block)
    lead = (shape.batch, shape.heads) if own else (1, 1)
    drawn = torch.rand(*lead, rows, columns, generator=random, device=DEVICE) < share
    drawn[:, :, 1:2] = False
    order = drawn.int().argsort(-1, descending=True).int()
    return warploom.block_mask(
        kv_num_blocks=drawn.sum(-1).int(),
        kv_indices=order,
        block=block,
        seq_q=shape.seq_q,
        seq_k=shape.seq_k,
    )


def documents(shape: Shape) -> BlockMask:
    """torch's own mask of documents of 90 tokens, each row seeing what came before it."""
    number = torch.arange(max(shape.seq_q, shape.seq_k), device=DEVICE) // 90

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return (q >= k) & (number[q] == number[k])

    lengths = shape.seq_q, shape.seq_k
    return warploom.block_mask(create_block_mask(mask_mod, None, None, *lengths, device=DEVICE))


def dense(shape: Shape, block: tuple[int, int], share: float = 0.5) -> BlockMask:
    """Scores drawn one by one, of each head."""
    random = torch.Generator(DEVICE).manual_seed(shape.seq_k)
    extents = (1, shape.heads, shape.seq_q, shape.seq_k)
    drawn = torch.rand(extents, generator=random, device=DEVICE) < share
    drawn[:, :, : block[0], : block[1]] = True
    return of_dense(drawn, block)


MASKS: dict[str, Mask] = {
    "lists": lambda shape: lists(shape, 0.4),
    "shared lists of 64": lambda shape: lists(shape, 0.4, block=64, own=False),
    "lists of 48, within tiles": lambda shape: lists(shape, 0.3, block=48),
    "lists of 384, of several tiles": lambda shape: lists(shape, 0.6, block=384),
    "documents": documents,
    "scores": lambda shape: dense(shape, (128, 64)),
    "few scores": lambda shape: dense(shape, (64, 128), 0.01),
    "nothing": lambda shape: lists(shape, 0.0),
    "everything": lambda shape: lists(shape, 1.1),
}
EXTENTS: dict[str, Shape] = {
    **{name: SHAPES[name] for name in ("1", "65", "1000", "few rows", "few columns")},
    "more tiles than multiprocessors": Shape(3, 22, 11, 517, 389),
}


def listed(kernel: KernelSpec) -> KernelSpec:
    """The kernel of the same schedule that walks lists."""
    return replace(kernel, operation=replace(kernel.operation, blocks=True))


def forward(q_tile: int, kv_tile: int, dim: int, **fields: object) -> KernelSpec:
    """A kernel by its tile."""
    return listed(cases.spec(q_tile, kv_tile, dim=dim, **fields))  # type: ignore[arg-type]


FORWARD = [
    forward(128, 128, 128, scheduler="dynamic", rescale="needed"),
    forward(128, 128, 128, element="fp16", pingpong=False, scheduler="static"),
    forward(128, 64, 128, scheduler="dynamic", overlap=False),
    forward(128, 128, 64, stages=3, scheduler="dynamic", rescale="needed"),
    forward(64, 64, 64, scheduler="single"),
    forward(
        128,
        128,
        64,
        stages=3,
        pingpong=False,
        overlap=False,
        scheduler="dynamic",
        rescale="needed",
    ),
    forward(128, 128, 64, softcap=True, scheduler="dynamic"),
    forward(128, 128, 32, element="fp16", stages=3, scheduler="dynamic"),
    forward(128, 128, 96, element="fp16", scheduler="dynamic"),
    forward(128, 64, 192, pingpong=False, scheduler="dynamic"),
    forward(128, 64, 256, element="fp16", pingpong=False, scheduler="dynamic"),
    forward(128, 128, 128, scheduler="dynamic", rescale="needed", further={"dropout": True}),
    forward(64, 64, 64, element="fp16", scheduler="single", further={"dropout": True}),
    forward(128, 64, 256, pingpong=False, scheduler="dynamic", further={"dropout": True}),
]


_ASKED = ("softcap", "deterministic", "dropout")


def backward(dim: int, element: str, **fields: object) -> KernelSpec:
    """A kernel of gradients by the fields of its operation and of its schedule."""
    wide = family("attention_backward")
    asked = {name: fields.pop(name) for name in _ASKED if name in fields}
    operation = wide.operation(element=element, dim=dim, blocks=True, **asked)
    return KernelSpec(cases.ARCH, operation, wide.schedule(**fields))


BACKWARD = [
    backward(128, "bf16", q_tile=64, kv_tile=128, overlap=False),
    backward(
        128,
        "fp16",
        q_tile=64,
        kv_tile=128,
        overlap=False,
        accumulate="direct",
        v_in_registers="half",
    ),
    backward(128, "fp16", q_tile=64, kv_tile=128),
    backward(128, "bf16", q_tile=64, kv_tile=128, overlap=False, deterministic=True),
    backward(64, "bf16", q_tile=128, kv_tile=128, overlap=False),
    backward(64, "bf16", q_tile=128, kv_tile=128, overlap=False, accumulate="direct"),
    backward(64, "fp16", q_tile=64, kv_tile=128, stages=3),
    backward(64, "bf16", q_tile=64, kv_tile=128, softcap=True),
    backward(64, "bf16", q_tile=64, kv_tile=64, deterministic=True),
    backward(32, "bf16", q_tile=128, kv_tile=128, overlap=False),
    backward(96, "fp16", q_tile=64, kv_tile=128),
    backward(192, "bf16", q_tile=64, kv_tile=128, cluster_split="rows"),
    backward(
        192,
        "bf16",
        q_tile=64,
        kv_tile=128,
        cluster_split="rows",
        accumulate="direct",
        single_do=True,
    ),
    backward(192, "bf16", q_tile=64, kv_tile=128, stages=1, overlap=False),
    backward(256, "fp16", q_tile=64, kv_tile=128, stages=1, overlap=False, cluster_split="rows"),
    backward(
        256,
        "bf16",
        q_tile=64,
        kv_tile=128,
        stages=1,
        overlap=False,
        cluster_split="rows",
        deterministic=True,
    ),
    backward(256, "bf16", q_tile=64, kv_tile=64, stages=1, overlap=False),
    backward(128, "bf16", q_tile=32, kv_tile=128, overlap=False, accumulate="direct", dropout=True),
    backward(64, "fp16", q_tile=64, kv_tile=64, deterministic=True, dropout=True),
    backward(96, "bf16", q_tile=64, kv_tile=128, overlap=False, dropout=True),
    backward(
        256,
        "bf16",
        q_tile=64,
        kv_tile=128,
        stages=1,
        overlap=False,
        cluster_split="rows",
        dropout=True,
    ),
]
