"""`warploom tune FILE`: find the best schedule of each problem on the GPUs at hand, and record it.

Every result goes to a journal as it comes, every finished problem to the user's records, which
calls use from then on. Ctrl-C keeps both; a second start goes on where the first ended. The exit
code is 3 when a kernel's result was wrong, 1 when a problem ended without a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warploom.cli.arguments import ConfigurationFile
from warploom.cli.output import Output, reporting
from warploom.cli.shapes import check_one, shape_options, shipped, told_spaces
from warploom.errors import ConfigurationError, DeviceError
from warploom.generator.configurations import spaces

if TYPE_CHECKING:
    from warploom.generator.records import Environment
    from warploom.tuning.gpu import Gpu
    from warploom.tuning.problems import Problem
    from warploom.tuning.tuner import Compiler, Ended, Progress, Tuner

COLUMNS = ("problem", "us", "default / best", "tried", "failed", "status", "schedule")
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("tune", epilog=told_spaces())
@click.argument("path", metavar="FILE", type=ConfigurationFile(tuple(spaces())))
@shape_options
@click.option("--budget", type=float, default=300.0, show_default=True, help="Seconds it may take.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="How many.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile.")
@click.option("--again", is_flag=True, help="Measure what is recorded or in the journal already.")
@click.option("--exhaustive", is_flag=True, help="Measure every legal schedule: a sweep.")
@click.option("--judge", is_flag=True, help="Hold what is recorded against the model's choices.")
@click.option("--records", type=_FILE, help="The file of records (default: the user's).")
@click.option("--journal", type=_FILE, help="The journal (default: beside the records).")
@click.option("--replay", type=_FILE, help="A sweep's journal to measure on instead of a GPU.")
@click.option(
    "--pace", type=float, default=0.0, hidden=True, help="Seconds a replayed batch takes."
)
@reporting
def command(
    output: Output,
    path: Path,
    shapes: Sequence[str],
    model: str | None,
    cells: bool,
    rows: Sequence[int],
    budget: float,
    gpus: int,
    jobs: int | None,
    again: bool,
    exhaustive: bool,
    judge: bool,
    records: Path | None,
    journal: Path | None,
    replay: Path | None,
    pace: float,
) -> None:
    """Find the best schedules at given shapes, and record them.

    FILE has operations and a space of schedules, or is the name of a space of the package. What the
    names of several families begin with names the spaces of all of them.
    """
    from warploom.runtime.records import user_file
    from warploom.tuning.problems import problems

    output.for_people = True
    check_one("tune", shapes, model, cells=cells)
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
    wanted = [
        problem
        for space in shipped(path)
        for problem in problems(space, shapes, model=model, rows=rows)
    ]
    with ExitStack() as stack:
        measuring, compiler = _engines(stack, gpus, jobs, replay, pace)
        records = records or user_file(measuring[0].about.gpu)
        journal = journal or records.with_suffix(".journal.jsonl")
        run = _tuner(
            *(output, wanted, measuring, compiler, records, journal),
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


def _engines(
    stack: ExitStack, gpus: int, jobs: int | None, replay: Path | None, pace: float
) -> tuple[list[Gpu], Compiler]:
    """What measures and what compiles: processes, or a sweep played back."""
    from warploom.tuning import journal
    from warploom.tuning.gpu import GpuProcess, visible
    from warploom.tuning.replay import NoCompiler, Replay

    if replay:
        return [Replay(journal.read(replay), pace=pace)], NoCompiler()
    from warploom.generator.build import Builder

    found: list[Gpu] = []
    for name in visible(gpus):
        found.append(GpuProcess(name))
        stack.callback(found[-1].close)
    if len({gpu.about for gpu in found}) > 1:
        raise DeviceError(
            f"GPUs {', '.join(gpu.about.gpu for gpu in found)}",
            rule="one run tunes for one GPU kind",
            fix="choose with CUDA_VISIBLE_DEVICES",
        )
    return found, stack.enter_context(Builder(jobs=jobs))


@contextmanager
def _tuner(
    output: Output,
    problems: Sequence[Problem],
    gpus: Sequence[Gpu],
    compiler: Compiler,
    records: Path,
    journal: Path,
    **options: Any,
) -> Iterator[Tuner]:
    """Open the files of a run, and show how it stands while it lasts."""
    from warploom.generator import records_file
    from warploom.generator.model import load
    from warploom.tuning.fleet.members import Fleet
    from warploom.tuning.journal import Journal
    from warploom.tuning.tuner import Tuner

    about = gpus[0].about
    gpu = about.gpu
    known = records_file.known(records, gpu)
    constants = load(gpu)
    if constants is None or constants.stand_in:
        ranked = f"those of {constants.stand_in}" if constants else "none"
        output.line(f"no constants of {gpu}: schedules are ranked with {ranked}")

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
            Fleet(about, {str(index): one for index, one in enumerate(gpus)}, say=output.warning),
            compiler,
            opened,
            known,
            _environments(gpus[0], {problem.operation.family for problem in problems}),
            constants=constants,
            save=lambda record: records_file.update(records, gpu, [record]),
            watch=told,
            alarm=alarm,
            **options,
        )


def _environments(gpu: Gpu, families: set[str]) -> dict[str, Environment]:
    """What each family is measured in; a sweep must have every family that is tuned."""
    from warploom.generator.launches import DeviceLimits
    from warploom.runtime.records import environment, nvrtc
    from warploom.tuning.replay import Replay

    if not isinstance(gpu, Replay):
        device = DeviceLimits(gpu.about.multiprocessors, gpu.about.gpu, nvrtc())
        return {family: environment(device, family) for family in families}
    known = gpu.environments
    if missing := sorted(families - known.keys()):
        raise ConfigurationError(
            f"a sweep without {', '.join(missing)}",
            rule="what is played back has every family of the configuration",
            fix="give a sweep of these operations",
        )
    return {family: known[family] for family in families}


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
