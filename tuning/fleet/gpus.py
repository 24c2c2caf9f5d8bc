"""The GPUs of a cluster: an actor on each, which joins a run when it has started.

Ray starts an actor as soon as a GPU is free, of nodes that join later too. One that ends is started
again, but on no node that was found at fault.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from warploom.errors import DeviceError
from warploom.generator.artifact import Artifact
from warploom.generator.gpus import alike
from warploom.generator.specification import KernelSpec
from warploom.printable import brief
from warploom.tuning.fleet.actor import Hello, Measurer, Sent, gpu_process, refused
from warploom.tuning.fleet.cluster import Cluster, avoiding
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import STARTING, About, Batch, Gpu
from warploom.tuning.journal import Result

GPU = "GPU"  # what Ray calls the resource
STARTS = 4  # actors in a row that could not be started: then it is not this or that node
LOOKING = 1.0  # seconds between two looks at the cluster
CLOSING = 2.0  # seconds for what measures to end, before it is killed with its actor

Kernels = Callable[[KernelSpec], Artifact | None]


class RayGpu:
    """A GPU of the cluster, behind the actor on it. What is closed was told so by its fleet."""

    def __init__(self, joining: Joining, actor: Any, hello: Hello) -> None:  # noqa: ANN401
        self.hello, self.closed = hello, False
        self._joining, self._actor = joining, actor
        self._held: dict[KernelSpec, Any] = {}  # what was sent, and the call that takes it
        self._sending = Lock()

    @property
    def about(self) -> About:
        """Which GPU it is."""
        return self.hello.about

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        """Have a batch measured. DeviceError where the actor, its node or its GPU is lost."""
        if not self._held.keys() >= set(batch.specs):
            self.prepare(batch)
        for call in {self._held[spec] for spec in batch.specs} - {None}:
            self._answer(call)
        results: dict[KernelSpec, Result] = self._once(self._actor.measure, batch)
        return results

    def prepare(self, batch: Batch) -> None:
        """Send what a batch needs of kernels, and wait for nothing: another may be measured."""
        with self._sending:
            new = [spec for spec in batch.specs if spec not in self._held]
            refs = self._joining.sent(new)
            call = self._actor.hold.remote(*refs) if refs else None
            self._held.update(dict.fromkeys(new, call))

    def cell(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Have a cell of benchmarks measured, as its process does. DeviceError as above."""
        found: dict[str, Any] = self._once(self._actor.cell, asked)
        return found

    def _once(self, method: Any, asked: object) -> Any:  # noqa: ANN401
        number = uuid.uuid4().hex
        match self._answer(method.remote(number, asked)):
            case (answered, found) if answered == number:
                return found
        raise DeviceError(
            f"GPU {self.hello.name}: an answer to another request",
            rule="must repeat the number of the request",
        )

    def condition(self) -> Condition:
        """What its driver says of it."""
        found: Condition = self._answer(self._actor.condition.remote())
        return found

    def close(self) -> None:
        """End the actor, and with it what measures; one that is retired keeps its GPU from others.

        Else the next actor would start on it.
        """
        if not self.closed:
            self.closed = True
            ray = self._joining.cluster.ray
            with suppress(Exception):  # it may be lost already
                ray.wait([self._actor.close.remote()], timeout=CLOSING)
                if not self._joining.parked(self.hello.name, self._actor):
                    ray.kill(self._actor)

    def _answer(self, ref: Any) -> Any:  # noqa: ANN401
        try:
            return self._joining.cluster.answer(ref, lambda: self.closed)
        except DeviceError as error:
            told = f"GPU {self.hello.name}: {error.value}"
            raise DeviceError(told, rule=error.rule, fix=error.fix) from error


