"""Errors travel: between processes and through `copy`, with everything that hangs on them."""

from __future__ import annotations

import copy
import multiprocessing

import pytest

from warploom import errors
from warploom.errors import CompilationError, WarploomError


def kinds(base: type[WarploomError] = WarploomError) -> list[type[WarploomError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


def make(kind: type[WarploomError]) -> WarploomError:
    if kind is CompilationError:
        return CompilationError("gemm", log="a.cu(1): error: no\nmore", source="int x;")
    return kind("3 of 4", rule="must be 4", fix="give 4")


def test_every_error_of_the_module_is_among_the_kinds() -> None:
    assert {getattr(errors, name) for name in dir(errors) if name.endswith("Error")} <= set(kinds())


@pytest.mark.parametrize("kind", kinds())
def test_an_error_arrives_from_another_process_whole(kind: type[WarploomError]) -> None:
    error = make(kind)
    error.add_note("while testing")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        sender.send(error)
        arrived = receiver.recv()
    for other in (arrived, copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.exit_code == error.exit_code
