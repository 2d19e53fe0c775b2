"""MCP servers that run inside the session of an episode. The environment calls their tools from outside.

    client ─ message ─▶ command of the session: line ─▶ /tmp/headrace/mcp/NAME.in ─▶ server
           ◀─ lines ──  the same or a later command:    /tmp/headrace/mcp/NAME.out ◀─┘

Messages pass through commands of the session, one at a time, so neither a network nor another channel is needed. The
server opens both ends of its named pipes, so that its pipes do not end between two commands. A command opens only one
end of a pipe, so that it detects the end of the server.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from headrace.base.errors import EpisodeError, visible
from headrace.base.tasks import first_error
from headrace.rollout.scoring.sandbox import Reason
from headrace.wings.bridges.mcp import LineChannel, Tools, connected
from headrace.wings.sandboxes.base import Execution, SandboxSession
from headrace.wings.sandboxes.world import now_s

FAILED = "session_mcp"
"""The reason of episodes that fail because of an MCP server."""
FOLDER = "/tmp/headrace/mcp"
"""The folder in a session with the servers' pipes and error output."""
MAX_LINES = 10_000
"""The largest number of lines of one answer, because each line costs more time than its bytes."""
QUOTED = 600
"""The number of bytes of a server's error output that an error message quotes."""
_START = """mkdir -p {folder} && mkfifo {place}.in {place}.out && {{
{bash} --norc --noprofile -c {command} <&5 >&6 2>{place}.err 5>&- 6>&- 99>&- &
}} 5<>{place}.in 6<>{place}.out"""
"""Start a server in the background, in the directory and with the variables of the shell. The shell opens the pipes
before the server's process begins: a first exchange that comes before the process is there must find a reader and a
writer, or the server would count as ended."""
_EXCHANGE = f"""cd {FOLDER} || exit
if [[ $2 ]]; then
  exec 3<>"$1.in" 4>"$1.in" 3>&-  # opened without waiting for a reader; without one, writing fails
  cat >&4 || exit
  exec 4>&-
fi
if [[ $3 ]]; then
  exec 3<>"$1.out" 5<"$1.out" 3>&-  # opened without waiting for a writer; without one, it has ended
  for part in {{1..15}}; do
    dd bs=65536 count=1 status=none <&5
    read -r -t 0 -u 5 || break
  done
fi"""
"""Write the standard input to the server ``$1`` if ``$2`` is not empty. If ``$3`` is not empty, wait for output of the
server, and print at most 15 blocks of 64 KiB, which is less than the output limit of a command."""


