"""Real runs with several engines, and with engines that are killed while the run is still running."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.run.session import load_config, train
from headrace.run.session.directory import read_status
from tests.run.session.killed_runs import FLOW, LONG, SLOW_REWARD, ended
from tests.run.session.runs import Running, components, first_words, make_run, running, shared_buffers, verb, wait_gone
from tests.run.session.serial import SerialLoop, same_learner

pytestmark = pytest.mark.timeout(300)


def kill(life: Running, run_dir: Path, role: str, *, after: int) -> int:
    """The process id it had."""
    life.until_step(after)
    pid = components(run_dir)[role]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_run_whose_only_engine_is_killed_goes_on_and_says_what_happened(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine=LONG,
        flow={**FLOW, "max_age": 0},
        run={"dir": "run", "steps": 10, "checkpoint_every": 10},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        pid = kill(life, run_dir, "engine", after=3)
        assert life.rest(120.0) == first_words(run_file)
    (recovery,) = ended(run_dir, 10)["recoveries"]
    assert recovery.startswith(f"engine (pid {pid}) was killed by SIGKILL (by hand, or because memory ran out); it ")
    said = "".join(life.lines)
    assert "; it is started again, its " in said
    assert "; it serves again after " in said
    status = json.loads(verb("status", run_dir, "--json"))
    assert {part["role"]: part["restarts"] for part in status["components"]}["engine"] == 1
    assert not shared_buffers(life.process.pid)
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(run_dir / "checkpoints" / "step-000010", tmp_path / "serial"), "bit for bit as if undisturbed"
    with pytest.raises(ConfigError, match=r"a part of it was started again while it ran \(engine \(pid"):
        train(run_file, overrides=[f"run.dir={tmp_path / 'again'}"], replay=run_dir)


@pytest.mark.parametrize(
    ("transport", "codec"),
    [
        ("shm", "full"),
        pytest.param("shm", "delta", marks=pytest.mark.slow),
        pytest.param("http", "full", marks=pytest.mark.slow),
        pytest.param("files", "delta", marks=pytest.mark.slow),
        pytest.param("group", "full", marks=pytest.mark.slow),
    ],
)
def test_run_with_two_engines_learns_and_outlives_the_death_of_one(
    tmp_path: Path, model_dir: Path, transport: str, codec: str
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine={**LONG, "count": 2},
        flow={**FLOW, "max_age": 2},
        sync={"transport": transport, "codec": codec, "deadline_s": 20.0},
        run={"dir": "run", "steps": 30},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        pid = kill(life, run_dir, "engine-1", after=4)
        assert life.rest(120.0) == first_words(run_file)
    summary = ended(run_dir, 30)
    assert summary["max_token_age"] <= 2
    assert f"engine-1 (pid {pid}) was killed by SIGKILL" in "".join(life.lines)
    assert summary["reward_last"] > summary["reward_first"] + 0.1


def test_two_engines_without_age_train_what_a_plain_serial_loop_trains(tmp_path: Path, model_dir: Path) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        engine={**LONG, "count": 2},
        flow={**FLOW, "max_age": 0},
        run={"dir": "run", "steps": 6, "checkpoint_every": 6},
    )
    summary = train(run_file, overrides=["observe.view=none"])
    assert (summary.max_token_age, summary.steps, list(summary.age_histogram)) == (0, 6, [0])
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(tmp_path / "run" / "checkpoints" / "step-000006", tmp_path / "serial")
    with pytest.raises(ConfigError, match=r"engine\.count=2, and which engine served what is not recorded"):
        train(run_file, overrides=[f"run.dir={tmp_path / 'again'}"], replay=tmp_path / "run")


def test_run_gets_two_engines_and_loses_one_and_trains_what_a_plain_serial_loop_trains(
    tmp_path: Path, model_dir: Path
) -> None:
    steps = 50
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine=LONG,
        flow={**FLOW, "max_age": 0, "max_idle_batches": 100_000},
        run={"dir": "run", "steps": steps, "checkpoint_every": steps},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        life.until_step(2)
        added = json.loads(verb("engines", run_dir, "add", "2", "--json"))
        assert (added["state"], added["changed"]) == ("done", ["engine-1", "engine-2"])
        assert [(each["name"], each["state"]) for each in added["engines"]] == [
            ("engine", "serving"), ("engine-1", "serving"), ("engine-2", "serving"),
        ]  # fmt: skip
        status = read_status(run_dir)
        assert status is not None
        assert status.engines == 3, "at once, so that it is known after a kill"
        pids = {each["name"]: each["pid"] for each in added["engines"]}
        life.until_step(life.until_step() + 3)
        removed = json.loads(verb("engines", run_dir, "remove", "engine-1", "--json"))
        assert [each["name"] for each in removed["engines"]] == ["engine", "engine-2"]
        assert not wait_gone([pids["engine-1"]], 1.0)
        assert "engine-1" not in components(run_dir), "the status is renewed at once"
        until_said(life, "engine-1 was removed")
        assert life.rest(120.0) == first_words(run_file)
    summary = ended(run_dir, steps)
    assert (summary["max_token_age"], summary["recoveries"]) == (0, [])
    said = "".join(life.lines)
    assert re.search(r"engine-1 was added: it serves after [\d.]+ s; \d engines? serves? \(cores: engine 1, ", said)
    assert re.search(r"engine-1 was removed(; \d+ of its sequences continue on other engines)?; 2 engines serve", said)
    assert not shared_buffers(life.process.pid)
    SerialLoop(load_config(run_file, ["engine.flush_tokens=64"]), tmp_path / "buffer").train(tmp_path / "serial")
    assert same_learner(run_dir / "checkpoints" / f"step-{steps:06}", tmp_path / "serial"), "bit for bit"
    with pytest.raises(ConfigError, match=r"its engines were changed while it ran \(engine-[12] was added"):
        train(run_file, overrides=[f"run.dir={tmp_path / 'again'}"], replay=run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "codec"), [("group", "full"), ("http", "delta"), ("files", "delta")])
def test_engines_that_weights_are_sent_to_come_and_go_again_and_again_and_nothing_is_lost(
    tmp_path: Path, model_dir: Path, transport: str, codec: str
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine=LONG,
        flow={**FLOW, "max_age": 1, "max_idle_batches": 100_000},
        sync={"transport": transport, "codec": codec, "deadline_s": 20.0},
        launch={"engine_threads": 1, "learner_threads": 1, "rollouts": 1},
        run={"dir": "run", "steps": 100_000},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file) as life:
        life.until_step(2)
        for number in range(4):
            added = json.loads(verb("engines", run_dir, "add", "--json"))
            assert added["changed"] == ["engine" if number % 2 else "engine-1"]
            life.until_step(life.until_step() + 2)
            gone = "engine-1" if number % 2 else "engine"
            removed = json.loads(verb("engines", run_dir, "remove", gone, "--drain", str(number % 3), "--json"))
            assert [each["state"] for each in removed["engines"]] == ["serving"]
            life.until_step(life.until_step() + 2)
        life.process.send_signal(signal.SIGINT)
        assert life.rest(120.0) == first_words(run_file)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["recoveries"]) == ("stopped", [])
    assert summary["max_token_age"] <= 1
    for books in summary["ledger"].values():
        assert books["dropped"] == {}
        assert books["submitted"] == books["trained"] + books["in_flight"]


def strike(life: Running, run_dir: Path, role: str, how: signal.Signals) -> None:
    """As soon as it is ready."""
    step = 0
    while True:
        step = life.until_step(step + 1)
        parts = json.loads((run_dir / "status.json").read_text())["components"]
        pids = [part["pid"] for part in parts if part["role"] == role and part["state"] == "ready"]
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, how)
                return


@pytest.mark.slow
def test_three_engines_that_are_killed_or_stand_still_again_and_again_lose_nothing(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine={**LONG, "count": 3},
        flow={**FLOW, "max_age": 2},
        learner={"lr": 0.0},
        sync={"interrupt": "drain"},
        launch={"engine_restarts": 100, "engine_silence_s": 4.0, "engine_threads": 1, "learner_threads": 1},
        run={"dir": "run", "steps": 100_000},
    )
    run_dir, kills = tmp_path / "run", 9
    with running("train", run_file) as life:
        life.until_step(4)
        learner = components(run_dir)["learner"]
        for number in range(kills):
            how = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
            strike(life, run_dir, f"engine-{number % 3}", how)
        life.until_step(life.until_step() + 20)
        assert components(run_dir)["learner"] == learner, "it never stopped"
        life.process.send_signal(signal.SIGINT)
        assert life.rest(120.0) == first_words(run_file)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["max_token_age"] <= 2
    for books in summary["ledger"].values():
        assert books["dropped"] == {}
        assert books["submitted"] == books["trained"] + books["in_flight"]
    said = "".join(life.lines)
    assert said.count("; it is started again, its ") >= kills - 1, "the last may be silent for a while yet"
    noticed = ("has said nothing for 4 s and has", "has owed an answer for 4 s", "has not answered")
    assert any(words in said for words in noticed)


CABLED = """
import signal
from urllib.parse import urlsplit

