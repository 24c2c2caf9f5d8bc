"""Registers that asynchronous instructions read while they run, followed through machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\d+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_WIDTHS = {".64": 2, ".128": 4}
_NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "WARP", "MEMBAR", "SYNCS", "UTMA", "UBLKCP")


def disassembler() -> str | None:
    """nvdisasm of the CUDA toolkit, or of a wheel of it; None where there is none."""
    found = shutil.which("nvdisasm", path="/usr/local/cuda/bin") or shutil.which("nvdisasm")
    if found:
        return found
    try:
        import nvidia
    except ImportError:
        return None
    wheels = (path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm"))
    return str(next(wheels, "")) or None


@dataclass(frozen=True)
class Instruction:
    """One instruction of a kernel: its predicate, name and operands."""

    predicate: str
    name: str
    operands: str

    @property
    def metadata(self) -> int | None:
        """The register of a sparse wgmma's metadata; None of other instructions."""
        if "GMMA.SP" not in self.name:
            return None
        # The accumulators come first and, as what is added to, third; a last constant selects.
        return int(re.findall(r"\bR(\d+)", self.operands)[-1])

    @property
    def read_while_running(self) -> range:
        """The registers that a wgmma reads until it is done: A, or a sparse one's metadata."""
        if self.metadata is not None:
            return range(self.metadata, self.metadata + 1)
        a = re.match(r"R\d+, R(\d+)(?:\.reuse)?, gdesc", self.operands)
        return range(int(a[1]), int(a[1]) + 4) if a and "GMMA" in self.name else range(0)

    @property
    def commits(self) -> bool:
        """Whether a group of wgmma ends here."""
        return "GMMA" in self.name and "gsb0" in self.operands

    @property
    def waits_for(self) -> int | None:
        """How many groups may still run behind this; None where it does not wait for groups."""
        waits = self.name.startswith("WARPGROUP.DEPBAR")
        return int(self.operands.split(",")[-1], 0) if waits else None

    def writes(self, register: int) -> bool:
        """Whether the register is among those that are written; wgmma's accumulators are not."""
        found = re.match(r"(?:P\w+,\s*)?R(\d+)\b", self.operands)
        if not found or self.name.startswith(_NO_RESULT) or "GMMA" in self.name:
            return False
        wide = next((n for end, n in _WIDTHS.items() if end in self.name), 1)
        wide = 2 if ".WIDE" in self.name else wide
        return int(found[1]) <= register < int(found[1]) + wide


def instructions(
    program: str, cubin: bytes, path: Path
) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a cubin, whose kernels follow each other, and where its labels are."""
    path.write_bytes(cubin)
    text = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True).stdout
    listed: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(listed)
        elif found := _LINE.match(line):
            listed.append(Instruction(found[1] or "", found[2], found[3]))
    return listed, labels


def overwritten(listed: list[Instruction], labels: dict[str, int]) -> Iterator[str]:
    """Instructions that write a register which a wgmma may still be reading.

    Every path from each wgmma is followed until a wait covers its group.
    """
    for start, first in enumerate(listed):
        if not first.read_while_running:
            continue
        seen = set[tuple[int, int]]()
        # The groups that have been committed since, its own included.
        ahead = [(start + 1, int(first.commits))]
        while ahead:
            at, groups = ahead.pop()
            if (at, groups) in seen or at >= len(listed):
                continue
            seen.add((at, groups))
            one = listed[at]
            if one.waits_for is not None and groups > one.waits_for:
                continue
            if any(one.writes(register) for register in first.read_while_running):
                yield f"{one.name} {one.operands}: of {first.name} {first.operands}"
                continue
            if one.name.startswith("BRA"):
                ahead.append((labels[one.operands.split("(")[1][:-1]], groups))
            if one.name in ("EXIT", "BRA") and not one.predicate:
                continue
            ahead.append((at + 1, min(groups + one.commits, 2)))
