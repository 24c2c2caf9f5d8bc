"""A user's file of records can be refused, by its name; it cannot break or hang a call."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sweeps import GPU
from test_records import ATTENTION, record

from warploom.cli import main
from warploom.generator import json_file, records_file
from warploom.generator.families.gemm import GemmShape
from warploom.generator.gpus import file_name
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import Records
from warploom.runtime import dispatch, records

GOOD = records_file.text(Records(GPU, (record(), ATTENTION)))
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's file is, which is the only one."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(records_file, "shipped", lambda gpu: None)
    (tmp_path / "user").mkdir()
    records.forget()
    yield tmp_path / "user" / file_name(GPU)
    records.forget()


def choose(m: int = 512) -> dispatch.Choice:
    device = DeviceLimits(132, GPU)
    return dispatch.choose(record().operation, GemmShape(m, 6144, 4096), device=device)


def changed(**fields: Any) -> str:
    """A file whose first record of a product has these fields."""
    document = json.loads(GOOD)
    document["records"][1] |= fields
    return json.dumps(document)


def timed(**fields: Any) -> str:
    best = json.loads(GOOD)["records"][1]["best"]
    return changed(best={**best, **fields})


def scheduled(**fields: Any) -> str:
    best = json.loads(GOOD)["records"][1]["best"]
    return changed(best={**best, "schedule": {**best["schedule"], **fields}})


def shaped(**fields: Any) -> str:
    return changed(shape={"m": 512, "n": 6144, "k": 4096, **fields})


def digits(text: str, count: int) -> str:
    return text.replace('"stages": 6', f'"stages": {"9" * count}', 1)


REFUSED = {
    "an integer of 5,000 digits": digits(GOOD, 5000),
    "an integer of 4,300 digits, of which a multiple has more": digits(GOOD, 4300),
    "an integer of 64 bits": scheduled(stages=2**63),
    "consumers that are true": scheduled(consumers=True),  # and equal 1
    "an extent of 400 digits": shaped(m=10**400),
    "seconds of 400 digits": timed(seconds=10**400),
    "multiprocessors of 400 digits": changed(
        environment={"multiprocessors": 10**400, "nvrtc": "13.0", "revision": 1}
    ),
    "multiprocessors that are true": changed(
        environment={"multiprocessors": True, "nvrtc": "13.0", "revision": 1}
    ),
    "a compiler's version that is a list": changed(
        environment={"multiprocessors": 132, "nvrtc": [], "revision": 1}
    ),
    "no environment": changed(environment=None),
    "deep nesting": NESTED,
    "deep nesting in a record": GOOD.replace('"2026-11-21T10:00:00+00:00"', "[" * 400 + "]" * 400),
    "deep nesting in a schedule": GOOD.replace('"along_m"', "[" * 400 + "]" * 400),
    "NaN": timed(seconds=float("nan")),
    "infinity": timed(seconds=1e400),
    "a time that no kernel takes": timed(seconds=5e-324),
    "a time that is true": timed(seconds=True),
    "a spread that is NaN": timed(spread=float("nan")),
    "a negative extent": shaped(k=-4096),
    "an extent of 0": shaped(n=0),
    "runners-up that are a number": changed(runners_up=3),
    "a runner-up that is a word": changed(runners_up=["word"]),
    "a record that is a list": GOOD.replace('"records": [', '"records": [[],', 1),
    "a date that is none": changed(measured=20261121),
    "a family that is a list": changed(operation={"family": []}),
    "another GPU": GOOD.replace(GPU, "NVIDIA H100", 1),
    "a GPU that is a number": GOOD.replace(f'"{GPU}"', "3", 1),
    "a lone surrogate": GOOD.replace("along_m", "\\ud800", 1),
    "nothing": "",
    "NUL": "\0" * 100,
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, json_file.MAXIMUM_BYTES + 1)


def utf_16(path: Path) -> None:
    path.write_text(GOOD, encoding="utf-16")


def no_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


def loop(path: Path) -> None:
    path.symlink_to(path)


FILES: dict[str, Callable[[Path], object]] = {
    **{name: (lambda path, text=text: path.write_text(text)) for name, text in REFUSED.items()},
    "a pipe": pipe,
    "a device without an end": endless,
    "over 64 MB": hole,
    "UTF-16": utf_16,
    "a folder": Path.mkdir,
    "a folder's name that is a file's": no_folder,
    "a link to itself": loop,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_named_once_and_calls_go_on_without(
    path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    untuned = choose()
    records.forget()
    FILES[name](path)
    with caplog.at_level(logging.WARNING):
        choices = [choose(), choose(1024)]
    assert choices[0].spec == untuned.spec
    assert all(str(path) in choice.reason for choice in choices)
    assert [str(path) in message for message in caplog.messages] == [True]
    if name == "another GPU":
        return  # where a file lies is of no matter to commands
    target = path.with_name("target.json")
    for arguments in (["merge", str(target), str(path)], ["show", str(path)], ["fit", str(path)]):
        done = CliRunner().invoke(main, ["records", *arguments])
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code == 1
    assert not target.exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"split": 0},
        {"split": -1},
        {"tile": [0, 0, 0]},
        {"tile": [-128, 128, 64]},
        {"group": 0},
        {"split_k": 2, "tile": [128, 0, 64]},  # which ended every call by a division by 0
        {"split_k": 2, "cluster": [0, 1]},
    ],
    ids=str,
)
def test_a_schedule_that_is_not_legal_is_left_out_at_its_shape_and_near_it(
    path: Path, fields: dict[str, Any]
) -> None:
    path.write_text(scheduled(**fields))
    best = json.loads(GOOD)["records"][1]["runners_up"][0]["schedule"]
    assert list(choose().spec.schedule.tile) == best["tile"]
    assert choose(600).reason.startswith("nearest record")


def test_a_file_that_memory_does_not_suffice_for_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(text: str) -> None:
        raise MemoryError

    path.write_text(GOOD)
    monkeypatch.setattr(json_file.json, "loads", exhausted)
    assert "too large for this machine's memory" in choose().reason
