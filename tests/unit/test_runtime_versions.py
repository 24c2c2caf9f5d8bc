"""Tensors that kernels write count a version, as torch's own operators have them count.

What is kept of a tensor until its version changes (pieces, quantized weights, what autograd saved)
would be used after a kernel wrote to that tensor. The reference writes by torch, which counts: a
GPU is pretended, whose kernels write behind torch's back.
"""

from __future__ import annotations

import pytest
import torch
from cold_calls import launched
from negated_calls import CASES, FP32, WRITTEN, Case, K, M, N, integers, random
from pretended_gpu import PretendedGpu, gpu

import warploom
from warploom.runtime.families.gemm.api import _ready

__all__ = ["gpu", "launched"]

EXPERTS = warploom.PackedExperts.quantize(random(2, N, K), "int4", group=64)
FURTHER = {
    "grouped mixed_gemm": Case(
        lambda a, **given: warploom.grouped_mixed_gemm(a, EXPERTS, **given),
        lambda: {"a": random(M, K), "offs": integers(5, M), "out": random(M, N)},
        ("out",),
    ),
    "block_sparse_gemm": Case(
        warploom.block_sparse_gemm,
        lambda: {
            **{name: random(128, 128) for name in ("a", "b", "out")},
            "mask": torch.ones(1, 1, dtype=torch.bool),
        },
        ("out",),
    ),
    **{
        f"gemm, {precision}": Case(
            lambda precision=precision, **given: warploom.gemm(**given, precision=precision),
            lambda: {
                **{name: random(M, M, dtype=FP32) for name in ("a", "b", "out")},
                "amax": random(1, dtype=FP32),
            },
            ("out", "amax"),
        )
        for precision in ("fp32", "bf16x3", "tf32")
    },
    "gemm in fp32 without out": Case(
        lambda **given: warploom.gemm(**given, precision="fp32"),
        lambda: {
            **{name: random(M, M, dtype=FP32) for name in "ab"},
            "amax": random(1, dtype=FP32),
        },
        ("amax",),
    ),
    "gemm, Strassen": Case(
        lambda **given: warploom.gemm(**given, algorithm="strassen"),
        lambda: {name: random(256, 256) for name in ("a", "b", "out")},
        ("out",),
    ),
    "gemm, a list of items": Case(
        lambda a, b, stored: warploom.gemm(a, b, epilogue=[("preactivation", stored)]),
        lambda: {"a": random(M, K), "b": random(K, N), "stored": random(M, N)},
        ("stored",),
    ),
}
ALL = {**CASES, **FURTHER}
CALLS = [*WRITTEN, *[(case, name) for case, one in FURTHER.items() for name in one.written]]


@pytest.mark.parametrize(("case", "name"), CALLS)
def test_a_call_counts_what_it_writes(gpu: PretendedGpu, case: str, name: str) -> None:
    """Eager calls of families other than fp32 counted nothing, new or like an earlier one."""
    one, given = ALL[case], ALL[case].made()
    read = {key: tensor._version for key, tensor in given.items() if key not in one.written}
    for _ in range(4):
        before = given[name]._version
        one.call(**given)
        assert gpu.launches
        assert given[name]._version > before
    assert {key: given[key]._version for key in read} == read


def test_a_plan_whose_launch_is_fired_again_counts_it(launched: list[int]) -> None:
    """It makes no call: what it was called with is all that there is."""
    a, b, out = random(M, K), random(K, N), random(M, N)
    plan = warploom.plan(a, b, out=out)
    for count in range(1, 5):
        before = out._version
        plan(a, b, out)
        assert len(launched) == count
        assert out._version > before
    assert any(key[0] == plan._number for key in _ready)


def test_what_autograd_saved_is_not_used_when_it_was_overwritten(gpu: PretendedGpu) -> None:
    """The gradient of a square would be that of what a GEMM wrote later."""
    leaf = random(M, N).requires_grad_()
    out = leaf * 1
    squared = (out * out).sum()
    warploom.gemm(random(M, K), random(K, N), out=out.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_tensors_of_inference_mode_are_written(gpu: PretendedGpu) -> None:
    """They have no version to count, in no mode."""
    with torch.inference_mode():
        out = random(M, N)
    for _ in range(3):
        assert warploom.gemm(random(M, K), random(K, N), out=out) is out
    with torch.inference_mode():
        assert warploom.gemm(random(M, K), random(K, N), out=out) is out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_counts_what_it_writes(backend: str) -> None:
    """What an operator declares that it writes, a compiler hands on in one piece."""
    a, b, out = random(M, K), random(K, N), random(M, N)
    lengths = integers(3, 5)
    caches = {name: random(2, 2, 16, 64) for name in ("k_cache", "v_cache")}

    def run(out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        warploom.gemm(a, b, out=out)
        warploom.append_kv_cache(k_cache, v_cache, new, new, lengths)

    new = random(2, 2, 1, 64)
    compiled = torch.compile(run, backend=backend)
    written = (out, *caches.values())
    for _ in range(3):
        versions = [one._version for one in written]
        compiled(out, **caches)
        assert all(one._version > before for one, before in zip(written, versions, strict=True))
