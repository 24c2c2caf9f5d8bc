"""Contenders of products of quantised weights: one function, and errors that show."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mixed_stand_in as stand_in
import pytest
import torch
from samplers import constant

import warploom
from benchmarks.families import Asked
from benchmarks.peers import _mixed_decode, _mixed_problem
from benchmarks.peers._mixed_contenders import contenders
from benchmarks.peers._mixed_decode import Model, Step
from benchmarks.peers._mixed_problem import KINDS, Activations, Quantised, quantised, right
from benchmarks.peers._mixed_weights import Weight, Wide
from warploom.runtime.contest import Cell, compete

DENSE = ["torch.mm, bf16", "warploom.gemm, bf16"]


@pytest.fixture(autouse=True)
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_mixed_problem, "packed", stand_in.packed)
    monkeypatch.setattr(warploom, "mixed_gemm", stand_in.multiplied, raising=False)
    told = SimpleNamespace(kernel="a kernel", reason="a record")
    monkeypatch.setattr(warploom, "explain", lambda *_, **__: told)
    quantised.cache_clear()
    yield
    quantised.cache_clear()


def measured(kind: str, shape: tuple[int, int, int], *peers: str, **asked: Any) -> Cell:
    found = contenders(KINDS[kind], shape, Asked(peers=peers, device="cpu", **asked))
    return compete(kind, {}, found, sampler=constant(1e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_warploom_and_dense_products_are_right(kind: str) -> None:
    cell = measured(kind, (5, 192, 256), "dense")
    activations = KINDS[kind].activations
    eight = [f"warploom.gemm, {activations}"] if activations != "bf16" else []
    assert [entry.contender for entry in cell.entries] == ["warploom", *DENSE, *eight]
    for entry in cell.entries:
        assert entry.absent is None and 0 < (entry.error_share or 0) <= 1, entry
    assert cell.entries[0].kernel == "a kernel" and cell.problem["decision"] == "a record"


def test_peers_that_are_missing_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for module in ("humming", "humming.layer"):
        monkeypatch.setitem(sys.modules, module, None)
    cell = measured("w4a16", (3, 64, 128))
    absent = {entry.contender: entry.absent or "" for entry in cell.entries[1:5]}
    assert absent.keys() == {"Marlin", "Machete", "humming", "torch, int4"}
    assert "libmarlin_c.so is in no folder of sys.path" in absent["Marlin"]
    assert "libmachete.so is in no folder" in absent["Machete"]
    assert "humming" in absent["humming"] and absent["torch, int4"]
    cell = measured("mxfp4", (3, 64, 128), "machete", "torch")
    assert [entry.absent for entry in cell.entries[1:]] == [
        f"{name}: not for mxfp4 here" for name in ("machete", "torch")
    ]


@pytest.mark.parametrize("kind", ["w4a16", "w4a16_zeros"])
def test_torch_multiplies_the_same_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the packing and the product that torch has for CPUs."""

    def packing(pairs: torch.Tensor, _inner: int) -> torch.Tensor:
        codes = torch.stack((pairs >> 4, pairs & 15), 2).flatten(1).int()
        return torch._convert_weight_to_int4pack_for_cpu(codes, 1)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", packing)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", torch._weight_int4pack_mm_for_cpu)
    entry = measured(kind, (5, 192, 256), "torch").entries[1]
    assert entry.contender == "torch, int4" and 0 < (entry.error_share or 0) <= 1
    assert "up to 512 rows" in (measured(kind, (513, 64, 128), "torch").entries[1].absent or "")


