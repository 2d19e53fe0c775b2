"""A prompt and one answer."""

from __future__ import annotations

from headrace.base.types.task import Task
from headrace.rollout.environments.base import AttemptOutcome, OpenEpisode


class SingleTurn:
    """The model reads the prompt and answers once."""

    asks_prompt = True

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        await episode.sample(task.prompt_ids_T)
        return AttemptOutcome()
