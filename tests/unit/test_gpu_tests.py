"""Tests for GPUs are collected where there is none, and their kernels are rendered: nothing else
imports them before one is had.
"""

from __future__ import annotations

import re
from pathlib import Path

import forked
import gpu_records
from forked import Program

ROOT = Path(__file__).parents[2]
COLLECT = """
import inspect, os, sys
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]  # it is no part of the session that runs this
import pytest
from warploom.generator.render import render

class Rendered:
    def pytest_collection_finish(self, session):
        kernels = {}
        def build(specs):
            kernels.update((spec.name, spec) for spec in specs)
            return {}
        modules = {*session.config.pluginmanager.get_plugins()}  # a conftest.py is one
        modules |= {item.getparent(pytest.Module).obj for item in session.items}
        fixtures = {
            function
            for module in modules
            for function in map(inspect.unwrap, getattr(module, "__dict__", {}).values())
            if inspect.isfunction(function) and "build" in inspect.signature(function).parameters
        }
        for fixture in fixtures:  # whatever its name is
            fixture(build)
        print(len(fixtures), "fixtures")
        for name, kernel in kernels.items():
            try:
                render(kernel)
            except Exception as error:
                print("not rendered:", name, error)
        print(len(kernels), "kernels")

arguments = ["--collect-only", "--quiet", "--assert=plain", *sys.argv[1:]]
sys.exit(pytest.main(arguments, plugins=[Rendered()]))
"""


def test_every_gpu_test_is_collected_and_marked_as_one_and_has_its_kernels() -> None:
    """Sessions on CPUs leave their folders, and those on GPUs what is not marked. One kernel that
    its template cannot make fails every test of its family there.
    """
    folders = [f"tests/{place}" for place in gpu_records.places()]
    asked = ["-m", "gpu", "-p", "no:cacheprovider", *folders]
    (done,) = forked.run(Program(COLLECT, asked, folder=ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\d+) tests collected in", done.stdout, re.MULTILINE)  # none deselected
    assert told and int(told[1]) > 8000, done.stdout[-300:]
    assert "not rendered: " not in done.stdout, done.stdout
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py")]
    declared = sum(file.read_text().count("build: Callable") for file in files)
    assert f"\n{declared} fixtures\n" in done.stdout, "a fixture whose kernels are not rendered"
    built = re.search(r"^(\d+) kernels$", done.stdout, re.MULTILINE)
    assert built and int(built[1]) > 1500, done.stdout[-300:]
