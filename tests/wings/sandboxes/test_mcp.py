"""MCP servers run in sessions, and their tools are called from outside."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import AttemptKind
from headrace.rollout.environments.entry import as_rollout
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges.mcp import Tools
from headrace.wings.sandboxes import SandboxSession, environment
from headrace.wings.sandboxes.environment import ShellEnv, ShellSettings
from headrace.wings.sandboxes.mcp import FOLDER, serve_tools
from headrace.wings.sandboxes.world import close_shared_worlds, shared_worlds
from tests.wings.sandboxes.conftest import Sandboxes
from tests.wings.sandboxes.task_files import HARBOR, write_task
from tests.wings.sandboxes.test_environment import SOLVED, Saying, block

REAL = '''
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def write(text: str) -> str:
    """Write a file."""
    with open("/tmp/written", "w") as file:
        file.write(text)
    raise ValueError("no such luck")

server.run(transport="stdio")
'''
SERVER = r"""
# A server of bash, for systems without Python: its tools do what their names say. $1: the name of its first tool.
count=0
say() { printf '{"jsonrpc":"2.0",%s}\n' "$1"; }
text() { say "\"id\":$id,\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"$1\"}]}"; }
tool() { printf '{"name":"%s","description":"It can %s.","inputSchema":{"type":"object"}}' "$1" "$1"; }
while IFS= read -r line; do
  [[ $line =~ \"id\":([0-9]+) ]] || continue
  id=${BASH_REMATCH[1]}
  case $line in
    *'"initialize"'*) say "\"id\":$id,\"result\":{\"protocolVersion\":\"2025-06-18\",\"capabilities\":{\"tools\":{}},
\"serverInfo\":{\"name\":\"bash\",\"version\":\"1\"}}" | tr -d '\n'; echo ;;
    *'"cursor":"two"'*) say "\"id\":$id,\"result\":{\"tools\":[$(tool count)]}" ;;
    *'"tools/list"'*) say "\"id\":$id,\"result\":{\"tools\":[$(tool "${1:-echo}")],\"nextCursor\":\"${2:-two}\"}" ;;
    *'"name":"echo"'*) arg=${line#*\"text\":\"}; text "${arg%%\"*}" ;;
    *'"name":"count"'*) ((count += 1)); text "$count in $PWD with $WORD" ;;
    *'"name":"noise"'*)
      echo 'a line of a log'
      say '"method":"notifications/message","params":{"level":"info","data":"x"}'
      text calm ;;
    *'"name":"ask"'*)
      say '"id":"first","method":"ping"' && say '"id":"second","method":"ping"'
      IFS= read -r answer && IFS= read -r other
      [[ $answer$other == *'"id":"first"'*'"id":"second"'* && $other == *'"result"'* ]] && text answered ;;
    *'"name":"log"'*) yes "$(printf '%.0sx' {1..79})" | head -n 5000; text logged ;;
    *'"name":"die"'*) echo 'out of words' >&2; exit 3 ;;
    *'"name":"flood"'*) yes "$(say '"method":"notifications/progress"')" ;;
    *'"name":"gush"'*) cat /dev/zero ;;
    *'"name":"hang"'*) : ;;
    *) say "\"id\":$id,\"error\":{\"code\":-32601,\"message\":\"unknown\"}" ;;
  esac
