"""A function of the user as one component."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

from headrace.errors import EnvError
from headrace.scoring.base import Grader, RewardSection
from headrace.scoring.reward import load_reward, split_reference


class FunctionReward(RewardSection):
    """``reward(completion, **row) -> float | None``, sync or async; or, over a whole group,
    ``reward(prompts, completions, **columns) -> list``. By turn it may also take ``history`` and ``turn``."""

    kind: Literal["function"] = "function"
    """Selects this reward."""
    ref: str
    """``file.py:function``."""

    @property
    def label(self) -> str:
        """Its own name, where it has no other."""
        return self.name or self.ref.rpartition(":")[2]

    def check(self) -> Self:
        """The function is there."""
        path, name = split_reference(self.ref)
        return self.model_copy(update={"ref": f"{path.resolve()}:{name}"})

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Imports and calls it."""
        function = load_reward(self.ref, executor)
        if function.by_group and self.by_turn:
            raise EnvError(
                f"env.rewards {self.label!r} is scored by turn, and its function wants all completions of a group",
                remedy="write reward(completion, history, turn, **row), or leave by_turn out",
            )
        return function
