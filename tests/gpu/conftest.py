"""What the gpu tests share: their kernels, built at once, and the record of a passed session.

`--record FILE` writes what this GPU passed to FILE, if nothing failed; `make gpu-test` asks for it.
The tests may run in several processes at a time (pytest-xdist): what takes longest is the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
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

WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1, ..: which of several processes this is


def pytest_configure() -> None:
    """Begin with a GPU of this process's own, before anything asks for one."""
    if WORKER is not None:
        share_gpus.begin_with(int(WORKER.removeprefix("gw")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write what passed here, if everything did")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    if hasattr(config, "workerinput"):  # one of several processes, which knows only its own tests
        return
    path = config.getoption("--record", None)
    stats = terminalreporter.stats
    if path is None or exitstatus != 0 or "deselected" in stats or "passed" not in stats:
        return
    found = [entry for report in stats["passed"] for entry in report.user_properties]
    counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "failed", "skipped")}
    record.write(path, counts, found)
    terminalreporter.write_line(f"wrote {path}")


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' store lies: the processes of one session share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if WORKER is None else base.parent) / "store"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def built(private_store: Path) -> dict[str, Artifact]:
    """Every kernel of the tables, by name, built in parallel before the first test."""
    others = [*(entry.kernel for entry in LEDGER), *(sample.kernel for sample in SAMPLES)]
    specs = list(dict.fromkeys((*cases.ALL, *cases.ASKED, *others)))
    return _built(private_store, specs)


@pytest.fixture(scope="session")
def attention_built(private_store: Path) -> dict[str, Artifact]:
    """Every attention kernel of the tables, by name, built before the first test of attention."""
    import attention_cases

    return _built(private_store, attention_cases.ALL)


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
