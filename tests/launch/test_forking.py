"""Parts are forked from a process that has done nothing but import; whatever dies, nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.launch import forking as module
from headrace.launch.channel import ControllerChannel, local_addresses
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients.peer import Peer
from headrace.launch.config import LaunchConfig
from headrace.launch.forking import EXIT_UNKNOWN, MODULE, ForkServer, ForkServerLost, keep_fork_server, open_fork_server
from headrace.launch.hosts import EXIT_REPORTED
from headrace.launch.local_process import LocalStarter, describe_exit
from headrace.launch.starts import Briefing, EngineStart, ScorerStart, write_briefing
from tests.launch.forks import part
from tests.launch.workers import TOKEN, is_alive, site
from tests.run.session.runs import components, first_words, make_run, running, tiny_model, wait_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")

SLOW_REWARD = """
import time

def reward(completion: str) -> float:
    time.sleep(0.05)
    return float(len(completion) % 3)
"""


@pytest.fixture(scope="module", autouse=True)
def no_kept_server(kept_fork_server: None) -> Iterator[None]:
    """Outside the context in which the other tests share one server, as in a program that makes one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_kept", [])
        yield


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """One that is ready in a moment; it reaps what it forks, and is gone after the test."""
    monkeypatch.setattr(module, "MODULE", "tests.launch.light_forks")
    with open_fork_server(LaunchConfig()) as server:
        assert server is not None
        yield server
    assert not is_alive(server.pid)


@pytest.fixture(scope="module")
def whole() -> Iterator[ForkServer]:
    """The one that runs have."""
    with open_fork_server(LaunchConfig()) as server:
        assert server is not None
        yield server


def brief(directory: Path, name: str, *, fit: bool = True) -> None:
    """What a part is told: to grade with a function, or, not ``fit``, nothing that it could read."""
    path = directory / "reward.py"
    path.write_text("def reward(completion: str) -> float:\n    return 1.0\n")
    start = ScorerStart(reward={"kind": "function", "ref": f"{path}:reward"})
    write_briefing(directory / f"{name}.json", Briefing(start=start, addresses=local_addresses(directory, name)))
    if not fit:
        (directory / f"{name}.json").write_text("{}")


def gone(pids: list[int], timeout_s: float = 20.0) -> bool:
    """Whether these processes end."""
    waiting = [psutil.Process(pid) for pid in pids if is_alive(pid)]
    return not psutil.wait_procs(waiting, timeout_s)[1]


