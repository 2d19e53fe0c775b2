"""Procedural reasoning tasks of ``reasoning-gym``: ``env.entry = "reasoning_gym/TASK"``.

``env.options`` are those of the task's dataset, and of the bridge:

system_prompt   the name of one of ``reasoning_gym.utils.SYSTEM_PROMPTS``: then what counts is what stands between
                <answer> and </answer>. Unset: no system prompt, and the whole answer counts
evaluates       must be true for tasks whose scorer runs the answer as Python
size            how many tasks there are: numbers of rows run below it (10,000)
seed            of all of them (0)
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.errors import EnvError, EpisodeError, nearest
from headrace.base.types.chat import Message
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import Found, number_of

NUM_TASKS = 10_000
_EVALUATES = re.compile(r"\b(?:eval|parse_expr)\(answer\b")
"""How scorers run an answer as code, or have sympy run it."""


def make(what: str, options: dict[str, Any]) -> Found:
    """The task ``what`` as an environment of one turn."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

    if what not in DATASETS:
        raise EnvError(f"reasoning_gym has no task {what!r}", remedy=nearest(what, DATASETS))
    prompt, evaluates = options.pop("system_prompt", ""), options.pop("evaluates", False)
    if prompt and prompt not in SYSTEM_PROMPTS:
        raise EnvError(f"reasoning_gym has no system prompt {prompt!r}", remedy=nearest(prompt, SYSTEM_PROMPTS))
    if what == "composite":
        parts = [{"weight": 1.0, "config": {}, **part} for part in options.get("datasets", ())]
        options["datasets"] = [DatasetSpec(**part) for part in parts]
    dataset = reasoning_gym.create_dataset(what, **{"size": NUM_TASKS, "seed": 0, **options})
    if not evaluates:
        _refuse_evaluation(what, dataset)
    first = dataset[0]
    dataset.score_answer(first["answer"], first)  # what fails here fails for every answer
    read = extract_answer if prompt else str.strip
    return partial(Reasoning, dataset, SYSTEM_PROMPTS.get(prompt, ""), read)


class Reasoning(Env):
    """A question, one answer, and the library's score of it."""

    def __init__(self, dataset: Any, system: str, read: Callable[[str], str | None]) -> None:
        self._dataset = dataset
        self._system = system
        self._read = read
        self._entry: Mapping[str, Any] = {}

    def reset(self, task: Task) -> list[Message]:
        """The question."""
        number, size = number_of(task), len(self._dataset)
        if not 0 <= number < size:
            raise EpisodeError(
                f"the row has number={number}, and there are {size} tasks",
                remedy=f"set env.options.size above {number}, or lower data.count",
            )
        self._entry = self._dataset[number]
        system = [Message(role="system", content=self._system)] if self._system else []
        return [*system, Message(role="user", content=self._entry["question"])]

    def step(self, message: Message) -> StepResult:
        """Its score, from 0 to 1; 0 for an answer over which the scorer fails, as a few do that cannot read it."""
        try:
            score = float(self._dataset.score_answer(self._read(message.content), self._entry))
        except Exception:  # noqa: BLE001 - the boundary of a foreign scorer: that it works is seen when the task is made
            score = 0.0
        return StepResult(reward=score, done=True)


def _refuse_evaluation(what: str, dataset: Any) -> None:
    """A scorer that runs what the model writes is used on request only."""
    parts = dataset.datasets if what == "composite" else {what: dataset}
    for name, part in parts.items():
        if _EVALUATES.search(inspect.getsource(sys.modules[type(part).__module__])):
            raise EnvError(
                f"reasoning_gym's scorer of {name!r} runs what the model writes as Python, with the rights of this run",
                remedy="choose another task, or set env.options.evaluates = true where that does no harm",
            )
