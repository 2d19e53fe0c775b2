"""The state of one request in the engine.

                  join                            preempted, or requeued
add ──▶ waiting ───────▶ in a row of the batch ───────────────────────┐
           ▲                     │                                     │
           │                     └──▶ ended (remembered for forks)     │
           └──────────────── keeps its answer, goes to the front ◀─────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.base.types.columns import IntColumn
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.native.blocks import Chain

NO_ROW = -1
"""The row of a sequence that is in no row, because it waits or has ended."""
Kept = tuple[IntColumn, int, int]
"""The kept-set of a token: the ids of all kept-sets of its step, and the start and end of its own among them."""
WITH_ROUTING = 1
"""The salt of blocks beside which routing is stored."""
_ADAPTERS = 2
"""The factor of the adapter's index in a salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """The sampled tokens of a sequence that has left its row, and waits to join the batch again."""

    tokens: Tokens
    """The tokens, without kept-sets and routing, which are stored elsewhere."""
    num_flushed: int
    """How many of these tokens have been sent."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request, and the engine's state of it besides the numbers in its row of the batch. The intake makes it; the
    scheduler moves it between the queue and the rows."""

    request: GenerateRequest
    given_ids_T: IntColumn
    """The tokens that it begins with: its prompt, or those that a fork keeps of its parent."""
    num_prompt: int
    """How many of these are a prompt, which no engine sampled."""
    arrival: int
    """The number of requests before it."""
    deadline_s: float
    """The end of its time, on the engine's clock; infinite for none."""
    adapter: int = 0
    """The index of the adapter that computes it."""
    row: int = NO_ROW
    """Its row in the batch; ``NO_ROW`` while it waits or after it has ended."""
    answer: FinishedSequence | None = None
    """The answer of a waiting sequence that had begun; else ``None``."""
    chain: Chain = field(default_factory=lambda: Chain(NOT_SAMPLED))
    """Its place in the prefix cache, and the version of its cached context; new each time it joins."""
    pin: int | None = None
    """The version that it is pinned to; ``None`` while it has none."""
    parent: Sequence | None = None
    """The sequence whose blocks a fork or a sibling may share when it joins, if the parent still runs; else
    ``None``."""
    reuses_stale: bool = False
    """Whether it may share blocks of its parent that other weights computed."""
    parent_ids_T: IntColumn | None = None
    """All tokens of the parent, for a fork that has not joined: the prefix cache may have some of their blocks. Else
    ``None``."""
    required_version: int | None = None
    """The only version that may compute it, for a fork that has not joined and refuses other weights than those of its
    parent's cache; else ``None``."""
    border: bytes = b""
    """The digest of the newest snapshot of its state that was taken while it decoded; empty for none."""
    kept: list[Kept] = field(default_factory=list)
    """One kept-set per token since the last chunk, if it records them."""
    top: list[TopScores] = field(default_factory=list)
    """The likeliest entries of each token since the last chunk, if it records them."""
    unreported: bool = True
    """Whether no chunk has been sent since it began or was restarted."""
    restarted: bool = False
    """Whether it has lost tokens that were sent, and no chunk has reported that yet."""

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of the queue. The smallest joins first and is preempted last."""
        return -self.request.priority, self.arrival

    @property
    def max_length(self) -> int:
        """The most tokens that it can have: those that it begins with, and the longest answer that its request
        allows."""
        return len(self.given_ids_T) + self.request.sampling.max_new_tokens

    @property
    def salt(self) -> int:
        """A number for the adapter and the routing of its blocks: only blocks of the same salt can be shared."""
        return _ADAPTERS * self.adapter + (WITH_ROUTING if self.request.sampling.record_routing else 0)

    def ids(self) -> IntColumn:
        """Return the ids of all tokens of a waiting sequence: those that it began with, then those of its answer. While
        it is in a row, the row has its tokens."""
        if self.answer is None:
            return self.given_ids_T
        return np.concatenate([self.given_ids_T, self.answer.tokens.ids_T])

    def restart(self) -> int:
        """Discard the answer of a waiting sequence, so that it begins again under new weights, and return how many
        tokens it had. If some were sent, its next chunk says that they are void."""
        wasted = 0 if self.answer is None else len(self.answer.tokens)
        self.restarted |= not self.unreported or (self.answer is not None and self.answer.num_flushed > 0)
        self.answer, self.unreported = None, True
        self.kept.clear()
        self.top.clear()
        return wasted
