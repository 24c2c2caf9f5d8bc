"""The toolchain's identity follows contents, and a header set that cannot work is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cuda.bindings.nvrtc
import cuda.pathfinder
import pytest
from click.testing import CliRunner, Result

from warploom.cli import device, doctor
from warploom.errors import ToolchainError
from warploom.generator import records_file, toolchain
from warploom.generator.toolchain import Component, Toolchain

COMPILES = """
from warploom.generator import nvrtc, toolchain
source = '#include <cuda_fp16.h>\\nextern "C" __global__ void f(__half* d) { *d = 1; }'
found = toolchain.find()
print(found.identity, *nvrtc.compile(source, name="f", arch="sm_90a", toolchain=found).resources)
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


def make_include(folder: Path, cccl: str = "3000001", *, crt: bool = True) -> Path:
    """Lay out the few headers that tell a CUDA include folder and its versions."""
    headers = {
        "cuda_runtime.h": "",
        "cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
        "cccl/cuda/std/__cccl/version.h": f"#define CCCL_VERSION {cccl}\n",
    }
    if crt:
        headers["crt/host_defines.h"] = ""
    for name, text in headers.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def use_includes(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(toolchain, "_include_folders", lambda: iter(folders))


def test_the_installed_toolchain_has_the_versions_its_headers_state() -> None:
    found = toolchain.find()
    assert found.versions["CUTLASS"].startswith("4.2")
    assert found.versions["CCCL"] in toolchain.CCCL_VERSIONS
    assert found.versions["NVRTC"].split(".")[0] == "13"
    assert len(found.identity) == 64
    assert toolchain.find() is found


def test_options_carry_no_path_so_that_keys_agree_between_machines() -> None:
    options = toolchain.find().options("sm_90a")
    assert options[:4] == (
        "--gpu-architecture=sm_90a",
        "-std=c++17",
        "-default-device",
        "-DNDEBUG",
    )
    assert not [option for option in options if option.startswith("-I") or "/" in option]


def test_include_paths_are_the_three_header_folders_and_not_nvrtcs() -> None:
    folders = [Path(option.removeprefix("-I")) for option in toolchain.find().include_options]
    assert len(folders) == 3
    assert (folders[0] / "cute" / "config.hpp").is_file()
    assert (folders[1] / "cuda_fp16.h").is_file()
    assert (folders[2] / "cuda" / "std" / "cstdint").is_file()


@pytest.mark.parametrize(
    ("number", "named"), [("3002000", "CCCL 3.2"), ("oops", "CCCL of unknown version")]
)
def test_a_cccl_that_breaks_cute_is_refused_by_name(
    number: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_includes(monkeypatch, make_include(tmp_path, cccl=number))
    with pytest.raises(ToolchainError) as caught:
        toolchain.find()
    assert caught.value.value.startswith(named)
    assert "<13.2" in caught.value.fix


def test_a_toolkit_with_a_good_cccl_serves_behind_a_wheel_with_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_include(tmp_path / "wheel", cccl="3002000")
    good = make_include(tmp_path / "toolkit", cccl="3001004")
    use_includes(monkeypatch, bad, good)
    found = toolchain.find()
    assert found.versions["CCCL"] == "3.1"
    assert found.include_options[1:] == (f"-I{bad}", f"-I{good / 'cccl'}")


def test_headers_without_a_record_are_hashed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_include(tmp_path)
    use_includes(monkeypatch, folder)
    first = toolchain.find().identity
    (folder / "cuda_runtime.h").write_text("int changed;\n")
    toolchain.find.cache_clear()
    assert toolchain.find().identity != first


def test_runtime_headers_without_crt_name_the_missing_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_includes(monkeypatch, make_include(tmp_path, crt=False))
    with pytest.raises(ToolchainError, match=r"crt/host_defines\.h: not found.*nvidia-cuda-crt"):
        toolchain.find()


def test_missing_cutlass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"CUTLASS headers: not found.*nvidia-cutlass"):
        toolchain.find()


def test_nvrtc_before_cuda_13_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.bindings.nvrtc, "nvrtcVersion", lambda: (0, 12, 8))
    with pytest.raises(ToolchainError) as caught:
        toolchain.find()
    assert re.fullmatch(r"NVRTC 12\.8: /.*libnvrtc.*", caught.value.value)
    assert caught.value.rule == "must be 13.0 or later"
    assert "pip install 'warploom[nvrtc]'" in caught.value.fix


