"""The compiler and the headers that every kernel is built with, and the identity they have.

`find()` looks for CUTLASS, the CUDA headers, CCCL and NVRTC in wheels first and in a CUDA toolkit
second, and raises ToolchainError naming what is missing or too new. A toolchain's identity hashes
the contents of all of it, never a path: equal wheels give equal identities on any machine.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from warploom.errors import ToolchainError
from warploom.generator import json_file
from warploom.generator.toolchain_files import Component, Stamp, identity

__all__ = ["CCCL_VERSIONS", "NVRTC_VERSION", "Component", "Toolchain", "find"]

NVRTC_VERSION = "13.0"  # the oldest: those before know neither the options nor the headers
CCCL_VERSIONS = ("3.0", "3.1")  # of CUDA 13.0 and 13.1; from 3.2 on, CuTe 4.2 does not compile
_NVRTC_FILES = r"libnvrtc(-builtins)?\.so\.[0-9.]+"
_CUDA_HEADERS = {  # one header of each wheel
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """CUTLASS, CUDA headers, CCCL and NVRTC; `identity` is the SHA-256 of them all, in hex.

    `stamps`, one a component, are other ones once a file of it is changed.
    """

    components: tuple[Component, ...]
    identity: str
    stamps: tuple[Stamp, ...]

    @classmethod
    def of(cls, components: tuple[Component, ...]) -> Toolchain:
        """Return the toolchain of `components` as they are now; ToolchainError if unreadable."""
        try:
            stamps = [part.stamped() for part in components]
            return cls(components, identity(components, stamps), tuple(stamps))
        except OSError as error:
            raise ToolchainError(
                f"{error.filename}: {json_file.reason(error)}",
                rule="every file of the toolchain must be readable",
                fix="pip install --force-reinstall its wheel, or chmod it",
            ) from error

    def options(self, arch: str) -> tuple[str, ...]:
        """Every NVRTC option but the include paths, in order: these are part of a kernel's key."""
        return (
            f"--gpu-architecture={arch}",
            "-std=c++17",
            "-default-device",
            "-DNDEBUG",  # an assert between two wgmma makes ptxas serialise them
            "-no-source-include",  # or a folder in the working directory shadows the headers
            "--ptxas-options=-v",
            "--no-cache",  # a kernel from NVRTC's own cache comes without the report of ptxas
        )

    @property
    def include_options(self) -> tuple[str, ...]:
        """The include paths of this machine."""
        return tuple(f"-I{part.folder}" for part in self.components if part.name != "NVRTC")

    @property
    def versions(self) -> dict[str, str]:
        """Component name -> version."""
        return {part.name: part.version for part in self.components}

    def require_unchanged(self) -> None:
        """Raise ToolchainError if a file was changed since: what was compiled has no identity."""
        for part, stamp in zip(self.components, self.stamps, strict=True):
            if part.stamped() != stamp:
                raise ToolchainError(
                    f"files of {part.name} in {part.folder} were changed after this process read "
                    "them",
                    rule="must stay the same while a process runs: it is part of the key of "
                    "compiled kernels",
                    fix="start the process again",
                )

    def verify(self) -> tuple[Path, ...]:
        """Return the files whose bytes are not those their wheel recorded (takes a second)."""
        changed = []
        for part in self.components:
            on_disk = part.hashed()
            changed += [
                part.folder / relative
                for relative, digest in part.recorded().items()
                if on_disk.get(relative) != digest
            ]
        return tuple(changed)


@cache
def find() -> Toolchain:
    """Return this process's toolchain, or raise ToolchainError; it does not change afterwards."""
    return Toolchain.of(tuple(part() for part in _parts().values()))


def survey() -> dict[str, Component | ToolchainError]:
    """Return each component, by name, as it is found here, or why it is not."""
    found: dict[str, Component | ToolchainError] = {}
    for name, part in _parts().items():
        try:
            found[name] = part()
        except ToolchainError as error:
            found[name] = error
    return found


def _parts() -> dict[str, Callable[[], Component]]:
    return {"CUTLASS": _cutlass, "CUDA headers": _cuda_headers, "CCCL": _cccl, "NVRTC": _nvrtc}


