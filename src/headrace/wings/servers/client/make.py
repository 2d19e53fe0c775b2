"""The construction of an engine that samples through a server: start the server or connect to a running one, check it,
and close it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from headrace.base.clock import Clock, RealClock
from headrace.base.environ import secret, shared_memory_root
from headrace.base.errors import ConfigError
from headrace.base.types.versions import INITIAL
from headrace.engine.config import ENGINES, EngineConfig, EngineSetup, OpenedEngine
from headrace.launch.leases import Lease
from headrace.models.hub import short_model_name
from headrace.models.load import load_model, refuse_multimodal
from headrace.models.settings import find_context_limit, read_config
from headrace.models.weights import weight_tensors
from headrace.sync.receiver import Receiver
from headrace.wings.servers.client.carrier import Carrier, CarrierConfig
from headrace.wings.servers.client.core import ServedEngine
from headrace.wings.servers.client.dialect import ServerDialect, ServerInfo
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.kind import ServerKind, get_server_settings
from headrace.wings.servers.client.launching import ServeRequirements, installed_version, model_alone, refuse_untested
from headrace.wings.servers.client.ownership import own_server
from headrace.wings.servers.client.server import Server, ServerParts
from headrace.wings.servers.client.streams import ServedLimits
from headrace.wings.servers.client.wire import Address, Wire


@contextmanager
def open_engine(setup: EngineSetup) -> Iterator[OpenedEngine]:
    """Open the engine of ``engine.kind`` in this process, as a context: start its server or connect to a running one,
    and yield the engine with its facts. If the weights never change, the server uses the weights of the model's
    directory from the beginning."""
    config, model = setup.config, setup.model
    refuse_multimodal(
        model.path, f"engine.kind={config.kind!r} serves the whole checkpoint, whose weights have other names"
    )
    required = ServeRequirements(
        path=model.path,
        dtype=model.dtype,
        max_context=setup.max_context,
        lora=model.lora,
        record_kept=setup.record_kept,
        record_routing=setup.record_routing,
        sleeps=setup.sleeps,
    )
    form = ServedForm(required)
    receiver = None if setup.own_weights else setup.receive(form.tensors())
    with ExitStack() as kept:
        folder = get_server_settings(config).weights_dir
        directory = Lease.create_directory(Path(folder) if folder else shared_memory_root())
        kept.callback(directory.end)
        handover = Handover(directory.path, form, setup.deadline_s)
        core = kept.enter_context(open_served_engine(config, required, handover, receiver, RealClock()))
        if setup.own_weights:
            if model.lora is not None:
                handover.write(INITIAL, weight_tensors(load_model(model)))
            core.adopt(INITIAL)
        address = "" if receiver is None else receiver.address
        yield OpenedEngine(core=core, device=config.device, address=address, facts=core.facts())


@contextmanager
def open_served_engine(
    config: EngineConfig, required: ServeRequirements, handover: Handover, receiver: Receiver | None, clock: Clock
) -> Iterator[ServedEngine]:
    """Start the server of ``config`` or connect to a running one, check it, and yield an engine that samples through
    it. The engine has no version at first. Its weights are passed to the server through ``handover``; if they are
    trained, they come from ``receiver``. Raises :class:`~headrace.base.errors.ConfigError` if the server cannot be
    started or reached, or does not fit."""
    kind, directory = ENGINES.load(config.kind), handover.directory
    assert isinstance(kind, ServerKind)
    parts, settings = kind.parts(), get_server_settings(config)
    dialect, found = parts.dialect, settings.urls
    address = Address(url=found[0], token=secret(settings.token_from)) if found else parts.own_address(directory)
    path = required.path if found else model_alone(required.path, directory)
    command = parts.command(config, replace(required, path=path), address)
    server = Server(dialect, address, handover, command)
    carrier_config = _carrier_config(config, handover)
    claim = own_server(address) if found and receiver is not None else nullcontext()
    if not found:
        version = installed_version(settings, dialect.package)
        refuse_untested(dialect.name, version, dialect.tested, any_version=settings.any_version)
        server.start()
    try:
        with claim, Wire(address) as wire:
            info = server.wait_until_serving(wire, settings.wait_s, clock)
            refuse_untested(dialect.name, info.version, dialect.tested, any_version=settings.any_version)
            _refuse_other_model(dialect, address, info, required)
            limits = ServedLimits(
                vocab_size=vocabulary(required.path),
                max_context=required.max_context,
                record_kept=required.record_kept,
                routing=handover.form.routes() if required.record_routing else None,
            )
            with _opened_carrier(parts, wire, handover, carrier_config):
                yield ServedEngine(wire, server, config, info=info, limits=limits, receiver=receiver, clock=clock)
    finally:
        server.close()


def _carrier_config(config: EngineConfig, handover: Handover) -> CarrierConfig | None:
    """Return the settings for sending versions to the server's machines; ``None`` if the server can read the folder of
    the versions. Raises :class:`~headrace.base.errors.ConfigError` if this machine cannot send in the chosen way."""
    settings = get_server_settings(config)
    if settings.weights_by == "files":
        return None
    carrier_config = CarrierConfig(
        backend=settings.weights_by,
        host=settings.weights_host,
        device=config.device.partition(",")[0],  # the first GPU of an engine sends to all machines
        deadline_s=handover.deadline_s,
    )
    carrier_config.refuse_impossible()
    return carrier_config


@contextmanager
def _opened_carrier(
    parts: ServerParts, wire: Wire, handover: Handover, carrier_config: CarrierConfig | None
) -> Iterator[None]:
    """Return a context in which ``handover`` has a carrier, which sends versions to the server's machines. If
    ``carrier_config`` is ``None``, do nothing."""
    if carrier_config is None:
        yield
        return
    assert parts.call_workers is not None  # the settings refuse gloo and nccl for other servers
    with closing(Carrier(wire, parts.call_workers, carrier_config)) as handover.carrier:
        yield


def vocabulary(path: str) -> int:
    """Return the number of token ids of the model in ``path``."""
    return int(read_config(path).vocab_size)


def _refuse_other_model(
    dialect: ServerDialect, address: Address, info: ServerInfo, required: ServeRequirements
) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the model that the server reports in ``info`` differs from
    the required one in its context, its name or its tensors. Other differences are found later, when weights do not fit
    or logprobs are compared for the first time."""
    if info.max_context < required.max_context:
        raise ConfigError(
            f"{dialect.name} at {address} serves {info.model!r} with a context of {info.max_context} tokens, and "
            f"{required.max_context} are needed",
            remedy="start it with a longer context, or lower engine.max_context or engine.max_new_tokens",
        )
    limit = find_context_limit(required.path)
    if limit.reason and info.max_context > limit.length:
        raise ConfigError(
            f"{dialect.name} at {address} serves {info.model!r} with a context of {info.max_context} tokens: "
            f"{limit.reason}, and a server chooses once, by its context",
            remedy=f"start it with a context of at most {limit.length} tokens",
        )
    if short_model_name(info.model) != short_model_name(required.path):
        raise ConfigError(
            f"{dialect.name} at {address} serves {info.model!r}, and model.path={required.path!r} is trained",
            remedy="start it with the directory of model.path",
        )
    if difference := _other_tensors(required, info.model):
        raise ConfigError(
            f"{dialect.name} at {address} serves {info.model!r}, which is another model than model.path="
            f"{required.path!r}: {difference}",
            remedy="start it with the directory of model.path",
        )


def _other_tensors(required: ServeRequirements, theirs: str) -> str:
    """Return the first difference in names or shapes between the tensors of the server's model, in the directory
    ``theirs``, and of the required model; empty if there is no difference, or if that directory cannot be read on this
    machine."""
    if not (Path(theirs) / "config.json").is_file() or Path(theirs).resolve() == Path(required.path).resolve():
        return ""
    there, here = (
        {
            name: list(tensor.shape)
            for name, tensor in ServedForm(replace(required, path=path, lora=None)).tensors().items()
        }
        for path in (theirs, required.path)
    )
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
    return ""
