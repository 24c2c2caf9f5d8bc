"""What is said of compilations to those who ask, and what variables may be set to."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from warploom import variables
from warploom.errors import ConfigurationError
from warploom.generator import build
from warploom.generator.store import Store

LOGS = """
import logging
import os
{setup}
import warploom
logging.getLogger("warploom.generator.build").info("compiled one")
logging.getLogger("warploom.generator.build").debug("compiling one")
"""


class Spec:
    """As much of a KernelSpec as a build reads."""

    arch = "sm_90a"

    def __init__(self, name: str) -> None:
        self.name = name


def logged(level: str, setup: str = "") -> list[str]:
    """The lines that a program has on standard error under WARPLOOM_LOG=level."""
    done = subprocess.run(
        [sys.executable, "-c", LOGS.format(setup=setup)],
        env=os.environ | {"WARPLOOM_LOG": level},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_each_kernel_has_one_record_compiled_or_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        build, "render", lambda spec: f'extern "C" __global__ void {spec.name}() {{}}\n'
    )
    caplog.set_level(logging.INFO, "warploom")
    for _ in range(2):
        build.build(Spec("some"), Store(tmp_path))  # type: ignore[arg-type]
    compiled, found = caplog.messages
    assert compiled.startswith("compiled some in ") and compiled.endswith(" s")
    assert found == "found some in the store"


@pytest.mark.parametrize(("level", "count"), [("", 0), ("warning", 0), ("info", 1), ("debug", 2)])
def test_the_variable_turns_the_log_on(level: str, count: int) -> None:
    assert len(logged(level)) == count


def test_a_program_with_logging_of_its_own_has_each_record_once() -> None:
    assert logged("info", "logging.basicConfig()") == ["INFO:warploom.generator.build:compiled one"]


def test_a_level_that_is_none_is_a_warning_and_no_reason_not_to_start() -> None:
    (line,) = logged("loud")
    assert line.startswith("WARPLOOM_LOG=loud: must be warning, info or debug")


def test_what_is_set_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables.mistakes() == {}
    monkeypatch.setenv("WARPLOOM_CACHEDIR", "there")
    monkeypatch.setenv("WARPLOOM_RECORDS", "perhaps")
    assert variables.mistakes() == {
        "WARPLOOM_CACHEDIR": "is not read: did you mean WARPLOOM_CACHE_DIR?",
        "WARPLOOM_RECORDS": "must be use, ignore or borrow",
    }
    with pytest.raises(
        ConfigurationError, match="WARPLOOM_RECORDS=perhaps: must be use, ignore or borrow"
    ):
        variables.choice("WARPLOOM_RECORDS")
