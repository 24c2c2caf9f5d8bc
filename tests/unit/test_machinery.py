"""The machinery names no family: one is added by its folders, and nothing else is touched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from warploom.generator import families
from warploom.generator.epilogue import STEPS

ROOT = Path(__file__).parents[2]
ROOMS = ("generator", "quantization", "runtime", "tuning", "src/warploom/cli", "benchmarks")
# A family's own places, what several share, and the functions that users call; and packages that
# call a layout of weights, a checkpoint of several ("mixed-precision"), or fields of a model's file
# ("num_attention_heads"), as a family is called. And a program that measures one family alone.
PLACES = re.compile(
    r"\w+/families/\w+/.*|benchmarks/peers/.*|runtime/api\.py|generator/models\.py"
    r"|quantization/importers/(?:awq|compressed_tensors)\.py|benchmarks/attention_errors\.py"
)
# Of a family whose name is a word of Python and torch (typing.cast, autocast), or of the methods of
# weights: its modules, classes and kernels. The first word of sparse_gemm is one of torch
# (torch.sparse), that of fp32_pieces a type: their whole names count.
COMMON = {
    "cast": r"families\.cast\b|(?-i:\bCast[A-Z])|cast_sm",
    "dequantize": r"families\.dequantize\b|(?-i:\bDequantize[A-Z])|dequantize_sm",
    "fp32_pieces": r"fp32_?pieces",
    "sparse_gemm": r"sparse_?gemm",
}


def words() -> re.Pattern[str]:
    """What a family is called, and what several are: the first word of their names.

    A word that an epilogue's step is called stands for no family by itself.
    """
    names = {*families.names()} - COMMON.keys()
    first = {name.partition("_")[0] for name in names} - {one.step for one in STEPS}
    assert len(first) > 1
    whole = {name.replace("_", "_?") for name in names}
    return re.compile("|".join([*sorted(first | whole), *COMMON.values()]), re.IGNORECASE)


def said(path: Path) -> Iterator[str]:
    """Every identifier and every string of a file, but for documentation."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        for name in ("id", "attr", "arg", "name", "asname", "module", "value"):
            if isinstance(text := getattr(node, name, None), str):
                yield text


def test_no_part_of_the_machinery_names_a_family() -> None:
    pattern = words()
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = {
        name
        for path in paths
        if not PLACES.fullmatch(name := path.relative_to(ROOT).as_posix())
        and any(map(pattern.search, (name, *said(path))))
    }
    assert len(paths) > 100
    assert found == set(), "these name a family; what is a family's goes to its folder"
