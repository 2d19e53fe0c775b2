"""The map of a run on the cluster of a plan, with the settings of its run file: the machine and the accelerators of
each part, the memory that the part needs, and the time of an update and of a publication of the weights.

    run file, cluster ──▶ parts and their demands ──▶ placement ──▶ map ──▶ text, JSON, files of a deployment

A part is a process of the run: a rank of the learner, or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError
from headrace.launch.engines import engine_names
from headrace.launch.places import teacher_role
from headrace.models.config import ModelConfig
from headrace.models.devices import choose_devices
from headrace.models.gpus import gpu_numbers
from headrace.run.session.engine_fit import refuse_uneven_heads
from headrace.run.session.own_engines import resolve_frozen_agents, resolve_teacher_model
from headrace.wings.plan.cluster import Cluster
from headrace.wings.plan.parts import MappedPart, compute_engine_bytes
from headrace.wings.plan.placement import MachineResources, PartDemand, PartPlace, place
from headrace.wings.plan.planning import longest_sequence, make_sizing_request
from headrace.wings.plan.publication import PublicationEstimate
from headrace.wings.plan.sizing import GB, describe_levers, learner_sizes, usable_bytes
from headrace.wings.plan.system import PlanContext
from headrace.wings.plan.words import format_time

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMap:
    """The map of a run on a cluster: its parts with their places, and the times of an update and a publication."""

    parts: tuple[MappedPart, ...]
    """The ranks of the learner and the engines, in the order in which they are started."""
    worker_cpus: float
    """Number of cores that all scoring and environment workers together request, including the additional workers that
    try suspect calls apart."""
    transport: str
    """Name of the transport that sends the weights to the engines."""
    update_s: float
    """Seconds of one update of the weights."""
    batch_tokens: float
    """Number of tokens in the batch of one update, prompts included."""
    publication_s: float
    """Seconds from the end of an update until all engines use the new weights."""
    publication: PublicationEstimate | None
    """The phases of the publication; ``None`` if the costs were measured, since a measurement has no phases."""
    misfits: tuple[str, ...]
    """Sentences about parts that need more memory than their accelerators have."""

    @property
    def machines(self) -> int:
        """Return the number of machines that have parts."""
        return len({part.machine for part in self.parts})

    def tree(self) -> dict[str, Any]:
        """Return the map as an object for ``--json``."""
        return {
            "machines": self.machines,
            "parts": [
                {
                    "part": part.name,
                    "machine": part.machine,
                    "gpus": part.gpus,
                    "rank": part.rank,
                    "bytes_on_each": {use: size / part.num_devices for use, size in part.bytes_by_use.items()},
                }
                for part in self.parts
            ],
            "update_s": self.update_s,
            "batch_tokens": self.batch_tokens,
            "transport": self.transport,
            "publication_s": self.publication_s,
            "publication": self.publication,
            "misfits": self.misfits,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the map as text. Ranks of the learner on one machine share a line."""
        rows = [("machine", "GPU", "part", "memory"), ("-", "-", "controller", "")]
        for _, group in groupby(self.parts, key=lambda part: (part.machine, part.name if part.rank is None else None)):
            parts = list(group)
            first, last = parts[0], parts[-1]
            name = first.name if first is last else f"learner, ranks {first.rank} to {last.rank}"
            gpus = [number for part in parts for number in part.gpus]
            shown = replace(first, num_devices=len(gpus), bytes_by_use=_sum_bytes(parts))
            rows.append((str(first.machine), _number_ranges(gpus), name, shown.memory()))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            yield "  " + "  ".join([*(f"{row[n]:{widths[n]}}" for n in range(3)), row[3]]).rstrip()
        phases = "" if self.publication is None else (
            f" ({', '.join(f'{each.name} {format_time(each.seconds)}' for each in self.publication.phases)})"
        )  # fmt: skip
        yield (
            f"  An update takes {format_time(self.update_s)} for {self.batch_tokens:,.0f} tokens; a publication by "
            f"{self.transport} {format_time(self.publication_s)}{phases}."
        )
        yield from (f"  {sentence}" for sentence in self.misfits)


def _sum_bytes(parts: Sequence[MappedPart]) -> dict[str, float]:
    """Return the summed bytes of several parts of one kind, by use (such as weights or cache)."""
    return {use: sum(part.bytes_by_use[use] for part in parts) for use in parts[0].bytes_by_use}


