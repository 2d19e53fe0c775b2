"""An environment."""

from __future__ import annotations

from headrace import StepResult
from headrace.extend import Env


class Echo(Env):
    """Shows the row's prompt so many times."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def reset(self, task):
        """The prompt."""
        return task["prompt"] * self.times

    def step(self, message):
        """The first answer ends it."""
        return StepResult(done=True)
