"""What each process is told when it starts: one JSON file, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.base.environ import RankPlace, engine_environment, rank_environment
from headrace.launch.channel import Ends
from headrace.sync.config import Route


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of a replay is told of the recorded one."""

    interleaving: str
    """Its record."""
    deadline_s: float
    """Longest wait for a message that is due."""
    seed: int
    """The run's."""
    num_groups: int
    """Of the recorded run: with the seed and the size of a group they give the names of its requests."""
    group_size: int
    """Episodes of each."""


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """What a part is told of the cores of all."""

    board: str
    """The file of the board."""
    place: int
    """The part's own byte in it."""
    shares: tuple[int, ...]
    """Cores of each part, by its place."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine."""

    model: dict[str, Any]
    engine: dict[str, Any]
    max_context: int
    """Prompt and completion together may be this long, in tokens."""
    num_threads: int
    lending: Lending | None = None
    """Whose cores it may use; ``None``: its own alone."""
    route: Route = Route()
    """How a learner's weights arrive."""
    record_kept: bool = False
    """Whether what tokens are drawn from is asked for: servers have to know that from the start."""
    record_routing: bool = False
    """The same of their experts."""
    sleeps: bool = False
    """Whether it gives its memory back while a learner computes: so too."""
    own_weights: bool = False
    """Whether to take the weights of its own directory as version 0, and not wait for a learner's."""
    memory: str = ""
    """With ``own_weights``: a shared-memory file that they go through. Whoever starts the process makes it."""
    interleaving: str = ""
    """Where to record what it is told between which steps; empty: nowhere."""
    repeats: Repeated | None = None
    """The recorded engine that it repeats; ``None``: it takes messages as they come."""


class LearnerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A learner, or one rank of it."""

    model: dict[str, Any]
    """As the run began with it; snapshots copy the tokenizer from there."""
    learner: dict[str, Any]
    algo: dict[str, Any]
    temperature: float
    """At which the engine samples: log π is taken at the same."""
    total_steps: int
    """Optimizer steps of the whole run: where the learning rate's schedule ends."""
    snapshot: str
    """Directory to restore weights, optimizer and step from; empty for a new run."""
    route: Route
    """How its weights leave."""
    num_threads: int
    lending: Lending | None = None
    """Whose cores it may use; ``None``: its own alone."""
    rank: int = 0
    """Which rank; the first hears orders, answers and publishes."""
    world: int = 1
    """Ranks altogether."""
    rendezvous: str = ""
    """Where they meet: torch's ``init_method``."""
    interface: str = ""
    """The network interface that leads to the other ranks; empty: all are on this machine."""

    @property
    def place(self) -> RankPlace:
        """Of this rank. Where a cluster places each by itself, the devices that it sees are its own."""
        return RankPlace(rank=self.rank, local_rank=0 if self.interface else self.rank, world=self.world)


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What a process that runs foreign code may use, with all that it starts: it is ended when it takes more, and
    nothing of it outlives it. Its own processes are all that it sees."""

    memory_bytes: int
    """Memory of all of them together; 0: half of that of the machine that they are started on."""
    processes: int
    """Processes at once."""
    log_bytes: int = 16 << 20
    """Of what it prints, so much is kept."""


class ScorerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A scoring worker."""

    reward: dict[str, Any]
    """The component that it grades: its section."""
    columns: tuple[str, ...] | None = None
    """The columns of the rows that it can rely on; ``None``: nothing is known of them."""
    keep: Keep | None = None
    """What it may use; ``None``: whatever there is."""


class EnvironmentStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An environment worker."""

    kind: str
    """``env.kind``."""
    entry: str
    """``file.py:name``, the command of a program, or what a bridge leads to."""
    concurrency: int
    """Episodes at once."""
    block_s: float
    """How long code of an episode may keep the loop from turning."""
    options: dict[str, Any] = {}
    """Settings of a bridge."""
    keep: Keep | None = None
    """What it may use; ``None``: whatever there is."""


Start = EngineStart | LearnerStart | ScorerStart | EnvironmentStart


def extra_environment(start: Start) -> dict[str, str]:
    """Environment variables that such a process needs beyond those of every process of the run."""
    if isinstance(start, EngineStart):
        return engine_environment()
    if isinstance(start, LearnerStart) and start.world > 1:
        return rank_environment(start.place, start.interface)
    return {}


class Briefing(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process is told."""

    start: Start
    ends: Ends
    """Where it hears orders, and reports."""


def write_briefing(path: Path, briefing: Briefing) -> None:
    """Write it for a process to read; ``OSError`` where that cannot be done."""
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(briefing))


def read_briefing(path: Path) -> Briefing:
    """What this process is to be."""
    return msgspec.json.decode(path.read_bytes(), type=Briefing)
