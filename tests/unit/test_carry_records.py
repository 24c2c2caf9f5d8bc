"""A record is carried over where machine code and host code are the same, and only there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import carry_records
import gpu_records
import pytest
from same_kernels import compiled, samples

from emitted import form, tokens
from warploom.generator import nvrtc
from warploom.generator.render import render
from warploom.generator.toolchain import find

PLACE = "families/one/gpu"
ENTRY = {"code": "c0de", "data": "d", "registers": 32}
KERNEL = {"name": "kernel", "text": "t1", "form": "f1", "launches": "l1"}
EMITTED: dict[str, Any] = {
    "options": ["-O3"],
    "families": {
        "one": {"kernels": {"d1": KERNEL, "d2": KERNEL | {"name": "other"}}, "unseen": ["a", "b"]},
        "two": {"kernels": {"d3": KERNEL}, "unseen": []},
    },
}
Tree = Callable[..., tuple[Path, Path]]


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Return what makes two checkouts, of which the first has a record that holds for it."""

    def made(
        change: Callable[[dict[str, Any]], object] = lambda content: None,
        text: str = "def f(): return 1\n",
        place: str = PLACE,
    ) -> tuple[Path, Path]:
        new = json.loads(json.dumps(EMITTED))
        change(new)
        base, root = tmp_path / "base", tmp_path / "root"
        content = {base: EMITTED, root: new}
        monkeypatch.setattr(gpu_records, "emitted", content.__getitem__)
        for tree, python in ((base, "def f(): return 1\n"), (root, text)):
            for name in ("one", "two"):
                call = tree / "runtime" / "families" / name / "call.py"
                call.parent.mkdir(parents=True)
                call.write_text("from warploom.runtime import plan\n")
            (tree / "runtime" / "plan.py").write_text(python)
            for folder in ("gpu", "integrations/gpu", "families/one/gpu", "families/two/gpu"):
                test = tree / "tests" / folder / "test_x.py"
                test.parent.mkdir(parents=True)
                test.touch()
        subject = gpu_records.places(base)[place]
        record = {"digest": gpu_records.digest(subject, base), "gpu": "one of paper"}
        (root / "tests" / place / "record.json").write_text(json.dumps(record))
        return base, root

    return made


def recorded(root: Path, place: str = PLACE) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "tests" / place / "record.json").read_text())
    return content


def no_compiler(root: Path, digests: list[str]) -> Mapping[str, Mapping[str, Any]]:
    pytest.fail("nothing has to be compiled")


def compiling(**changed: Any) -> carry_records.Compile:
    """A compiler that makes of every kernel the same, but of the new `d1` what is changed."""

    def compile_all(root: Path, digests: list[str]) -> Mapping[str, Mapping[str, Any]]:
        entries = {digest: {"": dict(ENTRY)} for digest in digests}
        if root.name == "root" and changed:
            entries["d1"][""] |= changed
        return entries

    return compile_all


def put(content: dict[str, Any], *path: str, to: object) -> None:
    for name in path[:-1]:
        content = content[name]
    content[path[-1]] = to


ONE = ("families", "one", "kernels", "d1")


@pytest.mark.parametrize(
    "text", ["def f(): return 1  # one\n", '"""Plans."""\ndef f():\n    """F."""\n    return 1\n']
)
def test_a_record_holds_where_only_comments_differ(text: str, trees: Tree) -> None:
    base, root = trees(text=text)
    before = recorded(root)
    assert carry_records.carried(PLACE, base, root, no_compiler) == []
    assert recorded(root) == before


@pytest.mark.parametrize("place", [PLACE, "integrations/gpu"])
def test_a_record_is_carried_over_where_another_text_is_the_same_code(
    place: str, trees: Tree
) -> None:
    base, root = trees(lambda content: put(content, *ONE, "text", to="t2"), place=place)
    before = recorded(root, place)
    assert carry_records.carried(place, base, root, compiling()) == []
    after = recorded(root, place)
    assert after["digest"] == gpu_records.digest(gpu_records.places(root)[place], root)
    assert after | {"digest": before["digest"]} == before != after


CHANGED = {
    "code": (("text",), "t2", {"code": "c0df"}, "kernel: kernel: code c0de, now c0df"),
    "data": (("text",), "t2", {"data": "e"}, "kernel: kernel: data d, now e"),
    "registers": (("text",), "t2", {"registers": 40}, "registers 32, now 40"),
    "launches": (("launches",), "l2", {}, "kernel: launches differ"),
}


