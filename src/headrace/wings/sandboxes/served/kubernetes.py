"""The driver of sessions in a Kubernetes cluster: each session is a pod of its own job.

    KubernetesDriver ── create job  ──▶ pod: bash, which waits for two named pipes, then becomes server.sh
                     ══ exec, a WebSocket: two cat processes at the other ends of the pipes
                     ── delete job

When this process dies, the WebSocket closes, so the server's input ends, the pod ends, and the cluster deletes the job.
A pod that has no WebSocket yet ends at the deadline of its job.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, field_validator

from headrace.base.config import Section
from headrace.base.errors import EnvError, EpisodeError
from headrace.base.tasks import task_group
from headrace.rollout.scoring.sandbox import Reason, SandboxLimits
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.rollout.scoring.sandbox.run import ENVIRONMENT
from headrace.wings.sandboxes.base import (
    SandboxDriver,
    SandboxSnapshot,
    SandboxSpec,
    make_unusable_snapshot_error,
    refuse_invalid,
)
from headrace.wings.sandboxes.served.containers import OWN_BYTES
from headrace.wings.sandboxes.served.copies import ChangedFiles, FileListing, list_files, put_copy, take_copy
from headrace.wings.sandboxes.served.keeping import choose_image
from headrace.wings.sandboxes.served.owners import is_dead, make_owner_name
from headrace.wings.sandboxes.served.session import ServedSession, ServerChannel, server_arguments
from headrace.wings.sandboxes.served.settings import refuse_readable, validate_driver_settings

if TYPE_CHECKING:
    from headrace.wings.sandboxes.served.cluster import KubernetesCluster

OWNER, SESSION = "headrace.owner", "headrace.session"
"""The keys of the labels of jobs and pods: the owner's name, and the session's name."""
POLICY = "headrace-sandboxes"
"""The name of the network policy that blocks the network of sessions."""
CONTAINER = "session"
END_S = 20.0
"""The longest time to wait for the end of a pod, in seconds; then the cluster ends it alone."""
PROBE_S = 2.0
"""The time for which a pod tries to reach the cluster's address, to test whether its network is blocked, in seconds."""
_WAIT = (
    'p=/dev/shm/.headrace; mkfifo -m 600 "$p-in" "$p-out" || exit; '
    'exec bash -c "$1" server "${@:2}" < "$p-in" > "$p-out"'
)
"""The pod's first process: wait until both pipes are open at their other ends, then become the server."""
_JOIN = (
    'p=/dev/shm/.headrace; until [[ -p $p-out ]]; do sleep 0.01; done; cat < "$p-out" & exec cat > "$p-in"'
)  # fmt: skip
"""The command that opens the other ends of the pipes: its output and input are the server's."""
_OWN_FIELDS = frozenset({
    "containers", "volumes", "restartPolicy", "automountServiceAccountToken", "activeDeadlineSeconds",
    "enableServiceLinks", "terminationGracePeriodSeconds", "hostNetwork", "hostPID", "hostIPC",
})  # fmt: skip
_PULL = {"missing": "IfNotPresent", "always": "Always", "never": "Never"}
_HOPELESS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError", "CrashLoopBackOff", "StartError", "ContainerCannotRun",
})  # fmt: skip


