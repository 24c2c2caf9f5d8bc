"""The proof that two versions emit the same kernels can fail, for each thing that it compares."""

from __future__ import annotations

import copy
import json
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import same_kernels
from click.testing import CliRunner
from same_kernels import compiled, differences, every, families, main, rows

from warploom.generator.artifact import Artifact, Resources


def collection() -> dict[str, Any]:
    entry = {"code": "c0de", "registers": 168, "shared_bytes": 1024, "spill_bytes": 0}
    both = {"": entry, "_preprocess": {**entry, "registers": 32}}
    return {
        "toolchain": "nvrtc 13.0",
        "kernels": {
            "d1": {"name": "one", "text": "t1", "entries": both},
            "d2": {"name": "two", "text": "t2", "entries": None},
        },
    }


def changed(*path: str, to: object) -> dict[str, Any]:
    """The collection with one value replaced; None takes it out."""
    whole = collection()
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return whole


FIRST = ("kernels", "d1", "entries")


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (changed("toolchain", to="nvrtc 13.1"), "toolchain: nvrtc 13.0, now nvrtc 13.1"),
        (changed("kernels", "d2", to=None), "two: only in the old collection"),
        (changed("kernels", "d3", to={"name": "three"}), "three: only in the new collection"),
        (changed(*FIRST, "", "code", to="other"), "one: kernel: code c0de, now other"),
        (changed(*FIRST, "_preprocess", "registers", to=40), "registers 32, now 40"),
        (changed(*FIRST, "_preprocess", to=None), "one: entries ['', '_preprocess'], now ['']"),
        (changed(*FIRST, "", "spill_bytes", to=None), "one: kernel: spill_bytes 0, now None"),
        (changed("kernels", "d2", "text", to="t3"), "two: another text, and not compiled in both"),
    ],
)
def test_each_difference_is_told_and_fails(new: dict[str, Any], line: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(collection()))
    (tmp_path / "new.json").write_text(json.dumps(new))
    (told,) = differences(collection(), new)
    assert line in told
    arguments = ["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert line in done.output


def test_another_name_or_text_of_the_same_code_is_no_difference(tmp_path: Path) -> None:
    new = copy.deepcopy(collection())
    new["kernels"]["d1"] |= {"name": "uno", "text": "a comment more"}
    assert differences(collection(), new) == []


def test_collections_with_no_kernel_in_common_prove_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"toolchain": "nvrtc 13.0", "kernels": {}}))
    assert CliRunner().invoke(main, ["compare", str(path), str(path)]).exit_code == 1


def elf(contents: dict[str, bytes]) -> bytes:
    """A file with these sections, and one for their names."""
    names = b"\0" + b"\0".join(name.encode() for name in (*contents, ".shstrtab")) + b"\0"
    data, headers = b"", []
    for name, content in {**contents, ".shstrtab": names}.items():
        place = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQ24x", place, 1, 0, 0, 64 + len(data), len(content)))
        data += content
    head = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(data))
    sizes = struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return head.ljust(0x3A, b"\0") + sizes + data + b"".join(headers)


def test_code_is_read_by_entry_whatever_the_kernel_is_called() -> None:
    def artifact(name: str, code: bytes) -> Artifact:
        parts = {f".text.{name}_pre": b"pre", f".text.{name}": code, f".nv.shared.{name}": b"1234"}
        blocks = {f".nv.constant0.{name}{part}": bytes(8) for part in ("", "_pre")}
        resources = {f"{name}{part}": Resources(32, 0, 0) for part in ("", "_pre")}
        return Artifact(name, "sm_90a", elf(parts | blocks), "", "", (), resources, (), 1.0)

    one, other = compiled(artifact("one", b"code")), compiled(artifact("uno", b"code"))
    assert one == other
    assert one["_pre"]["code"] != one[""]["code"]
    assert (one[""]["shared_bytes"], one[""]["parameter_bytes"]) == (4, 8)
    assert compiled(artifact("one", b"cOde")) != one


def test_every_family_has_kernels_in_a_collection_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether a row of a table is legal is what takes long: some of them show as much.
    monkeypatch.setattr(same_kernels, "rows", lambda given: islice(rows(given), 0, None, 12))
    specs = every()
    assert len({spec.digest for spec in specs}) == len(specs) > 1000
    assert len({spec.operation.family for spec in specs}) == len(families()) > 1
