"""The access to a Ray cluster: its nodes, the reservation of resources, and actors. Only this file imports Ray.

The launcher sends only a few strings and numbers through Ray; weights, episodes and messages of the run have their own
channels.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, DeadlineError, first_line
from headrace.launch.config import ResourceShare
from headrace.wings.cluster.far.process import SupervisorLost, SupervisorUnusable
from headrace.wings.cluster.far.supervisor import ProcessSupervisor

REACH_S = 10.0
"""Longest wait until the head of the cluster accepts a connection, in seconds."""
CHECK_S = 0.5
"""Seconds between two checks whether the cluster has reserved the resources."""
GB = 1_000_000_000
"""Number of bytes in the unit of ``memory_gb``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node (machine) of the cluster that is alive."""

    address: str
    """Address of the node."""
    cpus: float
    """Number of CPU cores, as the cluster counts them."""
    gpus: float
    """Number of GPUs, as the cluster counts them."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A handle of a supervisor that is a Ray actor, with the interface of
    :class:`~headrace.wings.cluster.far.process.SupervisorHandle`."""

    handle: Any
    """Ray's handle of the actor."""

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the supervisor, and return a future of its result. The future fails with
        :class:`SupervisorLost` or :class:`SupervisorUnusable`."""
        bound = getattr(self.handle, method)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(reply: asyncio.Future[Any]) -> None:
            """Set the future to the actor's answer or error."""
            error = None if reply.cancelled() else reply.exception()
            if reply.cancelled() or answer.done():
                return
            if error is None:
                answer.set_result(reply.result())
            else:
                answer.set_exception(convert_error(error))
                answer.exception()  # marks the error as retrieved, since the caller may have been cancelled

        asyncio.wrap_future(bound.remote(*arguments).future()).add_done_callback(settle)
        return answer

    def kill(self) -> None:
        """End the actor and its process."""
        import ray

        with suppress(Exception):  # the cluster may be gone
            ray.kill(self.handle, no_restart=True)


