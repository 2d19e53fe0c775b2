"""The state of one request in the embedded engine, from its admission to its end.

                  join                            preempted, or requeued
add ──▶ waiting ───────▶ in a row of the batch ───────────────────────┐
           ▲                     │                                     │
           │                     └──▶ ended (recorded for forks)       │
           └──────────────── keeps its answer and its rank ◀───────────┘
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
"""The row number of a sequence without a row, because it waits or has ended."""
Kept = tuple[IntColumn, int, int]
"""The kept-set of a token: the kept ids of all rows of its step, and the start and end of its own ids among them."""
WITH_ROUTING = 1
"""The summand of a salt for blocks whose routing is stored."""
_ADAPTERS = 2
"""The factor of the adapter's index in a salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """The sampled tokens of a sequence that has left its row, and waits to join the batch again."""

    tokens: Tokens
    """The tokens, without kept-sets (which are in :attr:`Sequence.kept`) and without routing."""
    num_flushed: int
    """The number of these tokens that have been sent."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request and its state in the engine, besides the numbers in its row of the batch. The intake creates it; the
    scheduler moves it between the queue and the rows."""

    request: GenerateRequest
    given_ids_T: IntColumn
    """The tokens with which the sequence begins: its prompt, or the tokens that a fork keeps of its parent."""
    num_prompt: int
    """The number of given tokens that belong to the prompt, which no engine sampled."""
    arrival: int
    """The number of requests that the engine admitted before this one."""
    deadline_s: float
    """The deadline of the request, in seconds of the engine's clock; infinite if it has none."""
    adapter: int = 0
    """The index of the adapter that computes the sequence."""
    row: int = NO_ROW
    """The row of the sequence in the batch; ``NO_ROW`` while it waits or after it has ended."""
    answer: FinishedSequence | None = None
    """The sampled tokens of a waiting sequence that has sampled some; else ``None``."""
    chain: Chain = field(default_factory=lambda: Chain(NOT_SAMPLED))
    """The prefix that the prefix cache has processed, and the version of the cached context; new at each join."""
    pin: int | None = None
    """The version to which the sequence is pinned; ``None`` if it is not pinned."""
    parent: Sequence | None = None
    """The sequence whose blocks a fork or a sibling may share when it joins, if the parent still runs; else
    ``None``."""
    reuses_stale: bool = False
    """Whether the sequence may share blocks of its parent that other weights computed."""
    parent_ids_T: IntColumn | None = None
    """All tokens of the parent, for a fork that has not joined: the prefix cache may have some of their blocks. Else
    ``None``."""
    required_version: int | None = None
    """The only version that may compute a fork that has not joined and refuses other weights than the weights of its
    parent's cache; else ``None``."""
    border: bytes = b""
    """The digest of the newest snapshot of its state that was taken while it decoded; empty if there is none."""
    kept: list[Kept] = field(default_factory=list)
    """One kept-set per token since the last chunk, if the request records them."""
    top: list[TopScores] = field(default_factory=list)
    """The likeliest entries of each token since the last chunk, if the request records them."""
    unreported: bool = True
    """Whether no chunk has been sent since the sequence began or was restarted."""
    restarted: bool = False
    """Whether a restart has made sent tokens void, and no chunk has reported this yet."""

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of the queue. The smallest joins first and is preempted last."""
        return -self.request.priority, self.arrival

    @property
    def max_length(self) -> int:
        """The most tokens that the sequence can have: its given tokens, and the longest answer that its request
        allows."""
        return len(self.given_ids_T) + self.request.sampling.max_new_tokens

    @property
    def salt(self) -> int:
        """A number for the adapter and the recording of routing: only sequences with the same salt can share blocks."""
        return _ADAPTERS * self.adapter + (WITH_ROUTING if self.request.sampling.record_routing else 0)

    def ids(self) -> IntColumn:
        """Return the ids of all tokens of a waiting sequence: its given tokens, then its answer. The tokens of a
        running sequence are in its row (:class:`~headrace.engine.native.rows.Rows`)."""
        if self.answer is None:
            return self.given_ids_T
        return np.concatenate([self.given_ids_T, self.answer.tokens.ids_T])

    def restart(self) -> int:
        """Discard the answer of a waiting sequence, so that it starts again under new weights, and return the number of
        discarded tokens. If some were sent, the next chunk reports that they are void."""
        num_wasted = 0 if self.answer is None else len(self.answer.tokens)
        self.restarted |= not self.unreported or (self.answer is not None and self.answer.num_flushed > 0)
        self.answer, self.unreported = None, True
        self.kept.clear()
        self.top.clear()
        return num_wasted
