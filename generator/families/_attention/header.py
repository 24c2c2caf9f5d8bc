"""Tables in the first lines of a kernel: its registers, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.generator.wgmma import WARPGROUP, TemplateText

REGISTER_FILE = 65536  # 32-bit registers of an SM
MOST_REGISTERS = 255  # of a thread
SHARED_BYTES = 232448  # that a CTA may have
ALLOCATION = 8  # registers are given to threads by so many


def table(rows: Sequence[Sequence[object]], *, numbers: int = 0) -> TemplateText:
    """Return aligned lines of a comment; the first `numbers` columns are flush right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(width) if i < numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"//   {'  '.join(cells)}".rstrip())
    return TemplateText("\n".join(lines))


def memory(buffers: Sequence[tuple[str, int, str]], total: int) -> TemplateText:
    """Return where each buffer (its name, bytes, what it is) begins, in the order of memory."""
    rows, offset = [], 0
    for name, size, meaning in buffers:
        if size > 0:
            rows.append((offset, name, meaning))
            offset += size
    return TemplateText(f"{table(rows, numbers=1)}\n//   {total:,} in all, of {SHARED_BYTES:,}")


def registers(consumers: int, producer: int, consumer: int) -> str:
    """Return who has how many registers, and how setmaxnreg shares them out."""
    warpgroups = 1 + consumers
    launched = REGISTER_FILE // (warpgroups * WARPGROUP) // ALLOCATION * ALLOCATION
    threads = f"{warpgroups * WARPGROUP} threads"
    if producer == 0:
        return f"{threads} may have {min(launched, MOST_REGISTERS)} each: nothing is moved."
    spent = f"{producer} + {consumers} x {consumer} = {producer + consumers * consumer}"
    return (
        f"{threads} start with {launched} each (launch bounds). setmaxnreg moves them: "
        f"{spent} of {warpgroups} x {launched}."
    )
