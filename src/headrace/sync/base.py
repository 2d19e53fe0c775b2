"""What a transport promises, on both of its sides.

    learner                                          engine
    copy(slot)     one copy, then training goes on
    announce()     hash, in the background  ───▶     stage(update)    verify, while decoding goes on
                                                     commit(version)  between two steps: from now on these weights

Two slots. The engine reads one; the learner fills the other, and may fill it again only when the commit of the newer
version has freed it. A refused update changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headrace.types.weights import WeightUpdate


class Publisher(Protocol):
    """The learner's side."""

    def copy(self, slot: int) -> None:
        """Copy every tensor, as it is now, into ``slot``; the only part that the learner waits for."""
        ...

    def announce(self, version: int, slot: int) -> WeightUpdate:
        """Hash ``slot`` and describe it; may run in another thread than the training."""
        ...

    def close(self) -> None:
        """Let go of the buffers."""
        ...


class Receiver(Protocol):
    """The engine's side."""

    def stage(self, update: WeightUpdate) -> None:
        """Check layout, order and checksums; may run in another thread than the decoding.

        Raises :class:`~headrace.errors.WeightsError`; nothing has changed then.
        """
        ...

    def commit(self, version: int) -> None:
        """Use the staged version; a change of pointers."""
        ...

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Use the staged version in ``parts`` changes, each made when the iterator is advanced; after the last one it
        ends. What stands in between is neither the old version nor the new one.

        Raises :class:`~headrace.errors.WeightsError` at once if ``version`` is not staged. The update is taken: another
        one may be staged meanwhile.
        """
        ...
