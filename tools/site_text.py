"""How a document becomes a page of the site: links of the repository, fences, lists; and llms.txt.

A hook of MkDocs, as `mkdocs.yml` names it. Documents are written to be read in the repository as
well: there a link leads to a file, here to the page of this file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from site_pages import LINKED, ROOT_PAGES, resolved

FENCE = re.compile(r"^(`{3,})(.*)$")
NEEDS_GPU = ' title="needs a Hopper GPU"'
LIST_ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
_navigation: list[Navigation] = []  # of the build that runs: MkDocs hands it to no later hook


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the navigation for llms.txt."""
    _navigation[:] = [nav]
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page, with what GitHub reads otherwise than Python-Markdown."""
    place = page.file.src_uri
    if page.parent is None:  # alone in its tab: what would list it has nothing to list
        page.meta.setdefault("hide", ["navigation"])
    if place.startswith("source/"):
        return markdown
    documents = {page: file for file, page in ROOT_PAGES.items()}
    return converted(markdown, place, documents.get(place, f"docs/{place}"))


def converted(text: str, place: str, document: str) -> str:
    """Return the text of `document`, a file of the repository, as the page at `place`."""
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        opened = FENCE.match(line)
        if opened and not fence:
            fence = opened.group(1)
            lines.append(re.sub(r"^(`+\w+) gpu$", rf"\1{NEEDS_GPU}", line))
        elif fence:
            fence = "" if line.strip() == fence else fence
            lines.append(line)
        else:
            if LIST_ITEM.match(line) and lines and begins_a_list(lines[-1]):
                lines.append("")  # GitHub takes a list that follows a paragraph without it
            if line.startswith("<!--"):
                lines.append("")  # below a table it would be one more row
            lines.append(linked(line, place, document))
    return "\n".join(lines) + "\n"


def begins_a_list(before: str) -> bool:
    """Return whether an item below a line begins a list: above is text of a paragraph."""
    return (
        bool(before) and not before.startswith((" ", "#", "|", "<")) and not LIST_ITEM.match(before)
    )


def linked(line: str, place: str, document: str) -> str:
    """Return a line whose links to files of the repository lead to their pages."""

    def replaced(match: re.Match[str]) -> str:
        target, mark, heading = match.group(1).partition("#")
        if not target or ":" in target:
            return match.group()
        page = page_of(resolved(target, document))
        return f"]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{mark}{heading})"

    return LINKED.sub(replaced, line)


def page_of(file: str) -> str:
    """Return where the site shows a file of the repository, from the root of the site."""
    if file in ROOT_PAGES:
        return ROOT_PAGES[file]
    if file.endswith(".ipynb"):
        file = f"{file.removesuffix('.ipynb')}.md"
    return file.removeprefix("docs/") if f"{file}/".startswith("docs/") else f"source/{file}.md"


# ---- For language models -------------------------------------------------------------------------


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, which names every page, and the Markdown of pages next to their HTML."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, pages in sections(_navigation[0]):
        lines += [f"## {title}", ""]
        for page in pages:
            place = page.file.dest_uri
            if not place.startswith("api/"):  # of which the Markdown says only what to show
                place = Path(place).with_suffix(".md").as_posix()
                (site / place).write_text(page.markdown or "")
            summary = first_sentence(page.markdown or "")
            address = f"{config.site_url}{place}"
            lines.append(f"- [{page.title}]({address}){f': {summary}' if summary else ''}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))


def sections(navigation: Navigation) -> Iterator[tuple[str, list[Page]]]:
    """Yield the parts of the navigation: pages at the top together, then each section."""
    yield "Pages", [one for one in navigation.items if isinstance(one, Page)]
    for item in navigation.items:
        if isinstance(item, Section):
            yield item.title, [one for one in item.children if isinstance(one, Page)]


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without links."""
    paragraphs = (one for one in re.split(r"\n\s*\n", text) if re.match(r"[\w`*]", one))
    paragraph = " ".join(next(paragraphs, "").split())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=[.]) (?=[A-Z`])", plain)[0][:300]
