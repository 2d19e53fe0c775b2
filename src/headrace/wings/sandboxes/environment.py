"""The environment ``shell``: an agent works on a task directory with shell commands, in a session of its own.

row: instruction, directory ─▶ world of the task ─fork─▶ session
answer of the model ─▶ command in the session ─▶ its output is the model's next message
``submit``, the last command, or the end of the agent's time ─▶ tests ─▶ reward
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headrace.base.errors import ConfigError, EpisodeError
from headrace.base.types.chat import Message, ToolCall
from headrace.base.types.episode import AttemptKind
from headrace.rollout.environments.interface import Env, Messages, StepResult
from headrace.rollout.environments.tools import DescribedTool
from headrace.rollout.scoring.sandbox import Finished, Reason
from headrace.wings.bridges.mcp import Tools
from headrace.wings.sandboxes import SandboxSession, mcp
from headrace.wings.sandboxes.building import task_directory
from headrace.wings.sandboxes.changes import FileChanges
from headrace.wings.sandboxes.grading import grade
from headrace.wings.sandboxes.moments import ForkedWorld
from headrace.wings.sandboxes.settings import WorldSettings, get_task_key, validate_settings
from headrace.wings.sandboxes.tasks import TaskDirectory
from headrace.wings.sandboxes.world import WorldConfig, now_s, shared_worlds

SUBMIT = "submit"
"""The command that ends an episode, so that its tests run."""
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_FENCED = re.compile(r"(```+|~~~+)(?:bash|sh|shell|console)?[ \t]*\n(.*?)\n?\1", re.DOTALL)
"""Matches an answer that consists of one fenced block around a command."""
_SYSTEM = {
    "block": "You work in a shell on Linux, without a network. Each answer holds one command in a block:\n"
    f"```bash\nls -la\n```\nYou then read what it prints. When the task is done, answer with the command {SUBMIT}.",
    "line": f"Each answer is one shell command. When the task is done, answer {SUBMIT}.",
    "tool": "You work in a shell on Linux, without a network. Call the tool run with one command at a time. When the "
    "task is done, answer without a call.",
}
"""The default system prompts, by the form of actions (``action``)."""
_SYSTEM_MCP = " In place of a command, an answer may call the other tools that you have."
"""An addition to the system prompt if MCP servers offer tools."""
_OVER = "There is no time for more commands: answer without a call."
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ShellSettings(WorldSettings):
    """The settings of the environment: ``env.options``."""

    action: Literal["block", "line", "tool"] = "block"
    """The form of a command in an answer. ``block``: a block in triple backquotes. ``line``: the whole text, with or
    without a block (three backquotes or tildes) around it. ``tool``: a call of a tool."""
    system: str | None = None
    """The system prompt; unset: a prompt that explains the form of actions; empty: no system prompt."""
    commands: int = Field(default=30, ge=1)
    """The limit of commands in an episode; after the last command the tests run."""
    command_s: float = Field(default=60.0, gt=0)
    """The time limit of one command, in seconds."""
    output_chars: int = Field(default=8000, ge=100)
    """The limit of characters of a command's output that the model reads: the beginning and the end of the output."""
    show_changes: bool = True
    """Whether the files that each command has changed are recorded with its result. This costs one further command of
    the session each time."""
    episodes: int = Field(default=64, ge=0)
    """The number of ended episodes whose moments each worker keeps, so that branches of them (``flow.pivots``) continue
    from the moment at which they differ. Branches of other episodes run all commands again."""

    mcp: dict[str, str] = Field(default_factory=dict)
    """MCP servers that run in the session: the shell command that starts each server, by the server's name. Servers
    start in the directory of the task, and communicate over standard input and output. Their tools are offered in
    addition to the form of actions; a call counts as a command."""
    mcp_s: float = Field(default=60.0, gt=0)
    """The time limit of one answer of an MCP server, which includes its start, in seconds."""

    @model_validator(mode="after")
    def _servers_can_be_run(self) -> Self:
        """Refuse an MCP server without a valid name or a command, and any server if the package ``mcp`` is missing."""
        for name, command in self.mcp.items():
            if not _SERVER_NAME.fullmatch(name) or not command.strip():
                raise ConfigError(
                    f"mcp.{name}={command!r} is no server",
                    remedy="give it a name of letters, digits, - and _, and a command",
                )
        if self.mcp and find_spec("mcp") is None:
            raise ConfigError(
                f"mcp={sorted(self.mcp)} needs the package mcp", remedy="pip install 'headrace[mcp]', or leave mcp out"
            )
        return self

    @property
    def worlds(self) -> WorldConfig:
        """The configuration that the worlds of all tasks share."""
        return self.world_config(command_s=self.command_s, episodes=self.episodes)


