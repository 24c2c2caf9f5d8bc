"""Pages of the site that are generated: front page, API, commands, notebooks, files of the clone.

A hook of MkDocs, as `mkdocs.yml` names it. Nothing generated is written into docs/. What a page is
made of decides what it says: README.md, the names in `warploom.__all__` and their docstrings, the
commands' --help, the cells of notebooks.
"""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages of files that stay where they are at the root of the repository, by that file.
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
}
# Pages of the API, by the beginning of the names of the modules that define what is public.
GROUPS = {
    "warploom.runtime.families": ("kernels", "Kernels", "Functions on tensors, one kernel each."),
    "warploom.integrations": (
        "models",
        "Models",
        "What lets models of PyTorch and transformers run on Warploom's kernels.",
    ),
    "warploom.quantization": ("quantization", "Quantization", "Weights in 2 to 8 bits, and 2:4."),
    "warploom.runtime": ("inspection", "Inspection", "Which kernel a call runs, and why."),
    "warploom.reports": ("inspection", "Inspection", "Which kernel a call runs, and why."),
    "warploom.generator": ("inspection", "Inspection", "Which kernel a call runs, and why."),
    "warploom.tuning": ("tuning", "Tuning", "Online autotuning, and recording of calls."),
    "warploom.errors": ("errors", "Errors", "Exceptions, all of them `warploom.WarploomError`."),
}
# Modules that are imported by their own names; those of `warploom.__all__` come by themselves.
MODULES = ("flash_attn", "flashinfer", "float8", "quantization.importers")
HELP_WIDTH = 84
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
LINKED = re.compile(r"\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take addresses from pyproject.toml, and list pages that nobody lists by hand."""
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))  # MkDocs forgets what a hook adds while it is loaded
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url = urls["Documentation"]
    nav: list[Any] = [*(config.nav or [])]
    entries = {title: pages for entry in nav for title, pages in entry.items()}
    entries["Kernels"] += [
        f"families/{path.name}" for path in sorted((ROOT / "docs" / "families").glob("*.md"))
    ]
    entries["API"] += [{"Overview": "api/index.md"}]
    entries["API"] += [{title: f"api/{name}.md"} for name, title, *_ in api()]
    entries["Tutorials"] += [page_of_notebook(path) for path in notebooks()]
    nav_text = json.dumps(nav)
    for path in sorted((ROOT / "docs").glob("*.md")):
        if f'"{path.name}"' not in nav_text:
            entries["Guides"].append(path.name)
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is generated."""
    pages = {page: root_page(file) for file, page in ROOT_PAGES.items()}
    pages |= {f"api/{name}.md": text for name, _, text in api()}
    pages["api/index.md"] = overview()
    pages["commands.md"] = commands()
    pages |= {page_of_notebook(path): notebook(path) for path in notebooks()}
    pages |= {f"source/{path}.md": source(path) for path in linked_sources()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


# ---- Files of the repository ---------------------------------------------------------------------


def root_page(file: str) -> str:
    """Return the text of a file at the root of the repository, as a page."""
    text = (ROOT / file).read_text()
    return text if file.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"


def resolved(target: str, document: str) -> str:
    """Return what a relative link in a document leads to, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), target))


def linked_sources() -> list[str]:
    """Return the files and folders, neither pages nor in docs/, that documents link to."""
    places = set()
    documents = [ROOT / name for name in ROOT_PAGES if name.endswith(".md")]
    for path in (*documents, *(ROOT / "docs").rglob("*.md")):
        document = path.relative_to(ROOT).as_posix()
        for link in LINKED.findall(path.read_text()):
            target = link.partition("#")[0]
            if target and ":" not in target:
                place = resolved(target, document)
                if place not in ROOT_PAGES and not f"{place}/".startswith("docs/"):
                    places.add(place)
    return sorted(one for one in places if (ROOT / one).exists())


def source(place: str) -> str:
    """Return the page that shows a file, or names what a folder has."""
    path = ROOT / place
    if path.is_file():
        language = {".py": "python", ".yaml": "yaml", ".jinja": "cpp"}.get(path.suffix, "text")
        return (
            f"{UNSEARCHED}# {path.name}\n\n`{place}`\n\n````{language}\n{path.read_text()}\n````\n"
        )
    pages = set(linked_sources())
    inner = sorted(
        one.relative_to(ROOT).as_posix()
        for one in path.rglob("*")
        if one.is_file() and "__pycache__" not in one.parts
    )
    rows = [
        f"- [`{one}`]({posixpath.relpath(one, posixpath.dirname(place))}.md)"
        if one in pages
        else f"- `{one}`"
        for one in inner
    ]
    return UNSEARCHED + "\n".join(
        [f"# {path.name}", "", f"`{place}`, a folder of the repository:", "", *rows]
    )


