"""SASS of a cubin by nvdisasm: instructions, the source lines they come from, live registers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

TOOL = "nvdisasm"
WHEEL = "nvidia-cuda-nvdisasm"
_TIMEOUT = 120  # seconds: a kernel takes less than one

_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L\S+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+)(.*?);")
_FILE = re.compile(r'//## File "([^"]*)", line (\d+)')
_LIVE = re.compile(r"//\s*\|\s*(\d*)\s*\|")
_TARGET = re.compile(r"`\((\.L\S+?)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    address   in bytes from the function's start
    opcode    with its modifiers, such as `HGMMA.64x256x16.F32.BF16`
    text      as nvdisasm writes it, with its predicate
    line      of the kernel's source, counted from 1, into which it was inlined; 0: none is known
    header    `file:line` where it is written, if that is one of CUTLASS's or CUDA's headers
    live      general registers that are live at it; None where nvdisasm does not tell
    target    the address that it branches to; None of an instruction that names no label
    """

    address: int
    opcode: str
    text: str
    line: int = 0
    header: str = ""
    live: int | None = None
    target: int | None = None


def find() -> Path | None:
    """Return nvdisasm: of PATH, CUDA_HOME or CUDA_PATH, NVIDIA's wheel, or /usr/local/cuda."""
    if found := shutil.which(TOOL):
        return Path(found)
    roots = [Path(root) for name in ("CUDA_HOME", "CUDA_PATH") if (root := os.environ.get(name))]
    package = importlib.util.find_spec("nvidia")
    for location in (package and package.submodule_search_locations) or ():
        roots += [Path(location) / "cu13", Path(location) / "cuda_nvdisasm"]
    for folder in (*roots, Path("/usr/local/cuda")):
        tool = folder / "bin" / TOOL
        if os.access(tool, os.X_OK):
            return tool
    return None


def disassemble(tool: Path, cubin: bytes, source_name: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function of a cubin that has line information.

    Args:
        tool: nvdisasm.
        cubin: Its bytes.
        source_name: What the source's file is called in the line information.

    Raises:
        OSError: nvdisasm cannot be run, or refuses the cubin; the message is its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        lines, live = _run(tool, "-gi", path), _run(tool, "-lrm", "count", path)
    functions = _parse(lines, source_name)
    for name, told in _live(live).items():
        functions[name] = [
            replace(one, live=told.get(one.address)) for one in functions.get(name, ())
        ]
    return functions


def _run(tool: Path, *arguments: str | Path) -> str:
    try:
        done = subprocess.run(  # noqa: S603 (the tool that was found, on a file of our own)
            [tool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{tool} took more than {_TIMEOUT} seconds") from error
    if done.returncode:
        raise OSError(f"{tool}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _parse(text: str, source_name: str) -> dict[str, list[Instruction]]:
    functions: dict[str, list[Instruction]] = {}
    labels: dict[str, int] = {}
    targets: dict[tuple[str, int], str] = {}
    name, line, header, fresh, waiting = "", 0, "", True, list[str]()
    for row in text.splitlines():
        if row.startswith("//-----"):
            name = ""  # another section
        elif found := _FUNCTION.match(row):
            name, line, header = found[1], 0, ""
            functions[name] = []
        elif not name:
            continue
        elif found := _FILE.search(row):
            if fresh:  # the first of a chain is where it is written, others where it was inlined
                line, header, fresh = 0, "", False
            if found[1].endswith(source_name):
                line = line or int(found[2])
            elif not line and not header:
                header = f"{_short(found[1])}:{found[2]}"
        elif found := _LABEL.match(row):
            waiting.append(found[1])
        elif found := _INSTRUCTION.match(row):
            address, predicate, opcode, operands = int(found[1], 16), *found.groups()[1:]
            for label in waiting:
                labels[label] = address
            waiting, fresh = [], True
            if target := _TARGET.search(operands):
                targets[name, address] = target[1]
            text_of = f"{predicate or ''}{opcode}{operands.rstrip()}"
            functions[name].append(Instruction(address, opcode, text_of, line, header))
    return {
        name: [
            replace(one, target=labels.get(targets.get((name, one.address), "")))
            for one in instructions
        ]
        for name, instructions in functions.items()
    }


def _live(text: str) -> dict[str, dict[int, int]]:
    """The live general registers at each address of each function."""
    functions: dict[str, dict[int, int]] = {}
    name = ""
    for row in text.splitlines():
        if row.startswith("//-----"):
            name = ""
        elif found := _FUNCTION.match(row):
            name = found[1]
            functions[name] = {}
        elif name and (found := _INSTRUCTION.match(row)) and (told := _LIVE.search(row)):
            functions[name][int(found[1], 16)] = int(told[1] or 0)
    return functions


def _short(path: str) -> str:
    """A header's path as it is included."""
    _, separator, inner = path.rpartition("/include/")
    return inner if separator else Path(path).name
