"""The task of an episode: one row of the dataset, with its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.base.types.tokens import IntColumn

Prompt = str | list[dict[str, Any]]
"""A prompt: plain text, or chat messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of the dataset with its tokenized prompt, for episodes to attempt."""

    row_index: int
    """The index of the row in the dataset, from 0."""
    row: dict[str, Any]
    """Every column of the row, the prompt included."""
    prompt: Prompt
    prompt_ids_T: IntColumn
    """The prompt as token ids, after the chat template was applied."""
