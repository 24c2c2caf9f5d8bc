"""`warploom report KERNEL`: one page of HTML with everything that is known of a kernel."""

from __future__ import annotations

from pathlib import Path

import click

from warploom.cli.arguments import ANY_FILE, ConfigurationFile
from warploom.cli.output import Output, reporting


@click.command("report")
@click.argument("kernel")
@click.option(
    "-o",
    "--out",
    "path",
    metavar="FILE",
    type=ANY_FILE,
    help="The page (default: NAME.html, here).",
)
@click.option("--gpu", help="The GPU kind of the roofline (default: the one with most timings).")
@click.option(
    "--journal",
    metavar="FILE",
    type=ANY_FILE,
    help="A tuner's journal to show in place of the tuned configs.",
)
@click.option(
    "--in",
    "configuration",
    metavar="FILE",
    type=ConfigurationFile(),
    help="A configuration that a digest is looked for in, before all others.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@reporting
def command(
    output: Output,
    kernel: str,
    path: Path | None,
    gpu: str | None,
    journal: Path | None,
    configuration: Path | None,
    opens: bool,
) -> None:
    """Write one page of HTML about one kernel.

    The page has its source next to its machine code (SASS), linked both ways; live registers;
    the map of shared memory; the instruction mix of its loops; a roofline with measured times; the
    rules and their values; and what the tuner measured. It needs no network, and no GPU is needed
    to make it. SASS needs nvdisasm, of a CUDA toolkit or its wheel on PyPI, nvidia-cuda-nvdisasm.

    KERNEL is a name, a file of that name, a digest or a key, as `warploom show` takes it.

    \b
    Examples:
      warploom report c2b9e29c
      warploom report c2b9e29c -o gemm.html --gpu "H100 SXM" --open
      warploom report c2b9e29c --journal sweep.journal.jsonl
    """
    from warploom.cli.kernels import named
    from warploom.generator import names
    from warploom.reports.report import kernel_report

    spec = named(kernel, configuration)
    report = kernel_report(spec, gpu=gpu, journal=journal)
    written = report.write(path or names.file(spec.name, "html"))
    output.value("name", spec.name)
    output.value("report", report.facts)
    if report.missing:
        output.warning(report.missing)
        output.document("no disassembly", report.missing)
    output.value("file", written)
    if opens:
        click.launch(str(written))
