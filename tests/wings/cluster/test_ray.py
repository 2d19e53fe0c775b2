"""Parts on a cluster, without Ray: what is refused when a run file is read, and the launcher's whole way from a name to
a process, with actors that stand in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import ConfigError, DeadlineError, RunError
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Ready, Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.trace import Span, shifted_back
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.config import LaunchConfig, RayConfig, ResourceShare
from headrace.launch.starts import EnvironmentStart, LearnerStart, ScorerStart, Start
from headrace.rollout.scoring import FunctionReward
from headrace.run.session import load_config
from headrace.sync.config import Route
from headrace.wings.cluster.far.process import FarProcess, SupervisorLost, SupervisorUnusable
from headrace.wings.cluster.far.supervisor import ProcessSupervisor, list_required_paths
from headrace.wings.cluster.ray import cluster, starter
from headrace.wings.cluster.ray.cluster import RayNode, make_bundle
from headrace.wings.cluster.ray.fit import choose_ray_devices
from tests.launch.workers import KEEP, TOKEN, ForeignPeer, is_alive

HERE = "127.0.0.1"
ON_RAY = {"model": {"path": "m"}, "launch": {"kind": "ray"}, "sync": {"transport": "http"}}

# -- what is refused when a run file is read ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "memory of one machine": ({"sync": {"transport": "shm"}}, "is memory of one machine", "sync.transport = 'http'"),
    "one address for all": ({"sync": {"transport": "http", "host": "10.0.0.1"}}, "sync.host='10.0.0.1'", "leave"),
    "cores of this machine": ({"launch": {"kind": "ray", "learner_threads": 2}}, "learner_threads=2", "learner.cpus"),
    "a cluster that is not used": ({"launch": {"ray": {"placement": "spread"}}}, "ray.placement is set", "'ray'"),
    "a GPU that is not asked for": ({"engine": {"device": "cuda"}}, "launch.ray.engine.gpus=0", "gpus = 1"),
    "the second of one GPU": (
        {"learner": {"device": "cuda:1"}, "launch": {"kind": "ray", "ray": {"learner": {"gpus": 1}}}},
        "learner.device='cuda:1'",
        "learner.device = 'auto'",
    ),
    "a place for nothing": (
        {"launch": {"kind": "ray", "ray": {"engine": {"cpus": 0}}}},
        "launch.ray.engine.cpus=0 requests nothing",
        "launch.ray.engine.cpus >= 1",
    ),
    "a GPU that would stand idle": (
        {"engine": {"device": "cpu"}, "launch": {"kind": "ray", "ray": {"engine": {"gpus": 1}}}},
        "wants no GPU",
        "gpus = 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_on_a_cluster_are_refused_with_a_remedy(case: str) -> None:
    change, problem, remedy = REFUSED[case]
    with pytest.raises(ConfigError) as raised:
        load_config({**ON_RAY, **change})
    assert problem in raised.value.problem
    assert remedy in raised.value.remedy


def test_each_part_computes_on_what_it_asks_for() -> None:
    launch = load_config(ON_RAY, ["launch.ray.engine={gpus = 1, cpus = 4}"]).launch
    assert str(choose_ray_devices(launch, 2, 1)) == "2 engines on cuda:0, learner on cpu"
    assert launch.threads("engine", 2, 64) == 4
    assert LaunchConfig(engine_threads=4).threads("engine", 2, 64) == 2
    assert make_bundle(ResourceShare(gpus=1, memory_gb=2, resources={"disk": 1})) == {
        "CPU": 1,
        "GPU": 1,
        "memory": 2e9,
        "disk": 1,
    }
    assert make_bundle(RayConfig().scorer) == {}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_extra_to_install_is_named() -> None:
    with pytest.raises(ConfigError, match="needs Ray, which is not installed") as raised:
        cluster.refuse_absent()
    assert "headrace[ray]" in raised.value.remedy


def test_a_cluster_at_an_address_where_nobody_listens_is_refused_at_once_and_with_the_address() -> None:
    with pytest.raises(ConfigError, match=r"launch\.ray\.address='127\.0\.0\.1:1' leads to no Ray cluster") as raised:
        asyncio.run(cluster._refuse_unreachable("127.0.0.1:1"))
    assert "ray start --head" in raised.value.remedy
    asyncio.run(cluster._refuse_unreachable("auto"))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("The actor is dead because its node has died.", "was lost with its node"),
        (
            "The actor 85 is unavailable: The actor is temporarily unavailable: RpcError: RPC error: Socket closed "
            "rpc_code: 14. The task may or may not have been executed on the actor.",
            "was lost with its actor (Socket closed)",
        ),
        (
            "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 05) "
            "was 21.96GB used / 23.54GB limit (0.9330)",
            "was ended by the cluster, because the memory of its node ran out",
        ),
    ],
)
def test_what_ray_says_of_a_lost_actor_is_told_in_a_few_words(said: str, told: str) -> None:
    assert cluster._end_reason(RuntimeError(said)) == told


# -- from a name to a process ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seat:
    """An actor that stands in this process: it is the real supervisor."""

    supervisor: ProcessSupervisor = field(default_factory=partial(ProcessSupervisor, HERE))
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: BaseException | None = None
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        answer = asyncio.ensure_future(self._obey(getattr(self.supervisor, method), arguments))
        self.tasks.add(answer)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    async def _obey(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self.breaks is not None:
            raise self.breaks
        made = method(*arguments)
        if not isinstance(made, Coroutine):
            return made
        work, lost = asyncio.ensure_future(made), asyncio.ensure_future(self.lost.wait())
        await asyncio.wait([work, lost], return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if work.done():
            return work.result()
        work.cancel()
        raise SupervisorLost("was lost with its node")

    async def leave(self) -> None:
        """What the end of its process would do."""
        self.kill()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        process, directory = self.supervisor._process, self.supervisor._directory
        if directory.path.exists():
            if process is not None:
                await process.wait()
                process.close()
            directory.end()

    def kill(self) -> None:
        """As the kernel does it when an actor's process is killed: the pipe is closed."""
        self.lost.set()
        process = self.supervisor._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Seats:
    """A cluster of them."""

    seats: list[Seat]
    taken: list[Seat] = field(default_factory=list)
    ends: list[tuple[str, bool]] = field(default_factory=list)
    """The parts that are no longer being started, and whether they have started."""

    def start_supervisor(self, name: str, share: ResourceShare, room: object) -> Seat:
        self.taken.append(self.seats.pop(0))
        return self.taken[-1]

    def end_start(self, name: str, *, started: bool) -> None:
        self.ends.append((name, started))

    async def nodes(self) -> list[RayNode]:
        return [RayNode(address=HERE, cpus=1, gpus=0)]

    async def describe_resources(self) -> str:
        return "it has 1 node with 1 CPUs"


