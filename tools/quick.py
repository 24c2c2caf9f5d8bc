"""Format, lint, types, and the tests of what was changed: `make quick`.

What was changed is what differs from where the branch left BASE, in commits or not. Tests that are
among the slowest run only where they were changed themselves: `make test` runs all.
"""

# ruff: noqa: S603, S607 (git, and tools of this environment)

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import click
import yaml

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]

import module_graph  # noqa: E402

ALWAYS = ("tests/unit/test_hygiene.py", "tests/unit/test_imports.py")
# What holds of a file that no test imports, by the beginning of its path.
HELD = {
    "templates/": ("tests/golden/test_golden.py",),
    "configs/": ("tests/unit/test_configurations.py",),
    "docs/": ("tests/unit/test_pages.py", "tests/unit/test_site.py"),
    "docs/notebooks/": ("tests/unit/test_guide.py",),
    "docs/tutorials/": ("tests/unit/test_guide.py",),
    "mkdocs.yml": ("tests/unit/test_site.py",),
    "Makefile": ("tests/unit/test_makefile.py",),
    "pyproject.toml": ("tests/unit/test_packaging.py", "tests/unit/test_release.py"),
}
WITH_FAMILIES = ("generator", "runtime", "templates", "configs")  # where a family has a folder
MOST = 40  # files of tests that import one changed module; where there are more, none tells much
WORKERS = 2


def changed(base: str, root: Path = ROOT) -> list[str]:
    """Return the paths of files that differ from where HEAD left `base`, and of untracked ones."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"git {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    (left,) = git("merge-base", base, "HEAD")
    tracked = git("diff", "--name-only", "--no-renames", left)
    return sorted({*tracked, *git("ls-files", "--others", "--exclude-standard")})


# ---- Which tests ---------------------------------------------------------------------------------


def touched(files: Iterable[str], slow: Collection[str] = (), root: Path = ROOT) -> list[str]:
    """Return the files of tests that changed files touch; of `slow` only those that are changed.

    A changed module touches tests that import it themselves, tests of its name and of its family,
    and those that notice a seeded fault in it; a helper of tests those that import it in any way.
    """
    files = [*files]
    chosen = {file for one in files for file in _touched(one, root)}
    chosen |= {file for file in ALWAYS if files}
    kept = {file for file in chosen if file not in slow or file in files}
    return sorted(file for file in kept if (root / file).is_file() and "/gpu/" not in file)


def _touched(file: str, root: Path) -> Iterator[str]:
    path = Path(file)
    tests = tests_of(root)
    if file in tests:
        yield file
    if path.name == "conftest.py":
        yield from (test for test in tests if path.parent == Path(test).parent)
    yield from (test for start, held in HELD.items() if file.startswith(start) for test in held)
    yield from _noticed(root).get(file, ())
    for test in tests:
        parts = Path(test).parts
        if parts[1] == "families" and path.parts[0] != "tests":
            own = parts[2] in path.parts or parts[2] == path.stem
            # A family's page and its benchmarks have tests of these names, and no others.
            named = Path(test).stem in ("test_page", "test_bench")
            if own and (named or path.parts[0] in WITH_FAMILIES):
                yield test
    if path.suffix == ".py":
        module, stem = _module(path), path.stem
        names = re.compile(
            rf"tests/(?:{path.parts[0]}/|unit/)test_(?:{path.parts[0]}_)?{stem}(_|\.)"
        )
        yield from filter(names.match, tests)
        importing = [test for test, imports in tests.items() if module in imports]
        yield from importing if len(importing) <= MOST else ()


def _module(path: Path) -> str:
    """Return how tests import a file: helpers of theirs and tools by name alone."""
    if path.parts[0] in ("tests", "tools"):
        return path.stem
    package = () if path.parts[0] in ("benchmarks", "examples") else (module_graph.PACKAGE,)
    parts = path.parts[2:] if path.parts[0] == "src" else path.parts
    names = [*package, *parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
    return ".".join(names)


@cache
def tests_of(root: Path) -> Mapping[str, set[str]]:
    """Return what each file of tests imports, and the helpers of tests that these import, too."""
    files = [path for path in (root / "tests").rglob("*.py") if "gpu" not in path.parts]
    imports = {path: _imports(path) for path in files}
    helpers = {path.stem: imports[path] for path in files if not path.stem.startswith("test_")}

    def reached(path: Path) -> set[str]:
        names, ahead = set(imports[path]), imports[path] & helpers.keys()
        while ahead:
            new = (helpers[ahead.pop()] & helpers.keys()) - names
            names |= new
            ahead |= new
        return names

    tests = sorted(path for path in files if path.stem.startswith("test_"))
    return {path.relative_to(root).as_posix(): reached(path) for path in tests}


def _imports(path: Path) -> set[str]:
    """Return what a file of tests imports, and of `from a import b` both a and a.b."""
    names = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in module_graph.imported(node, "", is_package=False)
    }
    return names | {name.rpartition(".")[0] for name in names}


@cache
def _noticed(root: Path) -> Mapping[str, set[str]]:
    """Return which tests notice the seeded faults of a file."""
    noticed: dict[str, set[str]] = {}
    for fault in yaml.safe_load((root / "tests" / "faults.yaml").read_text()):
        noticed.setdefault(fault["file"], set()).update(fault["caught_by"])
    return noticed


def slowest(root: Path = ROOT) -> set[str]:
    """Return the files of tests that take longest, as tests/conftest.py lists them."""
    tree = ast.parse((root / "tests" / "conftest.py").read_text())
    (files,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LONGEST"
    )
    return {f"tests/{file}" for file in files}


# ---- What is run ---------------------------------------------------------------------------------


def commands(files: list[str], tests: list[str]) -> dict[str, list[str]]:
    """Return what is run side by side, by what it is called."""
    tools = Path(sys.executable).parent
    python = [file for file in files if file.endswith(".py") and (ROOT / file).is_file()]
    run = {"ruff check": [str(tools / "ruff"), "check", "."]}
    if python:
        run["ruff format"] = [str(tools / "ruff"), "format", "--check", *python]
    if any(re.match(r"(src|benchmarks|[a-z]+)/.*\.py$", file) for file in files):
        run["mypy"] = [str(tools / "mypy"), "--num-workers", "1", "-p", "warploom"]
        run["mypy"] += ["-p", "benchmarks"]
    if tests:
        run["pytest"] = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *tests]
        if len(tests) > WORKERS:
            run["pytest"] += ["-n", str(WORKERS), "--dist", "loadfile"]
    return run


@click.command()
@click.argument("base", default="main")
@click.option("--list", "lists", is_flag=True, help="Only print which tests would run.")
def main(base: str, lists: bool) -> None:
    """Check what differs from where this branch left BASE; exit status 1 where anything fails."""
    began = time.monotonic()
    files = changed(base)
    slow = slowest()
    tests = touched(files, slow)
    left = sorted({*touched(files)} - {*tests})
    click.echo(f"{len(files)} files changed since {base}, {len(tests)} files of tests")
    if left:
        click.echo(f"left to `make test`, as they are slow: {' '.join(left)}")
    if lists:
        click.echo("\n".join(tests))
        return
    running = {
        name: subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, command in commands(files, tests).items()
    }
    failed = []
    for name, process in running.items():
        output, _ = process.communicate()
        failed += [name] if process.returncode else []
        if process.returncode or name == "pytest":
            click.echo(f"---- {name}\n{output}", nl=False)
    click.echo(f"{', '.join(failed) or 'nothing'} failed, {time.monotonic() - began:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
