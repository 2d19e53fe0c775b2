"""From settings to an engine that is a server: started or found, asked who it is, and closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.base.clock import Clock
from headrace.base.environ import secret
from headrace.base.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.models.hub import called
from headrace.models.load import limit_of, read_config
from headrace.wings.servers.client.carrier import AskWorkers, Carrier, CarrierConfig
from headrace.wings.servers.client.core import ServedEngine, ServedLimits, StagingReceiver
from headrace.wings.servers.client.dialect import ServerDialect, ServerInfo
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements, installed, model_alone, refuse_untested
from headrace.wings.servers.client.ownership import owned
from headrace.wings.servers.client.server import Command, Server
from headrace.wings.servers.client.wire import Address, Wire
from headrace.wings.servers.sglang import command as sglang_command
from headrace.wings.servers.sglang.dialect import SglangDialect
from headrace.wings.servers.vllm import command as vllm_command
from headrace.wings.servers.vllm.dialect import VllmDialect, ask_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of server."""

    dialect: ServerDialect
    own_address: Callable[[Path], Address]
    """Where one that we start is to listen."""
    command: Callable[[EngineConfig, ServeRequirements, Address], Command]
    ask_workers: AskWorkers | None = None
    """Of one to whose machines versions can be carried."""


KINDS = {
    "vllm": Kind(
        dialect=VllmDialect(),
        own_address=vllm_command.own_address,
        command=vllm_command.command,
        ask_workers=ask_workers,
    ),
    "sglang": Kind(
        dialect=SglangDialect(), own_address=sglang_command.own_address, command=sglang_command.command
    ),
}  # fmt: skip
"""By ``engine.kind``. Another server is a dialect, a command, and a row here and in the capabilities."""


@contextmanager
def served(
    config: EngineConfig,
    wanted: ServeRequirements,
    handover: Handover,
    receiver: StagingReceiver | None,
    clock: Clock,
) -> Iterator[ServedEngine]:
    """The engine, without weights that have a version: they go through ``handover``. Raises
    :class:`~headrace.base.errors.ConfigError` for a server that cannot be had."""
    kind, directory = KINDS[config.kind], handover.directory
    dialect = kind.dialect
    settings, found = config.server, config.server.urls
    address = Address(url=found[0], token=secret(settings.token_from)) if found else kind.own_address(directory)
    path = wanted.path if found else model_alone(wanted.path, directory)
    command = kind.command(config, replace(wanted, path=path), address)
    server = Server(dialect, address, handover, command)
    way = _way(config, handover)
    claim = owned(address) if found and receiver is not None else nullcontext()
    if not found:
        version = installed(settings, dialect.package)
        refuse_untested(dialect.name, version, dialect.tested, any_version=settings.any_version)
        server.start()
    try:
        with claim, Wire(address) as wire:
            met = server.meet(wire, settings.wait_s, clock)
            refuse_untested(dialect.name, met.version, dialect.tested, any_version=settings.any_version)
            _refuse_other_model(dialect, address, met, wanted)
            limits = ServedLimits(
                vocab_size=vocabulary(wanted.path),
                max_context=wanted.max_context,
                masks=wanted.record_kept,
                routes=handover.form.routes() if wanted.record_routing else None,
            )
            with _carrying(kind, wire, handover, way):
                yield ServedEngine(wire, server, config, met=met, limits=limits, receiver=receiver, clock=clock)
    finally:
        server.close()


def _way(config: EngineConfig, handover: Handover) -> CarrierConfig | None:
    """``None`` to a server that sees the folder. Raises :class:`~headrace.base.errors.ConfigError`."""
    settings = config.server
    if settings.weights_by == "files":
        return None
    way = CarrierConfig(
        backend=settings.weights_by,
        host=settings.weights_host,
        device=config.device,
        deadline_s=handover.deadline_s,
    )
    way.refuse_impossible()
    return way


@contextmanager
def _carrying(kind: Kind, wire: Wire, handover: Handover, way: CarrierConfig | None) -> Iterator[None]:
    if way is None:
        yield
        return
    assert kind.ask_workers is not None  # else the settings were refused
    with closing(Carrier(wire, kind.ask_workers, way)) as handover.carrier:
        yield


def vocabulary(path: str) -> int:
    """Ids run from 0 to one below it."""
    return int(read_config(path).vocab_size)


def _refuse_other_model(dialect: ServerDialect, address: Address, met: ServerInfo, wanted: ServeRequirements) -> None:
    """What can be seen without a token: the rest shows when weights do not fit, or in the first comparison of
    logprobs."""
    if met.max_context < wanted.max_context:
        raise ConfigError(
            f"{dialect.name} at {address} serves {met.model!r} with a context of {met.max_context} tokens, and "
            f"{wanted.max_context} are needed",
            remedy="start it with a longer context, or lower engine.max_context or engine.max_new_tokens",
        )
    limit = limit_of(wanted.path)
    if limit.reason and met.max_context > limit.length:
        raise ConfigError(
            f"{dialect.name} at {address} serves {met.model!r} with a context of {met.max_context} tokens: "
            f"{limit.reason}, and a server chooses once, by its context",
            remedy=f"start it with a context of at most {limit.length} tokens",
        )
    if called(met.model) != called(wanted.path):
        raise ConfigError(
            f"{dialect.name} at {address} serves {met.model!r}, and model.path={wanted.path!r} is trained",
            remedy="start it with the directory of model.path",
        )
    if difference := _other_tensors(wanted, met.model):
        raise ConfigError(
            f"{dialect.name} at {address} serves {met.model!r}, which is another model than model.path="
            f"{wanted.path!r}: {difference}",
            remedy="start it with the directory of model.path",
        )


def _other_tensors(wanted: ServeRequirements, theirs: str) -> str:
    """What differs first, where the server's directory can be read here; empty where nothing does."""
    if not (Path(theirs) / "config.json").is_file() or Path(theirs).resolve() == Path(wanted.path).resolve():
        return ""
    there, here = (
        {
            name: list(tensor.shape)
            for name, tensor in ServedForm(replace(wanted, path=path, lora=None)).tensors().items()
        }
        for path in (theirs, wanted.path)
    )
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
    return ""
