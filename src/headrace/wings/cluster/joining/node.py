"""The program ``headrace join``: a machine that offers a run workers for its environments.

It starts what the run asks for, each process kept as on a cluster (far/keeper.py), and tells how it ended. Where the
run ends, or the connection to it breaks, all that it has started ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from headrace import __version__
from headrace.base.clock import RealClock
from headrace.base.environ import secret
from headrace.base.errors import ConfigError, DataError, DeadlineError, RunError
from headrace.base.types.messages import node
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Alive, Done, Failure, Leaving, Left, Ready
from headrace.base.types.messages.node import AtTheDoor, Do, Drop, Farewell, JoinRefused, JoinRequest, Welcome
from headrace.launch.channel import Ends, PartChannel, admitted
from headrace.launch.starts import EnvironmentStart
from headrace.wings.cluster.far.keeper import Begin, ProcessKeeper
from headrace.wings.cluster.joining.files import open_files
from headrace.wings.cluster.joining.invitation import Invitation, host_and_port, read_invitation
from headrace.wings.cluster.joining.relay import DOOR, RelayRoute, dialling
from headrace.wings.cluster.joining.streams import RedisStreams, Unreached

ANSWER_S = 10.0
"""How long a door may take to answer a knock."""
AGAIN_S = 2.0
"""After which time a run that is not there yet is looked for again."""
WAIT_S = 0.5
"""How long to wait for orders at a time."""
ALIVE_S = 1.0
"""How often a machine tells that it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a machine offers."""

    workers: int
    """Processes."""
    entry: str = ""
    """Where it has the environment; empty: under the path that the run names."""
    wait_s: float = 0.0
    """How long it waits for a run that takes it in."""
    password_env: str = ""
    """Environment variable that holds the password of the Redis server; empty: the one that the run names."""


class NobodyThere(DeadlineError):
    """No run answers at the address of an invitation."""


def join(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    """Work for the run whose invitation lies at ``path``, until it ends, or until a signal asks to leave; ``say`` hears
    what goes on.

    Raises :class:`~headrace.base.errors.DataError` where there is no invitation, :class:`NobodyThere` where nobody
    answers; :class:`~headrace.base.errors.RunError` where the run refuses this machine, or the connection to it breaks.
    """
    asyncio.run(_join(path, offer, say))


async def _join(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    clock, told = RealClock(), False
    until_s = clock.now() + offer.wait_s
    while True:
        try:
            invitation = read_invitation(path)  # anew each time: a run that begins again writes another
            async with _way(invitation, offer, say) as way:
                await _serve(invitation, await _knocked(invitation, offer, way), way, say)
            return
        except (NobodyThere, DataError) as error:
            if clock.now() + AGAIN_S > until_s:
                raise
            if not told:
                say(f"waiting for the run: {error.problem}")
                told = True
        await asyncio.sleep(AGAIN_S)


class _Direct:
    """To a run that this machine reaches over TCP: every address leads where it says."""

    programs = ""

    async def to(self, address: str) -> str:
        return address


@asynccontextmanager
async def _way(invitation: Invitation, offer: Offer, say: Callable[[str], None]) -> AsyncIterator[_Direct | RelayRoute]:
    if not invitation.relay:
        yield _Direct()
        return
    open_files()
    variable = offer.password_env or invitation.password_env
    if variable and not secret(variable):
        raise ConfigError(
            f"the password of the Redis server is to be in {variable}, and that environment variable is not set",
            remedy=f"export {variable}=..., or name another: --password-env",
        )
    streams = RedisStreams(invitation.address, invitation.relay, secret(variable) or None, say)
    try:
        async with dialling(streams) as way:
            yield way
    except Unreached as error:
        raise NobodyThere(error.problem, remedy=error.remedy) from None


async def _knocked(invitation: Invitation, offer: Offer, way: _Direct | RelayRoute) -> Welcome:
    knock = JoinRequest(
        token=invitation.token,
        headrace=__version__,
        address=_own_address(invitation),
        workers=offer.workers,
        entry=_found_from_anywhere(offer.entry),
        programs=way.programs,
    )
    codec = MessageCodec(AtTheDoor)
    address = await way.to(DOOR if invitation.relay else f"tcp://{invitation.address}")
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        try:
            admitted(line, address, invitation.key)
        except zmq.ZMQError:
            raise DataError("the key in the invitation is none", remedy="copy the whole file again") from None
        line.connect(address)
        try:
            async with asyncio.timeout(ANSWER_S):  # where the connection has ended before, nothing can be sent either
                await line.send(codec.encode(knock))
                said = await line.recv()
        except TimeoutError:
            raise NobodyThere(
                f"nobody answers at {invitation.address} for {ANSWER_S:g} s: no run takes others in there, or not "
                "whoever has this invitation",
                remedy="is the run still going on, is this its newest invitation, and may this machine open TCP "
                "connections to that one?",
            ) from None
        answer = _understood(codec, said)
    if isinstance(answer, JoinRefused):
        raise RunError(f"the run refuses this machine: {answer.problem}", remedy=answer.remedy)
    assert isinstance(answer, Welcome)
    return answer


def _understood(codec: MessageCodec, data: bytes) -> object:
    try:
        return codec.decode(data)
    except msgspec.DecodeError as error:
        raise RunError(
            f"the run's answer is none: {error}", remedy="install the same version of headrace everywhere"
        ) from None


def _found_from_anywhere(entry: str) -> str:
    """A ``file.py:name`` of this directory by its whole path; anything else is a command, or what a bridge leads to."""
    path, colon, name = entry.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon and Path(path).is_file() else entry


def _own_address(invitation: Invitation) -> str:
    """Of this machine, on the way to the run."""
    server = urlsplit(invitation.address)
    if server.scheme == "unix":
        return "127.0.0.1"
    host, port = (server.hostname, server.port or 6379) if invitation.relay else host_and_port(invitation.address)
    try:
        (family, _, _, _, there), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(there)  # of a datagram: nothing is sent
            return str(way.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the latter: that is no name of a machine
        raise NobodyThere(
            f"no way leads from this machine to {invitation.address}: {error}",
            remedy="is launch.join an address by which this machine reaches that one?",
        ) from None


async def _serve(
    invitation: Invitation, welcome: Welcome, way: _Direct | RelayRoute, say: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    ears = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    ended: asyncio.Future[None] = loop.create_future()
    ends = await _ends_here(Ends(orders=welcome.orders, reports=welcome.reports, key=welcome.key), way)
    on_broken = partial(loop.call_soon_threadsafe, _give_up, ended, _BROKEN)
    channel = await asyncio.to_thread(PartChannel, ends, node.Message, on_broken)
    try:
        async with asyncio.TaskGroup() as tasks:
            desk = _NodeDispatcher(
                channel=channel, address=_own_address(invitation), way=way, ended=ended, say=say, tasks=tasks
            )  # fmt: skip
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, desk.leave)
            desk.tell(Ready(token=welcome.token, pid=os.getpid(), facts={}))
            say(f"joined the run at {invitation.address}; Ctrl-C leaves it")
            hearing, telling = tasks.create_task(_hear(desk, ears)), tasks.create_task(_tell_that_it_lives(desk))
            await asyncio.wait([ended])
            telling.cancel()
            await asyncio.wait([hearing])  # no socket is closed while another thread reads it
            await desk.drop_all()
        ended.result()
    finally:
        await asyncio.to_thread(channel.close)  # what was said last may be carried meanwhile
        ears.shutdown()


async def _ends_here(ends: Ends, way: _Direct | RelayRoute) -> Ends:
    """Where they are reached from this machine."""
    return msgspec.structs.replace(ends, orders=await way.to(ends.orders), reports=await way.to(ends.reports))


async def _hear(desk: _NodeDispatcher, ears: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while not desk.ended.done():
        try:
            messages = await loop.run_in_executor(ears, desk.channel.receive, WAIT_S)
        except msgspec.DecodeError as error:
            words = f"the run says something that is no message: {error}"
            _give_up(desk.ended, RunError(words, remedy="use one version of headrace"))
            return
        for message in messages:
            desk.obey(message)


async def _tell_that_it_lives(desk: _NodeDispatcher) -> None:
    while True:
        desk.tell(Alive())
        await asyncio.sleep(ALIVE_S)


def _give_up(ended: asyncio.Future[None], error: RunError) -> None:
    if not ended.done():
        ended.set_exception(error)


_BROKEN = RunError(
    "the connection to the run is broken: what ran here has ended",
    remedy="look at the run; where it goes on, join again",
)


@dataclass(slots=True, kw_only=True)
class _NodeDispatcher:
    """The processes that run here for the run."""

    channel: PartChannel
    address: str
    way: _Direct | RelayRoute
    ended: asyncio.Future[None]
    say: Callable[[str], None]
    tasks: asyncio.TaskGroup
    keepers: dict[int, ProcessKeeper] = field(default_factory=dict)
    watched: set[int] = field(default_factory=set)
    """Keepers of which the run waits for the end."""
    asked_to_leave: bool = False

    def tell(self, message: object) -> None:
        """Tell the run, unless it cannot be reached."""
        with contextlib.suppress(zmq.Again):
            self.channel.send(message)

    def obey(self, message: node.Message) -> None:
        match message:
            case Do():
                self.tasks.create_task(self._do(message))
            case Drop():
                self.tasks.create_task(self._drop(message.keeper))
            case JoinRefused():
                self.tell(Left())
                words = f"the run sends this machine away: {message.problem}"
                _give_up(self.ended, RunError(words, remedy=message.remedy))
            case Farewell() if not self.ended.done():
                self.tell(Left())
                self.say("left: what ran here has ended" if self.asked_to_leave else "the run has ended")
                self.ended.set_result(None)

    def leave(self) -> None:
        """What runs here may end; the second time, it does."""
        if not self.asked_to_leave:
            self.asked_to_leave = True
            self.say("leaving, when the episodes that run here have ended; Ctrl-C again: at once")
            self.tell(Leaving())
        elif not self.ended.done():
            self.ended.set_result(None)

    async def drop_all(self) -> None:
        """Nothing that was started here is left."""
        await asyncio.gather(*(self._drop(number) for number in self.keepers))

    async def _do(self, order: Do) -> None:
        answer: bytes | int | float = b""
        try:
            keeper = self.keepers.get(order.keeper) or ProcessKeeper(self.address)
            self.keepers[order.keeper] = keeper
            match order.what:
                case "look":
                    answer = keeper.look(order.asked)
                case "begin":
                    answer = await keeper.begin(await self._to_begin(order.asked))
                case "computed_s":
                    answer = await keeper.computed_s()
                case "halted":
                    answer = await keeper.halted()
                case "ended":
                    self.watched.add(order.keeper)
                    answer = await keeper.ended()
                    self._forget(order.keeper)
        except (OSError, RunError, msgspec.DecodeError) as error:
            self.tell(Failure(call=order.call, kind="RunError", problem=str(error), remedy="look at that machine"))
        else:
            self.tell(Done(call=order.call, answer=answer))

    async def _to_begin(self, asked: bytes) -> bytes:
        """An order to begin, of an environment and nothing else, with the ends where they are reached from here."""
        begin = msgspec.json.decode(asked, type=Begin)
        if not isinstance(begin.briefing.start, EnvironmentStart):
            what = type(begin.briefing.start).__name__
            raise RunError(f"the run wants to start {what} here", remedy="only environments run here")
        briefing = msgspec.structs.replace(begin.briefing, ends=await _ends_here(begin.briefing.ends, self.way))
        return msgspec.json.encode(msgspec.structs.replace(begin, briefing=briefing))

    async def _drop(self, number: int) -> None:
        keeper = self.keepers.get(number)
        if keeper is None:
            return
        await keeper.drop()
        if number not in self.watched:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self.watched.discard(number)
        self.keepers.pop(number, None)
