"""Text that every CPython brings along: its documentation's topics, its licence, its docstrings.

What it is depends on the version of Python, and on nothing else: `digest` tells versions apart.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

LIBRARY = Path(os.__file__).parent
LICENCES = ("LICENSE.txt", "LICENSE", "../LICENSE.txt", "../LICENSE")  # where `license` looks
BLOCK = 4096  # bytes: every tenth block of the text is for validation
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Texts:
    """Bytes to train on and to validate with, uint8 [bytes], and the SHA-256 of all, in hex."""

    training: torch.Tensor
    validation: torch.Tensor
    digest: str


def load(*, docstrings: bool) -> Texts:
    """Read the texts of this Python; `docstrings`: those of its library too, in two seconds.

    Both parts are made of blocks from everywhere, since what follows the last topic is unlike it.
    Where a distribution left the topics out, docstrings are read in any case.
    """
    parts = _topics()
    docstrings = docstrings or not parts
    parts += _licence()
    if docstrings:
        parts += _docstrings()
    text = "\n\n".join(parts).encode()
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    validation = blocks[9::10]
    training = [block for index, block in enumerate(blocks) if index % 10 != 9]
    digest = hashlib.sha256(text).hexdigest()
    return Texts(_bytes(training), _bytes(validation), digest)


def _bytes(blocks: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(blocks), dtype=np.uint8).copy())


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _licence() -> list[str]:
    found = (LIBRARY / name for name in LICENCES)
    return [path.read_text(encoding="utf-8") for path in found if path.is_file()][:1]


def _docstrings() -> Iterator[str]:
    """The docstrings of the library's modules, which come by name, outer ones first."""
    for path in sorted(LIBRARY.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, DOCUMENTED) and (told := ast.get_docstring(node)):
                yield told
