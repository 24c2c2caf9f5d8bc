"""tools/release.py refuses what is no release, and pyproject.toml has what a release needs."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import release
import yaml
from click.testing import CliRunner

import warploom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TODAY = datetime.date(2026, 12, 1)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository that may be released as 0.2.0."""
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## 0.2.0 (2026-12-01)\n\n- New.\n\n## 0.1.0\n"
    )
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    release.git("init", "--quiet", root=tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(root: Path) -> None:
    release.git("add", ".", root=root)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    release.git(*author, "commit", "--quiet", "--message", "Change", root=root)


def test_a_clean_tree_with_a_dated_section_may_be_released(clone: Path) -> None:
    assert [*release.mistakes("0.2.0", clone, TODAY)] == []


def test_a_version_that_is_no_release_is_refused(clone: Path) -> None:
    (mistake,) = release.mistakes("0.2.0rc1", clone, TODAY)
    assert "0.2.0rc1 is not three numbers" in mistake


def test_a_tree_with_changes_is_refused_by_their_names(clone: Path) -> None:
    """A tag would name a commit that is not what was built."""
    (clone / "more.txt").write_text("")
    (mistake,) = release.mistakes("0.2.0", clone, TODAY)
    assert "more.txt" in mistake and "not clean" in mistake


def test_a_tag_that_exists_is_refused(clone: Path) -> None:
    release.git("tag", "v0.2.0", root=clone)
    (mistake,) = release.mistakes("0.2.0", clone, TODAY)
    assert "tag v0.2.0 exists" in mistake


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("## Unreleased", "begins with the section 'Unreleased'"),
        ("## 0.2.0", "begins with the section '0.2.0'"),
        ("## 0.2.0 (2026-11-30)", "dates 0.2.0 to 2026-11-30"),
    ],
)
def test_a_changelog_without_todays_section_is_refused(
    section: str, message: str, clone: Path
) -> None:
    path = clone / "CHANGELOG.md"
    path.write_text(path.read_text().replace("## 0.2.0 (2026-12-01)", section))
    commit(clone)
    (mistake,) = release.mistakes("0.2.0", clone, TODAY)
    assert message in mistake and "`## 0.2.0 (2026-12-01)`" in mistake


def test_a_citation_of_another_version_is_refused(clone: Path) -> None:
    (clone / "CITATION.cff").write_text("version: 0.1.0\n")
    commit(clone)
    (mistake,) = release.mistakes("0.2.0", clone, TODAY)
    assert "CITATION.cff names another version" in mistake


def test_the_command_lists_all_that_is_wrong_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "mistakes", lambda version: iter(["One.", "Two."]))
    monkeypatch.setattr(release, "build", lambda version: pytest.fail("it was built"))
    done = CliRunner().invoke(release.main, ["0.2.0"])
    assert done.exit_code == 1
    assert done.stderr == "Error: this commit cannot be released.\n  One.\n  Two.\n"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_release_tags_and_a_dry_run_does_not(
    dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(release, "mistakes", lambda version: iter(()))
    monkeypatch.setattr(release, "build", lambda version: [Path("dist/warploom-0.2.0.tar.gz")])
    monkeypatch.setattr(release, "git", lambda *arguments: ran.append(arguments))
    done = CliRunner().invoke(release.main, ["0.2.0", *(["--dry-run"] if dry_run else [])])
    assert done.exit_code == 0, done.output
    assert [words[0] for words in ran] == ([] if dry_run else ["tag"])
    assert "git push origin main v0.2.0" in done.stdout
    assert "twine upload dist/warploom-0.2.0.tar.gz" in done.stdout
    assert ("replace the placeholders" in done.stdout) == bool(release.placeholders())


def test_links_of_the_readme_lead_to_the_repository_on_pypi() -> None:
    """PyPI shows the README alone: 17 links and a picture led nowhere."""
    readme = (
        "[a](docs/a.md#b) [c](#c) [d](https://d.org) ![p](docs/p.svg) [![q](docs/q.svg)](docs/q.md)"
    )
    assert release.absolute(readme, "https://r", "v1.0.0") == (
        "[a](https://r/blob/v1.0.0/docs/a.md#b) [c](#c) [d](https://d.org) "
        "![p](https://r/raw/v1.0.0/docs/p.svg) "
        "[![q](https://r/raw/v1.0.0/docs/q.svg)](https://r/blob/v1.0.0/docs/q.md)"
    )
    whole = release.absolute((ROOT / "README.md").read_text(), "https://r", "v1.0.0")
    assert "](docs/" not in whole and "](CHANGELOG.md" not in whole


def test_all_is_every_extra_that_is_of_use_at_run_time() -> None:
    extras = PROJECT["optional-dependencies"]
    tools = {"all", "dev", "docs", "release"}
    (alone,) = extras["all"]
    assert alone == f"warploom[{','.join(sorted(extras.keys() - tools))}]"


def test_the_version_is_that_of_the_installed_package() -> None:
    """It was 0.1.0 for every commit."""
    assert "version" in PROJECT["dynamic"]
    code = "import sys, warploom; print(warploom.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [warploom.__version__, "False"]
    assert warploom.__version__[0].isdigit()


def test_the_tests_have_what_the_site_is_built_of() -> None:
    """Without the extra, the tests of the site would be skipped."""
    assert "-e '.[nvrtc,dev,docs]'" in (ROOT / "Makefile").read_text()


def test_the_workflow_runs_what_continuous_integration_runs_and_the_site() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    steps = {
        name: " ".join(step.get("run", "") for step in job["steps"])
        for name, job in workflow["jobs"].items()
    }
    assert steps.keys() == {"test", "wheel", "docs"}
    assert ".ci/run" in steps["test"] and "mkdocs build" in steps["docs"]
    assert "twine check --strict" in steps["wheel"]
