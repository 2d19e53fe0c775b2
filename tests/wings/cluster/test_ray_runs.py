"""Whole runs on a Ray cluster of three nodes: they learn, and continue when a node is lost."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.run.session.killed_runs import SLOW_REWARD
from tests.run.session.runs import Running, make_run, tiny_model, verb
from tests.run.session.serial import same_learner
from tests.venvs import ROOT, python_with_ray
from tests.wings.cluster.ray_nodes import DEADLINE_S, Nodes, environment, ray_nodes
from tests.wings.sandboxes.task_files import HARBOR, write_task
from tests.wings.sandboxes.test_harness import AGENT
from tests.wings.sandboxes.test_whole_run import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ON_RAY = {"launch": {"kind": "ray"}, "sync": {"transport": "http"}}


def test_every_part_is_shown_its_own_gpus_and_none_of_another() -> None:
    """Eight engines of one GPU, then two of four, beside four ranks of the learner, on two nodes of eight GPUs that
    exist for Ray alone."""
    made = subprocess.run(
        [str(python_with_ray()), "-m", "tests.wings.cluster.ray_gpus"],
        capture_output=True, text=True, timeout=400, check=False, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    single, gangs = json.loads(made.stdout.splitlines()[-1])
    for placed, widths in ((single, [1] * 12), (gangs, [1] * 4 + [4] * 2)):
        owned = [(node, gpu) for node, shown in placed.values() for gpu in shown.split(",")]
        assert len(set(owned)) == len(owned) == sum(widths)
        assert sorted(len(shown.split(",")) for _, shown in placed.values()) == sorted(widths)
    assert len({shown for _, shown in single.values()}) > 1  # not the first GPU of the node for all of them


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(3) as made:
        yield made


def run_file(directory: Path, model: Path, **sections: Any) -> Path:
    path = make_run(directory, model, **{**ON_RAY, **sections})
    path.write_text(path.read_text().replace("engine_threads = 1\n", "").replace("learner_threads = 1\n", ""))
    return path


def on(nodes: Nodes, *more: str) -> list[str]:
    settings = (f"launch.ray.address={nodes.address}", "launch.ray.placement=spread", "launch.start_timeout_s=240")
    return [argument for setting in (*settings, *more) for argument in ("--set", setting)]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def books(run_dir: Path, nodes: Nodes) -> dict[str, Any]:
    done = nodes.headrace("ledger", run_dir, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_balanced(found: dict[str, Any]) -> None:
    assert found["holds"]
    for fates in found["conservation"].values():
        assert fates["submitted"] == fates["trained"] + sum(fates["dropped"].values()) + fates["in_flight"]


@pytest.mark.parametrize("transport", ["http", "group"])
def test_a_synchronous_run_on_three_nodes_gives_the_weights_of_one_on_this_machine(
    nodes: Nodes, tmp_path: Path, model_dir: Path, transport: str
) -> None:
    flow = {"groups_per_step": 2, "group_size": 4, "max_age": 0}
    path = run_file(tmp_path / "far", model_dir, flow=flow, sync={"transport": transport})
    done = nodes.headrace("train", path, *on(nodes, "engine.count=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    far = tmp_path / "far" / "run"
    parts = read(far / "status.json")["components"]
    assert {part["role"] for part in parts if part["node"]} == {"engine-0", "engine-1", "learner", "scorer-0"}
    near = make_run(tmp_path / "near", model_dir, flow=flow)
    verb("train", near, "--set", "observe.view=none")
    assert same_learner(far / "checkpoints" / "step-000003", tmp_path / "near" / "run" / "checkpoints" / "step-000003")
    assert_balanced(books(far, nodes))


@pytest.mark.parametrize("kind", ["shell", "harness"])
def test_agents_work_in_sandboxes_of_other_nodes(nodes: Nodes, tmp_path: Path, kind: str) -> None:
    """Two workers on two nodes; the programs of others reach the endpoint of their episode, wherever that is."""
    for number in range(3):
        write_task(tmp_path / f"tasks/{number}", HARBOR, **{"environment/agent.py": AGENT})
    options = ["action=line", "commands=2", "system=Go."]
    if kind == "harness":
        options = [f"command={nodes.python} agent.py", "on_exit_code=grade", f'readable=["{nodes.python.parents[1]}"]']
    flow = {"groups_per_step": 2, "group_size": 2}
    env = {"kind": kind, "workers": 2, "processes": 2048}
    engine = {"max_new_tokens": 6, "max_sequences": 16, "max_context": 1024}
    data = {"path": str(tmp_path / "tasks")}
    path = run_file(tmp_path / "far", make_model(tmp_path), flow=flow, env=env, engine=engine, data=data)
    given = [f"env.options.{option}" for option in ("image=machine", *options)]
    done = nodes.headrace("train", path, *on(nodes, *given))
    assert done.returncode == 0, done.stdout + done.stderr
    far = tmp_path / "far" / "run"
    where = {part["role"]: part["node"] for part in read(far / "status.json")["components"]}
    assert all(where[f"environment-{number}"] for number in range(2)), where
    found = books(far, nodes)
    assert_balanced(found)
    assert found["conservation"]["groups"]["trained"] >= 6


def node_of(run_dir: Path, role: str) -> psutil.Process:
    """The raylet of the node on which a part runs."""
    (pid,) = [part["pid"] for part in read(run_dir / "status.json")["components"] if part["role"] == role]
    return next(each for each in psutil.Process(pid).parents() if "raylet" in each.name())


def lose(raylet: psutil.Process) -> None:
    """As when a machine goes: all that runs there, at once."""
    for process in (raylet, *raylet.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def under_way(nodes: Nodes, path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has made five steps."""
    command = nodes.command("train", path, *on(nodes, "flow.max_idle_batches=100000", *more))
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        try:
            running = Running(process)
            running.until_step(5)
            yield process
        finally:
            process.kill()


