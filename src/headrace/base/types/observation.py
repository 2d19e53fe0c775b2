"""The records that describe a run to its observers: one record per optimizer step, and one of the present state.

A *group* consists of the attempts (episodes) at one task. The *age* of a trained token is measured in versions of the
weights. A *lane* is one row of the event trace. The records are pure data: the controller fills them in, and files,
terminal views and reports read them. A number that is not finite is written to files as ``null``, and read as ``None``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of groups in flight, by state."""

    submitted: int = 0
    """Groups that are known and not yet admitted."""
    running: int = 0
    """Groups that are being generated or scored."""
    ready: int = 0
    """Groups that are scored and wait to be trained."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one optimizer step: one line of ``metrics.jsonl``."""

    step: int
    """The number of the step, from 0."""
    version: int
    """The version that the step made: ``step + 1``."""
    clock_s: float
    """The time when the step ended, in seconds of the machine's clock. Spans use the same clock."""
    wall_s: float
    """Seconds from the start of the run to the end of the step."""
    unix_s: float = 0.0
    """The time when the step ended, in seconds since 1970. ``unix_s − clock_s`` converts the times of spans."""
    reward_mean: float | None = None
    """The mean reward of the episodes in the step's batch; ``None`` if none of them was scored."""
    reward_sampled: float | None = None
    """The mean reward of all episodes that were scored since the previous step, including those of dropped groups;
    ``None`` if there were none."""
    reward_std: float | None = None
    """The standard deviation of the rewards of the batch's episodes; ``None`` if none was scored."""
    reward_min: float | None = None
    """The least reward of the batch's episodes; ``None`` if none was scored."""
    reward_max: float | None = None
    """The largest reward of the batch's episodes; ``None`` if none was scored."""
    eval_accuracy: float | None = None
    """The mean reward on held-out tasks, if an evaluation ended since the previous step; ``None`` otherwise."""
    eval_version: int | None = None
    """The version that was committed when that evaluation began; ``None`` without an evaluation."""
    metrics: Mapping[str, float | None] = {}
    """The metrics of loss, corrections and optimizer, and those of episodes and parts, by name. Every name is in
    :data:`headrace.base.types.metrics.REGISTRY`, except the metrics of a user's own loss."""
    trained_tokens: int = 0
    """The number of tokens that carried loss in this step."""
    generated_tokens: int = 0
    """The number of tokens that the engine has sampled since the run started."""
    seconds: float = 0.0
    """The total duration of forward pass, backward pass and update, in seconds."""
    wait_s: float = 0.0
    """How long the learner waited for this step's batch, in seconds."""
    exposed_sync_s: float = 0.0
    """How long the learner was blocked by the sync after the step, in seconds: the copy of its weights."""
    straggler_s: float = 0.0
    """The part of ``wait_s`` after 90% of the episodes of the batch had ended, in seconds."""
    held_back_s: float = 0.0
    """The time since the previous step in which as many groups ran as ``flow.capacity`` allows and no request waited
    for the engine, in seconds."""
    commit_gap_s: float | None = None
    """How long the engine was stopped to commit the latest version, in seconds; ``None`` if no version was committed
    since the previous step."""
    ages: dict[int, int] = {}
    """The number of tokens that carried loss, by age in versions."""
    queue: QueueCounts = QueueCounts()
    """The groups in flight at the end of the step."""
    length_mean: float | None = None
    """The mean number of sampled tokens per episode of the batch; ``None`` for a batch without episodes."""
    dropped_groups: dict[str, int] = {}
    """The number of groups dropped since the run started, by reason."""
    set_aside_episodes: dict[str, int] = {}
    """The number of episodes masked, or left out of groups that were kept, since the run was last started, by
    reason."""
    dropped_tokens: dict[str, int] = {}
    """The number of tokens of trained groups that could not carry loss, since the run was last started, by reason."""
    wasted_tokens: dict[str, int] = {}
    """The number of tokens that were sampled and will not be trained, since the run was last started, by reason:
    tokens of dropped groups, tokens of episodes that were left out, tokens that could not carry loss, and tokens that
    weight updates discarded."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of the time and the tokens of one interval of a run, from which the verdict on the bottleneck is
    made. Accounts of consecutive intervals can be added.

    The busy time of the learner and its waits, by cause, sum to ``seconds``, and so do those of the engine.

    >>> both = Account(seconds=2.0, learner_busy_s=1.0) + Account(seconds=2.0, wasted_tokens={"stale": 3})
    >>> both.learner_idle, both.wasted_tokens
    (0.75, {'stale': 3})
    """

    seconds: float = 0.0
    """The length of the interval, in seconds."""
    engine_busy_s: float = 0.0
    """The time in which the engine had requests and was reading them, running steps or sending tokens. With several
    engines, the mean."""
    prefill_s: float = 0.0
    """The part of ``engine_busy_s`` that was spent on prompts."""
    engine_waits_s: dict[str, float] = {}
    """The idle time of the engine, by the part that was busy meanwhile: a name of :class:`Cause`. With several engines,
    the mean."""
    learner_busy_s: float = 0.0
    """The time in which the learner trained, copied its weights or saved them."""
    learner_waits_s: dict[str, float] = {}
    """The idle time of the learner, by what the learner waited for: a name of :class:`Cause`."""
    controller_busy_s: float = 0.0
    """The time in which the controller's event loop ran; 0 if it was not measured."""
    lanes_s: dict[str, float] = {}
    """The busy time of every lane of the event trace, by the name of the lane."""
    exposed_sync_s: float = 0.0
    """The time in which the learner copied its weights, or waited for a buffer for the copy."""
    straggler_s: float = 0.0
    """The time in which the learner waited for a batch of which 90% of the episodes had ended."""
    held_back_s: float = 0.0
    """The time in which as many groups ran as ``flow.capacity`` allows and no request waited for the engine."""
    observed_s: float = 0.0
    """The time for which the run's processes were measured for the next three fields; 0 if they were not measured."""
    processors_s: float = 0.0
    """The processor time of the run's processes on this machine, divided by the number of processors that they may
    use."""
    used_s: dict[str, float] = {}
    """The processor time, by kind of process."""
    queued_s: dict[str, float] = {}
    """How long a thread was ready to run without a processor, by kind of process. Of all threads of that kind, the
    longest time counts."""
    generated_tokens: int = 0
    """The number of tokens that were sampled for training."""
    trained_tokens: int = 0
    """The number of tokens that carried loss."""
    wasted_tokens: dict[str, int] = {}
    """The number of tokens that were sampled and will never be trained, by reason."""
    aged_tokens: int = 0
    """The number of trained tokens whose ages are summed in ``trained_ages``."""
    trained_ages: int = 0
    """The sum of the ages at which these tokens were trained, in versions."""
    turns_s: float = 0.0
    """The time that steps would have taken, at most, if generation and training took turns instead of overlapping: the
    sum over the steps for which it is known. It assumes that groups that share the engine do not delay each other."""
    turns_least_s: float = 0.0
    """A lower bound of that time. It assumes that a batch uses the engine only after the earlier batches have ended."""
    turned_s: float = 0.0
    """The time that these steps have actually taken."""

    def __add__(self, later: Account) -> Account:
        """Return the account of this interval and the interval of ``later`` together, in which every field is added."""
        return Account(**{
            name: _added(value, getattr(later, name)) for name, value in msgspec.structs.asdict(self).items()
        })  # fmt: skip

    @property
    def engine_idle(self) -> float:
        """Return the fraction of the interval in which the engine had nothing to do."""
        return 1.0 - self.to_fraction(self.engine_busy_s) if self.seconds > 0 else 0.0

    @property
    def learner_idle(self) -> float:
        """Return the fraction of the interval in which the learner neither trained, copied its weights nor saved
        them."""
        return 1.0 - self.to_fraction(self.learner_busy_s) if self.seconds > 0 else 0.0

    def learner_waits(self, cause: str) -> float:
        """Return the fraction of the interval in which the learner waited for ``cause``, a name of :class:`Cause`."""
        return self.to_fraction(self.learner_waits_s.get(cause, 0.0))

    def engine_waits(self, cause: str) -> float:
        """Return the fraction of the interval in which the engine was idle while ``cause``, a name of :class:`Cause`,
        was busy."""
        return self.to_fraction(self.engine_waits_s.get(cause, 0.0))

    def to_fraction(self, part_s: float) -> float:
        """Return ``part_s`` seconds as a fraction of the interval, between 0 and 1; 0 for an empty interval."""
        return min(1.0, max(0.0, part_s / self.seconds)) if self.seconds > 0 else 0.0

    def per_second(self, tokens: int) -> float:
        """Return ``tokens`` as a rate per second; 0 for an empty interval."""
        return tokens / self.seconds if self.seconds > 0 else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the keys of ``summary.json`` that an account determines, with their values. Every view uses this
        method, so that all views agree with the verdict."""
        return {
            "tokens_generated": self.generated_tokens,
            "tokens_trained": self.trained_tokens,
            "wall_s": self.seconds,
            "generated_tok_s": self.per_second(self.generated_tokens),
            "trained_tok_s": self.per_second(self.trained_tokens),
            "engine_idle_frac": self.engine_idle,
            "learner_idle_frac": self.learner_idle,
            "exposed_sync_frac": self.to_fraction(self.exposed_sync_s),
        }


def _added(value: Any, later: Any) -> Any:
    """Return the sum of two numbers, or of two dictionaries of numbers, key by key."""
    if not isinstance(value, dict):
        return value + later
    return {key: value.get(key, 0) + later.get(key, 0) for key in (*value, *later)}


class Cause(enum.StrEnum):
    """A part of the run that can be the reason why the learner or an engine waits."""

    ENGINE = "engine"
    """The learner waits for tokens of its batch, and an engine is busy."""
    LEARNER = "learner"
    """New groups wait for a slot, which an optimizer step frees, and the learner is busy."""
    CONTROLLER = "controller"
    """The controller's event loop is busy: it starts episodes, receives tokens and rewards, assembles batches."""
    ENVIRONMENT = "environment"
    """Environments or agent programs are busy."""
    SCORING = "scoring"
    """Rewards are computed, by scoring workers or judges."""
    TEACHERS = "teachers"
    """Teachers with their own engines are busy."""
    SYNC = "sync"
    """Weights are being transferred, or no buffer is free for them."""
    LEDGER = "ledger"
    """The disk is writing the run's ledger."""
    STOPPED = "stopped"
    """A signal or a debugger has stopped the learner, the controller or all engines."""
    NOBODY = "nobody"
    """No part is busy: a message is between two processes, or a process is ready to run and has no processor."""