@pytest.fixture(autouse=True)
def _one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "own_address", lambda: HERE)


def launcher(
    run_dir: Path, seats: Seats, timeout_s: float = 30.0, reserved: tuple[str, ...] = ()
) -> starter.RayStarter:
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "mark").touch()
    launch = LaunchConfig(kind="ray", start_timeout_s=timeout_s)
    order = SimpleNamespace(launch=launch, run_dir=run_dir, on_event=lambda event: None)
    return starter.RayStarter(order, seats, reserved, "mark")  # type: ignore[arg-type]


def spec(start: Start, name: str = "scorer-0") -> ProcessSpec:
    return ProcessSpec(
        name=name,
        start=start,
        num_threads=1,
        make_peer=lambda channel: ForeignPeer(name, channel, token=TOKEN, on_spans=lambda _: None),
    )


def grader(directory: Path) -> ScorerStart:
    path = directory / "reward.py"
    path.write_text("def reward(completion): return float(len(completion))\n")
    return ScorerStart(reward=FunctionReward(ref=f"{path}:reward").model_dump(mode="json"), keep=KEEP)


@asynccontextmanager
async def on_seats(directory: Path, seats: Seats, start: Start, **more: Any) -> AsyncIterator[Child]:
    """A part, started on one of the seats; nothing is left of it."""
    site = Rendezvous(directory=directory, logs=directory / "logs", token=TOKEN, on_spans=lambda _: None)
    try:
        child = await Child.start(site, spec(start, **more.pop("of", {})), launcher(directory, seats, **more))
        try:
            yield child
        finally:
            await child.end(Shutdown())
    finally:
        for seat in seats.taken:
            await seat.leave()


