"""What a scoring worker receives."""

from __future__ import annotations

from typing import Any

import msgspec


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Completions to score against one row: one, or all of a group for a reward function over lists."""

    call: int
    prompt: Any
    """The prompt as the row holds it: a string or a list of chat messages."""
    completions: tuple[str, ...]
    row: dict[str, Any]
    """The row of the dataset, prompt included."""
    history: str = ""
    """Everything that the model had read before a turn that is scored by itself."""
    turn: int = -1
    """Which turn of its episode that is, from 0; −1: the completions are whole."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End now."""


Message = Score | Shutdown
