"""Pages, messages, public names, docstrings and --help use the words of CUTLASS, PyTorch and vLLM.

A reader who has to decode a private word looks for a bug in what is right. docs/glossary.md
says what to write in its place.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import warploom
from warploom.cli import COMMANDS, main
from warploom.generator.config import schema

ROOT = Path(__file__).parents[2]
PACKAGES = ("src/warploom", "generator", "integrations", "quantization", "runtime", "tuning")


def word(text: str) -> str:
    """A pattern for a word, also as a part of a name in snake case."""
    return rf"(?<![A-Za-z]){text}(?![A-Za-z])"


# A private word, and what to write.
TERMS = {
    r"truth values?": "boolean",
    r"multiprocessors?": "SM",
    r"that there (?:is|are)\b": "(say it directly)",
    r"of few bits|in few bits": "quantized",
    r"attends? to nothing": "fully masked",
    r"lets? go of|letting go": "release",
    r"\bturned\b": "rotated (RoPE)",
    r"\bbeside\b": "compared with, next to, together with",
    r"\blies?\b": "is stored, is laid out, is in",
    word(r"[pP]roducts?"): "GEMM, matmul, MMA",
    word(r"[pP]eers?"): "baseline",
    word(r"[cC]ells?"): "benchmark case, shape",
    word(r"[rR]ooms?"): "directory, workspace, space",
    word(r"Places?"): "TileCoord",
    word(r"Walks?"): "tile scheduler",
    word(r"Turns?"): "ordered barrier",
    r"so-manieth|so many a ": "every n-th",
    r"least waves": "default table",
    r"the model alone": "the cost model",
    word(r"[eE]xtents?"): "size",
    word(r"[pP]itch(?:es)?"): "row stride",
    word(r"[pP]acked"): "varlen, or quantized",
}
# What these words say in the field, too.
USUAL = {
    r"(?i:products are exact|dot[ _]products?|\(16 products\)|\| products \|)": "of two numbers",
    r"(?:fp8|8-bit|floating-point|that) products": "of two numbers, which are accumulated",
    r"(?:the|a|a rounded) product(?: of| minus|,| it)": "of two numbers or matrices",
    r"weight_packed|qkvpacked|kvpacked": "FlashAttention's and compressed-tensors' names",
    r"packed bytes|packed in bricks|bytes are packed": "codes of less than 8 bits in bytes",
    r"packed \(varlen\)": "the value of a field, with its meaning",
    r"_product\b": "the name of directories",
    r"cells\.yaml|--cells|--peers": "the names of a file and of options",
    r"[Ss]treaming multiprocessor": "the glossary, of SM",
}
# Pages that keep older words, or do not exist to be read in one piece.
OLD_PAGES = {
    "docs/notebook.md": "a diary, which is not rewritten",
}
# Public names that are kept for those who call them.
OLD_NAMES = {
    "from_packed": "of warploom.nn.QuantizedLinear, as PackedWeight, whose name stays",
    "packed": "the arguments of these methods",
}
# Messages with such a word, at most, by package. Their text counts in the records of GPU tests
# (tests/gpu/gpu_records.py): mend them in a change that runs these anyway, and lower the number.
OLD_MESSAGES = {"integrations": 1, "runtime": 63}


def found(text: str) -> list[str]:
    """The private words in a text, with what to write instead."""
    for usual in USUAL:
        text = re.sub(usual, "", text)
    return [
        f"{match.group().strip()!r}: write {instead}"
        for term, instead in TERMS.items()
        for match in re.finditer(term, text)
    ]


# ---- Pages ---------------------------------------------------------------------------------------


def prose(path: Path) -> str:
    """What people wrote for people: no code, no targets of links, nothing that is generated."""
    text = path.read_text()
    text = re.sub(r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    if path.name == "glossary.md":  # its second column has the older words
        text = re.sub(r"^(\|[^|]*\|)[^|]*\|", r"\1", text, flags=re.MULTILINE)
    return text


PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
    if str(path.relative_to(ROOT)) not in OLD_PAGES
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_have_no_private_words(path: Path) -> None:
    assert found(prose(path)) == []


def test_every_page_that_keeps_older_words_is_there() -> None:
    assert [name for name in OLD_PAGES if not (ROOT / name).exists()] == []


# ---- Fields of configurations --------------------------------------------------------------------


def descriptions(value: object) -> Iterator[str]:
    """What a JSON schema, or a part of one, says of the fields in it."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "description" and isinstance(inner, str):
            yield inner
        yield from descriptions(inner)
    for inner in value if isinstance(value, list) else ():
        yield from descriptions(inner)


