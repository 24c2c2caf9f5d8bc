"""record.json beside gpu tests: which GPU passed them, with what, and on which state of the code.

Each family has a record beside its gpu tests (families/NAME/gpu), integrations have one
(integrations/gpu), and the machinery one here. A record's `digest` is of the files that decide what
those tests see; a test on the CPU compares it, and the files of tests that passed with those there
are. The tests may pass file by file, in several runs: `write` keeps what the same code passed on
the same machine before. Nothing here needs a GPU until it is called.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
# What makes and runs the kernels of every family. What only declares, names, stores or chooses
# changes no kernel and no result: tests on the CPU hold it.
MACHINERY = (
    "generator/architectures.py",
    "generator/elements.py",
    "generator/epilogue.py",
    "generator/families/family.py",
    "generator/launches.py",
    "generator/limits.py",
    "generator/nvrtc*.py",
    "generator/parameters.py",
    "generator/render.py",
    "generator/rules.py",
    "generator/step.py",
    "generator/tensor_maps.py",
    "generator/wgmma.py",
    "runtime/*.py",
    "runtime/families/*.py",
    "templates/common/*",
)
ROOMS = ("generator/families", "runtime/families", "templates")  # where a family has a folder
# What lies elsewhere and decides what kernels see, of the families whose files import it.
IMPORTED = {
    "warploom.quantization": "quantization/*.py",
    "warploom.generator.formats": "generator/formats.py",
    "warploom.generator.slabs": "generator/slabs.py",
}
SOURCES = {".py", ".cuh", ".jinja"}
# Of a family: which kernel is chosen, not what one does.
CHOICE = {"constants.py", "model.py", "table.py"}
INTEGRATIONS = "integrations"  # how models use the families: they stand on all that there are


def places(root: Path = ROOT) -> dict[str, str | None]:
    """Where records lie, in tests/, and of what: `gpu` of the machinery, which is None here."""
    folders = (root / f"tests/{INTEGRATIONS}", *sorted(root.glob("tests/families/*")))
    tested = [folder for folder in folders if any(folder.glob("gpu/test_*.py"))]
    tests = root / "tests"
    return {
        "gpu": None,
        **{f"{folder.relative_to(tests).as_posix()}/gpu": folder.name for folder in tested},
    }


def digest(subject: str | None, root: Path = ROOT) -> str:
    """SHA-256, in hex, over the paths and bytes of what decides what the tests of a place see.

    Of a family, these are its folders, those that it shares with others, and the machinery; of
    INTEGRATIONS its own files and those of every family; of None only the machinery.
    """
    files = set(_machinery(root))
    if subject == INTEGRATIONS:
        files |= set(root.glob(f"{INTEGRATIONS}/**/*.py"))
        for family in _families(root):
            files |= _files(family, root)
    elif subject is not None:
        files |= _files(subject, root)
    hashed = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return hashed.hexdigest()


def _machinery(root: Path) -> Iterator[Path]:
    for pattern in MACHINERY:
        yield from (path for path in root.glob(pattern) if path.suffix in SOURCES)


def _families(root: Path) -> Iterator[str]:
    for folder in root.glob(f"{ROOMS[0]}/*"):
        if folder.is_dir() and not folder.name.startswith("_"):
            yield folder.name


def _files(family: str, root: Path) -> set[Path]:
    """The files in a family's folders, in the shared folders that files among these name, and of
    what they import elsewhere.
    """
    shared = {path.name for room in ROOMS for path in root.glob(f"{room}/_*") if path.is_dir()}
    shared.discard("__pycache__")
    found: set[Path] = set()
    ahead = {family}
    while ahead:
        name = ahead.pop()
        shared.discard(name)
        own = {path for room in ROOMS for path in root.glob(f"{room}/{name}/**/*")}
        own = {path for path in own if path.suffix in SOURCES and path.name not in CHOICE}
        texts = [path.read_text() for path in own]
        ahead |= {
            one for one in shared if any(f"families.{one}" in t or f"{one}/" in t for t in texts)
        }
        for module, pattern in IMPORTED.items():
            if any(f"from {module}" in text for text in texts):
                own |= set(root.glob(pattern))
        found |= own
    return found


def write(
    folder: Path,
    counts: Mapping[str, Mapping[str, int]],
    failed: Collection[str],
    notes: Sequence[tuple[str, str, object]],
    root: Path = ROOT,
) -> list[Path]:
    """Note in `folder`, which is laid out like tests/, the files whose tests have passed.

    `counts` has how many passed and were skipped, by the file's path in the repository; what is
    known of the other files stays, but the `failed` are struck out. `notes` are a file, a dotted
    name and an outcome each: (`tests/gpu/test_x.py`, `sanitizers.memcheck`, `clean`). Where
    `folder` has no record yet, the repository's is gone on with. Return what was written.
    """
    written = []
    known = places(root)
    for place in sorted({_place(file) for file in (*counts, *failed)} & known.keys()):
        path = folder / place / "record.json"
        latest = path if path.is_file() else root / "tests" / place / "record.json"
        before = json.loads(latest.read_text()) if latest.is_file() else {}
        state = {"digest": digest(known[place], root), **_machine()}
        kept = before if all(before.get(name) == value for name, value in state.items()) else {}
        content: dict[str, Any] = {**kept, **state, "date": datetime.now(UTC).date().isoformat()}
        passed = {_name(file): count for file, count in counts.items() if _place(file) == place}
        struck = {_name(file) for file in failed if _place(file) == place}
        tests = {**kept.get("tests", {}), **passed}
        content["tests"] = {file: tests[file] for file in sorted(tests) if file not in struck}
        for file, name, value in sorted(notes, key=str):
            if _place(file) == place:
                group, _, entry = name.partition(".")
                content.setdefault(group, {})[entry] = value
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        written.append(path)
    return written


def _place(file: str) -> str:
    return PurePosixPath(file).parent.as_posix().removeprefix("tests/")


def _name(file: str) -> str:
    return PurePosixPath(file).name


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
