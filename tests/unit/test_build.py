"""A kernel is compiled at most once, where that is allowed, and one failure stays one failure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from click.testing import CliRunner, Result

from warploom.cli import compile as compile_command
from warploom.errors import (
    CompilationError,
    ConfigurationError,
    KernelMissingError,
    ToolchainError,
)
from warploom.generator import build, workers
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store, key
from warploom.generator.toolchain import find

# A worker that dies as NVRTC would, by a signal, when it meets the word.
FRAGILE = """
import os, signal, time
from warploom.errors import ToolchainError
from warploom.generator import nvrtc, workers
compile, reply = nvrtc.compile, workers._reply
def fragile(source, **others):
    if "crash" in source:
        os.abort()
    if "killed" in source:
        os.kill(os.getpid(), signal.SIGKILL)
    if "strange" in source:
        os.kill(os.getpid(), signal.SIGRTMIN + 6)
    if "hang" in source:
        time.sleep(3600)
    if "mute" in source:
        os.closerange(1, 100)
        time.sleep(3600)
    if "broken" in source:
        raise ToolchainError("NVRTC", rule="must be there", fix="install it")
    return compile(source, **others)
nvrtc.compile = fragile
workers._reply = lambda request: [] if "garbage" in request else reply(request)
workers._serve()
"""

# No `if __name__ == "__main__"`: a pool of multiprocessing would run this file in every child.
SCRIPT = """
print("main runs")
import sys
from dataclasses import dataclass
from pathlib import Path
from warploom.generator import build
from warploom.generator.store import Store

@dataclass(frozen=True)
class Spec:
    name: str
    arch: str = "sm_90a"

