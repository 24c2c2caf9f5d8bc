"""`warploom show KERNEL`: its fields, resources, how to reproduce it, and its source."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import click

from warploom.cli.arguments import ConfigurationFile
from warploom.cli.output import Output, reporting
from warploom.errors import ToolchainError
from warploom.generator import names
from warploom.generator.specification import KernelSpec


@click.command("show")
@click.argument("kernel")
@click.option("--source", "only_source", is_flag=True, help="Print the source and nothing else.")
@click.option(
    "--in",
    "path",
    metavar="FILE",
    type=ConfigurationFile(),
    help="A configuration that a digest is looked for in, before all others.",
)
@reporting
def command(output: Output, kernel: str, only_source: bool, path: Path | None) -> None:
    """Show one kernel, by name, digest, key or file.

    KERNEL is a name, in a configuration or not; a file of that name, such as NAME.cu; the digest
    that a name ends in, of a kernel of the package's configurations, the kernel cache or FILE; or a
    key of the kernel cache. Of a digest or a key, 8 digits are enough.

    \b
    Examples:
      warploom show 4b296fde --in linear.yaml
      warploom show --source kernels/NAME.cu
      warploom show 4b296fde --json
    """
    from warploom.cli.kernels import named
    from warploom.generator.render import render

    spec = named(kernel, path)
    source = render(spec)
    if not only_source:
        output.value("name", spec.name)
        output.value("digest", spec.digest)
        output.value("operation", {"arch": spec.arch, **dataclasses.asdict(spec.operation)})
        output.value("schedule", dataclasses.asdict(spec.schedule))
        _describe(output, spec, source)
    output.text("source", source)


def _describe(output: Output, spec: KernelSpec, source: str) -> None:
    """Report what the store knows of the kernel, and the commands that make it anew."""
    from warploom.generator.store import Store, source_digest
    from warploom.generator.toolchain import find

    file = names.file(spec.name, "cu")
    commands = {"source": f"warploom show --source {spec.name} > {file}"}
    identity = None
    try:
        toolchain = find()
    except ToolchainError as error:
        output.line(f"toolchain: {error}")
    else:
        identity = toolchain.identity
        folders = {part.name: str(part.folder) for part in toolchain.components}
        commands["nvcc"] = shlex.join(nvcc_command(spec, folders["CUTLASS"]))
        commands["NVRTC options"] = shlex.join(toolchain.options(spec.arch))
    artifact = Store.default().find(source_digest(source), spec.arch, identity)
    entries = artifact.resources if artifact else {}
    output.value("stored", artifact is not None)
    output.table(
        "resources",
        ["registers", "spill bytes", "local bytes", "entry"],
        [
            [found.registers, found.spill_bytes, found.local_bytes, entry]
            for entry, found in entries.items()
        ],
    )
    output.value("reproduce", commands)


def nvcc_command(spec: KernelSpec, cutlass: str) -> list[str]:
    """Return the command that makes NAME.cubin of NAME.cu with nvcc, given CUTLASS's headers."""
    flags = [f"-arch={spec.arch}", "-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG"]
    made, source = (names.file(spec.name, suffix) for suffix in ("cubin", "cu"))
    return ["nvcc", "-cubin", *flags, f"-I{cutlass}", "-o", made, source]
