"""The order that a session passes to a launcher, and the launched run that the launcher returns. A *session* is the
code that executes one training or evaluation. A *part* is one process of the run."""

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
from headrace.rollout import Chat, EpisodeLimits
from headrace.rollout.environments import EnvConfig
from headrace.sync import SyncConfig

Facts = dict[str, dict[str, str | int | float]]
"""Facts that each part reports about itself when it is ready (threads, device, library versions), by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOrder:
    """A teacher model that needs an engine in the run."""

    model: ModelConfig
    """The model whose weights the engine serves."""
    max_context: int
    """The longest sequence that the teacher may have to read, in tokens."""
    config: TeacherCallConfig
    """The limits of a call of the teacher, and what the call returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """The order to a launcher: all settings of a run that are needed to start its processes."""

    model: ModelConfig
    """The model with which the run began. Engines load this model whenever they start, because its directory does not
    change; they receive newer weights through the weight sync."""
    snapshot: Path | None
    """The directory from which the learner restores weights, optimizer and step; ``None`` for a new run."""
    engine: FleetConfig
    """The settings of the engines."""
    learner: LearnerConfig
    """The settings of the learner."""
    algo: AlgoConfig
    """The settings of the algorithm."""
    env: EnvConfig
    """The settings of the environment and of the rewards."""
    agents: Mapping[str, ModelConfig]
    """The models of agents whose weights are frozen, by agent name. Each of them has its own engine."""
    sync: SyncConfig
    """The settings of the weight sync."""
    version_bytes: int = 0
    """The size of the weights of one version in bytes, from which the deadline of a transfer is computed; 0 means
    small."""
    launch: LaunchConfig
    """The settings of the launch."""
    devices: Devices
    """The devices on which the engines and the learner compute."""
    tasks: Sequence[Task]
    """The tasks for training."""
    eval_tasks: Sequence[Task]
    """The held-out tasks for evaluations; empty if there are none."""
    sampling: Sampling
    """The sampling parameters of training."""
    max_context: int
    """The largest number of tokens of prompt and completion together."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of a completion, which is scored, for its token ids."""
    chat: Chat
    """Renders and parses the model's messages."""
    run_dir: Path
    """The run's directory. The logs of the parts are written to ``logs/`` in it."""
    columns: ColumnsConfig
    """The settings of the store for kept-sets and experts."""
    total_steps: int
    """Number of optimizer steps of the whole run. The learning-rate schedule ends after them."""
    on_spans: Callable[[Sequence[Span]], None]
    """A callback that receives the spans (times of activity) that the parts report."""
    on_event: Callable[[Event], None]
    """A callback that receives events for the user."""
    run_seed: int = 0
    """``run.seed``, from which the seeds of all episodes are derived."""
    record_tokens: int = 0
    """``flow.record_tokens``: the number of tokens of each running turn that a crash may lose; 0 means that running
    turns are not recorded."""
    stall_timeout_s: float = 300.0
    """``run.stall_timeout_s``, in seconds. A process that makes no progress is reported in a warning before this time
    has passed."""
    branch_weight: float = 1.0
    """The weight λ of the loss of branches, from ``flow.pivots``. It has no effect without branches."""
    teachers: Mapping[str, TeacherOrder] = field(default_factory=dict)
    """The teachers that need engines, by name. The name of a run's only teacher may be empty."""
    forks: ForkServer | None = None
    """The fork server for engines and learners; ``None`` means that each of them is a new interpreter."""
    recorded: RecordedEngine | None = None
    """The recording of an engine that a replay repeats; ``None`` if the run is not a replay."""

    @property
    def agent_names(self) -> frozenset[str]:
        """The roles that an environment may use in addition to the policy. If empty, every name is accepted and means
        the policy under training."""
        return frozenset((*(agent.name for agent in self.env.agents), *self.model.adapter_agents))

    @property
    def episode_limits(self) -> EpisodeLimits:
        """The budgets of one episode."""
        env = self.env
        return EpisodeLimits(
            max_context=self.max_context,
            max_turns=env.max_turns,
            max_tokens=env.max_tokens,
            max_tool_calls=env.max_tool_calls,
        )


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of one process of the run, as ``headrace status`` prints it."""

    role: str
    """The name of the process, such as ``engine-0`` or ``learner``."""
    pid: int
    """The process id."""
    state: str
    """``starting``, ``ready``, ``ended``, or the reason why the process does not run, such as ``stopped (SIGSTOP)``."""
    version: int | None
    """The version of its weights; ``None`` for a part without weights."""
    device: str = ""
    """The device on which it computes; empty for a part without a device or a part that is not ready."""
    restarts: int = 0
    """The number of times that it has died and was started again."""
    node: str = ""
    """The address of its machine; empty for the controller's machine."""
    parent: str = ""
    """The name of the rollout shard that has started it; empty for a process that the controller has started."""


OnProgress = Callable[[str], None]
"""A function that is called with texts about the progress of a change."""


class OnEngineChange(Protocol):
    """A function that is called with one sentence about every change of the engines of a run."""

    def __call__(self, text: str, *, changed: bool = True, lost: bool = False) -> None:
        """Record what became of an engine, which ``text`` says. ``changed`` is false if the engine was to be added, and
        never served. ``lost`` says that the engine has left the run without a request."""
        ...


class EngineChanges(Protocol):
    """The functions that change the engines of a run while it is in progress."""

    @property
    def num_engines(self) -> int:
        """The number of engines of the policy, without those that are being added."""
        ...

    def send_changes_to(self, on_change: OnEngineChange) -> None:
        """Set the callback ``on_change``. It receives one sentence about every later change, for the log of the run."""
        ...

    def status(self) -> tuple[EngineStatus, ...]:
        """Return the status of every engine of the policy, and of the engines that were lost."""
        ...

    async def add(self, num: int, on_progress: OnProgress) -> tuple[str, ...]:
        """Add ``num`` engines, wait until all of them serve the newest version, and return their names.

        Raises :class:`~headrace.base.errors.ConfigError` if the run cannot have more engines, or if an added engine
        ended before it served, or was ended because it did not serve in time. In these cases the other engines are
        added nevertheless.
        """
        ...

    async def remove(self, name: str, num: int, drain_s: float, on_progress: OnProgress) -> tuple[str, ...]:
        """Remove the engine ``name`` or, if ``name`` is empty, the last ``num`` engines. Wait until their processes
        have ended, and return their names. Each engine has ``drain_s`` seconds to finish its sequences; the other
        engines continue the sequences that are not finished by then.

        Raises :class:`~headrace.base.errors.ConfigError` for engines that cannot be removed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """The parts of a launched run, and functions that report the state of their processes."""

    parts: Components
    """The parts as the controller uses them."""
    components: Callable[[], list[ComponentStatus]]
    """Returns the status of every process."""
    send_warnings_to: Callable[[Callable[[str], None]], None]
    """Makes the parts send all later warnings to the given function. Earlier warnings are passed to the order's
    ``on_event``, as events without a time."""
    send_signs_to: Callable[[SendWarning], None]
    """Makes the supervision send all later warnings about processes that make no progress to the given function."""
    send_recoveries_to: Callable[[Callable[[Recovery], None]], None]
    """Makes the supervisors report to the given function when a part has died, and when it serves again."""
    facts: Callable[[], Facts]
    """Returns the facts that the engines and the learner report about themselves."""
    changes: EngineChanges
    """The functions that add and remove engines."""
    private: Path
    """A directory of this machine that only the user of the run can enter; it exists as long as the processes do."""
