"""The rooms at the root are one import package: in a wheel, installed, and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "warploom": "warploom",
    "configs": "warploom/configs",
    "generator": "warploom/generator",
    "runtime": "warploom/runtime",
    "templates": "warploom/templates",
    "tuning": "warploom/tuning",
}


def run_python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: a build folder left at the root would put deleted modules into the wheel.
    copy = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run_python(build, copy)
    return next((copy / "dist").glob("*.whl"))


def test_wheel_has_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    names = {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}
    shipped = {name for name in names if not name.parts[0].endswith(".dist-info")}
    expected = {
        PurePosixPath(package) / file.relative_to(ROOT / room).as_posix()
        for room, package in ROOMS.items()
        for file in (ROOT / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".lock"
    }
    assert shipped == expected


def test_wheel_has_the_licence_and_the_console_script(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = {
        PurePosixPath(name).name: name for name in archive.namelist() if "dist-info" in name
    }
    assert "LICENSE" in metadata
    assert b"warploom = warploom.cli:main" in archive.read(metadata["entry_points.txt"])


def test_rooms_are_not_importable_by_their_folder_names(tmp_path: Path) -> None:
    folders = [room for room in ROOMS if room != "warploom"]
    code = (
        "from importlib.util import find_spec\n"
        f"print([name for name in {folders} if find_spec(name) is not None])"
    )
    assert run_python(code, tmp_path) == "[]"


@pytest.mark.parametrize("package", ["warploom.templates", "warploom.configs"])
def test_resources_are_readable_from_outside_the_root(package: str, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        f"print(files({package!r}).joinpath('__init__.py').is_file())"
    )
    assert run_python(code, tmp_path) == "True"


def test_every_dependency_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [entry for entry in project["dependencies"] if "<" not in entry] == []
