"""A file that one process writes at a time is the one at its path, whoever replaced it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from warploom.generator.held_file import hold


def test_a_file_that_takes_the_place_of_the_one_that_was_opened_is_held_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are replaced whole: what the loser of a race then wrote was in a file of no name."""
    path, newer = tmp_path / "records.json", tmp_path / "newer"
    path.write_text("old")
    newer.write_text("new")
    flock = fcntl.flock

    def replaced_first(descriptor: int, operation: int) -> None:
        if newer.exists():
            newer.replace(path)  # by another process, between the opening and the lock
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    held = hold(path, 1.0)
    try:
        assert os.pread(held, 3, 0) == b"new"
    finally:
        os.close(held)


def test_a_file_that_is_held_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    held = hold(tmp_path / "journal", 1.0)
    with pytest.raises(TimeoutError, match="in use"):
        hold(tmp_path / "journal", 0.05)
    os.close(held)
    os.close(hold(tmp_path / "journal", 0.05))
