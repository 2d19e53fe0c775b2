"""Where the parts of a run lie on the machines of a cluster, as Ray chooses it for the one placement group that
:mod:`headrace.wings.cluster` reserves: a bundle for each rank of the learner and for each engine.

    all bundles, the largest first ──▶ emptiest machine that has room ──▶ pack: fill it with all that still fits, and go
                                                                          on with the next machine
                                                                         spread: the next bundle on another machine

A bundle is never divided, so that the accelerators of one engine are of one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError
from headrace.run.observe.words import plural

if TYPE_CHECKING:
    from headrace.wings.plan.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDemand:
    """What one part of a run asks the cluster for."""

    name: str
    """Name of its process."""
    gpus: int
    """Number of accelerators, all of one machine."""
    cpus: float = 0.0
    """Number of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """Where one part lies."""

    machine: int
    """Number of the machine, from 0."""
    gpus: tuple[int, ...]
    """Numbers of its accelerators on that machine, from 0."""


@dataclass(slots=True, kw_only=True)
class MachineRoom:
    """The room on one machine while parts are placed."""

    number: int
    """Number of the machine."""
    num_gpus: int
    """Number of its accelerators."""
    cpus: float
    """Number of cores that are free."""
    taken: list[int] = field(default_factory=list)
    """Accelerators that are taken, in order."""

    @property
    def free_gpus(self) -> int:
        """Return the number of accelerators that are free."""
        return self.num_gpus - len(self.taken)

    def has_room(self, part: PartDemand) -> bool:
        """Return whether the part fits beside what is there."""
        return part.gpus <= self.free_gpus and part.cpus <= self.cpus

    def score(self, part: PartDemand) -> float:
        """Return how well the part fits, as Ray's ``LeastResourceScorer`` says: the sum, over what the part asks for,
        of the fraction that would be left; −1 without room."""
        if not self.has_room(part):
            return -1.0
        asked = ((part.gpus, self.free_gpus), (part.cpus, self.cpus))
        return sum((free - wanted) / free for wanted, free in asked if wanted and free)

    def take(self, part: PartDemand) -> PartPlace:
        """Give the part its accelerators and cores, and return its place."""
        gpus = tuple(range(len(self.taken), len(self.taken) + part.gpus))
        self.taken += gpus
        self.cpus -= part.cpus
        return PartPlace(machine=self.number, gpus=gpus)


def place(parts: Sequence[PartDemand], machines: Sequence[MachineRoom], strategy: str) -> dict[str, PartPlace]:
    """Return the place of each part by its name, as Ray chooses it with the ``strategy`` ``pack`` or ``spread``. Parts
    that ask for the same may be exchanged with each other, and so may machines that have the same. Raises
    :class:`~headrace.base.errors.ConfigError` if they do not fit."""
    waiting = sorted(parts, key=lambda part: (-part.gpus, -part.cpus))
    untouched, places = list(machines), {}
    while waiting:
        first = waiting.pop(0)
        machine = _best(first, untouched) or (_best(first, machines) if strategy == "spread" else None)
        if machine is None:
            raise _no_room(first, [*parts], machines)
        places[first.name] = machine.take(first)
        if machine in untouched:
            untouched.remove(machine)
        fitting = waiting if strategy == "pack" else []
        for part in filter(machine.has_room, fitting):  # asked one after the other: each takes room from the next
            places[part.name] = machine.take(part)
        waiting = [part for part in waiting if part.name not in places]
    return {part.name: places[part.name] for part in parts}


def _best(part: PartDemand, machines: Sequence[MachineRoom]) -> MachineRoom | None:
    """Return the machine with the best score for the part, the first of equals; ``None`` if none has room."""
    best = max(machines, key=lambda machine: machine.score(part), default=None)
    return best if best is not None and best.has_room(part) else None


def _no_room(part: PartDemand, parts: Sequence[PartDemand], machines: Sequence[MachineRoom]) -> ConfigError:
    """Return the error for ``part``, which found no room beside what was placed before it."""
    gpus, cpus = sum(each.gpus for each in parts), sum(each.cpus for each in parts)
    free = max(machine.free_gpus for machine in machines)
    have = sum(machine.num_gpus for machine in machines)
    cores = max(machine.cpus for machine in machines)
    return ConfigError(
        f"{part.name} asks for {plural(part.gpus, 'accelerator')} and {part.cpus:g} cores of one machine, and beside "
        f"the others no machine has more than {plural(free, 'accelerator')} or {cores:g} cores free: all {len(parts)} "
        f"parts ask for {gpus} accelerators, of which {len(machines)} machines have {have}, and for {cpus:g} cores",
        remedy="raise cluster.count, lower launch.ray.engine.cpus and launch.ray.learner.cpus, or choose engine.tensor "
        "x engine.pipeline so that whole engines fill a machine",
    )


def machines_of(
    engines: int, ways: int, trainers: int, cluster: Cluster, *, shared: bool = False
) -> tuple[list[int], list[int]]:
    """Return the numbers of the machines of ``engines`` engines of ``ways`` accelerators each, and of ``trainers``
    ranks of the learner: engines fill the first machines, and ranks what is left. With ``shared`` both use the same
    accelerators.

    >>> from headrace.wings.plan.cluster import Cluster
    >>> machines_of(3, 4, 3, Cluster(accelerator="H100", count=16))
    ([0, 0, 1], [1, 1, 1])
    """
    per_machine = max(1, cluster.per_node // ways)
    placed = [engine // per_machine for engine in range(engines)]
    if shared:
        return placed, [rank // cluster.per_node for rank in range(trainers)]
    held = Counter(placed)
    free = [cluster.per_node - ways * held[machine] for machine in range(cluster.num_machines)]
    slots = [machine for machine, count in enumerate(free) for _ in range(max(0, count))]
    # a last machine with fewer accelerators, or engines that leave gaps: the ranks that are left are on the last one
    return placed, [*slots[:trainers], *[cluster.num_machines - 1] * (trainers - len(slots))]
