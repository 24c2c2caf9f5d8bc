"""What the heads of both passes' sources say of warpgroups, registers and shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from warploom.generator.header import Barrier, Memory, counted

THREAD_REGISTERS = 65_536  # of an SM


def consumers(count: int) -> str:
    """Return which warpgroups the consumers are."""
    if count == 1:
        return "Warpgroup 1, the consumer"
    return f"Warpgroups 1 {'and' if count == 2 else 'to'} {count}, the consumers"


def registers(count: int, producer: int, budget: int) -> str:
    """Say what a thread may have, where there are so many consumers beside the producer."""
    launched = min(255, THREAD_REGISTERS // (128 * (1 + count)) // 8 * 8)
    if not producer:
        return f"Registers per thread: at most {launched}, without setmaxnreg"
    total = f"{producer} + {count} * {budget} <= {1 + count} * {launched}"
    return (
        f"Registers per thread: {launched} at launch; setmaxnreg: producer {producer}, "
        f"consumers {budget} ({total})"
    )


def needed(expected: int, held: dict[str, int]) -> str:
    """Say what a consumer's thread is expected to need its registers for."""
    parts = [f"{count} {what}" for what, count in held.items() if count]
    others = expected - sum(held.values())
    return f"  A consumer thread needs about {expected}: {', '.join(parts)}, {others} others"


def modifiers(warps: int, staging_bytes: int, words_bytes: int) -> Iterator[Memory]:
    """Yield what biases, masks and dropout have in shared memory."""
    if staging_bytes:
        factors = f"{warps} warps * {staging_bytes // warps}"
        yield Memory("staging", factors, staging_bytes)
    if words_bytes:
        yield Memory("words", "a bit for each weight of the tiles", words_bytes)


def completed(rows: Iterable[Memory], shared_bytes: int, others: str) -> list[Memory]:
    """Add what the launch asks for beside these rows: the `others` of the members."""
    found = [*rows]
    rest = shared_bytes - sum(row.bytes for row in found)
    return [*found, Memory(others, "and padding", rest)]


def words(makers: int, count: int) -> Iterator[Barrier]:
    """Yield the barriers of dropout's random bits."""
    made = counted(makers, "arrival")
    yield Barrier("words_full", made + ": warps that make bits", "consumers", "bits of a tile")
    read = f"{4 * count} arrivals: consumer warps"
    yield Barrier("words_empty", read, "makers", "bits until they are read")
