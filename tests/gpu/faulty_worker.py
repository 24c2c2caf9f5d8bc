"""The measuring process with kernels that are broken on purpose: `faulty_worker.py FAULTS`.

FAULTS is JSON: the name of a kernel, and which of FAULTS to build into it.
"""

from __future__ import annotations

import json
import re
import sys

from warploom.generator import nvrtc
from warploom.generator.render import render
from warploom.generator.specification import parse_name
from warploom.generator.toolchain import find
from warploom.runtime import kernel as kernels
from warploom.tuning import worker

# The first statement of a kernel. A hang ends by itself after half a minute: longer than the parent
# waits, and short enough that a GPU is never lost to it.
FAULTS = {
    "hang": "const long long begin = clock64(); while (clock64() - begin < 50'000'000'000ll) {}",
    "fault": "*reinterpret_cast<volatile int*>(uint64_t{64}) = 1;",
    "nothing": "return;",
}
BEGINNING = r"(extern \"C\" __global__[^{]*\{)"


def install(name: str, fault: str) -> None:
    """Put a broken kernel in the place of the one called `name`, in this process only."""
    spec = parse_name(name)
    source, count = re.subn(BEGINNING, rf"\1 {FAULTS[fault]}", render(spec))
    if count != 1:
        raise LookupError(f"{spec.name} has {count} beginnings")
    artifact = nvrtc.compile(source, name=spec.name, arch=spec.arch, toolchain=find())
    kernels._kernels[spec] = kernels.Kernel(spec, artifact)


if __name__ == "__main__":
    for kernel, fault in json.loads(sys.argv[1]).items():
        install(kernel, fault)
    worker.serve()
