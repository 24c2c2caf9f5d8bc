"""Emitted kernels have only code that does something: no empty hook, no branch on a constant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
from emitted_functions import structs, without_remarks
from goldens import SPECS, texts

WIDTH = 112  # characters of a line of a GEMM
# What a function is asked for by several parts of a kernel, of which one finds that it is always 0.
ALWAYS_ZERO = {"attention_decode": {"begin"}}  # of the keys that a row sees, without a window

# A function with nothing in it but a default result, and no member that a constructor sets. A union
# whose members have constructors needs one of its own.
_HOLLOW = re.compile(
    r"__device__ __forceinline__ (?!(?:Values|Vector|Eight)\(\))"
    r"[^;{}()]*?(\w+)\((?:[^;{}()]|\([^;{}()]*\))*\)(?: const)?\s*\{\s*(?:return (?:\{\}|0);)?\s*\}"
)
_CONSTANT = re.compile(r"^(?:static )?constexpr \w+ (k\w+ =[^;]*);", re.MULTILINE)
_MEMBERS = re.compile(r"static constexpr \w+ (k\w+ =[^;]*);")
_PARAMETER = re.compile(r"\b(?:int|bool) (k\w+)[,>]")  # of a template
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"(?:^|, )(k\w+) = ")
_BRANCH = re.compile(r"\bif \((k\w+)(?: [=!<>]+ \w+)?\)|\b(k[A-Z]\w*)(?: [=!<>]+ \w+)? \?")


def hollow(text: str) -> Iterator[str]:
    """Yield the names of functions that do nothing."""
    for found in _HOLLOW.finditer(without_remarks(text)):
        yield found[1]


def constants(text: str) -> set[str]:
    """The names of a kernel's constants outside of functions and structs."""
    return {name for line in _CONSTANT.findall(text) for name in _NAME.findall(line)}


def branches(text: str) -> Iterator[str]:
    """Yield the constants that alone decide an `if` or a `?:`."""
    text = without_remarks(text)
    known = constants(text) - {*_PARAMETER.findall(text)}
    for line in text.splitlines():
        for found in _BRANCH.finditer(line.partition("constexpr ")[0]):
            if (name := found[1] or found[2]) in known:
                yield name


def unread(text: str) -> set[str]:
    """The constants that a kernel's text has once, and those of structs that nothing reads."""
    text = without_remarks(text)
    times = Counter(_WORD.findall(text))
    unused = {one for one in constants(text) if times[one] < 2}
    for struct, start, end in structs(text):
        inside = text[start:end]
        if members := _MEMBERS.findall(inside):
            outside, times = text[:start] + text[end:], Counter(_WORD.findall(inside))
            unused |= {
                f"{struct}::{one}"
                for line in members
                for one in _NAME.findall(line)
                if times[one] < 2 and f"::{one}" not in outside
            }
    return unused


def idle(text: str) -> set[str]:
    """The structs that nothing but their own definition names."""
    text = without_remarks(text)
    times = Counter(_WORD.findall(text))
    return {
        name
        for name, start, end in structs(text)
        if times[name] == _WORD.findall(text[start:end]).count(name)
    }


def wide(text: str) -> set[str]:
    """The lines that are too long, but for those with a kernel's name and wgmma's registers."""
    long = {line for line in text.splitlines() if len(line) > WIDTH and "_sm90a_" not in line}
    listed = r"%\d+,%\d+|\(d\[\d+\]\), |^static_assert\(OFFSET"
    return {line for line in long if not re.search(listed, line)}


def unsaid(text: str) -> set[str]:
    """What the head of a kernel with a pipeline does not say: budgets, or a barrier that it has."""
    head, _, body = text.partition("#if defined")
    declared = re.findall(r"^  (?:Full|Empty)Barrier ([^;]*);", without_remarks(body), re.M)
    barriers = {name for line in declared for name in re.findall(r"\b[a-z]\w*(?=$|[,\[])", line)}
    if not barriers:
        return set()
    told, _, table = head.partition("\n// Barriers ")
    words = {word for word in ("Registers per thread: ", "Shared memory: ") if word not in told}
    rows = re.findall(r"^// (\w+(?:, \w+)*)", table, re.M)
    return words | barriers - {name for row in rows for name in row.split(", ")}


@pytest.mark.parametrize("wrong", [hollow, branches, unread, idle, wide, unsaid])
def test_kernels_have_live_code_and_a_head_that_explains_them(
    wrong: Callable[[str], Iterable[str]],
) -> None:
    found: dict[str, set[str]] = {}
    for name, spec in SPECS.items():
        if wrong is not wide or spec.operation.family == "gemm":
            found.setdefault(spec.operation.family, set()).update(wrong(texts()[name]))
    assert {
        family: left
        for family, names in found.items()
        if (left := names - ALWAYS_ZERO.get(family, set()))
    } == {}


def test_a_barrier_that_the_head_does_not_name_is_found() -> None:
    head = "// Registers per thread: 1\n// Shared memory: 2\n// Barriers x\n// full, done x\n"
    text = f"{head}#if defined\n  FullBarrier full[kStages], k_full;\n  EmptyBarrier done;\n"
    assert unsaid(text) == {"k_full"}
    assert unsaid(text.replace("// Shared", "//")) == {"Shared memory: ", "k_full"}


SAMPLE = """
constexpr int kOne = 1, kTwo = 2;
constexpr bool kLeft = false;
struct Order {
  __device__ __forceinline__ Order(int, int) {}
  __device__ __forceinline__ void begin() const {}  // {
  __device__ __forceinline__ int left(int x) const { return 0; }
  __device__ __forceinline__ void apply(float (&x)[2],
                                        int at) {
  }
  __device__ __forceinline__ int right(int x) const { return x; }
  __device__ __forceinline__ Order(int x) : x(x) {}
};
"""


def test_what_is_dead_is_found() -> None:
    assert [*hollow(SAMPLE)] == ["Order", "begin", "left", "apply"]
    assert unread(
        f"{SAMPLE}struct Two {{\n  static constexpr int kA = 1, kB = 2;\n}};\nTwo::kB;"
    ) >= {"Two::kA"}
    assert constants(SAMPLE) == {"kOne", "kTwo", "kLeft"}
    assert idle("struct One {\n  One(int);\n};\nstruct Two {\n};\nTwo two;\n") == {"One"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("if (kOne > 1) {", ["kOne"]),
        ("if (kLeft) f();", ["kLeft"]),
        ("x = kTwo ? 1 : 2;", ["kTwo"]),
        ("if constexpr (kOne > 1) {", []),
        ("constexpr int kThree = kOne > 1 ? 2 : 3;", []),
        ("if (kOther > 1) {", []),  # of a template
        ("if (i > kOne) {", []),
        ("f(kOne) + 1;", []),
    ],
)
def test_a_branch_on_a_constant_is_found(line: str, found: list[str]) -> None:
    assert [*branches(f"{SAMPLE}{line}\n")] == found
