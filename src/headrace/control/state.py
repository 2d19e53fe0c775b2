"""What the four loops share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.observation import Event, Recovery
from headrace.base.types.trace import Span
from headrace.control.attempts import Attempts
from headrace.control.board import ActivityBoard
from headrace.control.config import RunSection
from headrace.control.observer import Observers
from headrace.control.parts import Components
from headrace.control.rewarding import RewardBook
from headrace.flow import Flow, FlowConfig
from headrace.rollout.environments import Curriculum

WINDOW_S = 10.0
"""Live throughputs are means over this long."""


MAX_WARNINGS = 100
"""Kinds of warnings that are kept."""


@dataclass(slots=True, kw_only=True)
class Warned:
    """One kind of warning."""

    text: str
    """The first of its kind."""
    times: int = 1
    """How many there were of its kind."""


@dataclass(slots=True, kw_only=True)
class Mark:
    """How things stood at the end of the last step."""

    clock_s: float | None = None
    """``None`` before the first."""
    stats: EngineStats | None = None
    """The same."""
    learner_busy_s: float = 0.0
    """As in :class:`RunTotals`."""
    tokens_trained: int = 0
    """The same."""


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Running totals of this life of the run."""

    tokens_trained: int = 0
    """Tokens that carried loss."""
    eval_tokens: int = 0
    """Sampled for evaluations while training went on: the engine counts them too."""
    learner_busy_s: float = 0.0
    """Seconds that the learner trained, copied or saved."""
    exposed_sync_s: float = 0.0
    """Seconds that the learner stood still for the sync."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained tokens by age in versions."""
    commit_gaps_s: list[float] = field(default_factory=list)
    restarted: int = 0
    """Sequences that began again because of a weight update."""
    fresh_sync: Counter[str] = field(default_factory=Counter)
    """What the commits since the last step came to, under the names of metrics."""
    fresh_waits_s: float = 0.0
    """How long they waited, from the order to the exchange, while the engine decoded."""
    rewards: list[float | None] = field(default_factory=list)
    """Mean reward of every step."""
    set_aside: Counter[str] = field(default_factory=Counter)
    """Episodes that were left out of groups or masked, by reason."""
    fresh_pivots: Counter[str] = field(default_factory=Counter)
    """Pivots since the last step, their branches, and what became of them."""
    fresh_rewards: list[float] = field(default_factory=list)
    """Rewards given since the last step, those of dropped groups included."""
    fresh_lengths: list[int] = field(default_factory=list)
    """Sampled tokens of the episodes that ended since the last step, those of dropped groups included."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of trained groups that could carry no loss."""
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of episodes and groups that scoring has seen, and that will not be trained, by reason."""
    held_back_s: float = 0.0
    """Since the last step: as many groups ran as may, and no request waited for the engine."""
    mark: Mark = field(default_factory=Mark)
    versions: list[int] = field(default_factory=list)
    """Committed, in order."""
    recoveries: list[Recovery] = field(default_factory=list)
    """Parts that died and serve again, the latest :data:`MAX_WARNINGS`."""
    mismatch_kl: float | None = None
    """KL(μ‖π) between engine and learner at equal weights; ``None`` where it was not measured."""
    mismatch_abs: float | None = None
    """Mean |log μ − log π| of the same tokens; ``None`` where it was not measured."""
    evals: dict[int, float] = field(default_factory=dict)
    """Mean held-out reward by the version that was committed when the evaluation began."""
    fresh_eval: int | None = None
    """The version of an evaluation that no step's record has told yet."""
    eval_before: float | None = None
    """The held-out mean reward that the run began from."""
    reward_first: float | None = None
    """The mean reward of the run's first batch."""
    steps_done: int = 0
    """Optimizer steps that the learner's weights have behind them, earlier lives of the run included."""
    recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=4096))
    """(time, tokens generated, tokens trained) so far, for the live throughputs."""
    rewarding: RewardBook = field(default_factory=RewardBook)
    """What the components of the reward said beside rewards."""
    last_sample: str = ""
    """The completion that was scored last."""
    last_sample_reward: float | None = None
    """What it earned; ``None`` where it got no reward."""