@pytest.mark.parametrize(("path", "to", "entry", "line"), CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("place", [PLACE, "integrations/gpu"])
def test_a_changed_kernel_is_not_carried_over(
    path: tuple[str], to: str, entry: dict[str, Any], line: str, place: str, trees: Tree
) -> None:
    base, root = trees(lambda content: put(content, *ONE, *path, to=to), place=place)
    before = recorded(root, place)
    (told,) = carry_records.carried(place, base, root, compiling(**entry))
    assert line in told
    assert recorded(root, place) == before


FAMILY = ("families", "one")
REFUSED: dict[str, tuple[tuple[str, ...], object, str]] = {
    "options": (("options",), ["-O2"], "options of the compiler: ['-O3'], now ['-O2']"),
    "a kernel less": ((*FAMILY, "kernels"), {"d1": KERNEL}, "other: only in the old code"),
    "lines that no kernel has": ((*FAMILY, "unseen"), ["a"], "b: differs, and no kernel"),
    "their order": ((*FAMILY, "unseen"), ["b", "a"], "in another order"),
}


@pytest.mark.parametrize(("path", "to", "line"), REFUSED.values(), ids=REFUSED)
def test_what_no_machine_code_can_prove_is_not_carried_over(
    path: tuple[str, ...], to: object, line: str, trees: Tree
) -> None:
    base, root = trees(lambda content: put(content, *path, to=to))
    before = recorded(root)
    (told,) = carry_records.carried(PLACE, base, root, no_compiler)
    assert line in told
    assert recorded(root) == before


def test_a_text_that_differs_by_more_than_names_is_not_carried_over(trees: Tree) -> None:
    """A condition on a size may change only machine code of kernels that are not compiled here."""

    def change(content: dict[str, Any]) -> None:
        put(content, *ONE, "text", to="t2")
        put(content, *ONE, "form", to="f2")

    base, root = trees(change)
    before = recorded(root)
    told = carry_records.carried(PLACE, base, root, no_compiler)
    assert told == ["kernel: differs by more than names"]
    assert recorded(root) == before


def test_changed_host_code_is_not_carried_over_and_nothing_is_compiled(trees: Tree) -> None:
    base, root = trees(
        lambda content: put(content, *ONE, "text", to="t2"), text="def f(): return 2\n"
    )
    before = recorded(root)
    told = carry_records.carried(PLACE, base, root, no_compiler)
    assert told == ["warploom.runtime.plan: other code"]
    assert recorded(root) == before


def test_a_kernel_that_is_not_compiled_in_both_is_not_carried_over(trees: Tree) -> None:
    base, root = trees(lambda content: put(content, *ONE, "text", to="t2"))
    told = carry_records.carried(PLACE, base, root, lambda tree, digests: {})
    assert told == ["kernel: was not compiled in both"]


def test_a_record_of_other_code_than_the_base_is_not_carried_over(trees: Tree) -> None:
    base, root = trees(lambda content: put(content, *ONE, "text", to="t2"))
    path = root / "tests" / PLACE / "record.json"
    path.write_text(json.dumps({"digest": "of some other commit"}))
    (told,) = carry_records.carried(PLACE, base, root, no_compiler)
    assert "neither of this code nor of BASE" in told
    assert recorded(root) == {"digest": "of some other commit"}


def test_machine_code_tells_a_name_from_a_fault() -> None:
    """With the real compiler: what is compared is equal for another name, and for nothing else."""
    spec = next(one for one in samples() if one.operation.family == "attention_merge")
    text = render(spec)

    def machine_code(text: str) -> dict[str, Any]:
        toolchain = find()
        return compiled(nvrtc.compile(text, name=spec.name, arch=spec.arch, toolchain=toolchain))

    name, fault = text.replace("Place", "Row"), text.replace("at1 * step1", "at1 + step1")
    assert tokens(text) != tokens(name) and tokens(text) != tokens(fault)
    assert machine_code(text) == machine_code(name) != machine_code(fault)
    elsewhere = text.replace("* kValues;", f"* kValues + (kDim == {2 * spec.operation.dim});")
    assert machine_code(text) == machine_code(elsewhere) and text != elsewhere
    assert form(tokens(text)) == form(tokens(name)) != form(tokens(elsewhere))
