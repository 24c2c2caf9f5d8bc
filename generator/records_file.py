"""The files of tuned records: JSON, one for each GPU kind, sorted, a contender to a line.

Shipped ones lie in configs/records, a user's own in WARPLOOM_RECORDS_DIR or the user's data folder.
A file that is damaged, cut short or of a newer schema is refused and left as it is. Files are
replaced whole, under a lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from warploom.atomic_file import beside, replace_file
from warploom.errors import RecordsError, SpecificationError
from warploom.generator import json_file
from warploom.generator.gpus import file_name
from warploom.generator.held_file import hold, unwritable
from warploom.generator.records import Record, Records, from_plain, to_plain

SCHEMA = 1
WAIT_SECONDS = 60.0  # for another process that writes
_LISTS = ("runners_up",)
_ELSEWHERE = "set WARPLOOM_RECORDS_DIR, or give another path"


def folder() -> Path:
    """Where this user's records lie: WARPLOOM_RECORDS_DIR, or the user's data folder."""
    given = os.environ.get("WARPLOOM_RECORDS_DIR")
    return Path(given) if given else platformdirs.user_data_path("warploom") / "records"


def shipped(gpu: str) -> Path | None:
    """The file of records that came with the package; None where there is none for this GPU."""
    path = Path(str(resources.files("warploom.configs").joinpath("records", file_name(gpu))))
    return path if path.is_file() else None


def every() -> list[Path]:
    """Every file of records there is: those that came with the package, then the user's."""
    came = Path(str(resources.files("warploom.configs").joinpath("records")))
    return [path for where in (came, folder()) for path in sorted(where.glob("*.json"))]


def known(path: Path, gpu: str) -> Records:
    """Read the file of a GPU kind's records; there are none of it where there is no such file.

    RecordsError as `read` has it, and for a file of another GPU kind.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return Records(gpu)
    except OSError as error:
        raise _unreadable(path, error) from error
    found = read(path)
    if found.gpu != gpu:
        raise RecordsError(
            f"{path}: records of {found.gpu}",
            rule=f"must be of {gpu}",
            fix="keep a file for each GPU kind",
        )
    return found


def read(path: Path) -> Records:
    """Read a file of records; RecordsError for one that cannot be read, or is not one."""
    try:
        document = json_file.parse(json_file.content(path))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise RecordsError(
            f"{path}: {error}",
            rule="a file of records must be one JSON object; this one is damaged or cut short",
            fix="restore it, or move it away and tune again; the file was not changed",
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise RecordsError(
            f"{path}: no schema",
            rule="a file of records must name its schema",
            fix="this is some other JSON file: give another path",
        )
    if document["schema"] != SCHEMA:
        newer = document["schema"] > SCHEMA
        raise RecordsError(
            f"{path}: schema {document['schema']}",
            rule=f"this version reads schema {SCHEMA}",
            fix="upgrade warploom; the file was not changed" if newer else "tune again",
        )
    return _parsed(path, document)


def _unreadable(path: Path, error: OSError) -> RecordsError:
    rule = json_file.reason(error)
    return RecordsError(f"{path}: cannot be read", rule=rule, fix="check the path")


def _parsed(path: Path, document: dict[str, Any]) -> Records:
    gpu, listed = document.get("gpu"), document.get("records")
    if not isinstance(gpu, str) or not isinstance(listed, list):
        raise RecordsError(
            f"{path}: no gpu or no records",
            rule="a file of records must have both",
            fix="restore it, or move it away and tune again; the file was not changed",
        )
    records = []
    for index, fields in enumerate(listed):
        try:
            records.append(from_plain(fields, gpu))
        except SpecificationError as error:
            raise RecordsError(
                f"{path}: records[{index}]: {error}",
                rule="every record must be one that this version can have written",
                fix="upgrade warploom, or remove that record; the file was not changed",
            ) from error
    return Records(gpu, tuple(records))


def text(records: Records) -> str:
    """Return the file of `records`: the same records give the same bytes."""
    entries = ",\n".join(_entry(to_plain(record)) for record in records)
    head = f'{{\n "schema": {SCHEMA},\n "gpu": {json.dumps(records.gpu)},\n "records": ['
    return f"{head}\n{entries}\n ]\n}}\n" if entries else f"{head}]\n}}\n"


def _entry(fields: dict[str, Any]) -> str:
    lines = []
    for name, value in fields.items():
        if name in _LISTS and value:
            inner = ",\n".join(f"    {json.dumps(item)}" for item in value)
            lines.append(f"   {json.dumps(name)}: [\n{inner}\n   ]")
        else:
            lines.append(f"   {json.dumps(name)}: {json.dumps(value)}")
    return "  {\n" + ",\n".join(lines) + "\n  }"


def keep(path: Path, gpu: str, record: Record) -> Record:
    """Add a record that was just measured to the file at `path`, and return it as it is kept.

    It takes the place of those that the file and the package have of its problem, whatever dates
    they have: clocks run back, and some begin in 1970. RecordsError as `update` has it.
    """
    came = shipped(gpu)
    record = _came(came).replaced_by(record) if came else record
    merged = update(path, gpu, [record], newest=True)
    return next((one for one in merged if one.key == record.key), record)


def require_writable(path: Path) -> None:
    """Raise RecordsError where records could not be written to `path`, before any is measured."""
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path):
            pass
    except OSError as error:
        raise unwritable(path, error, _ELSEWHERE) from error


@cache
def _came(path: Path) -> Records:
    """The records of the package, which do not change while it runs; none where it is damaged."""
    try:
        return read(path)
    except RecordsError:  # which is told where calls read it
        return Records("")


def update(path: Path, gpu: str, more: Iterable[Record], *, newest: bool = False) -> Records:
    """Merge `more` into the file at `path`, which is made if missing, and return all of it.

    Of two records with one key the later one is kept; with `newest`, that of `more`.

    RecordsError, and the file as it was, where it cannot be read or written or is of another GPU.
    """
    path = Path(os.path.realpath(path))  # what a link leads to is replaced, and not the link
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        blank = text(Records(gpu))
        made, held = _held(path, blank)
        try:
            before = known(path, gpu)
            merged = before.merged(map(before.replaced_by, more) if newest else more)
            replace_file(path, text(merged))
        except BaseException:
            if made and os.fstat(held).st_size == len(blank.encode()):  # and not another's
                path.unlink()
            raise
        finally:
            os.close(held)
    except TimeoutError as error:
        raise RecordsError(
            f"{path}: in use",
            rule=f"another process must release it within {WAIT_SECONDS:g} s",
            fix="end that one, or give another path",
        ) from error
    except OSError as error:
        raise unwritable(path, error, _ELSEWHERE) from error
    return merged


def _held(path: Path, blank: str) -> tuple[bool, int]:
    """Whether the file at `path` was made here, with `blank` in it, and its descriptor.

    One that another process made may be gone once that has failed to write it; an empty one in its
    place would be a damaged one.
    """
    while True:
        made = not path.exists() and _made(path, blank)
        with suppress(FileNotFoundError):
            return made, hold(path, WAIT_SECONDS, make=False)


def _made(path: Path, content: str) -> bool:
    """Make a file with `content`, whole or not at all; False where another process was first."""
    with beside(path) as written:
        written.write_text(content, encoding="utf-8")
        try:
            os.link(written, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
    return True
