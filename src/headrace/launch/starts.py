"""The briefing of a process of a run: all settings that the process needs when it starts. It is a JSON file that the
launcher writes and the process reads once. Each role has its own class of settings: engine, learner, scorer,
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
    """The recording that the engine of a replay repeats."""

    interleaving: str
    """The file with the recorded messages and the steps before which they were handled."""
    deadline_s: float
    """The longest time to wait for the next recorded message to arrive, in seconds."""
    seed: int
    """The seed of the recorded run."""
    num_groups: int
    """The number of groups in the recorded run. The names of the requests follow from it, the seed and the group
    size."""
    group_size: int
    """The number of episodes in each group."""


class Lending(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the machine's cores between the parts, which lend cores to each other."""

    activity_file: str
    """The file, shared by all parts, with one byte per part: 1 while the part computes, 0 while it waits."""
    place: int
    """The index of this part, and of its byte in the file."""
    shares: tuple[int, ...]
    """The number of cores that each part owns, by the index of the part."""


class StoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """The store for columns of tokens, such as the kept-sets and experts that engines record. It is a directory on this
    machine."""

    directory: str
    """The path of the directory."""
    limit_bytes: int | None = None
    """The largest total size of its files, in bytes; ``None`` means no limit other than the disk."""
    writer: str = ""
    """The name of the part that writes into the store; empty for a part that only reads."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of an engine process."""

    model: dict[str, Any]
    """The section ``[model]`` as JSON data."""
    engine: dict[str, Any]
    """The settings of this one engine, from ``[engine]``, as JSON data."""
    max_context: int
    """The largest number of tokens of prompt and completion together."""
    num_threads: int
    """The number of cores on which the engine computes."""
    lending: Lending | None = None
    """How the cores are lent between parts; ``None`` means that the engine computes only on its own cores."""
    route: Route = Route()
    """The route on which weights arrive from the learner."""
    record_kept: bool = False
    """Whether requests will ask for kept-sets, the vocabulary entries that truncated sampling keeps. An inference
    server must be configured for them when it starts."""
    record_routing: bool = False
    """Whether requests will ask for the experts of each token. An inference server must be configured for them when it
    starts."""
    sleeps: bool = False
    """Whether the engine frees its memory while the learner computes. An inference server must be configured for this
    when it starts."""
    own_weights: bool = False
    """Whether the engine uses the weights of its model directory as version 0, and does not wait for weights from a
    learner."""
    memory: str = ""
    """The shared-memory file through which weights pass with ``own_weights``. The starter of the process creates it."""
    history: str = ""
    """The file in which an engine that drafts tokens stores its history of answers, so that the history survives the
    process; empty means in memory only."""
    columns: StoreStart | None = None
    """The store for the kept-sets and experts of sampled tokens; ``None`` means that they are sent with the tokens."""
    interleaving: str = ""
    """The file in which the engine records its messages and the steps before which it handled them; empty means that
    they are not recorded."""
    recorded: RecordedEngine | None = None
    """The recording that the engine replays; ``None`` means that it handles messages as they arrive."""


class LearnerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of a learner process, or of one rank of a learner."""

    model: dict[str, Any]
    """The model section with which the run began. Snapshots copy the tokenizer from its directory."""
    learner: dict[str, Any]
    """The section ``[learner]``, with the device of this rank, as JSON data."""
    algo: dict[str, Any]
    """The section ``[algo]`` as JSON data."""
    temperature: float
    """The sampling temperature of the engine. The learner computes log π at this temperature."""
    total_steps: int
    """Number of optimizer steps of the whole run. The learning-rate schedule ends after them."""
    snapshot: str
    """The directory from which weights, optimizer and step are restored; empty for a new run."""
    route: Route
    """The route on which weights are sent to the engines."""
    num_threads: int
    """The number of cores on which this rank computes."""
    columns: StoreStart | None = None
    """The store that may contain columns of a batch; ``None`` means that they are sent with the batch."""
    lending: Lending | None = None
    """How the cores are lent between parts; ``None`` means that the learner computes only on its own cores."""
    rank: int = 0
    """The index of this rank. Rank 0 receives the orders, answers them and publishes the weights."""
    world: int = 1
    """The number of ranks."""
    rendezvous: str = ""
    """The address at which the ranks find each other, as torch's ``init_method``."""
    interface: str = ""
    """The network interface that connects to the other ranks; empty if all ranks are on this machine."""

    @property
    def place(self) -> RankPlace:
        """The rank's place among all ranks. If a cluster places every rank separately, a rank can use only its own
        devices, so its local rank is 0."""
        return RankPlace(rank=self.rank, local_rank=0 if self.interface else self.rank, world=self.world)


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a process with user code may use, together with all processes that it starts. A supervisor
    kills all of them if they use more, or if the process that started the supervisor ends. These processes cannot see
    other processes of the machine."""

    memory_bytes: int
    """The memory of all these processes together; 0 means half of the machine's memory."""
    processes: int
    """The number of processes at the same time."""
    log_bytes: int = 16 << 20
    """The number of bytes of output that are kept in the log."""


class ScorerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of a scoring worker."""

    reward: dict[str, Any]
    """The section of the reward component that the worker computes."""
    columns: tuple[str, ...] | None = None
    """The columns that every row has; ``None`` if they are not known."""
    keep: ResourceLimits | None = None
    """The limits of the worker's resources; ``None`` means no limits."""


class EnvironmentStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The settings of an environment worker."""

    kind: str
    """The kind of the environment, from ``env.kind``."""
    entry: str
    """``file.py:name``, the command line of a program, or the target of a bridge."""
    concurrency: int
    """The number of episodes at the same time."""
    block_s: float
    """Seconds for which the code of an episode may block the event loop."""
    options: dict[str, Any] = {}
    """The options of a bridge, or of an environment of an installed package."""
    keep: ResourceLimits | None = None
    """The limits of the worker's resources; ``None`` means no limits."""
    own_namespace: bool = True
    """Whether each program of an episode runs in its own user namespace."""


class ShardEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which a rollout shard starts the workers of the environment."""

    env: dict[str, Any]
    """The section ``[env]`` as JSON data."""
    model: str
    """The directory of the model. Its tokenizer renders messages."""
    agents: tuple[str, ...]
    """The agent names that an environment may use in addition to the policy. If empty, every name is accepted and means
    the policy."""
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
    """The seed of the run, from which the seeds of all turns are derived."""
    limits: dict[str, int | None]
    """The budgets of one episode: the fields of :class:`~headrace.rollout.conversations.EpisodeLimits`."""
    timeout_s: float | None
    """Seconds that an attempt may take; ``None`` means no limit."""
    retries: int
    """Maximum number of further attempts at an episode after its environment has failed."""
    record_tokens: int
    """Number of tokens of each running turn that a crash may lose; 0 means that running turns are not recorded."""
    deadline_s: float
    """The longest time to wait for an engine's answer to a message other than a request for tokens, in seconds."""
    environment: ShardEnvironment | None = None
    """The environment whose workers the shard starts; ``None`` means that each episode is one answer to its prompt."""


Start = EngineStart | LearnerStart | ScorerStart | EnvironmentStart | RolloutStart
"""The settings of a process, by its role."""


def extra_environment(start: Start) -> dict[str, str]:
    """Return the environment variables that a process with the settings ``start`` needs in addition to the variables
    that every process of the run has."""
    if isinstance(start, EngineStart):
        return engine_environment()
    if isinstance(start, LearnerStart) and start.world > 1:
        return rank_environment(start.place, start.interface)
    return {}


class Briefing(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that a process reads when it starts."""

    start: Start
    """The settings of the process. Their class determines its role."""
    addresses: ChannelAddresses
    """The addresses at which the process receives orders and sends reports."""


def write_briefing(path: Path, briefing: Briefing) -> None:
    """Write ``briefing`` to the file ``path``, which only this user can read. Raises ``OSError`` if the file cannot be
    written."""
    path.touch(0o600)
    path.write_bytes(msgspec.json.encode(briefing))


def read_briefing(path: Path) -> Briefing:
    """Return the briefing in the file ``path``, which the launcher wrote for this process."""
    return msgspec.json.decode(path.read_bytes(), type=Briefing)