async def _refuse_unreachable(address: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if no program listens at ``address`` (``HOST:PORT``), since Ray
    itself would retry for minutes. Addresses of another form are not checked, because only Ray can resolve them."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError, OverflowError) as error:
        raise _make_no_cluster_error(address, str(error) or f"nobody has answered for {REACH_S:g} s") from None
    writer.close()


def _make_no_cluster_error(address: str, why: str) -> ConfigError:
    """Return the error for an ``address`` without a Ray cluster; ``why`` is the reason in words."""
    return ConfigError(
        f"launch.ray.address={address!r} leads to no Ray cluster: {why}",
        remedy="start one (ray start --head; on other machines: ray start --address HEAD:6379), submit the run with "
        "ray job submit, or set launch.ray.address = 'local'",
    )


def convert_error(error: BaseException) -> SupervisorLost | SupervisorUnusable:
    """Return the supervisor's error for an error of Ray: :class:`SupervisorUnusable` if the actor could not be created
    or its method has raised an error, and otherwise :class:`SupervisorLost`."""
    from ray import exceptions

    made = isinstance(error, exceptions.RayTaskError | exceptions.RuntimeEnvSetupError)
    if made or "creation task" in str(error):
        return SupervisorUnusable(_get_last_line(error))
    return SupervisorLost(_end_reason(error))


class RayReservation:
    """The resources that the cluster reserves for the run: a placement group of Ray with a bundle for each part that
    runs as long as the run."""

    def __init__(self, group: Any, parts: Sequence[tuple[str, ResourceShare]]) -> None:
        """Create the record of the placement group ``group``, whose bundles are in the order of ``parts``."""
        self._group = group
        self._bundle_numbers = {name: place for place, (name, _) in enumerate(parts)}
        """Number of each part's bundle, by the name of the part."""

    def __contains__(self, name: str) -> bool:
        """Return whether the part ``name`` has a bundle."""
        return name in self._bundle_numbers

    def strategy(self, name: str) -> Any:
        """Return Ray's scheduling strategy for the part ``name``: the part's bundle, or any node for a worker and
        for an engine that is added while the run goes on, which have no bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if name not in self._bundle_numbers:
            return "SPREAD"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle_numbers[name])


class RayCluster:
    """A Ray cluster to which this process is connected."""

    def __init__(self, *, ours: bool) -> None:
        """Create the object for a cluster to which this process is connected. ``ours``: this object has made the
        connection, so that :meth:`leave` closes it."""
        self._ours = ours
        self._placement_group: Any = None
        """Ray's placement group with the reserved resources; ``None`` if nothing is reserved."""
        self._free_before: Mapping[str, float] = {}
        """The free resources when no engine was being started."""
        self._accepted = set[str]()
        """The engines for which there has been room, and which are being started or will be."""
        self._started = set[str]()
        """The engines for which there has been room, and which have started since :attr:`_free_before`."""

    @classmethod
    async def connect(cls, address: str) -> RayCluster:
        """Connect this process to the cluster at ``address``, unless it is already connected to a cluster, and return
        the object for it. Raises :class:`~headrace.base.errors.ConfigError` if there is no cluster."""
        import ray

        if ray.is_initialized():
            return cls(ours=False)
        await _refuse_unreachable(address)
        noisy = logging.getLogger("ray")
        before = noisy.level
        noisy.setLevel(logging.ERROR)  # Ray's messages at its start are not meant for users
        try:
            await asyncio.to_thread(ray.init, address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _make_no_cluster_error(address, first_line(error)) from None
        finally:
            noisy.setLevel(before)
        return cls(ours=True)

    async def leave(self) -> None:
        """Release the resources that the cluster has reserved for the run, and disconnect from the cluster if this
        object has made the connection."""
        import ray

        if self._placement_group is not None:
            with suppress(Exception):  # the cluster may be gone
                await asyncio.to_thread(ray.util.remove_placement_group, self._placement_group)
        if self._ours:
            await asyncio.to_thread(ray.shutdown)

    async def nodes(self) -> list[RayNode]:
        """Return the nodes of the cluster that are alive."""
        import ray

        return [
            RayNode(
                address=str(node["NodeManagerAddress"]),
                cpus=float(node["Resources"].get("CPU", 0)),
                gpus=float(node["Resources"].get("GPU", 0)),
            )
            for node in await asyncio.to_thread(ray.nodes)
            if node["Alive"]
        ]

    async def reserve(
        self, parts: Sequence[tuple[str, ResourceShare]], placement: str, timeout_s: float
    ) -> RayReservation:
        """Reserve the resources of all ``parts`` (pairs of name and resources) together, and return the reservation.
        ``placement`` is Ray's placement strategy, such as ``pack``. Raises
        :class:`~headrace.base.errors.DeadlineError`, which lists the needs and the cluster's resources, if they are not
        available within ``timeout_s`` seconds."""
        import ray

        self._placement_group = await asyncio.to_thread(
            ray.util.placement_group, [make_bundle(share) for _, share in parts], placement.upper()
        )
        clock = RealClock()
        deadline_s = clock.now() + timeout_s
        while not await asyncio.to_thread(self._placement_group.wait, CHECK_S):
            if clock.now() > deadline_s:
                raise DeadlineError(
                    f"the cluster has not had room for {timeout_s:g} s for all that the run needs at once: "
                    f"{describe_needs(parts)}; {await self.describe_resources()}",
                    remedy="add nodes; ask for less in [launch.ray], or for fewer engines or ranks; where an "
                    "autoscaler is still at work, raise launch.start_timeout_s",
                )
        return RayReservation(self._placement_group, parts)

    async def refuse_no_room(self, share: ResourceShare, names: Sequence[str], starting: Set[str]) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the cluster has no free resources for the engines
        ``names``, which ask for ``share`` each and have no processes. Those in ``starting`` may have their resources
        already. Whether one node has them together is found out when the parts start."""
        import ray

        # now, since a start may end during the next call
        pending = starting & set(names)
        awaited = self._accepted & {*starting, *names}  # without those that were accepted and have failed
        free: Mapping[str, float] = await asyncio.to_thread(ray.available_resources)
        already, num = pending | awaited, len(names) - len(pending)
        # an engine that is being started again may have given back resources that were not free before
        if not pending or not pending <= awaited:
            self._free_before, self._started = free, set()
        accepted = awaited | set(names)

        def has_room(free: Mapping[str, float], num: int) -> bool:
            """Return whether ``free`` is enough for ``num`` engines."""
            return all(free.get(name, 0.0) >= num * amount for name, amount in make_bundle(share).items())

        # nothing tells whether an engine that is starting has its resources: either it has not, or all had them before
        fits = has_room(free, len(names)) or has_room(self._free_before, len(accepted | self._started))
        if not (has_room(free, num) and fits):
            each = f"{len(names)} more engines, which ask for {share} each"
            each = each if len(names) > 1 else f"one more engine: {share}"
            being = [name for name in names if name in already]
            among = f" ({', '.join(being)} {'is' if len(being) == 1 else 'are'} being started already)" if being else ""
            raise ConfigError(
                f"the cluster has no room for {each}{among}; {await self.describe_resources()}",
                remedy="add nodes first, or remove an engine; [launch.ray.engine] says what an engine asks for",
            )
        self._accepted = accepted

    def end_start(self, name: str, *, started: bool) -> None:
        """Record that the part ``name`` is no longer being started: it has started, and has its resources; or its start
        has failed or was cancelled, and it needs none."""
        if started and name in self._accepted:
            self._started.add(name)
        elif not started:
            self._started.discard(name)
        self._accepted.discard(name)

    async def describe_resources(self) -> str:
        """Return a sentence about the resources of the cluster, in total and free, for messages."""
        import ray

        nodes = await self.nodes()
        free: Mapping[str, float] = await asyncio.to_thread(ray.available_resources)
        largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
        return (
            f"it has {len(nodes)} node{'' if len(nodes) == 1 else 's'} with {sum(node.cpus for node in nodes):g} CPUs "
            f"and {sum(node.gpus for node in nodes):g} GPUs ({free.get('CPU', 0):g} and {free.get('GPU', 0):g} free), "
            f"the largest with {largest.cpus:g} and {largest.gpus:g}"
        )

    def start_supervisor(self, name: str, share: ResourceShare, reservation: RayReservation) -> Actor:
        """Start an actor that will supervise the process ``name``, with the resources ``share``, and return its handle
        immediately. The actor may still wait for its resources. A part with a bundle in ``reservation`` gets its
        resources from it."""
        import ray

        resources = make_bundle(share)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": reservation.strategy(name),
            "max_restarts": 0,
            "max_concurrency": 16,
        }
        return Actor(ray.remote(_NodeSupervisor).options(**options).remote())


def own_address() -> str:
    """Return the address of this machine in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


class _NodeSupervisor(ProcessSupervisor):
    """A supervisor in a Ray actor, which gets the address of its node from Ray."""

    def __init__(self) -> None:
        """Create a supervisor with the address of this node in the cluster."""
        super().__init__(own_address())


def make_bundle(share: ResourceShare) -> dict[str, float]:
    """Return the resources of a part by Ray's names for them; resources with the amount 0 are left out.

    >>> make_bundle(ResourceShare(cpus=2, memory_gb=1))
    {'CPU': 2.0, 'memory': 1000000000.0}
    """
    named = {"CPU": share.cpus, "GPU": float(share.gpus), "memory": share.memory_gb * GB, **share.resources}
    return {name: amount for name, amount in named.items() if amount}


def describe_needs(parts: Sequence[tuple[str, ResourceShare]]) -> str:
    """Return a phrase that lists the resources that each part needs; parts with equal needs are listed together.

    >>> one, two = ResourceShare(), ResourceShare(cpus=2)
    >>> describe_needs([("learner", one), ("engine-0", two), ("engine-1", two)])
    'learner 1 CPU; engine-0, engine-1 2 CPUs each'
    """
    names: dict[str, list[str]] = {}
    for name, share in parts:
        names.setdefault(str(share), []).append(name)
    return "; ".join(f"{', '.join(who)} {what}{' each' if len(who) > 1 else ''}" for what, who in names.items())


def refuse_absent() -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if Ray is not installed."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise ConfigError(
            "launch.kind='ray' needs Ray, which is not installed",
            remedy="pip install 'headrace[ray]', here and on every node",
        )


def _end_reason(error: BaseException) -> str:
    """Return the reason why an actor ended, in words that follow a name, shortened from Ray's message."""
    text = " ".join(str(error).split())
    if re.search(r"node (has )?died|node was terminated|node .*dead", text, re.IGNORECASE):
        return "was lost with its node"
    if "running low on memory" in text:
        return "was ended by the cluster, because the memory of its node ran out"
    if "ray.kill" in text or "killed by" in text.lower():
        return "was ended by the cluster"
    sentence = re.search(r"(Worker|Owner|The actor|The process)[^.]*exit[^.]*|(?<=RPC error: ).+?(?= rpc_code)", text)
    return f"was lost with its actor ({sentence[0].strip() if sentence else text[:200]})"


def _get_last_line(error: BaseException) -> str:
    """Return the last line of an error's text, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
