"""The documents keep their word: commands, programs, tutorials and notebooks run as they are
written, and messages exist.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import notebooks
import pytest
import shell
from goldens import texts

import warploom
from benchmarks import runner
from benchmarks.report import anchor
from warploom.cli import COMMANDS, EXIT_CODES
from warploom.generator import families
from warploom.generator.config_reference import renewed
from warploom.integrations.recipes import RECIPES

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
FAMILY_PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "families").glob("*.md")}
README = (ROOT / "README.md").read_text()
PAGES = {"guide": GUIDE, **dict(sorted(FAMILY_PAGES.items()))}
MODELS, FP8, CHECKPOINTS = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("models", "fp8", "checkpoints")
)
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
TUTORIALS = {path.stem: path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md")}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LINES = 110  # of a tutorial, at most
SECTIONS = ("Calling it", "Numerics", "Limits", "Choosing a schedule", "Every field", "Messages")
FUNCTIONS = ("produce", "consume")  # of every kernel that has a producer, called by its entry
ROOMS = ("src/warploom", "generator", "integrations", "quantization", "runtime", "tuning")


def blocks(text: str, language: str) -> list[str]:
    """The contents of the code blocks marked exactly so."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    """What stands below a heading `## title`, up to the next."""
    return re.split(r"\n##? ", text.partition(f"\n## {title}\n")[2])[0]


def first_column(text: str, header: str = "") -> list[str]:
    """The words in backticks that begin the rows of the tables whose first cell is `header`."""
    tables = re.findall(rf"^\| {header}.*\n\| ---.*\n((?:\|.*\n?)*)", text, re.MULTILINE)
    rows = re.findall(r"^\| (`.*?`) \|", "".join(tables), re.MULTILINE)
    return [word for row in rows for word in re.findall(r"\w+", row)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every configuration that the guide and the families' pages say to save."""
    folder = tmp_path_factory.mktemp("guide")
    for page in PAGES.values():
        for block in blocks(page, "yaml"):
            (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return folder


def test_every_command_that_needs_no_gpu_works(folder: Path) -> None:
    lines = "".join(block for page in PAGES.values() for block in blocks(page, "console"))
    commands = [line.removeprefix("$ ") for line in lines.splitlines() if line.startswith("$ ")]
    assert len(commands) > 10
    for command in commands:
        done = shell.run(command, folder)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.parametrize("page", [*PAGES, "models", "fp8", "checkpoints"])
def test_every_program_that_needs_no_gpu_works(page: str, folder: Path) -> None:
    text = (PAGES | {"models": MODELS, "fp8": FP8, "checkpoints": CHECKPOINTS})[page]
    (folder / f"{page}_program.py").write_text("\n".join(blocks(text, "python")))
    done = shell.run(f"python -m {page}_program", folder)
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_what_its_program_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, compiled kernels or own records, as `benchmarks.readme` renews it."""
    for name in ("WARPLOOM_CACHE_DIR", "WARPLOOM_RECORDS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "readme_program.py").write_text("\n".join(blocks(README, "python")))
    done = shell.run("python -m readme_program", tmp_path)
    assert done.returncode == 0, done.stderr
    assert blocks(README, "text") == [done.stdout.strip() + "\n"], (
        "python -m benchmarks.readme --write README.md"
    )


def test_every_recipe_is_told() -> None:
    told = first_column(section(FP8, "Train in fp8"), "recipe")
    assert {*told} == {*RECIPES} and told[: len(RECIPES)] == [*RECIPES]


@pytest.mark.parametrize("page", PAGES)
def test_every_message_of_a_page_is_one_that_is_raised(page: str) -> None:
    sources = "".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message may span lines of source
    table = PAGES[page].partition("## Troubleshooting" if page == "guide" else "## Messages")[2]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert messages
    assert [message for message in messages if message not in joined] == []


def test_every_family_has_a_page_and_the_guide_leads_to_it() -> None:
    assert FAMILY_PAGES.keys() == set(families.names())
    assert [name for name in FAMILY_PAGES if f"](families/{name}.md)" not in GUIDE] == []


@pytest.mark.parametrize("name", FAMILY_PAGES)
def test_the_page_of_a_family_has_what_people_look_for(name: str) -> None:
    assert [title for title in SECTIONS if not section(FAMILY_PAGES[name], title)] == []


@pytest.mark.parametrize("name", FAMILY_PAGES)
def test_the_tables_of_fields_are_those_of_the_dataclasses(name: str) -> None:
    page = FAMILY_PAGES[name]
    assert renewed(page) == page, f"`warploom schema --write docs/families/{name}.md` renews them"
    assert f"**A schedule of `{name}`**" in section(page, "Every field")


@pytest.mark.parametrize("name", FAMILY_PAGES)
def test_every_field_of_a_schedule_has_advice(name: str) -> None:
    told = first_column(section(FAMILY_PAGES[name], "Choosing a schedule"), "field")
    assert sorted(told) == sorted(field.name for field in fields(families.family(name).schedule))


def test_every_keyword_of_a_call_is_told_once() -> None:
    """On the pages together whose titles name the call: gradients have keywords of their own."""
    told: dict[str, list[str]] = {}
    for page in FAMILY_PAGES.values():
        (call,) = re.findall(r"^# .*`warploom\.(\w+)`$", page, re.MULTILINE)
        told.setdefault(call, []).extend(first_column(section(page, "Calling it"), "keyword"))
    for call, keywords in told.items():
        parameters = inspect.signature(getattr(warploom, call)).parameters.values()
        expected = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        assert sorted(keywords) == sorted(expected), call


def test_commands_that_need_a_gpu_have_the_options_that_they_are_given() -> None:
    text = "\n".join((PAGE, *PAGES.values()))
    programs = r"^\$ (python -m benchmarks\.\w+|warploom bench) (.*)"
    commands = re.findall(programs, text, re.MULTILINE)
    assert commands
    for program in dict(commands):
        done = shell.run(f"{program} --help", ROOT)
        given = " ".join(arguments for other, arguments in commands if other == program)
        missing = set(re.findall(r"--\w+", given)) - set(re.findall(r"--\w+", done.stdout))
        assert missing == set(), (program, done.stderr)


def test_what_is_told_to_be_measured_has_cells() -> None:
    text = "\n".join((PAGE, *PAGES.values()))
    for line in re.findall(r"^\$ warploom bench (.*)", text, re.MULTILINE):
        offered = runner.offered(runner.named(line.partition(" --")[0].split()))
        for option, told in re.findall(r"--(cells|peers|types) (\S+)", line):
            assert set(told.split(",")) <= set(offered[option]), line


def test_every_variable_of_the_guide_is_read_and_the_other_way_round() -> None:
    sources = "".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    variables = set(re.findall(r"WARPLOOM_[A-Z_]+", sources))
    assert variables == set(re.findall(r"^\| `(WARPLOOM_[A-Z_]+)`", GUIDE, re.MULTILINE))


def test_the_contents_of_the_guide_are_its_headings_in_order() -> None:
    prose = re.sub(r"^```.*?^```$", "", GUIDE, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^##? (.*)$", prose, re.MULTILINE)[1:]
    contents = prose.partition("\n# ")[0]
    assert re.findall(r"\]\(#(.*?)\)", contents) == [anchor(heading) for heading in headings]


def test_the_commands_and_exit_codes_of_the_guide_are_those_there_are() -> None:
    told = GUIDE.partition("## Commands")[2].partition("\n# ")[0]
    assert sorted(re.findall(r"^\| `warploom (\w+)", told, re.MULTILINE)) == sorted(COMMANDS)
    codes = re.findall(r"^\| (\d+) \| (.*) \|$", told, re.MULTILINE)
    assert codes == [(str(code), meaning) for code, meaning in EXIT_CODES.items()]


def test_every_sample_kernel_is_laid_out_as_the_guide_says() -> None:
    with_roles = 0
    for kernel, text in texts().items():
        entry = text.index(f"{kernel}(const __grid_constant__")
        if "// ---- Producer" in text:
            produce, consume = (
                text.index(f"void {name}(const Parameters& p") for name in FUNCTIONS
            )
            assert produce < consume < entry, kernel
            with_roles += 1
    assert with_roles > 40  # all but small kernels


def test_links_between_documents_lead_to_a_file_and_a_heading() -> None:
    documents = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    links = [
        (document, *target.partition("#")[::2])
        for document in documents
        for target in re.findall(r"\]\(([^):]+)\)", document.read_text())
    ]
    assert sum(bool(heading) for *_, heading in links) > 10
    assert [link for link in links if not leads_somewhere(*link)] == []


def leads_somewhere(document: Path, file: str, heading: str) -> bool:
    target = document.parent / file if file else document
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return heading in map(anchor, headings)


# ---- Tutorials and notebooks ---------------------------------------------------------------------


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says to save is there; its program runs and prints what it says; its commands run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tutorial = TUTORIALS[name]
    for block in blocks(tutorial, "yaml"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    (tmp_path / "tutorial.py").write_text("\n".join(blocks(tutorial, "python")))
    commands = "".join(blocks(tutorial, "console")).splitlines()
    assert all(line.startswith("$ ") for line in commands)
    for command in ("python -m tutorial", *(line.removeprefix("$ ") for line in commands)):
        done = shell.run(command, tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command == "python -m tutorial":
            assert all(output in done.stdout for output in blocks(tutorial, "text"))


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_short_says_what_it_is_for_and_what_comes_next(name: str) -> None:
    lines = TUTORIALS[name].splitlines()
    assert len(lines) <= LINES
    assert lines[0].startswith("# ") and lines[2][0].isupper()
    assert "## Next" in lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = json.loads(path.read_text())
    (tmp_path / "notebook.py").write_text(notebooks.program(document))
    done = shell.run("python -m notebook", tmp_path)
    assert done.returncode == 0, done.stderr
    stored = [notebooks.shown(cell) for cell in notebooks.code(document)]
    assert len(stored) > 4
    assert notebooks.printed(done.stdout) == stored, (
        "python tools/notebooks.py docs/notebooks/*.ipynb"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_reads(path: Path) -> None:
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    identities = [cell["id"] for cell in document["cells"]]
    assert len(set(identities)) == len(identities)
    assert "".join(document["cells"][0]["source"]).startswith("# ")
    assert all({"execution_count", "outputs"} <= cell.keys() for cell in notebooks.code(document))