class KubernetesSettings(Section):
    """The settings of sessions in Kubernetes: ``env.options.driver``."""

    image: str = ""
    """The image of sessions whose task does not name an image."""
    snapshots: bool = True
    """Whether sessions can be copied. If so, each start lists the files of the image."""
    start_s: float = 300.0
    """The longest time of a start in seconds, which includes the download of an image."""
    call_s: float = 30.0
    """The longest time of one call of the service in seconds."""
    namespace: str = ""
    """The namespace of the jobs; empty: the namespace of the context, or ``default``."""
    context: str = ""
    """The context of the kubeconfig; empty: its current context."""
    kubeconfig: str = ""
    """The file with the cluster's address and credentials; empty: ``~/.kube/config``, or the cluster of this pod."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When an image is downloaded."""
    network: Literal["none", "open"] = "none"
    """``none``: a network policy blocks the network of pods; ``open``: pods have the cluster's network."""
    cpus: float | None = Field(default=None, gt=0)
    """The number of processors that one pod may use; unset: all."""
    requests: dict[str, str] = Field(default_factory=dict)
    """The resource requests of a pod, such as ``{"cpu": "100m"}``; without memory or disk, the limits are requested."""
    capabilities: tuple[str, ...] = ()
    """Capabilities of the root user in a pod, such as CHOWN or SETUID; none by default."""
    pod: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the pod's specification, such as ``nodeSelector``, ``tolerations`` or ``runtimeClassName``."""

    @field_validator("pod")
    @classmethod
    def _leave_own_fields(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Refuse fields of the pod's specification that the driver sets itself."""
        if own_fields := sorted(_OWN_FIELDS & value.keys()):
            raise ValueError(f"the driver sets {', '.join(own_fields)} by itself")
        return value


class KubernetesSession(ServedSession):
    """A session in a pod of the cluster."""

    def __init__(self, driver: KubernetesDriver, spec: SandboxSpec, image: str, name: str) -> None:
        """Create a session of ``driver`` with the settings ``spec``, in the pod of the job ``name``, from ``image``."""
        super().__init__(spec)
        self.image = image
        """The image, by the most exact name that the cluster reports, such as a digest."""
        self.initial_files: FileListing | None = None
        """The list of the files at the start of the session; ``None`` if the session cannot be copied."""
        self._driver = driver
        self.name = name
        self.address = ""
        """The cluster's address and port as pods see them, as ``HOST/PORT``; empty if pods do not receive it."""

    async def attach(self, channel: ServerChannel) -> None:
        """Wait for the greeting of the server at the other end of ``channel``. Variables that the cluster has set are
        removed from the variables of commands."""
        await super().attach(channel)
        self.address = self.base_variables.get("KUBERNETES_SERVICE_HOST", "")
        if self.address:
            self.address += f"/{self.base_variables.get('KUBERNETES_SERVICE_PORT', '443')}"
        names = [name for name in self.base_variables if not name.startswith("KUBERNETES_")]
        self.base_variables = {name: self.base_variables[name] for name in names}
        self.variables = self.first_variables()

    async def take_files(self) -> ChangedFiles:
        """Return a copy of the files that the session has changed. Raises :class:`~headrace.base.errors.EpisodeError`
        if the setting ``snapshots`` is false."""
        if self.initial_files is None:
            raise EpisodeError(
                "a session of a driver with snapshots=false cannot be copied",
                remedy="set snapshots = true in the settings of the driver",
                reason="session_snapshot",
            )
        # the server buffers a file of a copy in memory
        largest_bytes = self.spec.limits.file_bytes
        files = await take_copy(self, self.initial_files, self.image, largest_bytes=largest_bytes)
        self._driver.keep(files)
        return files

    async def forget(self) -> None:
        """Remove the session from its driver's records."""
        self._driver.forget(self)


class KubernetesDriver(SandboxDriver):
    """A driver of sessions in pods of one namespace, whose snapshots are copies of the changed files (copies.py).
    Create it with :meth:`open`."""

    kind = "kubernetes"

    def __init__(self, settings: KubernetesSettings, cluster: KubernetesCluster) -> None:
        """Create a driver with ``settings``, which creates jobs in ``cluster``."""
        self.settings = settings
        self.owner = make_owner_name()
        self.missing: dict[str, str] = {
            "disk": "the cluster cannot bound a session's files while it runs: it ends a pod that exceeds disk_bytes"
        }
        self._sessions: set[KubernetesSession] = set()
        """The sessions that were started and have not ended."""
        self._copies: set[ChangedFiles] = set()
        """The copies that were not released."""
        self._cluster = cluster
        self._probe = asyncio.Lock()
        """Held while the first session tests which guards the cluster lacks."""
        self._probed = False
        """Whether that test was made."""

    @classmethod
    async def open(cls, readable: Sequence[str], options: Mapping[str, Any]) -> KubernetesDriver:
        """Return the driver with the settings ``options``, and delete jobs of dead owners. Raises
        :class:`~headrace.base.errors.EnvError` if the client package is missing or the cluster refuses a call.
        ``readable`` must be empty."""
        settings = validate_driver_settings("kubernetes", KubernetesSettings, options)
        refuse_readable("kubernetes", readable)
        try:
            from headrace.wings.sandboxes.served.cluster import KubernetesCluster
        except ModuleNotFoundError as error:
            raise EnvError(
                f"sandboxes of kind 'kubernetes' need the package {error.name}, which is not installed",
                remedy="pip install headrace[kubernetes]",
            ) from None
        KubernetesCluster.check_pod(settings.pod)
        cluster = await KubernetesCluster.open(
            settings.kubeconfig, settings.context, settings.namespace, settings.call_s
        )
        driver = cls(settings, cluster)
        try:
            await driver.sweep()
            await driver.close_network()
        except BaseException:
            await cluster.close()
            raise
        return driver

    async def sweep(self) -> None:
        """Delete jobs of dead owners."""
        for name, labels in await self._cluster.jobs(OWNER):
            if is_dead(labels.get(OWNER, "")):
                await self._cluster.delete_job(name)

    async def close_network(self) -> None:
        """Create a network policy that blocks the network of sessions. If this user may not create it, report the
        reason in :attr:`missing`."""
        if self.settings.network == "open":
            return
        from headrace.wings.sandboxes.served.cluster import ClusterRefusal

        closed = {"podSelector": {"matchLabels": {f"{SESSION}.network": "none"}}, "policyTypes": ["Ingress", "Egress"]}
        try:
            await self._cluster.create_policy({
                "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": POLICY},
                "spec": closed,
            })  # fmt: skip
        except ClusterRefusal as error:
            self.missing["network"] = error.problem[-300:]

    async def start(self, spec: SandboxSpec) -> KubernetesSession:
        """Start a sandbox from the image of ``spec`` or of the settings, list its files, and create the session's
        directory. Raises :class:`~headrace.base.errors.EpisodeError` if that fails."""
        self.refuse_closed()
        refuse_invalid(spec)
        session = await self._begin_listed(spec, choose_image(self.kind, spec, self.settings.image))
        await session.prepare()
        return session

    async def fork(self, snapshot: SandboxSnapshot) -> KubernetesSession:
        """Start a sandbox from the image of a snapshot, and write the changed files into it. Raises
        :class:`~headrace.base.errors.EpisodeError` if the image has changed since."""
        self.refuse_closed()
        files = snapshot.files
        if snapshot.released or not isinstance(files, ChangedFiles) or files not in self._copies:
            raise make_unusable_snapshot_error()
        image = snapshot.spec.image or self.settings.image
        session = await self._begin_listed(snapshot.spec, image)
        try:
            if session.image != files.image:
                raise EpisodeError(
                    f"the image {image!r} has changed since the snapshot: {files.image!r}, now {session.image!r}",
                    remedy="name images by their digest",
                    reason="session_snapshot",
                )
            await put_copy(session, files)
        except BaseException:
            await session.give_up("its files could not be made")
            raise
        session.directory, session.variables = snapshot.directory, dict(snapshot.variables)
        return session

    async def release(self, snapshot: SandboxSnapshot) -> None:
        """Delete the copy of a snapshot."""
        if not snapshot.released and not self.closed:
            files = snapshot.files
            if not isinstance(files, ChangedFiles) or files not in self._copies:
                raise make_unusable_snapshot_error()
            snapshot.released = True
            self._copies.discard(files)
            files.release()

    async def close(self) -> None:
        """End all sessions, delete all copies, and close the connections to the cluster."""
        self.closed = True
        await asyncio.gather(*(session.give_up("its driver was closed") for session in list(self._sessions)))
        for files in self._copies:
            files.release()
        self._copies.clear()
        await self._cluster.close()

    def keep(self, files: ChangedFiles) -> None:
        """Record the copy ``files``, which :meth:`close` deletes."""
        self._copies.add(files)

    def forget(self, session: KubernetesSession) -> None:
        """Remove an ended session from the records."""
        self._sessions.discard(session)

    async def _begin_listed(self, spec: SandboxSpec, image: str) -> KubernetesSession:
        """Start a session, and list its files before a command can change them."""
        session = await self._begin(spec, image)
        session.missing = dict(self.missing)
        if self.settings.snapshots:
            try:
                session.initial_files = await list_files(session)
            except BaseException:
                await session.give_up("its files could not be listed")
                raise
        return session

    async def _begin(self, spec: SandboxSpec, image: str) -> KubernetesSession:
        """Create a job for a session with the settings ``spec`` from ``image``, wait for its pod, and connect to the
        server in it. Raises :class:`~headrace.base.errors.EpisodeError` if the pod does not start in time."""
        from headrace.wings.sandboxes.served.cluster import ClusterRefusal

        session = KubernetesSession(self, spec, image, f"headrace-{secrets.token_hex(8)}")
        channel = PodChannel(self._cluster, session.name)
        self._sessions.add(session)
        try:
            await self._create(self._job(session))
            async with asyncio.timeout(self.settings.start_s):
                pod, session.image = await self._wait_for_pod(session)
            channel.streams = await self._cluster.stream(pod, CONTAINER, ["bash", "-c", _JOIN])
        except ClusterRefusal as error:
            await self._abandon(session, channel)
            raise _make_start_error(error.problem, error.remedy) from None
        except TimeoutError:
            words = await self._reasons(session)
            await self._abandon(session, channel)
            raise _make_start_error(
                f"no pod within {self.settings.start_s:g} s: {words}", "raise start_s, or look at the cluster's room"
            ) from None
        except BaseException:
            await self._abandon(session, channel)
            raise
        await session.attach(channel)
        await self._probe_guards(session)
        return session

    async def _create(self, job: dict[str, Any]) -> None:
        """Create a job. A cancelled call first waits for the cluster's answer: otherwise the job might be created after
        its deletion, and stay until its deadline."""
        from headrace.wings.sandboxes.served.cluster import ClusterRefusal

        refusals = []

        async def make() -> None:
            """Create the job, and store a refusal instead of raising it: in a cancelled call, the cancellation must
            win."""
            try:
                await self._cluster.create_job(job)
            except ClusterRefusal as error:
                refusals.append(error)

        async with task_group() as group:
            making = group.create_task(make())
            try:
                await asyncio.shield(making)
            except asyncio.CancelledError:
                await asyncio.wait([making])
                raise
        for error in refusals:
            raise error

    async def _abandon(self, session: KubernetesSession, channel: PodChannel) -> None:
        """Delete the job of a session that did not start."""
        session.ended = "it could not start"
        await asyncio.shield(channel.kill())
        await session.forget()

    async def _wait_for_pod(self, session: KubernetesSession) -> tuple[str, str]:
        """Wait until the pod of a session runs, and return its name and its image. Raises
        :class:`~headrace.base.errors.EpisodeError` as soon as it cannot run any more."""
        while (started := await self._find_running_pod(session)) is None:
            if words := await self._reasons(session):
                raise _make_start_error(words, "look at the quotas and policies of the namespace")
        return started

    async def _find_running_pod(self, session: KubernetesSession) -> tuple[str, str] | None:
        """Return the name and the image of a session's pod if it runs before the watch of the cluster ends; else
        ``None``."""
        async with aclosing(self._cluster.pods(f"{SESSION}={session.name}")) as news:
            async for word, pod in news:
                if (image := _find_running_image(pod, word)) is not None:
                    return str(pod.metadata.name), image or session.image
        return None

    async def _reasons(self, session: KubernetesSession) -> str:
        """Return the cluster's warnings about a job without a pod; empty if there are none."""
        from headrace.wings.sandboxes.served.cluster import ClusterRefusal

        with suppress(ClusterRefusal):
            return await self._cluster.warnings(session.name)
        return ""

    async def _probe_guards(self, session: KubernetesSession) -> None:
        """Test in the first session which guards the cluster lacks, and record them in :attr:`missing`."""
        async with self._probe:
            if self._probed:
                return
            most = await self._succeeds(
                session, "read -r most < /sys/fs/cgroup/pids.max; [[ $most =~ ^[0-9]+$ ]]", 10.0
            )
            if not most:
                self.missing["process numbers"] = (
                    "no bound on the processes of a pod was found: the count every 30 ms is what ends a fork bomb"
                )
            if self.settings.network == "none" and "network" not in self.missing:
                if not session.address:
                    self.missing["network"] = "pods are not told the cluster's address: it cannot be tried"
                elif await self._succeeds(session, f"exec 3<>/dev/tcp/{session.address}", PROBE_S):
                    self.missing["network"] = (
                        f"a pod reaches {session.address}: the cluster's network does not carry out policies"
                    )
            self._probed = True

    @staticmethod
    async def _succeeds(session: KubernetesSession, script: str, wall_s: float) -> bool:
        """Return whether a script of bash succeeds in the session within ``wall_s`` seconds."""
        limits = SandboxLimits(wall_s=wall_s, open_files=256, memory_bytes=session.spec.limits.memory_bytes)
        argv = [session.programs["bash"], "-c", script]
        done = await session.execute(argv, stdin=b"", directory="/", variables=ENVIRONMENT, limits=limits)
        return done.reason is Reason.EXITED and done.status == 0

    def _job(self, session: KubernetesSession) -> dict[str, Any]:
        """Return the manifest of a session's job."""
        memory = str(_volume_bytes(session.spec))
        labels = {OWNER: self.owner, SESSION: session.name, f"{SESSION}.network": self.settings.network}
        pod = {
            **self.settings.pod, "restartPolicy": "Never", "automountServiceAccountToken": False,
            "enableServiceLinks": False, "terminationGracePeriodSeconds": 0, "hostname": "sandbox",
            "containers": [self._container(session)],
            "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": memory}}],
        }  # fmt: skip
        return {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": session.name, "labels": labels},
            "spec": {
                "backoffLimit": 0, "ttlSecondsAfterFinished": 0,
                "activeDeadlineSeconds": int(self.settings.start_s + session.spec.life_s + END_S) + 1,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }  # fmt: skip

    def _container(self, session: KubernetesSession) -> dict[str, Any]:
        """Return the manifest of a session's container."""
        settings, limits = self.settings, session.spec.limits
        bounds = {
            "memory": str(limits.memory_bytes + _volume_bytes(session.spec)),
            "ephemeral-storage": str(limits.disk_bytes),
        }
        if settings.cpus is not None:
            bounds["cpu"] = str(settings.cpus)
        _, program, *numbers = server_arguments(session.spec)
        return {
            "name": CONTAINER, "image": session.image, "imagePullPolicy": _PULL[settings.pull],
            "command": ["bash", "-c", _WAIT, "wait", program, *numbers[1:]], "workingDir": "/",
            "resources": {"limits": bounds, "requests": dict(settings.requests)},
            "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
            "securityContext": {
                "privileged": False, "allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"},
                "capabilities": {"drop": ["ALL"], "add": list(settings.capabilities)},
            },
        }  # fmt: skip