# ---- API -----------------------------------------------------------------------------------------


def api() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the title and the text of each page of the API."""
    package = importlib.import_module("warploom")
    members: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    modules = [*MODULES]
    for name in package.__all__:
        module = package._LAZY.get(name, "warploom.errors")
        if module == f"warploom.{name}":
            modules.append(name)
        elif not name.startswith("_"):
            start = max((one for one in GROUPS if module.startswith(one)), key=len)
            members[GROUPS[start]].append(name)
    for (page, title, summary), names in members.items():
        functions_first = sorted(names, key=lambda name: (name[0].isupper(), name))
        blocks = [documented(f"warploom.{name}") for name in functions_first]
        yield page, title, "\n".join([f"# {title}", "", summary, "", *blocks])
    for module in sorted(modules):
        blocks = [documented(f"warploom.{module}.{name}") for name in public(module)]
        title = f"warploom.{module}"
        yield module, title, "\n".join([f"# {title}", "", first_paragraph(module), "", *blocks])


def documented(name: str) -> str:
    """Return the block that makes mkdocstrings show an object of the package.

    Of an object that is called as a function, it is the object's class.
    """
    target = INSTANCES.get(name)
    if target is None:
        return f"::: {name}\n"
    return f"::: {target}\n    options:\n      heading: {name}\n      toc_label: {name}\n"


# Public objects that have a class of their own, so that they can do more than be called.
INSTANCES = {
    "warploom.sdpa": "warploom.integrations.sdpa.Sdpa",
    "warploom.counters": "warploom.runtime.counters.Counters",
    "warploom.grouped_mm": "warploom.integrations.grouped_mm.GroupedMM",
}


def module_text(module: str) -> str:
    """Return the source of a module of the package."""
    path = ROOT / "src" / "warploom" / Path(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def public(module: str) -> list[str]:
    """Return the names that a module offers."""
    match = re.search(r"^__all__ = \[(.*?)\]", module_text(module), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', match.group(1)) if match else []


def first_paragraph(module: str) -> str:
    """Return the first paragraph of a module's docstring."""
    return re.split(r'"""|\n\n', module_text(module))[1]


def overview() -> str:
    """Return the page that lists all of the API."""
    rows = [f"- [{title}]({name}.md)" for name, title, _ in api()]
    summary = (
        "Everything public, made from docstrings. `import warploom` loads neither torch nor the "
        "runtime: a name loads what it needs when it is first used."
    )
    return "\n".join(["# API", "", summary, "", *rows, ""])


# ---- Commands ------------------------------------------------------------------------------------


def commands() -> str:
    """Return the page of all commands: what `--help` prints."""
    from warploom.cli import main

    summary = (
        "What `--help` of each command prints. The [guide](guide.md#commands) has the exit codes."
    )
    parts = ["# Commands", "", summary, ""]
    for path, command in every_command(main, ()):
        title = " ".join(("warploom", *path))
        context = click.Context(
            command,
            info_name=title,
            terminal_width=HELP_WIDTH,
            help_option_names=main.context_settings["help_option_names"],
        )
        parts += [f"## {title}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(parts)


def every_command(
    group: click.Group, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield all commands that do something, with the words that name them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        elif command:
            yield (*path, name), command


# ---- Notebooks -----------------------------------------------------------------------------------


def notebooks() -> list[Path]:
    """Return the notebooks of docs/notebooks."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def page_of_notebook(path: Path) -> str:
    """Return the address of the page that shows a notebook."""
    return f"notebooks/{path.stem}.md"


def notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, code and printed results."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = "".join(printed_by(cell))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    summary = (
        f'This page is a notebook: <a href="{path.name}" download>{path.name}</a> runs on any '
        "machine, on a CPU."
    )
    return f"{title}\n\n{summary}\n{rest}\n"


def printed_by(cell: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a cell printed."""
    for output in cell.get("outputs", ()):
        yield "".join(output.get("text", ()))
