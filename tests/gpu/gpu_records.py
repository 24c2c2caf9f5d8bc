"""record.json beside gpu tests: which GPU passed them, with what, and on which state of the code.

Each family has a record beside its gpu tests (families/NAME/gpu), integrations have one
(integrations/gpu), and the machinery one here. A record's `digest` is of what those tests see: of
the host code that runs the calls, and of the kernels and launches that the generator emits. A test
on the CPU compares it, and the files of tests that passed with those there are. The tests may pass
file by file, in several runs: `write` keeps what the same code passed on the same machine before.
Nothing here needs a GPU until it is called.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import module_graph

ROOT = Path(__file__).parents[2]
# Packages whose modules count where a call may run them, by their syntax trees.
HOST = ("runtime", "quantization", "integrations")
# Modules of the generator that count in the same way: no kernel and no launch shows what host code
# takes from them, such as which weights are packed how, or which rows may be read in place.
HOST_GENERATOR = frozenset(
    f"warploom.generator.{name}" for name in ("epilogue", "formats", "slabs", "step", "tensor_maps")
)
# Those of all calls: they refuse what is too large, and compile.
ALWAYS = frozenset(
    f"warploom.generator.{name}" for name in ("shapes", "nvrtc", "nvrtc_headers", "nvrtc_program")
)
# What decides what the generator emits; choices and records do not.
EMITS = ("generator/**/*.py", "templates/**/*.*", "configs/*/smoke.yaml", "src/warploom/*.py")
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
    """Return the SHA-256, in hex, of what the tests of a place see, in the checkout at `root`."""
    return digests((subject,), root)[subject]


def digests(subjects: Collection[str | None], root: Path = ROOT) -> dict[str | None, str]:
    """Return the digests of several subjects, for which the checkout is read once."""
    graph = _graph(root)
    states = {
        subject: json.dumps({"host": _host(subject, *graph), "device": device(subject, root)})
        for subject in subjects
    }
    return {name: hashlib.sha256(state.encode()).hexdigest() for name, state in states.items()}


def host(subject: str | None, root: Path = ROOT) -> dict[str, str]:
    """Return what each module that a place's calls may run does, as a hash by the module's name.

    Of a family, these are the modules of its folder in runtime/families and all that they import,
    in functions too; of INTEGRATIONS all of integrations and of the families; of None what runs
    the calls of any family. Which family is called by its name decides no import.
    """
    return _host(subject, *_graph(root))


def _graph(root: Path) -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Return the files of all modules, and which of those that count each of these imports."""
    files = module_graph.modules(root)
    counted = {name: path for name, path in files.items() if _counts(name)}
    return files, module_graph.edges(counted, functions=True)


def _host(
    subject: str | None, files: Mapping[str, Path], imports: Mapping[str, set[str]]
) -> dict[str, str]:
    families = "warploom.runtime.families"
    if subject is None:
        start = {
            name
            for name in files
            if name == families
            or (name.startswith("warploom.runtime.") and not name.startswith(f"{families}."))
        }
    elif subject == INTEGRATIONS:
        packages = (f"{families}.", f"warploom.{INTEGRATIONS}")
        start = {name for name in files if name.startswith(packages)}
    else:
        own = f"{families}.{subject}"
        start = {name for name in files if f"{name}.".startswith(f"{own}.")}
    reached = module_graph.closure(start | (ALWAYS & files.keys()), imports)
    return {name: module_graph.behaviour(files[name].read_text()) for name in sorted(reached)}


def _counts(module: str) -> bool:
    parts = module.split(".")[1:]
    # Host code takes the order of a launch's addresses from it, which no kernel shows.
    launches = parts[:2] == ["generator", "families"] and parts[-1] == "launch"
    return launches or module in HOST_GENERATOR | ALWAYS or parts[:1] in [[name] for name in HOST]


def device(subject: str | None, root: Path = ROOT) -> dict[str, Any]:
    """Return what the generator emits for a place's own kernels; all families' for INTEGRATIONS.

    Names and digests of specs are left out. The machinery has no kernels of its own.
    """
    if subject is None:
        return {}
    content = emitted(root)
    families = content["families"]
    chosen = families if subject == INTEGRATIONS else {subject: families[subject]}
    return {"options": content["options"]} | {
        name: {
            "kernels": sorted([one["text"], one["launches"]] for one in own["kernels"].values()),
            "unseen": own["unseen"],
        }
        for name, own in sorted(chosen.items())
    }


def emitted(root: Path = ROOT) -> dict[str, Any]:
    """Return what the checkout at `root` emits, as tools/emitted.py prints it: it takes seconds."""
    hashed = hashlib.sha256()
    for path in sorted(path for pattern in EMITS for path in root.glob(pattern)):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            hashed.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    key = hashed.hexdigest()
    if key not in _emitted:
        _emitted[key] = json.loads(run_emitted(root))
    return _emitted[key]


_emitted: dict[str, dict[str, Any]] = {}  # by the bytes of what decides it


def run_emitted(root: Path, *arguments: str, standard_input: str = "") -> str:
    """Return what tools/emitted.py of this checkout prints about the one at `root`."""
    path = (str(root / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools" / "emitted.py"), str(root), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        input=standard_input,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def write(
    folder: Path,
    counts: Mapping[str, Mapping[str, int]],
    failed: Collection[str],
    notes: Sequence[tuple[str, str, object]],
    root: Path = ROOT,
) -> list[Path]:
    """Note in `folder`, which is laid out like tests/, the files whose tests have passed.

    `counts` has how many passed and were skipped, by the file's path in the repository; what is
    known of the other files stays, with the driver if it was another, but the `failed` are struck
    out. `notes` are a file, a dotted name and an outcome each: (`tests/gpu/test_x.py`,
    `sanitizers.memcheck`, `clean`). Where `folder` has no record yet, the repository's is gone on
    with. Return what was written.
    """
    from warploom.atomic_file import replace_file

    written = []
    known = places(root)
    for place in sorted({_place(file) for file in (*counts, *failed)} & known.keys()):
        path = folder / place / "record.json"
        before = latest(place, folder, root)
        state = {"digest": digest(known[place], root), **_machine()}
        same = all(before.get(name) == of for name, of in state.items() if name != "driver")
        kept = before if same else {}
        content: dict[str, Any] = {**kept, **state, "date": datetime.now(UTC).date().isoformat()}
        passed = {_name(file): count for file, count in counts.items() if _place(file) == place}
        struck = {_name(file) for file in failed if _place(file) == place}
        earlier = kept.get("tests", {})
        if kept and kept.get("driver") != state.get("driver"):  # machines of a kind differ in it
            earlier = {file: {"driver": kept.get("driver"), **of} for file, of in earlier.items()}
        tests = {**earlier, **passed}
        content["tests"] = {file: tests[file] for file in sorted(tests) if file not in struck}
        for file, name, value in sorted(notes, key=str):
            if _place(file) == place:
                group, _, entry = name.partition(".")
                content.setdefault(group, {})[entry] = value
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content, indent=2) + "\n")  # a run may be ended
        written.append(path)
    return written


def latest(place: str, folder: Path, root: Path = ROOT) -> dict[str, Any]:
    """Return a place's record in `folder`, or the repository's where that has none; {} without.

    One that was cut off by the end of a machine is none: what passed since is worth more.
    """
    for base in (folder, root / "tests"):
        try:
            found = json.loads((base / place / "record.json").read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


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
