"""The machine that a benchmark ran on, and the state of its GPU at a moment.

What nvidia-smi does not give is recorded as unavailable, with the reason.
"""

from __future__ import annotations

import platform
import subprocess
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from warploom.errors import DeviceError, ToolchainError
from warploom.generator.architectures import products, served
from warploom.generator.toolchain import find

_QUERY = {  # nvidia-smi's name: ours
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_watts",
    "power.limit": "power_limit_watts",
    "temperature.gpu": "temperature_celsius",
}


def machine() -> dict[str, Any]:
    """Return the date, the versions of everything that has a part in the times, and the GPU."""
    return {"date": date.today().isoformat(), **versions()}


def versions() -> dict[str, str | int]:
    """Return the versions of everything that has a part in the times, and the GPU's name."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "warploom": _version(),
    }
    try:
        found |= {f"toolchain {name}": value for name, value in find().versions.items()}
    except ToolchainError as error:
        found["toolchain"] = str(error)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def _version() -> str:
    try:
        return version("warploom")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "not installed"


def require_gpu() -> None:
    """DeviceError where there is no GPU that kernels run on."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU",
            rule=f"peers are measured on a GPU of {served()}",
            fix=f"run it on an {products()}; `warploom doctor` says more",
        )
    from warploom.runtime.driver import require_usable

    require_usable(torch.cuda.current_device())


def warm(seconds: float = 2.0) -> None:
    """Keep the GPU busy until its clocks settle; DeviceError where there is none."""
    require_gpu()
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def state() -> dict[str, Any]:
    """Return driver, clocks (MHz), power (watts) and temperature (Celsius) of the current GPU."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    try:
        return _from_nvidia_smi(uuid)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unavailable": f"nvidia-smi: {error}"}


def _from_nvidia_smi(uuid: str) -> dict[str, Any]:
    command = ["nvidia-smi", f"--id={uuid}", "--format=csv,noheader,nounits"]
    done = subprocess.run(  # noqa: S603 (a constant, and the driver's own name of the GPU)
        [*command, f"--query-gpu={','.join(_QUERY)}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return parse_nvidia_smi(done.stdout)


def parse_nvidia_smi(line: str) -> dict[str, Any]:
    """Read the values of one line of CSV; what is no number (`[N/A]`) stays text."""
    values = [value.strip() for value in line.strip().split(",")]
    found: dict[str, Any] = dict(zip(_QUERY.values(), values, strict=True))
    for name in list(found)[1:]:
        try:
            found[name] = float(found[name])
        except ValueError:
            continue
    return found
