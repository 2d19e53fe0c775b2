"""Tools that the model may call: this module derives their descriptions from the types and docstrings of functions, and
executes calls.

def add(a: int, b: int = 0) -> int:
    '''Add two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar, get_type_hints

import pydantic

from headrace.base.clock import being_cancelled
from headrace.base.errors import EnvError
from headrace.base.types.chat import Message, Tool, ToolCall

T = TypeVar("T")
_ARGUMENT = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")
"""A pattern for one line of the ``Args:`` section of a docstring: the name and the description."""


class ToolFunction:
    """A function of the user as a tool that the model may call, with its description for the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Derive the description from the signature and the docstring of ``function``. Raises
        :class:`~headrace.base.errors.EnvError` if its parameters lack names or usable types."""
        self._function = function
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        description, arguments = _read_docstring(inspect.getdoc(function) or "")
        name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        self._arguments_model = _make_arguments_model(name, function, arguments)
        """The pydantic model that validates the arguments of a call."""
        schema = self._arguments_model.model_json_schema()
        schema.pop("title", None)
        for each in schema.get("properties", {}).values():
            each.pop("title", None)
        self.tool = Tool(name=name, description=description, parameters=schema)
        """The description of the tool for the model."""

    async def __call__(self, call: ToolCall, executor: Executor | None = None) -> Message:
        """Call the function with the arguments of ``call``, and return its answer as a message: the returned value, or
        the error in the call or in the function. A plain function runs in ``executor``."""
        try:
            validated = self._arguments_model.model_validate_json(call.arguments or "{}", strict=False)
        except pydantic.ValidationError as error:
            return _error_answer(
                call, "; ".join(map(_validation_text, error.errors(include_url=False, include_input=False)))
            )
        arguments = {name: validated.__dict__[name] for name in type(validated).model_fields}
        try:
            bound = functools.partial(self._function, **arguments)
            if self._is_async:
                returned = await bound()
            else:
                returned = await run_in_thread(executor, bound)
        except BaseException as error:
            if being_cancelled():  # the tool may raise CancelledError too
                raise
            return _error_answer(call, f"{type(error).__name__}: {error}")
        return Message(role="tool", content=_as_text(returned), tool_call_id=call.id, name=call.name)


class DescribedTool:
    """A tool that already has a description, such as a tool of an MCP server. Its calls are passed on unchanged."""

    def __init__(self, tool: Tool, answer: Callable[[ToolCall], Awaitable[Message]]) -> None:
        """Create a tool with the description ``tool``. ``answer`` returns the answer to a call; an error that it raises
        ends the episode."""
        self.tool = tool
        """The description of the tool for the model."""
        self._answer = answer

    async def __call__(self, call: ToolCall, executor: Executor | None = None) -> Message:
        """Return the answer to a call. ``executor`` is not used."""
        return await self._answer(call)


async def call_tools(
    message: Message, tools: Mapping[str, ToolFunction | DescribedTool], executor: Executor | None = None
) -> list[Message]:  # fmt: skip
    """Execute the tool calls in ``message`` sequentially, and return their answers. ``tools`` are the tools by name;
    plain functions run in ``executor``. The answer to a call of an unknown tool is an error text."""
    answers: list[Message] = []
    for call in message.tool_calls:
        tool = tools.get(call.name)
        if tool is None:
            answers.append(_error_answer(call, f"there is no tool {call.name!r}; there are: {', '.join(tools)}"))
        else:
            answers.append(await tool(call, executor))
    return answers


def make_tools(functions: Sequence[Callable[..., Any]]) -> dict[str, ToolFunction | DescribedTool]:
    """Return the given functions as tools, by name. Raises :class:`~headrace.base.errors.EnvError` if two tools have
    the same name."""
    tools = [as_tool(function) for function in functions]
    tools_by_name = {tool.tool.name: tool for tool in tools}
    if len(tools_by_name) < len(tools):
        raise EnvError(f"two tools have one name: {[tool.tool.name for tool in tools]}", remedy="rename one of them")
    return tools_by_name


def as_tool(function: Callable[..., Any]) -> ToolFunction | DescribedTool:
    """Return ``function`` as a tool. A :class:`DescribedTool` is returned as it is."""
    return function if isinstance(function, DescribedTool) else ToolFunction(function)


def _make_arguments_model(
    name: str, function: Callable[..., Any], descriptions: Mapping[str, str]
) -> type[pydantic.BaseModel]:
    """Return a pydantic model of the arguments of the tool ``name``, built from the signature of ``function``.
    ``descriptions`` are the descriptions of the arguments in the docstring. Raises
    :class:`~headrace.base.errors.EnvError` for parameters that a call cannot name."""
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for each in inspect.signature(function).parameters.values():
            if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
                raise TypeError(f"its parameter {each.name!r} has no name that a call could give")
            default = ... if each.default is each.empty else each.default
            description = descriptions.get(each.name)
            fields[each.name] = (hints.get(each.name, Any), pydantic.Field(default=default, description=description))
        return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    except (TypeError, NameError, ValueError, pydantic.PydanticUserError) as error:
        raise EnvError(
            f"the tool {name!r} cannot be described: {error}",
            remedy="write a function whose parameters have names and types, such as def add(a: int, b: int) -> int",
        ) from None


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of the function, and the description of each argument (the section ``Args:``), from a
    docstring."""
    head, _, rest = re.sub(r"\n\s*(Args|Arguments|Parameters):\s*\n", "\n\0", text, count=1).partition("\0")
    arguments: dict[str, str] = {}
    for line in rest.splitlines():
        if line and not line[0].isspace():
            break  # the next section begins
        if match := _ARGUMENT.match(line):
            arguments[match[1]] = match[2].strip()
    description = re.split(r"\n\s*(?:Returns|Raises|Yields|Examples?):\s*\n", head)[0]
    return " ".join(description.split()), arguments


def _as_text(returned: Any) -> str:
    """Return the value that a tool returned as text. A value that is not a string is encoded as JSON."""
    try:
        text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = str(returned)
    return text.encode("utf-8", "replace").decode()


def _validation_text(problem: Mapping[str, Any]) -> str:
    """Return one validation error of pydantic in words: the name of the argument, and what is wrong with it."""
    argument = ".".join(map(str, problem["loc"]))
    return f"{argument}: {problem['msg']}" if argument else str(problem["msg"])


def _error_answer(call: ToolCall, text: str) -> Message:
    """Return the answer to a call that could not be executed or that failed. The model reads ``text`` as an error
    message."""
    text = f"error: {text}"[:2000].encode("utf-8", "replace").decode()
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name, failed=True)


async def run_in_thread(executor: Executor | None, call: Callable[[], T]) -> T:
    """Run ``call`` in a thread of ``executor`` and return its result. If the caller is cancelled, wait for the thread
    before ending, because until then the thread still uses its objects."""
    running = asyncio.get_running_loop().run_in_executor(executor, _call_for_future, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # mark the exception as retrieved
        raise


def _call_for_future(call: Callable[[], T]) -> T:
    """Return the result of ``call``, for a future. ``StopIteration`` is replaced by ``RuntimeError``, because a future
    cannot store ``StopIteration``."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
