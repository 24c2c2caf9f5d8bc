"""Attention of 8 bits beside other libraries' and that of 16: e4m3, and int8 scores with scales of
rows and of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._attention_quantized import (
    SCALES,
    Bound,
    Quantized,
    by_cast,
    operands,
    shape_of,
    share,
)
from benchmarks.peers._libraries import EIGHT_BITS
from benchmarks.peers.libraries import refusing
from warploom.generator.configurations import cells
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.families.attention_forward.rules import usual_sums
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.attention_forward import values
from warploom.runtime.families.attention_forward.eight_bit_call import EightBitCall
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial, Operands
from warploom.runtime.measure import Call

TITLE = "8 bits"
LAID_OUT = "warploom, v by keys"  # a contender: v is laid out anew in each call
WIDE = "warploom, bf16"
QUANTIZING = "warploom, quantized"  # bf16, quantized in each call
KINDS: dict[str, dict[str, Any]] = {
    "e4m3": {"scores": "e4m3", "weights": "e4m3"},
    "int8": {"scores": "int8", "weights": "e4m3", "scales": "blocks"},
}


def cases(asked: Asked) -> Iterator[Case]:
    """A cell for each problem and kind."""
    for problem in problems():
        for kind in KINDS:
            about = {**problem.record("forward", 2), "type": kind}
            make = partial(contenders, problem, kind)
            yield Case(
                f"{problem.name} forward, {kind}", about, Floor.of(about["flops"], bits=8), make
            )


def problems() -> Iterator[Attention]:
    """The squares of the lists, and heads that share keys."""
    listed = cells()["attention"]
    listed = {**listed, **listed["eight_bits"]}
    for dim in listed["dim"]:
        for causal in listed["causal"]:
            for seq in listed["seq"]:
                heads, mask = listed["hidden"] // dim, "causal" if causal else "full"
                batch = listed["tokens"] // seq
                yield Attention(f"d{dim} {mask} {seq}", batch, heads, heads, seq, dim, causal)
    for batch, heads, kv_heads, seq, dim, causal in listed["grouped"]:
        mask = "causal" if causal else "full"
        name = f"d{dim} {mask} {seq}, {heads}/{kv_heads} heads"
        yield Attention(name, batch, heads, kv_heads, seq, dim, causal)


def operation(problem: Attention, kind: str) -> AttentionOperation:
    """What is computed, with sums that are promoted where a kernel has them."""
    sums = usual_sums(KINDS[kind]["weights"], problem.dim)
    return AttentionOperation(**problem.operation, **KINDS[kind], sums=sums)


def contenders(problem: Attention, kind: str, asked: Asked) -> list[Contender]:
    """Warploom, its baselines, and each kernel that competes, without quantization and with it.

    Warploom takes v as its kernels read it, and by keys; its bf16 is there, too. With
    quantization operands are bf16: `attention_8bit` quantizes ours, `cast` those of the baselines.
    """
    wanted = operation(problem, kind)
    shape = shape_of(problem)
    trial = EightBitTrial(wanted, shape, asked.device, 0)
    wide = AttentionTrial(AttentionOperation(**problem.operation), shape, asked.device, 0)
    fitting = [spec for spec in asked.specs if spec.operation == wanted]

    def told() -> tuple[str, str]:
        one = trial.sets[0]
        keywords = {**one.lengths, **trial.keywords}
        found = warploom.explain(one.q, one.k, one.v, **keywords)
        return found.kernel, found.reason

    words = asked.peers or tuple(EIGHT_BITS)
    baselines = [EIGHT_BITS[word] for word in words if word in EIGHT_BITS]
    given = operands(problem, asked.device) if baselines else []
    return [
        Contender("warploom", _calls(trial), trial.held_share, told),
        *(_baseline(name, bind, given) for name, bind in baselines),
        Contender(LAID_OUT, _calls(trial, by_keys=True), trial.held_share),
        *(Contender(spec.name, trial.calls(spec), trial.held_share) for spec in fitting),
        Contender(WIDE, _calls(wide), wide.held_share),
        _quantizing(problem, kind, wide.sets),
        *(
            _quantizing_baseline(name, bind, problem, wide.sets)
            for name, bind in baselines
            if kind == "e4m3"
        ),
    ]


def _calls(trial: AttentionTrial, *, by_keys: bool = False) -> list[Call]:
    """A call on each set of operands, as dispatched."""
    made: list[Call] = []
    for one in trial.sets:
        keywords: dict[str, Any] = {**one.lengths, **trial.keywords, "out": one.out}
        v: torch.Tensor = one.v
        if by_keys:
            v = values.by_keys(v, one.k.shape[2]).transpose(1, 2).contiguous().transpose(1, 2)
            keywords["v_layout"] = "keys"
        made.append(partial(warploom.attention, one.q, one.k, v, **keywords))
    return made


def _baseline(
    name: str, bind: Callable[[Quantized], Bound], given: Sequence[Quantized]
) -> Contender:
    """A library on operands of e4m3, each set bound at its first call."""
    bound = [cache(partial(refusing(name, bind), one)) for one in given]

    def call(one: Callable[[], Bound]) -> None:
        one().call()

    def held() -> float:
        return bound[0]().share(given[0])

    return Contender(name, [partial(call, one) for one in bound], held, peer=True)


def _quantizing(problem: Attention, kind: str, sets: Sequence[Operands]) -> Contender:
    """Ours on bf16, quantized in each call."""
    causal: dict[str, Any] = {"causal": problem.causal, "scores": kind}
    results: list[torch.Tensor] = []

    def call(one: Operands) -> None:
        results[:] = [warploom.attention_8bit(one.q, one.k, one.v, **causal)]

    def held() -> float:
        one = sets[0]
        call(one)
        whole = warploom.attention_quantize(one.q, one.k, one.v, scores=kind)
        v = values.by_keys(whole.v, problem.seq)
        scales: dict[str, Any] = {name: getattr(whole, name) for name in SCALES}
        described = EightBitCall(whole.q, whole.k, v, causal=problem.causal, **scales)
        return share(described, results[0], operation(problem, kind).sums)

    return Contender(QUANTIZING, [partial(call, one) for one in sets], held)


def _quantizing_baseline(
    name: str,
    bind: Callable[[Quantized], Bound],
    problem: Attention,
    sets: Sequence[Operands],
) -> Contender:
    """A library on bf16 that is quantized in each call: whole tensors, by our cast."""
    given = [by_cast(problem, one) for one in sets]
    bound = [cache(partial(refusing(name, bind), one)) for one in given]

    def call(one: Operands, attended: Callable[[], Bound]) -> None:
        attended().call()  # of operands that were quantized before, to be written once
        by_cast(problem, one)

    calls = [partial(call, one, each) for one, each in zip(sets, bound, strict=True)]
    return Contender(f"{name}, quantized", calls, lambda: bound[0]().share(given[0]))
