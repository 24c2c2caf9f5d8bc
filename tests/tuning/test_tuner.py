"""The whole tuner on a simulated GPU: what it picks, what it records, and what stops it."""

# ruff: noqa: ANN401 (options of any kind are passed on)

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sweeps import GPU, Fate, default_of, entries, environment, own_share, swept_seconds

from warploom.errors import CompilationError, DeviceError
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.records import Record, Records
from warploom.generator.specification import KernelSpec
from warploom.tuning import journal as journals
from warploom.tuning.account import Ended, Progress
from warploom.tuning.builds import unusable
from warploom.tuning.fleet.members import Fleet
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Journal, Result
from warploom.tuning.problems import Problem, problems
from warploom.tuning.replay import NoCompiler, Replay
from warploom.tuning.search import band
from warploom.tuning.tuner import Tuner

HERE = {name: environment(name) for name in ("gemm", "attention_backward")}


class Clock:
    """Time that passes when something is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Replay):
    """A replay whose batches take 1 second of a clock's time."""

    def __init__(self, clock: Clock, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.clock, self.batches = clock, 0

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        self.clock.now += 1.0
        self.batches += 1
        return super().measure(batch)


def tune(
    listed: list[Problem],
    folder: Path,
    *,
    fate: Fate = lambda spec: "correct",
    budget: float = 1e6,
    noise: float = 0.0,
    seed: int = 0,
    roughness: float = 0.03,
    gpus: list[Any] | None = None,
    **options: Any,
) -> tuple[list[Ended], list[Record], Timed]:
    """Tune on a sweep of `listed`; return how it ended, what was saved, and the GPU."""
    clock = options.setdefault("clock", Clock())
    sweep = [entry for problem in listed for entry in entries(problem, fate, roughness)]
    gpu = Timed(clock, sweep, noise=noise, seed=seed)
    saved: list[Record] = []
    journal = Journal(folder / "journal.jsonl")
    options = {"compiler": NoCompiler(), "records": Records(GPU), **options}
    compiler, records = options.pop("compiler"), options.pop("records")
    fleet = Fleet(gpu.about, {str(index): one for index, one in enumerate(gpus or [gpu])})
    tuner = Tuner(
        *(listed, fleet, compiler, journal, records, HERE),
        budget=budget,
        save=saved.append,
        **options,
    )
    try:
        ended = tuner.run()
    finally:
        journal.close()
    return ended, saved, gpu


def best_of(problem: Problem, roughness: float = 0.03) -> float:
    return min(swept_seconds(problem, spec, roughness) for spec in problem.space)


# ---- What it picks -------------------------------------------------------------------------------


def test_every_problem_ends_within_two_percent_of_the_sweep_and_never_loses_to_the_default(
    space: Path, tmp_path: Path
) -> None:
    listed = problems(space, model="llama3-8b")
    assert len(listed) == 4 * 9
    ended, saved, gpu = tune(listed, tmp_path)
    assert [one.status for one in ended] == ["tuned"] * 36 and len(saved) == 36
    for one in ended:
        assert one.record and one.record.default
        assert one.record.best.seconds <= 1.02 * best_of(one.problem), one.problem
        assert one.record.best.seconds <= one.record.default.seconds * 1.0001
        assert one.record.default.schedule == default_of(one.problem).schedule
        assert one.record.templates and one.record.measured
    assert gpu.batches / 36 <= 8


def test_a_second_run_chooses_the_same_or_one_tied_with_it(space: Path, tmp_path: Path) -> None:
    listed = problems(space, model="llama3-8b")
    picks: list[dict[Any, Record]] = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _, saved, _ = tune(listed, folder, noise=0.002, seed=seed)
        picks.append({(one.operation, one.shape): one for one in saved})
    same = 0
    for key, first in picks[0].items():
        second = picks[1][key]
        problem = next(p for p in listed if (p.operation, p.shape) == key)
        specs = {spec.schedule: spec for spec in (*problem.space, default_of(problem))}
        times = [swept_seconds(problem, specs[r.best.schedule], 0.03) for r in (first, second)]
        near = Result(first.best.schedule, "correct", 1.0, 0.004, 1.0)
        same += max(times) <= min(times) * (1 + band(near, near))
    assert same / 36 >= 0.95


def test_gradients_are_tuned_by_the_same_search(tmp_path: Path) -> None:
    configs = Path(__file__).parents[2] / "configs"
    listed = problems(configs / "attention_backward" / "space.yaml", rows=[512, 8192])
    assert len(listed) == 13  # twelve squares, and one of grouped queries
    ended, _, _ = tune(listed, tmp_path, roughness=0.1)
    for one in ended:
        assert one.record and one.record.best.seconds <= 1.02 * best_of(one.problem, 0.1)
        assert one.record.environment == environment("attention_backward")


# ---- What it does not record ---------------------------------------------------------------------


def failing(share: float, outcome: Any) -> Fate:
    return lambda spec: outcome if own_share(spec.name) < share else "correct"


def test_wrong_results_are_loud_and_never_recorded(listed: list[Problem], tmp_path: Path) -> None:
    heard: list[str] = []
    ended, saved, _ = tune(listed, tmp_path, fate=failing(0.4, "wrong"), alarm=heard.append)
    assert len(saved) == 3
    wrong = sum(one.outcomes["wrong"] for one in ended)
    assert wrong == len(heard) > 5
    assert all(text.startswith("WRONG RESULT: gemm_") for text in heard)
    for record in saved:
        for timed in record.contenders:
            spec = KernelSpec("sm_90a", record.operation, timed.schedule)
            assert own_share(spec.name) >= 0.4
    told = {entry.result.outcome for entry in journals.read(tmp_path / "journal.jsonl")}
    assert told == {"correct", "wrong"}


@pytest.mark.parametrize("outcome", ["launch error", "timeout", "illegal", "compile error"])
def test_every_other_failure_is_counted_with_its_reason(
    listed: list[Problem], tmp_path: Path, outcome: str
) -> None:
    ended, saved, _ = tune(listed, tmp_path, fate=failing(0.4, outcome))
    assert len(saved) == 3
    assert sum(one.outcomes[outcome] for one in ended) > 5


def test_a_problem_on_which_nothing_works_is_said_to_have_failed(
    listed: list[Problem], tmp_path: Path
) -> None:
    ended, saved, _ = tune(listed, tmp_path, fate=lambda spec: "illegal")
    assert saved == []
    assert [one.status for one in ended] == ["failed"] * 3
    assert "illegal: as the sweep has it" in ended[0].reason


class Broken:
    """A compiler of which some kernels fail, spill or are serialised."""

    def submit(self, spec: KernelSpec) -> Future[Any]:
        found: Future[Any] = Future()
        share = own_share(spec.name)
        clean = Resources(168, 0, 0)
        made = Artifact(spec.name, "sm_90a", b"", "", "", (), {"x": clean}, (), 0.1)
        if share < 0.2:
            found.set_result(CompilationError(spec.name, log="error: no", source=""))
        elif share < 0.3:
            found.set_result(replace(made, resources={"x": Resources(168, 8, 0)}))
        elif share < 0.4:
            found.set_result(replace(made, warnings=("C7510: wgmma is serialized",)))
        else:
            found.set_result(made)
        return found


def test_kernels_that_do_not_compile_clean_are_no_candidates(
    listed: list[Problem], tmp_path: Path
) -> None:
    ended, saved, _ = tune(listed, tmp_path, compiler=Broken())
    assert len(saved) == 3
    for one in ended:
        for spec in one.problem.space:
            for timed in one.record.contenders if one.record else ():
                if timed.schedule == spec.schedule:
                    assert own_share(spec.name) >= 0.4
    reasons = {
        entry.result.reason
        for entry in journals.read(tmp_path / "journal.jsonl")
        if entry.result.outcome == "compile error"
    }
    assert any("8 bytes of spills" in reason for reason in reasons)
    assert any("serialised" in reason for reason in reasons)
    assert any("error: no" in reason for reason in reasons)


def test_an_error_while_building_is_a_compile_error() -> None:
    found: Future[Any] = Future()
    found.set_exception(CompilationError("k", log="error: x", source=""))
    assert "error: x" in unusable(found)


# ---- Time ----------------------------------------------------------------------------------------


def test_a_small_budget_brings_every_problem_to_an_end_and_explores_less(
    listed: list[Problem], tmp_path: Path
) -> None:
    ended, saved, gpu = tune(listed, tmp_path, budget=8.0)
    assert [one.status for one in ended] == ["tuned"] * 3
    assert gpu.batches <= 9
    assert all(record.default for record in saved)


def test_a_budget_that_ends_first_leaves_the_rest_to_a_second_start(
    space: Path, tmp_path: Path
) -> None:
    listed = problems(space, model="llama3-8b")
    first, saved, _ = tune(listed, tmp_path, budget=12.0)
    left = [one for one in first if one.status == "not reached"]
    assert len(left) >= 10
    records = Records(GPU, tuple(saved))
    second, more, gpu = tune(listed, tmp_path, records=records)
    assert [one.status for one in second].count("recorded before") == len(saved)
    assert len(saved) + len(more) == 36
    _, fresh, gpu_fresh = tune(listed, make(tmp_path / "fresh"))
    assert gpu.batches < gpu_fresh.batches  # what was measured is not measured again
    picks = {(r.operation, r.shape): r.best.schedule for r in fresh}
    again = {(r.operation, r.shape): r.best.schedule for r in more}
    assert sum(picks[key] == schedule for key, schedule in again.items()) >= 0.9 * len(again)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_again_measures_what_is_recorded(listed: list[Problem], tmp_path: Path) -> None:
    _, saved, _ = tune(listed, tmp_path)
    records = Records(GPU, tuple(saved))
    ended, more, gpu = tune(listed, tmp_path, records=records)
    assert (len(more), gpu.batches) == (0, 0) and ended[0].status == "recorded before"
    ended, more, gpu = tune(listed, tmp_path, records=records, again=True)
    assert len(more) == 3 and gpu.batches > 5


def test_stale_records_are_hints(listed: list[Problem], tmp_path: Path) -> None:
    _, saved, _ = tune(listed[:1], tmp_path)
    old = replace(saved[0], environment=replace(environment(), nvrtc="12.9"))
    seen: list[Batch] = []

    class Seeing(Timed):
        def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
            seen.append(batch)
            return super().measure(batch)

    clock = Clock()
    sweep = entries(listed[0], roughness=0.03)
    again = make(tmp_path / "again")
    tune(listed[:1], again, records=Records(GPU, (old,)), gpus=[Seeing(clock, sweep)], clock=clock)
    hinted = [spec.schedule for spec in seen[0].specs[:2]]
    assert saved[0].best.schedule in hinted


def test_progress_tells_the_best_so_far_and_the_time_left(
    listed: list[Problem], tmp_path: Path
) -> None:
    told: list[Progress] = []
    tune(listed, tmp_path, budget=100.0, watch=told.append)
    assert told[-1].done == told[-1].total == 3
    assert [one.left for one in told] == sorted((one.left for one in told), reverse=True)
    assert "best so far" in told[0].text and "x default" in told[0].text


# ---- GPUs ----------------------------------------------------------------------------------------


class Lost:
    """A GPU that is lost at its first batch."""

    about = About(GPU, 132)
    closed = False

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        raise DeviceError("the measuring process of GPU 0 ended 6 times")

    def close(self) -> None:
        self.closed = True


def test_a_gpu_that_is_lost_leaves_its_work_to_another(
    listed: list[Problem], tmp_path: Path
) -> None:
    clock, lost = Clock(), Lost()
    sweep = [entry for problem in listed for entry in entries(problem, roughness=0.03)]
    _, saved, _ = tune(listed, tmp_path, gpus=[lost, Timed(clock, sweep)], clock=clock)
    assert len(saved) == 3 and lost.closed


def test_the_last_gpu_that_is_lost_ends_the_run_with_its_reason(
    listed: list[Problem], tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match="ended 6 times"):
        tune(listed, tmp_path, gpus=[Lost()])
    journals.read(tmp_path / "journal.jsonl")


def test_two_gpus_measure_at_once(listed: list[Problem], tmp_path: Path) -> None:
    together = Barrier(2, timeout=600)
    sweep = [entry for problem in listed[:2] for entry in entries(problem, roughness=0.03)]

    class Waiting(Replay):
        met = False

        def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
            if not self.met:
                self.met = True
                together.wait()
            return super().measure(batch)

    _, saved, _ = tune(listed[:2], tmp_path, gpus=[Waiting(sweep), Waiting(sweep)])
    assert len(saved) == 2


def test_an_interrupt_ends_what_measures_and_keeps_what_is_done(
    listed: list[Problem], tmp_path: Path
) -> None:
    clock = Clock()
    sweep = [entry for problem in listed for entry in entries(problem, roughness=0.03)]
    gpu = Timed(clock, sweep)
    closed: list[bool] = []
    gpu.close = lambda: closed.append(True)  # type: ignore[method-assign]

    told: list[Progress] = []

    def interrupted(progress: Progress) -> None:
        """End what the fourth batch has told of: another may be measured by then, or not."""
        told.append(progress)
        if len(told) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(listed, tmp_path, gpus=[gpu], clock=clock, watch=interrupted)
    assert closed and len(journals.read(tmp_path / "journal.jsonl")) > 30


# ---- The replay itself ---------------------------------------------------------------------------


def test_a_replay_repeats_itself_for_a_seed_and_differs_for_another(listed: list[Problem]) -> None:
    problem = listed[0]
    batch = Batch(problem.operation, problem.shape, problem.space[:6], 0.01, 4)

    def times(seed: int) -> Mapping[KernelSpec, Result]:
        return Replay(entries(problem), noise=0.01, seed=seed).measure(batch)

    assert times(1) == times(1) != times(2)
    anchor = problem.space[0]
    assert times(1)[anchor].relative == 1.0


def test_what_a_sweep_lacks_does_not_launch(listed: list[Problem]) -> None:
    problem = listed[0]
    replay = Replay(entries(problem)[:2])
    batch = Batch(problem.operation, problem.shape, problem.space[-1:], 0.01, 4)
    (result,) = replay.measure(batch).values()
    assert result.outcome == "launch error" and "no measurement" in result.reason


def test_the_sweeps_of_these_tests_are_rough() -> None:
    source = random.Random(0)
    shares = [own_share(str(source.random())) for _ in range(1000)]
    assert 0.45 < sum(shares) / 1000 < 0.55
