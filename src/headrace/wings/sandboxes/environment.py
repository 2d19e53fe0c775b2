"""The environment ``shell``: an agent works on a task directory with the commands of a shell, in a session of its own.

row: instruction, directory ─▶ world of the task ─fork─▶ session
answer ─▶ action ─▶ command in the session ─▶ its output is what the model reads next
``submit``, the last command, or the end of its time ─▶ tests ─▶ reward
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
from headrace.wings.sandboxes.settings import WorldSettings, read_settings, task_key
from headrace.wings.sandboxes.tasks import TaskDirectory
from headrace.wings.sandboxes.world import WorldConfig, now_s, shared_worlds

SUBMIT = "submit"
"""The command that ends an episode."""
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_FENCED = re.compile(r"(```+|~~~+)(?:bash|sh|shell|console)?[ \t]*\n(.*?)\n?\1", re.DOTALL)
"""A whole answer that is a block around a command."""
_SYSTEM = {
    "block": "You work in a shell on Linux, without a network. Each answer holds one command in a block:\n"
    f"```bash\nls -la\n```\nYou then read what it prints. When the task is done, answer with the command {SUBMIT}.",
    "line": f"Each answer is one shell command. When the task is done, answer {SUBMIT}.",
    "tool": "You work in a shell on Linux, without a network. Call the tool run with one command at a time. When the "
    "task is done, answer without a call.",
}
"""The instructions to a model, by the form of its actions."""
_SYSTEM_MCP = " In place of a command, an answer may call the other tools that you have."
"""Further instructions where servers offer tools."""
_OVER = "There is no time for more commands: answer without a call."
_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ShellSettings(WorldSettings):
    """The settings of the environment: ``env.options``."""

    action: Literal["block", "line", "tool"] = "block"
    """How an answer gives a command: as a block in triple backquotes, as its whole text, with or without a block
    (three backquotes or tildes) around it, or as a call of a tool."""
    system: str | None = None
    """The system prompt; unset: one that explains the form of actions; empty: none."""
    commands: int = Field(default=30, ge=1)
    """The most commands of an episode; after the last one its tests are run."""
    command_s: float = Field(default=60.0, gt=0)
    """The longest time of one command, in seconds."""
    output_chars: int = Field(default=8000, ge=100)
    """The most characters of a command's output that the model reads: its beginning and its end."""
    show_changes: bool = True
    """Whether the files that each command has changed are shown with its answer; finding them is one more command of
    the session after each."""
    episodes: int = Field(default=64, ge=0)
    """The number of episodes that have ended whose worlds are kept by each worker, so that branches of them
    (``flow.pivots``) continue from the moment where they leave. Branches of others run the commands again."""

    mcp: dict[str, str] = Field(default_factory=dict)
    """MCP servers that run in the session: the command of each, as for bash, by its name. They begin in the directory
    of the task, and talk over their standard input and output. Their tools are offered besides the form of actions; a
    call counts as a command."""
    mcp_s: float = Field(default=60.0, gt=0)
    """The longest wait for one answer of such a server, its start included, in seconds."""

    @model_validator(mode="after")
    def _servers_can_be_run(self) -> Self:
        """Refuse servers without a usable name or a command, and servers where the package of clients is missing."""
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
        """What the worlds of all tasks have in common."""
        return self.world_config(command_s=self.command_s, episodes=self.episodes)


