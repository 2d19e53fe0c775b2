"""Settings of the launch."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import refuse_secret
from headrace.base.errors import ConfigError
from headrace.wings.cluster.joining.invitation import host_and_port

Amount = Annotated[float, Field(ge=0)]


class ResourceShare(Section):
    """What one part asks a cluster for. Its libraries compute with as many threads as it has whole cores."""

    cpus: Amount = 1.0
    """Cores."""
    gpus: int = Field(default=0, ge=0, le=1)
    """1: a GPU of its own, on which it computes."""
    memory_gb: Amount = 0.0
    """Memory; 0 leaves it out of the count."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Resources of the cluster's own, by name: ``{ "big_disk" = 1 }``."""

    def __str__(self) -> str:
        """
        >>> str(ResourceShare(cpus=4, gpus=1))
        '4 CPUs, 1 GPU'
        """
        parts = [f"{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}"]
        parts += ["1 GPU"] if self.gpus else []
        parts += [f"{self.memory_gb:g} GB of memory"] if self.memory_gb else []
        return ", ".join([*parts, *(f"{amount:g} {name}" for name, amount in sorted(self.resources.items()))])


class Leftover(ResourceShare):
    """The same, of parts that mostly wait: unless more is asked for, they take what is left."""

    cpus: Amount = 0.0
    """Cores."""


class RayConfig(Section):
    """Where a cluster is, and what each part asks it for."""

    address: str = "auto"
    """Of the cluster, as ``ray.init`` takes it. ``auto``: the one that this machine, or this job, belongs to;
    ``local``: one is started on this machine."""
    engine: ResourceShare = ResourceShare()
    """Each engine, those of agents with weights of their own included."""
    learner: ResourceShare = ResourceShare()
    """Each rank of the learner."""
    scorer: Leftover = Leftover()
    """Each scoring worker. One more than ``workers`` is started now and then: leave room for it."""
    environment: Leftover = Leftover()
    """Each environment worker. Up to four more than ``env.workers`` are started now and then: leave room for them."""
    placement: Literal["pack", "spread"] = "pack"
    """``pack``: engines and ranks stand on as few nodes as possible; ``spread``: on as many."""

    @model_validator(mode="after")
    def _standing_parts_ask_for_something(self) -> Self:
        for role, share in (("engine", self.engine), ("learner", self.learner)):
            if not (share.cpus or share.gpus or share.memory_gb or share.resources):
                raise ConfigError(
                    f"launch.ray.{role}.cpus=0 asks for nothing, and a cluster can hold no place for nothing",
                    remedy=f"set launch.ray.{role}.cpus >= 1",
                )
        return self


