"""Write fixtures/SOURCE.safetensors anew, by the packages themselves.

python make_importer_fixtures.py [--sdist PACKAGE=FOLDER ...] [SOURCE ...]

Of AutoAWQ and GPTQModel an unpacked sdist will do: what they import beside torch and transformers
is then replaced by empty modules, as nothing of it packs or unpacks weights.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

from importer_cases import FIXTURES, SOURCES, save

SEED = 20
ABSENT = {
    "accelerate", "datasets", "device_smi", "dill", "kernels", "logbar", "pcre", "psutil",
    "threadpoolctl", "tokenicer",
}  # fmt: skip
# Packages whose __init__ imports the whole of them: only their folders are needed.
HOLLOW = {
    "gptqmodel": ("gptqmodel", "gptqmodel.nn_modules", "gptqmodel.models"),
    "awq": ("awq", "awq.modules", "awq.modules.linear", "awq.utils"),
}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules where there are none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def import_from(package: str, folder: Path) -> None:
    """Let `package` be imported from an unpacked sdist."""
    sys.path.insert(0, str(folder))
    for name in HOLLOW.get(package, ()):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        module.DEBUG_ON = False  # type: ignore[attr-defined]
        sys.modules[name] = module


def main() -> None:
    """Make what is asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=", ".join(SOURCES))
    parser.add_argument("--sdist", action="append", default=[], metavar="PACKAGE=FOLDER")
    given = parser.parse_args()
    if given.sdist:
        sys.meta_path.append(Absent())
    for package, _, folder in (one.partition("=") for one in given.sdist):
        import_from(package, Path(folder))
    FIXTURES.mkdir(exist_ok=True)
    for source in given.sources or SOURCES:
        path = FIXTURES / f"{source}.safetensors"
        save(list(SOURCES[source][1](SEED)), path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