def num_descriptors(pid: int) -> int:
    """Of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_fork_is_a_session_of_its_own_with_its_own_log_and_name(light: ForkServer, tmp_path: Path) -> None:
    async def main() -> None:
        brief(tmp_path, "scorer-7")
        with light.listening(pytest.fail):
            async with asyncio.timeout(30), part(light, tmp_path, "scorer-7") as made:
                assert os.getsid(made.pid) == os.getpgid(made.pid) == made.pid
                assert os.readlink(f"/proc/{made.pid}/fd/1") == os.readlink(f"/proc/{made.pid}/fd/2")
                assert os.readlink(f"/proc/{made.pid}/fd/1") == str(tmp_path / "scorer-7.log")
                assert psutil.Process(made.pid).cmdline()[1:-1] == [
                    "-m", "headrace.launch.hosts.main", str(tmp_path), "scorer-7",
                ]  # fmt: skip
                assert psutil.Process(light.pid).cmdline()[-1] == f"headrace-{os.getpid()}-"
                assert made.returncode is None

    asyncio.run(main())


def test_two_forks_do_not_draw_the_same() -> None:
    code = (
        "import os, sys; from headrace.launch.hosts import forkserver as f; import numpy as np; np.random.seed(1);"
        "pid = os.fork();"
        "pid or (f._reseed_numpy(), print(np.random.rand(), flush=True), os._exit(0));"
        "os.waitpid(pid, 0); print(np.random.rand())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    one, other = said.split()
    assert one != other


def test_how_a_fork_ended_is_told_exactly(light: ForkServer, tmp_path: Path) -> None:
    async def main() -> None:
        brief(tmp_path, "unfit", fit=False)
        brief(tmp_path, "killed")
        with light.listening(pytest.fail):
            async with asyncio.timeout(30), part(light, tmp_path, "unfit") as unfit:
                assert await unfit.wait() == 1
                assert "ValidationError" in (tmp_path / "unfit.log").read_text()
            async with asyncio.timeout(30), part(light, tmp_path, "killed") as killed:
                os.kill(killed.pid, signal.SIGKILL)  # it has hardly begun to import
                assert await killed.wait() == -signal.SIGKILL == killed.returncode
            async with asyncio.timeout(30):
                async with part(light, tmp_path, "killed") as left:
                    pass
                assert await left.wait() == -signal.SIGKILL  # by the pipe that was closed

    asyncio.run(main())


def test_fifty_restarts_leave_no_descriptor_and_no_zombie(light: ForkServer, tmp_path: Path) -> None:
    async def main() -> None:
        brief(tmp_path, "unfit", fit=False)
        counts = []
        with light.listening(pytest.fail):
            for _ in range(50):
                async with asyncio.timeout(30), part(light, tmp_path, "unfit") as made:
                    os.kill(made.pid, signal.SIGKILL)
                    await made.wait()
                counts.append((num_descriptors(os.getpid()), num_descriptors(light.pid)))
        assert counts[1] == counts[-1]
        assert psutil.Process(light.pid).children() == []

    asyncio.run(main())


def test_a_fork_outlives_its_server_and_its_end_is_seen(light: ForkServer, tmp_path: Path) -> None:
    told: list[str] = []

    async def main() -> None:
        heard = asyncio.Event()

        def tell(words: str) -> None:
            told.append(words)
            heard.set()

        brief(tmp_path, "scorer-0")
        with light.listening(tell):
            async with asyncio.timeout(30), part(light, tmp_path, "scorer-0") as made:
                os.kill(light.pid, signal.SIGKILL)
                await heard.wait()
                assert light.lost
                assert made.returncode is None
                assert is_alive(made.pid)
                os.kill(made.pid, signal.SIGKILL)
                assert await made.wait() == EXIT_UNKNOWN
            with pytest.raises(ForkServerLost):
                await light.fork("scorer-1", str(tmp_path), {}, (0, 0))

    asyncio.run(main())
    assert told == [
        f"the fork server (pid {light.pid}) was killed by SIGKILL: its parts live on, later ones are new interpreters"
    ]
    assert "is not known" in describe_exit(EXIT_UNKNOWN)


def test_a_server_that_cannot_import_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MODULE", "tests.launch.no_such_module")
    told: list[str] = []

    async def main() -> None:
        with open_fork_server(LaunchConfig()) as server:
            assert server is not None
            with server.listening(told.append), pytest.raises(ForkServerLost):
                async with asyncio.timeout(30), part(server, tmp_path, "scorer-0"):
                    pass

    asyncio.run(main())
    assert len(told) == 1
    assert "ended with exit code 1" in told[0]
    assert "no_such_module" in told[0]


def test_a_server_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MODULE", "tests.launch.light_forks")
    told: list[str] = []

    async def main() -> None:
        brief(tmp_path, "scorer-0")
        with open_fork_server(LaunchConfig(start_timeout_s=0.2)) as server:
            assert server is not None
            os.kill(server.pid, signal.SIGSTOP)
            with server.listening(told.append), pytest.raises(ForkServerLost):
                async with asyncio.timeout(30), part(server, tmp_path, "scorer-0"):
                    pass

    asyncio.run(main())
    assert "is stopped, and was killed after 0.2 s" in told[0]


def test_a_server_that_is_stopped_is_told_of_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MODULE", "tests.launch.light_forks")
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    told: list[str] = []

    async def main() -> None:
        brief(tmp_path, "scorer-0")
        with open_fork_server(LaunchConfig(start_timeout_s=60)) as server:
            assert server is not None
            pid = server.pid
            os.kill(pid, signal.SIGSTOP)

            def hear(text: str) -> None:
                told.append(text)
                os.kill(pid, signal.SIGCONT)

            with server.listening(hear):
                async with asyncio.timeout(30), part(server, tmp_path, "scorer-0"):
                    pass

    asyncio.run(main())
    assert len(told) == 1
    assert "is stopped (SIGSTOP; kill -CONT" in told[0]


@pytest.mark.parametrize("when", [pytest.param("it imports", marks=pytest.mark.slow), "a part is there"])
def test_nothing_is_left_of_a_controller_that_is_killed(tmp_path: Path, when: str) -> None:
    brief(tmp_path, "scorer-0")
    code = f"""
import asyncio, os, sys
from pathlib import Path
from headrace.launch import forking
from headrace.launch.config import LaunchConfig
from tests.launch.forks import part

