"""What the CUDA driver says of itself and of the GPUs; a machine without one is not at fault."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warploom.generator.architectures import serving

_NONE = "none: kernels compile here and run elsewhere"
_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `doctor`: what, and where; `advice` is empty when nothing needs to be done."""

    name: str
    found: str
    advice: str = ""
    where: str = ""


def driver(nvrtc_version: str | None) -> Check:
    """The driver's version, held against NVRTC's, whose cubins it is to load."""
    version = ask("cuDriverGetVersion")
    if version is None:
        return Check("driver", _NONE)
    named = _kernel_module()
    found = f"{named}, CUDA " if named else "CUDA "
    found += f"{version // 1000}.{version % 1000 // 10}"
    needed = int(nvrtc_version.split(".")[0]) if nvrtc_version else 0
    if version // 1000 < needed:
        return Check(
            "driver",
            f"{found}, but cubins of NVRTC {needed} need a driver of CUDA {needed} or later",
            f"install an NVIDIA driver for CUDA {needed} (580 or later for CUDA 13)",
            _library(),
        )
    return Check("driver", found, where=_library())


def gpus() -> list[Check]:
    """Each GPU: its name, architecture, multiprocessors and memory."""
    failure = ask("cuInit", 0) is None and _failure()
    if failure and failure != _NO_DEVICE:
        return [Check("GPU", f"none usable: {failure}", "look at `nvidia-smi`, or reboot")]
    count = ask("cuDeviceGetCount") or 0
    return [Check(f"GPU {index}", _describe(index)) for index in range(count)] or [
        Check("GPU", _NONE)
    ]


def plain(name: bytes) -> str:
    """The text of a name that the driver wrote into a buffer: all before the first NUL."""
    return name.partition(b"\0")[0].decode(errors="replace").strip()


def ask(function: str, *arguments: object) -> Any:  # noqa: ANN401
    """Return what a driver function gives, True for nothing; None where it fails."""
    from cuda.bindings import driver

    try:
        status, *values = getattr(driver, function)(*arguments)
    except RuntimeError:  # libcuda cannot be loaded
        return None
    if status.value:
        return None
    return values[0] if values else True


def _failure() -> str:
    """The name of the error that keeps the driver from starting; empty without a driver."""
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:
        return ""
    return str(status.name) if status.value else ""


def _describe(index: int) -> str:
    from cuda.bindings.driver import CUdevice_attribute as Attribute

    device = ask("cuDeviceGet", index)

    def attribute(name: str) -> int:
        return int(ask("cuDeviceGetAttribute", getattr(Attribute, name), device) or 0)

    capability = (
        attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
        attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    )
    architecture = serving(capability)
    return ", ".join(
        [
            plain(ask("cuDeviceGetName", 256, device) or b""),
            f"compute capability {capability[0]}.{capability[1]}",
            architecture.name if architecture else "no kernels exist for it",
            f"{attribute('CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT')} multiprocessors",
            f"{int(ask('cuDeviceTotalMem', device) or 0) / 2**30:.0f} GiB",
        ]
    )


def _kernel_module() -> str:
    """The version that `nvidia-smi` calls the driver's, such as 580.95.05; empty if unknown."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text):
            return match[1]
    return ""


def _library() -> str:
    """The file that libcuda was loaded from."""
    with suppress(OSError):
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"(/\S*/libcuda\.so\S*)", text):
            return match[1]
    return ""
