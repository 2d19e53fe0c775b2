"""What a snapshot keeps of the controller."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.errors import CheckpointError
from headrace.rollout.environments.curriculum import CurriculumState


class ControllerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a later life of the run goes on with, beside weights and ledger."""

    eval_before: float | None = None
    """The held-out mean reward that the first life of the run began from."""
    reward_first: float | None = None
    """The mean reward of the run's first batch."""
    max_age: int | None = None
    """The staleness bound that held; ``None`` where the run is new."""
    curriculum: CurriculumState | None = None
    """How the rows have done; ``None`` without a curriculum."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> ControllerMemory:
        """Read it back; :class:`~headrace.base.errors.CheckpointError` for what no controller has written."""
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"the controller's part of a snapshot cannot be read: {error}",
                remedy="resume from an older snapshot beside it, or copy this one again, whole",
            ) from None
