"""What SASS consists of: classes of instructions, loops, and how many of each class are in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from warploom.reports.disassembly import Instruction

# Class -> how its opcodes begin, in the order in which they are shown; the first match counts.
CLASSES: dict[str, str] = {
    "tensor core": r"[HIQBD]G?MMA",
    "floating point": r"F(ADD|MUL|FMA|MNMX|SET|SETP|SEL|CHK|SWZADD|2F|2FP|2I|RND)|H(ADD|MUL|FMA"
    r"|MNMX|SET|SETP)2?|VHMNMX|D(ADD|MUL|FMA|SETP)|I2F|F2I|I2FP|F2FP",
    "shared memory": r"LDS|STS|STSM|LDSM|ATOMS|MOVM",
    "integer and address": r"U?(IMAD|IADD3?|IADD|LEA|SHF(?!L)|SHL|SHR|LOP3?|ISETP|IMNMX|VIADD|"
    r"VIMNMX|IABS|SGXT|BMSK|FLO|POPC|PRMT|BREV|IDP|ISCADD|VIADDMNMX)",
    "special function": r"MUFU",
    "global and constant memory": r"LDG|STG|LD\b|ST\b|ATOM|RED(?!UX)|UTMA|UBLKCP|LDL|STL|CCTL|"
    r"U?LDC",
    "synchronization": r"SYNCS|BAR|MEMBAR|FENCE|WARPSYNC|WARPGROUP|UCGABAR|ERRBAR|ACQBULK|"
    r"NANOSLEEP|DEPBAR|BSSY|BSYNC|VOTE|ELECT|B2R|CGAERRBAR|USETMAXREG|REDUX|SHFL|ACQSHMINIT",
    "moves and control": r".*",
}
_PATTERNS = {name: re.compile(rf"(?:{pattern})") for name, pattern in CLASSES.items()}


def class_of(opcode: str) -> str:
    """Return the class of an opcode."""
    return next(name for name, pattern in _PATTERNS.items() if pattern.match(opcode))


def mix(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Return how many instructions of each class there are, padding left out."""
    counts = Counter(class_of(one.opcode) for one in instructions if one.opcode != "NOP")
    return {name: counts[name] for name in CLASSES}


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions between the target of a backward branch and the last branch to it.

    Of a loop with loops inside, these count too: `depth` is how many loops it is in.
    """

    first: int  # address
    last: int
    instructions: tuple[Instruction, ...]
    depth: int = 0

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last source line that more than a stray instruction is of."""
        lines = sorted(one.line for one in self.instructions if one.line)
        return (lines[len(lines) // 20], lines[-1 - len(lines) // 20]) if lines else (0, 0)


def loops(instructions: Sequence[Instruction], least: int = 4) -> list[Loop]:
    """Return the loops of a function, in the order of addresses.

    Loops of fewer than `least` instructions, which wait for a barrier, are left out, and so are
    jumps back from code that the compiler put behind the function: its end is not a loop's.
    """
    last: dict[int, int] = {}
    end = next((one.address for one in reversed(instructions) if one.opcode == "EXIT"), 0)
    for one in instructions:
        if one.target is not None and one.target <= one.address <= end and "BRA" in one.opcode:
            last[one.target] = max(one.address, last.get(one.target, 0))
    spans = sorted(last.items(), key=lambda span: (span[0], -span[1]))
    found = []
    for first, final in spans:
        inside = tuple(one for one in instructions if first <= one.address <= final)
        depth = sum(a <= first and final <= b for a, b in spans) - 1
        if len(inside) >= least:
            found.append(Loop(first, final, inside, depth))
    return found
