"""The map that a dry run prints: the device and the memory of each part of the run, and the size and time of one
version of the weights.

The figures are computed from the sizes of the model, as in a plan (:mod:`headrace.wings.plan.sizing`). Memory of
libraries and temporary buffers is not included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores, shared_memory_root
from headrace.base.errors import ConfigError, HeadraceError
from headrace.launch.engines import engine_names
from headrace.launch.places import teacher_role
from headrace.learner.footprint import LearnerSizes
from headrace.models.config import ModelConfig
from headrace.models.devices import CPU
from headrace.models.gpus import VisibleGpus, gpu_numbers
from headrace.run.session.prepare import Prepared
from headrace.sync.config import RunPlaces
from headrace.sync.estimate import estimate_version, measure_room
from headrace.wings.plan.cluster import Cluster
from headrace.wings.plan.planning import make_sizing_request
from headrace.wings.plan.preview import make_local_site, name_first_gpu
from headrace.wings.plan.sizing import GB, SizingRequest, describe_memory, engine_bytes, learner_sizes, usable_bytes
from headrace.wings.plan.words import format_time

MB = 1e6
"""Number of bytes in the unit that is shown for less than a GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPart:
    """One part of a run on the map, such as an engine or a rank of the learner."""

    name: str
    """The name of the part's process."""
    devices: str
    """The devices on which the part runs, in words."""
    num_devices: int = 1
    """Number of devices over which the part's memory is divided."""
    machine: int | None = None
    """Number of the part's machine in the cluster of a plan; ``None`` if no plan has placed the part."""
    gpus: tuple[int, ...] = ()
    """Numbers of the part's accelerators on that machine."""
    cpus: float = 0.0
    """Number of cores that the part requests from a cluster."""
    rank: int | None = None
    """Rank of the process, for a part of the learner; ``None`` for other parts."""
    bytes_by_use: dict[str, float] = field(default_factory=dict)
    """Bytes on all devices of the part together, by use (such as ``weights``); empty if they are not known."""

    def memory(self) -> str:
        """Return in words the memory that the part needs on each of its devices: the sum, and the bytes by use."""
        if not self.bytes_by_use:
            return ""
        each = " on each" if self.num_devices > 1 else ""
        shares = {use: size / self.num_devices for use, size in self.bytes_by_use.items()}
        uses = ", ".join(f"{use} {describe_size(size)}" for use, size in shares.items())
        return f"{describe_size(sum(shares.values()))}{each}: {uses}"


def parts_table(prepared: Prepared) -> str:
    """Return the map of the ``prepared`` run as text: a line for each part, and lines about an update and a version of
    the weights."""
    rows = [("part", "where", "memory"), *((part.name, part.devices, part.memory()) for part in map_parts(prepared))]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]
    return "\n".join([*lines, *_memory_line(prepared), *_update_line(prepared), *_version_line(prepared)])


def _memory_line(prepared: Prepared) -> list[str]:
    """Return a list with the line about the memory of a rank of the learner of the ``prepared`` run on a GPU of this
    machine: what it leaves or lacks, and the settings that would free memory. The list is empty on a CPU and on a
    cluster, and if the sizes of the model or the memory of the GPU are not known."""
    learner = prepared.devices.learner
    if prepared.config.launch.remote or not learner or CPU in learner:
        return []
    sizes = _learner_sizes(prepared, learner[0])
    if sizes is None:
        return []
    try:
        usable = usable_bytes(Cluster(accelerator=name_first_gpu(), count=1))
    except ConfigError:  # the catalogue lacks this GPU
        return []
    return [f"  {describe_memory(sizes, usable)}."]


def _update_line(prepared: Prepared) -> list[str]:
    """Return a list with the line about the time of one update of the weights on this machine. The list is empty for a
    run on a cluster, for a run that trains nothing, and if the costs are not known."""
    if prepared.config.launch.remote or not prepared.devices.learner:
        return []
    try:
        site, _, trainers = make_local_site(prepared)
    except HeadraceError:  # the line of the plan says why
        return []
    seconds, tokens = site.update(trainers)
    return [f"  An update of the weights: about {format_time(seconds)} for {tokens:,.0f} tokens ({site.view})."]


def _version_line(prepared: Prepared) -> list[str]:
    """Return a list with the line about one version of the weights of the ``prepared`` run: its bytes, its estimated
    time, the files that it needs, and its deadline. The list is empty if the model's sizes are not known or nothing is
    trained."""
    config, request = prepared.config, _sizing_request(prepared, prepared.config.model)
    if request is None or not prepared.devices.learner:
        return []
    sync, num_bytes = config.sync, request.version_bytes
    time = estimate_version(sync, num_bytes, RealClock())
    places = RunPlaces(run_dir=Path(config.run.dir), memory=shared_memory_root() / "weights", private=Path())
    room = None if config.launch.remote else measure_room(sync, places, num_bytes)
    kept = "" if room is None else (
        f"; {room.copies} lie in {room.folder}: {describe_size(room.needed_bytes)} of "
        f"{describe_size(room.free_bytes)} that are free"
    )  # fmt: skip
    return [
        f"  A version of the weights: {describe_size(num_bytes)} by {sync.transport}, {time}; "
        f"deadline {sync.longest_s(num_bytes):.0f} s{kept}."
    ]


