"""What `warploom.recording` writes of a program's calls: all of them, each once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import warploom
from warploom import hooks
from warploom.cli import main
from warploom.errors import ConfigurationError, ProblemError
from warploom.runtime import plan, records
from warploom.runtime.families.gemm.api import GemmPlan
from warploom.runtime.plan import Plan
from warploom.tuning import calls, recording
from warploom.tuning.autotune.engine import ENGINE

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    records.forget()
    plan.forget()
    yield tmp_path
    plan.forget()
    records.forget()


def product(m: int, n: int = 64, k: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(m, k, dtype=BF16), torch.ones(n, k, dtype=BF16).t()


def shapes(path: Path) -> list[dict[str, Any]]:
    return [one["shape"] for one in json.loads(path.read_text())["calls"]]


def rows(path: Path) -> list[int]:
    return [shape["m"] for shape in shapes(path)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compile", *map(str, arguments)])


def test_distinct_calls_are_written_once_in_their_order(folder: Path) -> None:
    path = folder / "calls.json"
    with warploom.recording(path) as found:
        for m in (8, 4, 8):
            warploom.gemm(*product(m))
        warploom.gemm(*product(4), activation="gelu")
    assert rows(path) == [8, 4, 4] and len(found.calls) == 3
    assert calls.read(path) == found.calls
    warploom.gemm(*product(16))
    assert len(found.calls) == 3


def test_both_passes_of_an_attention_are_recorded(folder: Path) -> None:
    q = torch.ones(1, 4, 16, 64, dtype=BF16, requires_grad=True)
    with warploom.recording(folder / "calls.json") as found:
        warploom.attention(q, q, q, causal=True).sum().backward()
    assert [one.operation.family for one in found.calls] == [
        "attention_forward",
        "attention_backward",
    ]


def test_calls_that_are_warm_are_recorded_wherever_their_plan_is_kept(folder: Path) -> None:
    """A plan that was made before told nobody of its calls: a warm model left an empty file."""
    weight = torch.ones(64, 32, dtype=BF16, requires_grad=True)
    compiled = torch.compile(lambda x: warploom.gemm(x, weight.t()), backend="eager")
    a, b = product(8)
    out = torch.empty(24, 64, dtype=BF16)
    own = warploom.plan(*product(24), out=out)

    def model() -> None:
        warploom.gemm(torch.ones(2, 3, 32, dtype=BF16), weight.t()).sum().backward()
        compiled(torch.ones(12, 32, dtype=BF16))
        warploom.gemm(a, b)
        own(*product(24), out)

    for _ in range(3):
        model()
    with warploom.recording(folder / "cold.json") as cold:
        plan.forget()
        model()
    with warploom.recording(folder / "warm.json") as warm:
        model()
    assert set(warm.calls) == set(cold.calls)
    assert {one.shape.m for one in warm.calls} >= {6, 12, 8, 24, 64}  # type: ignore[attr-defined]


def test_a_launch_that_is_only_fired_again_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan(a, b, out)` on addresses that it had before passes neither `run` nor a launch plan."""
    own = warploom.plan(*product(8), out=torch.empty(8, 64, dtype=BF16))
    monkeypatch.setattr(GemmPlan, "__call__", fired := lambda self, a, b, out=None: out)
    with warploom.recording(folder / "calls.json") as found:
        own(*product(8), torch.empty(8, 64, dtype=BF16))
    assert len(found.calls) == 1
    assert vars(GemmPlan)["__call__"] is fired


def test_a_call_costs_nothing_more_where_nobody_records(folder: Path) -> None:
    names = ("run", "run_at")
    before = [vars(Plan)[name] for name in names] + [vars(GemmPlan)["__call__"], hooks.observer]
    with warploom.recording(folder / "calls.json"):
        assert vars(Plan)["run"] is not before[0]
    assert [vars(Plan)[name] for name in names] + [
        vars(GemmPlan)["__call__"],
        hooks.observer,
    ] == before


def test_contexts_nest_and_each_writes_what_was_called_while_it_was_open(folder: Path) -> None:
    outer, inner = folder / "outer.json", folder / "inner.json"
    with warploom.recording(outer):
        warploom.gemm(*product(1))
        with warploom.recording(inner):
            warploom.gemm(*product(2))
        warploom.gemm(*product(3))
    assert rows(outer) == [1, 2, 3] and rows(inner) == [2]


