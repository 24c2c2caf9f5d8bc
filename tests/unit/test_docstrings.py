"""What `help()` says of each public function: its arguments, results, errors, and an example.

A reader who meets an argument that the docstring does not name has to read the source.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import warploom
from warploom import functional, nn, testing

# What the package itself calls of classes that users get from a function.
INNER = {
    *(f"BlockMask.{name}" for name in ("dense", "part", "shown")),
    *(f"Explanation.{name}" for name in ("by_torch", "of", "on")),
    "KernelSpec.of_legal",
    *(f"PackedWeight.{name}" for name in ("empty", "global_scale", "rows", "write")),
    "SparseWeight.empty",
    "WarploomConfig.described",
}
# Of torch's modules: what torch itself calls.
TORCHS = {
    "extra_repr",
    "get_extra_state",
    "register_parameter",
    "reset_parameters",
    "set_extra_state",
}
# Examples of what needs a GPU, files, or other processes, or writes what it finds.
NOT_RUN = {
    "assert_same_records",
    "autotune",
    "kernel_report",
    "load",
    "load_checkpoint",
    "testing.do_bench",
    "warmup",
}


def function(thing: Any) -> Callable[..., object]:  # noqa: ANN401
    """The function that a public name stands for; of an object, what calls it."""
    found: Callable[..., object] = thing
    if not inspect.isroutine(thing) and not inspect.isclass(thing):
        found = type(thing).__call__
    return inspect.unwrap(found)


def functions() -> dict[str, Callable[..., object]]:
    """The public functions, by their names in `warploom`."""
    named: dict[str, Any] = {name: getattr(warploom, name) for name in warploom.__all__}
    for module in (functional, testing):
        short = module.__name__.removeprefix("warploom.")
        named |= {f"{short}.{name}": getattr(module, name) for name in module.__all__}
    return {
        name: function(thing)
        for name, thing in named.items()
        if callable(thing) and not inspect.isclass(thing) and not inspect.ismodule(thing)
    }


def methods() -> Iterator[tuple[str, Callable[..., object]]]:
    """The public methods of public classes and layers, by name."""
    kinds = {name: getattr(warploom, name) for name in warploom.__all__}
    kinds = {name: kind for name, kind in kinds.items() if inspect.isclass(kind)}
    for name, kind in {**kinds, **LAYERS}.items():
        for part, member in vars(kind).items():
            inner = getattr(member, "__func__", member)
            if not part.startswith("_") and inspect.isfunction(inner) and part not in TORCHS:
                yield f"{name}.{part}", inspect.unwrap(inner)


LAYERS = {f"nn.{name}": getattr(nn, name) for name in nn.__all__}
FUNCTIONS = functions()
METHODS = {name: thing for name, thing in methods() if name not in INNER}


def parts(text: str) -> dict[str, str]:
    """The sections of a docstring, by their headings; what comes first by ""."""
    found, current = {"": ""}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(Args|Returns|Yields|Raises|Example):", line):
            current = match[1]
            found[current] = ""
            continue
        if line and not line.startswith(" ") and current:
            current = ""
        found[current] += f"{line}\n"
    return found


def arguments(thing: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def unnamed(thing: Callable[..., object], text: str) -> list[str]:
    """The arguments that the section Args of a docstring has no entry for."""
    entries = re.findall(r"^    (\w+(?:, \w+)*):", parts(text).get("Args", ""), flags=re.MULTILINE)
    listed = {name for entry in entries for name in entry.split(", ")}
    return [name for name in arguments(thing) if name not in listed]


def gives(thing: Callable[..., object]) -> bool:
    """Whether a function returns anything."""
    return inspect.signature(thing).return_annotation not in (None, "None")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    thing = FUNCTIONS[name]
    text = inspect.getdoc(thing) or ""
    first, _, rest = text.partition("\n")
    assert first.endswith("."), "the first line says what the function does"
    assert not rest or rest.startswith("\n")
    assert unnamed(thing, text) == []
    wanted = ["Raises", "Example", *["Args"] * bool(arguments(thing)), *["Returns"] * gives(thing)]
    assert [one for one in wanted if one not in parts(text)] == []


@pytest.mark.parametrize("name", METHODS)
def test_a_public_method_says_what_it_takes_and_returns(name: str) -> None:
    thing = METHODS[name]
    text = inspect.getdoc(thing) or ""
    assert unnamed(thing, text) == []
    assert "Returns" in parts(text) or re.match("Return|Make|Store", text) or not gives(thing)


@pytest.mark.parametrize("name", [*sorted(LAYERS.keys() - {"nn.BitLinear"}), "WarploomConfig"])
def test_a_layer_says_what_it_is_made_of(name: str) -> None:
    kind = LAYERS.get(name) or getattr(warploom, name)
    text = inspect.getdoc(kind) or ""
    if "Args" not in parts(text):
        text = inspect.getdoc(kind.__init__) or ""
    assert unnamed(kind.__init__, text) == []


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - NOT_RUN))
def test_an_example_does_what_it_says(name: str) -> None:
    text = parts(inspect.getdoc(FUNCTIONS[name]) or "")["Example"]
    names = {"torch": torch, "warploom": warploom}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples
    told: list[str] = []
    torch.manual_seed(0)
    doctest.DocTestRunner().run(test, out=told.append)
    assert told == []


@pytest.mark.parametrize("name", sorted(NOT_RUN & FUNCTIONS.keys()))
def test_an_example_that_is_not_run_is_python(name: str) -> None:
    text = inspect.cleandoc(parts(inspect.getdoc(FUNCTIONS[name]) or "")["Example"])
    examples = doctest.DocTestParser().get_examples(text)
    ast.parse("\n".join(one.source for one in examples) if examples else text)
