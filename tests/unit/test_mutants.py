"""The faults that the gpu tests must notice can still be put into the kernels' text."""

from __future__ import annotations

import difflib
import re
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import mutants as harness
import pytest

from warploom.generator.render import render

TESTS = Path(__file__).parents[1]


def declaring(name: str) -> dict[str, Path]:
    """Every module next to gpu tests that declares this: one that nobody lists here counts, too."""
    return {
        f"{path.parts[-3]}.{path.stem}": path
        for path in sorted(TESTS.glob("families/*/gpu/*.py"))
        if re.search(rf"^{name}\b.*=", path.read_text(), re.M)
    }


MODULES = declaring("MUTANTS")


def test_every_family_with_gpu_tests_of_mutants_has_some() -> None:
    """What a test of mutants runs lies beside it, where it is found."""
    tested = {path.parent for path in TESTS.glob("families/*/gpu/test_mutants.py")}
    assert tested == {path.parent for path in MODULES.values()}


@pytest.mark.parametrize("name", MODULES)
def test_every_mutant_differs_by_its_fault_alone(name: str) -> None:
    """LookupError where the text to take out is not there: the gpu test would fail for that."""
    mutants = import_module(MODULES[name].stem).MUTANTS
    assert len(mutants) >= 5
    for fault, mutant in mutants.items():
        whole, wrong = (source.splitlines() for source in mutant.sources())
        changed = [x for x in difflib.ndiff(whole, wrong) if x[:2] in ("- ", "+ ")]
        assert changed, fault
        # A pattern takes out all that it matches, a text what stands there once.
        assert len(changed) <= 4 or hasattr(mutant, "without"), (fault, changed)
        assert not any("clock64" in line for line in changed), fault


@pytest.mark.parametrize("path", declaring("EDITED").values(), ids=declaring("EDITED"))
def test_every_edit_of_a_right_kernel_has_its_place(path: Path) -> None:
    """Kernels that count their steps, say, are edited in a gpu test, which would fail there."""
    specification = spec_from_file_location(f"edited_{path.stem}", path)
    assert specification and specification.loader
    module = module_from_spec(specification)  # its name may be that of a test of another folder
    specification.loader.exec_module(module)
    kernels = module.EDITED
    assert kernels
    for kernel, edits in kernels:
        text = render(kernel)
        assert harness.edited(text, edits) != text


def test_no_text_is_edited_that_is_not_declared() -> None:
    """A call of `mutants.edited` in a module that declares neither escapes the tests above."""
    known = {*declaring("EDITED").values(), *MODULES.values()}
    for path in TESTS.glob("families/*/gpu/*.py"):
        assert path in known or "mutants.edited(" not in path.read_text(), path
