"""What the store's tests share: artifacts to store, and children that run, die or disagree."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from warploom.generator.artifact import Artifact, Resources
from warploom.generator.store import Store, key, source_digest

MakeArtifact = Callable[..., Artifact]
RunChild = Callable[[Callable[[], object]], int]


@pytest.fixture
def make_artifact() -> MakeArtifact:
    """Return a maker of artifacts: `seed` decides the source, `build` the bytes of the cubin."""

    def make(
        seed: int = 0,
        *,
        build: int = 0,
        arch: str = "sm_90a",
        toolchain: str = "nvrtc-13.0",
        options: tuple[str, ...] = ("-std=c++17", "-DNDEBUG"),
        size: int = 400,
    ) -> Artifact:
        return Artifact(
            name=f"gemm_{seed}",
            arch=arch,
            cubin=b"\x7fELF" + random.Random(f"{seed} {build} {toolchain}").randbytes(size),
            source_digest=source_digest(f"kernel {seed}"),
            toolchain=toolchain,
            options=options,
            resources={f"gemm_{seed}_main": Resources(168, 0, 0)},
            warnings=("ptxas info: nothing of note",),
            compile_seconds=0.1 + build,
        )

    return make


@pytest.fixture
def key_of() -> Callable[[Artifact], str]:
    """Return the key of an artifact that `make_artifact` made."""

    def key_of(artifact: Artifact) -> str:
        source = artifact.name.replace("gemm_", "kernel ")
        return key(source, artifact.options, artifact.arch, artifact.toolchain)

    return key_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store in a fresh directory."""
    return Store(tmp_path / "store")


@pytest.fixture
def in_child() -> RunChild:
    """Return a runner of a function in a forked child; it returns the child's exit code."""

    def run(function: Callable[[], object]) -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 70
        try:
            function()
            code = 0
        finally:
            os._exit(code)

    return run
