"""What a run shows of itself: one record per optimizer step, and one picture of the present moment.

Both are pure data. The controller fills them; whoever watches (a file, a terminal, a report) reads them.
A number that is not finite is written to files as ``null`` and read back as ``None``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal

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
    :data:`headrace.base.types.metrics.REGISTRY`."""
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

    The time of the learner is its work and its waits, by what it waits for: together they are ``seconds``. So is the
    time of the engine.

    >>> both = Account(seconds=2.0, learner_busy_s=1.0) + Account(seconds=2.0, wasted_tokens={"stale": 3})
    >>> both.learner_idle, both.wasted_tokens
    (0.75, {'stale': 3})
    """

    seconds: float = 0.0
    """Its length."""
    engine_busy_s: float = 0.0
    """The engine had requests: it read them, ran steps and sent tokens. Of several engines, their mean."""
    prefill_s: float = 0.0
    """Of these, on prompts."""
    engine_waits_s: dict[str, float] = {}
    """The rest of the time, by the part that worked meanwhile: a name of :class:`Cause`. Of several engines, their
    mean."""
    learner_busy_s: float = 0.0
    """The learner trained, copied its weights or saved them."""
    learner_waits_s: dict[str, float] = {}
    """The rest of the time, by what the learner waited for: a name of :class:`Cause`."""
    controller_busy_s: float = 0.0
    """The controller's event loop ran; 0 where nobody watched it."""
    lanes_s: dict[str, float] = {}
    """Work of every lane of the trace, by its name."""
    exposed_sync_s: float = 0.0
    """The learner copied its weights, or waited for a buffer to copy them to."""
    straggler_s: float = 0.0
    """The learner waited for a batch of whose episodes nine in ten had ended."""
    held_back_s: float = 0.0
    """As many groups ran as ``flow.capacity`` allows, and no request waited for the engine."""
    observed_s: float = 0.0
    """How long the run's processes were looked at, for the fields below; 0 where nobody looked."""
    processors_s: float = 0.0
    """Processor time of the run's processes on this machine, over the number of processors that they may use."""
    used_s: dict[str, float] = {}
    """By kind of process: its processor time."""
    queued_s: dict[str, float] = {}
    """By kind of process: how long its thread that waited longest could have run, and had no processor."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    """That carried loss."""
    wasted_tokens: dict[str, int] = {}
    """Sampled, and never to be trained, by reason."""

    def __add__(self, later: Account) -> Account:
        """Both intervals as one."""
        return Account(**{
            name: _added(value, getattr(later, name)) for name, value in msgspec.structs.asdict(self).items()
        })  # fmt: skip

    @property
    def engine_idle(self) -> float:
        """The fraction of the time in which the engine had nothing to do."""
        return 1.0 - self.of_time(self.engine_busy_s) if self.seconds > 0 else 0.0

    @property
    def learner_idle(self) -> float:
        """The fraction of the time in which the learner neither trained, copied nor saved."""
        return 1.0 - self.of_time(self.learner_busy_s) if self.seconds > 0 else 0.0

    def learner_waits(self, cause: str) -> float:
        """The fraction of the time in which the learner waited for ``cause``."""
        return self.of_time(self.learner_waits_s.get(cause, 0.0))

    def engine_waits(self, cause: str) -> float:
        """The fraction of the time in which the engine stood idle while ``cause`` worked."""
        return self.of_time(self.engine_waits_s.get(cause, 0.0))

    def of_time(self, part_s: float) -> float:
        """``part_s`` as a fraction of the interval, between 0 and 1; 0 of no interval."""
        return min(1.0, max(0.0, part_s / self.seconds)) if self.seconds > 0 else 0.0

    def per_second(self, tokens: int) -> float:
        """A rate; 0 over no interval."""
        return tokens / self.seconds if self.seconds > 0 else 0.0


def _added(value: Any, later: Any) -> Any:
    """The sum of two numbers, or of two tables of numbers, key by key."""
    if not isinstance(value, dict):
        return value + later
    return {key: value.get(key, 0) + later.get(key, 0) for key in (*value, *later)}


class Cause(enum.StrEnum):
    """What the learner, or an engine, waits for."""

    ENGINE = "engine"
    """Tokens of the batch: an engine works."""
    LEARNER = "learner"
    """A slot for new groups, which a step frees: the learner works."""
    CONTROLLER = "controller"
    """The controller's event loop: it starts episodes, takes in tokens and rewards, puts batches together."""
    ENVIRONMENT = "environment"
    """Environments and agent programs."""
    SCORING = "scoring"
    """Rewards, from scoring workers or judges."""
    TEACHERS = "teachers"
    """Teachers with engines of their own."""
    SYNC = "sync"
    """Weights on their way, or a buffer for them."""
    LEDGER = "ledger"
    """The disk with the run's ledger."""
    NOBODY = "nobody"
    """No part works: messages are between two processes, or a process waits to be given a processor."""


class Bound(enum.StrEnum):
    """What holds a run up."""

    GENERATION = "generation-bound"
    """The engine works nearly all the time, or is what the learner mostly waits for."""
    PREFILL = "prefill-bound"
    """The same, and most of the engine's work is reading prompts."""
    STRAGGLERS = "straggler-bound"
    """The learner waits for the last episodes of a batch."""
    CAPACITY = "capacity-bound"
    """The learner waits for the engine, and ``flow.capacity`` keeps more groups from running."""
    LEARNER = "learner-bound"
    """The learner works nearly all the time, and the engine does not."""
    CONTROLLER = "controller-bound"
    """The controller works nearly all the time, or is what the learner mostly waits for."""
    ENVIRONMENT = "environment-bound"
    """The learner mostly waits while environments work and the engine has nothing to do."""
    SCORING = "scoring-bound"
    """The learner mostly waits for rewards."""
    TEACHERS = "teacher-bound"
    """The learner mostly waits for teachers with engines of their own."""
    SYNC = "sync-bound"
    """The learner mostly waits for weights."""
    LEDGER = "disk-bound"
    """The learner mostly waits for the disk with the ledger."""
    PROCESSORS = "processor-bound"
    """The parts wait for processors that others use."""
    TURNS = "taking turns"
    """The learner waits while the engine works, and the engine while the learner works."""
    BALANCED = "balanced"
    """Engine and learner both work nearly all the time."""
    NOTHING = "nothing single binds"
    """No part works nearly all the time, and none is what the learner mostly waits for."""


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
