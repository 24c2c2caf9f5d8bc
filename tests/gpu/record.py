"""tests/gpu/record.json: which GPU passed these tests, with what, and on which state of the code.

`digest()` is of every file that decides what a kernel does; a test on the CPU compares it with the
record's, and the files of tests that passed with those there are. The tests may pass file by file,
in several runs: `write` keeps what the same code passed on the same machine before. Nothing
here needs a GPU until it is called.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("record.json")
DECISIVE = (
    "templates/**/*.cuh",
    "templates/**/*.jinja",
    "generator/families/**/*.py",
    "generator/elements.py",
    "generator/epilogue.py",
    "generator/launches.py",
    "generator/parameters.py",
    "generator/render.py",
    "generator/rules.py",
    "generator/tensor_maps.py",
    "generator/wgmma.py",
    "runtime/**/*.py",
)


def digest() -> str:
    """SHA-256, in hex, over the paths and bytes of the files that decide what a kernel does."""
    hashed = hashlib.sha256()
    for path in sorted({path for pattern in DECISIVE for path in ROOT.glob(pattern)}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return hashed.hexdigest()


def write(
    path: Path,
    counts: Mapping[str, Mapping[str, int]],
    failed: Collection[str],
    found: Sequence[tuple[str, object]],
) -> None:
    """Note the files whose tests have passed, how many passed and were skipped; strike out others.

    `found` are dotted names and outcomes of these tests, (`sanitizers.memcheck`, `clean`).
    """
    state = {"digest": digest(), **_machine()}
    before = json.loads(path.read_text()) if path.is_file() else {}
    kept = before if all(before.get(name) == value for name, value in state.items()) else {}
    content: dict[str, Any] = {**kept, **state, "date": datetime.now(UTC).date().isoformat()}
    content["tests"] = {
        file: count
        for file, count in sorted({**kept.get("tests", {}), **counts}.items())
        if file not in failed
    }
    for name, value in sorted(found):
        group, _, entry = name.partition(".")
        content.setdefault(group, {})[entry] = value
    path.write_text(json.dumps(content, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    import torch

    from warploom.generator.toolchain import find

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.splitlines()[0].strip(),
        "versions": {"torch": torch.__version__, **find().versions},
    }
