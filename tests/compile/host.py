"""Programs of parts of an emitted text, with what they need of CUDA made up: they run here."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no C++ compiler here"
)
# They run once: to optimise them further takes longer. A sum beyond 32 bits ends one.
_COMPILER = (
    *("g++", "-std=c++17", "-Og"),
    *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []),  # in half the time
    *("-I", str(Path(__file__).parents[1] / "families")),
    *("-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"),
)
_HEADERS = (
    *("algorithm", "climits", "cstdint", "cstdio", "cstdlib", "cstring", "limits", "map", "set"),
    "vector",
)


def build(text: str, folder: Path) -> Path:
    """Return the program of a C++ text, which may use the common headers."""
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(text)
    _compile("-include", f"{_headers().name}/common.h", "-o", str(program), str(source))
    return program


def run(text: str, folder: Path) -> None:
    """Build the program of a C++ text, and require that it ends well."""
    done = subprocess.run([build(text, folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@functools.cache
def _headers() -> TemporaryDirectory[str]:
    """The common headers, which take as long as a program, compiled once."""
    folder = TemporaryDirectory()
    common = Path(folder.name, "common.h")
    common.write_text("".join(f"#include <{name}>\n" for name in _HEADERS))
    _compile("-x", "c++-header", str(common))
    return folder


def _compile(*arguments: str) -> None:
    built = subprocess.run([*_COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