def _cutlass() -> Component:
    package = importlib.util.find_spec("cutlass_library")
    for location in (package and package.submodule_search_locations) or ():
        folder = (Path(location) / "source" / "include").resolve()
        header = folder / "cutlass" / "version.h"
        if header.is_file():
            parts = (_defined(header, f"CUTLASS_{part}") for part in ("MAJOR", "MINOR", "PATCH"))
            version = ".".join(map(str, parts))
            return Component("CUTLASS", version, folder, ".*", ("nvidia-cutlass",))
    raise _missing("CUTLASS headers", "nvidia-cutlass")


def _wheel_folders() -> Iterator[Path]:
    """Where wheels of CUDA 13 put their folders: `include`, `lib`."""
    package = importlib.util.find_spec("nvidia")
    for location in (package and package.submodule_search_locations) or ():
        yield Path(location) / "cu13"


def _include_folders() -> Iterator[Path]:
    for folder in _wheel_folders():
        yield (folder / "include").resolve()
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield (Path(root) / "include").resolve()


def _cuda_headers() -> Component:
    best: list[str] = list(_CUDA_HEADERS)
    for folder in _include_folders():
        absent = [header for header in _CUDA_HEADERS if not (folder / header).is_file()]
        if not absent:
            number = _defined(folder / "cuda_runtime_api.h", "CUDART_VERSION")
            version = f"{number // 1000}.{number % 1000 // 10}"
            # CCCL's wheel brings nv/, which lies beside the CUDA headers.
            wheels = (*_CUDA_HEADERS.values(), "nvidia-cuda-cccl")
            return Component("CUDA headers", version, folder, "(?!cccl/).*", wheels, shared=True)
        best = min(best, absent, key=len)
    raise _missing(f"CUDA header {best[0]}", _CUDA_HEADERS[best[0]])


def _cccl() -> Component:
    refused: list[str] = []
    for include in _include_folders():
        folder = include / "cccl"
        header = folder / "cuda" / "std" / "__cccl" / "version.h"
        if not header.is_file():
            continue
        number = _defined(header, "CCCL_VERSION")
        version = f"{number // 1_000_000}.{number // 1000 % 1000}"
        if version in CCCL_VERSIONS:
            return Component("CCCL", version, folder, ".*", ("nvidia-cuda-cccl",))
        refused.append(f"CCCL {version if number else 'of unknown version'} in {folder}")
    if refused:
        raise ToolchainError(
            ", ".join(refused),
            rule=f"CuTe compiles with CCCL {' and '.join(CCCL_VERSIONS)} (CUDA 13.0 and 13.1)",
            fix="pip install 'nvidia-cuda-cccl>=13.0,<13.2'",
        )
    raise _missing("CCCL headers", "nvidia-cuda-cccl")


def _nvrtc() -> Component:
    library = _load_nvrtc().resolve()
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    if (major, minor) < tuple(map(int, NVRTC_VERSION.split("."))):
        raise ToolchainError(
            f"NVRTC {major}.{minor}: {library}",
            rule=f"must be {NVRTC_VERSION} or later",
            fix="pip install 'warploom[nvrtc]', and a CUDA 13 build of torch where torch brings it",
        )
    return Component(
        name="NVRTC",
        version=f"{major}.{minor}",
        folder=library.parent,
        files=_NVRTC_FILES,
        wheels=("nvidia-cuda-nvrtc",),
        deep=False,
    )


def _load_nvrtc() -> Path:
    """Load NVRTC as cuda.bindings does, which takes the one that torch may have loaded already."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    with suppress(DynamicLibNotFoundError):
        return Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
    # It looks into site-packages, not where `pip install --target` or PYTHONPATH have wheels; but
    # what is loaded already it takes, and NVRTC its builtins.
    for folder in _wheel_folders():
        for library in (folder / "lib").glob("libnvrtc*"):
            if re.fullmatch(_NVRTC_FILES, library.name):
                with suppress(OSError):
                    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    try:
        return Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except DynamicLibNotFoundError as error:
        raise _missing("NVRTC", "nvidia-cuda-nvrtc") from error


def _missing(what: str, wheel: str) -> ToolchainError:
    return ToolchainError(
        f"{what}: not found",
        rule="compiling needs CUTLASS, CUDA headers, CCCL and NVRTC, from wheels or a CUDA toolkit",
        fix="pip install 'warploom[nvrtc]', which brings "
        f"{wheel}, or set CUDA_HOME to a CUDA 13 toolkit",
    )


def _defined(header: Path, macro: str) -> int:
    """Return the number that `header` defines `macro` as, or 0."""
    text = header.read_text(encoding="utf-8", errors="replace")
    match = re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0
