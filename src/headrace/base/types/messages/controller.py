"""The messages that the controller receives, from all parts of a run.

A *part* is a process of the run: an engine, the learner or one of its ranks, a scoring worker, an environment worker, a
joined machine. ``call`` is the number of the order that a message answers, ``seconds`` the time that carrying it out
took, and ``spans`` the activities of the part since its last message.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types import chat
from headrace.base.types.episode import EpisodeGraph, TokenChunk
from headrace.base.types.messages.parts import MessagePart
from headrace.base.types.scored import TokenResults
from headrace.base.types.stored import Stored
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import SwapReport, WeightUpdate


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a part: it has started and can be used."""

    token: str
    """The run's secret token, which proves that the sender belongs to this run."""
    pid: int
    """The id of the process."""
    facts: dict[str, str | int | float]
    """Facts that the part reports about itself, for people."""


class Working(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sign of life of a learner, or of one of its ranks, with its present work. A separate thread sends it about
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
    """The message that a part could not carry out an order."""

    call: int | None
    """The number of the order; ``None`` if the part cannot continue at all."""
    kind: str
    """The name of the error's class in the tree of errors."""
    problem: str
    """What is wrong, in words."""
    remedy: str
    """What the user can do about it, in words."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of an engine since it started, and its state at the time of the message."""

    version: int = -1
    """The version of the weights in use; −1 before the first."""
    busy_s: float = 0.0
    """The time in which the engine worked, in seconds: its steps and, in a process of its own, reading and sending
    messages."""
    prefill_s: float = 0.0
    """The part of the steps' time that went into prompts, in seconds. The time of a step is divided in proportion to
    its tokens."""
    steps: int = 0
    """The number of steps: passes over the batch of running sequences."""
    generated_tokens: int = 0
    """The number of tokens that were sampled."""
    prompt_tokens: int = 0
    """The number of prompt tokens of the requests that have joined the batch."""
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
    """The memory of former weights that are kept for sequences which must end under the weights they began with."""
    wasted_tokens: int = 0
    """The number of sampled tokens that a weight update discarded."""
    drafted_tokens: int = 0
    """The number of tokens that speculation drafted."""
    accepted_tokens: int = 0
    """The number of those that were drawn as drafted; each spared its sequence a pass."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens that an engine sampled since its last message, with its counters."""

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
    """The answer to ``Commit``: the version is in use. The report gives the costs of the commit."""

    call: int
    report: SwapReport


class ScoresReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``ScoreTokens``, from an engine: the log-probability of each of the T tokens. That of the first
    token is 0."""

    call: int
    logprobs_T: FloatColumn
    ids_TK: npt.NDArray[np.int32] | None = None
    """The K likeliest vocabulary entries at the position of each token; ``None`` if they were not requested."""
    logs_TK: npt.NDArray[np.float32] | None = None
    """The log-probabilities of those entries; ``None`` if they were not requested."""


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer of an engine to ``Pause`` and to ``Resume``: it has paused, or continues."""

    call: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one optimizer step on a batch of N tokens, as the learner reports it."""

    step: int
    """The number of the step."""
    metrics: dict[str, float]
    """The metrics of loss, corrections and optimizer, by name."""
    trained_tokens: int
    """The number of tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """The number of tokens of the batch that could not carry loss, by reason."""
    log_pi_N: FloatColumn
    """log π of each token of the batch under the weights before the step; NaN for tokens that carried no loss. Empty
    where ``learned`` has it."""
    seconds: float
    """How long forward pass, backward pass and update took, in seconds."""
    teacher_scores_N: TeacherScores | None = None
    """The log-probabilities that a teacher in the learner's process gives to the N tokens; ``None`` if it scored no
    sampled token."""
    updates: int = 1
    """The number of updates of the weights that were made from the batch."""
    problems: tuple[str, ...] = ()
    """What went wrong in the step without ending it, each in words."""
    ages: dict[int, int] = {}
    """The number of tokens of the batch that carry loss, by age in versions; empty unless the learner has laid the
    batch out."""
    learned: TokenResults | Stored | None = None
    """The results of the tokens that carried loss, or where they lie in the store of the run; ``None`` unless the
    learner has laid the batch out."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Train``: one optimizer step is done."""

    call: int
    report: StepReport
    spans: tuple[Span, ...] = ()


class LogprobsReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Logprobs``: log π, the log-probability under the learner's present weights, of each of the N
    tokens of the batch; 0 outside its mask."""

    call: int
    logprobs_N: FloatColumn


class SnapshotTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer to ``Publish`` and to ``Save``: the weights are copied into the buffer, or what the checkpoint
    holds is copied or already written, and the learner can continue to train."""

    call: int
    seconds: float
    spans: tuple[Span, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The second answer to ``Publish``: the copied weights are hashed, and engines can stage them."""

    call: int
    update: WeightUpdate


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The second answer to ``Save``: the checkpoint is complete on disk, and flushed."""

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
    """The reward of each completion, in the order of the request; ``None`` for one without a reward."""
    error: str = ""
    """Why there are no rewards, with the file and line that raised; empty if there are."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that the reward function passed to ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """The values that the reward function passed to ``log_extra``: one dictionary of columns for each completion; empty
    if it passed none."""
    errors: tuple[str, ...] = ()
    """Where the completions were scored one by one: for each, why it has no reward, or an empty text; empty if all have
    been scored, or were scored at once."""
    mean_s: float = math.inf
    """Mean seconds of a call of the reward function in this worker; infinite if they are not measured."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request of an environment worker for a reply of the model: an episode that runs there needs one."""

    episode: int
    """The number of the call that runs the episode in the worker."""
    ask: int
    """The worker's own number of this request, which the reply repeats."""
    messages: tuple[chat.Message, ...] = ()
    tools: tuple[chat.Tool, ...] = ()
    options: chat.ChatOptions = chat.ChatOptions()
    prompt_ids_T: IntColumn | None = None
    """All tokens that the model is to read, instead of messages; ``None`` if messages are given."""


class EpisodeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``RunEpisode``: the episode has ended or failed."""

    call: int
    reward: float | None = None
    """The reward of the episode; ``None`` if the environment did not give one."""
    turn_rewards: dict[int, float] = {}
    """The parts of the reward that were earned in single turns, by the index of the turn."""
    agent_rewards: dict[str, float] = {}
    """The reward of each agent; empty if all agents share the episode's."""
    trained: tuple[int, ...] | None = None
    """The indices of the sampled turns that carry loss; ``None`` for all of them."""
    turn_extra: dict[int, dict[str, str | float]] = {}
    """The columns that the environment has recorded about single turns, by the index of the turn; by -1, about the last
    answer."""
    reason: str = ""
    """The short name under which the run counts the failure; empty if the episode did not fail."""
    problem: str = ""
    """The failure in words, with the file and line that raised; empty if the episode did not fail."""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The periodic sign of life of an environment worker, or of a machine that has joined."""

    blocked_by: int = -1
    """The call of the episode whose code has blocked the worker's event loop for too long; −1 if none has."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Do``: a supervisor, which manages one process on a machine that has joined, has done its task."""

    call: int
    answer: bytes | int | float
    """The result, as JSON or as a number."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message that a machine that has joined wants to leave the run: its present work may end, and it gets no
    more."""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The message with which a machine that has joined confirms that it has left the run."""


class EpisodesEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The report of a rollout shard on episodes that have ended together; it answers ``StartEpisodes`` in parts."""

    call: int
    """The number of that order."""
    episodes: tuple[EpisodeGraph, ...]


class TurnsGrown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens of running turns that a rollout shard wants to be recorded, so that a crash does not lose them."""

    parts: tuple[TokenChunk, ...]


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A note of a rollout shard on something that is unusual but not an error."""

    text: str


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
Divided = Trained | LogprobsReply
"""The answers that travel in parts, since they may be of any size."""
Timed = Chunks | Trained | SnapshotTaken | Saved
"""Every message whose ``spans`` say what the part was busy with."""
Message = (
    Ready
    | Working
    | Failure
    | Chunks
    | StageOutcome
    | ModelQuery
    | Alive
    | Leaving
    | Left
    | EpisodesEnded
    | TurnsGrown
    | Noted
    | MessagePart
    | Answer
)