class LaunchConfig(Section):
    """Where the parts run, and how the cores are divided between them."""

    kind: Literal["local", "ray"] = "local"
    """``local``: processes of this machine: the controller, engines, one learner or its ranks, scoring workers.
    ``ray``: the controller here, and all else where a Ray cluster has room for it."""
    ray: RayConfig = RayConfig()
    """Only with ``kind = "ray"``: the cluster, and what each part asks it for."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Cores that the engines compute with, all together, one each at least; unset: half of the machine's. Only with
    ``kind = "local"``."""
    learner_threads: int | None = Field(default=None, ge=1)
    """Cores that the learner computes with, all of its ranks together; unset: half of the machine's. Only with
    ``kind = "local"``."""
    lend_cores: bool = False
    """Whether a part that waits lends its cores to those that compute: an engine its own while it has nothing to
    sample, the learner its own until the next batch. Each borrows only while it measures a gain. Only between
    processors of one machine; a run that lends cannot be replayed bit for bit."""
    join: str = ""
    """``ADDRESS:PORT`` of this machine, at which others may join the run with workers for its environments: see
    ``headrace join``. Or a Redis server that both reach, where they do not reach one another: ``redis://host:6379/0``,
    ``rediss://...`` for TLS, ``unix:///path/of/socket``; without a password. Only with ``kind = "local"``, and an
    environment that runs in workers."""
    join_password_env: str = ""
    """Environment variable that holds the password of that Redis server; unset: it wants none."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a part to load its model and report; and, before that, for room in a cluster."""
    engine_restarts: int = Field(default=3, ge=0)
    """How many engines that died are started again within ten minutes; the next death ends the run, as every death does
    with 0."""
    learner_restarts: int = Field(default=0, ge=0)
    """How often a run whose learner died, or a rank of it, goes on by itself from its last snapshot: with all parts
    started anew, and behind what running answers had streamed. Beyond that, and with 0, such a death ends the run."""
    engine_silence_s: float = Field(default=60.0, gt=0)
    """An engine that has sequences and says nothing for so long is ended and started again; with
    ``engine_restarts = 0`` nobody looks."""

    @model_validator(mode="after")
    def _others_can_join(self) -> Self:
        if self.join_password_env and not self.relayed:
            raise ConfigError(
                f"launch.join_password_env={self.join_password_env!r} is set, and launch.join={self.join!r} needs none",
                remedy="set launch.join = 'redis://host:6379/0', or leave it out",
            )
        if not self.join:
            return self
        if self.remote:
            raise ConfigError(
                f"launch.join={self.join!r}, and with launch.kind='ray' the cluster is what machines join",
                remedy="leave launch.join out, and start Ray on those machines",
            )
        if self.relayed:
            self._refuse_server()
            return self
        try:
            host, _ = host_and_port(self.join)
        except ConfigError as error:
            raise ConfigError(f"launch.join={error.problem}", remedy=error.remedy) from None
        try:
            unnamed = ip_address(host).is_unspecified
        except ValueError:
            unnamed = True
        if unnamed:
            raise ConfigError(
                f"launch.join={self.join!r}: {host} is not the address of one machine, in numbers",
                remedy="write the address by which the others reach this one, as in 10.0.0.5:7781",
            )
        return self

    def _refuse_server(self) -> None:
        remedy = "name an environment variable that holds it: launch.join_password_env"
        refuse_secret("launch.join", self.join, remedy)
        parts = urlsplit(self.join)
        if not (parts.path if parts.scheme == "unix" else parts.hostname and parts.scheme in ("redis", "rediss")):
            raise ConfigError(
                f"launch.join={self.join!r} is no Redis server",
                remedy="write redis://host:6379/0, rediss://... for TLS, or unix:///path/of/socket",
            )

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        if not self.remote and self.ray != RayConfig():
            changed = [name for name, value in self.ray if value != RayConfig.model_fields[name].default]
            raise ConfigError(
                f"launch.ray.{changed[0]} is set, and launch.kind='local' uses no cluster",
                remedy="set launch.kind = 'ray', or leave [launch.ray] out",
            )
        if self.remote and self.lend_cores:
            raise ConfigError(
                "launch.lend_cores=true, and with launch.kind='ray' the cluster gives each part its cores",
                remedy="leave launch.lend_cores out",
            )
        told = {"engine": self.engine_threads, "learner": self.learner_threads}
        for role, asked in told.items():
            if self.remote and asked is not None:
                raise ConfigError(
                    f"launch.{role}_threads={asked} is set, and with launch.kind='ray' each part has the cores that it "
                    "asks the cluster for",
                    remedy=f"set launch.ray.{role}.cpus, and leave launch.{role}_threads out",
                )
        return self

    @property
    def remote(self) -> bool:
        """Whether parts may run on other machines than the controller."""
        return self.kind == "ray"

    @property
    def relayed(self) -> bool:
        """Whether machines that join come over a Redis server."""
        return "://" in self.join

    def threads(self, role: Literal["engine", "learner"], count: int, num_cores: int) -> int:
        """Cores that each of ``count`` parts of that role computes with, on a machine with ``num_cores``.

        >>> LaunchConfig(engine_threads=4).threads("engine", 2, 8)
        2
        """
        if self.remote:
            share = self.ray.engine if role == "engine" else self.ray.learner
            return max(1, int(share.cpus))
        asked = self.engine_threads if role == "engine" else self.learner_threads
        return max(1, threads(asked, num_cores) // count)


def threads(asked: int | None, num_cores: int) -> int:
    """``asked``, or half of the cores.

    >>> threads(None, 8), threads(3, 8), threads(None, 1)
    (4, 3, 1)
    """
    return asked if asked is not None else max(1, num_cores // 2)
