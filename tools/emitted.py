"""What the generator emits: the text and the launches of kernels, for records of GPU tests.

The kernels are those of every smoke.yaml, and others that differ from one of them in one field.
Lines of templates that none of these has count by their own text. Nothing is compiled but by
`--compile`. The version is the one on PYTHONPATH, as in same_kernels.
"""

# ruff: noqa: ANN401 (functions and specs of whichever version is there are values here)

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from same_kernels import ARCH, compile_into, defined, families, samples
from same_launches import launched

# Of the kernels that differ from a sample in one field, one in so many is taken: more take longer
# than a test on the CPU may.
SHARE = 8


# ---- Which kernels -------------------------------------------------------------------------------


def grid(name: str) -> list[Any]:
    """Return the kernels of a family that stand for all of its kernels, each once."""
    own = [spec for spec in samples() if spec.operation.family == name]
    return list({spec.digest: spec for spec in (*own, *_neighbours(own))}.values())


def _neighbours(specs: list[Any]) -> Iterator[Any]:
    """Yield legal specs that differ from one of `specs` by the value that another has of a field.

    Which of them are taken depends on positions alone, so that a new name takes no others.
    """
    kernel_spec, illegal = defined("KernelSpec"), importlib.import_module("warploom.errors")
    for half in ("operation", "schedule"):
        for place, field in enumerate(fields(getattr(specs[0], half))):
            values = list(dict.fromkeys(getattr(getattr(one, half), field.name) for one in specs))
            for number, spec in enumerate(specs):
                for rank, value in enumerate(values):
                    if zlib.crc32(f"{half} {place} {number} {rank}".encode()) % SHARE:
                        continue
                    halves = {"operation": spec.operation, "schedule": spec.schedule}
                    try:
                        halves[half] = replace(halves[half], **{field.name: value})
                        yield kernel_spec(ARCH, **halves)
                    except illegal.SpecificationError:
                        continue


# ---- What they are -------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<directive> (?:^|(?<=\n)) [^\S\n]* \# (?:\\\n|[^\n])* )
    | (?P<space> \s+ )
    | (?P<token>
        "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | \.?\d (?: [eEpP][+-] | '?\w | \. )*
      | [A-Za-z_]\w*
      | <<= | >>= | <=> | ->\* | \.\.\. | :: | \+\+ | -- | << | >> | <= | >= | == | != | && | \|\|
      | -> | \.\* | [-+*/%&|^]=
      | . )
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens(text: str) -> list[str]:
    """Return the tokens of C++, without comments and white space; a directive is one token."""
    if "/*" in text:
        return [*_tokens(text)]
    # Kernels share most of their lines. No token but a directive is of more than one.
    return [token for line in _LINE_END.split(text) for token in _tokens(line)]


_LINE_END = re.compile(r"(?<!\\)\n")


@functools.cache
def _tokens(text: str) -> tuple[str, ...]:
    read: list[str] = []
    for match in _TOKEN.finditer(text):
        if match["directive"]:
            line = re.sub(r"/\*.*?\*/|//.*", " ", match["directive"].replace("\\\n", " "))
            read.append(" ".join(line.split()))
        elif match["token"]:
            read.append(match["token"])
    return tuple(read)


# Words after which no name is declared, and others that are no names.
_BEFORE_USES = re.compile(
    r"""and|case|const|constexpr|delete|else|explicit|extern|friend|goto|inline|mutable|namespace
    |new|not|operator|or|return|sizeof|static|throw|virtual|volatile|xor""",
    re.VERBOSE,
)
_KEYWORD = re.compile(
    r"""auto|bool|break|char|class|continue|decltype|default|do|double|enum|false|final|float|for
    |if|int|long|noexcept|nullptr|override|private|protected|public|short|signed|static_assert
    |static_cast|struct|switch|template|this|true|typename|union|unsigned|using|void|while""",
    re.VERBOSE,
)
_WORD = re.compile(r"(?!__)[A-Za-z_]\w*")
_BEFORE_REFERENCES = {"*", "&", "&&", ">"}
_AFTER_DECLARED = {"=", ";", ",", ")", "[", "{"}


def form(read: list[str]) -> list[str]:
    """Return tokens with numbers in place of the names that they declare, in the order of use.

    Two texts of one form differ by other names at most, whatever sizes they are compiled for. Names
    that the text does not seem to declare stay, as those of the headers do.
    """
    words = {token for token in {*read} if _WORD.fullmatch(token)}
    types = {word for word in words if not _BEFORE_USES.fullmatch(word)}
    names = {word for word in types if not _KEYWORD.fullmatch(word)}
    declared = {
        name
        for before, name, after in zip(read, read[1:], read[2:], strict=False)
        if name in names
        if (before in types and after != "::")
        or (before in _BEFORE_REFERENCES and after in _AFTER_DECLARED)
    }
    used = (token for token in dict.fromkeys(read) if token in declared)
    numbered = {token: f"name {number}" for number, token in enumerate(used)}
    return [numbered.get(token, token) for token in read]


