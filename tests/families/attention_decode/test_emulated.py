"""Emitted kernels, run on the CPU thread by thread, against float64: division, loops and merging.

Blocks run one after the other, their warps and the copies of keys in random order. Three blocks
share out the work, so that most sequences are cut somewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_samples import largest_error, options, sample
from emulation import Emulated, emulated
from host import needs_compiler

from warploom.generator.families.attention_decode import FAMILY
from warploom.generator.specification import KernelSpec

pytestmark = needs_compiler

TILE = {"rows": 16, "keys": 64, "warps": 4}
HEADS = {"heads": 4, "kv_heads": 2, "seq_q": 1}
BOUNDS = {"fp16": (2e-3, 1e-4), "bf16": (8e-3, 1e-3)}  # of o, by the largest, and of lse


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rows of heads that share keys": ({}, {}, {"heads": 16, "lengths": [100, 0, 1], "seq_k": 128}),
    "all keys": ({"lengths": False}, {}, {"lengths": [70, 70], "seq_k": 70}),
    "a stage of several boxes, blocks of two": (
        {"page": 16},
        {"ctas_per_sm": 2},
        {"lengths": [100, 0, 1, 300], "seq_k": 300},
    ),
    "pages longer than a tile, some rows": (
        {"page": 128, "mask": "causal"},
        {},
        {"lengths": [100, 2, 130], "seq_q": 3, "seq_k": 200, "right": 0},
    ),
    "starts": (
        {"starts": True},
        {},
        {"lengths": [200, 90, 60], "starts": [130, 95, -4], "seq_k": 200},
    ),
    "starts, with a scale of each key": (
        {"starts": True, "cache": "e4m3", "scales": "token"},
        {},
        {"lengths": [200, 90], "starts": [10, 70], "seq_k": 224},
    ),
    "starts in a window": (
        {"starts": True, "mask": "window", "page": 32},
        {},
        {
            "lengths": [200, 90],
            "starts": [10, 70],
            "seq_q": 2,
            "seq_k": 224,
            "left": 40,
            "right": 0,
        },
    ),
    "bytes with a scale of each head": (
        {"cache": "e4m3", "scales": "head", "page": 256},
        {"keys": 128, "warps": 8},
        {"lengths": [300, 1, 256], "seq_k": 512},
    ),
    "bytes as fp16, with a scale of each key": (
        {"element": "fp16", "cache": "e4m3", "scales": "token", "page": 16},
        {},
        {"lengths": [90, 1, 64], "seq_k": 96},
    ),
    "whole numbers, a window, a cap and sinks": (
        {
            "cache": "int8",
            "scales": "token",
            "page": 16,
            "mask": "window",
            "softcap": True,
            "sinks": "same",
        },
        {},
        {"lengths": [190, 1, 0], "seq_q": 2, "seq_k": 192, "left": 100, "right": 0},
    ),
    "packed, two tiles of rows": (
        {
            "element": "fp16",
            "cache": "int8",
            "scales": "head",
            "keys": "packed",
            "queries": "packed",
            "mask": "causal",
            "lengths": False,
        },
        {"rows": 32},
        {
            "lengths": [150, 1, 0, 64],
            "rows": [3, 1, 2, 0],
            "heads": 24,
            "seq_q": 3,
            "seq_k": 150,
            "right": 0,
        },
    ),
    "warps of other rows": (
        {"mask": "causal"},
        {"rows": 64, "keys": 32, "warps": 8},
        {"lengths": [100, 3], "heads": 32, "kv_heads": 1, "seq_q": 5, "seq_k": 100, "right": 0},
    ),
    "wide heads": (
        {"dim": 256, "cache": "int8", "scales": "token", "page": 32},
        {},
        {"lengths": [80, 3], "kv_heads": 1, "seq_k": 96},
    ),
    "sinks in fp32, where some see no key": (
        {"dim": 64, "sinks": "fp32"},
        {},
        {"lengths": [130, 0], "kv_heads": 1, "seq_k": 130},
    ),
    "pieces of 64 bytes": ({"dim": 96}, {}, {"lengths": [100, 3], "seq_k": 130}),
    "pieces of 32 bytes": ({"dim": 96, "cache": "e4m3"}, {}, {"lengths": [100, 3], "seq_k": 130}),
    "chunks of an item's own": (
        {"dim": 64, "batch_invariant": True},
        {},
        {"lengths": [1500, 3, 0, 600], "kv_heads": 1, "seq_k": 1500},
    ),
    "up to eight parts, of more rows than a warp adds up at a time": (
        {"dim": 64, "mask": "causal"},
        {"keys": 16, "warps": 1},
        {
            "lengths": [110, 60],
            "heads": 6,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 110,
            "right": 0,
            "multiprocessors": 8,
        },
    ),
    "more parts than are added up together": (
        {"dim": 64, "mask": "causal"},
        {"keys": 16, "warps": 1},
        {
            "lengths": [610],
            "heads": 6,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 610,
            "right": 0,
            "multiprocessors": 40,
        },
    ),
    "more chunks than blocks, of wide rows": (
        {"dim": 128, "batch_invariant": True},
        {"keys": 64, "warps": 4},
        {"lengths": [5700], "heads": 5, "kv_heads": 1, "seq_k": 5700},
    ),
    "more than eight long chunks, of every item as many": (
        {"dim": 64, "batch_invariant": True},
        {"keys": 128, "warps": 4},
        {
            "lengths": [17100, 17000],
            "heads": 1,
            "kv_heads": 1,
            "seq_k": 17100,
            "multiprocessors": 5,
        },
    ),
    "chunks of many rows, shared by blocks and not": (
        {"dim": 64, "mask": "causal", "batch_invariant": True},
        {"rows": 32, "keys": 32, "warps": 2},
        {
            "lengths": [1500, 600, 70],
            "heads": 12,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 1500,
            "right": 0,
            "multiprocessors": 4,
        },
    ),
    "up to eight parts of many rows": (
        {"dim": 64, "mask": "causal"},
        {"rows": 32, "keys": 16, "warps": 2},
        {
            "lengths": [110, 60],
            "heads": 13,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 110,
            "right": 0,
            "multiprocessors": 8,
        },
    ),
    "more parts of many rows than are added up together": (
        {"dim": 64, "mask": "causal"},
        {"rows": 32, "keys": 16, "warps": 2},
        {
            "lengths": [610],
            "heads": 13,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 610,
            "right": 0,
            "multiprocessors": 40,
        },
    ),
    "clusters, of several items each": (
        {"dim": 64, "mask": "causal"},
        {"keys": 32, "warps": 2, "cluster": 4},
        {
            "lengths": [610, 0, 3, 128],
            "heads": 14,
            "kv_heads": 2,
            "seq_q": 2,
            "seq_k": 610,
            "right": 0,
            "multiprocessors": 8,
        },
    ),
    "clusters of eight, in pages, of fewer tiles than blocks": (
        {"cache": "e4m3", "scales": "head", "page": 16},
        {"keys": 64, "warps": 4, "cluster": 8},
        {"lengths": [300, 0, 700], "seq_k": 704, "multiprocessors": 16},
    ),
    "clusters of packed sequences, in two tiles of rows": (
        {
            "element": "fp16",
            "dim": 96,
            "keys": "packed",
            "queries": "packed",
            "mask": "causal",
            "lengths": False,
        },
        {"rows": 32, "keys": 32, "warps": 4, "cluster": 4},
        {
            "lengths": [150, 1, 0, 64],
            "rows": [3, 1, 2, 0],
            "heads": 24,
            "seq_q": 3,
            "seq_k": 150,
            "right": 0,
            "multiprocessors": 12,
        },
    ),
    "clusters, batch invariant": (
        {"dim": 96, "batch_invariant": True, "sinks": "same"},
        {"keys": 32, "warps": 2, "cluster": 4},
        {"lengths": [300, 70, 0], "kv_heads": 1, "seq_k": 320, "multiprocessors": 4},
    ),
    "more sequences than lanes": (
        {"element": "fp16", "dim": 64, "mask": "window"},
        {"keys": 32, "warps": 1},
        {
            "lengths": [150, 3] * 35,
            "heads": 2,
            "kv_heads": 1,
            "seq_q": 2,
            "seq_k": 160,
            "left": 20,
            "right": 0,
        },
    ),
}


INVARIANT: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"dim": 64}, {}, {}),
    # Columns are left in three turns, maxima and sums in the first of these.
    ({"dim": 96}, {}, {}),
    # No registers to add a chunk to those before it.
    ({"dim": 256}, {}, {"kv_heads": 1}),
    ({"dim": 64}, {"rows": 32, "keys": 32, "warps": 2}, {"heads": 24, "kv_heads": 1}),
    ({"dim": 64}, {"keys": 32, "warps": 2, "cluster": 4}, {}),
]
E4M3 = {"cache": "e4m3", "scales": "head"}


def spec(fields: dict[str, Any], tile: dict[str, Any]) -> KernelSpec:
    operation = options(**{"lengths": True, **fields})
    return KernelSpec("sm_90a", operation, FAMILY.complete("sm_90a", operation, {**TILE, **tile}))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelSpec, Emulated]:
    specs = [spec(fields, tile) for fields, tile, _ in CASES.values()]
    specs += [spec({"batch_invariant": True, **fields}, tile) for fields, tile, _ in INVARIANT]
    return emulated([*specs, spec(E4M3, {})], tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_float64(kernels: dict[KernelSpec, Emulated], name: str) -> None:
    fields, tile, call = CASES[name]
    kernel = kernels[spec(fields, tile)]
    call = {"multiprocessors": 3, **HEADS, **call}
    multiprocessors = call.pop("multiprocessors")
    one = sample(kernel.spec.operation, **call)
    kernel(one.problem, one.tensors, one.scalars, multiprocessors)
    error, bounds = largest_error(kernel.spec.operation, one), BOUNDS[kernel.spec.operation.element]
    assert error[0] < bounds[0] and error[1] < bounds[1], error


@pytest.mark.parametrize(("fields", "tile", "call"), INVARIANT)
def test_a_sequence_has_the_same_bits_whatever_is_beside_it(
    kernels: dict[KernelSpec, Emulated],
    fields: dict[str, Any],
    tile: dict[str, Any],
    call: dict[str, Any],
) -> None:
    """Its chunks are added up by one block, or left to be added up by another: in one order."""
    kernel = kernels[spec({"batch_invariant": True, **fields}, tile)]
    call = {"lengths": [1300, 900, 50], "seq_k": 1300, **HEADS, **call}
    one = sample(kernel.spec.operation, **call)
    found = []
    for lengths, multiprocessors in (
        ([1300, 900, 50], 3),
        ([1300, 64, 0], 5),
        ([1300, 1300, 1], 2),
        ([1300, 1, 1300], 13),
        ([1300, 900, 50], 1),
    ):
        one.tensors["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        kernel(
            one.problem, one.tensors, one.scalars, multiprocessors * kernel.spec.schedule.cluster
        )
        found.append([one.tensors[name][0].clone() for name in ("o", "lse")])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_smallest_numbers_of_e4m3_count(kernels: dict[KernelSpec, Emulated]) -> None:
    """They are subnormal in bf16, too: were they 0, results of small caches would be."""
    kernel = kernels[spec(E4M3, {})]
    one = sample(kernel.spec.operation, lengths=[100, 30], seq_k=128, **HEADS)
    for name, exact in (("k", one.keys), ("v", one.values)):
        one.tensors[name].view(torch.uint8).bitwise_and_(0x87)
        one.tensors[f"scale_{name}"].mul_(512)
        for sequence, found in enumerate(exact):
            codes = one.tensors[name][sequence, :, : found.shape[1]].double()
            found.copy_(codes * one.tensors[f"scale_{name}"].double()[:, None, None])
    kernel(one.problem, one.tensors, one.scalars)
    error = largest_error(kernel.spec.operation, one)
    assert error[0] < BOUNDS["bf16"][0] and error[1] < BOUNDS["bf16"][1], error
