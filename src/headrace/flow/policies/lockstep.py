"""Two staleness policies that generate one whole batch after the other.

With ``synchronous``, generation and training alternate, and the weights are bit for bit equal to the weights of a plain
serial loop. With ``one_ahead``, one batch is generated while the batch before it is trained. The *age* of a token is
the learner's version when it trains the token, minus the version that sampled the token.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.deadlines import select_earliest
from headrace.flow.state import FlowState


def admit_whole_batch(state: FlowState, *, ahead: int) -> int:
    """Return how many groups the next batch still lacks, if the committed version is at most ``ahead`` steps behind the
    step of this batch; otherwise 0.

    Every group that starts is in the batch of step k = ``free_step`` (the first step without a batch), and its tokens
    are sampled by versions v ≥ k − ``ahead``. So no token is trained at an age above ``ahead``.
    """
    if state.free_step > state.version + ahead:
        return 0
    return max(0, min(state.limits.batch_size - (state.num_open - state.num_waiting), state.free_capacity))


def select_whole_batch(state: FlowState) -> Selection:
    """Return the next batch if all of its groups are ready; otherwise an empty selection."""
    chosen = state.replayed or select_earliest(state) or ()
    return Selection(take=tuple(sorted(chosen)))


class Synchronous(StalenessPolicy):
    """A policy that starts the groups of a batch when the weights of the previous step are committed, so that every
    token is trained at age 0."""

    kind: Literal["synchronous"] = "synchronous"
    fixes: ClassVar = {"max_age": 0, "lead": 0, "order": "strict", "capacity": None}
    """The settings of the flow that follow from the policy and cannot have another value."""

    def admit(self, state: FlowState) -> int:
        """Return how many groups of the next batch may start now: 0 until the weights of the previous step are
        committed, then all groups that the batch lacks."""
        return admit_whole_batch(state, ahead=0)

    def select(self, state: FlowState) -> Selection:
        """Return the next batch if all of its groups are ready."""
        return select_whole_batch(state)


class OneAhead(StalenessPolicy):
    """A policy that starts the groups of a batch when the batch before it is complete and the committed version is at
    most one step behind, so that no token is trained at an age above 1."""

    kind: Literal["one_ahead"] = "one_ahead"
    fixes: ClassVar = {"max_age": 1, "lead": 1, "order": "strict", "capacity": None}
    """The settings of the flow that follow from the policy and cannot have another value."""

    def admit(self, state: FlowState) -> int:
        """Return how many groups of the next batch may start now: all groups that the batch lacks if the committed
        version is at most one step behind its step, otherwise 0."""
        return admit_whole_batch(state, ahead=1)

    def select(self, state: FlowState) -> Selection:
        """Return the next batch if all of its groups are ready."""
        return select_whole_batch(state)