class PodChannel(ServerChannel):
    """The channel to the server of a pod; closing it deletes the job."""

    def __init__(self, cluster: KubernetesCluster, name: str) -> None:
        """Describe a channel to the pod of the job ``name``. The driver sets :attr:`streams` when it has connected."""
        self._cluster = cluster
        self._name = name
        self.streams: ServerChannel | None = None
        """The streams of the command that is connected to the server; ``None`` before."""

    async def send(self, data: bytes) -> None:
        """Send bytes to the server."""
        assert self.streams is not None
        await self.streams.send(data)

    async def line(self) -> bytes:
        """Return the next line of the server."""
        assert self.streams is not None
        return await self.streams.line()

    async def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the server."""
        assert self.streams is not None
        return await self.streams.exactly(size)

    async def close(self) -> None:
        """Delete the job, which ends the server, and wait until its pod has gone. Errors are ignored: a cluster that
        cannot be reached deletes the job at its deadline."""
        from headrace.wings.sandboxes.served.cluster import ClusterRefusal

        with suppress(ClusterRefusal, TimeoutError):
            async with asyncio.timeout(END_S):
                await self._cluster.delete_job(self._name)
                if self.streams is not None:
                    await self.streams.kill()
                await self._gone()

    async def exit_reason(self) -> str:
        """Return the error output of the command that connects to the server."""
        return "" if self.streams is None else await self.streams.exit_reason()

    async def _gone(self) -> None:
        """Wait until the job has no pod any more."""
        selector = f"{SESSION}={self._name}"
        while (since := await self._cluster.left_pods(selector)) is not None:
            async with aclosing(self._cluster.pods(selector, since)) as news:
                await anext((word async for word, _ in news if word == "DELETED"), None)


def _volume_bytes(spec: SandboxSpec) -> int:
    """Return the size in bytes of a pod's in-memory volume. Its server buffers there the inputs and outputs of running
    commands, and archives of files."""
    return OWN_BYTES + 4 * spec.limits.output_bytes + 2 * spec.limits.file_bytes + 16 * MIB


def _find_running_image(pod: Any, word: str) -> str | None:
    """Return the image of a running pod, as the cluster names it; ``None`` if the pod does not run yet. ``word`` is the
    kind of the watch event. Raises :class:`~headrace.base.errors.EpisodeError` if the pod cannot run any more."""
    if word == "DELETED" or pod.status.phase in ("Failed", "Succeeded"):
        raise _make_start_error(
            f"its pod has ended: {_describe_end(pod)}", "look at the image, and the cluster's events"
        )
    for status in pod.status.container_statuses or ():
        if status.state.running is not None:
            return str(status.image_id or "")
        waiting = status.state.waiting
        if waiting is not None and waiting.reason in _HOPELESS:
            raise _make_start_error(
                f"{waiting.reason}: {waiting.message}", "name an image that the cluster can fetch and run"
            )
    return None


def _describe_end(pod: Any) -> str:
    """Return in words why a pod has ended."""
    words = [str(pod.status.reason or ""), str(pod.status.message or "")]
    for status in pod.status.container_statuses or ():
        if status.state.terminated is not None:
            ended = status.state.terminated
            words.append(f"{ended.reason} {ended.message or ''} (exit code {ended.exit_code})")
    return " ".join(filter(None, words)) or str(pod.status.phase)


def _make_start_error(problem: str, remedy: str) -> EpisodeError:
    """Return the error for a session that cannot start."""
    return EpisodeError(f"a session cannot start: {problem}", remedy=remedy, reason="session_start")


async def open_kubernetes(readable: Sequence[str] = (), **options: Any) -> KubernetesDriver:
    """Open the driver of Kubernetes with the settings ``options``. ``readable`` must be empty, because pods cannot read
    paths of this machine."""
    return await KubernetesDriver.open(readable, options)
