"""The policy ``unbounded``: generation runs ahead as far as ``flow.lead`` allows, whatever the versions, and groups
that have become too old are treated in one of three ways (``stale``):

``reject``      Groups that would be trained at an age above the bound are dropped; with ``per = "token"`` only the
                tokens that are too old carry no loss. It is simple, but wastes generated tokens, and it mostly drops
                long answers, because those are the old ones.
``drop_oldest`` Generation never waits for training: finished groups do not use its slots. If more than ``flow.lead``
                batches of them are ready, the oldest are dropped, and so are groups older than the bound.
``wait``        No group is dropped. A group starts if all groups in flight can still be trained in time, judged by the
                versions of their tokens; training waits for the group that is due. This runs as far ahead as the bound
                allows.

In each mode, no token is trained at an age above the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import ClassVar, Literal

from headrace.base.errors import ConfigError
from headrace.flow.policies.base import DISPLACED, STALE, Selection, StalenessPolicy
from headrace.flow.policies.deadlines import num_admissible, select_earliest, select_earliest_in_time, select_in_order
from headrace.flow.state import FlowState


class Unbounded(StalenessPolicy):
    """The policy that starts groups whatever the versions, and drops, masks or waits for groups that become too old. No
    token is trained at an age above the bound."""

    kind: Literal["unbounded"] = "unbounded"
    stale: Literal["reject", "drop_oldest", "wait"] = "reject"
    """The treatment of groups that are too old, or would become too old: ``reject``, ``drop_oldest`` or ``wait``."""
    per: Literal["group", "token"] = "group"
    """The unit that ``reject`` removes. ``group``: one token that is too old drops its whole group. ``token``: only
    tokens that are too old carry no loss, and the rest of the group is trained unless no token is left."""
    paced: ClassVar[bool] = False
    """Generation may run ahead as far as ``flow.lead`` says, whatever the versions."""

    @property
    def drops_stale(self) -> bool:
        """Return whether groups that have become too old are dropped: in every mode but ``wait``."""
        return self.stale != "wait"

    @property
    def masks_stale(self) -> bool:
        """Return whether tokens that are too old are masked (carry no loss) while the rest of their group is
        trained."""
        return self.per == "token"

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for settings that contradict each other: masking by token in
        another mode than ``reject``, and strict order (``strict``) in the mode ``wait``."""
        if self.per == "token" and self.stale != "reject":
            raise ConfigError(
                f"flow.policy.per='token' has no effect with flow.policy.stale={self.stale!r}",
                remedy="set flow.policy.stale = 'reject', or leave flow.policy.per out",
            )
        if self.stale == "wait" and strict:
            raise ConfigError(
                "flow.order='strict' with flow.policy.stale='wait' would wait for a group that is not due while "
                "another one is",
                remedy="set flow.order = 'ready_first', or flow.policy = 'bounded' with strict order",
            )

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now: the number of free slots, limited by the capacity and, in the mode
        ``wait``, by the number of groups that can be trained in time. In the mode ``drop_oldest``, ready groups occupy
        no slot."""
        slots = (state.limits.run_ahead + 1) * state.limits.batch_size
        num_occupied = state.num_running if self.stale == "drop_oldest" else state.num_held
        count = min(slots - num_occupied, state.free_capacity)
        return max(0, min(count, num_admissible(state)) if self.stale == "wait" else count)

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """Return the numbers of the ready groups to drop, each with its reason: the groups that are too old and, in the
        mode ``drop_oldest``, the oldest groups beyond the size of the buffer."""
        if self.stale == "wait":
            return {}
        leaving = dict.fromkeys(self._too_old(state), STALE)
        if self.stale == "drop_oldest":
            limits = state.limits
            num_ready = sum(len(numbers) for numbers in state.ready_by_oldest.values()) - len(leaving)
            too_many = max(0, num_ready - max(1, limits.run_ahead) * limits.batch_size)
            oldest = (number for version in sorted(state.ready_by_oldest) for number in state.ready_by_oldest[version])
            remaining = (number for number in oldest if number not in leaving)
            leaving |= dict.fromkeys(list(islice(remaining, too_many)), DISPLACED)
        return leaving

    def _too_old(self, state: FlowState) -> Iterator[int]:
        """Yield the numbers of the ready groups that are too old to be trained: the deadline of their oldest token has
        passed or, if tokens are masked one by one, the deadline of their newest token."""
        index = state.ready_by_newest if self.per == "token" else state.ready_by_oldest
        for version, numbers in index.items():
            if state.deadline(version) < state.next_step:
                yield from numbers

    def select(self, state: FlowState) -> Selection:
        """Return the groups of the next batch, or only the groups to drop if some must be dropped first."""
        floor = state.next_step - state.limits.max_age if self.masks_stale else None
        if state.replayed:
            return Selection(take=state.replayed, oldest_version=floor)
        leaving = self.leave(state)
        if leaving:
            return Selection(leave=leaving)
        if self.stale == "wait":
            chosen = select_earliest_in_time(state)
        else:
            chosen = select_in_order(state) if state.limits.strict else select_earliest(state)
        return Selection(take=tuple(sorted(chosen or ())), oldest_version=floor)