async def scored(child: Child, text: str) -> Scored:
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        listening = group.create_task(child.peer.listen())
        await child.peer.ready
        call = child.peer.next_call()
        child.peer.expect(call, Started)
        answer = child.peer.expect(call, Scored)
        child.peer.send(ScoreCompletions(call=call, prompt="", completions=(text,), row={}))
        done = await answer
        listening.cancel()
    return done


def test_a_part_on_a_node_is_the_same_process_in_the_same_jail_and_ends_the_same_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with on_seats(tmp_path, Seats([Seat()]), grader(tmp_path)) as child:
            assert (await scored(child, "four")).calls[0].rewards == (4.0,)
            assert (child.node, child.state) == (HERE, "ready")
            assert await child.computed_s() > 0
        assert not is_alive(child.pid)
        assert (tmp_path / "logs" / "scorer-0.log").exists()

    asyncio.run(main())


def test_a_process_that_is_killed_on_its_node_is_told_of_with_the_node(tmp_path: Path) -> None:
    async def main() -> None:
        async with on_seats(tmp_path, Seats([Seat()]), grader(tmp_path)) as child:
            await scored(child, "x")
            os.kill(child.pid, signal.SIGKILL)
            words = await child.wait_for_death()
            assert words.startswith(f"scorer-0 (pid {child.pid} on {HERE}) was killed by SIGKILL")

    asyncio.run(main())


def test_a_process_whose_node_is_lost_has_ended_and_says_so_with_node_and_gpu(tmp_path: Path) -> None:
    async def main() -> None:
        seats = Seats([Seat()])
        async with on_seats(tmp_path, seats, grader(tmp_path)) as child:
            child.peer.ready.set_result(Ready(token=TOKEN, pid=child.pid, facts={"place": "GPU 5 of node-7"}))
            seats.taken[0].lost.set()
            where = f"scorer-0 (pid {child.pid} on {HERE}, GPU 5 of node-7)"
            assert await child.wait_for_death() == f"{where} was lost with its node"
            assert child.state == "ended"

    asyncio.run(main())


def test_a_node_that_is_lost_while_a_part_starts_there_is_made_up_for_by_another(tmp_path: Path) -> None:
    async def main() -> None:
        seats = Seats([Seat(breaks=SupervisorLost("was lost with its node")), Seat()])
        async with on_seats(tmp_path, seats, grader(tmp_path)) as child:
            assert child.state == "starting"
        assert len(seats.taken) == 2
        assert seats.ends == [("scorer-0", True)]

    asyncio.run(main())


@pytest.mark.parametrize("have_found_nodes", [False, True])
def test_engines_are_added_while_others_start_as_long_as_all_of_them_have_room(
    monkeypatch: pytest.MonkeyPatch, *, have_found_nodes: bool
) -> None:
    free = {"CPU": 3.0}
    ray = SimpleNamespace(available_resources=free.copy, nodes=list)
    monkeypatch.setitem(sys.modules, "ray", ray)
    made, share, starting = cluster.RayCluster(ours=False), ResourceShare(cpus=1), set[str]()
    monkeypatch.setattr(made, "describe_resources", Seats([]).describe_resources)

    async def begin(*names: str) -> None:
        await made.refuse_no_room(share, [*sorted(starting), *names], starting)
        starting.update(names)
        free["CPU"] -= len(names) * have_found_nodes

    async def main() -> None:
        await begin("engine-1")
        await begin("engine-2")
        told = r"no room for 4 more engines, .* \(engine-1, engine-2 are being started already\); it has 1 node"
        with pytest.raises(ConfigError, match=told):
            await begin("engine-3", "engine-4")
        starting.discard("engine-1")
        made.end_start("engine-1", started=True)
        free["CPU"] = 1.0 if have_found_nodes else 2.0
        await begin("engine-3")
        with pytest.raises(ConfigError, match="the cluster has no room for 3 more engines"):
            await begin("engine-4")
        starting.clear()
        free["CPU"] = 0.0
        with pytest.raises(ConfigError, match="the cluster has no room for one more engine: 1 CPU; it has 1 node"):
            await begin("engine-4")
        free["CPU"] = 1.0
        await begin("engine-4")

    asyncio.run(main())


