"""One batch is generated while the one before it is trained: the classic step off."""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.lockstep import admit_whole_batch, select_whole_batch
from headrace.flow.state import FlowState


class OneAhead(StalenessPolicy):
    """A batch starts when the one before it is complete, and waits for its last group; no token is trained at an age
    above 1."""

    kind: Literal["one_ahead"] = "one_ahead"
    fixes: ClassVar = {"max_age": 1, "lead": 1, "order": "strict", "capacity": None}

    def admit(self, state: FlowState) -> int:
        return admit_whole_batch(state, ahead=1)

    def select(self, state: FlowState) -> Selection:
        return select_whole_batch(state)
