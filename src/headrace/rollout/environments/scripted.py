"""A model that says what a script says, for checks of environments: no weights, no tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.base.clock import Clock
from headrace.base.errors import BudgetSpent
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import EpisodeKey, StopReason
from headrace.base.types.tokens import IntColumn
from headrace.rollout.environments.base import AS_THE_RUN, AnswerPiece, Hear

REPORT = "headrace-report"
"""An answer of this agent is asked for by the check's own code: the question is what it has to report."""
_KEY = EpisodeKey(0, 0)
_ANSWERS = ("answer", "solution", "target", "expected", "ground_truth", "label")
"""Columns in which rows have what is right."""


def right_answer(row: Mapping[str, Any]) -> str:
    """What a row says is right, as text; 42 where it says nothing."""
    name = _answer_column(row)
    return "42" if name is None else str(row[name])


def says_what_is_right(row: Mapping[str, Any]) -> bool:
    """Whether a script can say it."""
    return _answer_column(row) is not None


def _answer_column(row: Mapping[str, Any]) -> str | None:
    """Return the column with what is right: one of the usual names, or the only plain value beside the prompt."""
    if any(name in row for name in _ANSWERS):
        return next((name for name in _ANSWERS if row.get(name) is not None), None)
    plain = [name for name, value in row.items() if name != "prompt" and isinstance(value, str | int | float)]
    return plain[0] if len(plain) == 1 else None


def _each_tool_once(row: Mapping[str, Any], tools: Sequence[Tool], place: int) -> Message:
    if place >= len(tools):
        return Message(role="assistant", content=right_answer(row))
    tool = tools[place]
    call = ToolCall(id=f"call_{place}", name=tool.name, arguments=json.dumps(example(tool.parameters)))
    return Message(role="assistant", content="Let me see.", tool_calls=(call,))


def _wrong_calls(row: Mapping[str, Any], tools: Sequence[Tool], place: int) -> Message:
    if place or not tools:
        return Message(role="assistant", content="ok")
    calls = (
        ToolCall(id="call_0", name="a_tool_that_is_not_there", arguments="{}"),
        ToolCall(id="call_1", name=tools[0].name, arguments='{"no_such_argument": 1}'),
        ToolCall(id="call_2", name=tools[0].name, arguments="{not JSON"),
    )
    return Message(role="assistant", tool_calls=calls)


def _always(text: Callable[[str], str]) -> Script:
    return lambda row, tools, place: Message(role="assistant", content=text(right_answer(row)))


Script = Callable[[Mapping[str, Any], Sequence[Tool], int], Message]
"""The answer to a row's question, by the tools that are offered and the number of answers before it."""
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
"""By what they say."""


def example(schema: Mapping[str, Any]) -> Any:
    """Something that a JSON schema allows.

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
    """The :class:`~headrace.rollout.environments.base.OpenEpisode` of one attempt with a script; it remembers what
    happened."""

    row: Mapping[str, Any]
    script: Script
    seed: int
    max_answers: int
    """The question after these finds a spent budget."""
    clock: Clock
    key: EpisodeKey = _KEY
    heard: list[tuple[Message, ...]] = field(default_factory=list)
    """What each answer was asked to."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """All that were offered, by name."""
    reports: list[str] = field(default_factory=list)
    """What the check's own code has reported."""
    own_s: list[float] = field(default_factory=list)
    """Seconds that the environment took between two answers."""
    was_spent: bool = False
    """Whether it asked for more answers than it might have."""
    _answered_s: float = -1.0

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        hear: Hear | None = None,
    ) -> Reply:
        """As the script says; :class:`~headrace.base.errors.BudgetSpent` after the last answer."""
        if options.agent == REPORT:
            self.reports.append(messages[0].content)
            return self._said(Message(role="assistant"))
        self.tools |= {tool.name: tool for tool in tools}
        return self._next(tuple(messages), tools, hear)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """The same, asked in tokens."""
        return self._next((Message(role="user", content=str(prompt_ids_T.tolist())),), (), None)

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """A token for each character."""
        return sum(len(message.content) for message in messages)

    def spell(self, token: int) -> str:
        """Tokens are characters."""
        return chr(token)

    def begin_again(self) -> None:
        """Forget it all."""
        self.heard.clear()
        self.own_s.clear()

    def _next(self, messages: tuple[Message, ...], tools: Sequence[Tool], hear: Hear | None) -> Reply:
        now_s = self.clock.now()
        if self._answered_s >= 0:
            self.own_s.append(now_s - self._answered_s)
        if len(self.heard) >= self.max_answers:
            self.was_spent = True
            raise BudgetSpent(
                f"the episode has used up env.max_turns: it is at {self.max_answers}",
                remedy="end it before, or raise env.max_turns",
                reason="max_turns",
            )
        place = len(self.heard)
        self.heard.append(messages)
        reply = self._said(self.script(self.row, tools, place))
        if hear is not None:
            hear(AnswerPiece(num_prompt_tokens=1, content=reply.message.content))
        self._answered_s = self.clock.now()
        return reply

    def _said(self, message: Message) -> Reply:
        ids = tuple(map(ord, message.content)) or (0,)
        return Reply(
            message=message,
            turn=2 * len(self.heard) - 1,
            stop_reason=StopReason.STOP,
            num_prompt_tokens=1,
            num_tokens=len(ids),
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
        )
