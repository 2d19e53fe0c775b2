"""A scripted model for checks of environments. It has no weights: each answer comes from a function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.base.clock import Clock
from headrace.base.errors import BudgetSpent
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import AttemptKind, EpisodeKey, StopReason
from headrace.base.types.tokens import IntColumn
from headrace.rollout.environments.base import AS_THE_RUN, AnswerPiece, OnPiece

REPORT = "headrace-report"
"""The agent name under which the check's own code sends reports. The content of the message is the report."""
_KEY = EpisodeKey(0, 0)
"""The key of every scripted episode."""
_BLOCK = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
"""A pattern for a text that is one fenced code block."""
_ANSWERS = ("answer", "solution", "target", "expected", "ground_truth", "label")
"""The usual names of columns that contain the right answer."""


def right_answer(row: Mapping[str, Any]) -> str:
    """Return the right answer of a dataset row as text, from the column that :func:`has_right_answer` looks for. The
    result is "42" if the row has no such column."""
    name = _answer_column(row)
    return "42" if name is None else str(row[name])


def has_right_answer(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the dataset has a column with the right answer."""
    return _answer_column(row) is not None


def _answer_column(row: Mapping[str, Any]) -> str | None:
    """Return the name of the column that contains the right answer of a row: a column with one of the usual names, or
    the only column with a plain value besides the prompt. ``None`` if there is no such column."""
    if any(name in row for name in _ANSWERS):
        return next((name for name in _ANSWERS if row.get(name) is not None), None)
    plain = [name for name, value in row.items() if name != "prompt" and isinstance(value, str | int | float)]
    return plain[0] if len(plain) == 1 else None


def _each_tool_once(row: Mapping[str, Any], tools: Sequence[Tool], index: int) -> Message:
    """Return the next answer of a script that calls each tool once with valid arguments, and then gives the right
    answer. If the only argument of a tool is a command, the command is the code block of the right answer."""
    if index >= len(tools):
        return Message(role="assistant", content=right_answer(row))
    tool = tools[index]
    arguments = example(tool.parameters)
    if isinstance(arguments, dict) and arguments.keys() == {"command"}:
        block = _BLOCK.fullmatch(right_answer(row).strip())
        arguments = {"command": block[1]} if block else arguments
    call = ToolCall(id=f"call_{index}", name=tool.name, arguments=json.dumps(arguments))
    return Message(role="assistant", content="Let me see.", tool_calls=(call,))


def _wrong_calls(row: Mapping[str, Any], tools: Sequence[Tool], index: int) -> Message:
    """Return the next answer of a script that makes invalid calls: a call of a tool that does not exist, and calls with
    wrong arguments. Then it answers without calls."""
    if index or not tools:
        return Message(role="assistant", content="ok")
    calls = (
        ToolCall(id="call_0", name="a_tool_that_is_not_there", arguments="{}"),
        ToolCall(id="call_1", name=tools[0].name, arguments='{"no_such_argument": 1}'),
        ToolCall(id="call_2", name=tools[0].name, arguments="{not JSON"),
    )
    return Message(role="assistant", tool_calls=calls)


def _always(text: Callable[[str], str]) -> Script:
    """Return a script in which every answer is ``text`` applied to the row's right answer."""
    return lambda row, tools, index: Message(role="assistant", content=text(right_answer(row)))


Script = Callable[[Mapping[str, Any], Sequence[Tool], int], Message]
"""A function that returns the next answer, given the row, the offered tools and the number of answers so far."""
SCRIPTS: Mapping[str, Script] = {
    "the row's answer": _always(lambda answer: answer),
    "the row's answer in words": _always(
        lambda answer: f"So the answer is \\boxed{{{answer}}}.\n<answer>{answer}</answer>"
    ),
    "each tool once, then the row's answer": _each_tool_once,
    "calls that are wrong": _wrong_calls,
    "nothing": _always(lambda _: ""),
    "something else": _always(lambda _: "I do not know. 7 ⟪é☃⟫ </answer> ```python\nprint(1)\n```"),
    "very much": _always(lambda _: "very " * 5000),
}
"""The scripts, by a description of their answers."""


def example(schema: Mapping[str, Any]) -> Any:
    """Return an example value that a JSON schema allows.

    >>> example({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]})
    {'a': 2}
    """
    if "enum" in schema:
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return example(schema[name][0])
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return {name: example(properties.get(name, {})) for name in schema.get("required", ())}
    return {"integer": 2, "number": 1.5, "boolean": True, "array": [], "null": None}.get(schema.get("type", ""), "a")


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptedEpisode:
    """An :class:`~headrace.rollout.environments.base.OpenEpisode` for one attempt, whose answers come from a script
    instead of a model. It records the requests of the environment."""

    row: Mapping[str, Any]
    """The row that is attempted."""
    script: Script
    """The function that creates the answers."""
    seed: int
    """The seed for the environment's own random draws."""
    max_answers: int
    """The largest number of answers; a request after the last one raises
    :class:`~headrace.base.errors.BudgetSpent`."""
    clock: Clock
    """The clock that measures the environment's own time."""
    key: EpisodeKey = _KEY
    """The group and the number of the episode."""
    attempt_kind: AttemptKind = AttemptKind.ALONE
    """Always ``ALONE``: a scripted episode has no branches."""
    requests: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages of each request."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """All tools that were offered, by name."""
    reports: list[str] = field(default_factory=list)
    """The reports that the check's own code has sent."""
    durations_s: list[float] = field(default_factory=list)
    """The time that the environment's own code took before each request except the first, in seconds."""
    is_exhausted: bool = False
    """Whether the environment requested more answers than ``max_answers``."""
    _answered_s: float = -1.0
    """The clock's time when the last answer was returned; -1 before the first answer."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Return the script's answer. Raises :class:`~headrace.base.errors.BudgetSpent` after the last one."""
        if options.agent == REPORT:
            self.reports.append(messages[0].content)
            return self._make_reply(Message(role="assistant"))
        self.tools |= {tool.name: tool for tool in tools}
        return self._next_reply(tuple(messages), tools, on_piece)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the script's answer to a prompt of token ids."""
        return self._next_reply((Message(role="user", content=str(prompt_ids_T.tolist())),), (), None)

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return the number of characters of the messages. Each character counts as one token."""
        return sum(len(message.content) for message in messages)

    def spell(self, token: int) -> str:
        """Return the character whose code point is ``token``."""
        return chr(token)

    def restart(self) -> None:
        """Discard the recorded requests, for another attempt at the episode."""
        self.requests.clear()
        self.durations_s.clear()

    def _next_reply(self, messages: tuple[Message, ...], tools: Sequence[Tool], on_piece: OnPiece | None) -> Reply:
        """Return the script's next answer to ``messages``, with calls of ``tools``, and record the time that the
        environment took since the last one. ``on_piece`` receives the answer's content as one piece."""
        now_s = self.clock.now()
        if self._answered_s >= 0:
            self.durations_s.append(now_s - self._answered_s)
        if len(self.requests) >= self.max_answers:
            self.is_exhausted = True
            raise BudgetSpent(
                f"the episode has used up env.max_turns: it is at {self.max_answers}",
                remedy="end it before, or raise env.max_turns",
                reason="max_turns",
            )
        index = len(self.requests)
        self.requests.append(messages)
        reply = self._make_reply(self.script(self.row, tools, index))
        if on_piece is not None:
            on_piece(AnswerPiece(num_prompt_tokens=1, content=reply.message.content))
        self._answered_s = self.clock.now()
        return reply

    def _make_reply(self, message: Message) -> Reply:
        """Return a scripted message as a reply, with one token per character."""
        ids = tuple(map(ord, message.content)) or (0,)
        return Reply(
            message=message,
            turn=2 * len(self.requests) - 1,
            stop_reason=StopReason.STOP,
            num_prompt_tokens=1,
            num_tokens=len(ids),
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
        )
