"""Which modules a module of the package imports, and what code is without comments and names.

Everything here reads files and imports none of them, so that it serves any checkout.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = "warploom"
# Directories at the top of a checkout that are subpackages, by links in src/warploom.
SUBPACKAGES = (
    "configs",
    "generator",
    "integrations",
    "quantization",
    "runtime",
    "templates",
    "tuning",
)
# Where a module uses one of these, the names of its local variables may decide what it does.
_READERS_OF_NAMES = {"currentframe", "_getframe", "dir", "eval", "exec", "locals", "vars"}
DESCRIPTION = (
    "doc"  # the keyword of a knob that is shown in documents and schemas, and nowhere else
)
_NO_BEHAVIOUR = {"ctx", "kind", "type_comment", "type_ignores"}  # fields of syntax trees

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


# ---- Imports -------------------------------------------------------------------------------------


def modules(root: Path) -> dict[str, Path]:
    """Return the file of every module of the package in the checkout at `root`, by dotted name."""
    package = root / "src" / PACKAGE
    folders = {PACKAGE: package, **{f"{PACKAGE}.{name}": root / name for name in SUBPACKAGES}}
    return {
        ".".join([name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for name, folder in folders.items()
        for inner, _, files in os.walk(folder)  # it follows no links
        for path in (Path(inner, file) for file in files)
        if path.suffix == ".py"
    }


def imported(node: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the dotted names that a statement of `module` imports: modules, or names in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = module.split(".")[: len(module.split(".")) + is_package - node.level]
        base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def statements(node: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported; with `functions`, when they are called too."""
    for inner in ast.iter_child_nodes(node):
        if is_for_type_checkers(inner):
            continue
        if functions or not isinstance(inner, FunctionNode):
            yield inner
            yield from statements(inner, functions=functions)


