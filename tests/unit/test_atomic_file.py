"""Files are replaced whole or not at all, with the mode they had and at the end of their link."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from warploom.atomic_file import replace_file, replacing
from warploom.cli import main
from warploom.errors import WarploomError
from warploom.generator import records_file
from warploom.generator.store import Store
from warploom.generator.store_archive import export
from warploom.quantization import quantize, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> int:
    before = os.umask(request.param)
    request.addfinalizer(lambda: os.umask(before))
    return int(request.param)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    """mkstemp gives 0600, which kept others from files that their user meant to share."""
    replace_file(tmp_path / "text", "é\n")
    assert (tmp_path / "text").read_bytes() == "é\n".encode()
    assert mode(tmp_path / "text") == 0o666 & ~umask


@pytest.mark.parametrize("before", [0o600, 0o644, 0o640, 0o444, 0o755])
def test_a_file_that_was_there_keeps_its_mode(tmp_path: Path, before: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(before)
    replace_file(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", before)


def test_a_private_file_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "cubin"
    path.write_text("old")
    path.chmod(0o666)
    replace_file(path, b"new", private=True)
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)


def test_a_private_file_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """A link in the kernel cache could lead a write out of it."""
    (tmp_path / "outside").write_text("old")
    (tmp_path / "link").symlink_to("outside")
    replace_file(tmp_path / "link", "new", private=True)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "outside").read_text() == "old"


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_replaced(tmp_path: Path, there: bool) -> None:
    """A link of a dotfiles repository or a shared disk became a file of its own."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if there:
        (folder / "target").write_text("old")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(folder / "target")
    replace_file(tmp_path / "first", "new")
    assert (folder / "target").read_text() == "new"
    assert (tmp_path / "first").readlink() == Path("second")
    assert [path.name for path in folder.iterdir()] == ["target"]


def special(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/null")
    elif kind == "loop of links":
        path.symlink_to(path.name)
    else:
        return Path("/dev/null")
    return path


SPECIAL = ("directory", "FIFO", "device", "link to a device", "loop of links")


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    """/dev/null became a file of weights, for every program of the machine."""
    path = special(tmp_path, kind)
    before = path.lstat()
    with pytest.raises(OSError, match=r"must be a regular file|Too many levels"):
        replace_file(path, b"new")
    after = path.lstat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert [one.name for one in tmp_path.iterdir()] in ([], [path.name])


def test_a_pipe_that_a_link_of_the_process_leads_to_is_refused(tmp_path: Path) -> None:
    """/dev/stdout leads to `/proc/N/fd/pipe:[..]`, whose directory takes no temporary file."""
    reader, writer = os.pipe()
    path = Path(f"/proc/self/fd/{writer}")
    try:
        with pytest.raises(OSError, match="must be a regular file") as caught:
            replace_file(path, b"new")
        assert caught.value.filename == str(path)
        for write in (
            lambda: save({"w": quantize(torch.ones(8, 128), "int4", 128)}, path),
            lambda: export(Store(tmp_path / "store"), path),
        ):
            with pytest.raises(WarploomError, match=re.escape(str(path))):
                write()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(("link", "private"), [(False, False), (True, False), (False, True)])
def test_an_error_names_the_path_that_was_given(tmp_path: Path, link: bool, private: bool) -> None:
    """A missing directory was told of by the name of a temporary file."""
    path = tmp_path / "missing" / "file"
    if link:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(path, b"new", private=private)
    assert caught.value.filename == str(path)
    assert ".tmp" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
@pytest.mark.parametrize("there", [True, False])
def test_an_exception_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException], there: bool
) -> None:
    path = tmp_path / "file"
    if there:
        path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as written:
            written.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == (
        {"file": "old"} if there else {}
    )


def test_a_name_may_be_as_long_as_the_file_system_has_them(tmp_path: Path) -> None:
    """The temporary file was called after the file, and so could not be made."""
    replace_file(tmp_path / ("x" * 255), "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 255]


def test_weights_have_the_mode_of_the_umask_or_of_the_file_before(
    tmp_path: Path, umask: int
) -> None:
    """safetensors puts a file of mode 0600 in the place of the one that it is given."""
    path = tmp_path / "weights"
    save({"w": quantize(torch.ones(8, 128), "int4", 128)}, path)
    assert mode(path) == 0o666 & ~umask
    path.chmod(0o640)
    save({"w": quantize(torch.ones(8, 128), "int4", 128)}, path)
    assert mode(path) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["weights"]


# ---- Every writer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECIAL)
def test_writers_refuse_what_is_no_regular_file_by_a_typed_error(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)
    before = path.lstat()
    weight = quantize(torch.ones(8, 128), "int4", 128)
    for write in (
        lambda: save({"w": weight}, path),
        lambda: export(Store(tmp_path / "store"), path),
        lambda: records_file.update(path, "NVIDIA H100", ()),
    ):
        with pytest.raises(WarploomError, match=re.escape(str(path)) + "|^/dev/null"):
            write()
        assert path.lstat().st_ino == before.st_ino


@pytest.mark.parametrize("kind", ["directory", "FIFO", "link to a device"])
def test_emit_refuses_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    smoke = str(ROOT / "configs/route/smoke.yaml")
    done = CliRunner().invoke(main, ["emit", smoke, "--out", str(out)])
    assert done.exit_code == 0, done.output
    (first, *_) = sorted(out.iterdir())
    first.unlink()
    special(out, kind).rename(first)
    done = CliRunner().invoke(main, ["emit", smoke, "--out", str(out)])
    assert done.exit_code == 1


WRITES = re.compile(
    r"\b(?:mkstemp|NamedTemporaryFile|os\.replace|os\.rename|write_text|write_bytes|savefig)\("
)
# What is written into a directory of the process's own, or put back as it was.
OWN = {
    "benchmarks/pictures.py": 1,  # savefig, to the file that `replacing` yields
    "benchmarks/readme.py": 1,
    "generator/records_file.py": 1,  # a file that `beside` yields
    "src/warploom/cli/output.py": 1,
    "tuning/fleet/cells.py": 1,
}


def test_every_writer_of_the_package_replaces_files_alike() -> None:
    """Of seven writers three left 0600, two half a file, and six replaced links and devices."""
    found = {}
    for folder in ("benchmarks", "generator", "integrations", "quantization", "runtime", "tuning"):
        for path in [*(ROOT / folder).rglob("*.py")]:
            found[str(path.relative_to(ROOT))] = len(WRITES.findall(path.read_text()))
    for path in [*(ROOT / "src/warploom").glob("*.py"), *(ROOT / "src/warploom/cli").glob("*.py")]:
        found[str(path.relative_to(ROOT))] = len(WRITES.findall(path.read_text()))
    assert {path: count for path, count in found.items() if count} == OWN
