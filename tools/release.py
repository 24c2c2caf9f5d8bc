"""Make a release: check, build wheel and sdist, check them by twine, and tag the commit.

    python tools/release.py 0.2.0 --dry-run
    python tools/release.py 0.2.0

It changes nothing but dist/ and, without --dry-run, the tags of this clone. It pushes and
uploads nothing: it prints the commands that do.
"""

# ruff: noqa: S603, S607 (git, and tools of this environment)

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
PLACEHOLDER = "example.org"
RELATIVE_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!#)([^):\s]+)\)")


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


# ---- Checks --------------------------------------------------------------------------------------


def mistakes(version: str, root: Path = ROOT, today: datetime.date | None = None) -> Iterator[str]:
    """Yield what keeps a checkout from being released as a version, each with its fix."""
    if not VERSION.fullmatch(version):
        yield f"The version {version} is not three numbers. Give one such as 0.2.0."
        return
    if changed := git("status", "--porcelain", root=root):
        files = ", ".join(line[2:].strip() for line in changed.splitlines()[:5])
        yield f"The tree is not clean: {files}. Commit or remove these files."
    if git("tag", "--list", f"v{version}", root=root):
        yield f"The tag v{version} exists. Choose another version, or delete the tag."
    yield from _mistakes_of_changelog(version, root, today or datetime.date.today())
    cited = (root / "CITATION.cff").read_text()
    if f"\nversion: {version}\n" not in cited:
        yield f"CITATION.cff names another version. Write `version: {version}` there."


def _mistakes_of_changelog(version: str, root: Path, today: datetime.date) -> Iterator[str]:
    titles = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    title = titles[0] if titles else ""
    match = re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", title)
    heading = f"## {version} ({today.isoformat()})"
    if not match:
        yield f"CHANGELOG.md begins with the section {title!r}. It must be `{heading}`."
    elif match[1] != today.isoformat():
        yield f"CHANGELOG.md dates {version} to {match[1]}. Today it must be `{heading}`."


def placeholders(root: Path = ROOT) -> list[str]:
    """Return the addresses of [project.urls] that lead nowhere."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    return [f"{name} = {url}" for name, url in urls.items() if PLACEHOLDER in url]


# ---- Packages ------------------------------------------------------------------------------------


def absolute(readme: str, repository: str, tag: str) -> str:
    """Return a README whose links to files lead to the repository, as PyPI needs them."""

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        inner = RELATIVE_LINK.sub(replaced, text)  # a picture that is a link
        view = "raw" if image else "blob"
        return f"{image}[{inner}]({repository}/{view}/{tag}/{target})"

    return RELATIVE_LINK.sub(replaced, readme)


def build(version: str, root: Path = ROOT) -> list[Path]:
    """Build wheel and sdist of the commit into dist/, from a clone of its own, and check them."""
    repository = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"][
        "Repository"
    ]
    out = root / "dist"
    with TemporaryDirectory() as folder:
        git("clone", "--quiet", str(root), folder, root=root)
        readme = Path(folder, "README.md")
        readme.write_text(absolute(readme.read_text(), repository, f"v{version}"))
        environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_WARPLOOM": version}
        command = [sys.executable, "-m", "build", "--outdir", str(out), folder]
        subprocess.run(command, env=environment, check=True)
    files = sorted(out.glob(f"warploom-{version}[-.]*"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    return files


def next_steps(version: str, files: list[Path], root: Path = ROOT) -> Iterator[str]:
    """Yield what is left to do by hand."""
    if urls := placeholders(root):
        yield "Before anything is uploaded, replace the placeholders of [project.urls]:"
        yield from (f"  {one}" for one in urls)
        yield "and make the release again."
    yield "Then:"
    yield f"  git push origin main v{version}"
    yield f"  python -m twine upload {' '.join(f'dist/{file.name}' for file in files)}"
    yield f"  mike deploy --push --update-aliases {version.rpartition('.')[0]} latest"
    yield "  in pyproject.toml: fallback_version to the next version, with .dev0"
    yield "  in CHANGELOG.md: a new section `## Unreleased`"


@click.command()
@click.argument("version")
@click.option("--dry-run", is_flag=True, help="Check and build, and make no tag.")
def main(version: str, dry_run: bool) -> None:
    """Release the commit that is checked out as VERSION, such as 0.2.0."""
    if problems := [*mistakes(version)]:
        raise click.ClickException("\n  ".join(["this commit cannot be released.", *problems]))
    files = build(version)
    if not dry_run:
        git("tag", "--annotate", f"v{version}", "--message", f"Warploom {version}")
        click.echo(f"Tagged v{version}.")
    for line in next_steps(version, files):
        click.echo(line)


if __name__ == "__main__":
    main()
