"""The reward component that calls a function of the user."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

from headrace.rollout.scoring.base import RewardSection
from headrace.rollout.scoring.reward import RewardFunction, load_reward, split_reference
from headrace.rollout.scoring.signature import read_signature


class FunctionReward(RewardSection):
    """A reward function: ``reward(completion, **row) -> float | None``, sync or async; or, over a whole group,
    ``reward(prompts, completions, **columns) -> list``. With ``by_turn`` it may also have the parameters ``history``
    and ``turn``."""

    kind: Literal["function"] = "function"
    """Selects this reward."""
    ref: str
    """The function, as ``file.py:function``."""

    @property
    def label(self) -> str:
        """The name of the component; by default the name of the function."""
        return self.name or self.ref.rpartition(":")[2]

    def check(self) -> Self:
        """Check that the function exists, and return the section with the absolute path of its file."""
        path, name = split_reference(self.ref)
        if (signature := read_signature(path, name)) is not None:
            signature.refuse_form(name, by_turn=self.by_turn)
        return self.model_copy(update={"ref": f"{path.resolve()}:{name}"})

    def columns(self) -> dict[str, str]:
        """Return the required parameters whose value can come only from a column of the row, as far as the text of the
        file shows them."""
        signature = read_signature(*split_reference(self.ref))
        return (
            {}
            if signature is None
            else {name: f"its parameter {name!r}" for name in signature.columns(by_turn=self.by_turn)}
        )

    def grader(self, executor: ThreadPoolExecutor) -> RewardFunction:
        """Import the function, and return it as a grader."""
        function = load_reward(self.ref, executor)
        function.signature.refuse_form(function.name, by_turn=self.by_turn)
        return function
