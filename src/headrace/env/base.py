"""What an environment is."""

from __future__ import annotations

from typing import Protocol

from headrace.types.episode import Turn
from headrace.types.task import Task
from headrace.types.tokens import IntColumn


class Policy(Protocol):
    """The model under training, as an environment sees it."""

    async def sample(self, prompt_ids_T: IntColumn, *, parent: int) -> Turn:
        """Sample one turn that continues turn ``parent``; its tokens come back exactly as sampled.

        ``prompt_ids_T`` is everything the model is to read, from the root to that turn.
        """
        ...


class Env(Protocol):
    """An environment attempts a task; one instance serves all episodes, so it keeps no state of an episode."""

    async def run(self, task: Task, policy: Policy) -> list[Turn]:
        """One attempt, as a graph of turns, parents before children. An exception fails this episode only."""
        ...
