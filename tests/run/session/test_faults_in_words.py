"""What dies, hangs or runs out ends the program within its deadline, and is told with the loops, their waits and a
remedy. (A full disk has a file of its own: ``test_full_disk.py``.)"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from tests.run.session.runs import PROGRAM, components, make_run, running, wait_gone

SLOW_REWARD = """
    import time

    def reward(completion):
        time.sleep(0.05)
        return sum(character in "01234" for character in completion) / 4
"""
DEADLINE_S = 10.0
"""Of a busy machine, beyond the deadline that is set."""
START_S = 200.0
"""The same, to start and come to its end."""
PROGRESS = r"reading \S+ and loading what a run needs \.\.\.\nchecking the settings, .* \.\.\.\n"
"""What a program says before it starts."""


def a_run(directory: Path, model: Path, reward: str, **sections: dict) -> Path:
    return make_run(
        directory,
        model,
        reward=reward,
        flow={"groups_per_step": 2, "group_size": 4, "max_failed_groups": 2, **sections.pop("flow", {})},
        env={"reward": "reward.py:reward", **sections.pop("env", {})},
        run={"dir": "run", "steps": 200, **sections.pop("run", {})},
        **sections,
    )


def assert_told(words: str, problem: str, remedy: str, *waits: str) -> None:
    """Problem, one line for each loop with what it was at, remedy; nothing else, and before it only its progress."""
    assert re.match(rf"(?:{PROGRESS})?error: {problem}", words, re.MULTILINE), words
    for loop in ("rollout", "scoring", "learner", "sync"):
        assert re.search(rf"^  {loop} +(waits|busy) \d+ s (for|with) ", words, re.MULTILINE), words
    for wait in waits:
        assert re.search(wait, words), words
    assert re.search(rf"^remedy: .*{remedy}", words, re.MULTILINE), words
    assert "Traceback" not in words


@pytest.mark.slow
def test_an_engine_that_is_killed_ends_the_run_within_seconds(tmp_path: Path, model_dir: Path) -> None:
    run_file = a_run(tmp_path, model_dir, SLOW_REWARD, launch={"engine_restarts": 0})
    words, _ = struck(run_file, "engine", signal.SIGKILL, within_s=DEADLINE_S)
    assert_told(words, r"engine \(pid \d+\) was killed by SIGKILL", "--resume", r"waits \d+ s for .*, which .* brings")


@pytest.mark.slow
def test_an_engine_that_stands_still_ends_the_run_after_the_stall_timeout(tmp_path: Path, model_dir: Path) -> None:
    run_file = a_run(tmp_path, model_dir, SLOW_REWARD, run={"stall_timeout_s": 5.0})
    words, seconds = struck(run_file, "engine", signal.SIGSTOP, within_s=5.0 + DEADLINE_S)
    assert seconds > 4.0
    assert_told(
        words,
        r"nothing has moved for \d+ s \(run.stall_timeout_s=5\); .* has been owed by .* for \d+ s",
        "raise run.stall_timeout_s",
        "which engine brings|owed by engine",
        "unblocked by learner, engine",
    )


STRICKEN = """
import os
import signal

from headrace.base.types.messages.controller import Published
from headrace.base.types.messages.engine import Stage
from headrace.launch.clients import EngineClient, LearnerClient
from headrace.run.cli import main

send, route = EngineClient.send, LearnerClient._route

def lost(client, message):
    if not isinstance(message, Stage) or message.update.version != 2:
        send(client, message)

def stopped(client, message):
    if isinstance(message, Published) and client.working is not None:  # it reports its work once a second
        os.kill(client.ready.result().pid, signal.SIGSTOP)  # as if it had been stopped a moment before
    else:
        route(client, message)

