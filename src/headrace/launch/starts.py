"""The briefing of a process of a run: everything that it needs to know at its start, in one JSON file that the launcher
writes and the process reads once. There is one class of settings for each role: engine, learner, scorer,
environment, rollout shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.base.environ import RankPlace, engine_environment, rank_environment
from headrace.base.types.sampling import Sampling
from headrace.launch.channel import ChannelAddresses
from headrace.sync.config import Route


class RecordedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The recording that the engine of a replay has to follow."""

    interleaving: str
    """The file with the recorded messages and the steps before which they came."""
    deadline_s: float
    """Longest wait, in seconds, for a message that is due."""
    seed: int
    """The seed of the recorded run."""
    num_groups: int
    """The number of groups in the recorded run. With the seed and the group size it gives the names of the requests."""
    group_size: int
    """The number of episodes in each group."""


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the machine's cores between parts that lend them to each other."""

    activity_file: str
    """The shared file with one byte for each part: 1 while the part computes."""
    place: int
    """The index of this part's own byte in the file."""
    shares: tuple[int, ...]
    """The number of cores that each part owns, by its index."""


class StoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """The store for columns of tokens, such as the kept-sets and experts that engines record. It is a directory of this
    machine."""

    directory: str
    limit_bytes: int | None = None
    """The most bytes that all of its files may have together; ``None``: as many as the disk has room for."""
    writer: str = ""
    """The name of the part that writes into it; empty for a part that only reads."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of an engine process."""

    model: dict[str, Any]
    """The section ``[model]`` as JSON data."""
    engine: dict[str, Any]
    """The settings of this one engine, from ``[engine]``, as JSON data."""
    max_context: int
    """The number of tokens that prompt and completion may have together."""
    num_threads: int
    """The number of cores that it computes with."""
    lending: Lending | None = None
    """The cores that the engine may borrow; ``None``: it computes with its own cores alone."""
    route: Route = Route()
    """The way by which the learner's weights arrive."""
    record_kept: bool = False
    """Whether kept-sets (the vocabulary entries that truncated sampling keeps) will be requested. An inference server
    must know that when it starts."""
    record_routing: bool = False
    """Whether the experts that each token is routed to will be requested; the same holds for these."""
    sleeps: bool = False
    """Whether the engine gives back its memory while the learner computes. An inference server must know that, too,
    when it starts."""
    own_weights: bool = False
    """Whether the engine uses the weights of its own directory as version 0, and does not wait for a learner's."""
    memory: str = ""
    """The shared-memory file that weights pass through with ``own_weights``; it is made by the starter of the
    process."""
    history: str = ""
    """The file in which an engine that drafts tokens keeps its history of answers, so that it survives the process;
    empty: in memory alone."""
    columns: StoreStart | None = None
    """The store for the kept-sets and experts of sampled tokens; ``None``: they travel with the tokens."""
    interleaving: str = ""
    """The file in which the engine records its messages and the steps before which they came; empty: it records
    none."""
    recorded: RecordedEngine | None = None
    """The recording that the engine replays; ``None``: it handles messages when they come."""


class LearnerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of a learner process, or of one rank of a learner."""

    model: dict[str, Any]
    """The model section with which the run began; snapshots copy the tokenizer from there."""
    learner: dict[str, Any]
    """The section ``[learner]``, with the device of this rank, as JSON data."""
    algo: dict[str, Any]
    """The section ``[algo]`` as JSON data."""
    temperature: float
    """The sampling temperature of the engine, at which the learner computes log π."""
    total_steps: int
    """Optimizer steps of the whole run, at the end of which the learning-rate schedule ends."""
    snapshot: str
    """The directory to restore weights, optimizer and step from; empty for a new run."""
    route: Route
    """The way by which the weights are sent to the engines."""
    num_threads: int
    """The number of cores that this rank computes with."""
    columns: StoreStart | None = None
    """The store in which columns of a batch may lie; ``None``: they come with the batch."""
    lending: Lending | None = None
    """The cores that the learner may borrow; ``None``: it computes with its own cores alone."""
    rank: int = 0
    """The index of this rank. Rank 0 receives the orders, answers them and publishes weights."""
    world: int = 1
    """The number of ranks."""
    rendezvous: str = ""
    """The address at which the ranks find each other: torch's ``init_method``."""
    interface: str = ""
    """The network interface that leads to the other ranks; empty: all ranks are on this machine."""

    @property
    def place(self) -> RankPlace:
        """The rank's place among all ranks. Where a cluster places every rank by itself, the rank sees only its own
        devices, so its local rank is 0."""
        return RankPlace(rank=self.rank, local_rank=0 if self.interface else self.rank, world=self.world)


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a process with user code may use, together with all processes that it starts. A supervisor
    kills all of them if they use more or if their parent ends; they can see no other processes."""

    memory_bytes: int
    """Memory of all these processes together; 0: half of the memory of the machine."""
    processes: int
    """Number of processes at the same time."""
    log_bytes: int = 16 << 20
    """Bytes of the output that are kept in the log."""


class ScorerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of a scoring worker."""

    reward: dict[str, Any]
    """The section of the reward component that the worker computes."""
    columns: tuple[str, ...] | None = None
    """The columns that every row has; ``None``: the columns are not known."""
    keep: ResourceLimits | None = None
    """The limits of the worker's resources; ``None``: no limits."""


class EnvironmentStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of an environment worker."""

    kind: str
    """The kind of the environment, from ``env.kind``."""
    entry: str
    """``file.py:name``, the command line of a program, or the target of a bridge."""
    concurrency: int
    """Number of episodes at the same time."""
    block_s: float
    """Seconds for which code of an episode may block the event loop."""
    options: dict[str, Any] = {}
    """The settings of a bridge."""
    keep: ResourceLimits | None = None
    """The limits of the worker's resources; ``None``: no limits."""
    own_namespace: bool = True
    """Whether the programs of its episodes run in user namespaces of their own."""


class ShardEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a rollout shard that runs in workers, which the shard starts."""

    env: dict[str, Any]
    """The section ``[env]`` as JSON data."""
    model: str
    """The directory of the model, whose tokenizer renders messages."""
    agents: tuple[str, ...]
    """The names that an environment may call beside the policy; empty: any, and all of them are the policy."""
    adapters: tuple[str, ...]
    """The agents among ``agents`` that train an adapter of their own."""
    logs: str
    """The directory of the log files."""
    start_timeout_s: float
    """Seconds that a worker may take to start."""


class RolloutStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of a rollout shard, a process that runs episodes."""

    sampling: Sampling
    """The sampling parameters of training."""
    run_seed: int
    """The seed of the run, from which those of all turns follow."""
    limits: dict[str, int | None]
    """The budgets of one episode: the fields of :class:`~headrace.rollout.conversations.EpisodeLimits`."""
    timeout_s: float | None
    """Seconds that an attempt may take; ``None``: no limit."""
    retries: int
    """Number of times that an episode whose environment failed is attempted again."""
    record_tokens: int
    """Number of tokens of each running turn that a crash may lose; 0: running turns are not recorded."""
    deadline_s: float
    """The longest wait for an answer of an engine that is no chunk, in seconds."""
    environment: ShardEnvironment | None = None
    """The environment whose workers the shard starts; ``None``: each episode is one answer to its prompt."""


Start = EngineStart | LearnerStart | ScorerStart | EnvironmentStart | RolloutStart


def extra_environment(start: Start) -> dict[str, str]:
    """Return the environment variables that a process of this kind needs beside those of every process of the run."""
    if isinstance(start, EngineStart):
        return engine_environment()
    if isinstance(start, LearnerStart) and start.world > 1:
        return rank_environment(start.place, start.interface)
    return {}


class Briefing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that a process reads when it starts."""

    start: Start
    """The kind of the process, with its settings."""
    addresses: ChannelAddresses
    """The addresses at which the process receives orders and sends reports."""


def write_briefing(path: Path, briefing: Briefing) -> None:
    """Write a briefing for a process to read. Raises ``OSError`` if the file cannot be written."""
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(briefing))


def read_briefing(path: Path) -> Briefing:
    """Read the briefing in the file ``path``, which the launcher wrote for this process."""
    return msgspec.json.decode(path.read_bytes(), type=Briefing)
