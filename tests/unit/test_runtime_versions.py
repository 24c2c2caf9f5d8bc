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


def fp32(out: bool) -> Case:
    """A call that runs anew where it has an `out`, and else a sequence of launches."""
    names = ("a", "b", "out") if out else ("a", "b")
    return Case(
        lambda **given: warploom.gemm(**given, precision="fp32"),
        lambda: {
            **{name: random(M, M, dtype=FP32) for name in names},
            "amax": random(1, dtype=FP32),
        },
        ("out", "amax") if out else ("amax",),
    )


FURTHER = {
    "grouped mixed_gemm": Case(
        lambda a, **given: warploom.grouped_mixed_gemm(a, EXPERTS, **given),
        lambda: {"a": random(M, K), "offs": integers(5, M), "out": random(M, N)},
        ("out",),
    ),
    "gemm, a list of items": Case(
        lambda a, b, stored: warploom.gemm(a, b, epilogue=[("preactivation", stored)]),
        lambda: {"a": random(M, K), "b": random(K, N), "stored": random(M, N)},
        ("stored",),
    ),
    "gemm in fp32": fp32(out=True),
    "gemm in fp32 without out": fp32(out=False),
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_counts_what_it_writes(backend: str) -> None:
    """What an operator declares that it writes, a compiler hands on in one piece."""
    a, b, new, lengths = random(M, K), random(K, N), random(2, 2, 1, 64), integers(3, 5)
    written = random(M, N), random(2, 2, 16, 64), random(2, 2, 16, 64)

    @torch.compile(backend=backend)
    def run(out: torch.Tensor, *caches: torch.Tensor) -> None:
        warploom.gemm(a, b, out=out)
        warploom.append_kv_cache(*caches, new, new, lengths)

    for _ in range(3):
        versions = [one._version for one in written]
        run(*written)
        assert all(one._version > before for one, before in zip(written, versions, strict=True))
