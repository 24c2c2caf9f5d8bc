"""Programs and libraries of emitted texts, with what they need of CUDA made up: they run here."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no C++ compiler here"
)
# Programs run once: to optimise them further takes longer. A sum beyond 32 bits ends one.
_PROGRAM = (
    *("-Og", "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"),
    *("-I", str(Path(__file__).parents[1] / "families"), "-I", str(Path(__file__).parent)),
)
# What is unique in a process would be that of the kernel that was loaded first, under its name.
_LIBRARY = (
    *("-Og", "-w", "-shared", "-fPIC", "-fno-gnu-unique"),
    *("-I", str(Path(__file__).parent)),
)
_HEADERS = (
    *("algorithm", "climits", "cstdint", "cstdio", "cstdlib", "cstring", "limits", "map", "set"),
    "vector",
)


def definitions(text: str, *names: str) -> list[str]:
    """The structs and the functions of these names in a kernel's text, in its order."""
    either = "|".join(names)
    start = rf"(?:struct (?:{either})\b|__device__[^\n]* (?:{either})\()[^\n]*\{{"
    return re.findall(rf"^{start}.*?^\}};?", text, re.M | re.S)


def build(text: str, folder: Path, more: Sequence[str] = ()) -> Path:
    """Return the program of a C++ text, which may use the common headers, and `more` by name."""
    return _build(text, folder / "program", _PROGRAM, more)


def library(text: str, path: Path, more: Sequence[str]) -> Path:
    """Return the shared library of a C++ text, at `path`."""
    return _build(text, path, _LIBRARY, more)


def run(text: str, folder: Path, more: Sequence[str] = ()) -> None:
    """Build the program of a C++ text, and require that it ends well."""
    program = build(text, folder, more)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run_each(
    texts: Mapping[str, str], folder: Path, first: str = "", more: Sequence[str] = ()
) -> None:
    """Run the programs of several texts as one, which says by its name which of them failed.

    Each is in a namespace and has macros of its own; `first` is what all of them include.
    """
    parts, calls = [first], []
    for number, (name, text) in enumerate(texts.items()):
        part, count = re.subn(r"^int main\(\)", "static int program()", text, flags=re.MULTILINE)
        assert count == 1, name
        macros = re.findall(r"^#define (\w+)", part, re.MULTILINE)
        ends = "".join(f"#undef {macro}\n" for macro in macros)
        parts.append(f"namespace part{number} {{\n{part}\n}}\n{ends}")
        calls.append(f'  if (part{number}::program()) return std::puts("of {name}"), 1;\n')
    run("".join((*parts, "int main() {\n", *calls, "  return 0;\n}\n")), folder, more)


def _build(text: str, path: Path, options: Sequence[str], more: Sequence[str]) -> Path:
    source = path.with_suffix(".cpp")
    source.write_text(text)
    common = f"{_headers(tuple(options), tuple(more)).name}/common.h"
    _compile(*options, "-include", common, "-o", path, source)
    return path


@functools.cache
def _headers(options: tuple[str, ...], more: tuple[str, ...]) -> TemporaryDirectory[str]:
    """Headers, which take as long as several programs, compiled once: no more than are used, since
    what is compiled is read in whole.
    """
    folder = TemporaryDirectory()
    common = Path(folder.name, "common.h")
    common.write_text("".join(f"#include <{name}>\n" for name in (*_HEADERS, *more)))
    _compile(*options, "-x", "c++-header", common)
    return folder


def _compile(*arguments: str | Path) -> None:
    linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # in half the time
    command = ["g++", "-std=c++17", *linker, *arguments]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:4000]