def test_a_decorator_records_each_time_and_keeps_what_it_saw(folder: Path) -> None:
    path = folder / "calls.json"

    @warploom.recording(path)
    def model(m: int) -> None:
        warploom.gemm(*product(m))
        if m > 1:
            model(m // 2)

    model(4)
    assert rows(path) == [4, 2, 1]
    model(8)
    assert rows(path) == [4, 2, 1, 8]


def test_all_threads_are_recorded(folder: Path) -> None:
    def work(start: int) -> None:
        for m in range(start, start + 8):
            warploom.gemm(*product(m))

    with warploom.recording(folder / "calls.json") as found:
        threads = [threading.Thread(target=work, args=(1 + 8 * one,)) for one in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(rows(folder / "calls.json")) == list(range(1, 33)) and len(found.calls) == 32


def test_a_function_that_threads_call_at_once_is_recorded(folder: Path) -> None:
    """Both began what one of them had, and one ended with a RuntimeError."""
    together, recorded = threading.Barrier(2), warploom.recording(folder / "calls.json")

    class Meeting(list[Any]):
        """A list that the two threads leave together once both are in it."""

        def append(self, one: Any) -> None:  # noqa: ANN401
            super().append(one)
            together.wait(600)

    recorded._open = Meeting()
    with ThreadPoolExecutor(2) as threads:
        work = recorded(lambda m: warploom.gemm(*product(m)))
        assert len([*threads.map(work, (1, 2))]) == 2
    assert sorted(rows(folder / "calls.json")) == [1, 2]


def test_a_call_is_known_once_it_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call of the same plan, which had ended, was not in the file."""
    a, b = product(3)
    plan = warploom.plan(a, b)
    of = recording.RecordedCall.of

    def meanwhile(choice: Any) -> Any:  # noqa: ANN401
        monkeypatch.setattr(recording.RecordedCall, "of", of)
        found._hear(plan)  # as the other thread does
        assert len(found.calls) == 1
        return of(choice)

    with warploom.recording(folder / "calls.json") as found:
        monkeypatch.setattr(recording.RecordedCall, "of", meanwhile)
        plan(a, b)
    assert rows(folder / "calls.json") == [3]


def test_an_exception_inside_writes_what_was_seen_and_goes_on(folder: Path) -> None:
    path = folder / "calls.json"
    with pytest.raises(KeyboardInterrupt), warploom.recording(path):
        warploom.gemm(*product(5))
        raise KeyboardInterrupt
    assert rows(path) == [5]
    warploom.gemm(*product(6))


def test_a_file_that_cannot_be_written_hides_no_exception_and_keeps_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "calls.json"
    path.write_text("before")

    def full(path: Path, found: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "write", full)
    with pytest.raises(ZeroDivisionError), warploom.recording(path):
        _ = 1 / 0
    assert "No space left" in caplog.text
    with pytest.raises(ConfigurationError, match="No space left"), warploom.recording(path):
        pass
    assert path.read_text() == "before"


def test_a_child_that_is_forked_leaves_the_file_to_its_parent(folder: Path) -> None:
    path = folder / "calls.json"
    with warploom.recording(path) as found:
        warploom.gemm(*product(5))
        child = os.fork()
        if not child:
            found.__exit__(None, None, None)
            os._exit(1 if path.exists() else 0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and rows(path) == [5]


def test_a_call_without_anything_to_launch_is_none(folder: Path) -> None:
    with warploom.recording(folder / "calls.json") as found:
        warploom.gemm(*product(0))
    assert found.calls == [] and shapes(folder / "calls.json") == []
    assert "no calls: must have a call" in run(folder / "calls.json", "--gpu", "h200").stderr


def test_what_torch_computes_is_no_call_and_a_file_without_calls_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of layers that was recorded on the CPU left an empty file, and nothing said why."""
    layer = warploom.nn.Linear(32, 64, dtype=BF16)
    with warploom.recording(folder / "calls.json") as found:
        layer(torch.ones(8, 32, dtype=BF16))
    why = "torch computed them, as it does for layers and sdpa on the CPU"
    assert found.calls == [] and f"calls.json has no calls: none was made, or {why}" in caplog.text
    told = run(folder / "calls.json", "--gpu", "h200").stderr
    assert why in told and "run the model on a GPU" in told


@pytest.mark.parametrize("path", [None, 3, "", b"", "a\0.json"])
def test_what_is_no_path_is_refused_by_name(path: object) -> None:
    with pytest.raises(ProblemError, match="must be the path of a file"):
        warploom.recording(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["calls", "calls.yaml", "calls.txt", ".json"])
def test_a_name_that_no_command_takes_for_calls_is_refused(name: str) -> None:
    """`warploom compile calls.txt` read it as a configuration, after the model had run."""
    with pytest.raises(ProblemError, match=r"must end with \.json, by which `warploom compile`"):
        warploom.recording(name)


def test_a_place_that_no_file_can_have_is_refused_before_anything_runs(folder: Path) -> None:
    """A pipe, and a name that is too long, were refused when all had run."""
    ran = False
    (folder / "folder.json").mkdir()
    (folder / "file").touch()
    os.mkfifo(folder / "pipe.json")
    names = ["folder.json", "no/calls.json", "file/calls.json", "pipe.json", "a" * 300 + ".json"]
    for path in (folder / name for name in names):
        rule = "must be a file in a directory that exists"
        with pytest.raises(ConfigurationError, match=rule), warploom.recording(path):
            ran = True
    assert not ran


def test_a_file_lies_where_it_was_asked_for_wherever_the_program_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "elsewhere").mkdir()
    with warploom.recording("calls.json"):
        monkeypatch.chdir(folder / "elsewhere")
        warploom.gemm(*product(8))
    assert rows(folder / "calls.json") == [8]


def test_what_autotuning_measures_is_no_call_of_the_program(folder: Path) -> None:
    """Candidates that are timed between calls were compiled for a server that never runs them."""
    with warploom.recording(folder / "calls.json") as found:
        with ENGINE._activity.measuring():
            warploom.gemm(*product(8))
        assert found.calls == []
        warploom.gemm(*product(8))
    assert rows(folder / "calls.json") == [8]