class FreeCores:
    """A cluster with free cores, on which engines start that ask for one core each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
        self.cores = cores
        self.starting: set[str] = set()
        self.ending: set[str] = set()
        """The engines that start while the cluster is asked for its free resources."""
        ray = SimpleNamespace(available_resources=self._available, nodes=list)
        monkeypatch.setitem(sys.modules, "ray", ray)
        self.made = cluster.RayCluster(ours=False)
        monkeypatch.setattr(self.made, "describe_resources", Seats([]).describe_resources)

    def _available(self) -> dict[str, float]:
        self.starting -= self.ending
        return {"CPU": self.cores}

    async def accept(self, *names: str) -> None:
        await self.made.refuse_no_room(ResourceShare(cpus=1), [*sorted(self.starting), *names], self.starting)

    async def begin(self, *names: str) -> None:
        """They are accepted, and get their cores at once."""
        await self.accept(*names)
        self.starting.update(names)
        self.cores -= len(names)


def test_place_of_an_engine_whose_start_failed_is_free_while_others_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        free = FreeCores(monkeypatch, 2.0)
        await free.begin("engine-1")
        await free.begin("engine-2")
        free.starting.discard("engine-1")
        free.made.end_start("engine-1", started=False)
        free.cores += 1.0
        await free.begin("engine-3")
        with pytest.raises(ConfigError, match="no room for 3 more engines"):
            await free.accept("engine-4")

    asyncio.run(main())


def test_engine_that_was_accepted_and_does_not_start_yet_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        free = FreeCores(monkeypatch, 3.0)
        await free.begin("engine-1")
        await free.accept("engine-2")
        await free.accept("engine-2", "engine-3")
        with pytest.raises(ConfigError, match=r"each \(engine-1, engine-2, engine-3 are being started already\)"):
            await free.accept("engine-2", "engine-3", "engine-4")

    asyncio.run(main())


def test_engine_is_added_when_the_start_of_another_ends_while_the_cluster_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        free = FreeCores(monkeypatch, 2.0)
        await free.begin("engine-1")
        free.ending = {"engine-1"}
        await free.begin("engine-2")

    asyncio.run(main())


def test_engine_that_is_started_again_is_not_taken_to_have_resources_that_were_free_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        free = FreeCores(monkeypatch, 2.0)
        await free.begin("engine-1")
        free.starting.clear()
        free.made.end_start("engine-1", started=True)
        free.starting.add("engine-1")  # it has died
        free.cores = 1.0  # another program has the rest
        with pytest.raises(ConfigError, match=r"2 more engines, .* \(engine-1 is being started already\)"):
            await free.accept("engine-2")
        free.cores = 2.0
        await free.accept("engine-2")

    asyncio.run(main())


def test_starter_asks_for_the_engines_without_a_bundle_and_tells_which_of_them_are_starting(tmp_path: Path) -> None:
    class Loading(Seat):
        def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
            return asyncio.get_running_loop().create_future()

    class Cluster(Seats):
        async def refuse_no_room(self, share: ResourceShare, names: Sequence[str], starting: Set[str]) -> None:
            asked.append([(name, name in starting) for name in names])

    asked: list[Any] = []

    async def main() -> None:
        seats = Cluster([Loading()])
        made = launcher(tmp_path, seats, reserved=("engine",))
        site = Rendezvous(directory=tmp_path, logs=tmp_path / "logs", token=TOKEN, on_spans=lambda _: None)
        async with asyncio.TaskGroup() as group:
            start = group.create_task(made.start(site, spec(grader(tmp_path), "engine-1")))
            await asyncio.sleep(0)
            await made.refuse_no_room(("engine", "engine-1", "engine-2"))
            start.cancel()
        await made.refuse_no_room(("engine-1",))
        await made.refuse_no_room(("engine",))
        assert asked == [[("engine-1", True), ("engine-2", False)], [("engine-1", False)]]
        assert seats.ends == [("engine-1", False)]

    asyncio.run(main())


def refusal(directory: Path, seat: Seat, start: Start, **more: Any) -> RunError | ConfigError:
    async def main() -> None:
        async with on_seats(directory, Seats([seat]), start, **more):
            pass

    with pytest.raises((RunError, ConfigError)) as raised:
        asyncio.run(main())
    assert seat.lost.is_set(), "its actor is gone"
    return raised.value


def test_a_part_without_a_place_is_told_of_with_what_it_needs_and_what_there_is(tmp_path: Path) -> None:
    class Nowhere(Seat):
        def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
            return asyncio.get_running_loop().create_future()

    error = refusal(tmp_path, Nowhere(), grader(tmp_path), timeout_s=0.05)
    assert isinstance(error, DeadlineError)
    assert "scorer-0 needs 0 CPUs, and found no free resources within 0.05 s; it has 1 node" in error.problem


def test_what_is_not_on_the_node_is_named_with_the_setting(tmp_path: Path) -> None:
    start = grader(tmp_path)
    (tmp_path / "reward.py").unlink()
    error = refusal(tmp_path, Seat(), start)
    assert f"env.reward='{tmp_path}/reward.py' is not on node {HERE}, where scorer-0 is to run" in error.problem
    assert "--working-dir" in error.remedy


def test_a_learner_must_see_the_run_directory_itself(tmp_path: Path) -> None:
    start = LearnerStart(
        model={"path": str(tmp_path)}, learner={}, algo={}, temperature=1.0, total_steps=1,
        snapshot="", route=Route(transport="http"), num_threads=1,
    )  # fmt: skip

    class Elsewhere(ProcessSupervisor):
        def describe_node(self, asked: bytes) -> bytes:
            (tmp_path / "mark").unlink()
            return super().describe_node(asked)

    error = refusal(tmp_path, Seat(supervisor=Elsewhere(HERE)), start, of={"name": "learner"})
    assert f"run.dir={str(tmp_path)!r} of node {HERE}, where learner is to run, is not the one of" in error.problem


def test_a_node_without_headrace_says_so(tmp_path: Path) -> None:
    seat = Seat(breaks=SupervisorUnusable("ModuleNotFoundError: No module named 'headrace'"))
    error = refusal(tmp_path, seat, grader(tmp_path))
    assert "scorer-0 cannot be started on its node: ModuleNotFoundError" in error.problem
    assert "is headrace installed there" in error.remedy


def test_a_process_that_is_ended_counts_as_gone_even_where_the_cluster_never_says_so() -> None:
    class Mute(Seat):
        def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
            return asyncio.get_running_loop().create_future()

        def kill(self) -> None:
            pass

    async def main() -> None:
        process = FarProcess(Mute(), 7, "10.0.0.2", kept=False)  # type: ignore[arg-type]
        assert process.returncode is None
        await process.kill()
        assert (await process.wait(), process.describe_end()) == (
            -signal.SIGKILL, "was ended, and its machine does not say that it is gone",
        )  # fmt: skip

    run_virtual(main())


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("{0}/env.py:Env", ["{0}/env.py"]), ("python3 {0}/env.py --fast", ["{0}/env.py"]), ("gem/game:Guess-v0", [])],
)
def test_files_of_an_environment_have_to_be_on_its_node(tmp_path: Path, entry: str, expected: list[str]) -> None:
    (tmp_path / "env.py").touch()
    start = EnvironmentStart(kind="env", entry=entry.format(tmp_path), concurrency=1, block_s=1.0)
    assert list(list_required_paths(start).values()) == [path.format(tmp_path) for path in expected]


def test_spans_of_another_clock_are_moved_to_ours() -> None:
    span = Span(lane="engine", name="generate", start_s=100.5, end_s=101.0)
    assert shifted_back([span], 100.0) == [Span(lane="engine", name="generate", start_s=0.5, end_s=1.0)]
    assert shifted_back([span], 0.0) == [span]