EngineClient.orders_address = ""  # as on another machine, where the controller passes the weights on
{fault}
main()
"""


@pytest.mark.slow
def test_engine_that_gets_no_weights_ends_a_run_without_restarts_with_what_both_sides_did_last(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = a_run(tmp_path, model_dir, SLOW_REWARD, launch={"engine_restarts": 0}, sync={"deadline_s": 4.0})
    words = ended(run_file, program=STRICKEN.format(fault="EngineClient.send = lost"))
    assert_told(
        words,
        r"engine has not answered for 4 s: stage version 2, which the learner has published; it reported last: "
        r"version 1 in use, \d+ steps made, \d+ sequences running: it was ended",
        "--resume.*look at logs/engine.log in the run directory; if the machine is only slow, raise sync.deadline_s",
        r"sync +waits \d+ s for the staging of version 2, which engine brings",
    )


@pytest.mark.slow
def test_learner_that_is_stopped_in_a_publication_ends_the_run_with_what_it_did_last(
    tmp_path: Path, model_dir: Path
) -> None:
    run_file = a_run(tmp_path, model_dir, SLOW_REWARD, run={"stall_timeout_s": 1.0})
    words = ended(run_file, program=STRICKEN.format(fault="LearnerClient._route = stopped"))
    assert_told(
        words,
        r"nothing has moved for \d+ s \(12 times run.stall_timeout_s=1, because a process is stopped\).*; learner "
        r"\(pid (\d+)\) is stopped \(SIGSTOP; kill -CONT \1 lets it continue\), for \d+ s; it reported last: .+, after "
        r"\d+ units of work$",
        "look at the part that owes an answer: its log is in the run directory",
        r"sync +waits \d+ s for the announcement of version \d+, which learner brings",
    )


@pytest.mark.slow
def test_a_reward_function_that_kills_its_worker_every_time_ends_the_run(tmp_path: Path, model_dir: Path) -> None:
    patient = {"max_failed_groups": 100}
    words = ended(a_run(tmp_path, model_dir, "import os\ndef reward(completion): os._exit(3)", flow=patient))
    assert_told(
        words,
        r"8 scoring workers died one after the other; the last: scorer-\d+ \(pid \d+\) ended with exit code 3",
        "the reward function kills its process: look at logs/",
        r"learner +waits \d+ s for a batch of 2 scored groups, which scoring brings",
    )


@pytest.mark.slow
def test_groups_that_all_fail_because_the_reward_function_kills_its_worker_end_the_run(
    tmp_path: Path, model_dir: Path
) -> None:
    words = ended(a_run(tmp_path, model_dir, "import os\ndef reward(completion): os._exit(3)"))
    assert_told(
        words,
        "2 groups in a row were dropped because their episodes failed; the last: reward_crashed: the process that "
        "computed it died, alone too",
        "fix the environment or the reward function .*--resume",
        r"learner +waits \d+ s for a batch of 2 scored groups, which scoring brings",
    )


@pytest.mark.slow
def test_a_reward_function_that_never_returns_ends_the_run(tmp_path: Path, model_dir: Path) -> None:
    hangs = "import threading\ndef reward(completion): threading.Event().wait()"
    words = ended(a_run(tmp_path, model_dir, hangs, env={"reward_timeout_s": 1.0}))
    assert_told(
        words,
        "2 groups in a row were dropped because their episodes failed; the last: reward_timeout: no reward for 1 s",
        "fix the environment or the reward function .*--resume",
        r"learner +waits \d+ s for a batch of 2 scored groups, which scoring brings",
    )


@pytest.mark.slow
def test_a_dataset_that_is_used_up_ends_the_run_with_what_it_has_learned(tmp_path: Path, model_dir: Path) -> None:
    run_file = a_run(tmp_path, model_dir, SLOW_REWARD, data={"path": "rows.jsonl", "epochs": 1}, flow={"max_age": 0})
    with running("train", run_file) as life:
        assert life.rest(START_S) == ""
        assert life.process.returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    for said in ("data.epochs is used up after 6 of 200 steps", "raise data.epochs and --resume to continue"):
        assert said in summary["cause"]
        assert said in "".join(life.lines)


def struck(run_file: Path, role: str, blow: signal.Signals, *, within_s: float) -> tuple[str, float]:
    """A part of a run that is under way gets a signal: what the program says, and after how many seconds."""
    clock = RealClock()
    with running("train", run_file) as life:
        life.until_step(2)
        pids = components(run_file.parent / "run")
        struck_s = clock.now()
        os.kill(pids[role], blow)
        words = life.rest()
        seconds = clock.now() - struck_s
        assert life.process.returncode == 1
    assert seconds < within_s
    assert wait_gone(list(pids.values()), timeout_s=0.0) == []
    summary = json.loads((run_file.parent / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["cause"].splitlines()[1] in words, "the summary holds the loops, too"
    return words, seconds


def ended(run_file: Path, program: str = PROGRAM) -> str:
    """What a program says that ends by itself."""
    with running("train", run_file, program=program) as life:
        words = life.rest(START_S)
        assert life.process.returncode == 1
    assert json.loads((run_file.parent / "run" / "summary.json").read_text())["status"] == "failed"
    return words


pytestmark = pytest.mark.timeout(240)
