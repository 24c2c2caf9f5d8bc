"""A plugin of pytest that runs FlashAttention's own tests against `warploom.flash_attn`.

Their file imports `flash_attn`: here that is a module with our functions, whose other parts come
from a checkout of FlashAttention (version 2.8.3: later files import more of it). Of one of the
file's functions it runs a part of a sample, drawn by a fixed seed from the cases that ask for
nothing that is not there.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

import warploom.flash_attn

# Of parameters, the values that ask for something that is not there.
LEFT_OUT: dict[str, Callable[[object], bool]] = {
    "dropout_p": bool,  # weights are dropped, but others than FlashAttention's
}
LEFT_OUT_OF: dict[str, dict[str, Callable[[object], bool]]] = {
    # Keys of packed sequences lie in one piece, not in pages; None is that.
    "test_flash_attn_varlen_causal": {"paged_kv_block_size": bool},
    "test_flash_attn_kvcache": {"d": lambda d: d == 59},  # no row of a cache is padded
}
DECODED = (64, 96, 128, 256)  # dimensions of heads in pages


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checkout", type=Path, help="of FlashAttention")
    parser.addoption("--function", help="whose cases are run")
    parser.addoption("--cases", type=int, help="how many of them are drawn")
    parser.addoption("--part", help="as 0/4: the first of 4 parts of these")


def pytest_configure(config: pytest.Config) -> None:
    """Put the module in place that the tests import."""
    package = ModuleType("flash_attn")
    package.__path__ = [str(config.getoption("--checkout") / "flash_attn")]
    for name in warploom.flash_attn.__all__:
        setattr(package, name, getattr(warploom.flash_attn, name))
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._get_block_size_n = _absent  # type: ignore[attr-defined] # asked under dropout
    sys.modules |= {package.__name__: package, interface.__name__: interface}


def _absent(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("warploom.flash_attn does not have it")


# ---- Which cases are run -------------------------------------------------------------------------


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """No item for any other function: a case is not made before it is left out."""
    other = name.startswith("test") and name != collector.config.getoption("--function")
    return [] if other else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take from parameters the values that are left out."""
    left_out = LEFT_OUT | LEFT_OUT_OF.get(metafunc.definition.name, {})
    markers = metafunc.definition.own_markers
    for index, mark in enumerate(markers):
        leaves_out = left_out.get(str(mark.args[0])) if mark.name == "parametrize" else None
        if leaves_out is not None:
            values = [value for value in mark.args[1] if not leaves_out(value)]
            markers[index] = pytest.mark.parametrize(mark.args[0], values).mark


def _beyond(item: pytest.Item) -> bool:
    """Whether a case asks, by keys in pages or items, for slopes, or in pages for other queries.

    Those are long ones, and heads of another dimension.
    """
    asked: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    paged = asked.get("paged_kv_block_size")
    if asked.get("alibi") and (paged or asked.get("has_batch_idx")):
        return True
    if "mha_type" not in asked or not paged:
        return False
    group = {"mha": 1, "gqa": 2, "mqa": 6}[asked["mha_type"]]
    return asked["d"] not in DECODED or asked["seqlen_q"] * group > 256


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count, (part, parts) = config.getoption("--cases"), config.getoption("--part").split("/")
    able = [item for item in items if not _beyond(item)]
    drawn = random.Random(0).sample(able, min(count, len(able)))
    kept = drawn[int(part) :: int(parts)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


# ---- A run ---------------------------------------------------------------------------------------


def parts(samples: dict[str, int], most: int) -> list[tuple[str, str]]:
    """Functions and parts of their samples, none of more than `most` cases."""
    return [
        (function, f"{part}/{math.ceil(count / most)}")
        for function, count in samples.items()
        for part in range(math.ceil(count / most))
    ]
