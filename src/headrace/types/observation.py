"""What a run shows of itself: one record per optimizer step, and one picture of the present moment.

Both are pure data. The controller fills them; whoever watches (a file, a terminal, a report) reads them.
A number that is not finite is written to files as ``null`` and read back as ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups in flight, by where they stand."""

    submitted: int = 0
    """Known, but not yet admitted."""
    running: int = 0
    """Being generated or scored."""
    ready: int = 0
    """Scored, and waiting to be trained."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: one line of ``metrics.jsonl``."""

    step: int
    """From 0."""
    version: int
    """The version that the step made: ``step + 1``."""
    clock_s: float
    """When the step ended, on the machine's clock: the zero that spans have."""
    wall_s: float
    """Seconds since the run started, at the end of the step."""
    unix_s: float = 0.0
    """Seconds since 1970 at that moment: ``unix_s − clock_s`` puts spans on the calendar."""
    reward_mean: float | None = None
    """Over the episodes of the step's batch; ``None`` where nothing was scored."""
    reward_sampled: float | None = None
    """Over all episodes that were scored since the last step, those of dropped groups included; ``None`` where none
    was."""
    reward_std: float | None = None
    """Over the same episodes; ``None`` where nothing was scored."""
    reward_min: float | None = None
    """Least reward of those episodes; ``None`` where nothing was scored."""
    reward_max: float | None = None
    """Greatest reward of those episodes; ``None`` where nothing was scored."""
    eval_accuracy: float | None = None
    """Mean reward on held-out tasks, where a measurement ended since the last step; ``None`` otherwise."""
    eval_version: int | None = None
    """The version that was committed when that measurement began."""
    metrics: Mapping[str, float | None] = {}
    """What loss, correction and optimizer report, and what is measured of episodes and parts. Every name is a row of
    :data:`headrace.types.metrics.REGISTRY`."""
    trained_tokens: int = 0
    """Tokens that carried loss in this step."""
    generated_tokens: int = 0
    """Tokens that the engine has sampled since the run started."""
    seconds: float = 0.0
    """Forward, backward and update."""
    wait_s: float = 0.0
    """How long the learner waited for this step's batch."""
    exposed_sync_s: float = 0.0
    """How long the learner stood still for the sync after the step: the copy of its weights."""
    straggler_s: float = 0.0
    """Of ``wait_s``, how long nine in ten episodes of the batch had ended."""
    held_back_s: float = 0.0
    """Since the last step: as many groups ran as ``flow.capacity`` allows, and no request waited for the engine."""
    commit_gap_s: float | None = None
    """How long the engine stood still to commit the latest version; ``None`` where none has been committed since the
    last step."""
    ages: dict[int, int] = {}
    """Tokens that carried loss, by age in versions."""
    queue: QueueCounts = QueueCounts()
    """At the end of the step."""
    length_mean: float | None = None
    """Sampled tokens per episode of the batch."""
    dropped_groups: dict[str, int] = {}
    """Groups dropped since the run started, by reason."""
    set_aside_episodes: dict[str, int] = {}
    """Episodes left out of groups that were kept, or masked, since this life of the run started, by reason."""
    dropped_tokens: dict[str, int] = {}
    """Tokens of trained groups that could carry no loss, since this life of the run started, by reason."""
    wasted_tokens: dict[str, int] = {}
    """Every token that was sampled and will not be trained, since this life of the run started, by reason: those of
    dropped groups, of episodes left out, of tokens that could carry no loss, and what weight updates threw away."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time and the tokens of one interval went. Accounts of intervals that follow each other add up.

    >>> both = Account(seconds=2.0, learner_busy_s=1.0) + Account(seconds=2.0, wasted_tokens={"stale": 3})
    >>> both.learner_idle, both.wasted_tokens
    (0.75, {'stale': 3})
    """

    seconds: float = 0.0
    """Its length."""
    engine_busy_s: float = 0.0
    """In steps of the engine; of several engines, their mean."""
    prefill_s: float = 0.0
    """Of these, on prompts."""
    learner_busy_s: float = 0.0
    """The learner trained, copied its weights or saved them."""
    together_s: float = 0.0
    """An engine and the learner worked at once; of several engines, their mean."""
    scoring_s: float = 0.0
    """Engine and learner both stood idle while a reward was being computed."""
    sync_s: float = 0.0
    """Somebody stood still for the sync: the learner copied its weights or waited for a buffer, the engine committed,
    or both waited while a version was on its way."""
    exposed_sync_s: float = 0.0
    """Of these, the learner stood still."""
    straggler_s: float = 0.0
    """The learner waited for a batch of whose episodes nine in ten had ended."""
    held_back_s: float = 0.0
    """As many groups ran as ``flow.capacity`` allows, and no request waited for the engine."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    """That carried loss."""
    wasted_tokens: dict[str, int] = {}
    """Sampled, and never to be trained, by reason."""

    def __add__(self, later: Account) -> Account:
        """Both intervals as one."""
        sums = {
            name: value + getattr(later, name)
            for name, value in msgspec.structs.asdict(self).items()
            if name != _WASTED
        }
        wasted = {
            reason: self.wasted_tokens.get(reason, 0) + later.wasted_tokens.get(reason, 0)
            for reason in (*self.wasted_tokens, *later.wasted_tokens)
        }
        return Account(**sums, wasted_tokens=wasted)

    @property
    def engine_idle(self) -> float:
        """The fraction of the time in which the engine ran no step."""
        return 1.0 - self.of_time(self.engine_busy_s) if self.seconds > 0 else 0.0

    @property
    def learner_idle(self) -> float:
        """The fraction of the time in which the learner neither trained, copied nor saved."""
        return 1.0 - self.of_time(self.learner_busy_s) if self.seconds > 0 else 0.0

    @property
    def scoring(self) -> float:
        """``scoring_s`` as a fraction of the time."""
        return self.of_time(self.scoring_s)

    @property
    def sync(self) -> float:
        """``sync_s`` as a fraction of the time."""
        return self.of_time(self.sync_s)

    def of_time(self, part_s: float) -> float:
        """``part_s`` as a fraction of the interval, between 0 and 1; 0 of no interval."""
        return min(1.0, max(0.0, part_s / self.seconds)) if self.seconds > 0 else 0.0

    def per_second(self, tokens: int) -> float:
        """A rate; 0 over no interval."""
        return tokens / self.seconds if self.seconds > 0 else 0.0


_WASTED = "wasted_tokens"


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What one loop does at this moment: one row of the table of who waits for whom."""

    loop: str
    """``rollout``, ``scoring``, ``learner``, ``sync``."""
    state: Literal["busy", "waiting"]
    what: str
    """What it works on or waits for."""
    since_s: float
    """For how many seconds already."""
    unblocked_by: str = ""
    """Who can end the wait; empty when busy."""


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """The present moment, for a view that is drawn once a second."""

    steps_done: int
    """Optimizer steps of the whole run so far."""
    steps_total: int
    """Optimizer steps that the run will have."""
    title: str = ""
    """Name of the run."""
    phase: str = ""
    """What the run as a whole is at: ``starting``, ``evaluating``, ``training``, ``saving``."""
    wall_s: float = 0.0
    """Seconds since the run started."""
    eta_s: float | None = None
    """Seconds until the last step, if things go on like this; ``None`` while nobody can tell."""
    learner_version: int = -1
    engine_version: int = -1
    """The committed version; −1 before the first."""
    rewards: tuple[float | None, ...] = ()
    """Mean reward of every step so far."""
    eval_accuracy: float | None = None
    """The latest one measured."""
    generated_tok_s: float = 0.0
    """Tokens per second that the engine samples, over a recent window."""
    trained_tok_s: float = 0.0
    """Tokens per second that the learner trains, over a recent window."""
    queue: QueueCounts = QueueCounts()
    ages: dict[int, int] = {}
    """Trained tokens since the run started, by age in versions."""
    throughput: tuple[float, ...] = ()
    """Tokens trained per second in every step so far."""
    waited: tuple[float, ...] = ()
    """The fraction of every step so far that the learner waited for its batch."""
    account: Account | None = None
    """Since the first rollout; ``None`` before it."""
    verdict: str = ""
    """What holds the run up, in words; empty while nobody can tell."""
    waits: tuple[Wait, ...] = ()
    """One row per loop."""
    warnings: tuple[str, ...] = ()
    """The latest last, alarms included."""
    sample: str = ""
    """A completion that the policy wrote lately: text of a model, never to be trusted."""
    sample_reward: float | None = None
    """What it earned; ``None`` while unscored."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth one line when it happens: a commit refused, an evaluation, a checkpoint, a group dropped."""

    wall_s: float
    """Seconds since the run started."""
    text: str
    level: Literal["info", "warning"] = "info"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A part that died and was started again, or that was out of reach for a while, without an end of the run.

    >>> str(Recovery(part="engine-1", cause="engine-1 (pid 7) was killed by SIGKILL", seconds=3.12, carried_over=14))
    'engine-1 (pid 7) was killed by SIGKILL; it serves again after 3.1 s, 14 sequences went on'
    """

    part: str
    """Its role."""
    cause: str
    """Of its death, or of its absence, in words."""
    seconds: float | None
    """From then until it served again; ``None``: it does not yet."""
    carried_over: int
    """Sequences that it had, and that go on."""
    lives: bool = False
    """It did not die, and new weights do not reach it."""

    def __str__(self) -> str:
        if self.seconds is None and self.lives:
            return (
                f"{self.cause}; it ends its {self.carried_over} sequences and begins no others until a version reaches "
                "it: open the way from the learner to that address"
            )
        if self.seconds is None:
            return f"{self.cause}; it is started again, its {self.carried_over} sequences go on"
        return f"{self.cause}; it serves again after {self.seconds:.1f} s, {self.carried_over} sequences went on"