def test_a_kernel_that_competes_is_given_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of another family is left out."""
    spec: Any = SimpleNamespace(name="own", operation=SimpleNamespace(family="mixed_gemm"))
    plain: Any = SimpleNamespace(name="other", operation=SimpleNamespace(family="gemm"))
    seen: list[object] = []

    def noting(*operands: Any, **keywords: Any) -> torch.Tensor:
        seen.append(keywords["spec"])
        return stand_in.multiplied(*operands, **keywords)

    monkeypatch.setattr(warploom, "mixed_gemm", noting)
    cell = measured("w4a16", (2, 64, 128), "torch", specs=(spec, plain))
    assert [entry.contender for entry in cell.entries] == ["warploom", "torch, int4", "own"]
    assert set(map(id, seen)) == {id(None), id(spec)}


# ---- Errors --------------------------------------------------------------------------------------


def share(k: int, wrong: str, multiplied: str = "bf16") -> float:
    """The error of a product with something wrong, as a share of what it may be."""
    a, w = torch.randn(4, k).bfloat16(), torch.randn(48, k) * k**-0.5
    exact = w.double()
    if wrong == "a step of k":
        w[:, 32:48] = 0
    elif wrong == "a group's scale":
        w[7, 128:256] *= 1.25
    elif wrong == "rounded weights":
        w = w.bfloat16().float()
    out = (a.float() @ w.t()).bfloat16()
    if wrong == "an element":
        out[2, 3] += 0.25
    return right(a.double(), exact, multiplied).share(out)


@pytest.mark.parametrize("multiplied", ["bf16", "e4m3"])
@pytest.mark.parametrize("k", [4096, 16384])
@pytest.mark.parametrize("wrong", ["a step of k", "nothing", "rounded weights"])
def test_a_lost_step_shows_at_any_length_and_rounding_is_allowed(
    k: int, wrong: str, multiplied: str
) -> None:
    torch.manual_seed(k)
    assert (share(k, wrong, multiplied) > 1) == (wrong == "a step of k")


@pytest.mark.parametrize("wrong", ["a group's scale", "an element"])
def test_one_wrong_number_shows(wrong: str) -> None:
    torch.manual_seed(0)
    assert share(512, wrong) > 1


def test_what_nothing_wrote_is_wrong() -> None:
    found = right(torch.randn(2, 64).double(), torch.randn(8, 64).double(), "bf16")
    assert found.share(torch.full((2, 8), torch.nan)) == float("inf")
    assert found.share(found.exact[:, :7]) == float("inf") > found.share(found.exact) == 0


def test_activations_of_8_bits_stand_for_what_their_rows_say() -> None:
    a = Activations.draw(KINDS["w4a8"], 5, 256, "cpu")
    assert a.rows is not None and a.values.dtype == torch.float8_e4m3fn
    drawn = Activations.draw(KINDS["w4a16"], 5, 256, "cpu")
    torch.testing.assert_close(a.exact(), drawn.exact(), rtol=2**-4, atol=2**-5)
    assert a.rows.untyped_storage().nbytes() == 4 * 8  # libraries read scales four at a time


# ---- A step of decoding --------------------------------------------------------------------------

SMALL = Model(2, 128, 128, heads=2, kv_heads=1, vocabulary=96, keys=40)


def decoded(*peers: str) -> Cell:
    found = _mixed_decode.contenders(SMALL, KINDS["w4a16"], 3, Asked(peers=peers, device="cpu"))
    return compete("decode", {}, found, sampler=constant(1e-5))


def test_a_step_of_packed_weights_stands_beside_bf16() -> None:
    cell = decoded()
    names = [entry.contender for entry in cell.entries]
    assert names == ["warploom", DENSE[0], DENSE[1], "Marlin", "humming"]
    for entry in cell.entries[:3]:
        assert entry.absent is None and 0 < (entry.error_share or 0) <= 1, entry
    assert all(entry.absent for entry in cell.entries[3:])
    assert cell.ratio == 1  # bf16 by torch is what packed weights are compared with
    assert [entry.contender for entry in decoded("dense").entries] == names[:3]


def test_a_layer_that_is_multiplied_by_anothers_weight_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = _mixed_decode._packed
    given: list[Mapping[str, Quantised]] = []

    def first_only(layout: type[Weight], layer: Mapping[str, Quantised]) -> dict[str, Weight]:
        given.append(layer)
        return plain(layout, {**layer, "down": given[0]["down"]})

    monkeypatch.setattr(_mixed_decode, "_packed", first_only)
    assert (decoded("dense").entries[0].error_share or 0) > 1


def test_a_step_computes_a_llama() -> None:
    """Held against one written out head by head, without a cache's last token written before."""
    step = Step(SMALL, 2, "cpu").double()
    weights = {
        (layer, name): torch.randn(n, k, dtype=torch.float64) * k**-0.5
        for layer in range(SMALL.layers)
        for name, (n, k) in SMALL.products.items()
    }
    found = step(lambda layer, name, x: x @ weights[layer, name].t())
    x = step.x
    for layer in range(SMALL.layers):
        qkv = (normed(step, x) @ weights[layer, "qkv"].t()).view(2, 4, 128)
        keys, values = (cache.clone() for cache in step.caches[layer])
        keys[:, 0, -1], values[:, 0, -1] = rotated(qkv[:, 2]), qkv[:, 3]
        heads = []
        for head in range(2):
            scores = torch.einsum("bd,btd->bt", rotated(qkv[:, head]), keys[:, 0]) * 128**-0.5
            heads.append(torch.einsum("bt,btd->bd", scores.softmax(-1), values[:, 0]))
        x = x + torch.cat(heads, -1) @ weights[layer, "o"].t()
        gate, up = (normed(step, x) @ weights[layer, "gate_up"].t()).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ weights[layer, "down"].t()
    torch.testing.assert_close(found, normed(step, x) @ step.head.t(), rtol=1e-2, atol=1e-2)


def normed(step: Step, x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * step.norm


def rotated(head: torch.Tensor) -> torch.Tensor:
    angle = (SMALL.keys - 1) / 1e4 ** (torch.arange(0, 128, 2) / 128)
    turned = torch.polar(torch.ones(64), angle) * torch.complex(head[..., :64], head[..., 64:])
    return torch.cat((turned.real, turned.imag), -1)


def test_copies_lie_as_what_they_were_copied_from() -> None:
    given = quantised(KINDS["w4a16"], 64, 128, "cpu")
    weight = Wide.of(given)
    weight = replace(weight, tensors=(weight.tensors[0].t(), None))
    copy = weight.copy()
    assert copy.tensors[0].stride() == weight.tensors[0].stride() and copy.tensors[1] is None
    assert copy.tensors[0].data_ptr() != weight.tensors[0].data_ptr()
    assert copy.bytes == weight.bytes == 64 * 128 * 2
