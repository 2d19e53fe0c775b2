"""A server from its settings to its end.

bind ─▶ listen (503: loading) ─▶ model, engine, journal ─▶ go on where the last one ended ─▶ serve ─▶ Ctrl-C
─▶ end the turns after their piece ─▶ copy every adapter to the disk
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import xxhash

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError
from headrace.base.net.shell import HttpServer, ShellLimits, listening_socket, url_of
from headrace.base.types.versions import INITIAL
from headrace.engine.native import NativeEngine
from headrace.engine.native.swaps import LoadedWeights
from headrace.launch.inprocess import LocalEngine, LocalEngineConfig
from headrace.models.config import ModelConfig
from headrace.models.devices import use
from headrace.models.endings import stop_ids
from headrace.models.load import load_model, load_tokenizer
from headrace.models.multilora import MultiLora
from headrace.models.paged.base import BLOCK
from headrace.models.settings import context_length
from headrace.wings.tinker.app import ServerHolder, make_app
from headrace.wings.tinker.compute import BaseCompute
from headrace.wings.tinker.config import TinkerConfig
from headrace.wings.tinker.journal import Journal
from headrace.wings.tinker.performing import ModelLimits, Performer
from headrace.wings.tinker.samplers import SamplerWeights
from headrace.wings.tinker.sampling import SampleLimits
from headrace.wings.tinker.service import ServiceParts, TinkerService
from headrace.wings.tinker.tenants import Tenants
from headrace.wings.tinker.turns import Turns

SWEEP_S = 5.0
KEY_FILE = "key"


def key_of(state: Path) -> str:
    """Return the key of the server with this state, which is made when there is none; only its user can read it."""
    file = state / KEY_FILE
    state.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
            writing.write(f"tml-{secrets.token_urlsafe(24)}\n")
    key = file.read_text(encoding="utf-8").strip()
    if not key.startswith("tml-"):
        raise ConfigError(f"{file} does not begin with tml-", remedy="delete it, and a new key is made")
    return key


def serve(config: TinkerConfig, key: str, *, clock: Clock, serving: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; ``serving`` is called with the URL when requests are answered. Raises
    :class:`~headrace.base.errors.ConfigError` for an address that cannot be used and the errors of loading."""
    with bind(config.host, config.port) as listening:
        asyncio.run(TinkerServer(config, key, clock, serving).run(listening))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. Raises :class:`~headrace.base.errors.ConfigError`."""
    setting = f"--host {host} --port {port}"
    return listening_socket(host, port, setting=setting, remedy="give a free port; 0 takes any")


class TinkerServer:
    """One server, with a life in one event loop."""

    def __init__(self, config: TinkerConfig, key: str, clock: Clock, serving: Callable[[str], None]) -> None:
        self._config, self._clock, self._serving = config, clock, serving
        self._holder = ServerHolder()
        app = make_app(self._holder, key, max_body_bytes=config.max_body_bytes, clock=clock)
        self._http = HttpServer(app, ShellLimits(max_connections=4096), own_logging=True, takes_signals=True)

    def stop(self) -> None:
        """End the server soon, as Ctrl-C does; any thread may call."""
        self._http.should_exit = True

    async def run(self, listening: socket.socket) -> None:
        """Serve at the bound socket ``listening`` until :meth:`stop`."""
        url = url_of(listening)
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._http.serve(sockets=[listening]))
                living = group.create_task(self._live(url))
                serving.add_done_callback(lambda _: living.cancel())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _live(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        dead = loop.create_future()

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(lambda: None if dead.done() else dead.set_exception(error))

        try:
            with ExitStack() as stack:
                loaded = await asyncio.to_thread(_LoadedBase, self._config, self._clock)
                stack.callback(loaded.journal.close)
                turns = Turns("tinker-turns", failed)
                tenants = loaded.tenants(turns)
                stack.callback(tenants.copy_all)
                stack.callback(turns.close)
                limits = LocalEngineConfig(max_requests=self._config.max_samples)
                async with (
                    LocalEngine(loaded.core, clock=self._clock, config=limits) as engine,
                    asyncio.TaskGroup() as group,
                ):
                    service = TinkerService(loaded.parts(turns, tenants, engine), group, self._clock)
                    tenants.resume()
                    self._holder.service = service
                    self._serving(url)
                    group.create_task(self._sweep(service))
                    ended = group.create_task(engine.died())
                    await asyncio.wait([dead, ended], return_when=asyncio.FIRST_COMPLETED)
                    dead.cancel() if not dead.done() else dead.result()
                    raise ended.result()
        finally:
            self._http.should_exit = True

    async def _sweep(self, service: TinkerService) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            service.sweep()


class _LoadedBase:
    """The parts of a server that take time to load: model, engine and journal."""

    def __init__(self, config: TinkerConfig, clock: Clock) -> None:
        self.config, self._clock = config, clock
        self.journal = Journal(config.state)
        path = str(config.model)
        device = str(use("--device", config.device))
        tokenizer = load_tokenizer(path)
        model = load_model(ModelConfig(path=path), device)
        model.requires_grad_(requires_grad=False)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, memo=shared)
        self.compute = BaseCompute(model, tokens_per_microbatch=config.tokens_per_microbatch)
        self.weights = SamplerWeights(MultiLora(twin), config.max_resident)
        max_context = config.engine.max_context or context_length(path)
        self.core = NativeEngine(
            twin,
            config.engine.on(device, shared=True),
            max_context=max_context,
            receiver=LoadedWeights(),
            clock=clock,
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            adapters=self.weights,
        )
        self.core.commit(INITIAL)
        context = min(max_context, self.core.stats().cache_blocks * BLOCK)
        vocab = self.compute.vocab_size
        self.model_limits = ModelLimits(max_rank=config.max_rank, max_context=context_length(path), vocab_size=vocab)
        ends = stop_ids(path, tokenizer.eos_token_id)
        self.sample_limits = SampleLimits(vocab_size=vocab, max_context=context, stop_ids=ends)
        self.architecture = type(model).__name__
        self.journal.set_value("bases", json.dumps(dict.fromkeys(config.names, path)))
        if self.journal.value("seed") is None:
            self.journal.set_value("seed", secrets.token_hex(8))

    def tenants(self, turns: Turns) -> Tenants:
        """Return the models of the state, which are not resumed yet."""
        config = self.config
        tenants = Tenants(
            self.journal, config.state, self.compute, turns, clock=self._clock, max_resident=config.max_resident
        )
        tenants.perform = Performer(
            self.journal,
            config.state,
            self.compute,
            limits=self.model_limits,
            clock=self._clock,
            seed_of=lambda model: xxhash.xxh3_64_intdigest(f"{self.journal.value('seed')}/{model}".encode()) >> 1,
            ephemeral_s=config.ephemeral_s,
        )
        return tenants

    def parts(self, turns: Turns, tenants: Tenants, engine: LocalEngine) -> ServiceParts:
        """Return what the service works with."""
        return ServiceParts(
            config=self.config,
            journal=self.journal,
            compute=self.compute,
            turns=turns,
            tenants=tenants,
            weights=self.weights,
            engine=engine,
            model_limits=self.model_limits,
            sample_limits=self.sample_limits,
            architecture=self.architecture,
        )