class SessionServer(LineChannel):
    """A channel to one MCP server in a session; each exchange of messages is a command of the session."""

    def __init__(self, session: SandboxSession, name: str, *, answer_s: float, left_s: Callable[[], float]) -> None:
        """Create the channel to the server ``name`` in ``session``. An answer may take ``answer_s`` seconds, but at
        most ``left_s()``, the agent's time left."""
        self._session = session
        self._name = name
        self._answer_s = answer_s
        self._left_s = left_s
        self._until_s = 0.0
        """Time until which the present request must be answered."""
        self._num_bytes = 0
        """Number of bytes of output of the present request."""
        self._num_lines = 0
        """Number of lines of output of the present request."""
        self._incomplete = b""
        """The last line of the output, whose end has not arrived."""

    async def start(self, command: str) -> None:
        """Start the server with a shell command. Raises :class:`~headrace.base.errors.EpisodeError` if its pipes cannot
        be made."""
        words = {"folder": FOLDER, "place": f"{FOLDER}/{self._name}", "command": shlex.quote(command)}
        done = await self._session.run(_START.format(bash=shlex.quote(self._session.programs["bash"]), **words))
        if not done.ok:
            raise self.make_error(
                f"cannot be started: {visible(done.stderr.strip()[-QUOTED:])}", "free the disk, and /tmp"
            )

    def begin(self) -> None:
        """Begin a request: start its time limit, and reset the count of its output."""
        self._until_s = now_s() + min(self._answer_s, self._left_s())
        self._num_bytes = len(self._incomplete)
        self._num_lines = 0

    async def exchange(self, line: bytes, *, waits: bool) -> list[bytes]:
        """Send ``line``, unless it is empty. If ``waits``, wait for output of the server. Return the complete lines of
        the output. Raises :class:`~headrace.base.errors.EpisodeError` if the server has ended, writes too much or takes
        too long."""
        limits = replace(self._session.spec.limits, wall_s=max(0.1, self._until_s - now_s()))
        flags = ("send" if line else "", "read" if waits else "")
        done = await self._session.run_apart(_EXCHANGE, self._name, *flags, stdin=line, limits=limits)
        await self._refuse_failed(done, waits=waits)
        self._num_bytes += len(done.stdout)
        self._num_lines += done.stdout.count(b"\n")
        most = limits.output_bytes
        if self._num_bytes > most or self._num_lines > MAX_LINES:
            raise self.make_error(
                f"has written more than {most} bytes or {MAX_LINES} lines for one answer",
                "have it write less, and its log to its standard error",
            )
        *lines, self._incomplete = (self._incomplete + done.stdout).split(b"\n")
        return [each for each in lines if each.strip()]

    async def _refuse_failed(self, done: Execution, *, waits: bool) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` if an exchange failed: by its time limit, or because the
        server has ended."""
        if done.reason is Reason.WALL_TIME:
            raise self.make_error(
                f"has not answered in {self._answer_s:g} s", "set env.options.mcp_s to more, or correct the server"
            )
        if done.reason is not Reason.EXITED or done.status != 0 or (waits and not done.stdout):
            last = await self._session.run_apart(f"tail -c {QUOTED} {FOLDER}/{self._name}.err")
            words = visible(last.stdout.decode("utf-8", "replace").strip())
            cause = "" if done.reason is Reason.EXITED else f" ({done.reason.replace('_', ' ')})"
            raise self.make_error(
                f"has ended{cause}{': ' + words if words else ''}", "correct its command, or the server"
            )

    def make_error(self, text: str, remedy: str) -> EpisodeError:
        """Return the error of an episode whose server has failed as ``text`` says; ``remedy`` says what the user can
        do."""
        return EpisodeError(f"the MCP server {self._name!r} in the session {text}", remedy=remedy, reason=FAILED)


@asynccontextmanager
async def serve_tools(
    session: SandboxSession, name: str, command: str, *, answer_s: float, left_s: Callable[[], float]
) -> AsyncIterator[Tools]:
    """Start the MCP server ``name`` in a session by the shell command ``command``, and yield its tools for the body of
    ``async with``. The server ends with the session. Raises :class:`~headrace.base.errors.EpisodeError` if it does not
    start or does not speak MCP. An answer may take ``answer_s`` seconds, but at most ``left_s()``, the agent's time
    left."""
    server = SessionServer(session, name, answer_s=answer_s, left_s=left_s)
    await server.start(command)
    connection = connected(server, 2 * answer_s)  # the server's own, shorter limit raises the better error
    try:
        tools = await connection.__aenter__()
    except Exception as error:  # noqa: BLE001 - errors of the client come in groups; all say that there is no connection
        raise server.error or server.make_error(f"cannot be talked to: {_words(error)}", "correct the server") from None
    try:
        yield tools
    finally:
        await connection.__aexit__(None, None, None)


def _words(error: BaseException) -> str:
    """Return the message of an error; of a group of errors, the message of the first."""
    error = first_error(error)
    return visible(f"{type(error).__name__}: {error}"[:QUOTED])


def refuse_same_names(offered: Mapping[str, Tools], *, taken: str) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` if two servers of ``offered`` (tools by the server's name)
    offer tools with the same name, or if a tool has the name ``taken`` of the shell's own tool."""
    owners = {taken: "the shell"} if taken else {}
    for server, tools in offered.items():
        for tool in tools.described:
            if tool.name in owners:
                raise EpisodeError(
                    f"the tool {tool.name!r} of the MCP server {server!r} has the name of one of {owners[tool.name]}",
                    remedy="rename one of them, or leave a server out of env.options.mcp",
                    reason=FAILED,
                )
            owners[tool.name] = f"the MCP server {server!r}"
