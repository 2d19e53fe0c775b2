"""The local drivers: sessions in the jail of Headrace or in bubblewrap, started by one host process on this machine.

    LocalDriver ── control ── host process         started by the driver, ends with it
    LocalSession ══ channel ══ supervisor           one for each session, and a new one after each snapshot

Snapshots: where the kernel has overlay file systems, a snapshot freezes the layer that the session has written, and the
session continues in a new layer above it; so does each fork. Elsewhere ``tar`` in the session copies the files to a
nameless file on disk. The session receives its file descriptor, so that no other process copies the bytes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal, Self

from headrace.base.clock import RealClock
from headrace.base.environ import raise_file_limit
from headrace.base.errors import EnvError, EpisodeError
from headrace.rollout.scoring import sandbox
from headrace.rollout.scoring.sandbox import Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.run import ENVIRONMENT, readable_paths, reason_for_signal
from headrace.wings.sandboxes.base import (
    DriverLost,
    Execution,
    SandboxDriver,
    SandboxSession,
    SandboxSnapshot,
    SandboxSpec,
    SessionEnded,
    make_unusable_snapshot_error,
    refuse_invalid,
)
from headrace.wings.sandboxes.local import frames
from headrace.wings.sandboxes.local.files import MOST_OPEN, CopiedFiles, LayerFiles
from headrace.wings.sandboxes.local.forwards import PortForward, serve_forwards

HOST = Path(__file__).with_name("host.py")
STARTED_S = 20.0
"""The longest time that a session may take to start, in seconds; usually it takes milliseconds."""
GRACE_S = 15.0
"""The time after the deadline of a command within which its result must arrive, in seconds; then the session is
killed."""
BUFFER_BYTES = 1 << 20
"""The size of the buffers between a session and this process, in bytes."""
MAX_LAYERS = 200
"""The largest number of layers of a session, one for each snapshot in its history: the kernel's mount options have at
most one page of memory."""
PROCESS_LIMITS = ("cpu_s", "file_bytes", "open_files", "memory_bytes", "address_bytes")
"""The limits that the kernel enforces for each process; one command may have its own."""
NOT_COPIED = ("/proc", "/.headrace")
"""Paths that a copy of the files excludes, because every session has its own."""


_EXACT = ("--format=posix", "--pax-option=delete=atime,delete=ctime", "--xattrs")
"""Options of tar that keep times to the nanosecond, which ``make`` compares, and extended attributes."""


class LocalDriver(SandboxDriver):
    """A driver of sessions on this machine, with one host process. Create it with :meth:`open`."""

    serves_forwards = True

    def __init__(self, kind: str, control: socket.socket, process: Process, readable: list[str]) -> None:
        """Create the driver of ``kind``, connected to the host process ``process`` through the socket ``control``.
        Sessions can read the paths ``readable``."""
        self.kind = kind
        self._control = control
        self._process = process
        self._numbers = count()
        """Numbers the stores of this driver's sessions."""
        self._uses: Counter[str] = Counter()
        """Number of sessions and snapshots that use each store."""
        self._sessions: set[LocalSession] = set()
        """The running sessions."""
        self.readable = readable
        """The paths of this machine that sessions can read."""
        self.fixed: list[str] = []
        """The folders that every session has from the start and cannot change."""
        self.missing: Mapping[str, str] = {}

    @classmethod
    async def open(cls, kind: str, readable: Sequence[str] = (), *, bwrap: str = "") -> Self:
        """Start a host process and return its driver, of the kind ``jail`` or ``bubblewrap``. Sessions can read the
        system's programs, this Python and the paths ``readable``. ``bwrap`` is the path of bubblewrap, for that kind.
        Raises :class:`~headrace.base.errors.EnvError` if this machine cannot run such sessions."""
        paths = readable_paths(readable)
        raise_file_limit(MOST_OPEN)
        order = {
            "readable": paths,
            "bwrap": bwrap,
            "sandbox": str(Path(sandbox.__file__).parent),
            "python": sys.executable,
            "limits": asdict(SandboxLimits()),
        }
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        with other_end:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(HOST), str(other_end.fileno()), json.dumps(order),
                pass_fds=(other_end.fileno(),), env={}, cwd="/", stdin=DEVNULL,
            )  # fmt: skip
        driver = cls(kind, control, process, paths)
        async with asyncio.timeout(STARTED_S):
            hello = json.loads(await asyncio.get_running_loop().sock_recv(control, 1 << 16) or b"{}")
        if "missing" not in hello:
            await driver.close()
            raise EnvError(
                f"sandboxes of kind {kind!r} cannot be made here: {hello.get('error', 'the host has ended')}",
                remedy="allow user namespaces to this user, or choose another kind",
            )
        driver.missing, driver.fixed = hello["missing"], hello["fixed"]
        return driver

    @property
    def overlays(self) -> bool:
        """Whether snapshots are overlay layers; if not, they are copies."""
        return self.kind == "jail" and "overlay" not in self.missing

    async def start(self, spec: SandboxSpec) -> LocalSession:
        """Start a session, and make its directory. Raises :class:`~headrace.base.errors.EpisodeError` for a spec with
        an image."""
        self.refuse_closed()
        refuse_invalid(spec)
        if spec.image:
            raise EpisodeError(
                f"sandboxes of kind {self.kind!r} have no images, and image={spec.image!r} is one",
                remedy="leave it empty, or choose a kind with images, such as docker",
                reason="task_image",
            )
        session = await self._begin(spec, [self._new_layer()], 0)
        await session.prepare()
        return session

    async def fork(self, snapshot: SandboxSnapshot) -> LocalSession:
        """Start a session that continues from a snapshot of this driver."""
        self.refuse_closed()
        if snapshot.released:
            raise make_unusable_snapshot_error()
        files = self._get_files(snapshot)
        layers = [*files.layers, self._new_layer()] if isinstance(files, LayerFiles) else [self._new_layer()]
        session = await self._begin(snapshot.spec, layers, files.user)
        if isinstance(files, CopiedFiles):
            try:
                await session.put_files(files)
            except BaseException:
                await session.stop()
                raise
        session.directory, session.variables = snapshot.directory, dict(snapshot.variables)
        return session

    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Free the files of a snapshot; layers that a fork uses are freed after the fork."""
        if not snapshot.released:
            files = self._get_files(snapshot)
            snapshot.released = True
            if isinstance(files, LayerFiles):
                await self.drop(files.layers)
            else:
                files.close()

    def _get_files(self, snapshot: SandboxSnapshot) -> LayerFiles | CopiedFiles:
        """Return the files of a snapshot. Raises :class:`~headrace.base.errors.EpisodeError` if they belong to another
        driver, whose layers have the same names."""
        files = snapshot.files
        if not isinstance(files, LayerFiles | CopiedFiles) or files.driver is not self:
            raise make_unusable_snapshot_error()
        return files

    async def close(self) -> None:
        """End the host process, and with it all sessions and their files."""
        self.closed = True
        for session in list(self._sessions):
            session.lose("its driver was closed")
        self._control.close()
        await self._process.wait()

    async def _begin(self, spec: SandboxSpec, layers: list[str], user: int) -> LocalSession:
        """Start a session on ``layers``, the last of which is new. ``user`` owns its files; 0: a user that the host
        chooses."""
        session = LocalSession(self, spec, layers, user)
        self.keep(layers)
        self._sessions.add(session)
        try:
            await session.connect()
        except BaseException:
            await session.stop()
            raise
        return session

    def _new_layer(self) -> str:
        """Return the name of the first layer of a new store, as ``STORE/NUMBER``."""
        return f"{next(self._numbers)}/0"

    async def start_supervisor(self, order: dict[str, Any]) -> tuple[socket.socket, socket.socket]:
        """Let the host process start a supervisor for one session, which ``order`` describes. Return the channel to the
        supervisor, and a socket for file descriptors, through which this process receives the session's listening
        sockets and sends files."""
        channel, other_end = socket.socketpair()
        descriptors, session_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        descriptors.setblocking(False)
        with other_end, session_end:
            try:
                await self._send({"do": "start", **order}, [other_end.fileno(), session_end.fileno()])
            except BaseException:
                channel.close()
                descriptors.close()
                raise
        return channel, descriptors

    async def kill(self, name: str) -> None:
        """Kill the supervisor of the session ``name``, and with it the session."""
        await self._send({"do": "kill", "session": name})

    def keep(self, layers: Sequence[str]) -> None:
        """Add one user to the reference counts of the stores of ``layers``."""
        self._uses.update({layer.partition("/")[0] for layer in layers})

    async def drop(self, layers: Sequence[str]) -> None:
        """Remove one user from the reference counts of the stores of ``layers``. A store without users is freed."""
        for store in {layer.partition("/")[0] for layer in layers}:
            self._uses[store] -= 1
            if not self._uses[store]:
                del self._uses[store]
                with suppress(EnvError, OSError):  # the host has ended, which frees the store
                    await self._send({"do": "drop", "store": store})

    def forget(self, session: LocalSession) -> None:
        """Remove an ended session from the set of running sessions."""
        self._sessions.discard(session)

    async def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message with file descriptors to the host process. A full socket buffer is tried again after a
        millisecond. Raises :class:`~headrace.wings.sandboxes.base.DriverLost` if the host process has ended."""
        data = [json.dumps(message).encode()]
        while True:
            try:
                socket.send_fds(self._control, data, descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except (BrokenPipeError, ConnectionResetError):
                raise DriverLost(
                    f"the host of the sandboxes of kind {self.kind!r} has ended", remedy="open the driver again"
                ) from None


class LocalSession(SandboxSession):
    """A session on this machine, connected to its supervisor."""

    def __init__(self, driver: LocalDriver, spec: SandboxSpec, layers: list[str], user: int) -> None:
        """Create a session of ``driver`` with the settings ``spec`` on ``layers``, whose files the user id ``user``
        owns; 0: the host chooses a user."""
        super().__init__(spec)
        self._driver = driver
        self._layers = layers
        self._user = user
        self._until_s = RealClock().now() + spec.life_s
        """Time at which the session's lifetime is over."""
        self._reader: asyncio.StreamReader | None = None
        """Reads the supervisor's frames; ``None`` while no supervisor runs."""
        self._writer: asyncio.StreamWriter | None = None
        """Writes frames to the supervisor; ``None`` while no supervisor runs."""
        self._descriptors: socket.socket | None = None
        """The socket that passes file descriptors to the supervisor; ``None`` while none runs."""
        self._forwards: list[PortForward] = []
        """The forwards of the session's ports."""

    async def connect(self) -> None:
        """Start the supervisor of the session on its present layers. Raises :class:`~headrace.base.errors.EpisodeError`
        if it cannot start."""
        order = {
            "session": self._name, "layers": self._layers, "limits": asdict(self.spec.limits), "user": self._user,
            "life_s": max(0.0, self._until_s - RealClock().now()), "loopback": self.spec.loopback,
            "ports": list(self.spec.forwards),
        }  # fmt: skip
        try:
            channel, self._descriptors = await self._driver.start_supervisor(order)
        except OSError as error:
            raise self._make_start_error(str(error)) from None
        self._reader, self._writer = await asyncio.open_unix_connection(sock=channel, limit=BUFFER_BYTES)
        record, _ = await self._answer(STARTED_S)
        if "error" in record:
            self.lose(record["error"])
            raise self._make_start_error(record["error"])
        self._forwards = await serve_forwards(self._descriptors, list(self.spec.forwards.values()))
        self._user, self.missing = record["user"], record["missing"]

    def _make_start_error(self, problem: str) -> EpisodeError:
        """Return the error for a session that cannot start because of ``problem``."""
        return EpisodeError(
            f"a session of kind {self._driver.kind!r} cannot start: {problem}",
            remedy="look at the machine's limits (ulimit -Hn, -Hu), or choose another kind of sandbox",
            reason="session_start",
        )

    @property
    def _name(self) -> str:
        """The name of the session in messages to the host: its newest layer."""
        return self._layers[-1]

    async def execute(
        self, argv: Sequence[str], *, stdin: bytes, directory: str, variables: Mapping[str, str], limits: SandboxLimits
    ) -> Execution:
        """Run the program ``argv`` in the session, with the parameters ``stdin``, ``directory``, ``variables`` and
        ``limits`` of :meth:`~headrace.wings.sandboxes.base.SandboxSession.execute`."""
        order = {"argv": list(argv), "env": dict(variables), "cwd": directory}
        return await self._carry_out(order, limits, data=stdin)

    async def _carry_out(
        self, order: dict[str, Any], limits: SandboxLimits, *, data: bytes = b"", file: IO[bytes] | None = None
    ) -> Execution:
        """Run a program that ``order`` describes, with ``data`` as its standard input and the given ``limits``, and
        return its result. If ``file`` is given, it replaces the stream with the number ``order["file"]``: 0 (input) or
        1 (output)."""
        order = {
            **order, "do": "run", "wall_s": limits.wall_s, "output_bytes": limits.output_bytes,
            "limits": {name: getattr(limits, name) for name in PROCESS_LIMITS},
        }  # fmt: skip
        record, data = await self._call(order, data, limits.wall_s + GRACE_S, file)
        outputs, start = [], 0
        for size in record["sizes"]:
            outputs.append(data[start : start + size])
            start += size
        status, cpu_s = record["result"]["status"], record["result"]["cpu_s"]
        reason = Reason(record["reason"] or Reason.EXITED)
        if reason is Reason.EXITED and status < 0:
            reason = reason_for_signal(-status, cpu_s, limits)
        stdout, stderr, state = outputs
        return Execution(reason=reason, stdout=stdout, stderr=stderr, status=status, cpu_s=cpu_s, state=state)

    async def end_background(self) -> int:
        """Kill all processes of the session, and return their number."""
        record, _ = await self._call({"do": "end"}, b"", GRACE_S)
        return int(record["gone"])

    async def count_background(self) -> int:
        """Return the number of background processes."""
        record, _ = await self._call({"do": "count"}, b"", GRACE_S)
        return int(record["processes"])

    async def take_files(self) -> LayerFiles | CopiedFiles:
        """Return the files for a snapshot. With overlays the supervisor ends, and the next call starts another
        supervisor on a new layer. Raises :class:`~headrace.base.errors.EpisodeError` at :data:`MAX_LAYERS` layers."""
        if not self._driver.overlays:
            return await self._copy_files()
        if len(self._layers) >= MAX_LAYERS:
            raise EpisodeError(
                f"a line of {MAX_LAYERS} snapshots is as long as the kernel can carry",
                remedy="take fewer snapshots of one episode",
                reason="session_snapshot",
            )
        await self._disconnect()
        files = LayerFiles(self._driver, list(self._layers), self._user)
        self._driver.keep(files.layers)
        store = self._own_store
        number = sum(layer.startswith(f"{store}/") for layer in self._layers)
        self._layers.append(f"{store}/{number}")
        return files

    async def _copy_files(self) -> CopiedFiles:
        """Return a copy of the session's own files, without the files that every session has. Raises
        :class:`~headrace.base.errors.EpisodeError` if they cannot be copied."""
        without = [f"--exclude=.{path}" for path in (*NOT_COPIED, *self._driver.fixed, *self._driver.readable)]
        argv = [self.programs["tar"], "--one-file-system", "--anchored", *_EXACT, "--sparse", *without, "-cf", "-", "."]
        files = CopiedFiles(self._driver)
        try:
            with files.open_archive("wb") as archive:
                await self._pass_file(argv, archive, stream=1)
        except BaseException:
            files.close()
            raise
        return files

    async def put_files(self, files: CopiedFiles) -> None:
        """Unpack a copy of files in a new session. Raises :class:`~headrace.base.errors.EpisodeError` if they cannot be
        written."""
        argv = [self.programs["tar"], "-p", "--xattrs", "-xf", "-", "-C", "/"]
        with files.open_archive("rb") as archive:
            await self._pass_file(argv, archive, stream=0)

    async def _pass_file(self, argv: Sequence[str], file: IO[bytes], *, stream: Literal[0, 1]) -> None:
        """Run a program whose standard input (``stream`` 0) or output (1) is a file of this process. The caller makes
        sure that no process of the agent runs, because it could open the file too."""
        limits = replace(self.spec.limits, file_bytes=2 * self.spec.limits.disk_bytes)
        order = {"argv": argv, "env": ENVIRONMENT, "cwd": "/", "file": stream}
        done = await self._carry_out(order, limits, file=file)
        if done.status != 0:
            words = done.stderr.decode("utf-8", "replace")[:300] + done.reason
            raise EpisodeError(
                f"the files of a session cannot be copied: {words}",
                remedy="make all of them readable for their owner, and stay within limits.disk_bytes",
                reason="session_snapshot",
            )

    @property
    def _own_store(self) -> str:
        """The name of the store that the session writes to."""
        return self._layers[-1].partition("/")[0]

    async def stop(self) -> None:
        """End the session and wait until its processes have ended. A cancelled call does not wait."""
        if not self.ended:
            self.ended = "it was stopped"
            try:
                await self._disconnect()
            finally:
                self._driver.forget(self)
                await self._driver.drop(self._layers)

    def lose(self, reason: str) -> None:
        """Mark the session as ended because of ``reason``, and close its channel; for a session that ended by itself or
        was killed."""
        if not self.ended:
            self.ended = reason
            self._driver.forget(self)
            self._close_forwards()
            if self._writer is not None:
                self._writer.close()

    def _close_forwards(self) -> None:
        """Close the forwards of the session and the socket for file descriptors."""
        while self._forwards:
            self._forwards.pop().close()
        if self._descriptors is not None:
            self._descriptors.close()

    async def _disconnect(self) -> None:
        """Ask the supervisor to end the session, and wait until it reports that all processes have ended."""
        self._close_forwards()
        if self._writer is None:
            return
        with suppress(OSError):
            self._writer.write_eof()
        try:
            while "ended" not in (await self._answer(GRACE_S))[0]:
                pass
        except SessionEnded:
            pass
        finally:
            self._writer.close()
            self._writer = None

    async def _call(
        self, order: dict[str, Any], data: bytes, timeout_s: float, file: IO[bytes] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Send ``order`` to the supervisor, with ``data`` and the descriptor of ``file``, and return the record and the
        bytes of its answer. Kill the session if no answer arrives within ``timeout_s`` seconds, or if the call is
        cancelled. Raises :class:`SessionEnded` if the session has ended."""
        try:
            if self._writer is None:  # after a snapshot
                await self._connect_again()
            assert self._writer is not None
            assert self._descriptors is not None
            if file is not None:
                socket.send_fds(self._descriptors, [b"+"], [file.fileno()])
            self._writer.write(frames.pack_frame(order, data))
            record, more = await self._answer(timeout_s)
        except asyncio.CancelledError:
            await self._give_up("a call was cancelled")
            raise
        if "ended" in record:
            await self._give_up({"deadline": f"its time of {self.spec.life_s:g} s is over"}.get(
                record["ended"], record["ended"]
            ))  # fmt: skip
            self.refuse_ended()
        return record, more

    async def _connect_again(self) -> None:
        """Start another supervisor after a snapshot. Raises :class:`SessionEnded` if the host process has ended."""
        try:
            await self.connect()
        except DriverLost as error:
            self.lose(error.problem)
            self.refuse_ended()

    async def _answer(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Return the record and the bytes of the supervisor's next frame. Raises :class:`SessionEnded` if none arrives
        within ``timeout_s`` seconds."""
        assert self._reader is not None
        try:
            async with asyncio.timeout(timeout_s):
                sizes = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
                text, data = await self._reader.readexactly(sizes[0]), await self._reader.readexactly(sizes[1])
            return json.loads(text), data
        except TimeoutError:
            await self._give_up(f"it did not answer within {timeout_s:g} s")
        except (asyncio.IncompleteReadError, OSError):
            await self._give_up("its processes were killed")
        self.refuse_ended()
        raise AssertionError("a session that was given up has ended")

    async def _give_up(self, reason: str) -> None:
        """Kill the session because of ``reason``, and free its files."""
        if not self.ended:
            self.lose(reason)
            with suppress(EnvError, OSError):
                await self._driver.kill(self._name)
            await self._driver.drop(self._layers)


async def open_jail(readable: Sequence[str] = ()) -> LocalDriver:
    """Open the driver of sessions in Headrace's own sandbox: namespaces, a filter of system calls, limits, overlay file
    systems. Sessions can read the paths ``readable``."""
    return await LocalDriver.open("jail", readable)


async def open_bubblewrap(readable: Sequence[str] = ()) -> LocalDriver:
    """Open the driver of sessions in bubblewrap, whose snapshots are copies. Sessions can read the paths ``readable``.
    Raises :class:`~headrace.base.errors.EnvError` if bubblewrap is not installed."""
    found = shutil.which("bwrap")
    if found is None:
        raise EnvError("there is no program bwrap here", remedy="install bubblewrap, or choose the kind 'jail'")
    return await LocalDriver.open("bubblewrap", readable, bwrap=found)
