"""The lifetime of the server of ``headrace serve``, from its settings to its end.

    bind ─▶ listen (503: loading) ─▶ load model, make engine ─▶ serve ─▶ Ctrl-C ─▶ drain for grace_s ─▶ withdraw ─▶ end

The port is bound before the model is loaded, so that an unusable port is reported at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.base.clock import Clock
from headrace.base.config.tls import server_context
from headrace.base.errors import ConfigError
from headrace.base.net.auth import refuse_unprotected_host
from headrace.base.net.shell import HttpServer, ShellLimits, listening_socket, make_url
from headrace.base.tasks import task_group
from headrace.base.types.versions import INITIAL
from headrace.engine.base import EngineCore
from headrace.engine.native import NativeEngine
from headrace.engine.native.masks import MaskMaker
from headrace.engine.native.swaps import LoadedWeights
from headrace.engine.structure import Grammars
from headrace.launch.inprocess import LocalEngine, LocalEngineConfig
from headrace.models.devices import use_device
from headrace.models.endings import stop_ids
from headrace.models.heads import wanted_head
from headrace.models.hub import short_model_name
from headrace.models.load import load_model, load_tokenizer
from headrace.models.paged.base import BLOCK
from headrace.models.settings import context_length
from headrace.models.weights import count_vocabulary, model_bytes
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import ServerState, make_app
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.config import ServeConfig, ServeSection
from headrace.wings.serve.prompts import ServedModel

LAST_RESORT_S = 5.0
"""Seconds after the grace period before open connections are closed by force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that has been loaded, with the engine that samples from it."""

    core: EngineCore
    """The engine's core, with weights committed."""
    masks: MaskMaker
    """The compiler of structures to token masks, which the core uses."""
    tokenizer: ServedTokenizer
    name: str
    agents: tuple[str, ...] = ()
    """Names of the agents with adapters. A request whose model is the name of an agent is answered with the agent's
    adapter."""
    max_context: int
    """Largest number of tokens of a prompt and its choice together: the smaller of the model's context and the size of
    the cache."""
    facts: Mapping[str, str | int | float]
    """The device, the kernels and the memory of the engine, under the names of
    :meth:`~headrace.engine.native.NativeEngine.facts`; and ``device`` and ``weights_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvents:
    """The callbacks by which the server reports its state to the command, which prints it."""

    listening: Callable[[str], None]
    """A function that is called with the server's URL when the port is bound; the model is not loaded yet."""
    serving: Callable[[str, LoadedModel], None]
    """A function that is called with the server's URL and the loaded model when requests are answered."""
    ending: Callable[[int], None]
    """A function that is called with the number of open requests when the server begins to end."""


def serve(
    limits: ServeSection, token: str, load: Callable[[], LoadedModel], *, clock: Clock, events: ServerEvents
) -> None:  # fmt: skip
    """Serve the model that ``load`` returns with the settings ``limits`` until Ctrl-C or SIGTERM. Clients must send
    ``token``. ``clock`` gives the time, and ``events`` has the callbacks that report the server's state.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be bound or would be open to other machines
    without a token, the errors of ``load``, and :class:`~headrace.base.errors.ComponentDied` when the engine dies.
    """
    refuse_unprotected_host(limits.host, token)
    if limits.tls_certificate:
        server_context(limits.tls_certificate, limits.tls_key)  # raises for a bad certificate before the port is bound
    with listening_socket(
        limits.host,
        limits.port,
        setting=f"serve.host={limits.host!r}, serve.port={limits.port}",
        remedy="choose another --port (0 for a free one) or --host, or end what listens there",
    ) as listening:
        asyncio.run(_ServeServer(limits, token, clock, events).run(listening, load))


