"""Settings of the engines of a run."""

from __future__ import annotations

from pydantic import Field

from headrace.engine.config import EngineConfig
from headrace.models.devices import Devices


class FleetConfig(EngineConfig):
    """Settings of sampling, of the batch, and of the number of engines."""

    count: int = Field(default=1, ge=1, le=64)
    """The number of engines: processes of this machine that share the requests. ``launch.engine_threads`` is divided
    among all of them, ``cache_share`` among those on one device; ``max_sequences``, ``cache_tokens``, ``max_waiting``
    and ``fork_memory`` apply to each."""

    def for_engine(self, place: int, devices: Devices) -> EngineConfig:
        """Return the settings of the engine with index ``place``. Engines on one device divide its memory.

        >>> two = Devices(engines=("cuda:1", "cuda:1"), learner=("cuda:0",))
        >>> FleetConfig(count=2).for_engine(0, two).cache_share
        0.45
        """
        device = devices.engines[place]
        settled = self.on(device, shared=device in devices.learner)
        share = (settled.cache_share or 0.0) / devices.engines.count(device)
        one = EngineConfig.model_validate({**settled.model_dump(exclude={"count"}), "cache_share": share})
        return one.model_copy(update={"server": one.server.for_engine(place)})
