"""One request on its way through the engine.

                  join                         preempted, or made to queue again
add ──▶ waiting ───────▶ in a row of the batch ───────────────────────┐
           ▲                     │                                     │
           │                     └──▶ ended (remembered for forks)     │
           └──────────────── keeps its answer, goes to the front ◀─────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.native.blocks import Chain

NO_ROW = -1
Kept = tuple[IntColumn, int, int]
"""Where a token's kept-set stands: the ids of all that were drawn in its step, and from where to where."""
WITH_ROUTING = 1
"""The salt of blocks beside which routing is stored."""
_ADAPTERS = 2
"""From here on a salt counts the adapters that compute blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """What a sequence that has left its row had sampled."""

    ids_T: IntColumn
    logprobs_T: FloatColumn
    versions_T: IntColumn
    entropies_T: FloatColumn
    """0 where they are not recorded."""
    num_flushed: int
    """Of these, how many its reader has."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request, and what the engine must know of it besides the numbers in its row."""

    request: GenerateRequest
    given_ids_T: IntColumn
    """What it begins with: its prompt, or what a fork keeps of its parent."""
    num_prompt: int
    """Of these, how many nobody sampled."""
    arrival: int
    """Counts up with every request."""
    deadline_s: float
    """On the clock; infinite for none."""
    adapter: int = 0
    """The place among the engine's of the adapter that samples it."""
    row: int = NO_ROW
    answer: FinishedSequence | None = None
    """Of one that waits, if it had begun; else ``None``."""
    chain: Chain = field(default_factory=lambda: Chain(NOT_SAMPLED))
    """What the prefix cache knows of it, and the version of its cached context; new each time it joins."""
    pin: int | None = None
    """The version it stays under; ``None`` while it has none."""
    parent: Sequence | None = None
    """Of a fork or a sibling that has not joined: whose blocks it may share if that one runs; else ``None``."""
    reuses: bool = False
    """Whether it may share them even if other weights computed them."""
    lineage_T: IntColumn | None = None
    """Of a fork that has not joined: all tokens of its parent, of whose blocks the prefix cache may have some; else
    ``None``."""
    insists: int | None = None
    """Of a fork that has not joined, and that other weights than those of its parent's cache must not go on with: their
    version; else ``None``."""
    kept: list[Kept] = field(default_factory=list)
    """One per token since the last chunk, if it records them."""
    silent: bool = True
    """No chunk of it has been sent since it began."""
    restarted: bool = False
    """It has lost tokens that its reader has, and no chunk has said so yet."""

    @property
    def rank(self) -> tuple[int, int]:
        """The smallest joins first and is preempted last."""
        return -self.request.priority, self.arrival

    @property
    def longest(self) -> int:
        """How many tokens it may come to."""
        return len(self.given_ids_T) + self.request.sampling.max_new_tokens

    @property
    def salt(self) -> int:
        """What its blocks must have beside them, and whose they are."""
        return _ADAPTERS * self.adapter + (WITH_ROUTING if self.request.sampling.record_routing else 0)

    def ids(self) -> IntColumn:
        """All tokens of one that waits."""
        if self.answer is None:
            return self.given_ids_T
        return np.concatenate([self.given_ids_T, self.answer.ids_T])

    def begin_again(self) -> int:
        """Forget the answer of one that waits; how many tokens it was."""
        wasted = 0 if self.answer is None else len(self.answer.ids_T)
        self.restarted |= not self.silent or (self.answer is not None and self.answer.num_flushed > 0)
        self.answer, self.silent = None, True
        self.kept.clear()
        return wasted
