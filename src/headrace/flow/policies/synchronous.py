"""Generation and training take turns: bit for bit the weights of a plain serial loop."""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.lockstep import admit_whole_batch, select_whole_batch
from headrace.flow.state import FlowState


class Synchronous(StalenessPolicy):
    """A batch starts when the weights that the last one made are committed; no token is trained at an age above 0."""

    kind: Literal["synchronous"] = "synchronous"
    fixes: ClassVar = {"max_age": 0, "lead": 0, "order": "strict", "capacity": None}

    def admit(self, state: FlowState) -> int:
        return admit_whole_batch(state, ahead=0)

    def select(self, state: FlowState) -> Selection:
        return select_whole_batch(state)
