"""A client of one namespace of a Kubernetes cluster: jobs, pods, and the streams of a command. It needs the package
``kubernetes``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import ValidationError
from yaml import YAMLError

from headrace.base.errors import ConfigError, EnvError, nearest
from headrace.wings.sandboxes.served.session import BufferedChannel

client: Any = import_module("kubernetes.aio.client")  # kubernetes is optional: only this kind imports it
config: Any = import_module("kubernetes.aio.config")
stream: Any = import_module("kubernetes.aio.stream")
watch: Any = import_module("kubernetes.aio.watch")
T = TypeVar("T")
HEARTBEAT_S = 30.0
"""The interval of the heartbeat of a silent WebSocket, in seconds."""
FRAME_BYTES = 32 << 10
"""The largest number of bytes of one WebSocket message."""
LOOK_S = 2
"""The length of one watch of a job's pods, in seconds."""
_STDIN, _STDOUT, _STDERR, _STATUS = b"\0", b"\1", b"\2", b"\3"


class ClusterRefusal(EnvError):
    """The error of a call that the cluster refused or that did not reach it."""

    def __init__(self, problem: str, *, remedy: str, status: int = 0) -> None:
        """Create the error with the text ``problem`` and ``remedy``. ``status`` is the HTTP status; 0 if there was no
        answer."""
        super().__init__(problem, remedy=remedy)
        self.status = status


class KubernetesCluster:
    """A client of one namespace of a cluster. Create it with :meth:`open`, and call :meth:`close` at the end."""

    def __init__(self, configuration: Any, namespace: str, call_s: float) -> None:
        """Create a client of ``namespace`` in the cluster of ``configuration``. Each call may take ``call_s``
        seconds."""
        self.host = str(configuration.host)
        self.namespace = namespace
        self._call_s = call_s
        self._api = client.ApiClient(configuration)
        """The connection of all calls."""
        self._streams = stream.WsApiClient(configuration, heartbeat=HEARTBEAT_S)
        """The connection of commands in pods."""
        self._core = client.CoreV1Api(self._api)
        """The calls for pods and events."""
        self._jobs = client.BatchV1Api(self._api)
        """The calls for jobs."""
        self._policies = client.NetworkingV1Api(self._api)
        """The calls for network policies."""

    @classmethod
    async def open(cls, kubeconfig: str, context: str, namespace: str, call_s: float) -> KubernetesCluster:
        """Return a client with the configuration in the file ``kubeconfig``. If that is empty, use the default file, or
        the service account of a pod in the cluster. Raises :class:`~headrace.base.errors.EnvError` if there is no
        configuration. ``context`` is the context in that file, ``namespace`` the namespace of all calls, and ``call_s``
        the longest time of a call in seconds."""
        found = client.Configuration()
        usual = str(config.KUBE_CONFIG_DEFAULT_LOCATION).split(":")[0]
        try:
            if not kubeconfig and not _expand_home(usual).exists():
                config.load_incluster_config(found)
            else:
                path = str(_expand_home(kubeconfig or usual))
                loader = await config.load_kube_config(path, context or None, found, persist_config=False)
                namespace = namespace or str(loader.current_context["context"].get("namespace") or "")
        except (config.ConfigException, OSError, YAMLError) as error:
            raise EnvError(
                f"sandboxes of kind 'kubernetes' find no cluster: {error}",
                remedy="set kubeconfig and context in the settings of the driver, or run inside the cluster",
            ) from None
        return cls(found, namespace or "default", call_s)

    @staticmethod
    def check_pod(fields: Mapping[str, Any]) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if ``fields`` are not valid fields of a pod's
        specification."""
        known = set(client.V1PodSpec.attribute_map.values())
        for name in fields:
            if name not in known:
                raise ConfigError(f"pod.{name} is no field of a pod", remedy=nearest(name, known))
        try:
            client.V1PodSpec.model_validate({"containers": [], **fields})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(f"pod.{name}: {first['msg']}", remedy="write it as the manifests of pods do") from None

    async def close(self) -> None:
        """Close the connections to the cluster."""
        await self._api.close()
        await self._streams.close()

    async def create_job(self, body: dict[str, Any]) -> None:
        """Create a job from the manifest ``body``."""
        await self._call("create a job", self._jobs.create_namespaced_job(self.namespace, body))

    async def delete_job(self, name: str) -> None:
        """Delete the job ``name`` and its pods at once. Do nothing if the job does not exist."""
        try:
            await self._call(
                "delete a job",
                self._jobs.delete_namespaced_job(
                    name, self.namespace, grace_period_seconds=0, propagation_policy="Background"
                ),
            )
        except ClusterRefusal as error:
            if error.status != 404:
                raise

    async def jobs(self, selector: str) -> list[tuple[str, dict[str, str]]]:
        """Return the names and labels of the jobs that match the label ``selector``."""
        found = await self._call(
            "list jobs", self._jobs.list_namespaced_job(self.namespace, label_selector=selector)
        )  # fmt: skip
        return [(str(job.metadata.name), dict(job.metadata.labels or {})) for job in found.items]

    async def create_policy(self, body: dict[str, Any]) -> None:
        """Create a network policy from the manifest ``body``, unless a policy of this name exists."""
        try:
            await self._call(
                "create a network policy", self._policies.create_namespaced_network_policy(self.namespace, body)
            )
        except ClusterRefusal as error:
            if error.status != 409:
                raise

    async def pods(self, selector: str, since: str | None = None) -> AsyncGenerator[tuple[str, Any]]:
        """Watch the pods that match ``selector`` for :data:`LOOK_S` seconds, and yield pairs of an event (ADDED,
        MODIFIED, DELETED) and the pod. Without ``since``, the watch begins with the existing pods; else after that
        resource version."""
        async with watch.Watch() as news:
            events = news.stream(
                self._core.list_namespaced_pod, self.namespace, label_selector=selector, timeout_seconds=LOOK_S,
                **({} if since is None else {"resource_version": since}),
            )  # fmt: skip
            async with self._refusals("watch pods"), asyncio.timeout(LOOK_S + self._call_s):
                async for event in events:
                    yield str(event["type"]), event["object"]

    async def left_pods(self, selector: str) -> str | None:
        """Return the resource version of the list of pods that match ``selector``; ``None`` if there are no such
        pods."""
        found = await self._call(
            "list pods", self._core.list_namespaced_pod(self.namespace, label_selector=selector)
        )  # fmt: skip
        return str(found.metadata.resource_version or "") if found.items else None

    async def warnings(self, name: str) -> str:
        """Return the cluster's warning events about the job or pod ``name``; empty if there are none."""
        found = await self._call(
            "list events",
            self._core.list_namespaced_event(self.namespace, field_selector=f"involvedObject.name={name},type=Warning"),
        )
        return " ".join(f"{event.reason}: {event.message}" for event in found.items)[-500:]

    async def stream(self, pod: str, container: str, command: Sequence[str]) -> CommandStreams:
        """Run a command in a container of a pod, and return its streams."""
        core = client.CoreV1Api(self._streams)
        async with self._refusals("run a command in a pod"), asyncio.timeout(self._call_s):
            opening = await core.connect_get_namespaced_pod_exec_without_preload_content(
                pod, self.namespace, command=list(command), container=container,
                stdin=True, stdout=True, stderr=True, tty=False,
            )  # fmt: skip
            return CommandStreams(await opening)

    async def _call(self, what: str, call: Awaitable[T]) -> T:
        """Wait for one call to the cluster. Raises :class:`ClusterRefusal` if it fails; ``what`` describes the call."""
        async with self._refusals(what), asyncio.timeout(self._call_s):
            return await call

    @asynccontextmanager
    async def _refusals(self, what: str) -> AsyncIterator[None]:
        """Raise errors of the body as :class:`ClusterRefusal`; ``what`` describes the call that the body makes."""
        try:
            yield
        except client.ApiException as error:
            words, remedy = _get_message(error), "look at the quotas and events of the namespace"
            if error.status in (401, 403):
                remedy = "give this user the rights that docs/sandboxes.md lists"
            raise self._make_refusal(what, f"{error.status} {words}", remedy, int(error.status or 0)) from None
        except aiohttp.WSServerHandshakeError as error:
            raise self._make_refusal(what, f"{error.status} {error.message}", "look at the pod", error.status) from None
        except TimeoutError:
            raise self._make_refusal(what, f"no answer within {self._call_s:g} s", "look at the cluster") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._make_refusal(what, str(error), "see that it runs and can be reached from here") from None

    def _make_refusal(self, what: str, words: str, remedy: str, status: int = 0) -> ClusterRefusal:
        """Return the error of a failed call; ``what`` describes the call, and ``words`` its failure."""
        return ClusterRefusal(f"the cluster {self.host} did not {what}: {words}", remedy=remedy, status=status)


