"""The order that a session (the code that runs one training or evaluation) gives a launcher, and the launched run that
it gets back. A *part* is one process of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.base.types.messages.program import EngineStatus
from headrace.base.types.observation import Event, Recovery
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.control import Components
from headrace.control.teaching import TeacherCallConfig
from headrace.engine.fleet import FleetConfig
from headrace.flow.columns import ColumnsConfig
from headrace.launch.config import LaunchConfig
from headrace.launch.forking import ForkServer
from headrace.launch.starts import RecordedEngine
from headrace.launch.vitals import SendWarning
from headrace.learner import LearnerConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import Devices
from headrace.rollout import Chat
from headrace.rollout.environments import EnvConfig
from headrace.sync import SyncConfig

Facts = dict[str, dict[str, str | int | float]]
"""Facts that each part reports about itself when it is ready (threads, device, library versions), by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOrder:
    """A teacher model that is to get an engine."""

    model: ModelConfig
    """The model whose weights the engine serves."""
    max_context: int
    """The longest sequence that the teacher may be asked to read, in tokens."""
    config: TeacherCallConfig
    """The limits of the calls, and what a call returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """The order for a launcher: everything that it needs to know of a run to start its processes."""

    model: ModelConfig
    """The model with which the run began. Engines load it whenever they start, since its directory does not change;
    newer weights reach them through the weight sync."""
    snapshot: Path | None
    """The directory from which the learner restores weights, optimizer and step; ``None`` for a new run."""
    engine: FleetConfig
    learner: LearnerConfig
    algo: AlgoConfig
    env: EnvConfig
    agents: Mapping[str, ModelConfig]
    """The models of agents with weights of their own, by name; each has an engine that serves these weights."""
    sync: SyncConfig
    version_bytes: int = 0
    """The size of the weights of one version, from which its deadline follows; 0: small."""
    launch: LaunchConfig
    devices: Devices
    """The devices on which engines and learner compute."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    sampling: Sampling
    """The sampling settings of training."""
    max_context: int
    """Number of tokens that prompt and completion may have together."""
    decode: Callable[[Sequence[int]], str]
    """Converts the token ids of a completion into the text that is scored."""
    chat: Chat
    """Renders and parses the model's messages."""
    run_dir: Path
    """The run's directory; the logs of the parts go to ``logs/`` in it."""
    columns: ColumnsConfig
    """The settings of the store for kept-sets and experts."""
    total_steps: int
    """Optimizer steps of the whole run, at the end of which the learning-rate schedule ends."""
    on_spans: Callable[[Sequence[Span]], None]
    """Called with the spans (times of activity) that the parts report."""
    on_event: Callable[[Event], None]
    """Called with events that are worth a line for the user."""
    run_seed: int = 0
    """``run.seed``, from which the seeds of all episodes follow."""
    record_tokens: int = 0
    """``flow.record_tokens``: the number of tokens of each running turn that a crash may lose; 0 records none."""
    stall_timeout_s: float = 300.0
    """``run.stall_timeout_s``, in seconds; a warning names a process that makes no progress before it has passed."""
    branch_weight: float = 1.0
    """The weight λ of the branches' loss, from ``flow.pivots``; without branches it has no effect."""
    teachers: Mapping[str, TeacherOrder] = field(default_factory=dict)
    """The teachers with engines of their own, by name; the name may be empty if there is only one."""
    forks: ForkServer | None = None
    """The fork server for engines and learner; ``None``: each of them is a new interpreter."""
    recorded: RecordedEngine | None = None
    """The recorded engine that a replay repeats; ``None``: the run is not a replay."""

    @property
    def agent_names(self) -> frozenset[str]:
        """The roles that an environment may call beside the policy. Empty: any name may be called, and all of them are
        the policy under training."""
        return frozenset((*(agent.name for agent in self.env.agents), *self.model.adapter_agents))


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one process of the run, for ``headrace status``."""

    role: str
    """The name of the process, such as ``engine-0`` or ``learner``."""
    pid: int
    state: str
    """``starting``, ``ready``, ``ended``, or why the process is halted."""
    version: int | None
    """The version of its weights; ``None`` for a part without weights."""
    device: str = ""
    """The device on which it computes; empty for a part that computes nothing or is not ready."""
    restarts: int = 0
    """Number of times that it died and was started again."""
    node: str = ""
    """The address of its machine; empty for the controller's machine."""


OnProgress = Callable[[str], None]
"""A function that is called with texts about a change that is under way."""


class EngineChanges(Protocol):
    """Changes of the engines of a run while it goes on."""

    def send_changes_to(self, on_change: OnProgress) -> None:
        """Call ``on_change`` with one sentence about every later change, for the log of the run."""
        ...

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the status of every engine of the policy."""
        ...

    async def add(self, num: int, on_progress: OnProgress) -> tuple[str, ...]:
        """Add ``num`` engines, and wait until all of them serve the newest version; return their names.

        Raises :class:`~headrace.base.errors.ConfigError` if the run cannot have more engines, or if one of them ended
        before it served; the others are added all the same.
        """
        ...

    async def remove(self, name: str, num: int, drain_s: float, on_progress: OnProgress) -> tuple[str, ...]:
        """Remove the engine ``name`` or, if that is empty, the last ``num`` engines, and wait until their processes
        have ended; return their names. Each has ``drain_s`` seconds to end its sequences, and the other engines
        continue the rest.

        Raises :class:`~headrace.base.errors.ConfigError` for engines that cannot be removed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """The launched parts of a run, and access to the state of their processes."""

    parts: Components
    """The parts as the controller uses them."""
    components: Callable[[], list[ComponentStatus]]
    """Returns the status of every process."""
    send_warnings_to: Callable[[Callable[[str], None]], None]
    """Sends all later warnings of the parts to the given function. Earlier ones are events of the order, without a
    time."""
    send_signs_to: Callable[[SendWarning], None]
    """Sends all later warnings about processes that make no progress to the given function."""
    send_recoveries_to: Callable[[Callable[[Recovery], None]], None]
    """Sends all later recoveries to the given function: when a part has died, and when it serves again."""
    facts: Callable[[], Facts]
    """Returns the facts that the engines and the learner report about themselves."""
    changes: EngineChanges
    """Adds and removes engines."""
    private: Path
    """A directory of this machine that only the user of the run can enter; it exists as long as the processes do."""
