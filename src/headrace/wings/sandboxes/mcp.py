"""MCP servers in the session of an episode: each runs in the background, and its tools are called from outside.

    client ─ message ─▶ command of the session: line ─▶ /tmp/headrace/mcp/NAME.in ─▶ server
           ◀─ lines ──  the same one, or the next:      /tmp/headrace/mcp/NAME.out ◀─┘

No network is needed, nor a way into the sandbox besides its commands, of which one runs at a time. The server holds
both ends of its pipes open, so that it sees no end of them between two commands; a command opens one end, and sees it.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from headrace.base.errors import EpisodeError, visible
from headrace.rollout.scoring.sandbox import Reason
from headrace.wings.bridges.mcp import LineChannel, Tools, connected
from headrace.wings.sandboxes.base import Execution, SandboxSession
from headrace.wings.sandboxes.world import now_s

FAILED = "session_mcp"
"""The reason of episodes that fail by a server."""
FOLDER = "/tmp/headrace/mcp"
"""The folder of a session for the pipes of its servers, and for what they write to their standard error."""
MAX_LINES = 10_000
"""The most lines that a server may write for one answer: reading each costs more than its bytes do."""
QUOTED = 600
"""The number of bytes of a server's last words that an error message quotes."""
_START = """mkdir -p {folder} && mkfifo {place}.in {place}.out && {{
{bash} --norc --noprofile -c {command} <>{place}.in 1<>{place}.out 2>{place}.err 99>&- &
}}"""
"""Start a server, in the directory and with the variables of the shell."""
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
"""Write the standard input to the server ``$1`` if there is a ``$2``. If there is a ``$3``, wait for what it writes,
and read that: at most 15 times what a pipe holds, which is less than the output of a command."""


class SessionServer(LineChannel):
    """One MCP server in a session."""

    def __init__(self, session: SandboxSession, name: str, *, answer_s: float, left_s: Callable[[], float]) -> None:
        """The server ``name`` may take ``answer_s`` seconds for an answer, as long as ``left_s()`` seconds are left."""
        self._session = session
        self._name = name
        self._answer_s = answer_s
        self._left_s = left_s
        self._until_s = 0.0
        self._taken = 0
        self._lines = 0
        self._begun = b""

    async def start(self, command: str) -> None:
        """Start the server. Raises :class:`~headrace.base.errors.EpisodeError` where its pipes cannot be made."""
        words = {"folder": FOLDER, "place": f"{FOLDER}/{self._name}", "command": shlex.quote(command)}
        done = await self._session.run(_START.format(bash=shlex.quote(self._session.programs["bash"]), **words))
        if not done.ok:
            raise self.failure(
                f"cannot be started: {visible(done.stderr.strip()[-QUOTED:])}", "free the disk, and /tmp"
            )

    def begin(self) -> None:
        """Begin a request: its exchanges have one time, and one bound on what the server writes."""
        self._until_s = now_s() + min(self._answer_s, self._left_s())
        self._taken = len(self._begun)
        self._lines = 0

    async def exchange(self, line: bytes, *, waits: bool) -> list[bytes]:
        """Send a line, unless it is empty. If ``waits``, wait until the server has written something, and return the
        lines that are complete. Raises :class:`~headrace.base.errors.EpisodeError` if the server has ended, writes too
        much or takes too long."""
        limits = replace(self._session.spec.limits, wall_s=max(0.1, self._until_s - now_s()))
        flags = ("send" if line else "", "read" if waits else "")
        done = await self._session.run_apart(_EXCHANGE, self._name, *flags, stdin=line, limits=limits)
        await self._refuse_failed(done, waits=waits)
        self._taken += len(done.stdout)
        self._lines += done.stdout.count(b"\n")
        most = limits.output_bytes
        if self._taken > most or self._lines > MAX_LINES:
            raise self.failure(
                f"has written more than {most} bytes or {MAX_LINES} lines for one answer",
                "have it write less, and its log to its standard error",
            )
        *lines, self._begun = (self._begun + done.stdout).split(b"\n")
        return [each for each in lines if each.strip()]

    async def _refuse_failed(self, done: Execution, *, waits: bool) -> None:
        """Raise :class:`~headrace.base.errors.EpisodeError` for an exchange that did not come to its end."""
        if done.reason is Reason.WALL_TIME:
            raise self.failure(
                f"has not answered in {self._answer_s:g} s",
                "set env.options.mcp_s to more, or correct the server",
            )
        if done.reason is not Reason.EXITED or done.status != 0 or (waits and not done.stdout):
            last = await self._session.run_apart(f"tail -c {QUOTED} {FOLDER}/{self._name}.err")
            words = visible(last.stdout.decode("utf-8", "replace").strip())
            cause = "" if done.reason is Reason.EXITED else f" ({done.reason.replace('_', ' ')})"
            raise self.failure(f"has ended{cause}{': ' + words if words else ''}", "correct its command, or the server")

    def failure(self, text: str, remedy: str) -> EpisodeError:
        """Return the error of an episode whose server has failed as ``text`` says."""
        return EpisodeError(f"the MCP server {self._name!r} in the session {text}", remedy=remedy, reason=FAILED)


@asynccontextmanager
async def served(
    session: SandboxSession, name: str, command: str, *, answer_s: float, left_s: Callable[[], float]
) -> AsyncIterator[Tools]:
    """Run an MCP server in a session for the body of ``async with``, and yield its tools. It is ended with the other
    processes of the session. Raises :class:`~headrace.base.errors.EpisodeError` if it does not start or speaks another
    protocol."""
    server = SessionServer(session, name, answer_s=answer_s, left_s=left_s)
    await server.start(command)
    connection = connected(server, 2 * answer_s)  # the server's own time is over before
    try:
        tools = await connection.__aenter__()
    except Exception as error:  # noqa: BLE001 - errors of the client come in groups; all say that there is no connection
        raise server.error or server.failure(f"cannot be talked to: {_words(error)}", "correct the server") from None
    try:
        yield tools
    finally:
        await connection.__aexit__(None, None, None)


def _words(error: BaseException) -> str:
    """Return what an error says, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return visible(f"{type(error).__name__}: {error}"[:QUOTED])


def refuse_same_names(offered: Mapping[str, Tools], *, taken: str) -> None:
    """Raise :class:`~headrace.base.errors.EpisodeError` if two servers offer tools of one name, or one offers a tool
    with the name of the shell's own, ``taken``."""
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
