"""What a module does is told from how it is written: what may decide something counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from module_graph import behaviour, closure, edges, modules

SAME = {
    "a comment": ("x = 1\n", "x = 1  # one\n"),
    "docstrings": ("def f():\n    return 1\n", '"""M."""\ndef f():\n    """F."""\n    return 1\n'),
    "layout": ("f(1, 2)\n", "f(\n    1,\n    2,\n)\n"),
    "a local name": (
        "def f(a):\n    b = a\n    return b\n",
        "def f(a):\n    c = a\n    return c\n",
    ),
    "of a loop": ("def f(a):\n for b in a: b()\n", "def f(a):\n for c in a: c()\n"),
    "of an inner function": (
        "def f():\n b = 1\n def g(): return b\n return g\n",
        "def f():\n c = 1\n def g(): return c\n return g\n",
    ),
    "of a comprehension": ("[a for a in b if a]\n", "[c for c in b if c]\n"),
    "types": (
        "from typing import TYPE_CHECKING\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import b\n",
    ),
}
OTHER = {
    "a number": ("x = 1\n", "x = 2\n"),
    "its type": ("x = 1\n", "x = 1.0\n"),
    "a global name": ("x = 1\n", "y = 1\n"),
    "a parameter": ("def f(a): return a\n", "def f(b): return b\n"),
    "an attribute": ("a.b\n", "a.c\n"),
    "an inner function's name": ("def f():\n def g(): pass\n", "def f():\n def h(): pass\n"),
    "which local": ("def f():\n a = b = 1\n b = a\n", "def f():\n a = b = 1\n a = b\n"),
    "a local for a global": ("def f():\n a = 1\n return a\n", "def f():\n a = 1\n return b\n"),
    "a global for a local": ("def f():\n a = 1\n return b\n", "def f():\n b = 1\n return b\n"),
    "a caught name": (
        "def f():\n e = 1\n try: e\n except E as e: return e\n",
        "def f():\n g = 1\n try: g\n except E as e: return g\n",
    ),
    "an imported name": (
        "def f():\n import a\n a = a\n return a\n",
        "def f():\n import a\n b = a\n return a\n",
    ),
    "a global statement": ("def f():\n global a\n a = 1\n", "def f():\n global b\n b = 1\n"),
    "an attribute of a class": (
        "def f():\n class A:\n  b = 1\n return A\n",
        "def f():\n class A:\n  c = 1\n return A\n",
    ),
    "a class attribute for a local": (
        "def f():\n b = 1\n class A:\n  b = 2\n  def g(): return b\n",
        "def f():\n c = 1\n class A:\n  b = 2\n  def g(): return b\n",
    ),
    "names that are read": (
        "def f():\n a = 1\n return locals()\n",
        "def f():\n b = 1\n return locals()\n",
    ),
    "a mangled name": ("def f():\n __a = 1\n", "def f():\n __b = 1\n"),
    "names in a walrus": ("[a := b for b in c]\n", "[d := b for b in c]\n"),
    "a loop's else": ("for a in b: c()\nelse: d()\n", "for a in b: c()\nd()\n"),
    "a named value": ("def f(a): return f'{a=}'\n", "def f(a): return f'{a}'\n"),
    "an order": ("f(a, b)\n", "f(b, a)\n"),
    "a star": ("f(*a)\n", "f(**a)\n"),
    "a default": ("def f(a, b=1): pass\n", "def f(a=1, *, b): pass\n"),
    "a decorator": ("def f(): pass\n", "@a\ndef f(): pass\n"),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_what_decides_nothing_is_left_out(one: str, other: str) -> None:
    assert behaviour(one) == behaviour(other)


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_may_decide_something_counts(one: str, other: str) -> None:
    assert behaviour(one) != behaviour(other)


def test_a_hash_is_that_of_every_version_of_python() -> None:
    """A GPU's machine may have another: fields that a version adds are empty, and left out."""
    text = "def f(a: int = 1, *b, **c) -> None:\n    return f'{a!r:>{b}}' + [x for x in c]\n"
    digest = "817171d1a8fc6ceb2fefb9a091b20a42623cd51a9c515b8fc56305694c5e9563"
    assert behaviour(text) == digest


def test_imports_in_functions_are_followed_but_not_those_for_types(tmp_path: Path) -> None:
    files = {
        "a.py": "def f():\n    from warploom.runtime import b\n",
        "b.py": "import typing\nif typing.TYPE_CHECKING:\n    import warploom.runtime.c\n",
        "c.py": "",
        "d/__init__.py": "from warploom.runtime.d.e import x\n",
        "d/e.py": "from warploom.runtime.a import f\n",
    }
    for name, text in files.items():
        path = tmp_path / "runtime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = edges(modules(tmp_path), functions=True)

    def reached(name: str) -> set[str]:
        names = closure({f"warploom.runtime.{name}"}, graph)
        return {module.removeprefix("warploom.runtime.") for module in names}

    assert reached("a") == {"a", "b"}
    assert reached("d") == {"d", "d.e", "a", "b"}
    assert edges(modules(tmp_path))["warploom.runtime.a"] == set()
