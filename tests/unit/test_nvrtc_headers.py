"""Headers that are read once make no other kernel; what goes wrong with them costs time alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from warploom.errors import CompilationError
from warploom.generator import nvrtc, nvrtc_headers, nvrtc_program
from warploom.generator.artifact import Artifact
from warploom.generator.toolchain import find
from warploom.generator.workers import Worker, WorkerPool

Compile = Callable[..., Artifact]

SOURCE = """\
// {name}
#define FACTOR {factor}
#if FACTOR
#include <cuda_bf16.h>
#endif

#include <cuda_fp16.h>
extern "C" __global__ void {name}(__half* d) {{
  int unused;
  *d = __half(FACTOR) * __half({value});
}}
"""


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What each text asked of NVRTC, in order: `plain`, `create` or `use`; nothing was before."""
    asked: list[str] = []
    compiled = nvrtc_program.compiled

    def noting(source: str, name: str, options: Any, headers: Any) -> tuple[str, bytes]:  # noqa: ANN401
        told = [option[2:].split("-pch")[0] for option in options if "-pch=" in option]
        asked.append(told[0] if told else "plain")
        return compiled(source, name, options, headers)

    files: dict[Any, int | None] = {}
    monkeypatch.setattr(nvrtc_program, "compiled", noting)
    monkeypatch.setattr(nvrtc_headers, "_seen", set())
    monkeypatch.setattr(nvrtc_headers, "_files", files)
    yield asked
    for file in filter(None, files.values()):
        os.close(file)


def compile(
    name: str,
    *,
    value: object = 3,
    factor: int = 2,
    more: bool = False,
    by: Compile = nvrtc.compile,
) -> Artifact:
    source = SOURCE.format(name=name, value=value, factor=factor)
    return by(source, name=name, arch="sm_90a", toolchain=find(), more=more)


def made(artifact: Artifact) -> tuple[object, ...]:
    """All but how long it took."""
    return artifact.cubin, artifact.resources, artifact.warnings, artifact.source_digest


def test_a_kernel_is_the_same_with_headers_that_were_read_before(asked: list[str]) -> None:
    plain = compile("one")
    assert plain.warnings[0].startswith("one.cu(9)"), "a line keeps its number"
    assert [made(compile("one")) for _ in range(2)] == [made(plain)] * 2
    assert asked == ["plain", "create", "use"], "one kernel alone is not made to wait"
    compile("two", factor=5)
    assert asked[-1] == "plain", "other headers"
    assert made(compile("two", factor=5)) != made(compile("two"))


def test_who_knows_of_more_kernels_saves_from_the_first(asked: list[str]) -> None:
    first = compile("one", more=True)
    assert made(first) == made(compile("one", more=True))
    assert asked == ["create", "use"]


def test_an_error_is_told_as_of_the_text_as_it_stands(asked: list[str]) -> None:
    def said() -> str:
        with pytest.raises(CompilationError) as error:
            compile("wrong", value="nothing")
        assert "FACTOR" in str(error.value.source)
        return error.value.log

    assert said() == said()
    assert asked == ["plain", "create", "plain"]
    compile("right")
    assert "wrong.cu(10): error" in said()
    assert asked[3:] == ["create", "use", "plain"]


def test_where_nothing_can_be_written_kernels_are_compiled_all_the_same(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = compile("one")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert [made(compile("one")) for _ in range(2)] == [made(plain)] * 2
    assert asked == ["plain"] * 3


def test_headers_that_cannot_be_precompiled_are_not_tried_again(asked: list[str]) -> None:
    """NVRTC makes an error of a full disk too."""
    source = '#if 1\n#include <cuda_fp16.h>\nextern "C" __global__ void f() {}\n#endif\n'
    for _ in range(3):
        nvrtc.compile(source, name="f", arch="sm_90a", toolchain=find(), more=True)
    assert asked == ["create", "plain", "plain", "plain"]


@pytest.mark.parametrize("damage", ["empty", "other", "cut"])
def test_a_damaged_file_makes_no_other_kernel(
    damage: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compile("one")
    compile("one")
    ((key, whole),) = nvrtc_headers._files.items()
    assert whole is not None
    content = {"empty": b"", "other": b"{}" * 9999, "cut": os.pread(whole, 4096, 0)}[damage]
    (tmp_path / "headers").write_bytes(content)
    monkeypatch.setitem(nvrtc_headers._files, key, os.open(tmp_path / "headers", os.O_RDONLY))
    assert [made(compile("one")) for _ in range(2)] == [made(plain)] * 2
    assert asked[2:4] == ["use", "plain"]
    assert asked[-1] == "plain"


def test_processes_and_threads_at_once_make_the_same_kernels_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["one", "two"]
    plain = [made(compile(name, factor=index)) for index, name in enumerate(names, 1)]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def again(by: Compile = nvrtc.compile) -> list[tuple[object, ...]]:
        return [made(compile(name, factor=i, more=True, by=by)) for i, name in enumerate(names, 1)]

    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(again) for _ in range(2)]
        assert [one.result() for one in done] == [plain] * 2
    with WorkerPool(2, more=True) as pool:
        done = [pool.submit(lambda worker: again(partial(_by, worker))) for _ in range(2)]
        assert [one.result() for one in done] == [plain] * 2
        child = os.fork()
        if not child:
            os._exit(again() != plain)
        assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


def _by(worker: Worker, source: str, *, name: str, arch: str, **_others: object) -> Artifact:
    return worker.compile(source, name=name, arch=arch)