build.render = lambda spec: f'extern "C" __global__ void {spec.name}() {{}}'
built = build.build_many([Spec("one"), Spec("two")], Store(Path(sys.argv[1])), jobs=2)
print([artifact.name for artifact in built])
"""


@dataclass(frozen=True)
class Spec:
    """What `build` sees of a KernelSpec, with its source given."""

    name: str
    body: str = "{}"
    arch: str = "sm_90a"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(spec: Spec) -> str:
        return f'extern "C" __global__ void {spec.name}() {spec.body}\n'

    monkeypatch.setattr(build, "render", render)
    monkeypatch.setattr(build, "counters", build.Counters())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def build_one(spec: Spec, store: Store, policy: str | None = None) -> Artifact:
    return build.build(spec, store, policy=policy)  # type: ignore[arg-type]


def build_all(specs: list[Spec], store: Store, **options: Any) -> list[build.Result]:
    return build.build_many(specs, store, **options)  # type: ignore[arg-type]


def counts() -> tuple[int, int]:
    return build.counters.compiles, build.counters.store_hits


def no_compiler() -> None:
    raise ToolchainError("NVRTC: not found", rule="it is needed", fix="install it")


def test_a_kernel_is_compiled_once_and_then_found(store: Store, tmp_path: Path) -> None:
    first = build_one(Spec("once"), store)
    again = build_one(Spec("once"), Store(tmp_path / "store"))
    assert first == again
    assert counts() == (1, 1)


def test_another_process_that_was_first_spares_the_compilation(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = store.lock

    @contextmanager
    def contended(key: str) -> Iterator[None]:
        build_one(Spec("contended"), Store(tmp_path / "store"))
        with lock(key):
            yield

    monkeypatch.setattr(store, "lock", contended)
    build_one(Spec("contended"), store)
    assert counts() == (1, 1)


def test_forbidden_compiling_is_a_typed_error_and_compiles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    with pytest.raises(KernelMissingError, match=r"kernel missing.*WARPLOOM_COMPILE=forbid"):
        build_one(Spec("missing"), store)
    with pytest.raises(KernelMissingError, match="kernel missing"):
        build_all([Spec("missing")], store)
    assert counts() == (0, 0)


def test_a_stored_kernel_of_another_toolchain_serves_where_compiling_is_ruled_out(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(build_one(Spec("kept"), store), toolchain="0" * 64)
    elsewhere = Store(tmp_path / "elsewhere")
    elsewhere.put(
        key('extern "C" __global__ void kept() {}\n', old.options, "sm_90a", "0" * 64), old
    )
    assert build_one(Spec("kept"), elsewhere, policy="forbid") == old
    monkeypatch.setattr(build, "find", no_compiler)
    assert build_all([Spec("kept")], elsewhere) == [old]
    assert counts() == (1, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"name": "another"},
        {"resources": {"another": Resources(1, 0, 0)}},
        {"resources": {"kept": Resources(1, 0, 0), "another": Resources(1, 0, 0)}},
    ],
)
def test_a_stored_kernel_whose_record_speaks_of_another_counts_as_missing(
    other: dict[str, Any], store: Store
) -> None:
    good = build_one(Spec("kept"), store)
    source = 'extern "C" __global__ void kept() {}\n'
    store.put(key(source, good.options, good.arch, good.toolchain), replace(good, **other))
    with pytest.raises(KernelMissingError, match="kept"):
        build_one(Spec("kept"), store, policy="forbid")
    again = build_one(Spec("kept"), store)
    assert (again.name, again.resources) == (good.name, good.resources)
    assert build_one(Spec("kept"), store, policy="forbid") == again
    assert counts() == (2, 1)


def test_with_compiling_allowed_a_kernel_of_another_toolchain_does_not_serve(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_one(Spec("stale"), store)
    monkeypatch.setattr(build, "find", lambda: replace(find(), identity="1" * 64))
    assert build_one(Spec("stale"), store).toolchain == "1" * 64
    assert counts() == (2, 0)


def test_without_a_toolchain_the_error_says_how_to_get_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find", no_compiler)
    with pytest.raises(KernelMissingError, match=r"NVRTC: not found.*install it"):
        build_one(Spec("missing"), store)


def test_an_unknown_policy_is_refused(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="WARPLOOM_COMPILE=maybe"):
        build_one(Spec("any"), store, policy="maybe")


def test_many_keep_their_order_and_one_failure_stays_one(store: Store) -> None:
    specs = [Spec("good"), Spec("bad", body="{ return 1; }"), Spec("fine"), Spec("stored")]
    build_one(specs[3], store)
    done: list[str] = []
    results = build_all(specs, store, jobs=2, on_done=lambda spec, result: done.append(spec.name))
    assert [result.name for result in results] == ["good", "bad", "fine", "stored"]
    assert [type(result) for result in results] == [Artifact, CompilationError, Artifact, Artifact]
    assert "return value type does not match" in str(results[1])
    assert done[0] == "stored"
    assert sorted(done) == ["bad", "fine", "good", "stored"]
    assert counts() == (3, 1)
    assert build_one(specs[0], store) == results[0]


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-P", "-c", FRAGILE])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("crash", "ended with SIGABRT"),
        ("killed", "ended with SIGKILL"),
        ("strange", f"ended with signal {signal.SIGRTMIN + 6}"),
        ("garbage", "gave no reply but '[]"),
    ],
)
@pytest.mark.usefixtures("fragile")
def test_a_crash_of_the_compiler_fails_its_kernel_only(word: str, said: str, store: Store) -> None:
    specs = [Spec("before"), Spec("fatal", body=f"{{ /* {word} */ }}"), Spec("after")]
    results = build_all(specs, store, jobs=1)
    assert [type(result) for result in results] == [Artifact, CompilationError, Artifact]
    assert f"the compiling process {said}" in str(results[1])
    assert isinstance(results[1], CompilationError)
    assert results[1].lost == (word == "killed")  # as where memory runs out


@pytest.mark.usefixtures("fragile")
def test_a_compiler_that_hangs_is_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_SECONDS", 1.0)
    (result,) = build_all([Spec("hanging", body="{ /* hang */ }")], store)
    assert "the compiling process was stopped after 1 s" in str(result)


class LastMoment:
    """A timer that ends just as it is cancelled."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self.start, self.cancel, self.join = (lambda: None), act, (lambda: None)