def described(spec: Any, text: str) -> dict[str, str]:
    """Return the name of a kernel, its text, form and launches, as hashes that know no name."""
    read = tokens(text.replace(spec.name, "KERNEL"))
    block = families()[spec.operation.family].parameters(spec)
    values = {f.name: _value(f.kind.name, number) for number, f in enumerate(block.fields)}
    launches = {**launched(spec), "bytes": _hash(block.pack(values).hex())}
    return {
        "name": spec.name,
        "text": _hash("\n".join(read)),
        "form": _hash("\n".join(form(read))),
        "launches": _hash(json.dumps(launches, sort_keys=True)),
    }


def _value(kind: str, number: int) -> bytes | int | float:
    """Return a value of a parameter that another place, width or sign would change."""
    if kind == "TENSOR_MAP":
        return bytes([number + 1] * 128)
    return number + 0.5 if kind == "FLOAT" else number + 1 if kind == "POINTER" else -number - 1


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- What no kernel of these shows ---------------------------------------------------------------


def unseen(name: str, lines: Collection[str], root: Path) -> list[str]:
    """Return the lines of a family's templates that are not among `lines`, as `code` has these.

    A template without Jinja is in a kernel as a whole or not at all: where one line is not there,
    all of them count. Jinja's own statements count by the lines that they choose.
    """
    lines_unseen = []
    for file in _templates(name, root):
        text = file.read_text()
        own = [*code(_JINJA_STATEMENT.sub("", text))]
        missing = [line for line in own if line not in lines and not _is_filled(line, lines)]
        missing = own if missing and not re.search(r"\{[{%]", text) else missing
        lines_unseen += [f"{file.relative_to(root).as_posix()}: {line}" for line in missing]
    return lines_unseen


_JINJA_STATEMENT = re.compile(r"\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_JINJA_VALUE = re.compile(r"\{\{.*?\}\}")


def code(text: str) -> Iterator[str]:
    """Yield the lines of a text without comments and indentation, but for empty ones."""
    lines = (" ".join(line.partition("//")[0].split()) for line in text.splitlines())
    return filter(None, lines)


def _is_filled(line: str, lines: Collection[str]) -> bool:
    """Return whether `line`, with text in place of its Jinja values, is one of `lines`."""
    fixed = _JINJA_VALUE.split(line)
    if len(fixed) == 1:
        return False
    longest = max(fixed, key=len)
    return any(longest in one and _has_in_order(one, fixed) for one in lines)


def _has_in_order(line: str, parts: Sequence[str]) -> bool:
    """Return whether `line` is `parts` with any text between them.

    A regular expression would go back over all places of each part: of seven, for minutes.
    """
    first, *between, last = parts
    at, end = len(first), len(line) - len(last)
    if end < at or not (line.startswith(first) and line.endswith(last)):
        return False
    for part in between:
        at = line.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def _templates(name: str, root: Path) -> list[Path]:
    """Return the templates in a family's folder, and in the shared folders that its files name."""
    folders = {path.name for path in (root / "templates").iterdir() if path.is_dir()}
    shared = folders - {*families(), "__pycache__"}
    ahead = {name}
    files: list[Path] = []
    while ahead:
        folder = ahead.pop()
        shared.discard(folder)
        own = sorted((root / "templates" / folder).rglob("*"))
        files += [path for path in own if path.suffix in (".cuh", ".jinja")]
        python = (root / "generator" / "families" / folder).rglob("*.py")
        texts = [path.read_text() for path in (*files, *python)]
        ahead |= {one for one in shared if any(f"{one}/" in text for text in texts)}
    return sorted(files)


# ---- All of it -----------------------------------------------------------------------------------


def everything(root: Path) -> dict[str, Any]:
    """Return the options of the compiler, and of each family its kernels and unseen lines."""
    render = defined("render")
    specs = {spec.digest: spec for name in families() for spec in grid(name)}
    texts = {digest: render(spec) for digest, spec in specs.items()}
    every = {line for text in texts.values() for line in text.splitlines()}  # they share most
    lines = {*code("\n".join(every))}
    content: dict[str, Any] = {}
    for name in families():
        own = {digest: one for digest, one in specs.items() if one.operation.family == name}
        content[name] = {
            "kernels": {digest: described(one, texts[digest]) for digest, one in own.items()},
            "unseen": unseen(name, lines, root),
        }
    return {"options": list(defined("find", "toolchain")().options(ARCH)), "families": content}


@click.command()
@click.argument("root", type=click.Path(exists=True, path_type=Path))
@click.option("--compile", "compiles", is_flag=True, help="Compile specs with digests in stdin.")
@click.option("--jobs", type=int, help="Processes that compile (default: one a CPU).")
def main(root: Path, compiles: bool, jobs: int | None) -> None:
    """Print as JSON what the checkout at ROOT emits, or what its kernels are compiled to."""
    if not compiles:
        click.echo(json.dumps(everything(root)))
        return
    digests = set(json.load(sys.stdin))
    specs = [spec for name in families() for spec in grid(name) if spec.digest in digests]
    entries: dict[str, Any] = {spec.digest: {} for spec in specs}
    compile_into(entries, specs, jobs)
    click.echo(json.dumps({digest: one["entries"] for digest, one in entries.items()}))


if __name__ == "__main__":
    main()
