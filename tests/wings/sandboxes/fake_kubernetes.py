"""A stand-in for a Kubernetes cluster, as far as the driver uses it: its HTTP interface, jobs, pods, and WebSockets of
commands. Pods are containers of :mod:`fake_docker`. What a cluster would not know or not allow is refused as it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes.client
from aiohttp import WSMsgType, web
from kubernetes.client import V1Job, V1NetworkPolicy

from tests.wings.sandboxes.fake_service import FakeService

RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


class FakeKubernetes(FakeService):
    """A cluster of one namespace, ``agents``, in a thread of its own."""

    def __init__(self, folder: Path, docker: Path) -> None:
        self.folder, self.docker = folder, docker
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.pids: dict[str, int] = {}
        self.quota = 1000
        """The most pods."""
        self.create_s = 0.0
        """How long it takes to make a job."""
        self.refuses_jobs = False
        """Whether a job is refused, after ``create_s``."""
        self.allows_policies = True
        self.address = ("192.0.2.1", "443")
        """What pods are told of the cluster: an address that nobody has."""
        self.cut_after: int | None = None
        """After how many bytes of output a WebSocket is cut."""
        self.digest = "sha256:12"
        """The digest of every image."""
        self._news = asyncio.Event()
        self._log: list[tuple[str, dict[str, Any]]] = []
        super().__init__()

    def kubeconfig(self, name: str = "config", token: str = "right", server: str = "") -> str:
        path = self.folder / name
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "agents"}}],
            "clusters": [{"name": "c", "cluster": {"server": server or self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }))  # fmt: skip
        return str(path)

    def options(self) -> dict[str, Any]:
        """The settings of a driver of this cluster."""
        return {"kubeconfig": self.kubeconfig(), "image": "tree:base"}

    def routes(self) -> list[web.RouteDef]:
        batch, core = "/apis/batch/v1/namespaces/agents/jobs", "/api/v1/namespaces/agents"
        policies = "/apis/networking.k8s.io/v1/namespaces/agents/networkpolicies"
        return [
            web.get(batch, self.list_jobs), web.post(batch, self.create_job),
            web.delete(batch + "/{name}", self.delete),
            web.get(core + "/pods", self.list_pods), web.get(core + "/events", self.list_events),
            web.get(core + "/pods/{name}/exec", self.exec), web.post(policies, self.create_policy),
        ]  # fmt: skip

    def refuse(self, request: web.Request) -> web.Response | None:
        if request.headers.get("authorization") != "Bearer right":
            return status(401, "Unauthorized")
        return None

    async def list_jobs(self, request: web.Request) -> web.Response:
        items = [job for job in self.jobs.values() if selected(job, request.query.get("labelSelector", ""))]
        return web.json_response({"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": items})

    async def create_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        if unknown := unknown_fields(body, V1NetworkPolicy):
            return status(400, f"unknown fields: {unknown}")
        if not self.allows_policies:
            return status(403, 'networkpolicies is forbidden: User "u" cannot create resource "networkpolicies"')
        if body["metadata"]["name"] in self.policies:
            return status(409, "already exists")
        self.policies[body["metadata"]["name"]] = body
        return web.json_response(body, status=201)

    async def create_job(self, request: web.Request) -> web.Response:
        body = await request.json()
        unknown = unknown_fields(body, V1Job)
        if unknown:
            return status(400, f"unknown fields: {unknown}")
        name = body["metadata"]["name"]
        assert len(name) <= 63
        assert all(len(value) <= 63 for value in body["metadata"]["labels"].values())
        await asyncio.sleep(self.create_s)
        if self.refuses_jobs:
            return status(403, f'jobs.batch "{name}" is forbidden: exceeded quota')
        self.jobs[name] = body
        if len(self.pods) >= self.quota:
            message = (
                f'pods "{name}-x" is forbidden: exceeded quota: compute, requested: pods=1, limited: pods={self.quota}'
            )
            self.events.append(
                {"reason": "FailedCreate", "message": message, "type": "Warning", "metadata": {}}
                | {"involvedObject": {"name": name}}
            )
        else:
            self.spawn(self.pod(name, body["spec"]))
        return web.json_response(body, status=201)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.jobs:
            return status(404, f'jobs.batch "{name}" not found')
        self.remove(name)
        return status(200, "")

    def remove(self, name: str) -> None:
        """Delete a job with its pod."""
        self.jobs.pop(name, None)
        self.kill(name)
        if name not in self.pids and f"{name}-x" in self.pods:
            self.tell("DELETED", self.pods.pop(f"{name}-x"))

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids.get(name, 1 << 30), signal.SIGKILL)

    def tell(self, word: str, pod: dict[str, Any]) -> None:
        self._log.append((word, json.loads(json.dumps(pod))))
        self._news.set()
        self._news = asyncio.Event()

    async def pod(self, name: str, spec: dict[str, Any]) -> None:
        """Live the life of a job's pod."""
        template = spec["template"]
        container = template["spec"]["containers"][0]
        pod = {"metadata": {"name": f"{name}-x", "labels": template["metadata"]["labels"]}, "spec": template["spec"]}
        pod["status"] = {"phase": "Pending"}
        self.pods[f"{name}-x"] = pod
        self.tell("ADDED", pod)
        if not (self.folder / "store" / "images" / container["image"].replace("/", "+")).exists():
            waiting = {"reason": "ErrImagePull", "message": f"pull access denied for {container['image']}"}
            pod["status"] = {"phase": "Pending", "containerStatuses": [self.about(container, {"waiting": waiting})]}
            self.tell("MODIFIED", pod)
            return
        process = await asyncio.create_subprocess_exec(
            *self.command(name, template["spec"], container), stdin=subprocess.DEVNULL
        )
        record = self.folder / "store" / "containers" / f"{name}.json"
        await begun(process, record)
        if process.returncode is None:
            self.pids[name] = json.loads(record.read_text())["pid"]
            pod["status"] = {"phase": "Running", "containerStatuses": [self.about(container, {"running": {}})]}
            self.tell("MODIFIED", pod)
            if name not in self.jobs:
                self.kill(name)
        timer = asyncio.get_running_loop().call_later(spec["activeDeadlineSeconds"], self.kill, name)
        code = await process.wait()
        timer.cancel()
        self.pids.pop(name, None)
        ended = {"reason": "Error" if code else "Completed", "exitCode": code}
        pod["status"] = {"phase": "Failed" if code else "Succeeded"}
        pod["status"]["containerStatuses"] = [self.about(container, {"terminated": ended})]
        self.tell("MODIFIED", pod)
        if spec["ttlSecondsAfterFinished"] == 0 or name not in self.jobs:
            self.remove(name)

    def command(self, name: str, spec: dict[str, Any], container: dict[str, Any]) -> list[str]:
        """The call of the stand-in for docker, after a look at what a pod must say of its rights."""
        rights = container["securityContext"]
        assert not spec["automountServiceAccountToken"]
        assert (rights["privileged"], rights["allowPrivilegeEscalation"]) == (False, False)
        assert rights["capabilities"]["drop"] == ["ALL"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == "/dev/shm"
        limits = container["resources"]["limits"]
        assert int(limits["memory"]) > int(volumes[mount["name"]]["sizeLimit"])
        assert int(limits["ephemeral-storage"]) > 0
        closed = [policy["spec"]["podSelector"]["matchLabels"] for policy in self.policies.values()]
        labels = self.jobs[name]["spec"]["template"]["metadata"]["labels"]
        network = "none" if any(match.items() <= labels.items() for match in closed) else "bridge"
        variables = {"KUBERNETES_SERVICE_HOST": self.address[0], "KUBERNETES_SERVICE_PORT": self.address[1]}
        return [
            str(self.docker), "run", "--rm", "--interactive", "--name", name, "--label", "x=y", "--pull", "never",
            "--network", network if self.carries_out_policies else "bridge", "--hostname", spec["hostname"],
            "--workdir", "/", "--log-driver", "none", "--pids-limit", "0", "--memory", limits["memory"],
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ulimit", "nofile=4096:4096",
            "--shm-size", str(volumes[mount["name"]]["sizeLimit"]), "--entrypoint", "env", container["image"],
            *(f"{key}={value}" for key, value in variables.items()), *container["command"],
        ]  # fmt: skip

    def about(self, container: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """The status of a container."""
        if "running" in state:
            state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        image = f"registry/{container['image']}@{self.digest}"
        return {"name": container["name"], "image": container["image"], "imageID": image if "running" in state else "",
                "ready": True, "restartCount": 0, "state": state}  # fmt: skip

    carries_out_policies = True
    """Whether the network is one that does what policies say."""

    async def list_pods(self, request: web.Request) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        if "watch" not in request.query:
            items = [pod for pod in self.pods.values() if selected(pod, selector)]
            about_list = {"resourceVersion": str(len(self._log))}
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": about_list, "items": items})
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        position, pending = len(self._log), [("ADDED", pod) for pod in self.pods.values()]
        if "resourceVersion" in request.query:
            position, pending = int(request.query["resourceVersion"]), []
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await self.watch(answer, selector, position, pending)
        return answer

    async def watch(self, answer: web.StreamResponse, selector: str, position: int, pending: list[Any]) -> None:
        """Tell what happens to pods, without end."""
        while True:
            for word, pod in pending:
                if selected(pod, selector):
                    event = {"type": word, "object": {"kind": "Pod", "apiVersion": "v1", **pod}}
                    await answer.write(json.dumps(event).encode() + b"\n")
            news = self._news
            if not pending and position == len(self._log):
                await news.wait()
            pending, position = self._log[position:], len(self._log)

    async def list_events(self, request: web.Request) -> web.Response:
        fields = dict(part.split("=") for part in request.query["fieldSelector"].split(","))
        items = [event for event in self.events if event["involvedObject"]["name"] == fields["involvedObject.name"]]
        return web.json_response({"kind": "EventList", "apiVersion": "v1", "metadata": {}, "items": items})

    async def exec(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"].removesuffix("-x")
        if name not in self.pids:
            return status(404, f'pods "{name}" not found')
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        assert socket.ws_protocol == "v4.channel.k8s.io"
        spaces = ["--mount", "--pid", "--ipc", "--uts", "--net", "--root", "--wd=/"]
        words = ["nsenter", "--target", str(self.pids[name]), *spaces, *RIGHTS, *request.query.getall("command")]
        await self.serve_streams(socket, words)
        return socket

    async def serve_streams(self, socket: web.WebSocketResponse, words: list[str]) -> None:
        """Run a command whose streams are those of a WebSocket."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
        )
        assert process.stdin is not None

        async def forward(stream: asyncio.StreamReader | None, number: int) -> None:
            assert stream is not None
            while data := await stream.read(32768):
                if self.cut_after is not None and number == 1:
                    self.cut_after -= len(data)
                    if self.cut_after < 0 and (transport := request_transport(socket)) is not None:
                        transport.abort()
                with suppress(ConnectionError):
                    await socket.send_bytes(bytes([number]) + data)

        async def end() -> None:
            await asyncio.gather(forward(process.stdout, 1), forward(process.stderr, 2))
            code = await process.wait()
            cause = {"reason": "ExitCode", "message": str(code)}
            said = {"status": "Failure", "details": {"causes": [cause]}} if code else {"status": "Success"}
            with suppress(ConnectionError):
                await socket.send_bytes(b"\3" + json.dumps(said).encode())
                await socket.close()

        ending = asyncio.ensure_future(end())
        with suppress(ConnectionError):
            async for message in socket:
                assert message.type is WSMsgType.BINARY
                assert message.data[0] == 0
                process.stdin.write(message.data[1:])
                await process.stdin.drain()
        process.stdin.close()
        await ending


async def begun(process: asyncio.subprocess.Process, record: Path) -> None:
    """Wait until the container of a record runs what it was given, or has ended."""
    while process.returncode is None:
        if record.exists() and record.read_text() and has_begun(json.loads(record.read_text())["pid"]):
            return
        await asyncio.sleep(0.005)


def has_begun(pid: int) -> bool:
    """Whether the first process of a container is in its files, and runs what it was given."""
    try:
        return os.readlink(f"/proc/{pid}/root") != "/" and b"bash" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def request_transport(socket: web.WebSocketResponse) -> Any:
    assert socket._req is not None
    return socket._req.transport


def selected(item: dict[str, Any], selector: str) -> bool:
    """Whether the labels of an object are those of a selector."""
    key, equals, value = selector.partition("=")
    labels = item["metadata"].get("labels", {})
    return not key or (labels.get(key) == value if equals else key in labels)


def status(code: int, message: str) -> web.Response:
    """An answer as clusters give it."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure" if code >= 400 else "Success", "code": code}
    return web.json_response(body | {"message": message}, status=code)


def unknown_fields(body: Any, model: Any) -> list[str]:
    """The fields of an object that the interface does not have, by the models of the client."""
    if isinstance(body, list):
        return [name for item in body for name in unknown_fields(item, model)]
    if not isinstance(body, dict) or not hasattr(model, "openapi_types"):
        return []
    names = {outer: inner for inner, outer in model.attribute_map.items()}
    unknown = [key for key in body if key not in names]
    for key in body.keys() & names.keys():
        kind = model.openapi_types[names[key]].removeprefix("list[").removesuffix("]")
        unknown += unknown_fields(body[key], getattr(kubernetes.client, kind, None))
    return unknown


SERVICE = FakeKubernetes