def test_a_compiler_that_is_stopped_in_the_last_moment_compiles_nothing_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next kernel was said to have killed it."""
    compiler = workers.Worker(more=True)
    source = 'extern "C" __global__ void one() {}'
    try:
        with monkeypatch.context() as patch:
            patch.setattr(workers, "Timer", LastMoment)
            with pytest.raises(CompilationError, match="was stopped after 600 s"):
                compiler.compile(source, name="one", arch="sm_90a")
        assert compiler.compile(source, name="one", arch="sm_90a").name == "one"
    finally:
        compiler.stop()


@pytest.mark.usefixtures("fragile")
def test_a_compiler_that_closes_its_output_and_does_not_end_is_killed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ENDING", 0.1)
    (result,) = build_all([Spec("mute", body="{ /* mute */ }")], store)
    assert "the compiling process ended with SIGKILL" in str(result)


def test_a_compiler_ends_though_a_forked_child_has_its_pipe() -> None:
    """Who stopped it waited for as long as a worker of a data loader lived."""
    compiler = workers.Worker(more=True)
    compiler.compile('extern "C" __global__ void one() {}', name="one", arch="sm_90a")
    with forked.sleeping():
        stopped = threading.Thread(target=compiler.stop)
        stopped.start()
        stopped.join(600)
        assert not stopped.is_alive()


@pytest.mark.usefixtures("fragile")
def test_a_toolchain_that_breaks_in_a_worker_is_told_as_such(store: Store) -> None:
    with pytest.raises(ToolchainError, match="NVRTC: must be there: install it"):
        build_all([Spec("any", body="{ /* broken */ }")], store)


def test_kernels_are_built_from_a_working_directory_that_was_deleted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    gone.rmdir()
    (result,) = build_all([Spec("anywhere")], store)
    assert isinstance(result, Artifact)


def test_building_does_not_run_the_callers_main_module_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["main runs", "['one', 'two']"]


def run_compile(monkeypatch: pytest.MonkeyPatch, *specs: KernelSpec) -> Result:
    expansion = SimpleNamespace(specs=list(specs))
    space = SimpleNamespace(expand_file=lambda path: expansion)
    monkeypatch.setitem(sys.modules, "warploom.generator.space", space)
    return CliRunner().invoke(compile_command.command, ["some.yaml", "-j", "1", "--json"])


def test_the_compile_command_lists_what_it_built_and_exits_2_on_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    bodies = {"fp32": "{}", "bf16": "{ return 1; }"}

    def render(spec: Any) -> str:  # noqa: ANN401
        return f'extern "C" __global__ void {spec.name}() {bodies[spec.operation.d]}\n'

    monkeypatch.setattr(build, "render", render)
    schedule = GemmSchedule(tile=(128, 256, 64), stages=3)
    good, bad = (
        KernelSpec("sm_90a", GemmOperation("bf16", "bf16", d), schedule)  # type: ignore[arg-type]
        for d in bodies
    )
    result = run_compile(monkeypatch, good, bad)
    report = json.loads(result.stdout)
    (row,) = report["kernels"]
    assert result.exit_code == 2
    assert (row["name"], row["tile"], row["threads"]) == (good.name, "128x256x64", 384)
    assert (row["shared bytes"] > 3 * 48 * 1024, row["clean"]) == (True, True)
    assert (report["compiled"], report["stored before"], report["failed"]) == (1, 0, 1)
    assert "return value type does not match" in report[f"log of {bad.name}"]
    assert json.loads(result.stderr)["value"].startswith(bad.name)
    again = run_compile(monkeypatch, good)
    assert (again.exit_code, json.loads(again.stdout)["stored before"]) == (0, 1)
