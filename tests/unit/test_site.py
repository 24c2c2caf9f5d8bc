"""The documentation site builds without a warning, no link of it is dead, and nothing is left out.

It is built once, as `make site` builds it. Skipped where the extra `docs` is not installed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import warploom
from warploom.cli import COMMANDS
from warploom.generator import families

for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(name, reason="the extra `docs` is not installed")

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """What a page links to, and what may be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {attributes[key] or "" for key in ("id", "name") if key in attributes}
        if tag in ("a", "img", "script", "link"):
            self.links += [attributes[key] or "" for key in ("href", "src") if key in attributes]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@cache
def parsed(path: Path) -> Page:
    return Page(path.read_text())


def text(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text())


def test_no_link_of_the_site_is_dead(site: Path) -> None:
    """MkDocs looks at Markdown's links alone: not at HTML, scripts, and what is generated."""
    dead, inner = [], 0
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue  # it is shown at any address, so that its links are absolute
        for link in parsed(path).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            inner += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            alive = target.is_file() and (
                target.suffix != ".html" or anchor in parsed(target).anchors
            )
            if not alive:
                dead.append((path.relative_to(site).as_posix(), link))
    assert dead == [] and inner > 3000


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="https?:')
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())] == []


def test_every_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert set(documents) <= pages
    assert (ROOT / "README.md").read_text().splitlines()[0] == "# Warploom"
    assert '<h1 id="warploom">Warploom' in (site / "index.html").read_text()
    title = (ROOT / "CONTRIBUTING.md").read_text().splitlines()[0].removeprefix("# ")
    assert title in text(site / "contributing.html")


def test_every_family_and_command_is_in_the_navigation(site: Path) -> None:
    links = parsed(site / "families" / "gemm.html").links
    assert [
        name for name in families.names() if name != "gemm" and f"{name}.html" not in links
    ] == []
    page = text(site / "commands.html")
    assert [one for one in COMMANDS if f"Usage: warploom {one}" not in page] == []


def test_every_public_name_is_on_a_page_of_the_api(site: Path) -> None:
    anchors = {one for path in (site / "api").glob("*.html") for one in parsed(path).anchors}
    pages = "\n".join(path.read_text() for path in (site / "api").glob("*.html"))
    titles = "\n".join(re.findall(r"<h2.*?</h2>", pages, re.DOTALL))  # of objects with a class
    modules = ("nn", "functional", "testing", "flash_attn", "flashinfer", "float8")
    names = [f"warploom.{one}" for one in warploom.__all__ if one not in (*modules, "__version__")]
    for module in modules:
        public = importlib.import_module(f"warploom.{module}").__all__
        names += [f"warploom.{module}.{one}" for one in public]
    assert len(names) > 70
    assert [one for one in names if one not in anchors and one not in titles] == []


def test_columns_of_a_docstring_are_a_list() -> None:
    """Lines of names and meanings ran into one paragraph."""
    import site_docstrings

    text = "First line.\n\ncausal    True, or\n          more\nout, spec   where\n\nThe end."
    assert site_docstrings.with_lists(text) == (
        "First line.\n\n\n- `causal`: True, or\n    more\n- `out`, `spec`: where\n\nThe end."
    )
    assert (
        site_docstrings.with_lists("One two.\n\n    code  here\n") == "One two.\n\n    code  here"
    )


def test_the_site_can_be_searched_and_its_tables_sorted(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {entry["title"] for entry in index["docs"] if "softcap" in entry["text"]}
    assert len(titles) > 3
    assert 'src="site/tables.js"' in (site / "benchmarks.html").read_text()


def test_llms_txt_names_every_page_with_its_markdown(site: Path) -> None:
    llms = (site / "llms.txt").read_text()
    assert llms.startswith("# Warploom\n\n> ")
    (base,) = set(re.findall(r"\((https://[^)]*?/)index\.md\)", llms))
    addresses = [link.removeprefix(base) for link in re.findall(r"\((https://[^)]*)\)", llms)]
    assert [one for one in addresses if not (site / one).is_file()] == []
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    pages = {one for one in pages if not one.startswith("source/") and one != "404.html"}
    assert pages == {re.sub(r"\.md$", ".html", one) for one in addresses}
    assert "| --- |" in (site / "guide.md").read_text()


def test_links_of_the_repository_become_links_of_the_site() -> None:
    import site_text

    def page(text: str, place: str, document: str) -> str:
        return site_text.converted(text, place, document).strip()

    assert page("[a](docs/guide.md#b)", "index.md", "README.md") == "[a](guide.md#b)"
    assert page("[a](../README.md)", "fp8.md", "docs/fp8.md") == "[a](index.md)"
    toy = "[a](../tests/toy)"
    assert page(toy, "adding-a-family.md", "docs/adding-a-family.md") == "[a](source/tests/toy.md)"
    assert page("[a](../x.md)", "families/y.md", "docs/families/y.md") == "[a](../x.md)"
    for same in ("[a](https://b.c)", "[a](#b)", "```text\n[a](docs/b.md)\n```"):
        assert page(same, "index.md", "README.md") == same
    assert page("Text:\n- item", "index.md", "README.md") == "Text:\n\n- item"
    assert page("- a\n- b", "index.md", "README.md") == "- a\n- b"
    gpu = "```python gpu\nx\n```"
    assert page(gpu, "guide.md", "docs/guide.md").startswith('```python title="needs a Hopper GPU"')