LOST = r"was lost with its (node|actor).*; "  # whichever Ray notices first
WORDS = {"engine": LOST + "it serves again after", "learner": LOST + "the run continues from step"}


@pytest.mark.parametrize("role", WORDS)
def test_a_node_that_is_lost_in_the_middle_of_a_run_costs_nothing(
    nodes: Nodes, tmp_path: Path, model_dir: Path, role: str
) -> None:
    run_dir = tmp_path / "run"
    path = run_file(tmp_path, model_dir, run={"dir": "run", "steps": 500, "checkpoint_every": 50})
    nodes.tell("add")  # so that there is room for what the lost one had
    with under_way(nodes, path, "launch.learner_restarts=1") as process:
        lose(node_of(run_dir, role))
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert re.search(WORDS[role], said), said
    summary = read(run_dir / "summary.json")
    assert (summary["status"], summary["steps"]) == ("finished", 500)
    found = books(run_dir, nodes)
    assert_balanced(found)
    assert found["conservation"]["groups"]["trained"] == 1000


def test_engine_is_added_in_the_free_resources_of_the_cluster_and_removed_and_one_without_room_is_refused(
    nodes: Nodes, tmp_path: Path, model_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    slow = SLOW_REWARD.replace("0.03", "0.1")  # nobody reads its lines meanwhile, and a pipe holds some hundreds
    path = run_file(tmp_path, model_dir, reward=slow, run={"dir": "run", "steps": 100_000})
    with under_way(nodes, path) as process:
        refused = nodes.headrace("engines", run_dir, "add", "50")
        assert refused.returncode == 1
        assert "the cluster has no room for 50 more engines, which ask for 1 CPU each; it has" in refused.stderr
        added = json.loads(verb("engines", run_dir, "add", "--json"))
        assert (added["state"], added["changed"]) == ("done", ["engine-1"])
        assert [bool(each["node"]) for each in added["engines"]] == [True, True]
        for name in ("engine", "engine-1"):  # the first has a bundle, which it gets back
            removed = json.loads(verb("engines", run_dir, "remove", name, "--json"))
            assert [each["state"] for each in removed["engines"]] == ["serving"]
            back = json.loads(verb("engines", run_dir, "add", "--json"))
            assert back["changed"] == [name]
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    found = books(run_dir, nodes)
    assert_balanced(found)
    assert found["conservation"]["groups"]["dropped"] == {}


def test_two_additions_at_once_share_the_room_and_a_resumed_run_has_the_engines_of_its_file_and_says_so(
    tmp_path: Path, model_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    slow = SLOW_REWARD.replace("0.03", "0.1")
    path = run_file(tmp_path, model_dir, reward=slow, run={"dir": "run", "steps": 100_000})
    with ray_nodes(3) as nodes:
        with under_way(nodes, path) as process:
            adding = [
                subprocess.Popen(
                    nodes.command("engines", run_dir, "add"), stderr=subprocess.PIPE, text=True, env=environment()
                )
                for _ in range(2)
            ]
            refusals = [each.communicate(timeout=DEADLINE_S)[1] for each in adding]
            assert sorted(each.returncode for each in adding) == [0, 1]
            assert any("the cluster has no room for " in said for said in refusals)
            assert read(run_dir / "status.json")["engines"] == 2
            process.kill()
            process.wait()
        command = nodes.command("train", path, *on(nodes, "flow.max_idle_batches=100000"), "--resume")
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment(), **pipes) as resumed:
            life = Running(resumed)
            life.until_step()
            resumed.send_signal(signal.SIGINT)
            life.rest(DEADLINE_S)
        assert "the run had 2 engines when it ended, and begins again with engine.count=1" in "".join(life.lines)
        assert resumed.returncode == 0
        found = books(run_dir, nodes)
    assert_balanced(found)
    assert found["conservation"]["groups"]["dropped"] == {}


def test_ranks_of_a_learner_are_actors_on_several_nodes(nodes: Nodes, tmp_path: Path, model_dir: Path) -> None:
    nodes.tell("add")
    path = run_file(tmp_path, model_dir)
    done = nodes.headrace("train", path, *on(nodes, "learner.parallel.data=2", "sync.transport=group"))
    assert done.returncode == 0, done.stdout + done.stderr
    roles = [part["role"] for part in read(tmp_path / "run" / "status.json")["components"] if part["node"]]
    assert {"learner", "learner-1"} <= set(roles)


def test_a_cluster_without_room_is_told_of_with_who_needs_what(nodes: Nodes, tmp_path: Path, model_dir: Path) -> None:
    path = run_file(tmp_path, model_dir)
    wanted = on(nodes, "launch.start_timeout_s=5", "launch.ray.learner.cpus=64")
    done = nodes.headrace("train", path, *wanted)
    assert done.returncode == 1
    assert "learner 64 CPUs; engine 1 CPU; it has" in done.stderr
    assert "ask for less in [launch.ray]" in done.stderr


def test_a_cluster_that_is_not_there_is_told_of(nodes: Nodes, tmp_path: Path, model_dir: Path) -> None:
    path = run_file(tmp_path, model_dir)
    done = nodes.headrace("train", path, "--set", "launch.ray.address=127.0.0.1:1")
    assert done.returncode == 1
    assert "leads to no Ray cluster" in done.stderr