def trainer_state(state: RunState, version: int) -> TrainerState:
    """Where the run is, for rewards that ask, at a version of its weights."""
    epochs_a_step = state.flow_config.groups_per_step / max(1, len(state.parts.tasks))
    return TrainerState(
        global_step=version,
        max_steps=state.run.steps,
        epoch=version * epochs_a_step,
        num_train_epochs=math.ceil(state.run.steps * epochs_a_step),
        save_steps=state.run.checkpoint_every,
        eval_steps=state.run.eval_every,
    )


@dataclass(slots=True, kw_only=True)
class RunState:
    """One run: its parts, its settings, where its groups are, and what happened so far."""

    parts: Components
    run: RunSection
    flow: Flow
    board: ActivityBoard
    observers: Observers
    attempts: Attempts
    """What is noted of groups while they run."""
    system: dict[str, float] = field(default_factory=dict)
    """Memory and processor time of the run's processes, as last measured, under the names of metrics."""
    curriculum: Curriculum | None = None
    """Picks the rows, and wants to hear how they did; ``None`` without one."""
    tally: RunTotals = field(default_factory=RunTotals)
    phase: str = "starting"
    started_s: float = 0.0
    """When this life began, on the clock."""
    training_from_s: float | None = None
    """When the first rollout began; ``None`` before."""
    training_until_s: float | None = None
    """When the four loops had ended; ``None`` before."""
    engine_before: EngineStats = field(default_factory=EngineStats)
    """The engine's counters when the first rollout began."""
    engine_after: EngineStats | None = None
    """The engine's counters when the four loops had ended; ``None`` before."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run was asked to stop."""
    stopped_by: str = ""
    """The signal that asked for it, ``SIGHUP`` say; empty where none did."""
    warned: dict[str, Warned] = field(default_factory=dict)
    """By kind."""

    @property
    def flow_config(self) -> FlowConfig:
        """The flow's settings."""
        return self.flow.config

    @property
    def wall_s(self) -> float:
        """Seconds since this life began."""
        return self.parts.clock.now() - self.started_s

    def observe(self, number: int, row: int, rewards: Sequence[float]) -> None:
        """Tell the curriculum, if there is one, what an admitted group earned; nothing where it was dropped."""
        if self.curriculum is not None:
            version = self.flow.state.groups[number].oldest_version
            assert version is not None
            self.curriculum.observe(number, row, version, rewards)

    def event(self, text: str) -> None:
        """Tell the observers."""
        self.observers.event(Event(wall_s=self.wall_s, text=text))

    def warn(self, text: str, *, kind: str = "", always: bool = False) -> None:
        """Tell the observers, and keep it for the summary. Of one ``kind`` (unset: these words) the first is told, the
        others are counted; with ``always`` each is told."""
        kind = kind or text
        if kind not in self.warned and len(self.warned) >= MAX_WARNINGS:
            kind = text = "there were more warnings than are kept"
        known = kind in self.warned
        if known:
            self.warned[kind].times += 1
        else:
            self.warned[kind] = Warned(text=text)
        if known and not always:
            return
        self.observers.event(Event(wall_s=self.wall_s, text=text, level="warning"))

    @property
    def warnings(self) -> list[str]:
        """One example of each kind, and how often there was one of it."""
        return [each.text if each.times == 1 else f"{each.text} ({each.times} times)" for each in self.warned.values()]

    def span(self, lane: str, name: str, start_s: float, step: int = -1, *, end_s: float | None = None) -> None:
        """A lane was at ``name`` from ``start_s`` until ``end_s``, or until now."""
        until_s = self.parts.clock.now() if end_s is None else end_s
        self.observers.span(Span(lane=lane, name=name, start_s=start_s, end_s=until_s, step=step))

    @property
    def stop_asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self.stopping.is_set()

    def ask_to_stop(self, by: str = "") -> None:
        """End after the steps that are ordered, with a checkpoint; ``by`` is the signal that asks for it."""
        self.stopped_by = self.stopped_by or by
        self.stopping.set()
        self.flow.changed.ring()