class ShellEnv(Env):
    """One episode of a task directory."""

    def __init__(self, **options: Any) -> None:
        """Read ``env.options``. Raises :class:`~headrace.base.errors.EnvError` for one that cannot be used."""
        self.settings = read_settings(ShellSettings, options)
        self.tools: Sequence[Callable[..., Any]] = (self.run,) if self.settings.action == "tool" else ()
        self._servers = AsyncExitStack()
        self._task: TaskDirectory | None = None
        self._world: ForkedWorld | None = None
        self._changes: FileChanges | None = None
        self._shown: dict[str, str | float] = {}
        self._commands = 0
        self._until_s = 0.0

    async def reset(self, task: Mapping[str, Any]) -> Messages:
        """Begin an episode: fork the world of the task, and return its instruction."""
        self._task = self.settings.read_task(task)
        worlds = shared_worlds(self.settings.worlds)
        key = task_key(task)
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
        """Run the command of an answer, and return its output; at the end, run the tests, and return the reward."""
        result = await self._act(message)
        extra, self._shown = self._shown, {}
        return msgspec.structs.replace(result, extra=extra)

    async def _act(self, message: Message) -> StepResult:
        """Do what an answer says."""
        if self.settings.action == "tool":
            return await self._end()
        command = self._command_in(message)
        if command == SUBMIT:
            return await self._end()
        if command is None:
            self._commands += 1
            said = "Your answer held no command, or several. Answer with one block:\n```bash\nCOMMAND\n```"
        else:
            said = await self.run(command)
        return await self._end() if self._is_over() else StepResult(messages=said)

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
        """End the session."""
        await self._servers.aclose()
        if self._world is not None:
            await self._world.leave()

    @property
    def _attempt_kind(self) -> AttemptKind:
        """The kind of the attempt for its world. A world in which servers run has no snapshot after its beginning, so
        that a branch runs all commands and calls again, in a world of its own."""
        return AttemptKind.ALONE if self.settings.mcp else self.attempt_kind

    async def _start_servers(self, session: SandboxSession) -> None:
        """Start the MCP servers in the session, and offer their tools."""
        offered: dict[str, Tools] = {}
        for name, command in self.settings.mcp.items():
            server = mcp.served(session, name, command, answer_s=self.settings.mcp_s, left_s=self._left_s)
            offered[name] = await self._servers.enter_async_context(server)
        mcp.refuse_same_names(offered, taken=self.run.__name__ if self.settings.action == "tool" else "")
        calls = [(tool, partial(self._call, tools)) for tools in offered.values() for tool in tools.described]
        self.tools = [*self.tools, *(DescribedTool(tool, call) for tool, call in calls)]

    async def _call(self, tools: Tools, call: ToolCall) -> Message:
        """Return a server's answer to a call, which the time of the agent may cut off."""
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
        return msgspec.structs.replace(done, content=self._shortened(done.content))

    def _left_s(self) -> float:
        """Return the time that the agent has left, in seconds."""
        return self._until_s - now_s()

    async def _enter(self) -> SandboxSession:
        """Return the session of the attempt, which begins where a branch leaves its origin."""
        assert self._world is not None
        session = await self._world.enter(self._observe)
        self.settings.refuse_unguarded(session)
        return session

    async def _observe(self, session: SandboxSession, command: str) -> str:
        """Run a command in a session, and return what the model reads of its result."""
        assert self._task is not None
        if self._changes is None:
            self._changes = FileChanges(task_directory(self._task, session.surroundings))
        left_s = max(0.1, min(self.settings.command_s, self._until_s - now_s()))
        if self.settings.show_changes:
            await self._changes.begin(session)
        begun_s = now_s()
        done = await session.run(command, limits=replace(session.spec.limits, wall_s=left_s))
        self._shown["seconds"] = round(float(self._shown.get("seconds", 0.0)) + now_s() - begun_s, 3)
        if self.settings.show_changes and (files := await self._changes.look(session)):
            self._shown["files"] = ", ".join(filter(None, (str(self._shown.get("files", "")), files)))
        return self._observation(done)

    def _command_in(self, message: Message) -> str | None:
        """Return the command of an answer; ``None`` if it has none, or several."""
        text = message.content.strip()
        if self.settings.action == "line":
            whole = _FENCED.fullmatch(text.replace("\r\n", "\n"))
            return whole[2].strip() if whole else text
        found = _BLOCK.findall(message.content)
        if not found and text == SUBMIT:
            return SUBMIT
        return found[0].strip() if len(found) == 1 else None

    def _is_over(self) -> bool:
        """Return whether the agent has used its commands or its time."""
        return self._commands >= self.settings.commands or now_s() >= self._until_s

    async def _end(self) -> StepResult:
        """Run the tests, and end the episode with their reward."""
        assert self._task is not None
        await self._servers.aclose()
        graded = await grade(await self._enter(), self._task)
        self._shown |= graded.columns
        return StepResult(reward=graded.reward, done=True)

    def _observation(self, done: Finished) -> str:
        """Return what the model reads of a command's result."""
        text = self._shortened(done.stdout + done.stderr)
        if done.reason is not Reason.EXITED:
            return f"{text}\n[the command was ended: {done.reason.replace('_', ' ')}]".lstrip("\n")
        ending = f"[exit code {done.exit_code}]" if done.exit_code or not text.strip() else ""
        lost = f"[{done.detail}]" if done.detail else ""
        return "\n".join(part for part in (text.rstrip("\n"), ending, lost) if part)

    def _shortened(self, text: str) -> str:
        """Return the beginning and the end of a text that is too long."""
        most = self.settings.output_chars
        if len(text) <= most:
            return text
        return f"{text[: most // 2]}\n[{len(text) - most} characters left out]\n{text[-(most - most // 2) :]}"
