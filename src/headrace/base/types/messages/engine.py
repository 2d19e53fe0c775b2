"""What an engine receives."""

from __future__ import annotations

import enum

import msgspec

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.base.types.weights import Interrupt, WeightUpdate


class StaleFork(enum.StrEnum):
    """What to do when other weights than those that computed the parent's cache are in use, at the request or when the
    fork joins the batch. What became of a fork shows in its tokens: they carry the version that computed them, as its
    parent's do."""

    REFUSE = "refuse"
    """The request fails and says so, also where the weights change while it waits."""
    RECOMPUTE = "recompute"
    """The prefix is computed again under the weights now in use."""
    REUSE = "reuse"
    """The prefix's cache is shared as it is, as long as the parent runs. What is not there any more (the parent has
    ended, waits, or has begun again) is computed under the weights in use."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Begin from another sequence's prompt and its first sampled tokens."""

    parent: int
    """The request that is continued, running or ended."""
    at: int
    """How many of its sampled tokens are kept."""
    stale: StaleFork = StaleFork.REFUSE


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to sample."""

    request_id: int
    prompt_ids_T: IntColumn
    """Empty for a fork: the engine knows it."""
    sampling: Sampling
    priority: int = 0
    """Higher ones join first and are preempted last."""
    deadline_s: float | None = None
    """Seconds from its arrival after which it ends with what it has; ``None`` for no deadline."""
    fork: ForkRequest | None = None
    """Continue another sequence instead of beginning from a prompt; ``None`` for a prompt."""
    pinned: bool = False
    """Go on under the weights it began with, whatever is committed meanwhile."""
    answer_ids_T: IntColumn | None = None
    """What it has sampled before and its reader has: it goes on behind that; ``None`` for one that begins."""
    agent: str = ""
    """Whose adapter samples it, of several in training; empty: the policy's."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sample these; all of them join the batch in the same step, in this order."""

    requests: tuple[GenerateRequest, ...]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Withdraw these; what was sampled comes back as a last chunk."""

    request_ids: tuple[int, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a published version next to the engine and verify it, while decoding goes on."""

    call: int
    update: WeightUpdate


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Use a staged version; ``mode`` says from when on, and what becomes of what runs."""

    call: int
    version: int
    mode: Interrupt = Interrupt.INFLIGHT


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The logprob of each of these tokens but the first, under the weights in use, of several adapters the policy's;
    nothing is sampled."""

    call: int
    ids_T: IntColumn
    temperature: float = 1.0
    """Logits are divided by it."""
    kept: KeptSets | None = None
    """Restrict each token's distribution to these."""
    routing: Routing | None = None
    """Send the tokens to these experts."""
    top_k: int = 0
    """How many of the likeliest entries in the place of each token are wanted too."""
    top_below: int = 0
    """Only those of ids below this one; 0: all."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stand still after the present step; requests queue. ``release`` gives the cache's memory back: sequences that
    run go on later from their tokens."""

    call: int
    release: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on."""

    call: int


Message = Generate | Abort | Stage | Commit | ScoreTokens | Pause | Resume | Shutdown
