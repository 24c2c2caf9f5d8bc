"""What measures and what compiles for `warploom tune`: this host, a Ray cluster, or a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warploom.cli.arguments import not_empty
from warploom.errors import CompilationError, ConfigurationError, DeviceError

if TYPE_CHECKING:
    from warploom.generator.artifact import Artifact
    from warploom.generator.records import Environment
    from warploom.generator.specification import KernelSpec
    from warploom.tuning.builds import Compiler
    from warploom.tuning.fleet.cluster import Cluster
    from warploom.tuning.fleet.gpus import Joining
    from warploom.tuning.fleet.members import Fleet
    from warploom.tuning.gpu import About, Gpu
    from warploom.tuning.problems import Problem

AHEAD = 2  # kernels for each core of a cluster: one that it compiles, one that waits there

ray_option = click.option(
    "--ray",
    "address",
    metavar="[ADDRESS]",
    callback=not_empty("must be an address, such as 10.0.0.1:6379, or be left out"),
    is_flag=False,
    flag_value="auto",
    help="Work on a Ray cluster: the one at ADDRESS, or that this machine is part of. Whoever can "
    "reach a cluster, and each of its nodes, can run code as you: use one that you trust.",
)


@dataclass(frozen=True)
class Engines:
    """GPUs, which start while their user does something else, and what compiles.

    first          waits for the GPUs, by name; of a cluster, for the first
    joining        of a cluster, who joins
    environments   what each family is measured in, where a sweep says it
    """

    first: Callable[[], Mapping[str, Gpu]]
    compiler: Compiler
    joining: Joining | None = None
    environments: Mapping[str, Environment] | None = None

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        """The GPUs by name, which are of one kind. DeviceError where there is none."""
        return self.first()

    @property
    def about(self) -> About:
        """The kind of the GPUs."""
        return next(iter(self.gpus.values())).about

    def fleet(
        self,
        problems: Sequence[Problem],
        here: Mapping[str, Environment],
        say: Callable[[str], None],
        *,
        about: About | None = None,
        hanging: float | None = None,
        confirms: bool = True,
    ) -> Fleet:
        """The GPUs of a run over `problems`; those of a cluster are examined.

        Of a cluster: what its GPUs must be `about`, the seconds after which one is `hanging`, and
        whether a second one `confirms` finalists.
        """
        from warploom.tuning.builds import unusable
        from warploom.tuning.fleet.members import FAILURES, HANGING, Fleet
        from warploom.tuning.searches import anchor

        if self.joining is None:
            return Fleet(self.about, self.gpus, say=say)
        examined = anchor(problems, here)
        if examined is not None and (reason := unusable(self.compiler.submit(examined.specs[0]))):
            say(f"no GPU is examined, since the kernel for that cannot be used: {reason}")
            examined = None
        return Fleet(
            about or self.about,
            self.gpus,
            joining=self.joining,
            failures=FAILURES,
            anchor=examined,
            say=say,
            retired=self.joining.retire,
            hanging=HANGING if hanging is None else hanging,
            confirms=confirms,
        )


def local(stack: ExitStack, count: int, jobs: int | None) -> Engines:
    """Processes of this host, one for each GPU, and those that compile."""
    from warploom.generator.build import Builder
    from warploom.tuning.gpu import GpuProcess, visible

    found: dict[str, Gpu] = {}
    for name in visible(count):
        found[name] = GpuProcess(name)
        stack.callback(found[name].close)
    return Engines(partial(_alike, found), stack.enter_context(Builder(jobs=jobs)))


def _alike(gpus: Mapping[str, Gpu]) -> Mapping[str, Gpu]:
    """GPUs that have started; DeviceError for one that cannot, or is of another kind."""
    if len({gpu.about for gpu in gpus.values()}) > 1:
        raise DeviceError(
            f"GPUs {', '.join(gpu.about.gpu for gpu in gpus.values())}",
            rule="one run tunes for one GPU kind",
            fix="choose with CUDA_VISIBLE_DEVICES",
        )
    return gpus


def remote(
    stack: ExitStack,
    address: str,
    count: int | None,
    kind: str | None,
    jobs: int | None,
    say: Callable[[str], None],
    **options: Any,
) -> Engines:
    """The GPUs and the cores of a cluster; `options` are those of Joining."""
    from warploom.generator.build import Builder
    from warploom.tuning.fleet.cluster import cluster
    from warploom.tuning.fleet.gpus import Joining

    opened = stack.enter_context(cluster(address))
    builder = stack.enter_context(Builder(jobs=tasks(opened, jobs), worker=opened.compiler))

    def kernel(spec: KernelSpec) -> Artifact | None:
        built = builder.submit(spec).result()
        return None if isinstance(built, CompilationError) else built

    joining = Joining(opened, count, kind, say=say, **{"kernels": kernel, **options})
    stack.callback(joining.close)
    joining()  # has Ray start actors
    return Engines(joining.first, builder, joining)


def tasks(opened: Cluster, jobs: int | None) -> int:
    """How many kernels a cluster is given at a time."""
    return jobs or max(AHEAD, AHEAD * opened.total("CPU"))


def replayed(path: Path) -> Engines:
    """A sweep played back, and nothing that compiles."""
    from warploom.tuning import journal
    from warploom.tuning.replay import NoCompiler, Replay

    gpu = Replay(journal.read(path))
    return Engines(lambda: {"sweep": gpu}, NoCompiler(), environments=gpu.environments)


def environments(engines: Engines, families: set[str]) -> dict[str, Environment]:
    """What each family is measured in; a sweep must have every family that is tuned."""
    from warploom.generator.launches import DeviceLimits
    from warploom.runtime.records import environment, nvrtc

    known = engines.environments
    if known is None:
        device = DeviceLimits(engines.about.multiprocessors, engines.about.gpu, nvrtc())
        return {family: environment(device, family) for family in families}
    if missing := sorted(families - known.keys()):
        raise ConfigurationError(
            f"a sweep without {', '.join(missing)}",
            rule="what is played back has every family of the configuration",
            fix="give a sweep of these operations",
        )
    return {family: known[family] for family in families}
