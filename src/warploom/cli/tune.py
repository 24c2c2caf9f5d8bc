"""`warploom tune FILE`: find the best schedule of each problem on GPUs here or of a cluster.

Every result goes to a journal as it comes, every finished problem to the user's records, which
calls use from then on. Ctrl-C keeps both; a second start goes on where the first ended. The exit
code is 3 when a kernel's result was wrong, 1 when a problem ended without a record.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warploom.cli import engines
from warploom.cli.arguments import ANY_FILE, GPU_KIND, ConfigurationFile
from warploom.cli.engines import Engines
from warploom.cli.output import Output, reporting
from warploom.cli.shapes import check_one, shape_options, shipped, told_spaces
from warploom.errors import ConfigurationError
from warploom.generator.configurations import spaces

if TYPE_CHECKING:
    from warploom.tuning.account import Ended, Progress
    from warploom.tuning.problems import Problem
    from warploom.tuning.tuner import Tuner

COLUMNS = ("problem", "us", "default / best", "tried", "failed", "status", "schedule")


@click.command("tune", epilog=told_spaces())
@click.argument("path", metavar="FILE", type=ConfigurationFile(tuple(spaces())))
@shape_options
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds it may take.")
@click.option(
    "--gpus", type=click.IntRange(min=1), help="How many (default: 1; of a cluster, all)."
)
@engines.ray_option
@click.option(
    "--kind", callback=GPU_KIND, help="With --ray: only GPUs of this kind, such as 'NVIDIA H200'."
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile.")
@click.option("--again", is_flag=True, help="Measure what is recorded or in the journal already.")
@click.option("--exhaustive", is_flag=True, help="Measure every legal schedule: a sweep.")
@click.option("--judge", is_flag=True, help="Compare tuned configs with the cost model's choices.")
@click.option("--records", type=ANY_FILE, help="The tuning database (default: yours).")
@click.option(
    "--journal", type=ANY_FILE, help="The journal (default: next to the tuning database)."
)
@click.option("--replay", type=ANY_FILE, help="A sweep's journal to measure on instead of a GPU.")
@reporting
def command(
    output: Output,
    path: Path,
    shapes: Sequence[str],
    model: str | None,
    cells: bool,
    rows: Sequence[int],
    budget: float,
    gpus: int | None,
    address: str | None,
    kind: str | None,
    jobs: int | None,
    again: bool,
    exhaustive: bool,
    judge: bool,
    records: Path | None,
    journal: Path | None,
    replay: Path | None,
) -> None:
    """Find the best schedules at given shapes, and record them.

    FILE is a configuration with operations and a search space of schedules, or the name of one
    of the package. A prefix such as attention names all search spaces that begin with it.

    \b
    Examples:
      warploom tune gemm --shapes 512x6144x4096,2048x6144x4096
      warploom tune gemm --model llama3-8b --m 1,16 --budget 120
      warploom tune linear.yaml --shapes 64x384x512 --gpus 2
      warploom tune attention --cells --ray
    """
    output.for_people = True
    check_one("tune", shapes, model, rows, cells=cells)
    if not 0 < budget < math.inf:
        raise ConfigurationError(
            f"--budget {budget:g}",
            rule="must be a number of seconds, more than 0",
            fix="a minute is a good start",
        )
    if replay and not records:
        raise ConfigurationError(
            "--replay without --records",
            rule="what was replayed is no measurement, and not for the user's records",
            fix="give a file of its own",
        )
    if address is None and kind:
        raise ConfigurationError(
            f"--kind {kind} without --ray",
            rule="chooses among the GPUs of a cluster",
            fix="choose those of this host with CUDA_VISIBLE_DEVICES",
        )
    if address is not None and replay:
        raise ConfigurationError(
            "--replay with --ray",
            rule="a sweep is played back here, without a GPU",
            fix="leave one of them out",
        )
    with ExitStack() as stack:
        using = _engines(stack, output, address, gpus, kind, jobs, replay)
        # These import torch, which takes seconds: what measures does so at the same time.
        from warploom.runtime.records import user_file
        from warploom.tuning.problems import problems

        wanted = [
            problem
            for space in shipped(path)
            for problem in problems(space, shapes, model=model, rows=rows)
        ]
        records = records or user_file(using.about.gpu)
        journal = journal or records.with_suffix(".journal.jsonl")
        _check_apart(journal, records, replay)
        run = _tuner(
            *(output, wanted, using, records, journal),
            budget=budget,
            again=again,
            exhaustive=exhaustive,
            judge=judge,
        )
        tuner = None
        try:
            with run as tuner:
                tuner.run()
        except KeyboardInterrupt as signalled:
            output.stopped(signalled, "what is done is kept, and the same command goes on")
        finally:
            if tuner:  # the files could be opened
                _report(output, tuner.ended, len(wanted))
                output.value("records", records)
                output.value("journal", journal)


def _check_apart(journal: Path, records: Path, replay: Path | None) -> None:
    """ConfigurationError for a journal that is the records, or the sweep that is played back."""
    for option, other in (("--records", records), ("--replay", replay)):
        if other and os.path.realpath(other) == os.path.realpath(journal):
            raise ConfigurationError(
                f"--journal {journal}",
                rule=f"must be another file than that of {option}: results are appended to it",
                fix="give a file of its own",
            )


def _engines(
    stack: ExitStack,
    output: Output,
    address: str | None,
    gpus: int | None,
    kind: str | None,
    jobs: int | None,
    replay: Path | None,
) -> Engines:
    """What measures and what compiles: a cluster, processes of this host, or a sweep."""
    if address is not None:
        return engines.remote(stack, address, gpus, kind, jobs, output.warning)
    return engines.replayed(replay) if replay else engines.local(stack, gpus or 1, jobs)


@contextmanager
def _tuner(
    output: Output,
    problems: Sequence[Problem],
    using: Engines,
    records: Path,
    journal: Path,
    **options: Any,
) -> Iterator[Tuner]:
    """Open the files of a run, and show how it stands while it lasts."""
    from warploom.generator import records_file
    from warploom.generator.model import load
    from warploom.tuning.journal import Journal
    from warploom.tuning.tuner import Tuner

    gpu = using.about.gpu
    here = engines.environments(using, {problem.operation.family for problem in problems})
    known = records_file.known(records, gpu)
    records_file.require_writable(records)
    constants = load(gpu)
    families = constants.families.values() if constants else ()
    for other in sorted({one.fitted_on for one in families} - {""}):
        output.line(f"{gpu} has no constants of some families: those of {other} rank, rescaled")

    def alarm(text: str) -> None:
        output.warning(text)
        output.exit_code = 3

    with (
        closing(Journal(journal)) as opened,
        output.watching("tuning", len(problems), estimate=False) as watch,
    ):

        def told(progress: Progress) -> None:
            watch(progress.done, f"{progress.left:.0f} s left, {progress.text}")

        yield Tuner(
            problems,
            using.fleet(problems, here, output.warning),
            using.compiler,
            opened,
            known,
            here,
            constants=constants,
            save=lambda record: records_file.keep(records, gpu, record),
            watch=told,
            alarm=alarm,
            **options,
        )


def _report(output: Output, ended: Sequence[Ended], total: int) -> None:
    from warploom.generator import names

    rows = []
    for one in ended:
        record, tried = one.record, sum(one.outcomes.values())
        best = record.best if record else None
        rows.append(
            [
                str(one.problem),
                best and best.seconds * 1e6,
                record and record.speedup,
                tried,
                tried - one.outcomes.get("correct", 0),
                f"{one.status}: {one.reason}" if one.reason else one.status,
                best and names.short(best.schedule),
            ]
        )
    output.table("problems", COLUMNS, rows)
    counts = {
        status: sum(one.status == status for one in ended)
        for status in ("tuned", "recorded before", "failed", "not reached")
    }
    counts["not reached"] += total - len(ended)
    output.total("problems ended", counts)
    if counts["not reached"]:
        output.line("not reached: raise --budget; the same command goes on")
    if counts["failed"] or counts["not reached"]:
        output.exit_code = max(output.exit_code, 1)