import msgspec

from headrace.run.cli import main
from headrace.launch.clients.engine import EngineClient
from tests.base.net.cables import Cable

cables = {}
own, stage = EngineClient.weights_address.fget, EngineClient.stage

def through(client):
    address = own(client)
    if client.name == "engine-0":
        return address
    if address not in cables:
        cables[address] = Cable(("127.0.0.1", urlsplit(address).port))
    return "http://127.0.0.1:" + str(cables[address].address[1])

async def staged(client, update):
    to = tuple(own(client) if address == through(client) else address for address in update.to)
    return await stage(client, msgspec.structs.replace(update, to=to))

EngineClient.weights_address, EngineClient.stage = property(through), staged
EngineClient.orders_address = ""  # the cable stands for another machine, to which the controller passes orders on
signal.signal(signal.SIGUSR1, lambda *_: [cable.cut() for cable in cables.values()])
signal.signal(signal.SIGUSR2, lambda *_: [cable.fix() for cable in cables.values()])
main()
"""


def until_said(life: Running, words: str) -> None:
    while words not in "".join(life.lines):
        life.until_step()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["full", "delta"])
def test_run_goes_on_without_an_engine_that_only_the_learner_cannot_reach_and_takes_it_back(
    tmp_path: Path, model_dir: Path, codec: str
) -> None:
    run_file = make_run(
        tmp_path,
        model_dir,
        reward=SLOW_REWARD,
        engine={**LONG, "count": 2},
        flow={**FLOW, "max_age": 2, "max_idle_batches": 100_000},
        sync={"transport": "http", "codec": codec, "deadline_s": 8.0},
        run={"dir": "run", "steps": 100_000},
    )
    run_dir = tmp_path / "run"
    with running("train", run_file, program=CABLED) as life:
        life.until_step(5)
        parts = components(run_dir)
        life.process.send_signal(signal.SIGUSR1)
        until_said(life, "engine-1 gets no new weights: version")
        life.until_step(life.until_step() + 20)
        assert "serves again" not in "".join(life.lines)
        life.process.send_signal(signal.SIGUSR2)
        until_said(life, "it serves again after")
        life.until_step(life.until_step() + 10)
        assert components(run_dir) == parts, "nothing was started again"
        life.process.send_signal(signal.SIGINT)
        assert life.rest(120.0) == first_words(run_file)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["max_token_age"] <= 2
    assert len(summary["recoveries"]) == 1
    for books in summary["ledger"].values():
        assert books["dropped"] == {}
        assert books["submitted"] == books["trained"] + books["in_flight"]
