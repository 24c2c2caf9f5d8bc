"""What the gpu tests share: their kernels, built at once, and the record of a passed session.

`--record FILE` notes in FILE which files of tests this GPU passed; `make gpu-test` asks for it.
The tests may run in several processes at a time (pytest-xdist): what takes longest is the host.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.append(str(Path(__file__).parent))  # for cases, arenas and record, which are no tests

import cases
import record
import share_gpus
from ledger import LEDGER
from samples import SAMPLES

from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.specification import KernelSpec
from warploom.runtime import kernel as kernels

_collected: Counter[str] = Counter()  # tests of this run, by file
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1, ..: which of several processes this is


def pytest_configure() -> None:
    """Begin with a GPU of this process's own, before anything asks for one."""
    if WORKER is not None:
        share_gpus.begin_with(int(WORKER.removeprefix("gw")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="note the files of tests that passed")


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
    return Path(nodeid.split("::")[0]).name


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Record the files of which every test has passed, or was skipped: also when interrupted."""
    if hasattr(config, "workerinput"):  # one of several processes, which knows only its own tests
        return
    path = config.getoption("--record", None)
    stats = terminalreporter.stats
    if path is None or "deselected" in stats or any("::" in argument for argument in config.args):
        return

    def by_file(kind: str) -> Counter[str]:
        return Counter(_file(report.nodeid) for report in stats.get(kind, ()))

    passed, skipped, failed = by_file("passed"), by_file("skipped"), by_file("failed")
    failed += by_file("error")
    counts = {
        file: {"passed": passed[file], "skipped": skipped[file]}
        for file, count in _collected.items()
        if passed[file] + skipped[file] == count and file not in failed
    }
    found = [
        entry
        for report in stats.get("passed", ())
        if _file(report.nodeid) in counts
        for entry in report.user_properties
    ]
    record.write(path, counts, failed, found)
    terminalreporter.write_line(f"noted {len(counts)} files in {path}")


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' store lies: the processes of one session share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if WORKER is None else base.parent) / "store"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def dispatch_by_tables(private_store: Path) -> Iterator[None]:
    """Dispatch by the tables, whose choices are built beforehand, not by records of this GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_RECORDS", "ignore")
        yield


@pytest.fixture(scope="session")
def built(private_store: Path) -> dict[str, Artifact]:
    """Every GEMM of the tables, by name, built in parallel before the first test of GEMM."""
    others = [*(entry.kernel for entry in LEDGER), *(sample.kernel for sample in SAMPLES)]
    specs = list(dict.fromkeys((*cases.ALL, *cases.ASKED, *others)))
    return _built(private_store, specs)


@pytest.fixture(scope="session")
def attention_built(private_store: Path) -> dict[str, Artifact]:
    """Every attention kernel of the tables, by name, built before the first test of attention."""
    import attention_cases

    return _built(private_store, attention_cases.ALL)


@pytest.fixture(scope="session")
def attention_backward_built(private_store: Path) -> dict[str, Artifact]:
    """Every backward kernel of the tables, by name, and what forward passes before them need."""
    import attention_backward_cases

    return _built(private_store, [*attention_backward_cases.ALL, *attention_backward_cases.FORWARD])


@pytest.fixture(scope="session")
def processes_built(private_store: Path) -> dict[str, Artifact]:
    """The few kernels that processes of their own run, built before the first of them."""
    import mutant
    import sanitized

    mutants = (one.kernel for one in mutant.MUTANTS.values())
    return _built(private_store, list({*sanitized.ALL, *mutants, cases.SIMPLE["tma"]}))


def _built(folder: Path, specs: Sequence[KernelSpec]) -> dict[str, Artifact]:
    with FileLock(folder / "tables.lock"):  # the first process builds them, the others read
        results = build_many(specs, kernels.store())
    for result in results:
        if isinstance(result, WarploomError):
            raise result
    return {result.name: result for result in results if isinstance(result, Artifact)}


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """`note("mutants.NAME", outcome)` puts an outcome in the record, under its dotted name."""
    return record_property
