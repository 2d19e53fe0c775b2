"""Settings of the engines of a run."""

from __future__ import annotations

from pydantic import Field

from headrace.engine.config import EngineConfig
from headrace.models.devices import Devices


class FleetConfig(EngineConfig):
    """How sequences are sampled, how many at once, and by how many engines."""

    count: int = Field(default=1, ge=1, le=64)
    """Engines: processes of this machine that share the requests. ``launch.engine_threads`` is of all of them together,
    ``cache_share`` of those on one device; ``max_sequences``, ``cache_tokens``, ``max_waiting`` and ``fork_memory`` are
    of each."""

    def of_one(self, place: int, devices: Devices) -> EngineConfig:
        """What the engine at ``place`` is told: those on one device divide its memory.

        >>> two = Devices(engines=("cuda:1", "cuda:1"), learner=("cuda:0",))
        >>> FleetConfig(count=2).of_one(0, two).cache_share
        0.45
        """
        device = devices.engines[place]
        settled = self.on(device, shared=device in devices.learner)
        share = (settled.cache_share or 0.0) / devices.engines.count(device)
        one = EngineConfig.model_validate({**settled.model_dump(exclude={"count"}), "cache_share": share})
        urls = one.server.urls[place : place + 1]  # of none, none
        return one.model_copy(update={"server": one.server.model_copy(update={"urls": urls})})
