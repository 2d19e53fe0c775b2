"""The lifetime of one server of the Tinker protocol, from its settings to its end.

bind ─▶ listen (503: loading) ─▶ model, engine, journal ─▶ go on where the last one ended ─▶ serve ─▶ Ctrl-C
─▶ end the turns after their piece ─▶ copy every adapter to the disk

The computing thread (``turns``) computes the requests of all models, one piece of each model in turn. The state
directory contains the journal, the checkpoints and the key, and is reused by the next start.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import xxhash

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.base.net.shell import HttpServer, ShellLimits, listening_socket, make_url
from headrace.base.tasks import task_group
from headrace.wings.tinker.app import ServerHolder, make_app
from headrace.wings.tinker.base import LoadedBase, ServedBase, by_name, fingerprint
from headrace.wings.tinker.config import TinkerConfig
from headrace.wings.tinker.fair_thread import FairThread
from headrace.wings.tinker.journal import Journal, state_directory
from headrace.wings.tinker.performing import Performer
from headrace.wings.tinker.service import ServiceParts, TinkerService
from headrace.wings.tinker.tenants import NOT_WRITTEN, Tenants, log

SWEEP_S = 5.0
KEY_FILE = "key"


def read_or_create_key(state: Path) -> str:
    """Return the key that clients of the server must send. It is read from a file in the state directory ``state``; the
    first start creates that file, which only its user can read. Raises :class:`~headrace.base.errors.ConfigError` for a
    file without a valid key."""
    file = state_directory(state) / KEY_FILE
    remedy = "delete it, and a new key is made"
    try:
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
                writing.write(f"tml-{secrets.token_urlsafe(24)}\n")
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be used as the server's key: {error}", remedy=remedy) from None
    if not key.startswith("tml-"):
        raise ConfigError(f"{file} does not begin with tml-", remedy=remedy)
    return key


def serve(config: TinkerConfig, key: str, *, clock: Clock, on_serving: Callable[[str], None]) -> None:
    """Serve with the settings ``config`` until Ctrl-C or SIGTERM. Clients must send ``key``. ``on_serving`` is called
    with the server's URL once the models are loaded and requests are answered, and ``clock`` gives the time. Raises
    :class:`~headrace.base.errors.ConfigError` for an address that cannot be used, and the errors of loading the
    models."""
    with bind(config.host, config.port) as listening:
        asyncio.run(TinkerServer(config, key, clock, on_serving).run(listening))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address ``host`` and ``port``; port 0 chooses a free port. Raises
    :class:`~headrace.base.errors.ConfigError` if the address cannot be used."""
    setting = f"--host {host} --port {port}"
    return listening_socket(host, port, setting=setting, remedy="give a free port; 0 takes any")


