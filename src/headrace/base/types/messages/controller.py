"""The messages that the controller receives, from all parts of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types import chat
from headrace.base.types.episode import TokenChunk
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import SwapReport, WeightUpdate


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that a part has started and can be used."""

    token: str
    """The run's secret: proves that the sender belongs to this run."""
    pid: int
    facts: dict[str, str | int | float]
    """Facts that the part reports about itself, for people."""


class Working(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sign of life of a learner, or of one rank of it, with its present work. A thread of its own sends it about
    once a second, whatever the learner computes."""

    num_units: int
    """The number of units of work that have ended since the part started: micro-batches, updates, copies of the
    weights."""
    what: str
    """The unit that the part works on; empty while it waits for orders."""
    since_s: float
    """How long the part has worked on the present unit, in seconds."""
    usual_s: float
    """The longest time that recent units of this kind have taken, in seconds; 0 if there was none."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that a part could not carry out an order. ``call`` is ``None`` if it cannot continue at all."""

    call: int | None
    kind: str
    """The name of the error's class in the tree of errors."""
    problem: str
    remedy: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of an engine since it started."""

    version: int = -1
    """The committed version; −1 before the first."""
    busy_s: float = 0.0
    """The time in which the engine worked, in seconds: its steps and, in a process of its own, reading and sending
    messages."""
    prefill_s: float = 0.0
    """The part of the steps' time that went into prompts, in seconds. The time of a step is divided by tokens."""
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    """The number of sequences in the batch now."""
    waiting: int = 0
    """The number of requests that have not joined the batch."""
    restarted: int = 0
    """The number of sequences that began again because of a weight update."""
    preempted: int = 0
    """How often a sequence left the batch because the cache was full; it continued later."""
    cached_tokens: int = 0
    """The number of prompt tokens that the prefix cache served."""
    cache_blocks: int = 0
    """The number of blocks of the key-value cache."""
    cache_blocks_used: int = 0
    """The number of those blocks that running sequences hold."""
    cache_bytes: int = 0
    """The memory of the key-value cache."""
    routing_bytes: int = 0
    """The memory of the recorded experts beside the cache."""
    pinned_bytes: int = 0
    """The memory of weights that are kept for pinned sequences."""
    wasted_tokens: int = 0
    """The number of sampled tokens that a weight update discarded."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens that an engine sampled since its last message."""

    chunks: tuple[TokenChunk, ...]
    stats: EngineStats
    spans: tuple[Span, ...] = ()


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Stage``: the update is next to the engine and its checksums are verified."""

    call: int
    version: int
    seconds: float


class StageOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of staging a version that the learner announced to the engine itself."""

    version: int
    seconds: float
    """How long the staging took, in seconds."""
    failure: Failure | None = None
    """Why the engine refused the version; ``None`` if it is staged."""
    commits: bool = False
    """Whether the engine commits the version without a further order."""


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Commit``: the version is in use."""

    call: int
    report: SwapReport


class ScoresReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``ScoreTokens``: the log-probability of each token. That of the first token is 0."""

    call: int
    logprobs_T: FloatColumn
    ids_TK: npt.NDArray[np.int32] | None = None
    """The likeliest entries at the position of each token, if they were requested."""
    logs_TK: npt.NDArray[np.float32] | None = None
    """The log-probabilities of those entries."""


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Pause`` and ``Resume``."""

    call: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one optimizer step."""

    step: int
    metrics: dict[str, float]
    trained_tokens: int
    """The number of tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """The number of tokens of the batch that could not carry loss, by reason."""
    log_pi_N: FloatColumn
    """log π of each token of the batch under the weights before the step; NaN for tokens that carried no loss."""
    seconds: float
    teacher_scores_N: TeacherScores | None = None
    """The scores of a teacher in the learner's process, for each token; ``None`` if no sampled token was scored."""
    updates: int = 1
    """The number of updates of the weights that were made from the batch."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Train``: one optimizer step is done."""

    call: int
    report: StepReport
    spans: tuple[Span, ...] = ()


class LogprobsReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Logprobs``: log π of every token of the batch; 0 outside its mask."""

    call: int
    logprobs_N: FloatColumn


class SnapshotTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer to ``Publish``: the weights are copied, and the learner can continue."""

    call: int
    seconds: float
    spans: tuple[Span, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The second answer to ``Publish``: the snapshot is hashed and ready to be staged."""

    call: int
    update: WeightUpdate


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Save``: the snapshot is complete on disk, and flushed."""

    call: int
    seconds: float
    spans: tuple[Span, ...] = ()


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that a scoring worker has begun with a call: its time limit runs from now on."""

    call: int


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``ScoreCompletions``: one reward per completion. ``None`` leaves that completion out."""

    call: int
    rewards: tuple[float | None, ...]
    error: str = ""
    """Why there is no reward, with the file and line that raised; empty if there is one."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that the reward function passed to ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """The values that it passed to ``log_extra``: the columns of each completion; empty if it passed none."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request of an episode in an environment worker for a reply of the model."""

    episode: int
    """The call that runs the episode."""
    ask: int
    """The worker's own number of the request, which the reply repeats."""
    messages: tuple[chat.Message, ...] = ()
    tools: tuple[chat.Tool, ...] = ()
    options: chat.ChatOptions = chat.ChatOptions()
    prompt_ids_T: IntColumn | None = None
    """All tokens that the model is to read, in place of messages."""


class EpisodeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``RunEpisode``: the episode has ended or failed."""

    call: int
    reward: float | None = None
    """The reward of the episode; ``None`` if the environment did not give one."""
    turn_rewards: dict[int, float] = {}
    """The parts of the reward that were earned in single turns, by turn."""
    agent_rewards: dict[str, float] = {}
    """The reward of each agent; empty if all agents share the episode's."""
    trained: tuple[int, ...] | None = None
    """The sampled turns that carry loss; ``None`` for all of them."""
    reason: str = ""
    """The counted reason of a failure; empty if the episode did not fail."""
    problem: str = ""
    """The failure in words, with the file and line that raised."""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The periodic sign of life of an environment worker, or of a machine that has joined."""

    blocked_by: int = -1
    """The episode whose code has blocked the worker's event loop for too long; −1: none."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Do``: a supervisor on a machine that has joined has done its task."""

    call: int
    answer: bytes | int | float
    """The result, as JSON or as a number."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that a machine that has joined wants to leave: its present work may end, and it gets no more."""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that the machine confirms its end."""


Answer = (
    Staged
    | Committed
    | ScoresReply
    | Paused
    | Trained
    | LogprobsReply
    | SnapshotTaken
    | Published
    | Saved
    | Started
    | Scored
    | EpisodeDone
    | Done
)
"""Every message that answers an order, matched by its ``call``."""
Timed = Chunks | Trained | SnapshotTaken | Saved
"""Every message whose ``spans`` say what the part was busy with."""
Message = Ready | Working | Failure | Chunks | StageOutcome | ModelQuery | Alive | Leaving | Left | Answer
