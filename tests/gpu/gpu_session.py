"""A session of gpu tests: GPUs shared among its processes, one store, and the records of it.

It is one where tests are chosen by `-m gpu`; `--record FOLDER`, which `make gpu-test` gives, notes
in FOLDER which files of tests this GPU passed. The tests may run in several processes at a time
(pytest-xdist): what takes longest is the host.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import gpu_records
import pytest
import share_gpus

if TYPE_CHECKING:
    from warploom.generator.artifact import Artifact
    from warploom.generator.specification import KernelSpec

Build = Callable[["Sequence[KernelSpec]"], "dict[str, Artifact]"]
GIGABYTES = 20  # that a test with the fixture `memory` takes at most
KEPT = 1 << 30  # bytes of a GPU that a process may keep for its next test, beside other processes
_collected: Counter[str] = Counter()  # tests of this run, by file
_EMISSION = pytest.StashKey[Thread]()
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1, ..: which of several processes this is


def is_gpu_session(config: pytest.Config) -> bool:
    """Whether gpu tests are asked for, and no others."""
    return bool(config.option.markexpr == "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, help="note in this folder which files of gpu tests passed"
    )
    parser.addoption(
        "--store", type=Path, help="build the kernels of gpu tests here, where other runs find them"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin with a GPU of this process's own, before anything asks for one.

    torch collects garbage before each capture: a graph destroyed in one would invalidate it.
    """
    if is_gpu_session(config):
        os.environ["TORCH_CUDAGRAPH_GC"] = "1"
    if WORKER is not None and is_gpu_session(config):
        share_gpus.begin_with(int(WORKER.removeprefix("gw")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave folders of gpu tests where none of them is to run: to collect them takes 12 s."""
    without = config.option.markexpr == "not gpu"
    return True if without and collection_path.name == "gpu" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and isinstance(item, pytest.Function):
        item.fixturenames.insert(0, "dispatch_by_tables")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give memory back that others need: what limits how many processes share a GPU."""
    if WORKER is None or not item.get_closest_marker("gpu"):
        return
    import torch

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


# ---- Records -------------------------------------------------------------------------------------


def pytest_sessionstart(session: pytest.Session) -> None:
    """Emit kernels beside the tests, since records have digests of them.

    That takes most of a minute on a busy machine, in which a run that comes to the end of its time
    would be killed, and all that passed be lost.
    """
    config = session.config
    if config.getoption("--record", None) is None or hasattr(config, "workerinput"):
        return
    if is_gpu_session(config):
        config.stash[_EMISSION] = Thread(target=gpu_records.emitted, daemon=True)
        config.stash[_EMISSION].start()


def pytest_collection_finish(session: pytest.Session) -> None:
    _collect(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: Sequence[str]) -> None:
    """Every process collects the same: the tests that all of them run together."""
    _collect(ids)


def _collect(ids: Iterable[str]) -> None:
    _collected.clear()
    _collected.update(map(_file, ids))


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _is_whole(config: pytest.Config) -> bool:
    """Whether every gpu test of the files that ran was to run."""
    option = config.option
    chosen = option.keyword or option.deselect or getattr(option, "lf", False)
    return is_gpu_session(config) and not chosen and not any("::" in one for one in config.args)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Record the files of which every test has passed, or few were skipped: also when interrupted.

    Where nothing passed and nothing failed, there was no GPU.
    """
    if hasattr(config, "workerinput"):  # one of several processes, which knows only its own tests
        return
    folder = config.getoption("--record", None)
    if folder is None or not _is_whole(config):
        return
    if _EMISSION in config.stash:
        config.stash[_EMISSION].join()
    stats = terminalreporter.stats

    def by_file(kind: str) -> Counter[str]:
        return Counter(_file(report.nodeid) for report in stats.get(kind, ()))

    passed, skipped, failed = by_file("passed"), by_file("skipped"), by_file("failed")
    failed += by_file("error")
    took: Counter[str] = Counter()
    for report in (report for reports in stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):  # of a test's call, or what comes before or after
            took[_file(report.nodeid)] += report.duration  # type: ignore[assignment]
    counts = {
        file: {
            "passed": passed[file],
            "skipped": skipped[file],
            "seconds": round(took[file]),  # of one process
        }
        for file, count in _collected.items()
        if passed[file] and passed[file] + skipped[file] == count and file not in failed
    }
    notes = [
        (_file(report.nodeid), *entry)
        for report in stats.get("passed", ())
        if _file(report.nodeid) in counts
        for entry in report.user_properties
    ]
    from filelock import FileLock

    lock = gpu_records.ROOT / "build" / "records.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):  # runs on other GPUs write the same records
        written = gpu_records.write(folder, counts, failed, notes) if passed or failed else []
    for path in written:
        terminalreporter.write_line(f"noted in {path}")
    if not written:
        terminalreporter.write_line("nothing is noted: no test of a record has passed or failed")


# ---- What gpu tests share ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def store_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' store lies: the processes of a session of gpu tests share it."""
    base = tmp_path_factory.getbasetemp()
    shared = WORKER is not None and is_gpu_session(request.config)
    folder: Path = (
        request.config.getoption("--store") or (base.parent if shared else base) / "store"
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def dispatch_by_tables(private_store: Path) -> Iterator[None]:
    """Dispatch by the tables, whose choices are built beforehand, not by records of this GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_RECORDS", "ignore")
        yield


@pytest.fixture(scope="session")
def build(private_store: Path) -> Build:
    """`build(specs)` builds them in parallel, before a first test needs one; they come by name."""
    from filelock import FileLock

    from warploom.errors import WarploomError
    from warploom.generator.artifact import Artifact
    from warploom.generator.build import build_many
    from warploom.runtime import kernel as kernels

    def build(specs: Sequence[KernelSpec]) -> dict[str, Artifact]:
        with FileLock(private_store / "tables.lock"):  # one process builds them, the others read
            results = build_many(list(dict.fromkeys(specs)), kernels.store())
        for result in results:
            if isinstance(result, WarploomError):
                raise result
        return {result.name: result for result in results if isinstance(result, Artifact)}

    return build


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """`note("mutants.NAME", outcome)` puts an outcome in the record, under its dotted name."""
    return record_property


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launch finds in its workspaces is NaN: a part that was not left is seen."""
    import torch

    from warploom.runtime.launch_plan import LaunchPlan

    room = LaunchPlan._room

    def full(plan: LaunchPlan, stream: int) -> torch.Tensor:
        return room(plan, stream).fill_(255)

    monkeypatch.setattr(LaunchPlan, "_room", full)
    yield
    torch.cuda.synchronize()


@pytest.fixture
def memory() -> Iterator[None]:
    """Much of the GPU's memory, given back at once: other processes test on this GPU."""
    import torch

    if torch.cuda.get_device_properties(0).total_memory < 2 * GIGABYTES << 30:
        pytest.skip(f"needs {GIGABYTES} GB of GPU memory to itself")
    yield
    gc.collect()
    torch.cuda.empty_cache()
