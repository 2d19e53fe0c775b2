"""The outline of a batch, which the controller sends to the learner in place of the batch. It contains the decisions of
the controller, and for each group the reference to its tokens or, if they are few, the tokens. Each rank lays out the
batch from the outline.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.types.stored import StoredRows


class GroupOutline(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch: the episodes that are trained, and their credit."""

    number: int
    """The number of the group in the run."""
    places: tuple[int, ...]
    """The index in the group of each trained episode."""
    entries: tuple[int, ...]
    """The index in ``columns`` of each trained episode."""
    credits: tuple[float | tuple[float, ...], ...]
    """The advantage of the tokens of each trained episode: one number for all of them, or one for each of its turns."""
    columns: memoryview | StoredRows
    """The turns of the group's episodes, encoded as the bundle of a group, or the reference to this bundle in the store
    of the run. In an outline that was received, bundles are views of the message."""
    num_tokens: int
    """The number of tokens of the trained episodes, prompts included."""
    num_loss_tokens: int
    """The number of these tokens that carry loss if they can be read and no other rule excludes them."""


class BatchOutline(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of one optimizer step, before it is laid out."""

    step: int
    """The number of the step, from 0. It is also the version of the learner's weights before the step."""
    groups: tuple[GroupOutline, ...]
    """The groups with trained episodes, in the order of the batch."""
    agents: tuple[str, ...] = ()
    """The names of the roles that train their own adapters in addition to the policy's."""
    oldest_version: int | None = None
    """The oldest version whose tokens carry loss; ``None``: no token is excluded because of its version."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the batch, prompts included."""
        return sum(group.num_tokens for group in self.groups)

    def release(self) -> None:
        """Free the memory of the bundles that the outline contains. It cannot be laid out afterwards."""
        for group in self.groups:
            if isinstance(group.columns, memoryview):
                group.columns.release()


class LostGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a batch that carried no loss because columns of it could not be read. The ledger records it, so that a
    replay of the step leaves out the same group."""

    number: int
    """The number of the group in the run."""
    left_out: bool
    """Whether the group was left out of the batch, because its tokens could not be read, or because no token of the
    batch could carry loss. Otherwise only kept-sets or experts could not be read, and the batch contained its tokens
    without loss, kept-sets and experts."""
    why: str
    """The reason why the columns could not be read, in words."""


def groups_in_words(numbers: Sequence[int]) -> str:
    """Return the groups with the given numbers in words, the first eight of them by number.

    >>> groups_in_words([7]), groups_in_words([3, 7]), groups_in_words(range(10))
    ('group 7', 'groups 3, 7', 'groups 0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"group{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{more}"