def is_for_type_checkers(node: ast.AST) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:` without an else."""
    return isinstance(node, ast.If) and not node.orelse and _last_name(node.test) == "TYPE_CHECKING"


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def edges(files: Mapping[str, Path], *, functions: bool = False) -> dict[str, set[str]]:
    """Return which of the modules `files` each of them imports, and the packages around these."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        is_package = path.name == "__init__.py"
        for name in _names(path.read_text(), module, is_package, functions):
            target = name if name in files else name.rpartition(".")[0]
            parents = [target[:i] for i, letter in enumerate(target) if letter == "."]
            around = [parent for parent in parents if not f"{module}.".startswith(f"{parent}.")]
            graph[module] |= ({target, *around} & files.keys()) - {module}
    return graph


@cache
def _names(text: str, module: str, is_package: bool, functions: bool) -> frozenset[str]:
    """Return the dotted names that the text of a module imports."""
    return frozenset(
        name
        for node in statements(_parsed(text), functions=functions)
        for name in imported(node, module, is_package=is_package)
    )


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def closure(start: Iterable[str], graph: Mapping[str, set[str]]) -> set[str]:
    """Return `start` and all that these modules import, and so on."""
    reached: set[str] = set()
    ahead = [*start]
    while ahead:
        if (module := ahead.pop()) not in reached:
            reached.add(module)
            ahead += graph.get(module, ())
    return reached


# ---- What code does ------------------------------------------------------------------------------


@cache
def behaviour(text: str) -> str:
    """Return a hash of what a module does: comments, docstrings, layout and what describes a knob
    do not change it.

    Neither do code for type checkers and the names of local variables, where these are bound by
    assignments and loops alone. Other names count, since other code may use them: those of
    parameters, attributes, functions and classes. The hash is the same on all versions of Python.
    """
    tree = _parsed(text)
    hashed = hashlib.sha256()
    for token in _Serialiser(tree).tokens(tree, {}):
        hashed.update(f"{len(token)}:{token}".encode())
    return hashed.hexdigest()


Variable = tuple[int, str]  # the number of a scope, and a name in it
Scope = Mapping[str, Variable]  # local variables that code can see, by their names


class _Serialiser:
    """Writes a syntax tree as tokens, with numbers in place of the names of local variables."""

    def __init__(self, tree: ast.Module) -> None:
        self.scopes = 0
        self.numbers: dict[Variable, int] = {}  # in the order in which variables are met
        nodes = [*ast.walk(tree)]
        self.renames = not any(_last_name(node) in _READERS_OF_NAMES for node in nodes)
        self.fixed: set[str] = set()  # names that count wherever they are
        for node in nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                self.fixed.update(node.names)
            elif isinstance(node, ast.ClassDef):
                assigned, otherwise = _bound(node.body)
                self.fixed |= assigned | otherwise

    def tokens(self, node: ast.AST, scope: Scope) -> Iterator[str]:
        """Yield the tokens of a node, in a scope."""
        yield type(node).__name__
        if isinstance(node, ast.Name):
            variable = scope.get(node.id)
            number = self.numbers.setdefault(variable, len(self.numbers)) if variable else ""
            yield f"local {number}" if variable else node.id
        elif isinstance(node, FunctionNode):
            arguments = {inner.arg for inner in ast.walk(node.args) if isinstance(inner, ast.arg)}
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            assigned, otherwise = _bound(body)
            own = self._inner(scope, assigned, otherwise | arguments)
            yield from self._fields(node, scope, without={"body"})
            yield from self._field("body", body, own)
        elif isinstance(node, Comprehension):
            targets, _ = _bound([generator.target for generator in node.generators])
            own = self._inner(scope, targets, set())
            first, *others = node.generators
            yield from self.tokens(first.iter, scope)
            yield from self._fields(first, own, without={"iter"})
            yield from self._field("generators", others, own)
            yield from self._fields(node, own, without={"generators"})
        else:
            yield from self._fields(node, scope)
        yield "end"

    def _inner(self, scope: Scope, assigned: set[str], otherwise: set[str]) -> Scope:
        """Return the scope of a function or comprehension, by what it binds and how."""
        self.scopes += 1
        bound = assigned | otherwise
        around = {name: variable for name, variable in scope.items() if name not in bound}
        if not self.renames:
            return around
        mangled = {name for name in assigned if name.startswith("__")}
        own = assigned - otherwise - self.fixed - mangled
        return around | {name: (self.scopes, name) for name in own}

    def _fields(self, node: ast.AST, scope: Scope, without: Collection[str] = ()) -> Iterator[str]:
        for name, value in ast.iter_fields(node):
            if name not in without and name not in _NO_BEHAVIOUR:
                yield from self._field(name, value, scope)

    def _field(self, name: str, value: object, scope: Scope) -> Iterator[str]:
        """Yield the tokens of a field; none where it is empty, which versions of Python may add."""
        inner = value if isinstance(value, list) else [value]
        does = [one for one in inner if not _does_nothing(one)]
        if value is None or not does:
            return
        yield f"{name}="
        for one in does:
            if isinstance(one, ast.AST):
                yield from self.tokens(one, scope)
            else:
                yield f"{type(one).__name__} {one!r}"


def _does_nothing(node: object) -> bool:
    """Return whether a node decides nothing when it runs: a statement, or what describes a knob."""
    if isinstance(node, ast.keyword):
        return node.arg == DESCRIPTION
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring is one of these
    return isinstance(node, ast.Pass) or (isinstance(node, ast.AST) and is_for_type_checkers(node))


def _bound(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that statements bind in their own scope: by assignment, and otherwise.

    What inner functions, classes and comprehensions bind is of inner scopes, but for `:=` in a
    comprehension.
    """
    assigned: set[str] = set()
    otherwise: set[str] = set()
    ahead = [(node, False) for node in nodes]
    while ahead:
        node, in_comprehension = ahead.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            if not in_comprehension:
                assigned.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            otherwise |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            otherwise.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            otherwise.add(node.rest)
        elif isinstance(node, ast.NamedExpr):
            ahead += [(node.target, False), (node.value, in_comprehension)]
            continue
        if isinstance(node, Named):
            otherwise.add(node.name)
            outside = [*node.decorator_list]  # which the scope around evaluates, as what follows
            if isinstance(node, ast.ClassDef):
                outside += [*node.bases, *(keyword.value for keyword in node.keywords)]
            else:
                outside += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            ahead += [(inner, in_comprehension) for inner in outside]
        elif isinstance(node, ast.Lambda):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            ahead += [(inner, in_comprehension) for inner in defaults]
        else:
            inside = in_comprehension or isinstance(node, Comprehension)
            ahead += [(inner, inside) for inner in ast.iter_child_nodes(node)]
    return assigned, otherwise