def greeting(said: object) -> Hello:
    """Return what an actor said first; DeviceError if it is no greeting of this version."""
    if isinstance(said, Hello) and isinstance(said.about, About):
        words = (said.name, said.node, said.code, said.python, said.about.gpu)
        if all(isinstance(word, str) for word in words):
            return said
    raise DeviceError(
        f"an actor began with {brief(said)}",
        rule="must say which GPU it has, and what its node runs",
        fix="install the same version of warploom on all nodes",
    )


class Joining:
    """The GPUs of a cluster as they join: what a Fleet asks for them.

    measurer  what an actor is, and `make` what measures in it
    count     at most so many at a time; None: all that there are
    kind      only GPUs of this kind; None: of the first one's
    kernels   what was compiled, which goes along with batches
    say       told of actors that do not start, and nodes that cannot be used
    """

    def __init__(
        self,
        cluster: Cluster,
        count: int | None = None,
        kind: str | None = None,
        *,
        measurer: type[Measurer] = Measurer,
        make: Callable[[], Gpu] = gpu_process,
        resource: str = GPU,
        kernels: Kernels = lambda spec: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cluster, self.kernels = cluster, kernels
        self._count, self._kind, self._say = count, kind, say
        self._measurer, self._make, self._resource = measurer, make, resource
        self._open: list[RayGpu] = []
        self._starting: dict[Any, Any] = {}  # what an actor will say: the actor
        self._excluded: set[str] = set()  # nodes on which no more actors start
        self._retired: dict[str, Any] = {}  # actors on GPUs that are not used again, by name
        self._others: set[str] = set()  # kinds of GPUs that were met and are not wanted
        self._twins: list[RayGpu] = []  # that have the name of one that is open
        self._called_twice: set[str] = set()
        self._failures: list[str] = []  # why actors did not start, one after the other
        self._sent: dict[KernelSpec, Any] = {}
        self._looked = float("-inf")

    def __call__(self) -> dict[str, Gpu]:
        """Those that have joined since this was last asked; looks once a second.

        DeviceError where the cluster does not answer.
        """
        now = time.monotonic()
        if now - self._looked < LOOKING:
            return {}
        self._looked = now
        return self.cluster.ask(self._look)

    def _look(self) -> dict[str, Gpu]:
        self._open = [one for one in self._open if not one.closed]
        found: dict[str, Gpu] = {one.hello.name: one for one in self._started()}
        for _ in range(self._lacking()):
            self._start()
        return found

    def first(self, timeout: float = STARTING) -> dict[str, Gpu]:
        """Wait for the first to join. DeviceError where there is none, or none of the kind."""
        if not self.cluster.total(self._resource):
            raise DeviceError(
                f"no GPU in the cluster at {self.cluster.address}",
                rule=f"its {len(self.cluster.alive())} nodes have none that Ray knows of",
                fix="start nodes that have: `ray status` lists them",
            )
        until = time.monotonic() + timeout
        while not (found := self()):
            nobody = not self._starting and self._looked > float("-inf")
            if nobody and not self._lacking():
                break
            if time.monotonic() > until:
                break
            if self.cluster.ask(lambda: self._ready(timeout=0.1)):
                self._looked -= LOOKING  # it is time to look
        if not found:
            raise self._nobody(timeout)
        if self._kind is None:
            self._kind = next(iter(found.values())).about.gpu
        return found

    def retire(self, name: str) -> None:
        """Do not use the GPU of this name again."""
        self._retired[name] = None

    def parked(self, name: str, actor: Any) -> bool:  # noqa: ANN401
        """Keep the actor of a GPU that is not used again, idle; False of all others."""
        if name not in self._retired:
            return False
        self._retired[name] = actor
        return True

    def sent(self, specs: Sequence[KernelSpec]) -> list[Any]:
        """What travels of kernels, put into the cluster's memory once; none where nothing is."""
        for spec in specs:
            if spec not in self._sent and (artifact := self.kernels(spec)) is not None:
                self._sent[spec] = self.cluster.ray.put(Sent.of(artifact))
        return [self._sent[spec] for spec in specs if spec in self._sent]

    def close(self) -> None:
        """End all actors, those that are about to start too."""
        for gpu in [*self._open, *self._twins]:
            gpu.close()
        for actor in [*self._starting.values(), *filter(None, self._retired.values())]:
            with suppress(Exception):  # the cluster may be gone
                self.cluster.ray.kill(actor)
        self._starting, self._twins = {}, []

    # ---- Starting --------------------------------------------------------------------------------

    def _lacking(self) -> int:
        """How many more actors could be of use."""
        if len(self._failures) >= STARTS:
            return 0
        there = sum(
            int(one["Resources"].get(self._resource, 0))
            for one in self.cluster.alive()
            if one["NodeID"] not in self._excluded
        )
        there -= sum(actor is not None for actor in self._retired.values())
        most = there if self._count is None else min(self._count, there)
        return most - len(self._open) - len(self._starting) - len(self._twins)

    def _start(self) -> None:
        """Have Ray start an actor as soon as a GPU is free; it is never started twice."""
        resource = self._resource
        wanted = {"num_gpus": 1} if resource == GPU else {"resources": {resource: 1}}
        words = (self._kind or "").split()
        types = [word for word in words if self.cluster.total(f"accelerator_type:{word}")]
        actor = (
            self.cluster.ray.remote(self._measurer)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=3,  # neither what ends a measurement nor what brings kernels waits
                **wanted,
                **({"accelerator_type": types[0]} if types else {}),
                **avoiding(self._excluded),
            )
            .remote(self._make)
        )
        self._starting[actor.hello.remote()] = actor

    def _ready(self, timeout: float = 0.0) -> list[Any]:
        """What actors that were starting have said; waits for the first of it, seconds."""
        refs = list(self._starting)
        if not refs:
            time.sleep(timeout)
            return []
        wanted = 1 if timeout else len(refs)
        return list(self.cluster.ray.wait(refs, num_returns=wanted, timeout=timeout)[0])

    def _started(self) -> list[RayGpu]:
        found, self._twins = self._twins, []
        for ref in self._ready():
            actor = self._starting.pop(ref)
            try:
                gpu = RayGpu(self, actor, greeting(self.cluster.answer(ref)))
            except DeviceError as error:
                self._failures.append(str(error))
                self._say(f"an actor did not start: {error}")
                continue
            self._failures = []
            if self._wanted(gpu):
                found.append(gpu)
            else:
                self._excluded.add(gpu.hello.node)
                gpu.close()
        joined = []
        for gpu in found:
            if any(one.hello.name == gpu.hello.name for one in self._open):
                self._wait(gpu)
            else:
                self._open.append(gpu)
                joined.append(gpu)
        return joined

    def _wait(self, gpu: RayGpu) -> None:
        """Keep a GPU until the one of its name is gone; if that is lost, it is the same GPU.

        Else two nodes of one address call theirs the same, as containers of a host may: the second
        one was ended and started again every second.
        """
        self._twins.append(gpu)
        if gpu.hello.name not in self._called_twice:
            self._called_twice.add(gpu.hello.name)
            self._say(f"two GPUs are called {gpu.hello.name}: one is used if the other is lost")

    def _wanted(self, gpu: RayGpu) -> bool:
        if fault := refused(gpu.hello):
            self._failures.append(str(fault))
            self._say(str(fault))
            return False
        if self._kind and not alike(self._kind, gpu.about.gpu):
            self._others.add(gpu.about.gpu)
            return False
        return True

    def _nobody(self, timeout: float) -> DeviceError:
        if self._others:
            return DeviceError(
                f"no {self._kind} in the cluster at {self.cluster.address}",
                rule=f"its nodes have {', '.join(sorted(self._others))}",
                fix="give --kind one of them, or none",
            )
        why = self._failures[-1] if self._failures else f"none was free for {timeout:g} s"
        return DeviceError(
            f"no GPU of the cluster at {self.cluster.address} joined",
            rule=why,
            fix="`ray status` says what its nodes have, and what is in use",
        )
