"""docs/adding-a-family.md builds the family of this folder: it links to each of these files."""

from __future__ import annotations

import re
from pathlib import Path

from warploom.generator import configurations
from warploom.generator.space import expand_file

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "adding-a-family.md"
LINK = re.compile(r"^\[`(.*)`\]\(\.\./tests/toy/\1\)$", re.M)
ROOMS = ("generator", "templates", "configs", "runtime")


def test_the_page_links_to_every_file_once() -> None:
    paths = [path for room in ROOMS for path in (HERE / room).rglob("*")]
    files = sorted(
        path.relative_to(HERE).as_posix()
        for path in paths
        if path.is_file() and path.suffix != ".pyc"
    )
    linked = [match[1] for match in LINK.finditer(PAGE.read_text())]
    assert sorted(linked) == files


def test_the_kernel_that_the_page_shows_is_of_its_small_set() -> None:
    (smoke,) = (path for path in configurations.smoke() if path.parent.name == "axpy")
    (shown,) = re.findall(r"^\$ warploom show (\w+)$", PAGE.read_text(), re.M)
    assert shown in {spec.name for spec in expand_file(smoke).specs}


def test_what_the_page_leads_to_is_there() -> None:
    rooms = "generator|runtime|templates|tests|benchmarks|src|emitted|configs"
    told = set(re.findall(rf"`((?:{rooms})/[\w./]+)`", PAGE.read_text()))
    own = {name for name in told if "axpy" in name}
    root = PAGE.parents[1]
    assert len(told - own) > 15
    assert [name for name in sorted(told - own) if not (root / name).exists()] == []
