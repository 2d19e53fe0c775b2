"""The bridge to the procedural reasoning tasks of ``reasoning-gym``: ``env.entry = "reasoning_gym/TASK"``.

``env.options`` are the settings of the task's dataset, and these settings of the bridge:

    system_prompt   the name of one of ``reasoning_gym.utils.SYSTEM_PROMPTS``: only the text between <answer> and
                    </answer> is scored. Unset: there is no system prompt, and the whole answer is scored
    evaluates       must be true for tasks whose scorer executes the answer as Python
    size            number of tasks in the dataset; the numbers of rows must be smaller (10,000)
    seed            seed of the dataset (0)
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
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import task_number

NUM_TASKS = 10_000
_EVALUATES = re.compile(r"\b(?:eval|parse_expr)\(answer\b")
"""A pattern of the calls with which scorers execute an answer as code, directly or through sympy."""


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a factory of one-turn environments, one for each episode, for the task ``what`` of the library.
    ``options`` are ``env.options``. Raises :class:`~headrace.base.errors.EnvError` for an unknown task, and for a task
    whose scorer executes answers, unless the option ``evaluates`` allows this."""
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
    dataset = make_dataset(what, options)
    if not evaluates:
        _refuse_evaluation(what, dataset)
    first = dataset[0]
    dataset.score_answer(
        first["answer"], first
    )  # raises now if the scorer lacks a dependency: it would fail for every answer
    read = extract_answer if prompt else str.strip
    return partial(Reasoning, dataset, SYSTEM_PROMPTS.get(prompt, ""), read)


def make_dataset(what: str, options: Mapping[str, Any]) -> Any:
    """Return the library's dataset of the task ``what``: a sequence of entries with ``question`` and ``answer``.
    ``options`` are the settings of the dataset."""
    import reasoning_gym

    return reasoning_gym.create_dataset(what, **{"size": NUM_TASKS, "seed": 0, **options})


class Reasoning(Env):
    """An environment for one episode with one turn: a question, the model's answer, and the library's score of the
    answer."""

    def __init__(self, dataset: Any, system: str, read: Callable[[str], str | None]) -> None:
        """Create the environment. ``dataset`` is the library's dataset of the task, ``system`` the system prompt
        (empty: none), and ``read`` returns the part of an answer that is scored."""
        self._dataset = dataset
        self._system = system
        self._read = read
        self._entry: Mapping[str, Any] = {}
        """The entry with the question of the episode; empty before :meth:`reset`."""

    def reset(self, task: Task) -> list[Message]:
        """Return the messages of the question that the number of the dataset row ``task`` selects. Raises
        :class:`~headrace.base.errors.EpisodeError` if there is no such question."""
        number, size = task_number(task), len(self._dataset)
        if not 0 <= number < size:
            raise EpisodeError(
                f"the row has number={number}, and there are {size} tasks",
                remedy=f"set env.options.size above {number}, or lower data.count",
            )
        self._entry = self._dataset[number]
        system = [Message(role="system", content=self._system)] if self._system else []
        return [*system, Message(role="user", content=self._entry["question"])]

    def step(self, message: Message) -> StepResult:
        """Return the library's score of the answer ``message``, in [0, 1], as the reward, and end the episode. If the
        scorer raises an exception, the reward is 0."""
        try:
            score = float(self._dataset.score_answer(self._read(message.content), self._entry))
        except Exception:  # noqa: BLE001 - foreign code: some scorers raise on an answer that they cannot parse; make() has tried the scorer
            score = 0.0
        return StepResult(reward=score, done=True)


def _refuse_evaluation(what: str, dataset: Any) -> None:
    """Raise :class:`~headrace.base.errors.EnvError` if the source code of the task's scorer executes the model's answer
    (``_EVALUATES``)."""
    parts = dataset.datasets if what == "composite" else {what: dataset}
    for name, part in parts.items():
        if _EVALUATES.search(inspect.getsource(sys.modules[type(part).__module__])):
            raise EnvError(
                f"reasoning_gym's scorer of {name!r} runs what the model writes as Python, with the rights of this run",
                remedy="choose another task, or set env.options.evaluates = true where that does no harm",
            )


BRIDGE = Bridge(
    make=make,
    example="reasoning_gym/basic_arithmetic",
    package="reasoning_gym",
    install="'headrace[reasoning-gym]'",
)