async def main():
    if {when == "a part is there"}:
        forking.MODULE = "tests.launch.light_forks"
    with forking.open_fork_server(LaunchConfig()) as server, server.listening(print):
        if {when == "it imports"}:
            print(server.pid, flush=True)
            await asyncio.sleep(60)
        async with part(server, Path({str(tmp_path)!r}), "scorer-0") as made:
            print(server.pid, made.pid, flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == (1 if when == "it imports" else 2)
        controller.kill()

    assert gone(pids)


def test_the_fork_server_has_one_thread_and_asks_for_no_gpu() -> None:
    code = """
import os
import torch
def refuse(*_): raise SystemExit("asked for a GPU")
torch._C._cuda_init = refuse
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = refuse
from headrace.launch.hosts.forkserver import _import
_import()
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1 False\n", "", 0)


def server_of_a_run() -> int:
    """The fork server that a run would have now."""
    with open_fork_server(LaunchConfig()) as server:
        assert server is not None
        return server.pid


def test_runs_fork_from_one_kept_server_until_something_that_parts_inherit_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MODULE", "tests.launch.light_forks")
    brief(tmp_path, "scorer-0")

    async def fork(server: ForkServer) -> None:
        with server.listening(pytest.fail):
            async with asyncio.timeout(30), part(server, tmp_path, "scorer-0") as made:
                assert psutil.Process(made.pid).ppid() == server.pid
                os.kill(made.pid, signal.SIGKILL)
                assert await made.wait() == -signal.SIGKILL

    with keep_fork_server():
        pids = set()
        for timeout_s in (50.0, 40.0):
            with open_fork_server(LaunchConfig(start_timeout_s=timeout_s)) as server:
                assert server is not None
                asyncio.run(fork(server))
                pids.add(server.pid)
                assert server.timeout_s == timeout_s  # that of this run
                beside = server_of_a_run()  # of a run at the same time
                assert beside != server.pid
                assert not is_alive(beside)
        (kept,) = pids
        assert is_alive(kept)
        with monkeypatch.context() as changed:
            changed.setenv("NEW_TO_THE_PARTS", "1")
            assert server_of_a_run() != kept
        with monkeypatch.context() as changed:
            changed.chdir(tmp_path)
            assert server_of_a_run() != kept
        assert server_of_a_run() == kept
        os.kill(kept, signal.SIGKILL)
        assert gone([kept])
        after = server_of_a_run()
        assert after not in {kept, beside}
        assert server_of_a_run() == after
        assert is_alive(after)
    assert not is_alive(after)
    assert server_of_a_run() != after


async def engine(place: Rendezvous, server: ForkServer, model: Path) -> Child:
    """A real one, with the weights of ``model``."""
    start = EngineStart(model={"path": str(model)}, engine={}, max_context=64, num_threads=1, own_weights=True)

    def peer(channel: ControllerChannel) -> Peer:
        return Peer("engine", channel, token=TOKEN, on_spans=place.on_spans)

    return await Child.start(
        place, ProcessSpec(name="engine", start=start, num_threads=1, make_peer=peer), LocalStarter(server)
    )


def test_an_engine_that_cannot_start_says_why_and_its_server_has_one_thread(whole: ForkServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with site(tmp_path, TOKEN) as place, asyncio.timeout(100):
            with whole.listening(pytest.fail):
                child = await engine(place, whole, tmp_path / "nowhere")
                assert psutil.Process(child.pid).ppid() == whole.pid
                assert len(os.listdir(f"/proc/{whole.pid}/task")) == 1
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(child.peer.listen())
                    words = await child.wait_for_death()
                    listening.cancel()
                child.close()
                assert f"ended with exit code {EXIT_REPORTED}" in words
                assert "does not exist" in str(child.peer.reported_error)

    asyncio.run(main())


def test_the_controller_of_a_plain_run_does_without_torch(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, tiny_model(tmp_path / "tiny"))
    code = f"""
import sys
import headrace
summary = headrace.train({str(run_file)!r}, overrides=["run.steps=1", "observe.view=none"])
print(summary.status, "torch" in sys.modules, flush=True)
from headrace.models.load import load_model
from headrace.models.settings import read_config
from headrace.models.config import ModelConfig
path = {str(tmp_path / "tiny")!r}
assert isinstance(read_config(path).dtype, str)
print(str(load_model(ModelConfig(path=path)).dtype), str(read_config(path).dtype))  # and yet it can have torch
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("finished False\ntorch.float32 torch.float32\n", 0), done.stderr


def test_a_run_outlives_its_fork_server_and_an_engine_after_it(tmp_path: Path) -> None:
    run_file = make_run(
        tmp_path, tiny_model(tmp_path / "tiny"), reward=SLOW_REWARD, run={"dir": "run", "steps": 12},
    )  # fmt: skip
    with running("train", run_file) as life:
        life.until_step(2)
        parts = components(tmp_path / "run")
        (server,) = psutil.Process(life.process.pid).children()[:1]
        assert server.cmdline()[2] == MODULE
        assert {psutil.Process(parts[part]).ppid() for part in ("engine", "learner")} == {server.pid}
        server.kill()
        life.until_step(5)
        os.kill(parts["engine"], signal.SIGKILL)
        assert life.rest(240.0) == first_words(run_file)
    said = "".join(life.lines)
    assert f"the fork server (pid {server.pid}) was killed by SIGKILL: its parts live on" in said
    assert f"engine (pid {parts['engine']}) ended; how is not known" in said
    assert "; it serves again after " in said
    assert not wait_gone([server.pid, *parts.values()], 20.0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 12)
