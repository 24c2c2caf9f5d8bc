"""`warploom doctor`: is everything here that compiling and running kernels needs?

Each check says what it found and, if that will not do, what to do about it; the exit code is then
1. A machine without a GPU or driver is not at fault: kernels compile there and run elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from warploom.cli.output import Output, reporting
from warploom.errors import CompilationError, StoreError, ToolchainError
from warploom.generator import nvrtc
from warploom.generator.architectures import ARCHITECTURES
from warploom.generator.store import Store
from warploom.generator.toolchain import Toolchain, find

# Reaches into every component: CUTLASS, the CUDA runtime's headers, crt's, and CCCL's.
_PROBE = """\
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include <cute/config.hpp>
extern "C" __global__ void probe(__half* d) { d[threadIdx.x] = __half(threadIdx.x); }
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `advice` is empty when nothing needs to be done."""

    name: str
    found: str
    advice: str = ""


@click.command("doctor")
@reporting
def command(output: Output) -> None:
    """Check what compiling and running kernels needs here."""
    try:
        toolchain = find()
        checks = [*_compiling(toolchain), _driver(toolchain.versions["NVRTC"])]
    except ToolchainError as error:
        checks = [Check("toolchain", f"{error.value}: {error.rule}", error.fix), _driver(None)]
    checks += [_store(), _gpu()]
    output.table(
        "checks",
        ["check", "good", "found"],
        [[check.name, not check.advice, check.found] for check in checks],
    )
    advice = {check.name: check.advice for check in checks if check.advice}
    output.value("advice", advice)
    output.exit_code = 1 if advice else 0


def _compiling(toolchain: Toolchain) -> list[Check]:
    checks = [Check(name, version) for name, version in toolchain.versions.items()]
    checks.append(Check("toolchain id", toolchain.identity))
    changed = toolchain.verify()
    if changed:
        found = f"{len(changed)} are not as their wheels recorded them, {changed[0]} for one"
        checks.append(Check("installed files", found, "pip install --force-reinstall the wheel"))
    else:
        checks.append(Check("installed files", "as their wheels recorded them"))
    arch = next(iter(ARCHITECTURES))
    try:
        probe = nvrtc.compile(_PROBE, name="probe", arch=arch, toolchain=toolchain)
    except CompilationError as error:
        advice = f"pip install --force-reinstall the wheels; the compiler said: {error.log}"
        checks.append(Check("compiling", error.value, advice))
    else:
        checks.append(Check("compiling", f"{arch} in {probe.compile_seconds:.2f} s"))
    return checks


def _driver(nvrtc_version: str | None) -> Check:
    version = _ask_driver("cuDriverGetVersion")
    if version is None:
        return Check("driver", "none: kernels compile here and run elsewhere")
    found = f"CUDA {version // 1000}.{version % 1000 // 10}"
    needed = int(nvrtc_version.split(".")[0]) if nvrtc_version else 0
    if version // 1000 < needed:
        return Check(
            "driver",
            f"{found}, but cubins of NVRTC {needed} need a driver of CUDA {needed} or later",
            f"install an NVIDIA driver for CUDA {needed} (580 or later for CUDA 13)",
        )
    return Check("driver", found)


def _store() -> Check:
    try:
        directories = Store.default().stats().directories
    except StoreError as error:
        return Check("store", f"{error.value}: {error.rule}", error.fix)
    if not directories:
        return Check("store", "in memory only: no directory can be used", "set WARPLOOM_CACHE_DIR")
    places = (f"{place.path} ({place.kernels} kernels)" for place in directories)
    return Check("store", "; ".join(places))


def _gpu() -> Check:
    _ask_driver("cuInit", 0)
    count = _ask_driver("cuDeviceGetCount") or 0
    if not count:
        return Check("GPU", "none: kernels compile here and run elsewhere")
    return Check("GPU", "; ".join(map(_describe, range(count))))


def _describe(index: int) -> str:
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    device = _ask_driver("cuDeviceGet", index)
    name = _ask_driver("cuDeviceGetName", 256, device).rstrip(b"\0").decode()
    capability = tuple(
        _ask_driver("cuDeviceGetAttribute", attribute, device)
        for attribute in (
            Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    served = [row.name for row in ARCHITECTURES.values() if row.capability == capability]
    return f"{name} ({served[0] if served else 'no kernels exist for it'})"


def _ask_driver(function: str, *arguments: object) -> Any:  # noqa: ANN401
    """Return what a driver function gives; None where it fails or there is no driver."""
    from cuda.bindings import driver

    try:
        status, *values = getattr(driver, function)(*arguments)
    except RuntimeError:  # libcuda cannot be loaded
        return None
    return values[0] if values and not status.value else None
