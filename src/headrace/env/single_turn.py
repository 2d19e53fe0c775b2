"""A prompt and one answer."""

from __future__ import annotations

from headrace.env.base import Policy
from headrace.types.episode import Turn
from headrace.types.task import Task
from headrace.types.tokens import Tokens


class SingleTurn:
    """The model reads the prompt and answers once."""

    async def run(self, task: Task, policy: Policy) -> list[Turn]:
        prompt = Turn(author="task", tokens=Tokens.observed(task.prompt_ids_T))
        answer = await policy.sample(task.prompt_ids_T, parent=0)
        return [prompt, answer]
