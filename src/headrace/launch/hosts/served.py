"""The engine's process where the engine is a server: it starts or finds one, brings it weights, streams its answers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.environ import run_token, shared_memory_root
from headrace.base.heap import settled_heap
from headrace.base.types.messages.controller import Ready
from headrace.base.types.versions import INITIAL
from headrace.engine import EngineConfig
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.engine import EngineHost, HostTerms
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.leases import Lease
from headrace.launch.starts import EngineStart
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from headrace.sync.transports import make_receiver
from headrace.wings.servers.client.forms import ServedForm
from headrace.wings.servers.client.handover import Handover
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.make import served


def run_served(start: EngineStart, config: EngineConfig, channel: PartChannel) -> None:
    """Have a server, report, serve until told to shut down."""
    model, own = ModelConfig.model_validate(start.model), start.own_weights
    wanted = ServeRequirements(
        path=model.path,
        dtype=model.dtype,
        max_context=start.max_context,
        lora=model.lora,
        record_kept=start.record_kept,
        record_routing=start.record_routing,
        sleeps=start.sleeps,
    )
    form = ServedForm(wanted)
    receiver = None if own else make_receiver(start.route, form.tensors(), run_token())
    with ExitStack() as kept:
        folder = config.server.weights_dir
        directory = Lease.directory(Path(folder) if folder else shared_memory_root())
        kept.callback(directory.end)
        handover = Handover(directory.path, form, start.route.deadline_s)
        core = kept.enter_context(served(config, wanted, handover, receiver, RealClock()))
        if own:
            if model.lora is not None:
                handover.write(INITIAL, weight_tensors(load_model(model)))
            core.adopt(INITIAL)
        address = "" if receiver is None else receiver.address
        facts = {"device": config.device, "weights_address": address, **machine_facts(start.num_threads)}
        channel.send(Ready(token=run_token(), pid=os.getpid(), facts={**facts, **core.facts()}))
        stager = kept.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage"))
        with settled_heap():
            EngineHost(core, channel, stager, HostTerms()).serve()