class CommandStreams(BufferedChannel):
    """The streams of a command in a pod, over one WebSocket. The first byte of each message is the number of the
    stream."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        """Create the streams over ``socket``, an open WebSocket with the subprotocol ``v4.channel.k8s.io``."""
        super().__init__()
        self._socket = socket
        self._error_output = bytearray()
        """The error output and the cluster's status message."""

    async def send(self, data: bytes) -> None:
        """Send the bytes ``data`` to the command."""
        for begin in range(0, len(data), FRAME_BYTES):
            await self._socket.send_bytes(_STDIN + data[begin : begin + FRAME_BYTES])

    async def piece(self) -> bytes:
        """Return the next bytes of the command's output, and store messages of other streams as error output; empty at
        the end."""
        while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
            stream, data = message.data[:1], message.data[1:]
            if stream == _STDOUT and data:
                return bytes(data)
            if stream not in (b"", _STDOUT):
                self._error_output = (self._error_output + data)[-4096:]
            if stream == _STATUS:
                break
        return b""

    async def close(self) -> None:
        """Close the WebSocket, which ends the command's input."""
        await self._socket.close()

    async def exit_reason(self) -> str:
        """Return the last characters of the command's error output and of the cluster's status message."""
        return " ".join(self._error_output.decode("utf-8", "replace").split())[-500:]


def _get_message(error: Any) -> str:
    """Return the cluster's message in an error of its API."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.body)["message"])
    return str(error.reason)


def _expand_home(path: str) -> Path:
    """Return a path with the home directory for a tilde."""
    return Path(path).expanduser()