def test_wheels_that_only_pythonpath_finds_compile(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", COMPILES],  # -S: nothing is in site-packages then
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == [toolchain.find().identity, "f"]


def test_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise cuda.pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", fail)
    with pytest.raises(ToolchainError, match=r"NVRTC: not found.*nvidia-cuda-nvrtc"):
        toolchain.find()


def run_doctor() -> Result:
    return CliRunner().invoke(doctor.command, [])


def test_doctor_finds_nothing_amiss_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "ask", lambda function, *arguments: None)
    monkeypatch.setattr(device, "_failure", str)
    result = run_doctor()
    assert result.exit_code == 0, result.output
    assert result.output.count("none: kernels compile here and run elsewhere") == 2


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers compile: to see it takes seconds, and other tests do."""
    good = doctor.Check("compiling", "the headers of kernels")
    monkeypatch.setattr(doctor, "_compiling", lambda found: good)


@pytest.mark.usefixtures("compiling")
def test_doctor_fails_on_a_driver_too_old_for_the_cubins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device,
        "ask",
        lambda function, *arguments: 12080 if function == "cuDriverGetVersion" else None,
    )
    result = run_doctor()
    assert result.exit_code == 1
    assert "CUDA 12.8, but cubins of NVRTC 13 need a driver of CUDA 13" in result.output


def test_doctor_fails_with_the_fix_when_the_toolchain_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run_doctor()
    assert result.exit_code == 1
    assert "pip install 'warploom[nvrtc]'" in result.output


def test_doctor_says_which_nvrtc_is_too_old_and_shows_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda.bindings.nvrtc, "nvrtcVersion", lambda: (0, 12, 8))
    result = CliRunner().invoke(doctor.command, ["--json"])
    report = json.loads(result.stdout)
    found = {row["check"]: (row["good"], row["found"]) for row in report["checks"]}
    assert found["CCCL"][0] and found["CUTLASS"][0]
    assert found["NVRTC"][0] is False and found["NVRTC"][1].startswith("NVRTC 12.8: ")
    assert "pip install 'warploom[nvrtc]'" in report["advice"]["NVRTC"]
    assert (result.exit_code, list(report["advice"])) == (1, ["NVRTC"])


@pytest.mark.usefixtures("compiling")
def test_doctor_names_a_header_that_is_not_as_installed(
    install: Callable[..., Component], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = install("site")
    (part.folder / "one.h").write_text("#pragma twice\n")
    found = toolchain.find()
    monkeypatch.setattr(doctor, "find", lambda: Toolchain.of((*found.components, part)))
    result = run_doctor()
    assert result.exit_code == 1
    assert str(part.folder / "one.h") in result.output


def test_doctor_compiles_what_kernels_include_and_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = toolchain.find()
    cutlass, *others = found.components
    real, folder = cutlass.folder, tmp_path
    for name in ("cute", "arch", ""):  # all as it is, but one header that every kernel includes
        for entry in real.iterdir():
            if entry.name not in (name, "mma_sm90_gmma.hpp"):
                (folder / entry.name).symlink_to(entry)
        if name:
            real, folder = real / name, folder / name
            folder.mkdir()
    (folder / "mma_sm90_gmma.hpp").write_text("#error of another version\n")
    parts = (replace(cutlass, folder=tmp_path, wheels=()), *others)
    monkeypatch.setattr(doctor, "find", lambda: replace(found, components=parts))
    result = run_doctor()
    assert result.exit_code == 1
    assert "of another version" in result.stdout
    elsewhere = [replace(part, folder=tmp_path) if part.name == "CCCL" else part for part in parts]
    two = replace(found, components=tuple(elsewhere))
    assert f"CCCL in {tmp_path} are of two installations" in doctor._cause(two)


@pytest.mark.usefixtures("compiling")
def test_doctor_shows_every_version_place_record_and_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = records_file.folder()
    folder.mkdir(parents=True, exist_ok=True)
    damaged = folder / "damaged.json"
    damaged.write_text('{"schema": 1')
    monkeypatch.setenv("WARPLOOM_CACHEDIR", "there")
    try:
        result = CliRunner().invoke(doctor.command, ["--json"])
    finally:
        damaged.unlink()
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    found = {row["check"]: row for row in report["checks"]}
    for name in ("CUTLASS", "CUDA headers", "CCCL", "NVRTC"):
        assert found[name]["found"] and Path(found[name]["where"]).is_dir()
    assert {"warploom", "Python", "torch", "driver", "GPU", "store", "records"} <= found.keys()
    assert report["advice"]["WARPLOOM_CACHEDIR"].endswith("did you mean WARPLOOM_CACHE_DIR?")
    assert "damaged" in report["advice"]["records"] or "restore" in report["advice"]["records"]
    assert "NVIDIA H200" in result.stdout


def test_the_name_of_a_gpu_ends_at_its_first_nul() -> None:
    assert device.plain(b"NVIDIA H200\0\0\x01garbage\0") == "NVIDIA H200"
