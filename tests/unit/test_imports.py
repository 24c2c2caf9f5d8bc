"""Who may import whom: rooms in one direction, no circle, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import module_graph
import pytest

import warploom

ROOT = Path(__file__).parents[2]
# What each room imports, beside itself and FOUNDATION; the front door is the rest of src/warploom.
ROOMS = {
    "generator": {"configs", "templates"},
    "runtime": {"generator", "quantization", "configs"},
    "tuning": {"generator", "runtime", "configs"},
    "integrations": {"generator", "quantization", "runtime"},
    "quantization": {"generator"},
    "configs": set(),
    "templates": set(),
}
FOUNDATION = {
    f"warploom.{name}"
    for name in (
        *(
            "arguments",
            "atomic_file",
            "errors",
            "hooks",
            "log",
            "printable",
            "renamed",
            "suggestions",
        ),
        "variables",
    )
}
IMPORT_THE_GENERATOR = """
import importlib, pkgutil
import warploom.generator as generator
names = [module.name for module in pkgutil.walk_packages(generator.__path__, "warploom.generator.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 5, names
"""


MODULES = module_graph.modules(ROOT)


@cache
def edges(*, functions: bool = False) -> dict[str, set[str]]:
    """The modules that each module imports, and so the packages that these are in."""
    return module_graph.edges(MODULES, functions=functions)


def imports(module: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere, for type checkers too."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        yield from module_graph.imported(node, module, is_package=path.name == "__init__.py")


def circles() -> set[frozenset[str]]:
    """The sets of modules that import each other, at the top of files or inside functions."""
    graph = edges(functions=True)
    reach = {module: module_graph.closure(graph[module], graph) for module in MODULES}
    return {
        frozenset(other for other in reach if other in reach[one] and one in reach[other])
        for one in reach
        if one in reach[one]
    }


def room(module: str) -> str:
    return module.split(".")[1] if module.split(".")[1:2] and module.split(".")[1] in ROOMS else ""


def test_no_modules_import_each_other_in_a_circle() -> None:
    """None can be read, changed or imported first without the others; not in functions either."""
    assert len(MODULES) > 100
    assert circles() == set()


# What each package of attention's runtime imports of the others.
ATTENTION = {
    "_attention": set(),
    "attention_backward": {"_attention"},
    "attention_decode": {"_attention"},
    "attention_forward": {"_attention", "attention_backward", "attention_decode"},
}


def test_packages_of_attention_import_only_those_below_them() -> None:
    packages = {f"warploom.runtime.families.{name}": name for name in ATTENTION}
    mine = {
        module: packages[package]
        for module in MODULES
        for package in [".".join(module.split(".")[:4])]
        if package in packages
    }
    assert len(mine) > 20
    found = {
        (module, target)
        for module in mine
        for name in imports(module)
        for target in [name if name in mine else name.rpartition(".")[0]]
        if target in mine and mine[target] not in {mine[module], *ATTENTION[mine[module]]}
    }
    assert found == set()


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_below_it_even_inside_a_function(name: str) -> None:
    allowed = {"warploom", f"warploom.{name}", *(f"warploom.{other}" for other in ROOMS[name])}
    allowed |= FOUNDATION
    found = {
        (module, target)
        for module, targets in edges(functions=True).items()
        for target in targets
        if room(module) == name and ".".join(target.split(".")[:2]) not in allowed
    }
    assert found == set()


def test_the_foundation_imports_no_room() -> None:
    reached = module_graph.closure(FOUNDATION, edges())
    found = {target for target in reached if room(target)}
    assert found == set()


# ---- What is loaded ------------------------------------------------------------------------------


def modules_after(code: str, cwd: Path) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps([*sys.modules]))"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_generator_loads_neither_torch_nor_cuda(tmp_path: Path) -> None:
    loaded = modules_after(IMPORT_THE_GENERATOR, tmp_path)
    unwanted = {"torch", "cuda.bindings.driver", "cuda.bindings.nvrtc", "warploom.runtime"}
    assert loaded & unwanted == set()


def test_explain_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    """Normal numbers on meta load all of it, of which nothing is used: it takes a second."""
    code = "from click.testing import CliRunner\nfrom warploom.cli import main\n"
    for asked in (
        ["gemm", "--shapes", "64x128x256", "--epilogue", "bias,silu"],
        ["attention_forward", "--set", "dim=128,mask=causal", "--shapes", "1x4x4x256"],
    ):
        command = ["explain", *asked, "--gpu", "h200"]
        code += f"assert CliRunner().invoke(main, {command!r}).exit_code == 0\n"
    assert not modules_after(code, tmp_path) & {"torch._dynamo", "torch._inductor"}


def test_generator_never_imports_torch_or_the_driver_even_inside_a_function() -> None:
    unwanted = ("torch.", "cuda.bindings.driver.")
    found = {
        (module, name)
        for module in MODULES
        if room(module) == "generator"
        for name in imports(module)
        if f"{name}.".startswith(unwanted)
    }
    assert found == set()


def test_ray_is_imported_by_what_runs_on_it_alone_and_only_when_asked(tmp_path: Path) -> None:
    """It is an extra: everything else works without, and nothing waits two seconds for it."""
    found = {
        module
        for module in MODULES
        if any(name.partition(".")[0] == "ray" for name in imports(module))
    }
    assert found == {"warploom.tuning.fleet.actor", "warploom.tuning.fleet.cluster"}
    code = "import warploom.tuning.fleet.gpus, warploom.cli.tune, warploom.cli.compile"
    assert modules_after(code, tmp_path) & {"ray", "torch"} == set()


def test_importing_warploom_is_cheap(tmp_path: Path) -> None:
    loaded = modules_after("import warploom", tmp_path)
    assert loaded & {"torch", "numpy", "pydantic", "jinja2", "warploom.runtime"} == set()


def test_every_public_name_is_there_when_used() -> None:
    assert [name for name in warploom.__all__ if not hasattr(warploom, name)] == []
    assert not hasattr(warploom, "no_such_name")


def test_every_public_module_that_pages_name_is_there_after_import_warploom() -> None:
    """`warploom.float8.convert_to_float8_training` was an AttributeError without its own import."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    public = {
        path.stem
        for path in (ROOT / "src" / "warploom").glob("*.py")
        if re.search(rf"warploom\.{path.stem}\.\w", text)
    }
    assert {"float8", "functional", "nn"} <= public
    assert public - set(warploom.__all__) == set()
