"""What the measuring process does, on CPU tensors: every operation is tried, wrong ones are found.

Calls compute the reference there, so that operands, items, masks and checks are all run.
"""

# ruff: noqa: ANN401 (calls and their damage are of any kind)

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom.errors import DeviceError, ProblemError
from warploom.generator import names
from warploom.generator.epilogue import STEPS, Activation, Amax, Bias, Quantize, Residual, Scale
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.dequantize.schedule import (
    DequantizeOperation,
    DequantizeSchedule,
    DequantizeShape,
)
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, GemmShape
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime.families import family
from warploom.runtime.families.attention_backward import reference as gradients
from warploom.runtime.families.attention_backward import trial as attention_backward_trial
from warploom.runtime.families.attention_forward import api as attentions
from warploom.runtime.families.gemm import api as products
from warploom.runtime.measure import Call, Sampler
from warploom.tuning import worker as workers
from warploom.tuning.gpu import About, Batch, GpuProcess
from warploom.tuning.loop import BETWEEN, DISCARDED, FEWEST, MOST, loop
from warploom.tuning.worker import GpuLost, Worker

GEMM = GemmOperation("bf16", "bf16", "bf16")
SHAPE = GemmShape(67, 64, 96)


@pytest.fixture(autouse=True)
def loops_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they would end before all is known."""
    monkeypatch.setattr(workers, "loop", partial(loop, clock=lambda: 0.0))


def spec_of(operation: GemmOperation, **fields: Any) -> KernelSpec:
    k = 64 if operation.a in ("fp16", "bf16") else 128
    schedule = {"tile": (64, 64, k), "stages": 4, "consumers": 1, "store": "direct", **fields}
    return KernelSpec("sm_90a", operation, GemmSchedule(**schedule))


def request(operation: Operation, shape: Shape, specs: Sequence[KernelSpec]) -> dict[str, Any]:
    return {
        "operation": asdict(operation),
        "shape": asdict(shape),
        "kernels": [spec.name for spec in specs],
        "precision": 0.01,
        "sets": 2,
    }


def steady(seconds: float = 1.0) -> Callable[[Sequence[Call]], Sampler]:
    """A sampler that runs the calls once and says that each takes so long."""

    def sampler(calls: Sequence[Call]) -> Sampler:
        for call in calls:
            call()
        return lambda: seconds

    return sampler


def worker(
    sampler: Callable[[Sequence[Call]], Sampler] | None = None,
) -> tuple[Worker, list[Mapping[str, Any]]]:
    said: list[Mapping[str, Any]] = []
    made = Worker(
        said.append,
        "cpu",
        sampler or steady(),
        settle=lambda: said.append({"settle": 1}),
        fetch=lambda spec: said.append({"fetched": spec.name}),
    )
    return made, said


OPERATIONS = [
    GEMM,
    GemmOperation("bf16", "bf16", "fp32", "col", "row"),
    GemmOperation("fp16", "fp16", "fp16", "col", "col", (Bias("fp16"), Activation("gelu"))),
    GemmOperation("e4m3", "e5m2", "bf16", epilogue=(Scale("row"), Scale("column"))),
    GemmOperation("e4m3", "e4m3", "e4m3", epilogue=(Scale("device"), Amax(), Scale("host"))),
    GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted"),
    GemmOperation("int8", "int8", "int32"),
    GemmOperation("int8", "int8", "bf16", epilogue=(Scale("row"), Bias("fp32"), Residual("bf16"))),
    GemmOperation("bf16", "bf16", "bf16", batched=True, epilogue=(Residual("fp32"),)),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=names.short)
def test_every_kind_of_product_is_tried_and_right(operation: GemmOperation) -> None:
    made, said = worker()
    spec = spec_of(operation)
    shape = GemmShape(67, 64, 128, batches=3 if operation.batched else 1)
    (result,) = made.measure(request(operation, shape, [spec])).values()
    assert (result.outcome, result.seconds, result.relative) == ("correct", 1.0, 1.0), result.reason
    assert said[0] == {"trying": None}
    assert {"trying": spec.name} in said


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.token)
def test_every_step_of_an_epilogue_gets_operands(step: Any) -> None:
    d = "e4m3" if isinstance(step, Quantize) else step.results[0] if step.results else "fp32"
    operation = GemmOperation("bf16", "bf16", d, epilogue=(step,))
    made, _ = worker()
    spec = spec_of(operation, **({"tile": (64, 128, 64)} if d == "e4m3" else {}))
    (result,) = made.measure(request(operation, SHAPE, [spec])).values()
    assert result.outcome == "correct", result.reason


ATTENTIONS: list[tuple[dict[str, Any], AttentionShape]] = [
    ({}, AttentionShape(2, 4, 2, 70, 70, 64)),
    ({"mask": "causal"}, AttentionShape(2, 4, 2, 300, 300, 64)),
    ({"mask": "causal"}, AttentionShape(1, 4, 4, 5, 300, 64)),
    ({"mask": "window"}, AttentionShape(1, 4, 2, 300, 300, 64, window=40)),
    ({"softcap": True}, AttentionShape(1, 2, 2, 33, 65, 64)),
    (
        {"mask": "causal", "lengths": "packed"},
        AttentionShape(5, 4, 2, 280, 280, 64, total_q=600, total_k=600),
    ),
]


@pytest.mark.parametrize(("fields", "shape"), ATTENTIONS)
def test_every_kind_of_attention_is_tried_and_right(
    fields: dict[str, Any], shape: AttentionShape
) -> None:
    operation = AttentionOperation("bf16", 64, **fields)
    spec = KernelSpec("sm_90a", operation, AttentionSchedule(128, 64))
    made, _ = worker()
    (result,) = made.measure(request(operation, shape, [spec])).values()
    assert result.outcome == "correct", result.reason


GRADIENTS = AttentionBackwardOperation("bf16", 64)
BACKWARD = AttentionBackwardSchedule(64, 128)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        *ATTENTIONS,
        ({"mask": "causal"}, AttentionShape(1, 2, 2, 300, 40, 64)),  # rows without a column
        ({"deterministic": True}, AttentionShape(1, 2, 1, 300, 290, 64)),
    ],
)
def test_every_kind_of_gradient_is_tried_and_right(
    fields: dict[str, Any], shape: AttentionShape
) -> None:
    operation = replace(GRADIENTS, **fields)
    spec = KernelSpec("sm_90a", operation, BACKWARD)
    made, _ = worker()
    (result,) = made.measure(request(operation, shape, [spec])).values()
    assert result.outcome == "correct", result.reason
    trial: Any = family(operation.family).trial(operation, shape, "cpu", 1)
    assert 0.05 < trial.error_share(spec) < 0.9


# ---- What is wrong -------------------------------------------------------------------------------


def breaking(function: Callable[..., Any], damage: Callable[[torch.Tensor], object]) -> Any:
    def broken(*arguments: Any, **keywords: Any) -> Any:
        found = function(*arguments, **keywords)
        damage(keywords["out"])
        return found

    return broken


DAMAGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one element": lambda out: out.view(-1)[7].add_(1.0),
    "nan": lambda out: out.view(-1)[-1].fill_(torch.nan),
    "two rows swapped": lambda out: out.copy_(out[[1, 0, *range(2, out.shape[0])]]),
    "nothing": lambda out: out.fill_(torch.nan),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_product_is_found_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(products, "gemm", breaking(products.gemm, DAMAGES[damage]))
    made, _ = worker()
    (result,) = made.measure(request(GEMM, SHAPE, [spec_of(GEMM)])).values()
    assert (result.outcome, result.seconds) == ("wrong", None)
    assert "times its bound" in result.reason


@pytest.mark.parametrize("row", [0, -1])
def test_a_wrong_attention_is_found_at_both_ends(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    operation = AttentionOperation("bf16", 64, "causal")
    spec = KernelSpec("sm_90a", operation, AttentionSchedule(128, 64))
    damage = breaking(attentions.attention, lambda out: out[-1, 1, row, 3].add_(0.5))
    monkeypatch.setattr(attentions, "attention", damage)
    made, _ = worker()
    shape = AttentionShape(2, 4, 2, 400, 400, 64)
    (result,) = made.measure(request(operation, shape, [spec])).values()
    assert result.outcome == "wrong"


Damage = Callable[[Any, Mapping[str, torch.Tensor]], object]  # of a call, and its dq, dk and dv


def _lost_columns(call: Any, found: Mapping[str, torch.Tensor]) -> None:
    """Take what 64 columns in the middle add to dq away again."""
    forward, tile = call.forward, slice(1920, 1984)
    whole = (forward.q, forward.k[:, :, tile], forward.v[:, :, tile])
    function = gradients.Function(forward.scaling)
    lost, _ = gradients.following(
        gradients.Tensors(*whole, call.out, call.lse, call.dout), function
    )
    found["dq"].sub_(lost[0])


def _lost_rows(call: Any, found: Mapping[str, torch.Tensor]) -> None:
    """Take what 48 rows in the middle add to dk and dv away again."""
    forward, tile = call.forward, slice(1920, 1968)
    rows = [t[:, :, tile] for t in (forward.q, call.out, call.lse, call.dout)]
    given = gradients.Tensors(rows[0], forward.k, forward.v, *rows[1:])
    lost, _ = gradients.following(given, gradients.Function(forward.scaling))
    found["dk"].sub_(lost[1])
    found["dv"].sub_(lost[2])


BROKEN: dict[str, Damage] = {
    "dq, first row": lambda call, found: found["dq"][-1, 1, 0, 3].add_(0.5),
    "dq, last row": lambda call, found: found["dq"][-1, 1, -1, 3].add_(0.5),
    "dk, first column": lambda call, found: found["dk"][-1, 0, 0, 3].add_(0.5),
    "dk, last column": lambda call, found: found["dk"][-1, 0, -1, 3].add_(0.5),
    "dv, last column": lambda call, found: found["dv"][-1, 0, -1, 3].add_(0.5),
    "dv, nan": lambda call, found: found["dv"][0, 0, 600, 3].fill_(torch.nan),
    "dq lacks a tile of columns": _lost_columns,
    "dk and dv lack a tile of rows": _lost_rows,
}


@pytest.mark.parametrize("damage", BROKEN)
def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    plain = attention_backward_trial.attention_backward

    def broken(call: Any) -> Any:
        found = plain(call)
        BROKEN[damage](call, dict(zip(("dq", "dk", "dv"), found, strict=True)))
        return found

    monkeypatch.setattr(attention_backward_trial, "attention_backward", broken)
    made, _ = worker()
    spec = KernelSpec("sm_90a", GRADIENTS, BACKWARD)
    # A tile hides best in what is long.
    shape = AttentionShape(1, *((1, 1, 4096, 4096) if "lack" in damage else (2, 1, 640, 640)), 64)
    (result,) = made.measure(request(GRADIENTS, shape, [spec])).values()
    assert result.outcome == "wrong"


def test_data_is_fresh_in_every_batch() -> None:
    drawn = []
    for seed in (1, 2):
        trial: Any = family("gemm").trial(GEMM, SHAPE, "cpu", seed)
        drawn.append(trial.sets[0].a.clone())
    assert not torch.equal(*drawn)
    again: Any = family("gemm").trial(GEMM, SHAPE, "cpu", 1)
    assert torch.equal(again.sets[0].a, drawn[0])


# ---- What does not run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DeviceError("CUDA_ERROR_INVALID_VALUE"), "launch error"),
        (ProblemError("a"), "launch error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "launch error"),
        (RuntimeError("something"), "launch error"),
    ],
)
def test_a_kernel_that_does_not_launch_leaves_the_others_to_be_measured(
    monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    first, second = spec_of(GEMM), spec_of(GEMM, stages=5)
    plain = products.gemm

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if keywords["spec"] == first:
            raise error
        return plain(*arguments, **keywords)

    monkeypatch.setattr(products, "gemm", failing)
    made, _ = worker()
    found = made.measure(request(GEMM, SHAPE, [first, second]))
    assert found[first.name].outcome == outcome and found[first.name].reason
    assert (found[second.name].outcome, found[second.name].relative) == ("correct", 1.0)


def test_a_shape_that_an_operation_cannot_have_leaves_other_shapes_to_be_measured() -> None:
    """The process ended instead, and after two such shapes the run as well."""
    operation = DequantizeOperation("bf16", "int4", 128, "bf16")
    spec = KernelSpec("sm_90a", operation, DequantizeSchedule(4, 8))
    shape = DequantizeShape(experts=2, n=64, k=192)
    made, _ = worker()
    results = made.measure(request(operation, shape, [spec]))
    assert results[spec.name].outcome == "launch error"
    assert "must divide k, which is 192" in (results[spec.name].reason or "")


def test_a_lost_context_ends_the_process() -> None:
    def lost(calls: Sequence[Call]) -> Sampler:
        def sample() -> float:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        return sample

    made, said = worker(lost)
    with pytest.raises(GpuLost, match="illegal memory access"):
        made.measure(request(GEMM, SHAPE, [spec_of(GEMM)]))
    assert said[-1] == {"trying": spec_of(GEMM).name}  # whom the parent blames


# ---- Times ---------------------------------------------------------------------------------------


def test_times_are_relative_to_the_first_and_clocks_are_no_part_of_them() -> None:
    first, second = spec_of(GEMM), spec_of(GEMM, stages=5)
    factors = itertools.cycle((1.0, 0.9))

    def sampler(calls: Sequence[Call]) -> Sampler:
        factor, rounds = next(factors), itertools.count()
        return lambda: factor * (1 + 0.002 * next(rounds))  # clocks fall for both

    made, _ = worker(sampler)
    found = made.measure(request(GEMM, SHAPE, [first, second]))
    assert found[first.name].relative == 1.0
    assert found[second.name].relative == pytest.approx(0.9)
    assert found[second.name].spread == pytest.approx(0.0, abs=1e-9)
    assert found[second.name].error == pytest.approx(BETWEEN)
    assert found[second.name].seconds == pytest.approx(0.9 * (1 + 0.001 * (FEWEST + 1)))


def test_unsteady_clocks_are_measured_again_and_then_marked() -> None:
    first, throttled = spec_of(GEMM), [1.0, *[1.0, 1.2, 1.5] * MOST][: DISCARDED + MOST]

    def throttling(laps: int) -> Callable[[Sequence[Call]], Sampler]:
        times = itertools.chain(throttled * laps, itertools.repeat(1.0))
        return lambda calls: lambda: next(times)

    made, said = worker(throttling(1))
    (result,) = made.measure(request(GEMM, SHAPE, [first])).values()
    assert (result.noisy, result.seconds) == (False, 1.0)
    assert {"settle": 1} in said
    made, _ = worker(throttling(2))
    (result,) = made.measure(request(GEMM, SHAPE, [first])).values()
    assert result.noisy and result.outcome == "correct"


# ---- The process ---------------------------------------------------------------------------------

ON_THE_CPU = """
import time
from warploom.tuning import worker

def sampler(calls):
    def sample():
        begin = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - begin
    return sample

worker.about = lambda: {"gpu": "NVIDIA H200", "multiprocessors": 132}
worker.warm = lambda ready: None
worker.serve(
    lambda say: worker.Worker(
        say, "cpu", sampler, settle=lambda: None, fetch=lambda spec: None
    )
)
"""


def test_the_process_serves_batches_in_the_protocol_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(ON_THE_CPU)
    patient = {"starting": 600.0, "preparing": 600.0, "trying": 600.0}
    gpu = GpuProcess("", [sys.executable, "-P", str(script)], **patient)
    assert gpu.about == About("NVIDIA H200", 132)
    specs = tuple(spec_of(GEMM, stages=stages) for stages in (3, 4))
    for _ in range(2):
        found = gpu.measure(Batch(GEMM, SHAPE, specs, 0.1, 2))
        assert [found[spec].outcome for spec in specs] == ["correct", "correct"]
        assert found[specs[0]].relative == 1.0 and (found[specs[1]].seconds or 0) > 0
    child = gpu._process
    assert child and child.poll() is None
    gpu.close()
    assert child.poll() is not None
