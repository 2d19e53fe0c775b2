"""The engine's process where the engine is a server: it starts or finds one, brings it weights, streams its answers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from headrace.clock import RealClock
from headrace.engine import EngineConfig
from headrace.engine.served.launching import Wanted
from headrace.engine.served.make import served, skeleton
from headrace.environ import run_token, shared_memory_root
from headrace.heap import settled_heap
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.engine import EngineHost, HostTerms
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.leases import Lease
from headrace.launch.starts import EngineStart
from headrace.sync.transports import make_receiver
from headrace.types.messages.controller import Ready
from headrace.types.versions import INITIAL


def run_served(start: EngineStart, config: EngineConfig, channel: PartChannel) -> None:
    """Have a server, report, serve until told to shut down."""
    wanted = Wanted(path=start.model["path"], dtype=start.model["dtype"], max_context=start.max_context)
    own = start.own_weights
    receiver = None if own else make_receiver(start.route, skeleton(wanted.path, wanted.dtype), run_token())
    with ExitStack() as kept:
        folder = config.server.weights_dir
        directory = Lease.directory(Path(folder) if folder else shared_memory_root())
        kept.callback(directory.end)
        core = kept.enter_context(served(config, wanted, directory.path, receiver, RealClock()))
        if own:
            core.adopt(INITIAL)
        address = "" if receiver is None else receiver.address
        facts = {"device": config.device, "weights_address": address, **machine_facts(start.num_threads)}
        channel.send(Ready(token=run_token(), pid=os.getpid(), facts={**facts, **core.facts()}))
        stager = kept.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage"))
        with settled_heap():
            EngineHost(core, channel, stager, HostTerms()).serve()
