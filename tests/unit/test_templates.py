"""Templates: Jinja where names say so, few conditionals, no place that no kernel has."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from warploom import templates
from warploom.generator.families._attention.modifiers import MODIFIERS

(FOLDER,) = map(Path, templates.__path__)
FILES = {
    path.relative_to(FOLDER).as_posix(): path.read_text()
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in (".cuh", ".jinja")
}
PAGE = FOLDER.resolve().parent / "docs" / "adding-a-family.md"
PLACE = re.compile(r"^\{# (\w+) #\}$", re.M)
MOST = 12
CODE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
TEXT = re.compile(r'"[^"]*"')


def conditionals(template: str) -> int:
    """How many statements and expressions of a template choose by a condition."""
    return sum(
        len(re.findall(r"\b(?:if|elif)\b", TEXT.sub("", code))) for code in CODE.findall(template)
    )


@pytest.mark.parametrize(
    ("template", "count"),
    [
        ("{% if a %}b{% elif c %}d{% else %}e{% endif %}", 2),
        ("{{ a if b else c }}{{ d }}{% set e = f if g else h %}", 2),
        ('if (a) {{ "if" }} // elif', 0),
    ],
)
def test_conditionals_are_those_of_jinja(template: str, count: int) -> None:
    assert conditionals(template) == count


def test_a_template_has_few_conditionals() -> None:
    """Kernels with many options could be read by nobody where each branched on each."""
    counts = {name: conditionals(text) for name, text in FILES.items()}
    assert len(counts) > 100
    many = {name: count for name, count in counts.items() if count > MOST}
    assert many == {}, "use hooks, a file for each choice, or values from Python"


def test_shared_text_of_attention_asks_for_no_modifier() -> None:
    """An option's text is in its own file, which hooks include: no other has a branch for it."""
    fields = "|".join(kind.name for kind in MODIFIERS)
    folders = ("_attention/", "attention_forward/", "attention_backward/", "attention_decode/")
    asked = {
        name: found
        for name, text in FILES.items()
        if name.startswith(folders) and "/modifiers/" not in name
        if (found := re.findall(rf"operation\.(?:{fields})\b", text))
    }
    assert asked == {}


def test_names_tell_which_files_hold_jinja() -> None:
    said = {name for name in FILES if name.endswith(".jinja")}
    assert said == {name for name, text in FILES.items() if re.search(r"\{[{%#]", text)}


def test_every_place_is_one_that_a_template_includes() -> None:
    """A place of another name would be left out of kernels without a word."""
    texts = "".join(FILES.values())
    used = set(re.findall(r'hook(?: |\()"(\w+)"', texts))
    # What bends scores is included by its file, which Python names.
    used |= set(re.findall(r'"#(\w+)"', texts)) | {"scaling", "slope"}
    places = {name: set(PLACE.findall(text)) for name, text in FILES.items()}
    unknown = {name: own - used for name, own in places.items() if own - used}
    assert unknown == {}
    assert used <= set().union(*places.values())


def test_the_page_has_the_places_that_options_of_attention_share() -> None:
    """Whoever adds an option would have to find them by reading every template."""
    options = [text for name, text in FILES.items() if name.startswith("_attention/modifiers/")]
    counts = Counter(place for text in options for place in set(PLACE.findall(text)))
    _, _, section = PAGE.read_text().partition("## An option of attention")
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section.partition("\n## ")[0], re.M)
    listed = {place for row in table for place in re.findall(r"\w+", row)}
    assert listed <= set(counts)
    assert {place for place, count in counts.items() if count > 1} <= listed
