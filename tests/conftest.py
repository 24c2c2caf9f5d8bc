"""What every test shares: a private kernel store, the skip of gpu tests, and `--update-golden`.

Modules beside tests that are no tests, and those in tools/, are imported by their names, from any
test; so each has a name of its own. What a session of gpu tests is beside that is in
gpu/gpu_session.py, and how processes share tests in unit/scheduling.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from importlib import resources
from pathlib import Path

import _pytest.logging
import pytest

# All that is loaded while tests are collected stays: to look for garbage in it takes seconds.
gc.disable()
# Each of several processes has its share of the cores: threads that wait for a core of others spin.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    share = max(1, len(os.sched_getaffinity(0)) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
os.umask(0o022)  # of whoever runs this: folders that everybody may write to are refused as stores
# What libraries keep for the next run lies in build/, not in the user's home or where pytest began.
TESTS = Path(__file__).parent
BUILD = TESTS.parent / "build"
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(BUILD / "hypothesis"))
os.environ.setdefault("MPLCONFIGDIR", str(BUILD / "matplotlib"))
os.environ["WARPLOOM_CACHE_DIR"] = str(BUILD / "store")  # while tests are collected
with contextlib.suppress(ModuleNotFoundError):  # gpu tests do without
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    # The same examples in every run; `--hypothesis-profile explore` draws others, to find more.
    common = settings(deadline=None, suppress_health_check=slow)
    settings.register_profile("any machine", common, derandomize=True)
    settings.register_profile("explore", common)
    settings.load_profile("any machine")

# What takes longest of all, in this order, the rest by how many tests there are: so that processes
# that share them end together.
LONGEST = (
    "unit/test_guide.py",
    "unit/test_gpu_tests.py",
    "unit/test_record.py",
    "families/attention_backward/test_ranges.py",
    "families/attention_decode/test_emulated.py",
    "tuning/test_worker.py",
    "unit/test_other_sms.py",
    "compile/test_smoke.py",
    "unit/test_pictures.py",
    "integrations/test_patch_compiled.py",
    "families/gemm/test_dispatch.py",
    "families/gemm/test_odd_views.py",
    "tuning/test_bench_shapes.py",
    "tuning/test_model.py",
    "families/gemm/test_gradient_compiled.py",
    "families/attention_backward/test_reference.py",
    "unit/test_packaging.py",
    "integrations/test_dropout.py",
    "integrations/test_flash_attn.py",
    "integrations/test_huggingface.py",
    "unit/test_cli.py",
    "tuning/test_ahead.py",
    "tuning/test_recorded_calls.py",
    "examples/test_train_gpt.py",
    "examples/test_loss_spread.py",
    "integrations/test_sdpa.py",
    "property/test_specs.py",
    "property/test_launches.py",
    "store/test_crashes.py",
    "unit/test_toolchain.py",
    "unit/test_pages.py",
    "integrations/test_float8.py",
    "integrations/test_huggingface_steps.py",
    "families/attention_backward/test_products.py",
    "families/attention_forward/test_ranges.py",
    "tuning/test_tune_command.py",
    "unit/test_same_kernels.py",
    "unit/test_cli_output.py",
    "unit/test_build.py",
    "integrations/test_sharding.py",
    "tuning/test_autotune_processes.py",
    "families/attention_forward/test_dispatch.py",
    "tuning/test_worker_preparation.py",
    "property/test_compiled.py",
    "toy/test_generator.py",
    "examples/test_llama_step.py",
)

helpers = {
    path.parent
    for path in TESTS.rglob("*.py")
    if not path.name.startswith("test_") and path.name != "conftest.py"
    if not path.with_name("__init__.py").is_file()
}
sys.path.extend(str(folder) for folder in (*sorted(helpers), TESTS.parent / "tools"))
pytest_plugins = ["gpu_session", "scheduling"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite emitted/ instead of comparing"
    )
    parser.addoption(
        "--flash-attention",
        type=Path,
        help="a checkout of FlashAttention 2.8.3, whose own tests are run against ours",
    )


class RootLogs(_pytest.logging.catching_logs[logging.Handler]):
    """What catches logs for pytest, at the root alone: those of Warploom arrive there.

    pytest goes through thousands of loggers six times in a test, for those that end on their own.
    torch's log of traces is one: for a handler it prints each graph, guard and symbol it makes.
    """

    def __enter__(self) -> logging.Handler:
        if self.level is not None:
            return super().__enter__()
        logging.getLogger().addHandler(self.handler)
        self.attached_loggers.append(logging.getLogger())
        return self.handler


def pytest_configure(config: pytest.Config) -> None:
    """Hide scipy from transformers, which imports its optimizers for losses of object detection.

    They are a third of all that it imports.
    """
    from gpu_session import is_gpu_session  # a plugin by now

    if not is_gpu_session(config):  # whose baselines may need it
        sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    if "attached_loggers" in _pytest.logging.catching_logs.__slots__:  # not so in pytest 8
        _pytest.logging.catching_logs = RootLogs  # type: ignore[misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files for several processes, which take them in this order (--no-loadscope-reorder)."""
    if workers:
        ranks = {TESTS / file: rank for rank, file in enumerate(LONGEST)}
        counts = Counter(item.path for item in items)
        items.sort(key=lambda one: (ranks.get(one.path, len(ranks)), -counts[one.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    from gpu_session import is_gpu_session  # a plugin by now

    if not is_gpu_session(session.config):  # where garbage holds a GPU's memory
        gc.collect()  # else tuples that it could leave alone are followed, and all that hold them
        gc.freeze()
        gc.set_threshold(20_000)
    gc.enable()  # last: else it looks through all that was just loaded, once more


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Look for garbage no more in what a file of tests leaves, such as records that were read.

    A look through all of it took most of a second, and whatever measures begins with one.
    """
    result = yield
    from gpu_session import is_gpu_session

    if (nextitem is None or nextitem.path != item.path) and not is_gpu_session(item.config):
        gc.collect()
        gc.freeze()
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    if guards := sys.modules.get("torch._dynamo.guards"):
        # How long guards of a graph take is for torch's logs alone: it flushes caches for that.
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    if item.get_closest_marker("gpu") and (reason := _reason_for_no_gpu()):
        pytest.skip(reason)


@functools.cache
def _reason_for_no_gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0): this one has {capability}"
    return None


@pytest.fixture(scope="session", autouse=True)
def private_store(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep every test, and every process it starts, away from the user's store and settings.

    Nothing that tests write has to be there after a power failure. The package's records take a
    third of a second to read, and many tests forget what was read.
    """
    from warploom.generator import records_file

    shipped = Path(str(resources.files("warploom.configs")))
    read, kept = records_file.read, functools.cache(records_file.read)

    @functools.wraps(read)  # tools look for it by its module
    def reads(path: Path) -> object:
        return (kept if path.is_relative_to(shipped) else read)(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_file, "read", reads)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("WARPLOOM_CACHE_DIR", str(store_folder))
        patch.delenv("WARPLOOM_CACHE_PATH", raising=False)
        patch.delenv("WARPLOOM_COMPILE", raising=False)
        patch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path_factory.mktemp("records")))
        patch.delenv("WARPLOOM_RECORDS", raising=False)
        yield store_folder


@pytest.fixture
def rules_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask of a kernel once whether it is legal: of many shapes few differ, and rules know none."""
    from warploom.generator.families.base import Family

    monkeypatch.setattr(Family, "reasons", functools.cache(Family.reasons))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