done
"""


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=json.dumps(arguments))


def bash_server(
    session: SandboxSession, arguments: str = "", answer_s: float = 60.0
) -> AbstractAsyncContextManager[Tools]:
    return serve_tools(session, "one", f"bash /tmp/server.sh {arguments}", answer_s=answer_s, left_s=lambda: 600.0)


def test_tools_are_listed_and_called_in_every_kind_of_sandbox(any_sandboxes: Sandboxes) -> None:
    """Long messages, lines that are no messages, and questions of the server come through; the shell of the session
    notices nothing, and cannot disturb by its directory or variables."""

    async def body(session: SandboxSession) -> None:
        await session.write({"/tmp/server.sh": SERVER})
        async with bash_server(session) as tools:
            assert [(tool.name, tool.description) for tool in tools.described] == [
                ("echo", "It can echo."), ("count", "It can count."),
            ]  # fmt: skip
            await session.run("cd /tmp; export PATH=/none")
            before = (session.directory, session.variables)
            for text in ("hello", "é" * 40_000, "again"):
                assert (await tools.call(call("echo", text=text))).content == text
            assert [(await tools.call(call(name))).content for name in ("noise", "ask", "count", "count")] == [
                "calm", "answered", "1 in /workspace with ", "2 in /workspace with ",
            ]  # fmt: skip
            refused = await tools.call(call("nothing"))
            assert (refused.failed, refused.content) == (True, "error: unknown")
            assert (session.directory, session.variables) == before
        assert await session.end_background() == 1

    with_session = any_sandboxes.start()
    any_sandboxes(body(with_session))
    any_sandboxes(with_session.stop())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("die", "'one' in the session has ended: out of words"),
        ("flood", "has written more than 1048576 bytes or 10000 lines for one"),
        ("gush", "has written more than 1048576 bytes or 10000 lines for one"),
        ("hang", r"has not answered in 0\.5 s"),
    ],
)
def test_a_server_that_fails_in_a_call_fails_the_episode_by_name(
    sandboxes: Sandboxes, session: SandboxSession, name: str, words: str
) -> None:
    async def body() -> None:
        await session.write({"/tmp/server.sh": SERVER})
        async with bash_server(session, answer_s=0.5 if name == "hang" else 60.0) as tools:
            with pytest.raises(EpisodeError, match=words) as failed:
                await tools.call(call(name))
            assert failed.value.reason == "session_mcp"
            with pytest.raises(EpisodeError, match=words):  # it is not called again
                await tools.call(call("count"))
        assert (await session.run("echo well")).stdout == "well\n"

    sandboxes(body())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-server --now", "has ended: .*no-such-server: command not found"),
        ("sleep 99", r"has not answered in 0\.5 s"),
        ("exec cat", "cannot be talked to: MCPError"),
        ("seq 20000; exec cat > /dev/null", "has written more than 1048576 bytes or 10000 lines"),
        ("yes", "has written more than 1048576 bytes or 10000 lines"),
        ("bash /tmp/server.sh echo on", "cannot be talked to: EpisodeError: .*more than 100 pages"),
    ],
)
def test_a_server_that_does_not_start_or_speaks_otherwise_is_told_by_name(
    sandboxes: Sandboxes, session: SandboxSession, command: str, words: str
) -> None:
    async def body() -> None:
        await session.write({"/tmp/server.sh": SERVER})
        answer_s = 0.5 if "sleep" in command else 60.0
        with pytest.raises(EpisodeError, match=words) as failed:
            async with serve_tools(session, "one", command, answer_s=answer_s, left_s=lambda: 600.0):
                raise AssertionError("it has no tools")
        assert failed.value.reason == "session_mcp"
        assert (await session.run("echo well")).stdout == "well\n"

    sandboxes(body())


def test_pipes_that_cannot_be_made_are_told_by_name(sandboxes: Sandboxes, session: SandboxSession) -> None:
    async def body() -> None:
        await session.write({FOLDER: "a file"})
        with pytest.raises(EpisodeError, match=r"cannot be started: .*File exists") as failed:
            async with bash_server(session):
                raise AssertionError("it has no tools")
        assert failed.value.reason == "session_mcp"

    sandboxes(body())


def test_an_ended_session_is_no_fault_of_its_server(sandboxes: Sandboxes) -> None:
    async def body(session: SandboxSession) -> None:
        await session.write({"/tmp/server.sh": SERVER})
        async with bash_server(session) as tools:
            await session.stop()
            with pytest.raises(EpisodeError) as failed:
                await tools.call(call("count"))
            assert failed.value.reason == "session_ended"

    sandboxes(body(sandboxes.start()))


def test_a_server_of_the_package_runs_in_a_session(sandboxes: Sandboxes, session: SandboxSession) -> None:
    async def body() -> None:
        await session.write({"server.py": REAL})
        command = f"{sys.executable} server.py"
        async with serve_tools(session, "sums", command, answer_s=100.0, left_s=lambda: 600.0) as tools:
            assert [tool.name for tool in tools.described] == ["add", "write"]
            assert tools.described[0].parameters["required"] == ["a", "b"]
            assert (await tools.call(call("add", a=17, b=25))).content == "42"
            failed = await tools.call(call("write", text="kept"))
            assert failed.failed
            assert "Error executing tool write" in failed.content
        assert await session.read("/tmp/written") == b"kept"

    sandboxes(body())


class Offered(Saying):
    """A model that keeps what tools it is offered, too."""

    offered: tuple[str, ...] = ()
    system = ""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions | None = None
    ) -> Reply:
        self.offered = tuple(tool.name for tool in tools)
        self.system = messages[0].content
        return await super().reply(messages, tools, options)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made
        made.run(close_shared_worlds())


ONE = {"one": "bash server.sh"}


def attempt(
    runner: asyncio.Runner,
    task: Path,
    says: Sequence[str | ToolCall],
    kind: AttemptKind = AttemptKind.ALONE,
    **options: Any,
) -> tuple[Episode, Offered]:
    """Attempt a task, beside which ``server.sh`` lies, with what a model says."""
    model = Offered(says)
    write_task(task, {**({} if task.exists() else HARBOR), "environment/server.sh": SERVER})
    with ThreadPoolExecutor(1) as executor:
        rollout = as_rollout(partial(ShellEnv, **{"image": "machine", "mcp": ONE, **options}), executor)
        return runner.run(rollout({"directory": str(task)}, EpisodePolicy(model, attempt_kind=kind))), model


def test_a_model_calls_servers_beside_the_shell_of_the_same_session(runner: asyncio.Runner, tmp_path: Path) -> None:
    """The server begins in the directory of the task with its variables, and has ended when the tests run."""
    tests = HARBOR["tests/test.sh"].replace("test -e /app", "! grep -q server.sh /proc/[0-9]*/cmdline && test -e /app")
    task = write_task(tmp_path / "one", HARBOR, **{"tests/test.sh": tests})
    says = [call("count"), block("cd /; export WORD=other"), call("count"), call("echo", text="x" * 300),
            block("cat /proc/[0-9]*/cmdline | grep -c server.sh"), block(f"cd /app; {SOLVED}"), "submit"]  # fmt: skip
    episode, model = attempt(runner, task, says, output_chars=100)
    assert episode.reward == 1.0
    assert model.offered == ("echo", "count")
    assert "call the other tools" in model.system
    assert model.read[1] == "1 in /app with set"
    assert model.read[3] == "2 in /app with set"
    assert model.read[4] == f"{'x' * 50}\n[200 characters left out]\n{'x' * 50}"
    assert int(model.read[5]) >= 1


def test_calls_of_servers_count_as_commands(runner: asyncio.Runner, tmp_path: Path) -> None:
    says = [call("count"), call("run", command="pwd"), call("count"), "done"]
    _, model = attempt(runner, tmp_path / "one", says, action="tool", commands=2)
    assert model.offered == ("run", "echo", "count")
    assert model.read[1:] == [
        "1 in /app with set", "/app", "There is no time for more commands: answer without a call.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mcp": {**ONE, "two": "bash server.sh more"}}, "the tool 'count' of the MCP server 'two' .*server 'one'"),
        (
            {"mcp": {"one": "bash server.sh run"}, "action": "tool"},
            "the tool 'run' of the MCP server 'one' .*the shell",
        ),
        ({"mcp": {"one": "bash server.sh count"}}, "the tool 'count' .* one of the MCP server 'one'"),
    ],
)
def test_tools_of_one_name_are_refused(
    runner: asyncio.Runner, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(EpisodeError, match=words) as failed:
        attempt(runner, tmp_path / "one", [], **options)
    assert failed.value.reason == "session_mcp"


def test_a_server_that_dies_fails_the_episode(runner: asyncio.Runner, tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="'one' in the session has ended: out of words") as failed:
        attempt(runner, tmp_path / "one", [call("die")], mcp={"one": "bash server.sh die"})
    assert failed.value.reason == "session_mcp"


def test_the_end_of_the_agents_time_ends_a_call_and_not_the_episode(runner: asyncio.Runner, tmp_path: Path) -> None:
    short = HARBOR["task.toml"].replace("timeout_sec = 60.0", "timeout_sec = 1.0")
    task = write_task(tmp_path / "one", HARBOR, **{"task.toml": short})
    says = [call("hang"), call("hang"), "submit"]
    episode, model = attempt(runner, task, says, mcp={"one": "bash server.sh hang"})
    assert episode.reward == 0.25
    assert model.read[1] == "[the call was ended: wall time]"
    assert model.read[2].startswith("There is no time")


def test_a_branch_runs_commands_and_calls_again_in_a_world_of_its_own(runner: asyncio.Runner, tmp_path: Path) -> None:
    says = [call("count"), block("echo more >> made; wc -l < made"), call("count"), block("submit")]
    read = [
        attempt(runner, tmp_path / "one", list(says), kind)[1].read
        for kind in (AttemptKind.ORIGIN, AttemptKind.BRANCH, AttemptKind.BRANCH)
    ]
    assert read[0][1:] == ["1 in /app with set", "1", "2 in /app with set"]
    assert read[1] == read[2] == read[0]

    async def kept() -> int:
        return len(shared_worlds(ShellSettings(image="machine", mcp=ONE).worlds)._moments._kept)

    assert runner.run(kept()) == 0  # moments without a snapshot are of no use


@pytest.mark.parametrize(
    ("servers", "words"),
    [({"a b": "cat"}, r"mcp\.a b='cat' is no server"), ({"one": " "}, r"mcp\.one=' ' is no server")],
)
def test_servers_that_cannot_be_run_are_refused_before(servers: dict[str, str], words: str) -> None:
    with pytest.raises(EnvError, match=words):
        ShellEnv(mcp=servers)


def test_the_package_of_clients_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"needs the package mcp"):
        ShellEnv(mcp=ONE)
    ShellEnv()


def test_a_server_may_write_long_logs_over_many_calls(sandboxes: Sandboxes, session: SandboxSession) -> None:
    """The bounds hold for one answer, not for the life of a server."""

    async def body() -> None:
        await session.write({"/tmp/server.sh": SERVER})
        async with bash_server(session) as tools:
            for _ in range(3):
                assert (await tools.call(call("log"))).content == "logged"

    sandboxes(body())
