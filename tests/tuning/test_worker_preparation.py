"""What is slow once is done before the first kernel is tried: its time is its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import forked
import pytest
import torch
from forked import Program

from warploom.errors import KernelMissingError
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardSchedule,
    ActivationBackwardShape,
)
from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendSchedule,
    AttentionAppendShape,
)
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_decode import (
    DecodeOperation,
    DecodeSchedule,
    DecodeShape,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeSchedule,
    AttentionMergeShape,
)
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec
from warploom.runtime import families, trial
from warploom.runtime.families.gemm.samples import GemmTrial
from warploom.tuning import worker as workers
from warploom.tuning.worker import Worker

ATTENTION = AttentionShape(1, 2, 2, 70, 70, 64)
TRIED: dict[str, tuple[KernelSpec, Shape]] = {
    "activation_backward": (
        KernelSpec(
            "sm_90a",
            ActivationBackwardOperation("bf16", "bf16", "bf16", "gelu", sums=True),
            ActivationBackwardSchedule(256, 64),
        ),
        ActivationBackwardShape(67, 64),
    ),
    "gemm": (
        KernelSpec(
            "sm_90a",
            GemmOperation("bf16", "bf16", "bf16"),
            GemmSchedule((64, 64, 64), stages=4, consumers=1, store="direct"),
        ),
        GemmShape(67, 64, 96),
    ),
    "attention_forward": (
        KernelSpec("sm_90a", AttentionOperation("bf16", 64), AttentionSchedule(128, 64)),
        ATTENTION,
    ),
    "attention_append": (
        KernelSpec("sm_90a", AttentionAppendOperation("bf16", 64), AttentionAppendSchedule(128)),
        AttentionAppendShape(67, 2),
    ),
    "attention_decode": (
        KernelSpec("sm_90a", DecodeOperation("bf16", 64), DecodeSchedule(16, 64, 2, 4)),
        DecodeShape(1, 2, 2, 1, 70),
    ),
    "attention_merge": (
        KernelSpec(
            "sm_90a",
            AttentionMergeOperation("bf16", "bf16", "bf16", 64),
            AttentionMergeSchedule(128, 8),
        ),
        AttentionMergeShape(67),
    ),
    "attention_backward": (
        KernelSpec(
            "sm_90a", AttentionBackwardOperation("bf16", 64), AttentionBackwardSchedule(64, 128)
        ),
        ATTENTION,
    ),
}
# One process prepares itself as each does, and forks for every request.
MODULES = """
import json, os, sys
import torch
from warploom.tuning import worker

torch.set_num_threads(1)  # those of a process that forks are not in the fork

def sampler(calls):
    for call in calls:
        call()
    return lambda: 1.0

said = []
say = lambda message: said.append((message.get("trying"), set(sys.modules)))
made = worker.Worker(say, "cpu", sampler, settle=lambda: None, fetch=lambda spec: None)
worker.rehearse()
for asked in sys.argv[1:]:
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0, asked
        continue
    made.measure(json.loads(asked))
    before = next(modules for trying, modules in said if trying)
    print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
    os._exit(0)
"""


def request(spec: KernelSpec, shape: Shape) -> dict[str, Any]:
    return {
        "operation": asdict(spec.operation),
        "shape": asdict(shape),
        "kernels": [spec.name],
        "precision": 0.1,
        "sets": 2,
    }


def worker(said: list[Mapping[str, Any]], **others: Any) -> Worker:
    others = {"fetch": lambda spec: said.append({"fetched": spec.name}), **others}
    return Worker(said.append, "cpu", lambda calls: lambda: 1.0, settle=lambda: None, **others)


def test_nothing_is_imported_while_a_kernel_is_tried() -> None:
    asked = [json.dumps(request(*one)) for one in TRIED.values()]
    (done,) = forked.run(Program(MODULES, asked))
    assert done.returncode == 0, done.stderr
    imported = map(json.loads, done.stdout.splitlines())
    assert dict(zip(TRIED, imported, strict=True)) == {family: [] for family in TRIED}


@pytest.mark.parametrize("family", TRIED)
def test_what_is_right_is_known_and_kernels_are_at_hand_before_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    said: list[Mapping[str, Any]] = []
    spec, shape = TRIED[family]
    trial = families.family(family).trial(spec.operation, shape, "cpu", 1)
    expected = type(trial).__dict__["_expected"]
    plain = expected.func
    monkeypatch.setattr(expected, "func", lambda one: (said.append({"expected": 1}), plain(one))[1])
    (result,) = worker(said).measure(request(spec, shape)).values()
    assert result.outcome == "correct"
    assert said[:4] == [
        *({"trying": None}, {"expected": 1}, {"fetched": spec.name}, {"trying": spec.name})
    ]
    assert {"expected": 1} not in said[4:]


def test_a_kernel_that_cannot_be_had_says_so_when_it_is_tried() -> None:
    def missing(spec: KernelSpec) -> None:
        raise KernelMissingError(spec.name, rule="is not in the store", fix="compile it")

    said: list[Mapping[str, Any]] = []
    spec, shape = TRIED["gemm"]
    (result,) = worker(said, fetch=missing).measure(request(spec, shape)).values()
    assert result.outcome == "correct"  # CPU calls need no kernel


def test_too_little_memory_for_what_is_right_is_each_kernels_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(trial: GemmTrial) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GemmTrial, "held_share", short)
    said: list[Mapping[str, Any]] = []
    (result,) = worker(said).measure(request(*TRIED["gemm"])).values()
    assert (result.outcome, result.reason) == ("launch error", "CUDA out of memory")


@pytest.mark.parametrize(
    ("sets", "gigabytes", "taken"), [(16, 0.1, 16), (16, 2.0, 10), (8, 2.0, 8), (16, 30.0, 4)]
)
def test_as_many_sets_of_buffers_are_drawn_as_are_no_burden(
    monkeypatch: pytest.MonkeyPatch, sets: int, gigabytes: float, taken: int
) -> None:
    """Of a quarter of 80 GB; four are usual."""
    drawn, held = [], [5 << 30]
    monkeypatch.setattr(workers, "memory", lambda: 80 << 30)
    monkeypatch.setattr(workers, "allocated", lambda: held[0])

    def make(device: str, seed: int) -> list[int]:
        drawn.append(trial.sets_for(1, "cuda"))
        held[0] += int(drawn[-1] * gigabytes * 2**30)
        return drawn

    Worker(lambda message: None)._trial(make, 1, sets)
    assert drawn == [1, taken]
