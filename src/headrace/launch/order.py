"""What is to be launched, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.base.types.observation import Event, Recovery
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.control import Components
from headrace.control.teaching import TeacherTerms
from headrace.engine.fleet import FleetConfig
from headrace.launch.config import LaunchConfig
from headrace.launch.forking import ForkServer
from headrace.launch.starts import Repeated
from headrace.launch.vitals import Tell
from headrace.learner import LearnerConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import Devices
from headrace.rollout import Chat
from headrace.rollout.environments import EnvConfig
from headrace.sync import SyncConfig

Facts = dict[str, dict[str, str | int | float]]
"""What each part says of itself, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOrder:
    """A teacher that is to have an engine."""

    model: ModelConfig
    """What it loads: it serves the weights of that directory."""
    max_context: int
    """What it reads and is asked about together may be this long, in tokens."""
    terms: TeacherTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Everything a launcher needs to know."""

    model: ModelConfig
    """As the run began with it. Engines load that whenever they start, for it stays where it is; newer weights reach
    them as any others do."""
    snapshot: Path | None
    """Where the learner restores weights, optimizer and step from; ``None`` for a new run."""
    engine: FleetConfig
    learner: LearnerConfig
    algo: AlgoConfig
    env: EnvConfig
    agents: Mapping[str, ModelConfig]
    """What the engines of agents with weights of their own load, by name: they serve the weights of those
    directories."""
    sync: SyncConfig
    launch: LaunchConfig
    devices: Devices
    """Where engine and learner compute."""
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    sampling: Sampling
    """How training samples."""
    max_context: int
    """Prompt and completion together may be this long, in tokens."""
    decode: Callable[[Sequence[int]], str]
    """Ids of a completion to the text that is scored."""
    chat: Chat
    """Writes and reads the messages of the model."""
    run_dir: Path
    """Logs of the parts go to ``logs/`` in it."""
    total_steps: int
    """Optimizer steps of the whole run: where the learning rate's schedule ends."""
    on_spans: Callable[[Sequence[Span]], None]
    """Told what the parts were busy with."""
    on_event: Callable[[Event], None]
    """Told what is worth a line."""
    stall_timeout_s: float = 300.0
    """``run.stall_timeout_s``: a process that does not go on is told of before it has passed."""
    branch_weight: float = 1.0
    """λ of ``flow.pivots``, where there are branches."""
    teachers: Mapping[str, TeacherOrder] = field(default_factory=dict)
    """Those with engines of their own, by name; one alone may have none."""
    forks: ForkServer | None = None
    """What engines and learner are forked from; ``None``: each is a new interpreter."""
    repeats: Repeated | None = None
    """The recorded engine that a replay repeats; ``None``: this is none."""

    @property
    def agent_names(self) -> frozenset[str]:
        """Roles that may be asked beside the policy; empty: any, and all of them are the policy under training."""
        return frozenset((*(agent.name for agent in self.env.agents), *self.model.adapter_agents))


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run, for ``headrace status``."""

    role: str
    pid: int
    state: str
    """``starting``, ``ready`` or ``ended``."""
    version: int | None
    """The version it holds; ``None`` for a part without weights."""
    device: str = ""
    """Where it computes; empty for a part that computes nothing, or is not ready."""
    restarts: int = 0
    """How often it died and was started again."""
    node: str = ""
    """The address of its machine; empty for that of the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """The parts, launched, and a look at their processes."""

    parts: Components
    components: Callable[[], list[ComponentStatus]]
    send_warnings_to: Callable[[Callable[[str], None]], None]
    """From now on the parts' warnings go there; before, they are events of the order without a time."""
    send_signs_to: Callable[[Tell], None]
    """From now on it is told there which process does not go on, and when it goes on again."""
    send_recoveries_to: Callable[[Callable[[Recovery], None]], None]
    """From now on whatever died and was started again is told there, when it dies and when it serves again."""
    facts: Callable[[], Facts]
    """What the engine and the learner say of themselves; they are ready."""