def test_fields_are_described_in_the_words_of_the_field() -> None:
    told = {*descriptions(json.loads(schema()))}
    assert len(told) > 150
    assert [(text, found(text)) for text in sorted(told) if found(text)] == []
    # "of one block": what is, only who sees the name of the field next to it may guess.
    assert [text for text in sorted(told) if re.match(r"(of|that) ", text)] == []


# ---- Messages ------------------------------------------------------------------------------------


def messages(path: Path) -> Iterator[str]:
    """The texts of what a module raises, each string or part of a string between its values."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = (
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            if isinstance(node, ast.Call)
            else ""
        )
        if isinstance(node, ast.Raise) or name.endswith("Error"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


def test_messages_have_no_private_words() -> None:
    counts: Counter[str] = Counter()
    told: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if any(part.is_symlink() for part in path.parents):
                continue
            for text in sorted({*messages(path)}):
                for one in found(text):
                    counts[package] += 1
                    told.setdefault(package, []).append(
                        f"{path.relative_to(ROOT)}: {one}, in {text!r}"
                    )
    over = {name: told[name] for name in counts if counts[name] > OLD_MESSAGES.get(name, 0)}
    assert over == {}


# ---- Public names, and --help --------------------------------------------------------------------


def names() -> Iterator[str]:
    """The public names, with those of the methods and parameters of what they are."""
    for name in warploom.__all__:
        yield name
        thing = getattr(warploom, name)
        parts = vars(thing).items() if inspect.isclass(thing) else [(name, thing)]
        for part, member in parts:
            member = getattr(member, "__func__", member)
            if not part.startswith("_") and callable(member):
                yield part
                try:
                    yield from inspect.signature(member).parameters
                except (TypeError, ValueError):
                    continue  # a builtin


def test_public_names_have_no_private_words() -> None:
    every = {*names()}
    assert len(every) > 50
    assert [name for name in sorted(every - OLD_NAMES.keys()) if found(name)] == []


def docstrings() -> Iterator[tuple[str, str]]:
    """What the site's API pages show: names, and their docstrings without the examples' code."""
    for name in warploom.__all__:
        thing = getattr(warploom, name)
        parts = {name: thing}
        if inspect.isclass(thing) or inspect.ismodule(thing):
            public = {part: one for part, one in vars(thing).items() if not part.startswith("_")}
            parts |= {
                f"{name}.{part}": one
                for part, one in public.items()
                if str(getattr(one, "__module__", "")).startswith("warploom")
            }
        for part, one in parts.items():
            text = re.sub(r"^ *(>>>|\.\.\.) .*$", "", inspect.getdoc(one) or "", flags=re.MULTILINE)
            yield part, re.sub(r"`[^`]*`", "", text)


def test_public_docstrings_have_no_private_words() -> None:
    every = dict(docstrings())
    assert len(every) > 100
    assert {name: found(text) for name, text in every.items() if found(text)} == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_have_no_private_words(name: str) -> None:
    parent = click.Context(main, info_name="warploom", **main.context_settings)
    asked = main.get_command(parent, name)
    assert asked is not None
    context = click.Context(asked, info_name=name, parent=parent)
    texts = [asked.get_help(context)]
    texts += [
        inner.get_help(click.Context(inner, info_name=inner.name, parent=context))
        for inner in getattr(asked, "commands", {}).values()
    ]
    assert found("\n".join(texts)) == []
