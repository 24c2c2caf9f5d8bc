"""The rooms at the root are one import package, in a wheel, installed and from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("configs", "generator", "integrations", "quantization", "runtime", "templates", "tuning")
PACKAGE = ROOT / "src" / "warploom"


def run_python(code: str, cwd: Path, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: a build folder left at the root would put deleted modules into the wheel.
    copy = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for room in ("src", "benchmarks", *LINKED):  # benchmarks: configs has a link to its cells
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run_python(build, copy)
    return next((copy / "dist").glob("*.whl"))


def test_wheel_has_every_file_of_the_rooms_and_nothing_else(wheel: Path) -> None:
    names = {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}
    shipped = {name for name in names if not name.parts[0].endswith(".dist-info")}
    links = {room: ROOT / room for room in LINKED}
    expected = {
        PurePosixPath("warploom") / prefix / file.relative_to(folder).as_posix()
        for prefix, folder in {"": PACKAGE, **links}.items()
        for file in folder.rglob("*")
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


def test_every_link_is_to_the_room_of_its_name() -> None:
    links = {path.name: path.readlink() for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {room: Path("..", "..", room) for room in LINKED}


def test_rooms_are_not_importable_by_their_folder_names(tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec\n"
        f"print([name for name in {LINKED} if find_spec(name) is not None])"
    )
    assert run_python(code, tmp_path, PYTHONPATH="") == "[]"  # a developer may have named the root


USE = "import warploom, warploom.generator as g; print(warploom.gemm.__name__, g.__file__)"
# The same without torch, which takes seconds: what the package offers, and where each room is.
ROOMS = f"""
from importlib.util import find_spec
import warploom
assert "gemm" in warploom.__all__
print(*(find_spec(f"warploom.{{room}}").origin for room in {LINKED}), sep="\\n")
"""


def rooms(package: Path) -> str:
    return "\n".join(str(package / room / "__init__.py") for room in LINKED)


@pytest.mark.parametrize("folder", [ROOT.parent, ROOT, ROOT / "src"], ids=["parent", "root", "src"])
def test_the_editable_package_is_whole_from_any_folder(folder: Path) -> None:
    """A clone named warploom was a namespace package for scripts that lie beside it."""
    assert run_python(ROOMS, folder) == rooms(PACKAGE)


@pytest.mark.parametrize("folder", [ROOT.parent, ROOT], ids=["parent", "root"])
def test_the_wheel_is_whole_also_inside_the_clone(
    wheel: Path, folder: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert run_python(ROOMS, folder, PYTHONPATH=str(tmp_path)) == rooms(tmp_path / "warploom")
    if folder == ROOT:
        expected = f"gemm {tmp_path / 'warploom' / 'generator' / '__init__.py'}"
        assert run_python(USE, folder, PYTHONPATH=str(tmp_path)) == expected


SHAPES = """
import sys
from warploom.cli import main
for command in (["explain", "gemm", "--shapes", "16x64x64", "--gpu", "h200", "-q"], [
    "bench", "gemm", "--shapes", "16x64x64"
]):
    try:
        main(command)
    except SystemExit as ended:
        print(command[0], ended.code or 0)
"""


def test_the_wheel_explains_and_measures_shapes_without_a_clone(
    wheel: Path, tmp_path: Path
) -> None:
    """What measures was in benchmarks/ alone, which no wheel has."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    said = run_python(SHAPES, tmp_path, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert "kernel   gemm_sm90a_bf16" in said and "explain 0" in said
    assert "bench 1" in said  # for there is no GPU, and for no other reason


def test_a_folder_of_the_packages_name_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "warploom").mkdir()
    assert run_python(USE, tmp_path).startswith("gemm ")


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
