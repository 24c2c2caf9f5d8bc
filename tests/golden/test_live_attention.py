"""Kernels of attention have only live code: no empty hook, no constant that decides a branch."""

from __future__ import annotations

import re

import pytest
from goldens import SPECS, texts

from warploom.generator.families import names

FAMILIES = [name for name in names() if name.startswith("attention")]
_REMARK = re.compile(r"//[^\n]*")
_NUMBER = r"(?:k[A-Z]\w*|\d+)"
_SUM = rf"{_NUMBER}(?: [-+*/%] {_NUMBER})*"
# A branch on constants alone. `kPieces % kLanes` is one of a template, for elements of two sizes.
_BEFORE = r"(?:(?<=[(!])|(?<=&& )|(?<=\|\| )|(?<== )|(?<=\? )|(?<=return ))"
_DECIDED = re.compile(rf"{_BEFORE}{_SUM} (?:==|!=|<=|>=|<|>) {_SUM}(?![\w.(\[])(?! [-+*/%<])")
_OF_TEMPLATES = ("kPieces % kLanes", "kStagedRows % kRowsAtATime", "kHigh == kLow")
_FLAG = re.compile(r"^constexpr bool k\w+", re.M)
_EMPTY = re.compile(r"\bvoid (\w+)\([^{};]*\)(?: const)? \{\s*\}")


def dead(text: str) -> list[str]:
    """What of a kernel's text does nothing: empty functions, flags, branches that are decided."""
    code = _REMARK.sub("", text)
    found = [f"{name}() is empty" for name in _EMPTY.findall(code)]
    found += [f"{flag} has one value" for flag in _FLAG.findall(code)]
    for line in code.splitlines():
        constant = "static_assert" in line or ("constexpr" in line and "if constexpr" not in line)
        if constant or any(known in line for known in _OF_TEMPLATES):
            continue
        found += [f"{one[0]} is decided" for one in _DECIDED.finditer(line)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_have_no_hook_that_does_nothing_and_no_branch_that_is_decided(family: str) -> None:
    own = [text for name, text in texts().items() if SPECS[name].operation.family == family]
    assert own
    assert {line for text in own for line in dead(text)} == set()


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("void begin() const {}", 1),
        ("void begin(int x) {\n}", 1),
        ("Turns(int) {}", 0),  # a constructor, which may only initialise
        ("constexpr bool kBounds = true;", 1),
        ("  static constexpr bool kHasNaN = true;", 0),  # of a type among several
        ("if (kStages == 1 && n == begin) release();", 1),
        ("const int own = kRows == kTile ? 0 : part;", 1),
        ("if constexpr (kRows % 16 != 0) f();", 1),
        ("if (threadIdx.x % kLanes == 0) f();", 0),
        ("for (int i = 0; i < kRows / 2; ++i) f();", 0),
        ("if (i + kLanes < kRows) f();", 0),
        ("static_assert(kRows % 2 == 0);", 0),
        ("f();  // kStages == 1", 0),
    ],
)
def test_what_does_nothing_is_found(line: str, count: int) -> None:
    assert len(dead(line)) == count


@pytest.mark.parametrize("family", ["attention_forward", "attention_backward", "attention_decode"])
def test_a_kernel_says_its_roles_registers_shared_memory_and_barriers(family: str) -> None:
    for name, text in texts().items():
        if SPECS[name].operation.family == family:
            header = text.partition("#if defined")[0]
            for words in (
                "// Roles",
                "// Registers: ",
                "// Shared memory, in bytes:",
                "// Barriers:",
            ):
                assert words in header, (name, words)
            waited = {*re.findall(r"shared\.(\w+_(?:full|empty))\b", text)}
            told = {*re.findall(r"\b\w+_(?:full|empty)\b", header)}
            assert waited == told, name
