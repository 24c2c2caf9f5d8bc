"""Tests for GPUs are collected where there is none: nothing else imports them before one is had."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import gpu_records
from forked import Program

ROOT = Path(__file__).parents[2]
COLLECT = """
import os, sys
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]  # it is no part of the session that runs this
import pytest
sys.exit(pytest.main(["--collect-only", "--quiet", "--assert=plain", *sys.argv[1:]]))
"""


def test_every_gpu_test_is_collected_and_marked_as_one() -> None:
    """Sessions on CPUs leave their folders, and those on GPUs what is not marked."""
    folders = [f"tests/{place}" for place in gpu_records.places()]
    asked = ["-m", "gpu", "-p", "no:cacheprovider", *folders]
    (done,) = forked.run(Program(COLLECT, asked, folder=ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\d+) tests collected in", done.stdout, re.MULTILINE)  # none deselected
    assert told and int(told[1]) > 8000, done.stdout[-300:]
