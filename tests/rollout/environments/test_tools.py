"""Functions become tools: what the model is told of them, what their calls answer, how an episode with them goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import EnvError
from headrace.base.types.chat import Message, ToolCall
from headrace.rollout import Conversations, EpisodeLimits
from headrace.rollout.environments.entry import load_entry
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.tools import ToolFunction, call_tools, make_tools
from tests.rollout.models import conversations, render_text


def move(steps: int, way: Literal["left", "right"] = "left") -> dict[str, Any]:
    """Move the
    marker.

    Args:
        steps: How far.
        way (str): Where to.

    Returns:
        What it met.
    """
    if steps > 9:
        raise ValueError("there is a wall")
    if steps < 0:
        raise KeyboardInterrupt("not backwards")
    return {"met": [way] * steps}


async def wait() -> None:
    """Wait."""


def called(arguments: str, name: str = "move") -> Message:
    made = Message(role="assistant", tool_calls=(ToolCall(id="c", name=name, arguments=arguments),))
    (answer,) = asyncio.run(call_tools(made, make_tools([move, wait])))
    assert (answer.role, answer.tool_call_id, answer.name) == ("tool", "c", name)
    return answer


def test_types_and_docstring_say_what_the_model_is_told() -> None:
    tool = ToolFunction(move).tool
    assert (tool.name, tool.description) == ("move", "Move the marker.")
    properties = tool.parameters["properties"]
    assert properties["steps"] == {"type": "integer", "description": "How far."}
    assert properties["way"]["enum"] == ["left", "right"]
    assert properties["way"]["description"] == "Where to."
    assert tool.parameters["required"] == ["steps"]


def test_a_call_answers_with_what_the_function_returns() -> None:
    assert json.loads(called('{"steps": 2, "way": "right"}').content) == {"met": ["right", "right"]}
    assert called("", "wait").content == "null"


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ('{"steps": "many"}', "move", "steps: Input should be a valid integer"),
        ("{}", "move", "steps: Field required"),
        ('{"steps": 1, "speed": 3}', "move", "speed: Extra inputs are not permitted"),
        ('{"steps": 1, "way": "up"}', "move", "way: Input should be 'left' or 'right'"),
        ('{"steps":', "move", "Invalid JSON"),
        ('{"steps": 10}', "move", "ValueError: there is a wall"),
        ('{"steps": -1}', "move", "KeyboardInterrupt: not backwards"),
        ("{}", "fly", "there is no tool 'fly'; there are: move, wait"),
    ],
)
def test_a_call_that_fails_is_answered_in_words(arguments: str, name: str, words: str) -> None:
    answer = called(arguments, name)
    assert answer.failed
    assert answer.content.startswith("error: ")
    assert words in answer.content


@given(st.text())
def test_whatever_the_arguments_are_there_is_an_answer(arguments: str) -> None:
    assert called(arguments).content


def test_functions_that_cannot_be_called_by_name_are_refused() -> None:
    for strange in (lambda *args: 0, lambda a, /: 0, tuple):
        with pytest.raises(EnvError, match="cannot be described"):
            ToolFunction(strange)
    with pytest.raises(EnvError, match="two tools have one name"):
        make_tools([move, move])


ENV = """
    import headrace

    class Search(headrace.Env):
        def reset(self, task):
            self.tools = [self.look]
            self.looked = []
            return task["question"]

        def look(self, at: int) -> str:
            "Look somewhere."
            self.looked.append(at)
            if at == 0:
                raise IndexError("nothing there")
            return f"seen {at}"

        async def step(self, message):
            if message.content == "more":
                return headrace.StepResult(messages="continue", reward=0.25)
            return headrace.StepResult(reward=len(self.looked), done=True)

        def close(self):
            CLOSED.touch(exist_ok=False)
"""


def play(
    directory: Path, says: Callable[[str], str], limits: EpisodeLimits | None = None
) -> tuple[Episode, Conversations]:
    closed = directory / "closed"
    code = "\n".join(line[4:] for line in ENV.splitlines())
    (directory / "search.py").write_text(f"from pathlib import Path\nCLOSED = Path({str(closed)!r})\n{code}")
    talk = conversations(says, limits)
    with ThreadPoolExecutor() as hands:
        rollout = load_entry("env", f"{directory / 'search.py'}:Search", hands)

        async def attempt() -> Episode:
            return await rollout({"question": "where?"}, EpisodePolicy(talk, executor=hands))

        ended = asyncio.run(attempt())
    assert closed.exists()
    return ended, talk


def look(at: int) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"at": {at}}}}}</tool_call>'


def test_tools_are_called_until_an_answer_calls_none(tmp_path: Path) -> None:
    answers = iter([look(0), look(3), "more", "there"])
    ended, talk = play(tmp_path, lambda text: next(answers))
    assert [turn.author for turn in talk.turns] == [
        "task", "policy", "tool", "policy", "tool", "policy", "user", "policy",
    ]  # fmt: skip
    assert [turn.failed for turn in talk.turns if turn.author == "tool"] == [True, False]
    assert "seen 3" in render_text(talk, [4])
    assert (ended.reward, dict(ended.rewards)) == (2.25, {5: 0.25, 7: 2.0})


def test_an_episode_that_may_have_no_more_ends_with_what_it_has_earned(tmp_path: Path) -> None:
    ended, talk = play(tmp_path, lambda text: "more", EpisodeLimits(max_turns=3))
    assert (ended.reward, dict(ended.rewards)) == (0.75, {1: 0.25, 3: 0.25, 5: 0.25})
    assert len(talk.turns) == 6