def _number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: a range if they are consecutive, otherwise a list.

    >>> _number_ranges([0, 1, 2]), _number_ranges([3]), _number_ranges([0, 2])
    ('0-2', '3', '0,2')
    """
    if len(numbers) > 1 and [*numbers] == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def make_cluster_map(config: RunConfig, site: PlanContext) -> ClusterMap:
    """Return the map of the run with the settings ``config`` on the cluster of ``site``. Raises
    :class:`~headrace.base.errors.ConfigError` if the run needs more accelerators than the cluster has, or if a part
    fits on no machine."""
    cluster, request = site.cluster, site.request
    refuse_misplaced(config, cluster)
    demands = _part_demands(config)
    places = _choose_places(config, cluster, demands)
    longest, models = longest_sequence(request), _engine_models(config)
    bytes_of_rank, parts = learner_sizes(request, longest).footprint().by_use(), []
    for demand in demands:
        placed, model = places[demand.name], models.get(demand.name)
        needed_bytes = bytes_of_rank
        if model is not None:
            needed_bytes = {}
            with suppress(ConfigError):  # the sizes of a teacher's or an agent's model may not be known
                engine_request = make_sizing_request(config.model_copy(update={"model": model}))
                needed_bytes = compute_engine_bytes(engine_request, longest, trained=model is config.model)
        parts.append(
            MappedPart(
                name=demand.name, devices=f"machine {placed.machine}", num_devices=max(1, demand.gpus),
                bytes_by_use=needed_bytes, machine=placed.machine, gpus=placed.gpus, cpus=demand.cpus,
                rank=None if model else _rank_of_process(demand.name),
            )
        )  # fmt: skip
    return _build_map(config, site, tuple(parts))


def _build_map(config: RunConfig, site: PlanContext, parts: tuple[MappedPart, ...]) -> ClusterMap:
    """Return the map of ``parts`` of the run with the settings ``config`` on the cluster of ``site``, with the
    predicted seconds of an update and of a publication."""
    ranks = [part.machine or 0 for part in parts if part.rank is not None]
    engines = [part.machine or 0 for part in parts if part.name in engine_names(config.engine.count)]
    transport, width = config.sync.transport, config.engine.width
    cost = site.sync_cost(transport, config.sync.interrupt, (engines, ranks), width)
    update_s, tokens = site.update(len(ranks))
    return ClusterMap(
        parts=parts,
        worker_cpus=_worker_cpus(config),
        transport=transport,
        update_s=update_s,
        batch_tokens=tokens,
        publication_s=cost.snapshot_s + cost.travel_s + cost.gap_s,
        publication=None if site.measured else site.publication(transport, (engines, ranks), width),
        misfits=tuple(_describe_misfits(site, parts)),
    )


def _rank_of_process(name: str) -> int:
    """Return the rank of the learner's process with this name.

    >>> _rank_of_process("learner"), _rank_of_process("learner-3")
    (0, 3)
    """
    return int(name.partition("-")[2] or 0)


def _engine_models(config: RunConfig) -> dict[str, ModelConfig]:
    """Return the model of each engine by the name of the engine's process: the engines of the policy, of agents, and of
    teachers."""
    own = dict.fromkeys(engine_names(config.engine.count), config.model)
    agents = {f"agent-{name}": model for name, model in resolve_frozen_agents(config).items()}
    teachers = config.learner.served_teachers.items()
    return {
        **own,
        **agents,
        **{teacher_role(name): resolve_teacher_model(each, config.model) for name, (each, _) in teachers},
    }


def _part_demands(config: RunConfig) -> list[PartDemand]:
    """Return the numbers of accelerators and cores that each part of a run with the settings ``config`` requests, in
    the order in which the cluster receives the requests. A part whose setting is ``gpus = 0`` still gets the
    accelerators on which it computes in the plan. In a run on one machine no cores are requested."""
    ray, counted = config.launch.ray, config.launch.remote
    ranks = range(config.learner.parallel.world)
    return [
        *(
            PartDemand(name=f"learner-{rank}" if rank else "learner", gpus=1, cpus=ray.learner.cpus if counted else 0.0)
            for rank in ranks
        ),
        *(
            PartDemand(name=name, gpus=config.engine.width, cpus=ray.engine.cpus if counted else 0.0)
            for name in _engine_models(config)
        ),
    ]


def _worker_cpus(config: RunConfig) -> float:
    """Return the number of cores that scoring and environment workers request from the cluster. If there are scorers,
    one more than ``workers`` is counted; if there are environment workers, four more."""
    ray, scorers = config.launch.ray, sum(reward.workers for reward in config.env.components)
    environments = config.env.workers if config.env.remote else 0
    return (scorers + bool(scorers)) * ray.scorer.cpus + (environments + 4 * bool(environments)) * ray.environment.cpus


def _choose_places(config: RunConfig, cluster: Cluster, demands: Sequence[PartDemand]) -> dict[str, PartPlace]:
    """Return the place on ``cluster`` of each part of ``demands`` by its name: chosen by the rules of local processes
    for a run on one machine, and by those of Ray otherwise. Raises :class:`~headrace.base.errors.ConfigError` if the
    parts do not fit, or if ranks that compute the same micro-batch would be on several machines."""
    if not config.launch.remote and cluster.num_machines == 1:
        ranks, count = config.learner.parallel.world, len(demands) - config.learner.parallel.world
        width = config.engine.width
        devices = choose_devices("auto", "auto", ranks=ranks, gpus=cluster.count, count=count, width=width)
        return {
            demand.name: PartPlace(machine=0, gpus=gpu_numbers(device))
            for demand, device in zip(demands, (*devices.learner, *devices.engines), strict=True)
        }
    num_left = cluster.count
    machines = []
    for number in range(cluster.num_machines):
        num_gpus = min(cluster.per_node, num_left)
        machines.append(MachineResources(number=number, num_gpus=num_gpus, cpus=float(cluster.machine.cores or 0)))
        num_left -= cluster.per_node
    places = _order_ranks_by_machine(place(demands, machines, config.launch.ray.placement))
    tensor = config.learner.parallel.tensor
    names = [demand.name for demand in demands[: config.learner.parallel.world]]
    for first in range(0, len(names), tensor):
        spanned_machines = sorted({places[name].machine for name in names[first : first + tensor]})
        if len(spanned_machines) > 1:
            raise ConfigError(
                f"learner.parallel.tensor={tensor} ranks compute the same micro-batch, and ranks {first} to "
                f"{first + tensor - 1} would lie on the machines {', '.join(map(str, spanned_machines))}",
                remedy="choose engine.count, engine.tensor and learner.parallel so that whole groups of "
                f"{tensor} ranks fill what the engines leave of a machine",
            )
    return places


def _order_ranks_by_machine(places: dict[str, PartPlace]) -> dict[str, PartPlace]:
    """Return ``places`` with the places of the learner's ranks exchanged so that ranks ascend with the numbers of
    machines and GPUs. All ranks have the same demand, so their places are interchangeable."""
    ranks = [name for name in places if name.partition("-")[0] == "learner"]
    ordered = sorted((places[name] for name in ranks), key=lambda each: (each.machine, each.gpus))
    return {**places, **dict(zip(ranks, ordered, strict=True))}


def refuse_misplaced(config: RunConfig, cluster: Cluster) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a run for which no placement on the cluster exists: it needs
    more accelerators than the cluster has, one of its tensor-parallel groups is larger than a machine, or the attention
    heads cannot be divided among the ranks of a group."""
    width, tensor, engine = config.engine.width, config.learner.parallel.tensor, config.engine
    wanted_gpus = {
        "learner.parallel": config.learner.parallel.world,
        f"{len(_engine_models(config))} engines of engine.tensor x engine.pipeline": len(_engine_models(config))
        * width,
    }
    if sum(wanted_gpus.values()) > cluster.count:
        parts = " and ".join(f"{count} for {what}" for what, count in wanted_gpus.items())
        raise ConfigError(
            f"the run asks for {sum(wanted_gpus.values())} accelerators ({parts}), and cluster.count={cluster.count}",
            remedy=f"set cluster.count >= {sum(wanted_gpus.values())}, or lower engine.count or learner.parallel.data",
        )
    if width > cluster.per_node:
        raise ConfigError(
            f"engine.tensor x engine.pipeline = {engine.tensor} x {engine.pipeline} = {width} accelerators of one "
            f"machine, and cluster.per_node={cluster.per_node}",
            remedy=f"set engine.tensor x engine.pipeline <= {cluster.per_node}, or take larger machines "
            "(cluster.per_node): an engine does not span machines",
        )
    if tensor > cluster.per_node:
        raise ConfigError(
            f"learner.parallel.tensor={tensor} ranks are of one machine, and cluster.per_node={cluster.per_node}",
            remedy=f"set learner.parallel.tensor <= {cluster.per_node}, and learner.parallel.data for the rest",
        )
    shape = make_sizing_request(config).shape
    if engine.tensor > 1:
        refuse_uneven_heads(engine.tensor, shape.heads, shape.kv_heads)
    if shape.heads % tensor or shape.kv_heads % tensor:
        raise ConfigError(
            f"learner.parallel.tensor={tensor} does not divide the {shape.heads} attention heads ({shape.kv_heads} of "
            f"keys and values) of {shape.name}",
            remedy=f"set learner.parallel.tensor to a divisor of {shape.kv_heads}",
        )


def _describe_misfits(site: PlanContext, parts: Sequence[MappedPart]) -> Iterator[str]:
    """Yield a sentence for each kind of part on the cluster of ``site`` that needs more memory, an engine's cache not
    counted, than its accelerators have."""
    usable, reported_kinds = usable_bytes(site.cluster), set()
    for part in parts:
        kind = "each rank of the learner" if part.rank is not None else part.name
        needed = sum(size for use, size in part.bytes_by_use.items() if not use.startswith("cache")) / part.num_devices
        if needed <= usable or kind in reported_kinds:
            continue
        reported_kinds.add(kind)
        remedy = f"give an engine at least {site.fit.ways} accelerators (engine.tensor)"
        if part.rank is not None:
            sizes = learner_sizes(site.request, longest_sequence(site.request))
            ways, least = sizes.config.parallel, site.fit.least_learner
            remedy = (
                f"spread the learner over at least {least} ranks (learner.parallel.data = "
                f"{least * ways.data // ways.world})"
                f"{describe_levers(sizes)}"
            )
        yield (
            f"Does not fit: {kind} keeps {needed / GB:,.1f} GB, and of one {site.cluster.device.name} "
            f"{usable / GB:,.1f} GB can be used; {remedy}."
        )