def map_parts(prepared: Prepared) -> Iterator[MappedPart]:
    """Yield the parts of the ``prepared`` run: the controller, the ranks of the learner, the engines, and the
    workers."""
    config, devices = prepared.config, prepared.devices
    yield MappedPart(name="controller", devices="this machine")
    ranks = [f"learner-{rank}" if rank else "learner" for rank in range(len(devices.learner))]
    sizes = _learner_sizes(prepared, devices.learner[0]) if ranks else None
    for name, device in zip(ranks, devices.learner, strict=True):
        where = _describe_devices(prepared, device, "learner", len(ranks))
        bytes_of_rank = {} if sizes is None else sizes.footprint().by_use()
        yield MappedPart(name=name, devices=where, bytes_by_use=bytes_of_rank)
    models = _engine_models(prepared)
    for (name, model), device in zip(models.items(), devices.engines, strict=True):
        where = _describe_devices(prepared, device, "engine", len(models))
        yield MappedPart(
            name=name,
            devices=where,
            num_devices=max(1, len(gpu_numbers(device))),
            bytes_by_use=_engine_bytes(prepared, model, trained=model is config.model),
        )
    workers = {f"scorer {reward.label}": reward.workers for reward in config.env.components}
    workers |= {"environment": config.env.workers} if config.env.remote else {}
    for name, number in workers.items():
        if number:
            yield MappedPart(
                name=name if number == 1 else f"{name} x {number}", devices=_describe_worker_machines(prepared)
            )


def _engine_models(prepared: Prepared) -> dict[str, ModelConfig]:
    """Return the model of each engine by the name of the engine: the engines of the policy, of other agents, and of
    teachers."""
    own = dict.fromkeys(engine_names(prepared.config.engine.count), prepared.config.model)
    agents = {f"agent-{name}": model for name, model in prepared.agents.items()}
    return {**own, **agents, **{teacher_role(name): order.model for name, order in prepared.teachers.items()}}


def _learner_sizes(prepared: Prepared, device: str) -> LearnerSizes | None:
    """Return the sizes and settings that determine the memory of a rank of the learner on ``device``; ``None`` if the
    model's sizes are not known."""
    request = _sizing_request(prepared, prepared.config.model)
    if request is None:
        return None
    return replace(learner_sizes(request, float(prepared.max_context)), on_host=device == CPU)


def _engine_bytes(prepared: Prepared, model: ModelConfig, *, trained: bool) -> dict[str, float]:
    """Return the bytes that one engine needs, by use; empty if the model's sizes are not known. An engine whose model
    is not ``trained`` has no second copy of the weights, because it receives no new version."""
    request = _sizing_request(prepared, model)
    return {} if request is None else compute_engine_bytes(request, float(prepared.max_context), trained=trained)


def compute_engine_bytes(request: SizingRequest, longest: float, *, trained: bool) -> dict[str, float]:
    """Return the bytes that one engine with the sizes and settings ``request`` needs on all its devices together, by
    use (weights, cache), for sequences of up to ``longest`` tokens. An engine whose model is not ``trained`` has no
    second copy of the weights."""
    tokens = request.engine.cache_tokens or request.engine.max_sequences * longest
    cache = float(tokens * request.shape.kv_numbers * request.bytes_per_number)
    return {"weights": engine_bytes(request) if trained else request.weight_bytes, "cache up to": cache}


def _sizing_request(prepared: Prepared, model: ModelConfig) -> SizingRequest | None:
    """Return the settings that determine the memory of ``model`` in the run; ``None`` if its sizes are not known."""
    with suppress(ConfigError):
        return make_sizing_request(prepared.config.model_copy(update={"model": model}))
    return None


def _describe_devices(prepared: Prepared, device: str, role: Literal["engine", "learner"], count: int) -> str:
    """Return the devices of a part in words: its threads, or its GPUs with torch's names and, if these differ, the
    driver's names. ``count`` is the number of parts with the same ``role``, which share the cores."""
    launch = prepared.config.launch
    place = f" of a machine that {launch.kind} chooses" if launch.remote else ""
    if device == CPU:
        num_threads = launch.threads(role, count, num_cores())
        return f"{num_threads} thread{'' if num_threads == 1 else 's'}{place}"
    if launch.remote:
        return f"{len(gpu_numbers(device))} GPU{place}"
    names = VisibleGpus.detect().driver_names(device)
    same = names == tuple(map(str, gpu_numbers(device)))
    return device if same else f"{device} (GPU {', '.join(names)})"


def _describe_worker_machines(prepared: Prepared) -> str:
    """Return in words the machines on which the workers for environments and rewards run."""
    launch = prepared.config.launch
    return f"machines that {launch.kind} chooses" if launch.remote else "this machine"


def describe_size(num_bytes: float) -> str:
    """Return the number of bytes ``num_bytes`` in words.

    >>> describe_size(2.5e9), describe_size(3_400_000), describe_size(80_100)
    ('2.5 GB', '3.4 MB', '0.08 MB')
    """
    if num_bytes >= GB:
        return f"{num_bytes / GB:,.1f} GB"
    return f"{num_bytes / MB:.1f} MB" if num_bytes >= MB else f"{num_bytes / MB:.2g} MB"
