"""A staleness policy."""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.extend import StalenessPolicy
from headrace.flow.policies.base import Selection


class OneBatch(StalenessPolicy):
    """Never more than one batch in flight: the next one starts when its weights are in use."""

    kind: Literal["one_batch"] = "one_batch"
    """Selects this policy."""
    fixes: ClassVar = {"max_age": 0, "lead": 0}

    def admit(self, state) -> int:
        """As many groups as the batch still lacks."""
        return max(0, state.limits.batch_size - state.num_held)

    def select(self, state) -> Selection:
        """The batch, once it is whole."""
        whole = len(state.ready) == state.limits.batch_size
        return Selection(take=tuple(sorted(state.ready)) if whole else ())