class _ServeServer:
    """The HTTP server and the engine of one ``headrace serve``. It starts and ends both in the right order."""

    def __init__(self, limits: ServeSection, token: str, clock: Clock, events: ServerEvents) -> None:
        """Create the HTTP server, which answers nothing yet. ``limits`` are the settings ``[serve]``, and ``token`` is
        the token that clients must send. ``clock`` gives the time, and ``events`` has the callbacks that report the
        server's state."""
        self._limits, self._clock, self._events = limits, clock, events
        self._state = ServerState()
        """What the routes read: the service, and whether the server ends."""
        self._engine: LocalEngine | None = None
        """The engine; ``None`` before the model is loaded."""
        shell = ShellLimits(
            idle_timeout_s=limits.idle_timeout_s,
            max_connections=limits.max_sequences + 1024,
            grace_s=int(limits.grace_s + LAST_RESORT_S),
            tls_certificate=limits.tls_certificate,
            tls_key=limits.tls_key,
        )
        self._http = HttpServer(
            make_app(self._state, token), shell, own_logging=True, takes_signals=True, ending=self._drain
        )
        """The HTTP server."""

    async def run(self, listening: socket.socket, load: Callable[[], LoadedModel]) -> None:
        """Answer requests on the socket ``listening``, with status 503 while ``load`` loads the model, until the server
        is stopped. Raises the error of ``load``, and the engine's error if it dies."""
        url = make_url(listening, secure=bool(self._limits.tls_certificate))
        async with task_group() as group:
            serving = group.create_task(self._http.serve(sockets=[listening]))
            self._events.listening(url)
            living = group.create_task(self._live(url, load))
            serving.add_done_callback(lambda _: living.cancel())

    async def _live(self, url: str, load: Callable[[], LoadedModel]) -> None:
        """Load the model in a thread, and run its engine until the HTTP server has ended, which cancels this coroutine,
        or the engine has died, whose error is raised. At the end, request the HTTP server to stop."""
        try:
            loaded = await asyncio.to_thread(load)
            queue = LocalEngineConfig(max_requests=self._limits.max_sequences)
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode") as encoder:
                async with LocalEngine(loaded.core, clock=self._clock, config=queue) as engine:
                    self._engine = engine
                    self._state.service = self._service(loaded, engine, encoder)
                    self._events.serving(url, loaded)
                    raise await engine.wait_for_death()
        finally:
            self._http.should_exit = True

    def _service(self, loaded: LoadedModel, engine: LocalEngine, encoder: ThreadPoolExecutor) -> Service:
        """Return the service that answers requests with the loaded model; ``encoder`` is the thread that tokenizes
        prompts."""
        return Service(
            engine=engine,
            masks=loaded.masks,
            tokenizer=loaded.tokenizer,
            served=ServedModel(
                name=loaded.name, agents=loaded.agents, max_context=loaded.max_context, settings=self._limits
            ),
            clock=self._clock,
            encoder=encoder,
        )

    def _drain(self) -> None:
        """Refuse new requests from now on, and schedule the end of the grace period, at which each running request is
        ended with its tokens so far."""
        self._state.draining = True
        self._events.ending(len(self._http.server_state.tasks))
        if self._engine is not None:
            asyncio.get_running_loop().call_later(self._limits.grace_s, self._engine.withdraw_all)


def load_served_model(config: ServeConfig, *, clock: Clock) -> LoadedModel:
    """Load the tokenizer and the model of ``config``, and create an engine with weights of version 0, which uses
    ``clock``. Raises :class:`~headrace.base.errors.ModelError` and :class:`~headrace.base.errors.ConfigError`."""
    path, engine = config.model.path, config.engine
    engine.refuse_server("headrace serve")
    device = str(use_device("engine.device", engine.device, only_cpu=config.model.deterministic))
    hub_tokenizer = load_tokenizer(path)
    ends = stop_ids(path, hub_tokenizer.eos_token_id)
    tokenizer = ServedTokenizer(hub_tokenizer, ends, config.serve.tool_parser)
    max_context = engine.max_context or context_length(path)
    name, agents = get_model_name(config), config.model.adapter_agents
    if name in agents:
        raise ConfigError(
            f"the model and an agent of model.lora.agents are both called {name!r}",
            remedy="give the model another name: serve.name",
        )
    model = load_model(config.model, device)
    masks = Grammars(hub_tokenizer, count_vocabulary(model), ends)
    core = NativeEngine(
        model,
        engine.on(device, shared=False),
        max_context=max_context,
        receiver=LoadedWeights(),
        clock=clock,
        decode=tokenizer.decode_all,
        masks=masks,
        head=wanted_head(engine.speculation, config.model, model),
    )
    core.commit(INITIAL)
    fits = min(max_context, core.stats().cache_blocks * BLOCK)  # the cache may hold less than one context
    facts = {"device": device, "weights_bytes": model_bytes(model), **core.facts()}
    return LoadedModel(
        core=core, masks=masks, tokenizer=tokenizer, name=name, agents=agents, max_context=fits, facts=facts
    )


def get_model_name(config: ServeConfig) -> str:
    """Return the name by which clients request the model of ``config``."""
    return config.serve.name or short_model_name(config.model.path) or "model"
