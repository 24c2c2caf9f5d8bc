"""The documents keep their word: their commands and programs run, their messages exist."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch

import warploom
from benchmarks.peers import KINDS
from benchmarks.report import anchor
from warploom.cli import COMMANDS, EXIT_CODES
from warploom.generator.config_reference import MARKERS, reference
from warploom.generator.families.gemm import GemmSchedule
from warploom.generator.markdown import insert
from warploom.generator.space import expand_file

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
FUNCTIONS = ("produce", "consume")  # of every kernel, called by its entry
ROOMS = ("src/warploom", "generator", "runtime", "tuning")


def blocks(text: str, language: str) -> list[str]:
    """The contents of the code blocks marked exactly so."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every configuration that the guide says to save."""
    folder = tmp_path_factory.mktemp("guide")
    for block in blocks(GUIDE, "yaml"):
        name = block.splitlines()[0].removeprefix("# ")
        (folder / name).write_text(block)
    return folder


def test_every_command_of_the_guide_that_needs_no_gpu_works(folder: Path) -> None:
    lines = "".join(blocks(GUIDE, "console")).splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert len(commands) > 10
    for command in commands:
        done = run(command, folder)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_every_program_that_needs_no_gpu_works(folder: Path) -> None:
    """Of the guide: test_pages.py runs the README's, for what it prints."""
    (folder / "program.py").write_text("\n".join(blocks(GUIDE, "python")))
    done = run("python program.py", folder)
    assert done.returncode == 0, done.stderr


def test_the_configuration_of_the_readme_is_one(folder: Path) -> None:
    (block,) = blocks(README, "yaml")
    (folder / "readme.yaml").write_text(block)
    done = run("warploom list readme.yaml", folder)
    assert len(done.stdout.splitlines()) == 1, done.stderr


def test_every_message_of_the_guide_is_one_that_is_raised() -> None:
    sources = "".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message may span lines of source
    table = GUIDE.partition("## Troubleshooting")[2]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if message not in joined] == []


def test_the_tables_of_fields_are_those_of_the_dataclasses() -> None:
    renewed = insert(GUIDE, MARKERS, reference())
    assert renewed == GUIDE, "`warploom schema --write docs/guide.md` renews them"


def test_the_measured_errors_have_their_place() -> None:
    assert GUIDE.partition("## Numerics")[2].partition("\n## ")[0].count("<!-- error table") == 1


def test_every_keyword_of_a_call_is_told() -> None:
    keywords = set(inspect.signature(warploom.gemm).parameters) - {"a", "b", "epilogue"}
    calling = GUIDE.partition("## Calling it")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", calling, re.MULTILINE)
    assert {word for row in rows for word in re.findall(r"\w+", row)} == keywords


def test_every_field_of_a_schedule_has_advice() -> None:
    advice = GUIDE.partition("## Choosing a schedule")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", advice, re.MULTILINE)
    told = [word for row in rows for word in re.findall(r"\w+", row)]
    assert sorted(told) == sorted(field.name for field in fields(GemmSchedule))


@pytest.mark.parametrize("text", [GUIDE, PAGE], ids=["guide", "benchmarks"])
def test_commands_that_need_a_gpu_have_the_options_that_they_are_given(text: str) -> None:
    commands = re.findall(r"^\$ .*?-m (benchmarks\.\w+) (.*)", text, re.MULTILINE)
    assert commands
    for module in dict(commands):
        done = run(f"{sys.executable} -m {module} --help", ROOT)
        given = " ".join(arguments for other, arguments in commands if other == module)
        missing = set(re.findall(r"--\w+", given)) - set(re.findall(r"--\w+", done.stdout))
        assert missing == set(), (module, done.stderr)


@pytest.mark.parametrize(
    ("text", "page", "file"),
    [(GUIDE, GUIDE, ""), (README, GUIDE, "docs/guide.md"), (PAGE, PAGE, "")],
    ids=["guide", "README", "benchmarks"],
)
def test_links_to_a_heading_lead_to_one(text: str, page: str, file: str) -> None:
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    targets = re.findall(rf"\]\({re.escape(file)}#(.*?)\)", text)
    assert targets
    assert [target for target in targets if target not in anchors] == []


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


def test_the_kernels_that_the_guide_lets_compete_compute_what_the_cells_do(folder: Path) -> None:
    (arguments,) = re.findall(r"-m benchmarks.gemm (.*--specs.*)", GUIDE)
    file, kind = (re.findall(rf"--{name} (\S+)", arguments)[0] for name in ("specs", "types"))
    specs = expand_file(folder / file).specs
    assert {spec.operation for spec in specs} == {KINDS[kind].operation()}


def test_what_other_libraries_call_it_computes_the_same() -> None:
    """The tables of `Coming from other libraries`, as far as torch on a CPU has the other side."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48)
    a, w = x.bfloat16(), weight.bfloat16()
    c = torch.randn(5, 48).bfloat16()
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.02, check_dtype=False)
    close(warploom.gemm(a, w.t()), torch.mm(a, w.t()))
    linear = torch.nn.functional.linear(a.float(), w.float(), bias)
    close(warploom.gemm(a, w.t(), bias=bias, out_dtype=torch.float32), linear)
    added = torch.addmm(c.float(), a.float(), w.t().float(), beta=0.5, alpha=2.0)
    gemm = warploom.gemm(a, w.t(), residual=c, beta=0.5, scale_a=2.0, out_dtype=torch.float32)
    close(gemm, added)
    rows, columns = torch.rand(5, 1), torch.rand(1, 48)
    scaled = (a.float() @ w.t().float()) * rows * columns
    close(warploom.gemm(a, w.t(), scale_a=rows, scale_b=columns, out_dtype=torch.float32), scaled)

    q, k, v = (torch.randn(2, heads, 20, 32).bfloat16() for heads in (4, 2, 2))
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    close(warploom.attention(q, k, v, scale=0.3), sdpa(q, k, v, scale=0.3))
    close(warploom.attention(q, k, v, causal=True), sdpa(q, k, v, is_causal=True))
    short = q[:, :, :7]
    close(warploom.attention(short, k, v, causal="top_left"), sdpa(short, k, v, is_causal=True))


def test_every_golden_kernel_is_laid_out_as_the_guide_says() -> None:
    golden = list((ROOT / "emitted" / "golden").glob("*.cu"))
    assert golden
    for path in golden:
        text = path.read_text()
        produce, consume = (text.index(f"void {name}(const Parameters& p") for name in FUNCTIONS)
        assert produce < consume < text.index(f"{path.stem}(const __grid_constant__"), path.name


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
    broken = [
        (document.name, target)
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []
