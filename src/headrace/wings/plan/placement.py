"""The placement of the parts of a run on the machines of a cluster. It follows the rules by which Ray places the
placement group that :mod:`headrace.wings.cluster` reserves, with a bundle for each rank of the learner and each engine.

    all bundles, the largest first ──▶ emptiest machine that has room ──▶ pack: fill it with all that still fits, and go
                                                                          on with the next machine
                                                                         spread: the next bundle on another machine

A bundle is never divided: all accelerators of an engine are on one machine.
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
    """The accelerators and cores that one part of a run requests from the cluster."""

    name: str
    """Name of the part's process."""
    gpus: int
    """Number of accelerators, all on one machine."""
    cpus: float = 0.0
    """Number of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """The machine and the accelerators of one part."""

    machine: int
    """Number of the machine, from 0."""
    gpus: tuple[int, ...]
    """Numbers of the part's accelerators on that machine, from 0."""


@dataclass(slots=True, kw_only=True)
class MachineResources:
    """The free accelerators and cores of one machine while parts are placed on it."""

    number: int
    """Number of the machine."""
    num_gpus: int
    """Number of the machine's accelerators."""
    cpus: float
    """Number of free cores."""
    allocated_gpus: list[int] = field(default_factory=list)
    """Numbers of the allocated accelerators, in increasing order."""

    @property
    def free_gpus(self) -> int:
        """Return the number of free accelerators."""
        return self.num_gpus - len(self.allocated_gpus)

    def has_room(self, part: PartDemand) -> bool:
        """Return whether the free accelerators and cores suffice for the part."""
        return part.gpus <= self.free_gpus and part.cpus <= self.cpus

    def score(self, part: PartDemand) -> float:
        """Return the score of this machine for the part, by the rule of Ray's ``LeastResourceScorer``: the sum, over
        the requested resources, of the fraction that would remain free; −1 if the part does not fit."""
        if not self.has_room(part):
            return -1.0
        demands = ((part.gpus, self.free_gpus), (part.cpus, self.cpus))
        return sum((free - wanted) / free for wanted, free in demands if wanted and free)

    def take(self, part: PartDemand) -> PartPlace:
        """Allocate accelerators and cores to the part, and return its place."""
        gpus = tuple(range(len(self.allocated_gpus), len(self.allocated_gpus) + part.gpus))
        self.allocated_gpus += gpus
        self.cpus -= part.cpus
        return PartPlace(machine=self.number, gpus=gpus)


def place(parts: Sequence[PartDemand], machines: Sequence[MachineResources], strategy: str) -> dict[str, PartPlace]:
    """Return the place of each part by its name, as Ray chooses it with the ``strategy`` ``pack`` or ``spread``. Ray
    itself may exchange parts with equal demands, and machines with equal resources. Raises
    :class:`~headrace.base.errors.ConfigError` if the parts do not fit."""
    unplaced = sorted(parts, key=lambda part: (-part.gpus, -part.cpus))
    untouched, places = list(machines), {}
    while unplaced:
        first = unplaced.pop(0)
        machine = _best_machine(first, untouched) or (_best_machine(first, machines) if strategy == "spread" else None)
        if machine is None:
            raise _make_no_room_error(first, [*parts], machines)
        places[first.name] = machine.take(first)
        if machine in untouched:
            untouched.remove(machine)
        fitting = unplaced if strategy == "pack" else []
        for part in filter(machine.has_room, fitting):  # lazy: each placed part reduces the room for the next
            places[part.name] = machine.take(part)
        unplaced = [part for part in unplaced if part.name not in places]
    return {part.name: places[part.name] for part in parts}


def _best_machine(part: PartDemand, machines: Sequence[MachineResources]) -> MachineResources | None:
    """Return the machine with the highest score for the part, and the first among equal scores; ``None`` if the part
    fits on no machine."""
    best = max(machines, key=lambda machine: machine.score(part), default=None)
    return best if best is not None and best.has_room(part) else None


def _make_no_room_error(
    part: PartDemand, parts: Sequence[PartDemand], machines: Sequence[MachineResources]
) -> ConfigError:
    """Return the error for ``part``, which does not fit beside the parts that were placed before it."""
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


def assign_machines(
    engines: int, ways: int, trainers: int, cluster: Cluster, *, shared: bool = False
) -> tuple[list[int], list[int]]:
    """Return the machine number of each of ``engines`` engines, with ``ways`` accelerators each, and of each of
    ``trainers`` ranks of the learner. Engines fill the first machines, and ranks the remaining accelerators. With
    ``shared``, both use the same accelerators.

    >>> from headrace.wings.plan.cluster import Cluster
    >>> assign_machines(3, 4, 3, Cluster(accelerator="H100", count=16))
    ([0, 0, 1], [1, 1, 1])
    """
    per_machine = max(1, cluster.per_node // ways)
    placed = [engine // per_machine for engine in range(engines)]
    if shared:
        return placed, [rank // cluster.per_node for rank in range(trainers)]
    held = Counter(placed)
    free = [cluster.per_node - ways * held[machine] for machine in range(cluster.num_machines)]
    slots = [machine for machine, count in enumerate(free) for _ in range(max(0, count))]
    # if the last machine has fewer accelerators, or engines leave gaps, the remaining ranks count for the last machine
    return placed, [*slots[:trainers], *[cluster.num_machines - 1] * (trainers - len(slots))]
