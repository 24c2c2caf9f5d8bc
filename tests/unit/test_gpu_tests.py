"""Tests for GPUs are collected where there is none, and their kernels are rendered: nothing else
imports them before one is had.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import carry_kernels
import gpu_records
import pytest
import shell
from click.testing import CliRunner
from precompiled import compiled

from warploom.generator.artifact import Artifact
from warploom.generator.build import build
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store

pytestmark = pytest.mark.usefixtures("compiled_here")
ROOT = Path(__file__).parents[2]
SMALL = ROOT / "configs" / "route" / "smoke.yaml"
COLLECT = """
import os, sys
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]  # it is no part of the session that runs this
import pytest
os.chdir(sys.argv.pop(1))
from carry_kernels import Collected
from warploom.generator.render import render

plugin = Collected()
arguments = ["--collect-only", "--quiet", "--assert=plain", *sys.argv[1:]]
status = pytest.main(arguments, plugins=[plugin])
print(plugin.fixtures, "fixtures")
for kernel in plugin.specs:
    try:
        render(kernel)
    except Exception as error:
        print("not rendered:", kernel.name, error)
print(len(plugin.specs), "kernels")
sys.exit(status)
"""


def test_every_gpu_test_is_collected_and_marked_as_one_and_has_its_kernels(tmp_path: Path) -> None:
    """Sessions on CPUs leave their folders, and those on GPUs what is not marked. One kernel that
    its template cannot make fails every test of its family there.
    """
    folders = [f"tests/{place}" for place in gpu_records.places()]
    (tmp_path / "collecting.py").write_text(COLLECT)
    asked = shlex.join([str(ROOT), "-m", "gpu", "-p", "no:cacheprovider", *folders])
    done = shell.run(f"python -m collecting {asked}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\d+) tests collected in", done.stdout, re.MULTILINE)  # none deselected
    assert told and int(told[1]) > 8000, done.stdout[-300:]
    assert "not rendered: " not in done.stdout, done.stdout
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py")]
    declared = sum(file.read_text().count("build: Callable") for file in files)
    assert f"\n{declared} fixtures\n" in done.stdout, "a fixture whose kernels are not rendered"
    built = re.search(r"^(\d+) kernels$", done.stdout, re.MULTILINE)
    assert built and int(built[1]) > 1500, done.stdout[-300:]


@pytest.fixture(scope="module")
def small() -> tuple[KernelSpec, Artifact]:
    """A kernel of the package's smallest family."""
    (spec,) = expand_file(SMALL).specs[:1]
    return spec, compiled(spec)


def test_kernels_that_were_compiled_elsewhere_are_found_in_a_store(
    small: tuple[KernelSpec, Artifact], tmp_path: Path
) -> None:
    """A GPU machine whose compiler is named otherwise compiles none of them again."""
    spec, made = small[0], replace(small[1], toolchain="0" * 64)
    carry_kernels.write({spec: made}, tmp_path / "kernels.xz")
    found = carry_kernels.read(tmp_path / "kernels.xz")
    assert found == {spec: made}
    assert carry_kernels.different(found) == []
    carry_kernels.put(found.values(), Store(tmp_path / "store"))
    store = Store(tmp_path / "store")
    assert build(spec, store, policy="forbid").cubin == made.cubin
    assert store.counters.puts == 0


def test_no_kernel_is_taken_that_this_machine_compiles_to_other_bytes(
    small: tuple[KernelSpec, Artifact], tmp_path: Path
) -> None:
    """Tests that ran it would speak of a kernel that nobody has."""
    spec, made = small
    carry_kernels.write({spec: replace(made, cubin=made.cubin + b"0")}, tmp_path / "kernels.xz")
    arguments = ["unpack", str(tmp_path / "kernels.xz"), str(tmp_path / "store")]
    result = CliRunner().invoke(carry_kernels.main, arguments)
    assert result.exit_code == 1 and f"compiles {spec.name} to other bytes" in result.output
    assert not (tmp_path / "store").exists()


@pytest.fixture
def packed(small: tuple[KernelSpec, Artifact], tmp_path: Path) -> Path:
    """A file of that kernel."""
    carry_kernels.write(dict([small]), tmp_path / "kernels.xz")
    return tmp_path / "kernels.xz"


def refusal(*arguments: object) -> str:
    """What a command that fails says."""
    result = CliRunner().invoke(carry_kernels.main, [str(one) for one in arguments])
    assert result.exit_code != 0 and isinstance(result.exception, SystemExit), result.output
    return result.output


def test_kernels_that_are_in_a_store_may_be_unpacked_again(packed: Path, tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(
            carry_kernels.main, ["unpack", str(packed), str(tmp_path / "store")]
        )
        assert result.exit_code == 0 and "1 kernels are in" in result.output
    assert len(Store(tmp_path / "store").listed()) == 1


def test_a_store_that_takes_no_kernel_is_told(packed: Path, tmp_path: Path) -> None:
    """They were in memory, it said they were stored, and the GPU's time went to compilers."""
    (tmp_path / "file").touch()
    assert "is not stored: " in refusal("unpack", packed, tmp_path / "file" / "store")


def test_what_is_no_file_of_kernels_is_refused(packed: Path, tmp_path: Path) -> None:
    whole, wrong = packed.read_bytes(), tmp_path / "wrong.xz"
    for content in (b"", whole[:-20], whole[: len(whole) // 2], b"PK\x03\x04", b"\xfd7zXZ\0"):
        wrong.write_bytes(content)
        assert "pack it again, from this commit" in refusal("unpack", wrong, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_kernels_of_another_source_are_not_taken(
    small: tuple[KernelSpec, Artifact], tmp_path: Path
) -> None:
    """It said that versions of the compiler differ."""
    spec, made = small
    carry_kernels.write({spec: replace(made, source_digest="0" * 64)}, tmp_path / "kernels.xz")
    told = refusal("unpack", tmp_path / "kernels.xz", tmp_path / "store")
    assert f"{spec.name} has another source here than in the file" in told


def test_a_file_that_holds_something_else_is_not_replaced(packed: Path, tmp_path: Path) -> None:
    """`pack tests/gpu/test_x.py`, without a FILE, compiled all kernels, and replaced the test."""
    (tmp_path / "test_x.py").write_text("import pytest\n")
    told = refusal("pack", tmp_path / "test_x.py")
    assert "would be replaced: name another FILE" in told
    assert (tmp_path / "test_x.py").read_text() == "import pytest\n"
    assert "is a directory" in refusal("pack", tmp_path)
    assert "cannot be written" in refusal("pack", tmp_path / "test_x.py" / "kernels.xz")


def test_an_interrupted_pack_writes_what_is_compiled(
    small: tuple[KernelSpec, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls = tmp_path / "new" / "kernels.xz", list[int]()

    def build_many(specs: list[KernelSpec], *_: object) -> list[Artifact]:
        calls.append(len(specs))
        if len(calls) > 1:
            raise KeyboardInterrupt
        return [replace(small[1], name=spec.name) for spec in specs]

    monkeypatch.setattr(carry_kernels, "build_many", build_many)
    monkeypatch.setattr(carry_kernels, "AT_ONCE", 1)
    result = CliRunner().invoke(carry_kernels.main, ["pack", str(file), "--config", str(SMALL)])
    assert result.exit_code == 0 and "stopped" in result.output, result.output
    assert len(carry_kernels.read(file)) == 1