class Bound(enum.StrEnum):
    """The bottleneck of a run, as a phrase that a verdict contains."""

    GENERATION = "generation-bound"
    """The engine is busy nearly all the time, or is what the learner mostly waits for."""
    PREFILL = "prefill-bound"
    """The run is generation-bound, and the engine spends most of its time on prompts."""
    STRAGGLERS = "straggler-bound"
    """The learner waits for the last episodes of a batch."""
    CAPACITY = "capacity-bound"
    """The learner waits for the engine, and ``flow.capacity`` prevents more groups from running."""
    LEARNER = "learner-bound"
    """The learner is busy nearly all the time, and the engine is not."""
    CONTROLLER = "controller-bound"
    """The controller is busy nearly all the time, or is what the learner mostly waits for."""
    ENVIRONMENT = "environment-bound"
    """The learner mostly waits while environments are busy and the engine is idle."""
    SCORING = "scoring-bound"
    """The learner mostly waits for rewards."""
    TEACHERS = "teacher-bound"
    """The learner mostly waits for teachers with their own engines."""
    SYNC = "sync-bound"
    """The learner mostly waits for weights."""
    LEDGER = "disk-bound"
    """The learner mostly waits for the disk that contains the ledger."""
    STOPPED = "held up by a stopped process"
    """The learner mostly waits while it, the controller or all engines are stopped by a signal or a debugger."""
    PROCESSORS = "processor-bound"
    """The parts of the run wait for processors that other programs of the machine use."""
    TURNS = "taking turns"
    """The learner waits while the engine is busy, and the engine waits while the learner is busy."""
    BALANCED = "balanced"
    """Engine and learner are both busy nearly all the time."""
    NOTHING = "bound by no single part"
    """No part is busy nearly all the time, and none is what the learner mostly waits for."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The present activity of one loop of the controller: one row of the table that shows which loop waits for which
    part."""

    loop: str
    """The name of the loop: ``rollout``, ``scoring``, ``learner``, ``sync``."""
    state: Literal["busy", "waiting"]
    what: str
    """The work that the loop does, or the event that it waits for, in words."""
    since_s: float
    """How long the present activity has lasted, in seconds."""
    unblocked_by: str = ""
    """The part that can end the wait; empty if the loop is busy."""


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of a run, for a view that is updated once a second."""

    steps_done: int
    """Optimizer steps of the whole run so far."""
    steps_total: int
    """Optimizer steps that the run will have."""
    title: str = ""
    """The name of the run."""
    phase: str = ""
    """The phase of the run: ``starting``, ``evaluating``, ``training``, ``saving``."""
    wall_s: float = 0.0
    """Seconds since the run started."""
    eta_s: float | None = None
    """The estimated number of seconds until the last step; ``None`` while there is no estimate."""
    learner_version: int = -1
    """The version of the learner's weights; −1 before the first version."""
    engine_version: int = -1
    """The version that the engine has committed; −1 before the first version."""
    rewards: tuple[float | None, ...] = ()
    """The mean reward of every step so far."""
    eval_accuracy: float | None = None
    """The latest result of an evaluation; ``None`` before the first evaluation."""
    generated_tok_s: float = 0.0
    """The number of tokens per second that the engine samples, over a recent window."""
    trained_tok_s: float = 0.0
    """The number of tokens per second that the learner trains, over a recent window."""
    queue: QueueCounts = QueueCounts()
    ages: dict[int, int] = {}
    """The number of trained tokens since the run started, by age in versions."""
    throughput: tuple[float, ...] = ()
    """The number of tokens trained per second in every step so far."""
    waited: tuple[float, ...] = ()
    """The fraction of the duration of every step so far for which the learner waited for its batch."""
    account: Account | None = None
    """The account of the time since the first rollout; ``None`` before it."""
    verdict: str = ""
    """The bottleneck of the run, in words; empty while it is unknown."""
    waits: tuple[Wait, ...] = ()
    """The activity of every loop."""
    warnings: tuple[str, ...] = ()
    """The warnings and alarms, the latest last."""
    sample: str = ""
    """A recent completion of the policy. It is a text of a model and therefore not trusted."""
    sample_reward: float | None = None
    """The reward of the sample; ``None`` while it is not scored."""
    figures: str | None = None
    """The main figures of the last step, in words, for a run on given rows, which has no engine and no groups; ``None``
    for a run that samples."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run that is worth one line of text: a refused commit, an evaluation, a checkpoint, a dropped
    group."""

    wall_s: float
    """Seconds since the run started."""
    text: str
    level: Literal["info", "warning"] = "info"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The recovery of a part that died and was restarted, or that was unreachable for a while, without ending the run.

    >>> str(Recovery(part="engine-1", cause="engine-1 (pid 7) was killed by SIGKILL", seconds=3.12, carried_over=14))
    'engine-1 (pid 7) was killed by SIGKILL; it serves again after 3.1 s, 14 sequences continued'
    """

    part: str
    """The name of the part, such as ``engine-1``."""
    cause: str
    """The cause of its death or absence, in words."""
    seconds: float | None
    """Seconds from the failure until the part served again; ``None`` while it does not serve."""
    carried_over: int
    """The number of the part's sequences that continue."""
    lives: bool = False
    """Whether the part is alive but does not receive new weights."""

    def __str__(self) -> str:
        """Return the recovery as one line for people: the cause, and what became of the part and of its sequences."""
        if self.seconds is None and self.lives:
            return (
                f"{self.cause}; it ends its {self.carried_over} sequences and begins no others until a version reaches "
                "it: open the way from the learner to that address"
            )
        if self.seconds is None:
            return f"{self.cause}; it is started again, its {self.carried_over} sequences continue"
        return f"{self.cause}; it serves again after {self.seconds:.1f} s, {self.carried_over} sequences continued"
