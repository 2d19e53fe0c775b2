"""The rollout shards of the controller benchmark: real processes that run episodes beside the controller, and send
their requests to the engines without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.types.sampling import Sampling
from headrace.engine.fleet import Fleet
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.local_process import LocalStarter
from headrace.launch.rollouts import RolloutShards, shard_names
from headrace.launch.starts import RolloutStart
from headrace.launch.supervision import SupervisionConfig


def open_shards(
    count: int, sampling: Sampling, fleet: Fleet, clients: Sequence[EngineClient], directory: Path, *, token: str
) -> RolloutShards:
    """Return ``count`` rollout shards, which are not started yet. They sample with ``sampling`` from the engines of
    ``fleet``, for which the controller has ``clients``. ``directory`` contains the sockets of the shards, and ``token``
    is the secret of the run."""
    site = Rendezvous(directory=directory, logs=directory, token=token, on_spans=lambda spans: None)
    start = RolloutStart(
        sampling=sampling,
        run_seed=0,
        limits={},
        timeout_s=None,
        retries=0,
        record_tokens=256,
        deadline_s=120.0,
    )

    async def start_one(name: str) -> Child:
        """Start the process of the shard ``name``, and return it."""

        def client(channel: ControllerChannel) -> RolloutClient:
            """Return the controller's client of the shard, which uses ``channel``."""
            return RolloutClient(name, channel, token=token)

        spec = ProcessSpec(name=name, start=start, num_threads=1, make_peer=client)
        return await Child.start(site, spec, LocalStarter())

    config = SupervisionConfig(restarts=0, start_timeout_s=120.0, silence_s=60.0)
    named = {client.name: client for client in clients}
    return RolloutShards(
        start_one,
        shard_names(count),
        config,
        RealClock(),
        fleet=fleet,
        client=named.__getitem__,
    )
