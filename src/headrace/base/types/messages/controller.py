"""What the controller receives, from whichever part."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types import chat
from headrace.base.types.episode import StopReason
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.taught import Taught
from headrace.base.types.tokens import FloatColumn, IntColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import SwapReport, WeightUpdate


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part has started and can be used."""

    token: str
    """The run's secret: proves that the sender belongs to this run."""
    pid: int
    facts: dict[str, str | int | float]
    """What the part says of itself, for people."""


class Working(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A learner, or one rank of it, lives, and says what it is at. It comes about once a second from a thread of its
    own, whatever the learner computes."""

    num_units: int
    """Units of work that have ended since it started: micro-batches, updates, copies of the weights."""
    what: str
    """The unit that it is at; empty while it waits for orders."""
    since_s: float
    """For how long it has been at it, in seconds."""
    usual_s: float
    """How long units of this kind have taken at most of late, in seconds; 0 where there was none."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part could not do what was asked; ``call`` is ``None`` when it cannot go on at all."""

    call: int | None
    kind: str
    """Class name in the tree of errors."""
    problem: str
    remedy: str


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sequence since its last chunk."""

    request_id: int
    ids_T: IntColumn
    logprobs_T: FloatColumn
    versions_T: IntColumn
    stop_reason: StopReason | None = None
    """Set on the last chunk."""
    restarted: bool = False
    """The sequence has begun again: forget its tokens before this chunk."""
    kept: KeptSets | None = None
    """If asked for."""
    entropies_T: FloatColumn | None = None
    """If asked for."""
    prompt_routing: Routing | None = None
    """If asked for, on the first chunk."""
    routing: Routing | None = None
    """If asked for; tokens are held back until theirs is known, so only the last one of a sequence may lack it."""
    error: str = ""
    """Why the request was refused or failed; set on the last chunk only."""
    error_kind: str = ""
    """Class name in the tree of errors, where there is an error."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an engine since it started."""

    version: int = -1
    """The committed version; −1 before the first."""
    busy_s: float = 0.0
    """Time in which it worked: steps and, of an engine in a process of its own, what it reads and sends around them."""
    prefill_s: float = 0.0
    """Of the steps, on prompts: a step's time is shared out by its tokens."""
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    """Sequences in the batch now."""
    waiting: int = 0
    """Requests that have not joined the batch."""
    restarted: int = 0
    """Sequences that began again because of a weight update."""
    preempted: int = 0
    """Times a sequence left the batch because the cache was full, and went on later."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache served."""
    cache_blocks: int = 0
    """Blocks of the key-value cache."""
    cache_blocks_used: int = 0
    """Of those, how many running sequences hold."""
    cache_bytes: int = 0
    """Memory of the key-value cache."""
    routing_bytes: int = 0
    """Memory of the experts that are stored beside it."""
    pinned_bytes: int = 0
    """Memory of weights that are kept for pinned sequences."""
    wasted_tokens: int = 0
    """Sampled tokens that a weight update threw away."""


class Chunks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine produced since its last message."""

    chunks: tuple[Chunk, ...]
    stats: EngineStats
    spans: tuple[Span, ...] = ()


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The update is next to the engine and its checksums hold."""

    call: int
    version: int
    seconds: float


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The version is in use."""

    call: int
    report: SwapReport


class ScoresAre(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The logprob of each token, the first's being 0."""

    call: int
    logprobs_T: FloatColumn
    ids_TK: npt.NDArray[np.int32] | None = None
    """The likeliest entries in the place of each token, if asked for."""
    logs_TK: npt.NDArray[np.float32] | None = None
    """Their log-probabilities."""


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine stands still, or goes on again."""

    call: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    step: int
    metrics: dict[str, float]
    trained_tokens: int
    """Tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """Tokens of the batch that could carry none, by reason."""
    log_pi_N: FloatColumn
    """log π of each token of the batch as the step began; NaN for those that carried no loss."""
    seconds: float
    taught_N: Taught | None = None
    """What a teacher beside the learner says of each; ``None`` where none was asked about sampled tokens."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One optimizer step is done."""

    call: int
    report: StepReport
    spans: tuple[Span, ...] = ()


class LogprobsAre(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """log π for every token of the batch; 0 outside its mask."""

    call: int
    logprobs_N: FloatColumn


class SnapshotTaken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The weights are copied; the learner is free to go on."""

    call: int
    seconds: float
    spans: tuple[Span, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The snapshot is hashed and ready to be staged."""

    call: int
    update: WeightUpdate


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The snapshot is on disk, whole and flushed."""

    call: int
    seconds: float
    spans: tuple[Span, ...] = ()


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A scoring worker has begun with a call: until then it waited its turn, from here its time runs."""

    call: int


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One reward per completion; ``None`` is the function's own word for 'do not count this one'."""

    call: int
    rewards: tuple[float | None, ...]
    error: str = ""
    """Why there is no reward, with the file and line that raised; empty if there is one."""
    metrics: dict[str, tuple[float, ...]] = {}
    """What the function gave to ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """What it gave to ``log_extra``: for each completion its columns; empty where it gave nothing."""


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An episode that runs in an environment worker wants an answer of the model."""

    episode: int
    """The call that runs it."""
    ask: int
    """A number of the worker's own, by which it knows the answer."""
    messages: tuple[chat.Message, ...] = ()
    tools: tuple[chat.Tool, ...] = ()
    options: chat.ChatOptions = chat.ChatOptions()
    prompt_ids_T: IntColumn | None = None
    """Everything that the model is to read, in place of messages."""


class EpisodeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An environment has ended an episode, or could not."""

    call: int
    reward: float | None = None
    """What it earned; ``None`` where the environment did not say."""
    turn_rewards: dict[int, float] = {}
    """What of it was earned at single turns."""
    agent_rewards: dict[str, float] = {}
    """What each agent earned, where that is told apart."""
    trained: tuple[int, ...] | None = None
    """The sampled turns that carry loss; ``None``: all of them."""
    reason: str = ""
    """Why it failed; empty where it did not."""
    problem: str = ""
    """The same in words, with the file and line that raised."""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An environment worker, or a machine that has joined, is alive; told now and then."""

    blocked_by: int = -1
    """The episode whose code has kept the worker's loop from turning for too long; −1: none."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A keeper on a machine that has joined has done what it was to do."""

    call: int
    answer: bytes | int | float
    """JSON, or a number."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A machine that has joined wants to go: what runs there may end, nothing more is to begin."""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It has heard that it may go, or has to."""


Answer = (
    Staged
    | Committed
    | ScoresAre
    | Paused
    | Trained
    | LogprobsAre
    | SnapshotTaken
    | Published
    | Saved
    | Started
    | Scored
    | EpisodeDone
    | Done
)
"""What answers an order, by its ``call``."""
Timed = Chunks | Trained | SnapshotTaken | Saved
"""What tells with its ``spans`` what the part was busy with."""
Message = Ready | Working | Failure | Chunks | ModelQuery | Alive | Leaving | Left | Answer