class ShellEnv(Env):
    """The environment of one episode on a task directory. The rollout calls :meth:`reset`, then :meth:`step` for each
    answer."""

    def __init__(self, **options: Any) -> None:
        """Read ``env.options`` as :class:`ShellSettings`. Raises :class:`~headrace.base.errors.EnvError` for an invalid
        setting."""
        self.settings = validate_settings(ShellSettings, options)
        self.tools: Sequence[Callable[..., Any]] = (self.run,) if self.settings.action == "tool" else ()
        self._servers = AsyncExitStack()
        """The MCP servers of the episode, which :meth:`close` ends."""
        self._task: TaskDirectory | None = None
        """The task of the episode; ``None`` before :meth:`reset`."""
        self._world: ForkedWorld | None = None
        """The world of the attempt; ``None`` before :meth:`reset`."""
        self._changes: FileChanges | None = None
        """Finds the files that each command has changed; ``None`` if they are not recorded."""
        self._columns: dict[str, str | float] = {}
        """The columns that are recorded with the present answer."""
        self._commands = 0
        """Number of commands that the agent has run."""
        self._until_s = 0.0
        """Time at which the agent's time is over."""

    async def reset(self, task: Mapping[str, Any]) -> Messages:
        """Begin an episode: fork the world of the task, start the MCP servers, and return the system prompt and the
        instruction."""
        self._task = self.settings.read_task(task)
        worlds = shared_worlds(self.settings.worlds)
        key = get_task_key(task)
        self._world = await worlds.attempt(key, self._task, seed=self.seed, kind=self._attempt_kind)
        if self._world.session is not None:
            self.settings.refuse_unguarded(self._world.session)
        self._changes = None
        self._until_s = now_s() + self._task.agent_s
        if self.settings.mcp:
            await self._start_servers(await self._enter())
            self._until_s = now_s() + self._task.agent_s
        explained = _SYSTEM[self.settings.action] + (_SYSTEM_MCP if self.settings.mcp else "")
        system = explained if self.settings.system is None else self.settings.system
        messages = [Message(role="system", content=system)] if system else []
        return [*messages, Message(role="user", content=self._task.instruction)]

    async def step(self, message: Message) -> StepResult:
        """Run the command of the answer ``message``, and return its output. At the end of the episode, run the tests,
        and return the reward."""
        result = await self._act(message)
        extra, self._columns = self._columns, {}
        return msgspec.structs.replace(result, extra=extra)

    async def _act(self, message: Message) -> StepResult:
        """Carry out an answer: run its command, or end the episode."""
        if self.settings.action == "tool":
            return await self._end()
        command = self._command_in(message)
        if command == SUBMIT:
            return await self._end()
        if command is None:
            self._commands += 1
            reply = "Your answer held no command, or several. Answer with one block:\n```bash\nCOMMAND\n```"
        else:
            reply = await self.run(command)
        return await self._end() if self._is_over() else StepResult(messages=reply)

    async def run(self, command: str) -> str:
        """Run a command in the shell, and return what it prints.

        Args:
            command: The command, as for bash.
        """
        assert self._world is not None
        if self._is_over():
            return _OVER
        self._commands += 1
        moment = self._world.repeat(command)
        if moment is not None:
            self._until_s = now_s() + moment.left_s
            return moment.observation
        observation = await self._observe(await self._enter(), command)
        if not self._is_over():
            await self._world.keep(command=command, observation=observation, left_s=self._until_s - now_s())
        return observation

    async def close(self) -> None:
        """End the session and the MCP servers."""
        await self._servers.aclose()
        if self._world is not None:
            await self._world.leave()

    @property
    def _attempt_kind(self) -> AttemptKind:
        """The kind of the attempt for its world. No snapshot can be taken while MCP servers run, so with servers each
        branch repeats all commands and calls in a world of its own."""
        return AttemptKind.ALONE if self.settings.mcp else self.attempt_kind

    async def _start_servers(self, session: SandboxSession) -> None:
        """Start the MCP servers in the session, and add their tools to :attr:`tools`."""
        offered: dict[str, Tools] = {}
        for name, command in self.settings.mcp.items():
            server = mcp.serve_tools(session, name, command, answer_s=self.settings.mcp_s, left_s=self._left_s)
            offered[name] = await self._servers.enter_async_context(server)
        mcp.refuse_same_names(offered, taken=self.run.__name__ if self.settings.action == "tool" else "")
        calls = [(tool, partial(self._call, tools)) for tools in offered.values() for tool in tools.described]
        self.tools = [*self.tools, *(DescribedTool(tool, call) for tool, call in calls)]

    async def _call(self, tools: Tools, call: ToolCall) -> Message:
        """Call a tool of an MCP server, and return its answer as a message; a message about the missing time if the
        agent's time is over."""
        answer = Message(role="tool", content=_OVER, tool_call_id=call.id, name=call.name, failed=True)
        if self._is_over():
            return answer
        self._commands += 1
        try:
            done = await tools.call(call)
        except EpisodeError as error:
            if error.reason != mcp.FAILED or self._left_s() > 0:
                raise
            return msgspec.structs.replace(answer, content="[the call was ended: wall time]")
        return msgspec.structs.replace(done, content=self._shorten(done.content))

    def _left_s(self) -> float:
        """Return the time that the agent has left, in seconds; negative after its end."""
        return self._until_s - now_s()

    async def _enter(self) -> SandboxSession:
        """Return the session of the attempt. For a branch, it is forked from the origin at the first different
        command."""
        assert self._world is not None
        session = await self._world.enter(self._observe)
        self.settings.refuse_unguarded(session)
        return session

    async def _observe(self, session: SandboxSession, command: str) -> str:
        """Run a command in a session, and return the observation for the model. Record its time and the changed
        files."""
        assert self._task is not None
        if self._changes is None:
            self._changes = FileChanges(task_directory(self._task, session.base_variables))
        left_s = max(0.1, min(self.settings.command_s, self._until_s - now_s()))
        if self.settings.show_changes:
            await self._changes.begin(session)
        begun_s = now_s()
        done = await session.run(command, limits=replace(session.spec.limits, wall_s=left_s))
        self._columns["seconds"] = round(float(self._columns.get("seconds", 0.0)) + now_s() - begun_s, 3)
        if self.settings.show_changes and (files := await self._changes.describe_new_changes(session)):
            self._columns["files"] = ", ".join(filter(None, (str(self._columns.get("files", "")), files)))
        return self._observation(done)

    def _command_in(self, message: Message) -> str | None:
        """Return the command in an answer; ``None`` if the answer contains no command, or several."""
        text = message.content.strip()
        if self.settings.action == "line":
            whole = _FENCED.fullmatch(text.replace("\r\n", "\n"))
            return whole[2].strip() if whole else text
        found = _BLOCK.findall(message.content)
        if not found and text == SUBMIT:
            return SUBMIT
        return found[0].strip() if len(found) == 1 else None

    def _is_over(self) -> bool:
        """Return whether the agent has used all its commands or its time."""
        return self._commands >= self.settings.commands or now_s() >= self._until_s

    async def _end(self) -> StepResult:
        """Run the tests, and return the last result of the episode, with their reward."""
        assert self._task is not None
        await self._servers.aclose()
        graded = await grade(await self._enter(), self._task)
        self._columns |= graded.columns
        return StepResult(reward=graded.reward, done=True)

    def _observation(self, done: Finished) -> str:
        """Return the text that the model reads about a command's result: output, exit code, and lost state."""
        text = self._shorten(done.stdout + done.stderr)
        if done.reason is not Reason.EXITED:
            return f"{text}\n[the command was ended: {done.reason.replace('_', ' ')}]".lstrip("\n")
        ending = f"[exit code {done.exit_code}]" if done.exit_code or not text.strip() else ""
        lost = f"[{done.detail}]" if done.detail else ""
        return "\n".join(part for part in (text.rstrip("\n"), ending, lost) if part)

    def _shorten(self, text: str) -> str:
        """Return a text, or its beginning and its end if it has more than ``output_chars`` characters."""
        most = self.settings.output_chars
        if len(text) <= most:
            return text
        return f"{text[: most // 2]}\n[{len(text) - most} characters left out]\n{text[-(most - most // 2) :]}"
