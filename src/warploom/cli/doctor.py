"""`warploom doctor`: is everything here that compiling and running kernels needs?

It names version and place of everything that has a part in a result, for a look and for reports of
bugs. What will not do comes with advice, and the exit code is then 1. A machine without a GPU or
driver is not at fault: kernels compile there and run elsewhere.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

import click

import warploom
from warploom.cli import device
from warploom.cli.device import Check
from warploom.cli.output import Output, reporting
from warploom.cli.units import Bytes
from warploom.errors import CompilationError, RecordsError, StoreError, ToolchainError
from warploom.generator import nvrtc, records_file, toolchain
from warploom.generator.gpus import DEFAULT
from warploom.generator.store import Store
from warploom.generator.toolchain import Component, Toolchain, find
from warploom.variables import PREFIX, mistakes

_OTHERS = ("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")  # that are shown


@click.command("doctor")
@reporting
def command(output: Output) -> None:
    """Check what compiling and running kernels needs here.

    Put what it prints into reports of bugs. The exit code is 1 where something is amiss, and advice
    says what to do.

    \b
    Examples:
      warploom doctor
      warploom doctor --json > report.json
    """
    output.for_people = True
    checks = [*_python(), *_toolchain(), *device.gpus(), _torch()]
    checks += [*_store(), *_records(), *_variables()]
    output.table(
        "checks",
        ["check", "good", "found", "where"],
        [[check.name, not check.advice, check.found, check.where] for check in checks],
    )
    advice: dict[str, str] = {}
    for check in checks:
        if check.advice:
            before = f"{advice[check.name]}; " if check.name in advice else ""
            advice[check.name] = before + check.advice
    if advice:
        output.line("")
    output.value("advice", advice)
    output.exit_code = 1 if advice else 0


def _python() -> list[Check]:
    package = str(Path(warploom.__file__).parent)
    return [
        Check("warploom", warploom.__version__, where=package),
        Check("Python", platform.python_version(), where=sys.executable),
        Check("platform", platform.platform()),
    ]


def _toolchain() -> list[Check]:
    """Each component, whether it is as it was installed, whether it compiles, and the driver."""
    checks = [_component(name, part) for name, part in toolchain.survey().items()]
    try:
        found = find()
    except ToolchainError as error:
        if not any(check.advice for check in checks):
            checks.append(Check("toolchain", f"{error.value}: {error.rule}", error.fix))
        return [*checks, device.driver(None)]
    checks.append(Check("toolchain id", "of all these files", where=found.identity))
    changed = found.verify()
    if changed:
        told = f"{len(changed)} are not as their wheels recorded them, {changed[0]} for one"
        checks.append(Check("installed files", told, "pip install --force-reinstall the wheel"))
    else:
        checks.append(Check("installed files", "as their wheels recorded them"))
    return [*checks, _compiling(found), device.driver(found.versions["NVRTC"])]


def _component(name: str, part: Component | ToolchainError) -> Check:
    if isinstance(part, ToolchainError):
        return Check(name, f"{part.value}: {part.rule}", part.fix)
    return Check(name, part.version, where=str(part.folder))


def _compiling(found: Toolchain) -> Check:
    """Compile the headers that every kernel includes, and a kernel that does nothing."""
    prelude = resources.files("warploom.templates").joinpath("common", "prelude.cuh").read_text()
    source = f'#include <cuda_fp16.h>\n{prelude}extern "C" __global__ void probe(__half* d) {{}}\n'
    arch = DEFAULT.arch
    try:
        probe = nvrtc.compile(source, name="probe", arch=arch, toolchain=found)
    except CompilationError as error:
        return Check("compiling", error.value, _cause(found))
    except ToolchainError as error:  # such as one that changes under this process
        return Check("compiling", f"{error.value}: {error.rule}", error.fix)
    return Check("compiling", f"the headers of kernels, {arch}, in {probe.compile_seconds:.2f} s")


def _cause(found: Toolchain) -> str:
    """What to do where headers do not compile."""
    folders = {part.name: part.folder for part in found.components}
    cuda, cccl = folders.get("CUDA headers"), folders.get("CCCL")
    if cuda and cccl and not cccl.is_relative_to(cuda):
        return (
            f"CUDA headers in {cuda} and CCCL in {cccl} are of two installations: "
            "pip install 'nvidia-cuda-cccl>=13.0,<13.2', so that both come as wheels"
        )
    return "pip install --force-reinstall 'warploom[nvrtc]'; unset CPATH and CUDA_HOME"


def _torch() -> Check:
    """What torch is and was built for; imported last, since it brings libraries of its own."""
    if find_spec("torch") is None:
        return Check("torch", "none: kernels compile here and run elsewhere")
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        return Check("torch", f"{type(error).__name__}: {error}", "reinstall torch")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    bindings = metadata.version("cuda-bindings")
    found = f"{torch.__version__}, built {built}; cuda-bindings {bindings}"
    if device.ask("cuDeviceGetCount") and not torch.cuda.is_available():
        advice = "install a CUDA build of torch 2.10 or later: this one does not see the GPU"
        return Check("torch", found, advice, str(Path(torch.__file__).parent))
    return Check("torch", found, where=str(Path(torch.__file__).parent))


def _store() -> list[Check]:
    try:
        directories = Store.default().stats().directories
    except StoreError as error:
        return [Check("store", f"{error.value}: {error.rule}", error.fix)]
    if not directories:
        found = "in memory only: no directory can be used"
        return [Check("store", found, "set WARPLOOM_CACHE_DIR to a folder that can be written")]
    return [
        Check("store", f"{place.kernels} kernels, {Bytes(place.bytes)}", where=place.path)
        for place in directories
    ]


def _records() -> list[Check]:
    """Every file of records: of the package, and the user's."""
    checks = []
    for path in records_file.every():
        try:
            records = records_file.read(path)
        except RecordsError as error:
            checks.append(Check("records", error.rule, error.fix, where=error.value))
        else:
            found = f"{records.gpu}: {len(records)} of them"
            checks.append(Check("records", found, where=str(path)))
    return checks


def _variables() -> list[Check]:
    """Every variable that is set and has a part in what is found, and those that are mistaken."""
    wrong = mistakes()
    names = [*sorted(name for name in os.environ if name.startswith(PREFIX)), *_OTHERS]
    return [
        Check(
            name,
            f"set, but {wrong[name]}" if name in wrong else "set",
            f"{wrong[name]}" if name in wrong else "",
            where=os.environ[name],
        )
        for name in names
        if name in os.environ
    ]
