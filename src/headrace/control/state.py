"""What the four loops share."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from headrace.control.board import Board
from headrace.control.config import RunSection
from headrace.control.observer import Observers
from headrace.control.parts import Parts
from headrace.flow import Flow, FlowConfig
from headrace.types.messages.controller import EngineStats
from headrace.types.observation import Event
from headrace.types.trace import Span

WINDOW_S = 10.0
"""Live throughputs are means over this long."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running totals of this life of the run."""

    tokens_trained: int = 0
    trained_busy_s: float = 0.0
    """Seconds that the learner trained, copied or saved."""
    exposed_sync_s: float = 0.0
    """Seconds that the learner stood still for the sync."""
    ages: Counter[int] = field(default_factory=Counter)
    commit_gaps_s: list[float] = field(default_factory=list)
    restarted: int = 0
    rewards: list[float | None] = field(default_factory=list)
    """Mean reward of every step."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of trained groups that could carry no loss."""
    versions: list[int] = field(default_factory=list)
    """Committed, in order."""
    mismatch_kl: float | None = None
    mismatch_abs: float | None = None
    evals: dict[int, float] = field(default_factory=dict)
    """Mean held-out reward by the version that was committed when the evaluation began."""
    recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=4096))
    """(time, tokens generated, tokens trained) so far, for the live throughputs."""
    last_sample: str = ""
    last_sample_reward: float | None = None


@dataclass(slots=True, kw_only=True)
class RunState:
    """One run: its parts, its settings, where its groups are, and what happened so far."""

    parts: Parts
    run: RunSection
    flow: Flow
    board: Board
    observers: Observers
    tally: Tally = field(default_factory=Tally)
    phase: str = "starting"
    started_s: float = 0.0
    """When this life began, on the clock."""
    training_from_s: float | None = None
    """When the first rollout began."""
    training_until_s: float | None = None
    engine_before: EngineStats = field(default_factory=EngineStats)
    """The engine's counters when the first rollout began."""
    engine_after: EngineStats | None = None
    stop_asked: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def flow_config(self) -> FlowConfig:
        """The flow's settings."""
        return self.flow.config

    @property
    def wall_s(self) -> float:
        """Seconds since this life began."""
        return self.parts.clock.now() - self.started_s

    def event(self, text: str) -> None:
        """Tell the observers."""
        self.observers.event(Event(wall_s=self.wall_s, text=text))

    def warn(self, text: str) -> None:
        """Tell the observers, and keep it for the summary; the same words are told once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.observers.event(Event(wall_s=self.wall_s, text=text, level="warning"))

    def span(self, lane: str, name: str, start_s: float, step: int = -1) -> None:
        """A lane was busy from ``start_s`` until now."""
        span = Span(lane=lane, name=name, start_s=start_s, end_s=self.parts.clock.now(), step=step)
        self.observers.spans([span])

    def ask_to_stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.stop_asked = True
        self.flow.changed.ring()