class TinkerServer:
    """One server, which runs in one event loop until it is stopped. ``on_serving`` is called with its URL once it
    answers requests."""

    def __init__(self, config: TinkerConfig, key: str, clock: Clock, on_serving: Callable[[str], None]) -> None:
        """Create the server; :meth:`run` loads its models and serves. Clients must send ``key``. ``config`` are its
        settings, and ``clock`` gives the time."""
        self._config, self._clock, self._on_serving = config, clock, on_serving
        self._holder = ServerHolder()
        """The holder through which requests reach the service once the models are loaded."""
        app = make_app(self._holder, key, max_body_bytes=config.max_body_bytes, clock=clock)
        limits = ShellLimits(max_connections=4096)
        self._http = HttpServer(
            app, limits, own_logging=True, takes_signals=True, ending=self._holder.end_waits
        )  # fmt: skip
        """The HTTP server, which listens before the models are loaded."""

    def stop(self) -> None:
        """End the server soon, as Ctrl-C does; any thread may call this."""
        self._http.should_exit = True

    async def run(self, listening: socket.socket) -> None:
        """Serve at the bound socket ``listening`` until :meth:`stop`."""
        url = make_url(listening)
        async with task_group() as group:
            serving = group.create_task(self._http.serve(sockets=[listening]))
            living = group.create_task(self._live(url))
            serving.add_done_callback(lambda _: living.cancel())

    async def _live(self, url: str) -> None:
        """Load the models, and answer requests until the server is stopped or one of its threads fails. Then write all
        models in training to the disk. ``url`` is the server's URL."""
        loop = asyncio.get_running_loop()
        dead = loop.create_future()

        def failed(error: BaseException) -> None:
            """Report the error that ended the computing thread to the event loop, which then ends the server."""
            loop.call_soon_threadsafe(lambda: None if dead.done() else dead.set_exception(error))

        try:
            async with AsyncExitStack() as stack:
                loaded = await asyncio.to_thread(_LoadedParts, self._config, self._clock)
                stack.callback(loaded.journal.close)
                turns = FairThread("tinker-turns", failed)
                tenants = loaded.tenants(turns)
                stack.callback(tenants.copy_all)
                stack.callback(turns.close)
                served = await loaded.start_engines(stack)
                async with asyncio.TaskGroup() as group:
                    parts = ServiceParts(
                        config=self._config, journal=loaded.journal, turns=turns, tenants=tenants, bases=by_name(served)
                    )
                    service = TinkerService(parts, group, self._clock)
                    tenants.resume()
                    self._holder.serve(service)
                    self._on_serving(url)
                    group.create_task(self._sweep(service))
                    ended = [group.create_task(base.engine.wait_for_death()) for base in served]
                    await asyncio.wait([dead, *ended], return_when=asyncio.FIRST_COMPLETED)
                    dead.cancel() if not dead.done() else dead.result()
                    raise next(task for task in ended if task.done()).result()
        finally:
            self._http.should_exit = True

    async def _sweep(self, service: TinkerService) -> None:
        """Let the service do its regular clean-up every :data:`SWEEP_S` seconds, until this task is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                service.sweep()
            except NOT_WRITTEN as error:
                log.warning("the state cannot be written: %s", error)


class _LoadedParts:
    """The journal and the loaded bases of a server. The constructor takes long, so it runs in a thread while the server
    already listens."""

    def __init__(self, config: TinkerConfig, clock: Clock) -> None:
        """Open the journal in the state directory and load every base. Raises
        :class:`~headrace.base.errors.ConfigError` if the state belongs to other bases. ``config`` are the settings of
        the server, and ``clock`` gives the time."""
        self.config, self._clock = config, clock
        self.journal = Journal(config.state)
        try:
            self._refuse_other_bases()
            self.bases = [LoadedBase(base, config, clock) for base in config.bases]
        except BaseException:
            self.journal.close()
            raise
        paths = {name: str(base.path) for base in config.bases for name in base.names}
        self.journal.set_value("bases", json.dumps(paths))
        if self.journal.value("seed") is None:
            self.journal.set_value("seed", secrets.token_hex(8))

    def tenants(self, turns: FairThread) -> Tenants:
        """Return the manager of all models in training, which computes in the thread ``turns``. It does not continue
        the requests of the last start before its ``resume`` is called."""
        config, bases = self.config, {name: base.training for base in self.bases for name in base.names}
        tenants = Tenants(self.journal, config.state, bases, turns, clock=self._clock, max_resident=config.max_resident)
        tenants.perform = Performer(
            self.journal,
            config.state,
            bases,
            clock=self._clock,
            get_seed=lambda model: xxhash.xxh3_64_intdigest(f"{self.journal.value('seed')}/{model}".encode()) >> 1,
            ephemeral_s=config.ephemeral_s,
        )
        return tenants

    async def start_engines(self, stack: AsyncExitStack) -> list[ServedBase]:
        """Start the engine of every base, and return the bases. The engines are stopped when ``stack`` is closed."""
        return [await base.start_engine(stack, self.config.max_samples) for base in self.bases]

    def _refuse_other_bases(self) -> None:
        """Record in the journal which base model each name stands for. Raises
        :class:`~headrace.base.errors.ConfigError` for a name under which models of this state were trained on another
        base model or with the other kind of weights."""
        used = {json.loads(row["spec"])["base"] for row in self.journal.all("SELECT spec FROM models")}
        for base in self.config.bases:
            found = f"{fingerprint(base.path)}{' whole' if base.whole else ''}"
            for name in base.names:
                known = self.journal.value(f"base/{name}")
                if name in used and known not in (None, found):
                    raise ConfigError(
                        f"{name} is {base.path}, and models of --state {self.config.state} were trained on another, or "
                        "by adapters and not as a whole, or the other way round",
                        remedy="start the server as before, or take another --state",
                    )
                self.journal.set_value(f"base/{name}", found)
